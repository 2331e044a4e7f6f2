"""The serving engine: a preset (presets.py) and what the user changes in it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .base import Description, near
from .errors import InputError
from .hardware import Hardware
from .presets import PRESETS, SMALL_ROW
from .units import Bytes, BytesPerSecond, Count, CountOrZero, Number, Seconds, Share, short

INT32 = Field(le=2**31 - 1)  # the compiled engine's integers
HostTime = Annotated[Seconds, Field(le=3600)]
AttentionKernel = Literal["standard", "flash1", "flash2", "flash3"]


def _preset(value: Any) -> str:
    if not isinstance(value, str) or value not in PRESETS:
        raise ValueError(f"no such engine preset (got {short(value)}){near(str(value), list(PRESETS))}")
    return value


class Engine(Description):
    """A preset and the flags that differ from it; names are vLLM's. Null means the preset's or the GPU's default."""

    preset: Annotated[str, BeforeValidator(_preset)] = "vllm-0.33"
    max_num_seqs: Annotated[Count, Field(le=2**20)] | None = None
    max_num_batched_tokens: Annotated[Count, Field(le=2**20)] | None = None
    block_size: Annotated[Count, Field(le=65536)] | None = None
    """tokens per KV block"""
    gpu_memory_utilization: Share | None = None
    """share of the device's total memory that the engine may use"""
    max_model_len: Annotated[Count, INT32] | None = None
    """longest sequence, prompt and output; default: the model's"""
    num_gpu_blocks_override: Annotated[Count, Field(ge=2), INT32] | None = None
    """number of KV blocks instead of what fits; one of them is vLLM's null block"""
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: Annotated[CountOrZero, INT32] | None = None
    """most tokens of one prefill in a step; 0: no limit"""
    watermark: Annotated[Number, Field(lt=1)] | None = None
    """share of the blocks kept free when admitting beside running requests"""
    scheduler_reserve_full_isl: bool | None = None
    """admit a request only if blocks for its whole sequence are free"""
    async_scheduling: bool | None = None
    """the next step is scheduled before this step's tokens are known; not in a pipeline, whose stages take turns"""
    enable_mixed_chunk: bool | None = None
    """SGLang's: decodes run beside a prefill chunk"""
    allocator: Literal["paged", "contiguous", "buddy"] | None = None
    """KV memory in pages, or in one piece per request: contiguous, buddy (powers of two at multiples of themselves)"""
    reserve: (
        Literal["first-chunk", "whole-prompt", "max-model-len", "to-completion", "output-length", "power-of-two"] | None
    ) = None
    """KV memory that a request gets at admission; output-length and power-of-two know what it will generate"""
    grammar_mask_time: HostTime | None = None
    """constrained decoding: CPU time per sequence in a step for the mask of tokens that the grammar allows"""
    jump_forward_share: Annotated[Share, Field(lt=1)] | None = None
    """share of the output that the grammar alone decides, computed like a prompt instead of decoded (SGLang's jump
    forward; without async scheduling)"""
    jump_forward_tokens: Annotated[Count, Field(le=1024)] | None = None
    """tokens that it decides in a row; default: 4 (assumed)"""
    preemption_mode: Literal["recompute", "swap"] | None = None
    """preempted requests are computed again, or copied over PCIe to the CPU's memory and back while that has room"""
    swap_space: Bytes | None = None
    """memory of the CPU per GPU for swapped requests; default: 4 GiB, as vLLM 0.6.6"""
    kv_offloading_size: Bytes | None = None
    """memory of the CPU for cached text that the GPU evicts, as vLLM's: of all GPUs of a replica together, for each
    data-parallel rank its own; default: 0"""
    kv_offloading_latency: HostTime | None = None
    """of a load from there, beyond its bytes over PCIe; default: 0 (assumed)"""
    kv_offloading_disk_size: Bytes | None = None
    """room on a disk for what the CPU's memory evicts in turn; default: 0"""
    kv_offloading_disk_bandwidth: Annotated[BytesPerSecond, Field(gt=0)] | None = None
    """at which it is read into the CPU's memory; no default"""
    kv_offloading_disk_latency: HostTime | None = None
    """of a load from the disk, beyond its bytes; default: 0 (assumed)"""
    enable_prefix_caching: bool | None = None
    """find KV of text that was computed before"""
    prefix_cache: Literal["blocks", "radix"] | None = None
    """find it by hashes of full blocks, as vLLM does, or in a radix tree, as SGLang does: token by token, once it has
    been computed"""
    scheduling_policy: Literal["fcfs", "priority", "shortest-first", "lpm"] | None = None
    """who waits is admitted in order of arrival, of its tenant's priority (lower first; the least urgent is preempted
    first), of its prompt's length, or, lpm, of what the radix tree has of it (SGLang's longest prefix match, while no
    more than 128 wait)"""
    host_step_time: HostTime | None = None
    """CPU time of the engine core per step"""
    host_sequence_time: HostTime | None = None
    """CPU time of the engine core per sequence in a step"""
    host_request_time: HostTime | None = None
    """CPU time of the API server per request, one after another"""
    host_token_time: HostTime | None = None
    """CPU time of the API server per token that it streams, one after another, in turn with requests; a sequence's
    tokens of one step (accepted drafts, jumps) go as one"""
    worker_step_time: Seconds | None = None
    """time per step in which the device waits for its worker even under async scheduling"""
    worker_sequence_time: Seconds | None = None
    """the same per sequence in a step"""
    eager_launch_time: HostTime | None = None
    """CPU time to launch a kernel outside CUDA graphs; no such step is shorter than its launches"""
    fuse_norm_quant: bool | None = None
    """norms and activations write FP8 and NVFP4 themselves where the next matrix wants it (vLLM's compilation pass)"""
    enforce_eager: bool | None = None
    """no CUDA graphs: decode steps are launched kernel by kernel too"""
    fuse_allreduce_rms: bool | None = None
    """tensor-parallel all-reduces of up to 8 MiB add the residual and normalise too (vLLM's compilation pass)"""
    attention_kernel: AttentionKernel | None = None
    """of prompts, at its published rate; default: the one that was measured on the device"""


@dataclass(frozen=True)
class ResolvedEngine:
    """Every knob with its value, and in `origin` where each value came from; times in seconds."""

    preset: str
    version: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float
    max_model_len: int
    num_gpu_blocks_override: int | None
    chunked_prefill: bool
    long_prefill_token_threshold: int
    long_prefill_needs_contention: bool
    watermark: float
    reserve_full_isl: bool
    async_scheduling: bool
    enable_prefix_caching: bool
    prefix_cache: str
    skip_unfit_prefill: bool
    order: str
    reserve: str
    allocator: str
    grammar_mask_time: float
    jump_forward_share: float
    jump_forward_tokens: int
    preemption_mode: str
    swap_space: float
    kv_offloading_size: float
    kv_offloading_latency: float
    kv_offloading_disk_size: float
    kv_offloading_disk_bandwidth: float | None
    kv_offloading_disk_latency: float
    scheduling_policy: str
    admit_when_idle: bool
    sequence_groups: bool
    retracts: bool
    late_hits: str
    clip_max_new_tokens: int
    new_token_ratio: float
    min_new_token_ratio: float
    new_token_ratio_decay: float
    count_cuda_graph_memory: bool
    host_step_time: float
    host_sequence_time: float
    host_request_time: float
    host_token_time: float
    worker_step_time: float
    worker_sequence_time: float
    eager_launch_time: float
    fuse_norm_quant: bool
    enforce_eager: bool
    fuse_allreduce_rms: bool
    attention_kernel: AttentionKernel | None
    origin: dict[str, str]
    """knob -> 'user', 'preset default', 'GPU default', 'model' or a rule"""


SAME_NAME = ("grammar_mask_time", "jump_forward_share", "jump_forward_tokens", "allocator", "reserve",
             "preemption_mode", "swap_space", "kv_offloading_size", "kv_offloading_latency", "kv_offloading_disk_size",
             "kv_offloading_disk_bandwidth", "kv_offloading_disk_latency", "scheduling_policy", "block_size",
             "gpu_memory_utilization",
             "long_prefill_token_threshold", "watermark", "async_scheduling", "enable_prefix_caching",
             "prefix_cache",
             "host_step_time", "host_sequence_time", "host_request_time", "host_token_time",
             "worker_step_time",
             "worker_sequence_time", "eager_launch_time", "enforce_eager", "fuse_norm_quant",
             "fuse_allreduce_rms")  # fmt: skip
PRESET_ONLY = ("version", "long_prefill_needs_contention", "skip_unfit_prefill", "count_cuda_graph_memory", "order",
               "admit_when_idle", "sequence_groups", "retracts", "late_hits", "clip_max_new_tokens", "new_token_ratio",
               "min_new_token_ratio", "new_token_ratio_decay")  # fmt: skip


WHOLE = ("max-model-len", "output-length", "power-of-two")
"""reservations that a sequence never outgrows"""


SWITCHES = {
    "kv_offloading_latency": "kv_offloading_size",
    "kv_offloading_disk_bandwidth": "kv_offloading_disk_size",
    "kv_offloading_disk_latency": "kv_offloading_disk_size",
    "prefix_cache": "enable_prefix_caching",
    "jump_forward_tokens": "jump_forward_share",
}
"""knobs that do nothing while another is off"""
OFF = (0, False)


def resolve(engine: Engine, hardware: Hardware, model_max_len: int) -> ResolvedEngine:
    """`engine` with every default filled in as the version's server does on this device (arg_utils.get_batch_defaults).

    `model_max_len` in tokens. InputError for what the real server refuses at start.
    """
    preset = PRESETS[engine.preset]
    knobs: dict[str, Any] = {"preset": engine.preset, **{key: getattr(preset, key) for key in PRESET_ONLY}}
    origin = dict.fromkeys(PRESET_ONLY, "preset default")

    def choose(knob: str, user: Any, default: Any, otherwise: str) -> None:
        knobs[knob], origin[knob] = (default, otherwise) if user is None else (user, "user")

    for knob in SAME_NAME:
        choose(knob, getattr(engine, knob), getattr(preset, knob), "preset default")
    choose("chunked_prefill", engine.enable_chunked_prefill, preset.chunked_prefill, "preset default")
    choose("reserve_full_isl", engine.scheduler_reserve_full_isl, preset.reserve_full_isl, "preset default")
    choose("attention_kernel", engine.attention_kernel, None, "as measured on the device")
    choose("num_gpu_blocks_override", engine.num_gpu_blocks_override, None, "none: from the memory")
    choose("max_model_len", engine.max_model_len, model_max_len, "model")

    a100 = "a100" in hardware.name.lower()
    tokens, seqs = next(
        row[1:]
        for row in preset.batch_defaults
        # vLLM looks at the device's name: an A100 takes the small row whatever its memory
        if row[0] == 0 or (hardware.memory_usable >= row[0] and not (SMALL_ROW in preset.batch_defaults and a100))
    )
    if not knobs["chunked_prefill"]:
        tokens = max(tokens, knobs["max_model_len"])
    choose("max_num_batched_tokens", engine.max_num_batched_tokens, tokens, "GPU default")
    choose("max_num_seqs", engine.max_num_seqs, seqs, "GPU default")
    if knobs["max_num_seqs"] > knobs["max_num_batched_tokens"]:
        knobs["max_num_seqs"] = knobs["max_num_batched_tokens"]
        origin["max_num_seqs"] = "limited by max_num_batched_tokens"

    problems = [  # who switches off on purpose may leave the rest as it is
        f"engine.{knob}: does nothing while engine.{switch} is {str(knobs[switch]).lower()} ({origin[switch]}); must be"
        " given together with it"
        for knob, switch in SWITCHES.items()
        if origin[knob] == "user" and origin[switch] != "user" and knobs[switch] in OFF
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
    if preset.chunked_order and knobs["chunked_prefill"]:
        knobs["order"] = preset.chunked_order
    if engine.enable_mixed_chunk:
        if not preset.retracts:
            problems.append(f"engine.enable_mixed_chunk: only sglang presets have it; remove it for {preset.name}")
        knobs["order"], origin["order"] = "decodes-first", "user"
    if knobs["max_model_len"] > model_max_len:
        problems.append(
            f"engine.max_model_len: {knobs['max_model_len']} is longer than the model's {model_max_len} tokens;"
            f" must be at most {model_max_len}"
        )
    if not knobs["chunked_prefill"] and knobs["max_num_batched_tokens"] < knobs["max_model_len"]:
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
