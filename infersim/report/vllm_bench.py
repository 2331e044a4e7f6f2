"""The result file of `vllm bench serve` (vLLM 0.33, vllm/benchmarks/serve.py), as it would have measured the run."""

from typing import Any

import numpy as np

from infersim.metrics.latency import (
    HISTOGRAM_CENTRES,
    METRICS,
    PERCENTILES,
    histogram_is_measured,
    measure,
    measured_gaps,
)
from infersim.metrics.result import Result
from infersim.metrics.timeline import ramps


def vllm_bench(result: Result, save_detailed: bool = False) -> dict[str, Any]:
    """One run as the client's result JSON: lists in s, summaries in ms; lists only with save_detailed, as there.

    `date` is empty: a run is the same whenever it is made. Standard deviations are those of the population.
    """
    done = result.done
    scenario, metrics = result.scenario, measure(result)
    load = scenario.workload
    outputs, prompts = done["num_output_tokens"].astype("i8"), done["prompt_tokens"].astype("i8")
    ttft, e2el = done["first_token"] - done["sent"], done["last_token"] - done["sent"]
    many = outputs > 1
    tpot = (done["last_token"] - done["first_token"])[many] / (outputs[many] - 1)
    rate = load.request_rate
    document: dict[str, Any] = {
        "date": "",
        "endpoint_type": "infersim",
        "backend": "infersim",
        "label": None,
        "model_id": scenario.model,
        "tokenizer_id": scenario.model,
        "num_prompts": len(result.requests),
        "request_rate": "inf" if rate is None or np.isinf(rate) else rate,
        "burstiness": "inf" if np.isinf(load.burstiness) else load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": metrics["duration_s"],
        "completed": len(done),
        "failed": len(result.requests) - len(done),
        "total_input_tokens": int(prompts.sum()),
        "total_output_tokens": int(outputs.sum()),
        "request_throughput": metrics["request_throughput"],
        "request_goodput": metrics["request_goodput"],
        "output_throughput": metrics["output_throughput"],
        "total_token_throughput": metrics["total_token_throughput"],
        **_peaks(done),
    }
    if save_detailed:
        document |= {
            "input_lens": prompts.tolist(),
            "output_lens": outputs.tolist(),
            "ttfts": ttft.tolist(),
            "itls": _gaps(result),
            "start_times": done["sent"].tolist(),
            "latencies": e2el.tolist(),
        }
    spreads = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    for metric in METRICS:
        for statistic, name in (
            ("mean", "mean"),
            ("median", "median"),
            *((p, p) for p in PERCENTILES if p != "median"),
        ):
            document[f"{name}_{metric}_ms"] = metrics[f"{statistic}_{metric}_ms"]
        values = spreads.get(metric)
        spread = _itl_spread(result) if values is None else float(values.std()) if len(values) else None
        document[f"std_{metric}_ms"] = None if spread is None else spread * 1e3
    return document


def _itl_spread(result: Result) -> float | None:
    """The standard deviation (s) of the inter-token gaps; from the histogram, each is taken as its bin's centre."""
    if (gaps := measured_gaps(result)) is not None:
        return float(gaps.std(dtype="f8")) if len(gaps) else None
    histogram, count = result.itl_histogram, result.itl_histogram.sum()
    if not count or not histogram_is_measured(result):
        return None
    mean = histogram @ HISTOGRAM_CENTRES / count
    return float(np.sqrt(histogram @ (HISTOGRAM_CENTRES - mean) ** 2 / count))


def _peaks(done: np.ndarray) -> dict[str, Any]:
    """The most requests in the system in any second, and the most tokens (each request's spread over its time)."""
    if not len(done):
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start = done["sent"].min()
    first, last = (np.floor(done[name] - start).astype("i8") for name in ("sent", "last_token"))
    seconds = int(last.max()) + 2
    change = np.zeros(seconds + 1, "i8")
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    edges = np.arange(seconds + 1) + start
    rate = np.diff(ramps(done["first_token"], done["last_token"], done["num_output_tokens"].astype("f8"), edges))
    return {"max_output_tokens_per_s": float(rate.max()), "max_concurrent_requests": int(np.cumsum(change).max())}


def _gaps(result: Result) -> list[list[float]] | None:
    gaps, offsets = result.itl_gaps, result.itl_offsets
    if gaps is None or offsets is None:
        return None
    measured = np.flatnonzero(result.measured)
    counts = np.maximum(result.requests["num_output_tokens"].astype("i8") - 1, 0)
    return [gaps[offsets[i] : offsets[i] + counts[i]].astype("f8").tolist() for i in measured]
