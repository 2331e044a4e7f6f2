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
from infersim.cost.placement import Placement
from infersim.engine.knobs import KNOBS
from infersim.models.catalog import load_model

from .compatibility import refuse_copies_of_windows, refuse_room_for_nothing
from .lower import Deployment

MAX_LOGITS = 2**20  # rows of the LM head's table
WHOLE = ("max-model-len", "output-length", "power-of-two")
"""reservations that a sequence never outgrows"""
OFF = (0, False)


def resolve(engine: Engine, hardware: Hardware, model_max_len: int) -> ResolvedEngine:  # noqa: C901, PLR0912, PLR0915
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
    if knobs["max_num_seqs"] > knobs["max_num_batched_tokens"]:
        knobs["max_num_seqs"] = knobs["max_num_batched_tokens"]
        origin["max_num_seqs"] = "limited by max_num_batched_tokens"

    problems = [  # who switches off on purpose may leave the rest as it is
        f"engine.{knob.name}: does nothing while engine.{knob.needs} is {str(knobs[knob.needs]).lower()}"
        f" ({origin[knob.needs]}); must be given together with it"
        for knob in KNOBS
        if knob.needs and origin[knob.name] == "user" and origin[knob.needs] != "user" and knobs[knob.needs] in OFF
    ]
    if knobs["allocator"] != "paged":
        if engine.block_size is None:
            knobs["block_size"], origin["block_size"] = 1, "pieces are of any length"
        if engine.reserve is None and knobs["reserve"] not in WHOLE:
            knobs["reserve"], origin["reserve"] = "max-model-len", "pieces do not grow"
        if knobs["reserve"] not in WHOLE:
            problems.append(
                f"engine.reserve: a piece of memory cannot grow from {knobs['reserve']}; must be one of"
                f" {', '.join(WHOLE)}, or engine.allocator paged"
            )
        if engine.enable_prefix_caching:
            problems.append(
                "engine.enable_prefix_caching: pieces of memory are not shared; engine.allocator must be paged"
            )
        knobs["enable_prefix_caching"] = False
    if knobs["jump_forward_share"] > 0:
        if engine.async_scheduling:
            problems.append(
                "engine.async_scheduling: the step after a jump cannot be scheduled before it is known; must be false"
                " with jump_forward_share"
            )
        knobs["async_scheduling"], origin["async_scheduling"] = False, "jumps must be known first"
        most = knobs["jump_forward_tokens"] / (1 + knobs["jump_forward_tokens"])
        if knobs["jump_forward_share"] > most:
            problems.append(
                f"engine.jump_forward_share: a sampled token comes before each jump of"
                f" {knobs['jump_forward_tokens']} tokens; must be at most {most:.4g}"
            )
    if knobs["preemption_mode"] == "swap" and hardware.pcie_bandwidth is None:
        problems.append(f"hardware.pcie_bandwidth: missing; requests are swapped over it ({hardware.name})")
    problems += _problems_of_tiers(knobs, hardware)
    if knobs["prefix_cache"] == "radix" and knobs["enable_prefix_caching"]:
        for key, plain in (("preemption_mode", "recompute"), ("kv_offloading_size", 0)):
            if knobs[key] != plain:
                problems.append(
                    f"engine.{key}: is not modelled beside a radix tree; must be {plain}, or engine.prefix_cache blocks"
                )
    if knobs["scheduling_policy"] == "lpm":
        if knobs["prefix_cache"] != "radix":
            problems.append(
                "engine.scheduling_policy: lpm sorts by what a radix tree has; must be one of fcfs, priority,"
                " shortest-first, or engine.prefix_cache radix"
            )
        if not knobs["enable_prefix_caching"]:
            knobs["scheduling_policy"], origin["scheduling_policy"] = "fcfs", "lpm without a prefix cache"
    if knobs["chunked_order"] and knobs["enable_chunked_prefill"]:
        knobs["order"] = knobs["chunked_order"]
    problems += [
        f"engine.{knob.name}: only {' and '.join(knob.engines)} presets have it; remove it for {preset.name}"
        for knob in KNOBS
        if knob.engines and knobs[knob.name] and knobs["engine"] not in knob.engines
    ]
    if knobs["enable_mixed_chunk"]:
        knobs["order"], origin["order"] = "decodes-first", origin["enable_mixed_chunk"]
    if knobs["max_model_len"] > model_max_len:
        problems.append(
            f"engine.max_model_len: {knobs['max_model_len']} is longer than the model's {model_max_len} tokens;"
            f" must be at most {model_max_len}"
        )
    if not knobs["enable_chunked_prefill"] and knobs["max_num_batched_tokens"] < knobs["max_model_len"]:
        problems.append(
            f"engine.max_num_batched_tokens: {knobs['max_num_batched_tokens']} is smaller than max_model_len"
            f" {knobs['max_model_len']} and chunked prefill is off, so longer prompts could never run;"
            f" must be at least {knobs['max_model_len']}, or lower max_model_len"
        )
    if problems:
        raise InputError(problems)
    return ResolvedEngine(**knobs, origin=origin)


def _problems_of_tiers(knobs: dict[str, Any], hardware: Hardware) -> list[str]:
    """What is missing to keep text that the GPU evicts."""
    problems = []
    if knobs["kv_offloading_size"] > 0:
        if not knobs["enable_prefix_caching"]:
            problems.append(
                "engine.kv_offloading_size: keeps what prefix caching evicts; needs engine.enable_prefix_caching true"
            )
        if hardware.pcie_bandwidth is None:
            problems.append(f"hardware.pcie_bandwidth: missing; offloaded KV returns over it ({hardware.name})")
    if knobs["kv_offloading_disk_size"] > 0:
        if knobs["kv_offloading_size"] == 0:
            problems.append(
                "engine.kv_offloading_disk_size: all that a disk has comes through the CPU's memory;"
                " engine.kv_offloading_size must be above 0"
            )
        if knobs["kv_offloading_disk_bandwidth"] is None:
            problems.append("engine.kv_offloading_disk_bandwidth: missing; the disk is read at it, such as 7 GB/s")
    return problems


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
    hardware = with_kernels_of(hardware, resolved.engine)
    hardware = with_attention_kernel(hardware, resolved.attention_kernel)
    placement = Placement(model, hardware, precision, parallelism)
    if resolved.origin["max_model_len"] == "model":
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
