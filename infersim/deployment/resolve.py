"""A description made concrete: the model, the engine's settings on this device, and what its memory holds."""

from dataclasses import replace

from infersim.config.early_exit import EarlyExit
from infersim.config.engine import Engine, ResolvedEngine, resolve
from infersim.config.errors import InputError
from infersim.config.hardware import Hardware, with_kernels_of
from infersim.config.lora import Lora
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.speculation import Speculation
from infersim.cost.attention_kernel import with_attention_kernel
from infersim.cost.drafting import drafter_placement, own_bytes, with_drafter
from infersim.cost.lora import adapter_bytes, with_adapters
from infersim.cost.memory import Memory, longest_sequence, memory_waterfall
from infersim.cost.placement import Placement
from infersim.models.catalog import load_model

from .compatibility import refuse_copies_of_windows, refuse_room_for_nothing
from .lower import Deployment

MAX_LOGITS = 2**20  # rows of the LM head's table


def deploy(
    model_name: str,
    hardware: Hardware,
    precision: Precision,
    parallelism: Parallelism,
    engine: Engine,
    speculation: Speculation | None = None,
    early_exit: EarlyExit | None = None,
    lora: Lora | None = None,
) -> Deployment:
    """Resolve names and defaults, and divide the memory. InputError if the server would not start.

    A max_model_len that nobody asked for is lowered to what the KV cache holds (vLLM: --max-model-len auto).
    """
    model = load_model(model_name)
    resolved = resolve(engine, hardware, model.max_position_embeddings)
    if parallelism.pipeline > 1:
        resolved = _in_turn(resolved)
    hardware = with_kernels_of(hardware, resolved.preset.partition("-")[0])
    hardware = with_attention_kernel(hardware, resolved.attention_kernel)
    placement = Placement(model, hardware, precision, parallelism)
    if engine.max_model_len is None:
        longest = longest_sequence(placement, resolved)
        if longest < resolved.max_model_len:
            origin = {**resolved.origin, "max_model_len": "limited by the KV cache"}
            resolved = replace(resolved, max_model_len=longest, origin=origin)
    memory = memory_waterfall(placement, resolved)
    if resolved.enable_prefix_caching and any(group.window == 1 for group in memory.kv_groups):
        origin = {**resolved.origin, "enable_prefix_caching": "off: the model has recurrent state"}
        resolved = replace(resolved, enable_prefix_caching=False, origin=origin)
    if resolved.prefix_cache == "radix":
        resolved = _without_tree(resolved, memory)
    if any(group.window for group in memory.kv_groups):
        refuse_copies_of_windows(resolved)
    if speculation is not None:
        memory, resolved = _beside_drafter(placement, resolved, memory, speculation)
    if lora is not None:
        slot = adapter_bytes(placement, lora.slot_rank)
        memory = with_adapters(memory, lora.max_loras * slot)
        resolved = _shortened(resolved, memory, "the adapters")
    if speculation is not None and early_exit is not None:
        raise InputError("early_exit: is not modelled together with speculation; one of them must be null")
    deployment = Deployment(placement, resolved, memory, speculation, early_exit, lora)
    refuse_room_for_nothing(deployment)
    return deployment


def _in_turn(engine: ResolvedEngine) -> ResolvedEngine:
    """The engine without asynchronous scheduling: in a pipeline a sequence is in one step at a time, since its next
    token enters the first stage when the last stage has made this one. InputError if the user wants it.

    vLLM never schedules two tokens of a request together there (pull request 32359), SGLang 0.5 and TensorRT-LLM 1.0 do
    not overlap schedules.
    """
    if engine.async_scheduling and engine.origin["async_scheduling"] == "user":
        raise InputError(
            "engine.async_scheduling: in a pipeline a token enters when the one before has left it; must be false with"
            " parallelism.pipeline above 1"
        )
    origin = {**engine.origin, "async_scheduling": "off: pipeline stages take turns"}
    return replace(engine, async_scheduling=False, origin=origin) if engine.async_scheduling else engine


def _without_tree(engine: ResolvedEngine, memory: Memory) -> ResolvedEngine:
    """The engine with another prefix cache if a radix tree is not modelled for these KV groups. InputError if the user
    wants one."""
    if [(group.window, group.tables) for group in memory.kv_groups] == [(0, 1)]:
        return engine
    why = "is not modelled for models with sliding windows or recurrent state"
    if engine.origin["prefix_cache"] == "user":
        raise InputError(f"engine.prefix_cache: radix {why}; must be blocks")
    if engine.scheduling_policy == "lpm":
        raise InputError(f"engine.scheduling_policy: lpm {why}; must be one of fcfs, priority, shortest-first")
    origin = {**engine.origin, "prefix_cache": f"a radix tree {why}"}
    return replace(engine, prefix_cache="blocks", origin=origin)


def _beside_drafter(
    placement: Placement,
    engine: ResolvedEngine,
    memory: Memory,
    speculation: Speculation,
) -> tuple[Memory, ResolvedEngine]:
    """Memory and engine when the drafter has taken its part. InputError if speculation does not go with the rest."""
    if placement.parallelism.pipeline > 1 or placement.parallelism.attention_data > 1:
        raise InputError(
            "speculation: is not modelled with pipeline or data-parallel attention yet; parallelism.pipeline and"
            " parallelism.attention_data must be 1"
        )
    if engine.allocator != "paged":
        raise InputError("engine.allocator: drafts need memory that grows; must be paged under speculation")
    if engine.jump_forward_share > 0:
        raise InputError("engine.jump_forward_share: is not modelled together with drafts; must be 0 under speculation")
    if engine.preemption_mode == "swap":
        raise InputError(
            "engine.preemption_mode: drafts in flight are not modelled together with swapping; must be recompute under"
            " speculation"
        )
    if engine.max_num_seqs * (1 + speculation.num_speculative_tokens) > MAX_LOGITS:
        raise InputError(
            f"speculation.num_speculative_tokens: {engine.max_num_seqs} sequences of"
            f" {1 + speculation.num_speculative_tokens} tokens are too many; engine.max_num_seqs must be smaller"
        )
    weights, kv = own_bytes(speculation, placement)
    memory = with_drafter(memory, weights, kv)
    if speculation.drafter and (own := drafter_placement(speculation, placement)):
        memory = _as_drafter_holds(memory, own, engine)
    return memory, _shortened(engine, memory, "the drafter")


def _as_drafter_holds(memory: Memory, own: Placement, engine: ResolvedEngine) -> Memory:
    """No more KV blocks than a GPU of its own has for the draft model's keys and values. InputError if it has none."""
    try:
        alone = memory_waterfall(own, replace(engine, max_model_len=1))
    except InputError as error:
        raise InputError([f"speculation.drafter: {problem}" for problem in error.problems]) from None
    tables = sum(group.tables for group in memory.kv_groups)
    blocks = min(memory.num_gpu_blocks, alone.num_gpu_blocks * tables)
    return replace(
        memory,
        num_gpu_blocks=blocks,
        kv_bytes=blocks * memory.block_bytes,
        max_concurrency=memory.max_concurrency * blocks / memory.num_gpu_blocks,
    )


def _shortened(engine: ResolvedEngine, memory: Memory, beside: str) -> ResolvedEngine:
    """The engine with a max_model_len that fits what is left of the KV cache. InputError if the user's does not."""
    tables = sum(group.tables for group in memory.kv_groups)
    blocks = memory.num_gpu_blocks - 1
    if engine.allocator == "buddy":
        blocks = 1 << (blocks.bit_length() - 1)
    longest = blocks // tables * memory.block_size
    if engine.max_model_len <= longest:
        return engine
    if engine.origin["max_model_len"] == "user":
        raise InputError(
            f"engine.max_model_len: one sequence of {engine.max_model_len} tokens does not fit beside {beside};"
            f" must be at most {longest}"
        )
    origin = {**engine.origin, "max_model_len": "limited by the KV cache"}
    return replace(engine, max_model_len=longest, origin=origin)
