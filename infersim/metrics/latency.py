"""Latencies, throughputs and goodput as `vllm bench serve` defines them (vLLM 0.33, benchmarks/serve.py).

    ttft   first token - sent                    tpot   (last token - first token) / (output tokens - 1)
    e2el   last token - sent                     itl    each gap between two chunks of a request, all requests pooled

A chunk is what the server sends at once: a step's token, or with speculation also the drafts that were accepted with
it, or so many steps' as engine.stream_interval says.
`sent` is after the client's wait for a place under max_concurrency. Only completed requests count. Requests of one
token have no tpot (for goodput it is 0) and no gap. Percentiles interpolate linearly (numpy's default). Durations run
from the start, when the client begins to wait for its first request, to the last completion; with a warm-up, from its
end, over the requests sent after it.
"""

import numpy as np

from infersim.engine.compiled.histogram import histogram_centres
from infersim.engine.compiled.state import COMPLETED, LOST, REJECTED, TIMED_OUT

from .result import Result, select

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
P_SHARES = np.array(list(PERCENTILES.values())) / 100
STATISTICS = ("mean", *PERCENTILES)
HISTOGRAM_CENTRES = histogram_centres()


def count(result: Result) -> dict[str, int]:
    """Every request submitted is in exactly one of the next five."""
    status = result.requests["status"]
    ends = {
        name: int((status == code).sum())
        for name, code in (("completed", COMPLETED), ("rejected", REJECTED), ("timed_out", TIMED_OUT), ("lost", LOST))
    }
    return {
        "submitted": len(result.requests),
        **ends,
        "unfinished": len(result.requests) - sum(ends.values()),
        "preemptions": int(result.replicas.rows["num_preemptions"].sum()),
        "retries": result.retries,
    }


def measure(result: Result) -> dict[str, float | None]:
    """The metrics of one run under vLLM's names; None where there is nothing to measure."""
    done = result.done
    names = [f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS]
    rates = ("duration_s", "request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
    metrics: dict[str, float | None] = dict.fromkeys((*rates, *names))
    if not len(done):
        return metrics
    tokens, prompts = (int(done[name].sum(dtype="i8")) for name in ("num_output_tokens", "prompt_tokens"))
    duration = float(done["last_token"].max()) - result.warmup
    metrics["duration_s"] = duration
    if duration > 0:
        metrics["request_throughput"] = len(done) / duration
        metrics["output_throughput"] = tokens / duration
        metrics["total_token_throughput"] = (tokens + prompts) / duration
        if limits := result.scenario.slo.request_limits:
            good = np.logical_and.reduce([seconds(done, metric) <= limit for metric, limit in limits.items()])
            metrics["request_goodput"] = int(good.sum()) / duration
    many = done["num_output_tokens"] > 1
    for metric in ("ttft", "tpot", "e2el"):  # one after the other: of millions of requests, each takes its room
        values = seconds(done, metric)
        values = values[many] if metric == "tpot" and not many.all() else values
        if len(values):
            metrics[f"mean_{metric}_ms"] = float(values.mean()) * 1e3
            for name, value in zip(PERCENTILES, quantiles(values, P_SHARES), strict=True):
                metrics[f"{name}_{metric}_ms"] = float(value) * 1e3
    if gaps := int(num_gaps(done).sum()):
        generation = done["last_token"] - done["first_token"]
        metrics["mean_itl_ms"] = float((generation if many.all() else generation[many]).sum() / gaps) * 1e3
        found = _itl_percentiles(result, [float(p) for p in PERCENTILES.values()])
        for name, value in zip(PERCENTILES, [] if found is None else found, strict=found is not None):
            metrics[f"{name}_itl_ms"] = float(value) * 1e3
    return metrics


def quantiles(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """f8[m]: numpy's linear quantiles of f8[n] values at shares f8[m] in [0, 1], to the last bit: numpy's own function
    loads its masked arrays, a tenth of what a short run takes."""
    at = (len(values) - 1) * shares
    low = np.floor(at).astype("i8")
    high = np.minimum(low + 1, len(values) - 1)
    ordered = np.partition(values, sorted({*low.tolist(), *high.tolist()}))
    below, above, rest = ordered[low], ordered[high], at - low
    step = above - below
    return np.where(rest >= 0.5, above - step * (1 - rest), below + step * rest)


def seconds(done: np.ndarray, metric: str) -> np.ndarray:
    """f8[n]: the ttft, tpot (0 of one token, as for goodput) or e2el of completed requests."""
    if metric != "tpot":
        return done["first_token" if metric == "ttft" else "last_token"] - done["sent"]
    gaps = done["num_output_tokens"] - 1
    generation = done["last_token"] - done["first_token"]
    return np.divide(generation, gaps, out=np.zeros(len(done)), where=gaps > 0)


def samples(done: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of each of these requests: ttft, tpot (of those with more than one token) and e2el."""
    many = select(done, done["num_output_tokens"] > 1)
    return {"ttft": seconds(done, "ttft"), "tpot": seconds(many, "tpot"), "e2el": seconds(done, "e2el")}


def num_gaps(requests: np.ndarray) -> np.ndarray:
    """i8[n]: gaps between the chunks of each request."""
    steps = requests["num_output_tokens"].astype("i8") - requests["num_accepted_tokens"]
    return np.maximum(np.where(requests["num_chunks"] > 0, requests["num_chunks"], steps) - 1, 0)


def latency_quantiles(result: Result, shares: np.ndarray) -> dict[str, np.ndarray]:
    """The quantiles of each metric (ms) at the shares f8[n] in [0, 1]; a metric without values is left out."""
    done = result.done
    found = {name: quantiles(column, shares) * 1e3 for name, column in samples(done).items() if len(column)}
    gaps = _itl_percentiles(result, (shares * 100).tolist()) if num_gaps(done).any() else None
    if gaps is not None:
        found["itl"] = gaps * 1e3
    return found


def attainment(result: Result) -> dict[str, float]:
    """The share of the measured requests that is within each limit of one request (`ttft`, `tpot`, `e2el`)."""
    done = result.done
    limits = result.scenario.slo.request_limits
    return {name: float((seconds(done, name) <= limit).mean()) for name, limit in limits.items()} if len(done) else {}


def measured_gaps(result: Result) -> np.ndarray | None:
    """f4[...], s: every inter-token gap of the measured requests, where gaps were kept."""
    if result.itl_gaps is None or result.itl_offsets is None:
        return None
    gaps = num_gaps(result.done)
    starts = result.itl_offsets[result.measured]
    return result.itl_gaps[np.repeat(starts - (np.cumsum(gaps) - gaps), gaps) + np.arange(gaps.sum())]


def histogram_is_measured(result: Result) -> bool:
    """Whether the histogram holds the gaps of the measured requests and no others: those of a request that its client
    gave up, say."""
    return int(result.itl_histogram.sum()) == int(num_gaps(result.done).sum())


def _itl_percentiles(result: Result, percentiles: list[float]) -> np.ndarray | None:
    """Percentiles of the measured requests' gaps in s: exact where every gap was kept, else from the histogram; None
    if that holds other gaps too, as that of an interrupted run does."""
    if (gaps := measured_gaps(result)) is not None:
        return quantiles(gaps, np.array(percentiles) / 100)
    return histogram_percentiles(result.itl_histogram, percentiles) if histogram_is_measured(result) else None


def histogram_percentiles(histogram: np.ndarray, percentiles: list[float]) -> np.ndarray:
    """numpy's linear percentiles of the values counted in i8[HISTOGRAM_BINS], each taken as its bin's centre.

    Within 0.4 % of the exact ones, because both order statistics that a percentile lies between are.
    """
    cumulative = np.cumsum(histogram)
    rank = (cumulative[-1] - 1) * np.asarray(percentiles) / 100
    below, above = (
        HISTOGRAM_CENTRES[np.searchsorted(cumulative, side(rank), side="right")] for side in (np.floor, np.ceil)
    )
    return below + (above - below) * (rank - np.floor(rank))
