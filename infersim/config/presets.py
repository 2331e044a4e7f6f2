"""Engine presets: one version of one engine each, a row of knobs with where they come from."""

from dataclasses import dataclass
from typing import Any

GIB = 2.0**30
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
