"""/metrics: vLLM 0.33's names, and older ones beside them, as Prometheus' text. Times are simulated."""

from collections.abc import Iterator
from typing import Any

from .live import Live

GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "gpu_cache_usage_perc": "The older name of kv_cache_usage_perc.",
    "engine_sleep_state": "Engine sleep state: awake, weights_offloaded, discard_all.",
    "num_requests_waiting_by_reason": "Number of requests waiting, by reason.",
    "cache_config_info": "Information of the LLMEngine CacheConfig.",
}
COUNTERS = {
    "num_preemptions": "Cumulative number of preemptions.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Number of generation tokens processed.",
    "prefix_cache_queries": "Prefix cache queries, in tokens.",
    "prefix_cache_hits": "Prefix cache hits, in tokens.",
    "external_prefix_cache_queries": "External prefix cache queries, in tokens.",
    "external_prefix_cache_hits": "External prefix cache hits, in tokens.",
    "mm_cache_queries": "Multi-modal cache queries.",
    "mm_cache_hits": "Multi-modal cache hits.",
    "corrupted_requests": "Requests with NaNs in logits.",
    "request_success": "Count of finished requests.",
}
SPECULATION = {
    "spec_decode_num_drafts": "Number of spec decoding drafts.",
    "spec_decode_num_draft_tokens": "Number of draft tokens.",
    "spec_decode_num_accepted_tokens": "Number of accepted tokens.",
}
OLD_HISTOGRAM = ("time_per_output_token_seconds", "inter_token_latency_seconds")


def _gauges(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    running, waiting = live.queues(r)
    usage = live.kv_usage(r)
    yield "num_requests_running", "", running
    yield "num_requests_waiting", "", waiting
    yield "kv_cache_usage_perc", "", usage
    yield "gpu_cache_usage_perc", "", usage
    for state in ("awake", "weights_offloaded", "discard_all"):
        yield "engine_sleep_state", f',sleep_state="{state}"', float(state == "awake")
    yield "num_requests_waiting_by_reason", ',reason="capacity"', waiting
    yield "num_requests_waiting_by_reason", ',reason="deferred"', 0
    engine, knobs = live.deployments[r].engine, live.fleet.knobs[r]
    fields = (
        f',block_size="{engine.block_size}",num_gpu_blocks="{knobs["num_gpu_blocks"]}"'
        f',enable_prefix_caching="{bool(engine.enable_prefix_caching)}"'
    )
    yield "cache_config_info", fields, 1.0


def _counters(live: Live, r: int) -> Iterator[tuple[str, str, float]]:
    counts, replica = live.counts[r], live.fleet.replicas[r]
    yield "num_preemptions", "", int(replica["num_preemptions"])
    yield "prompt_tokens", "", counts.prompt_tokens
    yield "prompt_tokens_cached", "", counts.cached_tokens
    yield "generation_tokens", "", counts.generation_tokens
    yield "prefix_cache_queries", "", counts.queried_tokens
    yield "prefix_cache_hits", "", counts.cached_tokens
    for name in ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"):
        yield name, "", 0
    yield "corrupted_requests", "", 0
    for reason, number in counts.finished.items():
        yield "request_success", f',finished_reason="{reason}"', number


def exposition(live: Live, replicas: list[int]) -> bytes:
    """The whole page for some replicas, whose number among them is their label `engine`."""
    heads = {r: f'model_name="{live.models[r]}",engine="{e}"'.replace("\\", "\\\\") for e, r in enumerate(replicas)}
    lines: list[str] = []

    def family(name: str, kind: str, text: str, rows: list[tuple[str, Any]], suffix: str = "") -> None:
        lines.append(f"# HELP vllm:{name}{suffix} {text}\n# TYPE vllm:{name}{suffix} {kind}\n")
        lines.extend([f"vllm:{name}{suffix}{{{labels}}} {value}\n" for labels, value in rows])

    for table, source, kind, suffix in (
        (GAUGES, _gauges, "gauge", ""),
        (COUNTERS, _counters, "counter", "_total"),
    ):
        rows: dict[str, list[tuple[str, Any]]] = {name: [] for name in table}
        for r, head in heads.items():
            for name, more, value in source(live, r):
                rows[name].append((head + more, value))
        for name, text in table.items():
            family(name, kind, text, rows[name], suffix)
    if live.scenario.speculation:
        columns = (lambda x: int(live.counts[x].chunks), _of(live, "num_drafts"), _of(live, "num_accepted"))
        for (name, text), column in zip(SPECULATION.items(), columns, strict=True):
            family(name, "counter", text, [(head, column(r)) for r, head in heads.items()], "_total")
    histograms = {name: name for name in live.counts[replicas[0]].histograms}
    histograms[OLD_HISTOGRAM[0]] = OLD_HISTOGRAM[1]
    for name, source_name in histograms.items():
        lines.append(f"# HELP vllm:{name} Histogram of {source_name}.\n# TYPE vllm:{name} histogram\n")
        for r, head in heads.items():
            h = live.counts[r].histograms[source_name]
            running = h.counts.cumsum().tolist()
            lines.extend(
                [
                    f'vllm:{name}_bucket{{{head},le="{bound:.1f}"}} {total}\n'
                    if bound == int(bound)
                    else f'vllm:{name}_bucket{{{head},le="{bound}"}} {total}\n'
                    for bound, total in zip(h.bounds, running, strict=False)
                ]
            )
            lines.append(
                f'vllm:{name}_bucket{{{head},le="+Inf"}} {running[-1]}\n'
                f"vllm:{name}_count{{{head}}} {running[-1]}\nvllm:{name}_sum{{{head}}} {h.sum}\n"
            )
    return "".join(lines).encode()


def _of(live: Live, name: str) -> Any:
    return lambda r: int(live.fleet.replicas[name][r])
