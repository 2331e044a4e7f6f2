"""Every knob of a serving engine, declared once.

From this table follow the keys of a scenario's `engine` and of an engine preset, with their checks, JSON Schema and
reference; the resolved engine; the compiled engine's record (compiled/state.py); and the techniques of `compare`.
Plain data: nothing here is imported but the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FEWER_BYTES, FEWER_STEPS, NEITHER = "fewer bytes per accepted token", "fewer steps per accepted token", "neither"
"""what a technique lowers of T_decode = N_steps * T_step"""
GIB = 2.0**30


@dataclass(frozen=True)
class Knob:
    """One setting of an engine. Its name is vLLM's, where vLLM has it."""

    name: str
    type: type
    """bool, int, float or str"""
    about: str
    default: Any = None
    """of presets that do not say otherwise; None: as `otherwise` says"""
    unit: str = ""
    """of a float: one of config.units.UNITS, or share, in (0, 1]"""
    choices: tuple[str, ...] = ()
    """of a str; the number of each in the record is its place, unless compiled/state.py says otherwise"""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """in pydantic's words: gt, ge, lt, le"""
    least: int = 1
    """of an int: 0 or 1"""
    user: bool = True
    """a key of a scenario's `engine` too; else of presets alone"""
    engines: tuple[str, ...] = ()
    """the only ones that have it; empty: all"""
    needs: str = ""
    """another knob without which it does nothing"""
    otherwise: str = "preset default"
    """where the value comes from that neither user nor preset gives"""
    record: str = ""
    """dtype of its field in the record, where the compiled engine is given the value as it is, or a choice's number"""
    field: str = ""
    """name of that field, if it has another"""
    technique: tuple[str, str, str] | None = None
    """what changing it is called, what it lowers, and through what (explain/techniques.py)"""
    source: str = ""
    """of the default"""


@dataclass(frozen=True)
class Computed:
    """A field of the record that is computed from knobs, memory and device (deployment/lower.py)."""

    name: str
    dtype: str
    about: str
    each: str = ""
    """group or tier: one value for each KV group, or for each place below the GPU; else a single one"""


INT32: dict[str, float] = {"le": 2**31 - 1}  # the compiled engine's integers
SECONDS: dict[str, Any] = {"type": float, "unit": "s"}
HOUR: dict[str, float] = {"le": 3600}
HOST = ("host overhead", NEITHER, "host")
KV_MEMORY = ("KV memory", FEWER_BYTES, "packing")
CHUNKED = ("chunked prefill", FEWER_BYTES, "packing")
STREAMING = ("streaming interval", NEITHER, "host")
WAITS = ("waiting for other prompts", NEITHER, "packing")
JUMPS = ("jump-forward decoding", FEWER_STEPS, "steps")
OFFLOADING = ("offloading of cached text", FEWER_BYTES, "KV")
PREFIXES = ("prefix reuse", FEWER_BYTES, "KV")
ASSUMED_HOST = (
    "assumed; between Scheduler.update_from_output alone (1.1 us per sequence, vLLM pull request 46112) and a whole"
    " 0.27.1 engine loop without a GPU (541 us per step, 12.7 us per running request, simllm pull request 204, which"
    " calls its own values unstable)"
)
CHOSEN = "chosen on half of aiconfigurator's measured deployments, those of up to 16 clients (tests/fidelity, in view)"

KNOBS: tuple[Knob, ...] = (
    Knob("max_num_seqs", int, "most sequences in a step", bounds={"le": 2**20}, otherwise="GPU default",
         record="i4", technique=("batch limit", FEWER_BYTES, "packing")),
    Knob("max_num_batched_tokens", int, "most tokens in a step", bounds={"le": 2**20}, otherwise="GPU default",
         record="i4", technique=("token budget", FEWER_BYTES, "packing")),
    Knob("block_size", int, "tokens per KV block", 16, bounds={"le": 65536},
         technique=("paged KV block size", FEWER_BYTES, "packing")),
    Knob("gpu_memory_utilization", float, "share of the device's total memory that the engine may use", 0.9,
         unit="share", technique=KV_MEMORY),
    Knob("max_model_len", int, "longest sequence, prompt and output; default: the model's", bounds=INT32,
         otherwise="model", record="i4"),
    Knob("num_gpu_blocks_override", int,
         "number of KV blocks instead of what fits; one of them is vLLM's null block", bounds={"ge": 2} | INT32,
         otherwise="none: from the memory", technique=KV_MEMORY),
    Knob("kv_cache_memory_bytes", float,
         "memory of the KV cache instead of what gpu_memory_utilization leaves, which then counts no more", unit="B",
         bounds={"gt": 0}, engines=("vllm",), otherwise="none: from the memory", technique=KV_MEMORY),
    Knob("enable_chunked_prefill", bool, "a prompt may be computed in several steps", True,
         record="i1", field="chunked_prefill", technique=CHUNKED),
    Knob("long_prefill_token_threshold", int, "most tokens of one prefill in a step; 0: no limit", 0, least=0,
         bounds=INT32, record="i4", technique=("prefill chunk limit", FEWER_BYTES, "packing")),
    Knob("watermark", float, "share of the blocks kept free when admitting beside running requests", 0.0,
         bounds={"lt": 1}, technique=("KV watermark", FEWER_BYTES, "packing")),
    Knob("scheduler_reserve_full_isl", bool, "admit a request only if blocks for its whole sequence are free", False,
         record="i1", field="reserve_full_isl", technique=("whole-prompt admission", FEWER_BYTES, "packing")),
    Knob("async_scheduling", bool,
         "the next step is scheduled before this step's tokens are known; not in a pipeline, whose stages take turns",
         False, record="i1", technique=("async scheduling", NEITHER, "host")),
    Knob("ignore_eos", bool,
         "requests say ignore_eos, as benchmarks' do: SGLang then expects all of max_tokens of each that runs, not a"
         " share of it", False, engines=("sglang",)),
    Knob("enable_mixed_chunk", bool, "SGLang's: decodes run beside a prefill chunk", False, engines=("sglang",),
         technique=("mixed batches", FEWER_BYTES, "packing")),
    Knob("allocator", str,
         "KV memory in pages, or in one piece per request: contiguous, buddy (powers of two at multiples of"
         " themselves)", "paged", choices=("paged", "contiguous", "buddy"), record="i1",
         technique=("allocation of KV memory", FEWER_BYTES, "packing")),
    Knob("reserve", str,
         "KV memory that a request gets at admission; to-completion: its first chunk, if prompt + max_tokens of all"
         " that run have room; output-length and power-of-two know what it will generate",
         "first-chunk", choices=("first-chunk", "whole-prompt", "max-model-len", "to-completion", "output-length",
                                 "power-of-two"),
         record="i1", technique=("reservation of KV memory", FEWER_BYTES, "packing")),
    Knob("grammar_mask_time", about="constrained decoding: CPU time per sequence in a step for the mask of tokens that"
         " the grammar allows", default=0.0, bounds=HOUR, **SECONDS,
         technique=("constrained decoding", NEITHER, "host")),
    Knob("jump_forward_share", float,
         "share of the output that the grammar alone decides, computed like a prompt instead of decoded (SGLang's jump"
         " forward; without async scheduling); 0: none", 0.0, bounds={"lt": 1}, technique=JUMPS),
    Knob("jump_forward_tokens", int, "tokens that it decides in a row; default: 4 (assumed)", 4, bounds={"le": 1024},
         needs="jump_forward_share", technique=JUMPS, source="assumed"),
    Knob("preemption_mode", str, "preempted requests are computed again, or copied over PCIe to the CPU's memory and"
         " back while that has room", "recompute", choices=("recompute", "swap"),
         technique=("swapping", FEWER_BYTES, "KV")),
    Knob("swap_space", float, "memory of the CPU per GPU for swapped requests; default: 4 GiB, as vLLM 0.6.6", 4 * GIB,
         unit="B", source="vLLM 0.6.6: engine/arg_utils.py"),
    Knob("kv_offloading_size", float,
         "memory of the CPU for cached text that the GPU evicts, as vLLM's: of all GPUs of a replica together, for each"
         " data-parallel rank its own; default: 0", 0.0, unit="B", technique=OFFLOADING),
    Knob("kv_offloading_latency",
         about="of a load from there, beyond its bytes over PCIe; default: 0 (assumed)", default=0.0, bounds=HOUR,
         **SECONDS, needs="kv_offloading_size", technique=OFFLOADING, source="assumed"),
    Knob("kv_offloading_disk_size", float,
         "room on a disk for what the CPU's memory evicts in turn; default: 0", 0.0, unit="B", technique=OFFLOADING),
    Knob("kv_offloading_disk_bandwidth", float, "at which it is read into the CPU's memory; no default", unit="B/s",
         bounds={"gt": 0}, needs="kv_offloading_disk_size", technique=OFFLOADING),
    Knob("kv_offloading_disk_latency", about="of a load from the disk, beyond its bytes; default: 0 (assumed)",
         default=0.0, bounds=HOUR, **SECONDS, needs="kv_offloading_disk_size", technique=OFFLOADING, source="assumed"),
    Knob("kv_offloading_write_policy", str, "when text goes there: when the GPU evicts it, or as soon as it is computed"
         " (SGLang's hicache-write-policy; vLLM's OffloadingConnector writes through)", "write_back",
         choices=("write_back", "write_through"), needs="kv_offloading_size", record="i1", field="write_through",
         technique=OFFLOADING),
    Knob("kv_offloading_load", str,
         "what a load delays: the step that admits its request (blocking); that step, but for what it computes layer by"
         " layer meanwhile (layers: SGLang's HiCache); or its request alone, while others run (background: vLLM's"
         " OffloadingConnector, loads one after another)", "blocking", choices=("blocking", "layers", "background"),
         record="i1", technique=OFFLOADING),
    Knob("enable_prefix_caching", bool, "find KV of text that was computed before", True, technique=PREFIXES),
    Knob("prefix_cache", str,
         "find it by hashes of full blocks, as vLLM does, or in a radix tree, as SGLang does: token by token, once it"
         " has been computed", "blocks", choices=("blocks", "radix"), needs="enable_prefix_caching",
         technique=PREFIXES),
    Knob("scheduling_policy", str,
         "who waits is admitted in order of arrival, of its tenant's priority (lower first; the least urgent is"
         " preempted first), of its prompt's length, or, lpm, of what the radix tree has of it (SGLang's longest prefix"
         " match, while no more than 128 wait)", "fcfs", choices=("fcfs", "priority", "shortest-first", "lpm"),
         record="i1", field="policy", technique=("order of admission", NEITHER, "packing")),
    Knob("host_step_time", about="CPU time of the engine core per step", default=0.5e-3, bounds=HOUR, **SECONDS,
         record="f8", technique=HOST, source=ASSUMED_HOST),
    Knob("host_sequence_time", about="CPU time of the engine core per sequence in a step", default=6e-6, bounds=HOUR,
         **SECONDS, technique=HOST, source=ASSUMED_HOST),
    Knob("host_request_time", about="CPU time of the API server per request, one after another", default=2e-3,
         bounds=HOUR, **SECONDS, record="f8", technique=HOST,
         source="assumed: HTTP, tokenizer, one hop between processes"),
    Knob("host_prompt_token_time",
         about="CPU time of the API server per prompt token (chat template, tokenizer, hashes of blocks), one request"
         " after another", default=5e-6, bounds=HOUR, **SECONDS, record="f8", technique=HOST, source=CHOSEN),
    Knob("host_request_latency",
         about="time of a request on its way to the scheduler in which others do not wait for it: HTTP, hops between"
         " processes, the engine's input queue", default=0.0, bounds=HOUR, **SECONDS, record="f8", technique=HOST,
         source="assumed none"),
    Knob("host_token_time",
         about="CPU time of the API server per token that it streams, one after another, in turn with requests; a"
         " sequence's tokens of one step (accepted drafts, jumps), or of stream_interval steps, go as one",
         default=0.0, bounds=HOUR, **SECONDS, record="f8", technique=HOST),
    Knob("stream_interval", int, "tokens that the API server sends to a client at once (vLLM's, SGLang's and"
         " TensorRT-LLM's option)", 1, bounds={"le": 2**20}, technique=STREAMING),
    Knob("stream_first_token", bool, "the first token is sent alone, as soon as it is there; false: with the first"
         " interval's", True, technique=STREAMING),
    Knob("prefill_schedule_interval", int, "vLLM's: under data-parallel attention prompts are computed in every so many"
         " steps only, while others decode and as long as such a step takes all that wait; 1: in every step", 1,
         bounds={"le": 2**20}, record="i4", technique=WAITS),
    Knob("scheduler_recv_interval", int, "SGLang's: decode steps from one look for new requests to the next; behind a"
         " prefill it looks at once; 0: it looks before every step", 0, least=0, bounds={"le": 2**20},
         engines=("sglang",), record="i4", technique=WAITS),
    Knob("batch_wait_timeout_iters", int, "TensorRT-LLM's: steps that a new prompt waits for others while tokens are"
         " generated", 0, least=0, bounds={"le": 2**20}, engines=("trtllm",), record="i4", technique=WAITS),
    Knob("batch_wait_max_tokens_ratio", float, "... unless tokens for this share of max_num_batched_tokens are there;"
         " 0: whatever is there", 0.0, bounds={"le": 1}, engines=("trtllm",), needs="batch_wait_timeout_iters",
         record="f8", technique=WAITS),
    Knob("attention_dp_timeout_iters", int, "TensorRT-LLM's: steps that a new prompt waits until every data-parallel"
         " rank has one", 0, least=0, bounds={"le": 2**20}, engines=("trtllm",), record="i4", technique=WAITS),
    Knob("worker_step_time",
         about="time per step in which the device waits for its worker even under async scheduling", default=0.0,
         bounds=HOUR, **SECONDS, technique=HOST),
    Knob("worker_sequence_time", about="the same per sequence in a step", default=0.0, bounds=HOUR, **SECONDS,
         technique=HOST),
    Knob("verification_time",
         about="time per step that drafts, beyond the passes' kernels, in which the device waits: sampling, acceptance,"
         " the next inputs, a schedule that must know them", default=0.0, bounds=HOUR, **SECONDS, technique=HOST),
    Knob("draft_pass_time",
         about="the same per pass of a drafter: launches and inputs of a small model, one pass after another",
         default=0.0, bounds=HOUR, **SECONDS, technique=HOST),
    Knob("lora_token_time",
         about="with LoRA adapters: time per token of a step and adapted matrix (seven of a Llama layer)",
         default=0.1e-6, bounds=HOUR, **SECONDS, technique=HOST,
         source="assumed: vLLM's V1 kernels leave 10.96 of some 12 requests/s (pull request 11613, 7B on A100)"),
    Knob("eager_launch_time",
         about="CPU time to launch a kernel outside CUDA graphs; no such step is shorter than its launches",
         default=13e-6, bounds=HOUR, **SECONDS,
         source=CHOSEN + ": 12 to 15 us, of engines that compile what is between their piecewise graphs"),
    Knob("fuse_norm_quant", bool,
         "norms and activations write FP8 and NVFP4 themselves where the next matrix wants it (vLLM's compilation"
         " pass)",
         True),
    Knob("enforce_eager", bool, "no CUDA graphs: decode steps are launched kernel by kernel too", False,
         technique=("CUDA graphs", NEITHER, "host")),
    Knob("max_cudagraph_capture_size", int, "largest step that a CUDA graph is captured for (vLLM's name; SGLang's"
         " cuda-graph-max-bs, TensorRT-LLM's cuda_graph_config.max_batch_size)", bounds={"le": 2**20},
         otherwise="as the engine chooses it", technique=("CUDA graphs", NEITHER, "host")),
    Knob("fuse_allreduce_rms", bool,
         "tensor-parallel all-reduces of up to 8 MiB add the residual and normalise too (vLLM's compilation pass)",
         False),
    Knob("attention_kernel", str, "of prompts, at its published rate; default: the one that was measured on the device",
         choices=("standard", "flash1", "flash2", "flash3"), otherwise="as measured on the device"),
    # what makes one engine, or one version, another
    Knob("engine", str, "its name; kernels that a hardware profile has under it are used", "vllm", user=False),
    Knob("version", str, "of the engine, or the paper that describes it", "", user=False),
    Knob("order", str,
         "what a step is made of: running-first (in order of admission, then waiting ones), decodes-first,"
         " prefills-first, prefills-only (a step with a prefill has no decodes)", "running-first",
         choices=("running-first", "decodes-first", "prefills-first", "prefills-only"), user=False, record="i4"),
    Knob("chunked_order", str, "the order under chunked prefill, if that is another",
         choices=("running-first", "decodes-first", "prefills-first", "prefills-only"), user=False),
    Knob("skip_unfit_prefill", bool,
         "chunked prefill off: a prompt above the budget lets the next ones try, rather than ending the scan", False,
         user=False, record="i1"),
    Knob("long_prefill_needs_contention", bool,
         "long_prefill_token_threshold applies only when more than one request exists", False, user=False, record="i1"),
    Knob("batch_queue", str,
         "what a pipeline of more than two stages has in flight: steps with something to do; or also empty ones, and it"
         " schedules until one has ended, or until there are as many as stages", "steps",
         choices=("steps", "until-done", "until-full"), user=False, record="i1"),
    Knob("gate_caps_windows", bool,
         "the whole-sequence gate counts of a window what is held at once, not the whole sequence", True, user=False,
         record="i1"),
    Knob("windows_by_processed", bool,
         "blocks leave a window when no step in flight sees them any more, not when the next one does not", False,
         user=False, record="i1"),
    Knob("sparse_windows", bool,
         "of a window only blocks are cached from which a prompt can go on (prefix_cache_retention_interval: 0)", False,
         user=False, record="i1"),
    Knob("state_cuts", str,
         "prefix caching is on by itself for models with attention and recurrent state too, whose prompts end a step"
         " where their state is kept: at blocks, at last before the prompt's end (0.28) or its last token (0.32)",
         "never", choices=("never", "last-block", "last-token"), user=False, record="i1"),
    Knob("evict_unhashed_first", bool,
         "freed blocks whose text nobody can find are given out next, not after all that were freed before", False,
         user=False, record="i1"),
    Knob("admission_lookahead", bool,
         "a request takes blocks for its drafts when it is admitted, not only while it runs", False, user=False,
         record="i1"),
    Knob("pads_drafts", str,
         "a request that is admitted and lacks one token is filled up with drafts, all of them wrong: never, beside who"
         " runs, or also behind cached text", "never", choices=("never", "beside-running", "beside-or-cached"),
         user=False, record="i1"),
    Knob("drafts_within_max_tokens", bool, "no drafts are verified behind max_tokens (0.11)", False, user=False,
         record="i1"),
    Knob("drafting_slots", str,
         "what some drafters take of the budget: nothing; for each sequence in the step; or for each that may run",
         "none", choices=("none", "in-step", "max-num-seqs"), user=False),
    Knob("drafter_drop", str,
         "what EAGLE has computed again of a hit in models with windows: a block more for each kind of layers (until"
         " 0.24), the last block, or the last block even if it is the end of the prompt (0.32)",
         "one-or-last", choices=("each", "one", "one-or-last"), user=False, record="i1"),
    Knob("keeps_skipped_first", bool,
         "who was passed over while a step with it was in flight stays before who is preempted later (0.28)", False,
         user=False, record="i1"),
    Knob("has_async_scheduling", bool, "vLLM's asynchronous scheduling as it decides since 0.15", True, user=False),
    Knob("quantises_first", bool, "experts' inputs travel in the experts' format (vLLM 0.19)", False, user=False),
    Knob("has_draft_models", bool, "vLLM's draft models (V1's came after 0.11)", True, user=False),
    Knob("has_watermark", bool, "vLLM's `watermark` (since 0.24)", True, user=False),
    Knob("has_prefill_context", bool, "and its prefill_context_parallel_size (0.32)", False, user=False),
    Knob("has_prefill_schedule_interval", bool, "and its prefill_schedule_interval as it decides since 0.28", False,
         user=False),
    Knob("has_drafts_by_batch", bool, "and its num_speculative_tokens_per_batch_size (since 0.24)", True, user=False),
    Knob("skips_behind_victim", bool,
         "whoever runs behind an urgent request that preempted one before it, which had nothing to do, is left out of"
         " the step",
         False, user=False, record="i1"),
    Knob("resumes_in_flight", bool,
         "a preempted request may run again before a step of a pipeline with it has come back (until 0.24)", False,
         user=False, record="i1"),
    Knob("admit_when_idle", bool, "static batching: requests enter only when nothing runs", False, user=False,
         record="i1"),
    Knob("sequence_groups", bool,
         "several sequences of one request (beams, samples) are scheduled together and share its KV blocks by"
         " reference, copied on write; else samples are requests of their own and beams are not modelled",
         False, user=False),
    Knob("retracts", bool,
         "out of memory, the requests with the fewest outputs go to the end of the queue, not the last to its head",
         False, user=False, record="i1"),
    Knob("late_hits", str, "cached text that is computed in the very step: hit, miss, or wait for the next step", "hit",
         choices=("hit", "miss", "wait"), user=False, record="i1"),
    Knob("clip_max_new_tokens", int,
         "SGLang's admission: room for at most so many of the tokens a request may generate; 0: no such rule", 0,
         least=0, user=False, record="i4"),
    Knob("new_token_ratio", float, "share of those tokens expected of running requests at first", 0.0, user=False,
         record="f8"),
    Knob("min_new_token_ratio", float, "and at last", 0.0, user=False, record="f8"),
    Knob("new_token_ratio_decay", float, "per decode step", 0.0, user=False, record="f8"),
    Knob("memory_division", str,
         "how the GPU's memory is divided between weights, KV cache and the rest (cost/partition.py)", "vllm",
         choices=("vllm", "sglang", "trtllm"), user=False),
    Knob("count_cuda_graph_memory", bool,
         "the CUDA-graph estimate is taken from the KV cache's share (since 0.21)", False, user=False),
    Knob("cuda_graph_sizes", str, "whose batch sizes CUDA graphs are captured for (cost/steptime.py)", "vllm",
         choices=("vllm", "sglang", "trtllm"), user=False),
    Knob("cuda_graph_step", int, "tokens between the CUDA graphs that are captured from 256 tokens on", 16, user=False),
)  # fmt: skip

COMPUTED: tuple[Computed, ...] = (
    Computed("block_size", "i4", "as the memory's division has it"),
    Computed("ranks", "i4", "data-parallel ranks that are there; the arrays have room for the most of any replica"),
    Computed("num_gpu_blocks", "i4", "vLLM's count; block 0 is its null block, so one less is usable"),
    Computed("watermark_blocks", "i4", "of `watermark`"),
    Computed("steps_in_flight", "i4", "2 under asynchronous scheduling, or the number of pipeline stages"),
    Computed("max_concurrency", "i4", "the client's, 0 = unlimited"),
    Computed("num_kv_groups", "i4", "of the model's layers, by what they keep"),
    Computed("kv_window", "i4", "0 = full attention, 1 = a state: one block, however long", "group"),
    Computed("kv_multiplicity", "i4", "vLLM's groups of one kind; each has its own block table", "group"),
    Computed("enable_prefix_caching", "i1", "by hashes of blocks"),
    Computed("radix", "i1", "or in a radix tree"),
    Computed("num_cpu_blocks", "i4", "to which preempted requests are swapped, 0: they are recomputed"),
    Computed("swap_block_time", "f8", "s to copy one block, out or in"),
    Computed("num_sequences", "i4", "of each request (a group), 1: it is one; the same for all replicas"),
    Computed("beam_turnover", "f8", "chance that a sequence goes on from another of its group"),
    Computed("copy_block_time", "f8", "s to copy one block in the device's memory"),
    Computed("tier_blocks", "i4", "that hold what the GPU evicts, no disk without the CPU", "tier"),
    Computed("tier_latency", "f8", "s of each load, and ...", "tier"),
    Computed("tier_block_time", "f8", "... of each block; what the disk has takes the CPU's as well", "tier"),
    Computed("store_latency", "f8", "s of a load from a store of all replicas, and ..."),
    Computed("store_block_time", "f8", "... of each block"),
    Computed("num_layers", "i4", "of the model: of which one is loaded while the one before is computed"),
    Computed("jump_tokens", "i4", "that a grammar may decide behind a sampled one, 0: none"),
    Computed("jump_chance", "f8", "that it does, behind one that is sampled"),
    Computed("lookahead", "i4", "tokens beyond a step's own for which blocks are taken: the drafter writes there"),
    Computed("draft_slots", "i4", "tokens of the budget that a drafter takes for each sequence"),
    Computed("padded_drafts", "i4", "with which a request that lacks one token is filled up, 0: it is not"),
    Computed("drop_last_hit", "i1", "the drafter needs the last block that is found computed again (EAGLE)"),
    Computed("host_sequence_time", "f8", "with the grammar's mask"),
)


def lowered() -> dict[str, Knob]:
    """Fields of the record that are a knob as it is, or the number of its choice."""
    return {knob.field or knob.name: knob for knob in KNOBS if knob.record}


def record(**each: int) -> list[tuple]:
    """The record's fields as numpy takes them. each: how many values `group` and `tier` are."""
    fields = [(name, knob.record) for name, knob in lowered().items()]
    return fields + [(f.name, f.dtype, (each[f.each],)) if f.each else (f.name, f.dtype) for f in COMPUTED]


def codes() -> dict[str, dict[str, int]]:
    """Of each field that is a choice: its words as numbers."""
    return {name: {word: i for i, word in enumerate(knob.choices)} for name, knob in lowered().items() if knob.choices}
