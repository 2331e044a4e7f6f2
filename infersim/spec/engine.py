"""The serving engine: a preset (one version of one engine, a row of knobs) and what the user changes in it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .base import Description, near
from .errors import InputError
from .hardware import Hardware
from .units import Bytes, BytesPerSecond, Count, CountOrZero, Number, Seconds, Share, short

GIB = 2.0**30
INT32 = Field(le=2**31 - 1)  # the compiled engine's integers
HostTime = Annotated[Seconds, Field(le=3600)]
AttentionKernel = Literal["standard", "flash1", "flash2", "flash3"]


LAUNCHES = (
    "; launches outside CUDA graphs: Splitwise (arXiv:2311.18677), H100, prompts of 128 and 256 tokens of Llama-2-70B"
    " under vLLM 0.2 take 48 to 58 ms on 2, 4 and 8 GPUs alike, for 970 kernels"
)


@dataclass(frozen=True)
class EnginePreset:
    """One engine version as a flat row of knobs; times in seconds."""

    name: str
    version: str
    batch_defaults: tuple[tuple[float, int, int], ...]
    """server defaults, first row that fits: (memory in bytes at least, max_num_batched_tokens, max_num_seqs)"""
    gpu_memory_utilization: float
    count_cuda_graph_memory: bool
    """the CUDA-graph estimate is taken from the KV cache's share (since 0.21)"""
    reserve_full_isl: bool
    """admit a request only if blocks for its whole sequence are free"""
    async_scheduling: bool
    """the next step is scheduled before this step's tokens are known"""
    skip_unfit_prefill: bool
    """chunked prefill off: a prompt above the budget lets the next ones try, rather than ending the scan"""
    long_prefill_needs_contention: bool
    """long_prefill_token_threshold applies only when more than one request exists"""
    host_step_time: float
    """CPU seconds of the engine core per step, hidden behind the device under async scheduling"""
    source: str
    notes: str
    """which of the differences between 0.11 and 0.33 this version has, and since when"""
    order: str = "running-first"
    """what a step is made of: running-first (in order of admission, then waiting ones), decodes-first, prefills-only (a
    step with a prefill has no decodes)"""
    chunked_order: str | None = None
    """the order under chunked prefill, if that is another"""
    reserve: str = "first-chunk"
    """what a request gets at admission: first-chunk, whole-prompt, max-model-len, or to-completion: its first chunk, if
    prompt + max_tokens of all that run have room; or, which no engine can know, prompt and output-length, or the next
    power-of-two of it"""
    allocator: str = "paged"
    """of KV memory: paged, or one piece per request: contiguous, or a buddy allocator's powers of two"""
    grammar_mask_time: float = 0.0
    """CPU seconds per sequence in a step for the mask of tokens that a grammar allows (constrained decoding)"""
    jump_forward_share: float = 0.0
    """of the outputs: tokens about which the grammar leaves no choice, which are computed as a prompt is"""
    jump_forward_tokens: int = 4
    """in a row (assumed)"""
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    """what a preempted request's keys and values become: computed again, or copied to the CPU's memory and back"""
    swap_space: float = 4 * GIB
    """bytes of the CPU's memory per GPU for those that are swapped; the default of vLLM 0.6.6 (engine/arg_utils.py)"""
    kv_offloading_size: float = 0.0
    """bytes of the CPU's memory for text that the GPU evicts, of all GPUs of a scheduler together"""
    kv_offloading_latency: float = 0.0
    """seconds of a load from there beyond its bytes (assumed)"""
    kv_offloading_disk_size: float = 0.0
    """bytes of the disk for what the CPU's memory evicts in turn"""
    kv_offloading_disk_bandwidth: float | None = None
    kv_offloading_disk_latency: float = 0.0
    admit_when_idle: bool = False
    """static batching: requests enter only when nothing runs"""
    retracts: bool = False
    """out of memory, the requests with the fewest outputs go to the end of the queue, not the last to its head"""
    sequence_groups: bool = False
    """several sequences of one request (beams, samples) are scheduled together and share its KV blocks by reference,
    copied on write; else samples are requests of their own and beams are not modelled"""
    late_hits: str = "hit"
    """cached text that is computed in the very step: hit, miss, or wait for the next step"""
    clip_max_new_tokens: int = 0
    """SGLang's admission: room for at most so many of the tokens a request may generate; 0: no such rule"""
    new_token_ratio: float = 0.0
    """share of those tokens expected of running requests at first"""
    min_new_token_ratio: float = 0.0
    """and at last"""
    new_token_ratio_decay: float = 0.0
    """per decode step"""
    block_size: int = 16
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    """text that was computed before is found again"""
    prefix_cache: str = "blocks"
    """how: by hashes of full blocks, or in a radix tree"""
    watermark: float = 0.0
    """share of the blocks kept free when admitting beside running requests"""
    host_sequence_time: float = 6e-6
    """CPU seconds of the engine core per sequence in a step"""
    host_request_time: float = 2e-3
    """CPU seconds of the API server per request before the scheduler sees it; it takes one after another"""
    host_token_time: float = 0.0
    """seconds of the API server per token that it streams; it takes them, too, one after another"""
    worker_step_time: float = 0.0
    """seconds per step in which the device waits for its worker even under async scheduling (inputs, sampling)"""
    worker_sequence_time: float = 0.0
    """seconds per sequence in a step, likewise"""
    fuse_norm_quant: bool = True
    """norms and activations write FP8 and NVFP4 themselves where the next matrix wants it"""
    fuse_allreduce_rms: bool = False
    """tensor-parallel all-reduces of up to 8 MiB add the residual and normalise too"""
    eager_launch_time: float = 50e-6
    """CPU seconds to launch a kernel outside CUDA graphs, Python and all: no such step is shorter than its launches"""
    enforce_eager: bool = False
    """no CUDA graphs, as in vLLM before 0.2.6"""
    host_source: str = (
        "assumed; between Scheduler.update_from_output alone (1.1 us per sequence, vLLM pull request 46112) and a"
        " whole 0.27.1 engine loop without a GPU (541 us per step, 12.7 us per running request, simllm pull request"
        " 204, which calls its own values unstable); request time: HTTP, tokenizer, one hop between processes"
        + LAUNCHES
    )


SMALL_ROW = (0.0, 2048, 256)
ROWS_0_11 = ((70 * GIB, 8192, 1024), SMALL_ROW)
ROWS_0_33 = ((160 * GIB, 16384, 1024), *ROWS_0_11)

# What engines other than vLLM V1 have in common, as rows of the same knobs.
PLAIN: dict[str, Any] = {
    "gpu_memory_utilization": 0.9,
    "count_cuda_graph_memory": False,
    "reserve_full_isl": False,
    "async_scheduling": False,
    "skip_unfit_prefill": False,
    "long_prefill_needs_contention": False,
}
OVERLAPPED = {"async_scheduling": True}
TRTLLM: dict[str, Any] = {
    **PLAIN,
    **OVERLAPPED,
    "batch_defaults": ((0.0, 8192, 2048),),
    "host_step_time": 0.3e-3,
    "host_sequence_time": 29e-6,
    "worker_step_time": 0.58e-3,
    "host_source": (
        "step time assumed; sequence time published: 45.1 ms per iteration of 1,536 requests, gpt-oss-120b on GB200"
        " (TensorRT-LLM pull request 10273); worker's: 0.58 ms per iteration of 64 requests in which the device idles"
        " although schedules overlap, Llama-3.1-8B on B200 (issue 13957)" + LAUNCHES
    ),
    "order": "decodes-first",
    "late_hits": "wait",
    "chunked_prefill": False,
    "fuse_allreduce_rms": True,
    "block_size": 32,
    "source": "TensorRT-LLM 1.0: batch_manager/capacityScheduler.cpp, microBatchScheduler.cpp, llmapi/llm_args.py",
}

PRESETS: dict[str, EnginePreset] = {
    preset.name: preset
    for preset in (
        EnginePreset(
            name="vllm-0.11",
            version="0.11.0",
            batch_defaults=ROWS_0_11,
            gpu_memory_utilization=0.9,
            count_cuda_graph_memory=False,
            reserve_full_isl=False,
            async_scheduling=False,
            skip_unfit_prefill=True,
            long_prefill_needs_contention=False,
            host_step_time=1e-3,
            source="vLLM 0.11.0: v1/core/sched/scheduler.py, engine/arg_utils.py",
            notes="the older end: has none of the differences",
        ),
        EnginePreset(
            name="vllm-0.15",
            version="0.15.0",
            batch_defaults=ROWS_0_11,
            gpu_memory_utilization=0.9,
            count_cuda_graph_memory=False,
            reserve_full_isl=False,
            async_scheduling=True,
            skip_unfit_prefill=False,
            long_prefill_needs_contention=False,
            host_step_time=0.5e-3,
            source="vLLM 0.14.0 release notes (async scheduling by default); pull requests 28911 and 37307",
            notes="has: async scheduling (since 0.14), an unchunked prompt above the budget ends the scan (pull"
            " request 28911, 2025-11: 0.12 by its date). Not yet: whole-sequence gate (pull request 37307, 2026-03),"
            " CUDA graphs counted (0.21), utilisation 0.92 (assumed to have come with it), 16384 tokens from 160 GiB"
            " (pull request 51726, 2026-08), contention rule of the long-prefill threshold (57951, 2026-09)",
        ),
        EnginePreset(
            name="vllm-0.19",
            version="0.19.0",
            batch_defaults=ROWS_0_11,
            gpu_memory_utilization=0.9,
            count_cuda_graph_memory=False,
            reserve_full_isl=True,
            async_scheduling=True,
            skip_unfit_prefill=False,
            long_prefill_needs_contention=False,
            host_step_time=0.5e-3,
            source="vLLM pull request 37307 (scheduler_reserve_full_isl); CUDA-graph memory: vLLM's own log says"
            " 'default since v0.21.0'",
            notes="has: async scheduling (0.14), an unchunked prompt above the budget ends the scan (0.12),"
            " whole-sequence gate (pull request 37307, 2026-03). Not yet: CUDA graphs counted (0.21), utilisation 0.92"
            " (assumed to have come with it), 16384 tokens from 160 GiB (pull request 51726, 2026-08), contention rule"
            " of the long-prefill threshold (57951, 2026-09)",
        ),
        EnginePreset(
            name="vllm-0.33",
            version="0.33.0",
            batch_defaults=ROWS_0_33,
            gpu_memory_utilization=0.92,
            count_cuda_graph_memory=True,
            reserve_full_isl=True,
            async_scheduling=True,
            skip_unfit_prefill=False,
            long_prefill_needs_contention=True,
            host_step_time=0.5e-3,
            source="vLLM 0.33: v1/core/sched/scheduler.py, engine/arg_utils.py, config/cache.py",
            notes="the newer end: has all of the differences",
        ),
        EnginePreset(
            name="vllm-0",
            version="0.6.6",
            fuse_norm_quant=False,
            batch_defaults=(SMALL_ROW,),
            host_step_time=3e-3,
            order="prefills-only",
            chunked_order="running-first",
            reserve="whole-prompt",
            chunked_prefill=False,
            enable_prefix_caching=False,
            watermark=0.01,
            sequence_groups=True,
            source="vLLM 0.6.6: core/scheduler.py, core/block_manager.py (the V0 engine); sequence groups: vLLM 0.6.2,"
            " the last with beams (removed by pull request 9105; samples became requests by 9302)",
            notes="prefills first and alone, whole prompts only; 1 % of the blocks stay free at admission (here only"
            " beside running requests: a prompt that needs them runs alone, where V0 ignores it). Beams and samples of"
            " a request share blocks and are swapped together. Step time assumed",
            **PLAIN,
        ),
        EnginePreset(
            name="static",
            version="FasterTransformer 5",
            batch_defaults=((0.0, 32768, 256),),
            host_step_time=0.2e-3,
            reserve="max-model-len",
            admit_when_idle=True,
            chunked_prefill=False,
            enable_prefix_caching=False,
            source="static batching as in Yu et al. 2022 (Orca), section 3, and Kwon et al. 2023, section 6.1",
            notes="a batch runs until its last request ends, and each reserves max_model_len; a request's tokens count"
            " when they are made, and the padding of ended requests costs nothing. Step overhead assumed",
            **PLAIN,
        ),
        EnginePreset(
            name="orca",
            version="Yu et al. 2022",
            batch_defaults=((0.0, 32768, 256),),
            host_step_time=0.2e-3,
            reserve="max-model-len",
            allocator="buddy",
            sequence_groups=True,
            block_size=1,
            chunked_prefill=False,
            enable_prefix_caching=False,
            source="Yu et al. 2022 (OSDI); sarathi-serve: core/scheduler/orca_scheduler.py",
            notes="every running sequence and new whole prompts in one step; each reserves max_model_len (reserve"
            " power-of-two and output-length are Kwon et al.'s Pow2 and Oracle) from a buddy allocator, nobody is"
            " preempted. No token budget but the tables' 32,768. With pages (allocator paged, reserve whole-prompt) it"
            " is the vLLM of Kwon et al. 2023, sequence groups too. Step overhead assumed",
            **PLAIN,
        ),
        EnginePreset(
            name="sarathi",
            version="Agrawal et al. 2024",
            batch_defaults=((0.0, 512, 128),),
            host_step_time=1e-3,
            order="decodes-first",
            reserve="whole-prompt",
            enable_prefix_caching=False,
            watermark=0.01,
            source="Agrawal et al. 2024 (OSDI); sarathi-serve: core/scheduler/sarathi_scheduler.py",
            notes="decodes, then partial prefills, then new ones within a chunk of 512 tokens (the paper's 512-2048); a"
            " prompt's blocks are taken at admission. Step overhead assumed",
            **PLAIN,
        ),
        EnginePreset(
            name="sglang-0.5",
            version="0.5.23",
            fuse_norm_quant=False,
            batch_defaults=(
                (160 * GIB, 16384, 2048),
                (60 * GIB, 8192, 2048),
                (20 * GIB, 4096, 2048),
                (0.0, 2048, 2048),
            ),
            host_step_time=0.5e-3,
            order="prefills-only",
            retracts=True,
            late_hits="miss",
            prefix_cache="radix",
            clip_max_new_tokens=4096,
            new_token_ratio=0.7,
            min_new_token_ratio=0.7 * 0.14,
            new_token_ratio_decay=0.7 * 0.86 / 600,
            block_size=1,
            source="SGLang 0.5.23: managers/{schedule_policy,schedule_batch,scheduler}.py,"
            " mem_cache/{radix_cache,common}.py; eviction of no more than is lacking: pull request 32016 (2026-07)",
            notes="prefills first and alone, in chunks; admission by expected tokens; radix tree of single tokens,"
            " text enters it when a prefill or a request has ended, least recently used leaves are evicted"
            " whole. max_num_batched_tokens is its chunked-prefill-size, block_size its page-size, max_num_seqs"
            " its max-running-requests, scheduling_policy its schedule-policy, order decodes-first its"
            " enable-mixed-chunk (PrefillAdder takes running requests off its budget). gpu_memory_utilization near what"
            " mem-fraction-static and the memory outside it add up to. Unlike it, models with windows find text"
            " by blocks, and every step looks for room, not only those after a request has ended (batch_is_full)",
            **(PLAIN | OVERLAPPED),
        ),
        EnginePreset(
            name="trtllm-1.0-no-evict",
            version="1.0",
            reserve="to-completion",
            notes="GUARANTEED_NO_EVICT: a request enters if prompt + max_tokens of all have room; none is ever paused."
            " Prompts are computed whole unless enable_chunked_prefill. gpu_memory_utilization stands for"
            " free_gpu_memory_fraction, there of what weights and activations leave",
            **TRTLLM,
        ),
        EnginePreset(
            name="trtllm-1.0-max-utilization",
            version="1.0",
            notes="MAX_UTILIZATION: a request needs only its next step's blocks, and the last one started is paused"
            " when they run out. Otherwise as trtllm-1.0-no-evict",
            **TRTLLM,
        ),
    )
}


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
    attention_kernel: str | None
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
