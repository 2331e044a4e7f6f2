"""/metrics: vLLM 0.33's names, and older ones beside them, as Prometheus' text. Times are simulated."""

from collections.abc import Callable, Iterator
from functools import lru_cache

from infersim.config.engine import Engine

from .live import Live

GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "gpu_cache_usage_perc": "The older name of kv_cache_usage_perc.",
    "engine_sleep_state": "Engine sleep state: awake, weights_offloaded, discard_all.",
    "num_requests_waiting_by_reason": "Number of requests waiting, by reason.",
    "cache_config_info": "Information of the LLMEngine CacheConfig.",
    "num_requests_kv_fetch_by_stage": "Number of waiting requests by the stage of their KV's transfer.",
    "lora_requests_info": "Adapters that requests run and wait for; the value is when this was (s).",
}
COUNTERS = {
    "num_preemptions": "Cumulative number of preemptions.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_by_source": "Prompt tokens by where their KV comes from.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "prompt_tokens_cached_by_source": "Prompt tokens found in a cache, by where it is.",
    "generation_tokens": "Number of generation tokens processed.",
    "prefix_cache_queries": "Prefix cache queries, in tokens.",
    "prefix_cache_hits": "Prefix cache hits, in tokens.",
    "external_prefix_cache_queries": "External prefix cache queries, in tokens.",
    "external_prefix_cache_hits": "External prefix cache hits, in tokens.",
    "mm_cache_queries": "Multi-modal cache queries.",
    "mm_cache_hits": "Multi-modal cache hits.",
    "request_success": "Count of finished requests.",
    "nixl_num_kv_expired_reqs": "Number of requests that had their KV expire.",
}
REJECTIONS = {"admission_rejections": "Number of admission attempts rejected by a queue limit, by reason."}
SPECULATION = {
    "spec_decode_num_drafts": "Number of spec decoding drafts.",
    "spec_decode_num_draft_tokens": "Number of draft tokens.",
    "spec_decode_num_accepted_tokens": "Number of accepted tokens.",
    "spec_decode_num_accepted_tokens_per_pos": "Number of accepted tokens by their position in the draft.",
}
SGLANG_GAUGES = {
    "num_running_reqs": "The number of running requests.",
    "num_queue_reqs": "The number of requests in the waiting queue.",
    "token_usage": "The share of the KV cache that is used.",
    "num_used_tokens": "The number of tokens in the KV cache.",
    "cache_hit_rate": "The share of prompt tokens that the prefix cache had.",
    "cache_config_info": "Information of the KV cache.",
}
SGLANG_COUNTERS = {
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
    "cached_tokens": "Number of cached prompt tokens.",
    "num_requests": "Number of requests processed.",
}
SGLANG_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
}
CACHE_CONFIG = {
    "user_specified_block_size": "False", "kv_cache_layout": "None", "prefix_match_unit": "None", "cache_dtype": "auto",
    "is_attention_free": "False", "num_gpu_blocks_override": "None", "sliding_window": "None",
    "prefix_caching_hash_algo": "sha256", "prefix_cache_retention_interval": "0", "kv_cache_dtype_skip_layers": "[]",
    "mamba_page_size_padded": "None", "skip_page_size_padded": "None", "mamba_block_size": "None",
    "mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto", "mamba_cache_mode": "none",
    "enable_mamba_shared_prefix_checkpoint": "False", "replayssm_buffer_len": "16", "use_replayssm": "False",
    "use_kda_recoverssm": "False", "num_cpu_blocks": "None", "effective_attention_block_size": "None",
    "kv_cache_max_concurrency": "None", "hash_block_size": "None", "cache_hit_alignment_tokens": "None",
    "kv_sharing_fast_prefill": "False", "swa_bounded_replay": "True", "kv_cache_memory_bytes": "None",
    "kv_offloading_size": "None", "kv_offloading_backend": "native",
}  # fmt: skip
"""fields of vLLM 0.32's CacheConfig at their defaults; those that a scenario says stand beside"""
SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""by sleep level"""
OLD_HISTOGRAM = ("time_per_output_token_seconds", "inter_token_latency_seconds")


@lru_cache(maxsize=64)
def _cache_config(engine: Engine, blocks: int) -> str:
    size = engine.block_size
    given = {"block_size": size, "num_gpu_blocks": blocks, "kv_cache_size_tokens": (blocks - 1) * int(size or 1)}
    given |= {"enable_prefix_caching": bool(engine.enable_prefix_caching)}
    given |= {"gpu_memory_utilization": engine.gpu_memory_utilization}
    return "".join(f',{key}="{value}"' for key, value in (given | CACHE_CONFIG).items())


def _gauges(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    running, waiting = live.roster.queues(r)
    usage = live.roster.kv_usage(r)
    yield "num_requests_running", "", running
    yield "num_requests_waiting", "", waiting
    yield "kv_cache_usage_perc", "", usage
    yield "gpu_cache_usage_perc", "", usage
    for number, state in enumerate(SLEEP_STATES):
        yield "engine_sleep_state", f',sleep_state="{state}"', float(number == live.asleep)
    yield "num_requests_waiting_by_reason", ',reason="capacity"', waiting
    yield "num_requests_waiting_by_reason", ',reason="deferred"', 0
    blocks = int(live.fleet.knobs["num_gpu_blocks"][r])
    yield "cache_config_info", _cache_config(live.deployments[r].engine, blocks), 1.0
    if live.hand_over:
        yield from (
            ("num_requests_kv_fetch_by_stage", f',stage="{stage}"', number)
            for stage, number in live.hand_over.stages(r).items()
        )
    if live.adapters:
        busy = ",".join(sorted({entry.model for entry in live.rows[r].values()} & live.adapters.keys()))
        names = f',max_lora="{len(live.adapters)}",running_lora_adapters="{busy}",waiting_lora_adapters=""'
        yield "lora_requests_info", names, live.until


def _counters(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    counts, replica = live.counts[r], live.fleet.replicas[r]
    yield "num_preemptions", "", int(replica["num_preemptions"])
    yield "prompt_tokens", "", counts.prompt_tokens
    cached, pulled = counts.cached_tokens, counts.pulled_tokens
    by = {"local_compute": counts.prompt_tokens - cached - pulled, "local_cache_hit": cached}
    for source, number in (by | {"external_kv_transfer": pulled}).items():
        yield "prompt_tokens_by_source", f',source="{source}"', number
    yield "prompt_tokens_cached", "", cached + pulled
    for source in SOURCES:
        number = {"device": cached, "p2p": pulled}.get(source, 0)
        yield "prompt_tokens_cached_by_source", f',source="{source}"', number
    yield "generation_tokens", "", counts.generation_tokens
    yield "prefix_cache_queries", "", counts.queried_tokens
    yield "prefix_cache_hits", "", counts.cached_tokens
    for name in ("external_prefix_cache_queries", "external_prefix_cache_hits"):
        yield name, "", pulled
    for name in ("mm_cache_queries", "mm_cache_hits"):
        yield name, "", 0
    if live.hand_over:
        yield "nixl_num_kv_expired_reqs", "", live.hand_over.expired[r]
    for reason, number in counts.finished.items():
        yield "request_success", f',finished_reason="{reason}"', number


def _sglang_gauges(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    (running, waiting), usage, counts = live.roster.queues(r), live.roster.kv_usage(r), live.counts[r]
    blocks, size = int(live.fleet.knobs["num_gpu_blocks"][r]) - 1, int(live.fleet.knobs["block_size"][r])
    yield "num_running_reqs", "", running
    yield "num_queue_reqs", "", waiting
    yield "token_usage", "", usage
    yield "num_used_tokens", "", round(usage * blocks * size)
    yield "cache_hit_rate", "", counts.cached_tokens / counts.queried_tokens if counts.queried_tokens else 0.0
    yield "cache_config_info", f',page_size="{size}",num_pages="{blocks}"', 1.0


def _sglang_counters(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    counts = live.counts[r]
    yield "prompt_tokens", "", counts.prompt_tokens
    yield "generation_tokens", "", counts.generation_tokens
    yield "cached_tokens", "", counts.cached_tokens
    yield "num_requests", "", sum(counts.finished.values())


def exposition(live: Live, replicas: list[int]) -> bytes:
    """The whole page for some replicas, whose number among them is their label `engine`; by SGLang's names for its
    presets."""
    heads = {r: f'model_name="{live.models[r]}",engine="{e}"'.replace("\\", "\\\\") for e, r in enumerate(replicas)}
    lines: list[str] = []
    for r in replicas:
        live.counts[r].fold()
    if live.deployments[replicas[0]].engine.engine == "sglang":
        _values(lines, live, heads, "sglang", SGLANG_GAUGES, _sglang_gauges, "gauge")
        _values(lines, live, heads, "sglang", SGLANG_COUNTERS, _sglang_counters, "counter")
        _histograms(lines, live, heads, "sglang", SGLANG_HISTOGRAMS)
        return "".join(lines).encode()
    _values(lines, live, heads, "vllm", GAUGES, _gauges, "gauge")
    _values(lines, live, heads, "vllm", COUNTERS, _counters, "counter")
    lines += _rejections(live, replicas)
    if live.scenario.speculation:
        _values(lines, live, heads, "vllm", SPECULATION, _speculation, "counter")
    histograms = {name: name for name in live.counts[replicas[0]].histograms}
    for name in () if live.hand_over else ("nixl_xfer_time_seconds", "nixl_bytes_transferred"):
        del histograms[name]
    _histograms(lines, live, heads, "vllm", histograms | {OLD_HISTOGRAM[0]: OLD_HISTOGRAM[1]})
    return "".join(lines).encode()


Source = Callable[[Live, int], Iterator[tuple[str, str, float]]]


def _values(
    lines: list[str], live: Live, heads: dict[int, str], engine: str, table: dict[str, str], source: Source, kind: str
) -> None:
    """Families of one kind; one without a value yet is not there, as in vLLM."""
    rows: dict[str, list[str]] = {name: [] for name in table}
    suffix = "_total" if kind == "counter" else ""
    for r, head in heads.items():
        for name, more, value in source(live, r):
            rows[name].append(f"{engine}:{name}{suffix}{{{head}{more}}} {value}\n")
    for name, text in table.items():
        if rows[name]:
            lines.append(f"# HELP {engine}:{name}{suffix} {text}\n# TYPE {engine}:{name}{suffix} {kind}\n")
            lines.extend(rows[name])


def _rejections(live: Live, replicas: list[int]) -> Iterator[str]:
    """vLLM's front end counts these, so they have no label `engine`."""
    for name, text in REJECTIONS.items():
        yield f"# HELP vllm:{name}_total {text}\n# TYPE vllm:{name}_total counter\n"
        for model in dict.fromkeys(live.models[r] for r in replicas):
            mine = [live.counts[r].refused for r in replicas if live.models[r] == model]
            for reason in mine[0]:
                total = sum(one[reason] for one in mine)
                yield f'vllm:{name}_total{{model_name="{model}",reason="{reason}"}} {total}\n'


def _histograms(lines: list[str], live: Live, heads: dict[int, str], engine: str, histograms: dict[str, str]) -> None:
    """Histograms by their name, each from a histogram of `counts`."""
    for name, source_name in histograms.items():
        full = f"{engine}:{name}"
        lines.append(f"# HELP {full} Histogram of {source_name}.\n# TYPE {full} histogram\n")
        for r, head in heads.items():
            h = live.counts[r].histograms[source_name]
            if (full, head) not in h.written:
                running = h.counts.cumsum().tolist()
                h.written[full, head] = _buckets(full, head, h.bounds) % (*running, running[-1], h.sum)
            lines.append(h.written[full, head])


@lru_cache(maxsize=4096)
def _buckets(full: str, head: str, bounds: tuple[float, ...]) -> str:
    """A histogram's lines without their numbers, which are all that changes: writing these is most of the page."""
    full, head = full.replace("%", "%%"), head.replace("%", "%%")
    texts = [f"{bound:.1f}" if bound == int(bound) else f"{bound}" for bound in bounds]
    lines = [f'{full}_bucket{{{head},le="{text}"}} %d\n' for text in [*texts, "+Inf"]]
    return "".join([*lines, f"{full}_count{{{head}}} %d\n{full}_sum{{{head}}} %s\n"])


def _speculation(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    counts, replica = live.counts[r], live.fleet.replicas[r]
    yield "spec_decode_num_drafts", "", counts.chunks
    yield "spec_decode_num_draft_tokens", "", int(replica["num_drafts"])
    yield "spec_decode_num_accepted_tokens", "", int(replica["num_accepted"])
    for position, number in enumerate(counts.accepted.tolist()):
        yield "spec_decode_num_accepted_tokens_per_pos", f',position="{position}"', number
