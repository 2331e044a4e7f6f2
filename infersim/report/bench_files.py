"""Reads result files of benchmark clients: vLLM's, aiperf's and guidellm's, under vLLM's names.

The same word means different things: aiperf's inter_token_latency and guidellm's inter_token_latency are per request,
vLLM's tpot; aiperf's inter_chunk_latency is vLLM's itl; guidellm's time_per_output_token counts the first token too and
is none of vLLM's metrics.
"""

import json
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError

MAX_FILE_BYTES = 2_000_000_000
STATISTICS = {"mean": ("avg", "mean"), "median": ("p50", "median"), "p90": ("p90",), "p95": ("p95",), "p99": ("p99",)}
RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
AIPERF = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2el": "request_latency",
}
AIPERF_RATES = {
    "request_throughput": "request_throughput",
    "output_throughput": "output_token_throughput",
    "total_token_throughput": "total_token_throughput",
    "request_goodput": "goodput",
}
GUIDELLM = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2el": ("request_latency", 1e3),  # seconds
}
GUIDELLM_RATES = {
    "request_throughput": "requests_per_second",
    "output_throughput": "output_tokens_per_second",
    "total_token_throughput": "tokens_per_second",
}
MILLISECONDS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}


def read_bench(path: str | Path) -> dict[str, Any]:
    """`client`, `completed` and `metrics` (vLLM's names, ms; what the file does not say is left out) of a result file.

    InputError if it is no result of a client we know.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes; must be the result of one benchmark")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not JSON; must be the result file of vllm bench serve, aiperf or guidellm") from None
    if isinstance(document, dict):
        if "output_throughput" in document and "mean_ttft_ms" in document:
            return _vllm(document)
        if isinstance(document.get("time_to_first_token"), dict) or "request_latency" in document:
            return _aiperf(document)
        if isinstance(document.get("benchmarks"), list) and document["benchmarks"]:
            return _guidellm(document["benchmarks"][-1], path)
    raise InputError(f"{path}: not a result that infersim knows; must be one of vllm bench serve, aiperf or guidellm")


def _vllm(document: dict[str, Any]) -> dict[str, Any]:
    names = [f"{statistic}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for statistic in STATISTICS]
    metrics = {name: document[name] for name in (*RATES, *names) if _is_number(document.get(name))}
    if _is_number(document.get("duration")):
        metrics["duration_s"] = document["duration"]
    return {"client": "vllm bench serve", "completed": document.get("completed"), "metrics": metrics}


def _aiperf(document: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for metric, tag in AIPERF.items():
        block = document.get(tag)
        if isinstance(block, dict):
            metrics |= _statistics(metric, block, MILLISECONDS.get(str(block.get("unit")).lower(), 1.0))
    for name, tag in AIPERF_RATES.items():
        block = document.get(tag)
        if isinstance(block, dict) and _is_number(block.get("avg")):
            metrics[name] = block["avg"]
    count = document.get("request_count")
    completed = count.get("avg") if isinstance(count, dict) else None
    return {"client": "aiperf", "completed": completed, "metrics": metrics}


def _guidellm(benchmark: dict[str, Any], path: Path) -> dict[str, Any]:
    """The last benchmark of the file: its successful requests."""
    found = benchmark.get("metrics") if isinstance(benchmark, dict) else None
    if not isinstance(found, dict):
        raise InputError(f"{path}: benchmarks: has no metrics; must be a guidellm result")
    metrics: dict[str, Any] = {}
    for metric, (name, scale) in GUIDELLM.items():
        if block := _successful(found.get(name)):
            metrics |= _statistics(metric, block | (block.get("percentiles") or {}), scale)
    for ours, name in GUIDELLM_RATES.items():
        if (block := _successful(found.get(name))) and _is_number(block.get("mean")):
            metrics[ours] = block["mean"]
    totals = found.get("request_totals") or benchmark.get("request_totals")
    completed = totals.get("successful") if isinstance(totals, dict) else None
    return {"client": "guidellm", "completed": completed, "metrics": metrics}


def _successful(block: Any) -> dict[str, Any] | None:
    inner = block.get("successful") if isinstance(block, dict) else None
    return inner if isinstance(inner, dict) else None


def _statistics(metric: str, block: dict[str, Any], scale: float) -> dict[str, float]:
    found = {}
    for statistic, names in STATISTICS.items():
        value = next((block[name] for name in names if _is_number(block.get(name))), None)
        if value is not None:
            found[f"{statistic}_{metric}_ms"] = value * scale
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
