"""A description made concrete: the model, the engine's settings on this device, and what its memory holds."""

from dataclasses import replace
from typing import Any

from infersim.config.early_exit import EarlyExit
from infersim.config.engine import Engine, ResolvedEngine
from infersim.config.errors import InputError
from infersim.config.hardware import Hardware, with_kernels_of
from infersim.config.lora import Lora
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.presets import load_preset
from infersim.config.speculation import Speculation
from infersim.cost.attention_kernel import with_attention_kernel
from infersim.cost.drafting import drafter_placement, own_bytes, with_drafter
from infersim.cost.lora import adapter_bytes, with_adapters
from infersim.cost.memory import Memory, longest_sequence, memory_waterfall
from infersim.cost.partition import largest_graph
from infersim.cost.placement import Placement
from infersim.engine.knobs import KNOBS
from infersim.models.architecture import Model
from infersim.models.catalog import load_model

from .compatibility import BY_HOST, WHOLE, check
from .lower import Deployment


def resolve(engine: Engine, hardware: Hardware, model_max_len: int) -> ResolvedEngine:
    """`engine` with every default filled in as the version's server does on this device (arg_utils.get_batch_defaults).

    `model_max_len` in tokens. InputError for what the real server refuses at start.
    """
    preset = load_preset(engine.preset)
    knobs: dict[str, Any] = {"preset": preset.name}
    origin: dict[str, str] = {}
    for knob in KNOBS:
        user = getattr(engine, knob.name) if knob.user else None
        given = preset.values[knob.name]
        knobs[knob.name] = given if user is None else user
        origin[knob.name] = "preset default" if user is None else "user"
        if knobs[knob.name] is None:
            origin[knob.name] = knob.otherwise
    if knobs["max_model_len"] is None:
        knobs["max_model_len"] = model_max_len
    row = next(row for row in preset.batch_defaults if row.fits(hardware))
    for key in ("max_num_batched_tokens", "max_num_seqs"):
        if knobs[key] is None:
            knobs[key] = getattr(row, key)
            if key == "max_num_batched_tokens" and not knobs["enable_chunked_prefill"]:
                knobs[key] = max(knobs[key], knobs["max_model_len"])
    _follow(knobs, origin)
    jump = knobs["jump_forward_tokens"]
    facts = {"user": engine, "hardware": hardware, "model_max_len": model_max_len, "most_jumps": jump / (1 + jump)}
    check(**knobs, **facts, origin=origin)
    return ResolvedEngine(**knobs, origin=origin)


def _follow(knobs: dict[str, Any], origin: dict[str, str]) -> None:
    """Set what follows from other knobs. Where that is not what the user gave, compatibility.py refuses it."""

    def put(knob: str, value: Any, why: str) -> None:
        knobs[knob], origin[knob] = value, why

    if knobs["max_num_seqs"] > knobs["max_num_batched_tokens"]:
        put("max_num_seqs", knobs["max_num_batched_tokens"], "limited by max_num_batched_tokens")
    if knobs["allocator"] != "paged":
        if origin["block_size"] != "user":
            put("block_size", 1, "pieces are of any length")
        if origin["reserve"] != "user" and knobs["reserve"] not in WHOLE:
            put("reserve", "max-model-len", "pieces do not grow")
        knobs["enable_prefix_caching"] = False
    if knobs["jump_forward_share"] > 0:
        put("async_scheduling", False, "jumps must be known first")
    if knobs["scheduling_policy"] == "lpm" and not knobs["enable_prefix_caching"]:
        put("scheduling_policy", "fcfs", "lpm without a prefix cache")
    if knobs["chunked_order"] and knobs["enable_chunked_prefill"]:
        knobs["order"] = knobs["chunked_order"]
    if knobs["enable_mixed_chunk"]:
        put("order", "prefills-first", origin["enable_mixed_chunk"])
    if knobs["ignore_eos"]:
        for knob in ("new_token_ratio", "min_new_token_ratio"):
            put(knob, 1.0, "requests ignore_eos")


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
    drafter = load_model(speculation.model) if speculation and speculation.model else None
    files = model, load_preset(engine.preset), drafter  # read anew: they may have changed
    parts = *files, hardware, precision, parallelism, engine, speculation, early_exit, lora
    if found := next((deployment for known, deployment in _DEPLOYED[:] if known == parts), None):
        return found
    deployment = _deploy(model, *parts[3:])
    _DEPLOYED.append((parts, deployment))
    del _DEPLOYED[:-MOST_DEPLOYED]
    return deployment


MOST_DEPLOYED = 32
_DEPLOYED: list[tuple[tuple[Any, ...], Deployment]] = []
"""those asked for last, each with its tables: most runs differ in their load alone"""


def _deploy(
    model: Model,
    hardware: Hardware,
    precision: Precision,
    parallelism: Parallelism,
    engine: Engine,
    speculation: Speculation | None,
    early_exit: EarlyExit | None,
    lora: Lora | None,
) -> Deployment:
    resolved = resolve(engine, hardware, model.max_position_embeddings)
    if parallelism.pipeline > 1:
        resolved = _in_turn(resolved, "pipeline stages take turns")
    if resolved.cuda_graph_sizes == "sglang" and resolved.max_cudagraph_capture_size is None:
        graph = min(resolved.max_num_seqs, largest_graph(hardware.memory_usable, parallelism))
        resolved = replace(resolved, max_cudagraph_capture_size=graph)
    sparse = any(layer.attention.has_indexer for layer in model.layers)
    eager = {
        "DeepEP's high-throughput kernels wait for the CPU": parallelism.all2all_backend == "deepep_high_throughput",
        "prompts of sparse attention are divided": sparse and parallelism.prefill_context > 1,
    }
    for why in (why for why, holds in eager.items() if holds and resolved.origin["enforce_eager"] != "user"):
        resolved = replace(resolved, enforce_eager=True, origin={**resolved.origin, "enforce_eager": why})
    hardware = with_kernels_of(hardware, resolved.engine)
    hardware = with_attention_kernel(hardware, resolved.attention_kernel)
    placement = Placement(model, hardware, precision, parallelism, resolved.quantises_first)
    if resolved.origin["max_model_len"] == "model":
        longest = longest_sequence(placement, resolved)
        if longest < resolved.max_model_len:
            origin = {**resolved.origin, "max_model_len": "limited by the KV cache"}
            resolved = replace(resolved, max_model_len=longest, origin=origin)
    memory = memory_waterfall(placement, resolved)
    windows = {group.window for group in memory.kv_groups} - {0}
    several = [(group.window, group.tables) for group in memory.kv_groups] != [(0, 1)]
    facts = {"user": engine, "parallelism": parallelism, "speculation": speculation, "early_exit": early_exit}
    facts |= {"lora": lora, "sparse": sparse}
    facts |= {"windows": windows, "recurrent": 1 in windows, "several_groups": several}
    check(**vars(resolved), **facts)
    attends = any(group.window != 1 for group in memory.kv_groups)
    by_itself = resolved.state_cuts != "never" and attends and resolved.preemption_mode == "recompute"
    asked = resolved.origin["enable_prefix_caching"] == "user" or by_itself
    if resolved.enable_prefix_caching and 1 in windows and not asked:
        origin = {**resolved.origin, "enable_prefix_caching": "off: the model has recurrent state"}
        resolved = replace(resolved, enable_prefix_caching=False, origin=origin)
    if windows and resolved.reserve in AT_ONCE:
        how = f"at once, as engine.reserve {resolved.reserve} takes it"
        resolved = _shortened(resolved, memory, how, resolved.enable_prefix_caching)
    if resolved.prefix_cache == "radix" and several:
        why = "a radix tree is not modelled for models with sliding windows or recurrent state"
        resolved = replace(resolved, prefix_cache="blocks", origin={**resolved.origin, "prefix_cache": why})
    if speculation is not None:
        if resolved.engine == "vllm" and speculation.how.kind in BY_HOST:
            resolved = _in_turn(resolved, "the drafts must be known first")
        memory, resolved = _beside_drafter(placement, resolved, memory, speculation)
    if lora is not None:
        slot = adapter_bytes(placement, lora.slot_rank)
        memory = with_adapters(memory, lora.max_loras * slot, resolved)
        resolved = _shortened(resolved, memory, "beside the adapters")
    gpus = parallelism.kv_gpus
    check(**vars(resolved), block_bytes=memory.block_bytes, block_of_all=memory.block_bytes * gpus)
    return Deployment(placement, resolved, memory, speculation, early_exit, _written_out(lora))


def _in_turn(engine: ResolvedEngine, why: str) -> ResolvedEngine:
    """The engine without asynchronous scheduling: in a pipeline a sequence is in one step at a time, since its next
    token enters the first stage when the last stage has made this one.

    vLLM never schedules two tokens of a request together there (pull request 32359), SGLang 0.5 and TensorRT-LLM 1.0 do
    not overlap schedules. Nor does vLLM with drafts that the host finds (config/vllm.py: EAGLE, MTP and draft models
    alone).
    """
    origin = {**engine.origin, "async_scheduling": f"off: {why}"}
    return replace(engine, async_scheduling=False, origin=origin) if engine.async_scheduling else engine


def _beside_drafter(
    placement: Placement,
    engine: ResolvedEngine,
    memory: Memory,
    speculation: Speculation,
) -> tuple[Memory, ResolvedEngine]:
    """Memory and engine when the drafter has taken its part."""
    weights, kv = own_bytes(speculation, placement)
    memory = with_drafter(memory, weights, kv, engine)
    if speculation.drafter and (own := drafter_placement(speculation, placement)):
        memory = _as_drafter_holds(memory, own, engine)
    return memory, _shortened(engine, memory, "beside the drafter")


def _as_drafter_holds(memory: Memory, own: Placement, engine: ResolvedEngine) -> Memory:
    """No more KV blocks than a GPU of its own has for the draft model's keys and values. InputError if it has none."""
    try:
        alone = memory_waterfall(own, replace(engine, max_model_len=1))
    except InputError as error:
        raise InputError([f"speculation.drafter: {problem}" for problem in error.problems]) from None
    tables = sum(group.tables for group in memory.kv_groups)
    blocks = min(memory.num_gpu_blocks, alone.num_gpu_blocks * tables)
    if blocks < (given := engine.num_gpu_blocks_override or 0):
        raise InputError(f"engine.num_gpu_blocks_override: the drafter's GPU has room for {blocks} (got {given})")
    return replace(
        memory,
        num_gpu_blocks=blocks,
        kv_bytes=blocks * memory.block_bytes,
        max_concurrency=memory.max_concurrency * blocks / memory.num_gpu_blocks,
    )


AT_ONCE = ("whole-prompt", "max-model-len", "output-length", "power-of-two")
"""reservations that take blocks before any leave a window"""


def _shortened(engine: ResolvedEngine, memory: Memory, how: str, as_text: bool = False) -> ResolvedEngine:
    """The engine with a max_model_len of which the KV cache holds every token; states are one block each, or stand
    behind each block `as_text`. InputError if the user's is longer."""
    states = 0 if as_text else sum(group.tables for group in memory.kv_groups if group.window == 1)
    tables = sum(group.tables for group in memory.kv_groups) - states
    blocks = memory.num_gpu_blocks - 1 - states
    if not tables:  # states alone: nothing grows
        return engine
    if engine.allocator == "buddy":
        blocks = 1 << (blocks.bit_length() - 1)
    longest = blocks // tables * memory.block_size
    if engine.max_model_len <= longest:
        return engine
    if engine.origin["max_model_len"] == "user":
        raise InputError(
            f"engine.max_model_len: one sequence of {engine.max_model_len} tokens does not fit {how};"
            f" must be at most {longest}"
        )
    origin = {**engine.origin, "max_model_len": "limited by the KV cache"}
    return replace(engine, max_model_len=longest, origin=origin)


def _written_out(lora: Lora | None) -> Lora | None:
    """The same with its rank, given or not: one deployment."""
    return lora and lora.model_copy(update={"max_lora_rank": lora.slot_rank})
