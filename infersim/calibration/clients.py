"""One reader per benchmark client: its JSON or CSV -> vLLM's metric names and seconds per request.

Each returns the fields of results.Measured, with `columns` (arrival, prompt_tokens, output_tokens, ttft, e2el, all in s
or tokens; gaps) where the client kept requests. Names that mean something else elsewhere are mapped: aiperf's
inter_token_latency and guidellm's inter_token_latency_ms are vLLM's tpot, guidellm's time_per_output_token counts the
first token and is not read.
"""

import math
from typing import Any, TypeGuard

import numpy as np

from infersim.config.errors import InputError
from infersim.config.units import short
from infersim.metrics.latency import METRICS, STATISTICS
from infersim.workload.table import read_csv

Row = dict[str, Any]
RATES = ("request_throughput", "output_throughput", "total_token_throughput")


def vllm_results(document: dict, where: str) -> Row:
    """`vllm bench serve --save-result`; --save-detailed adds the requests (vLLM 0.11 to 0.33, benchmarks/serve.py).

    sglang.bench_serving writes the same keys but for the latency of a whole request, mean_e2e_latency_ms.
    """
    names = [f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS]
    summary = {name: document[name] for name in (*names, *RATES) if _is_number(document.get(name))}
    for statistic in STATISTICS:
        if _is_number(document.get(f"{statistic}_e2e_latency_ms")):
            summary.setdefault(f"{statistic}_e2el_ms", document[f"{statistic}_e2e_latency_ms"])
    rate, limit = document.get("request_rate"), document.get("max_concurrency")
    row = {
        "summary": summary,
        "request_rate": math.inf if rate in ("inf", math.inf) else rate if _is_number(rate) else None,
        "max_concurrency": limit if _is_number(limit) and limit > 0 else None,
        "num_requests": document.get("completed") or 0,
        "failed": document.get("failed") or 0,
    }
    if not all(isinstance(document.get(name), list) for name in ("input_lens", "output_lens", "ttfts", "itls")):
        return row
    prompt, output, ttft, itls = (document[name] for name in ("input_lens", "output_lens", "ttfts", "itls"))
    n = len(prompt)
    if not len(output) == len(ttft) == len(itls) == n:
        raise InputError(f"{where}: input_lens, output_lens, ttfts and itls must be equally long (--save-detailed)")
    gaps = [_numbers(one, where, "itls") for one in itls]
    first = _numbers(ttft, where, "ttfts")
    starts, waits = document.get("start_times"), document.get("queue_times")
    notes: tuple[str, ...] = ()
    if row["request_rate"] == math.inf:
        arrival = np.zeros(n)
    elif isinstance(starts, list) and len(starts) == n:
        arrival = _numbers(starts, where, "start_times")
        if isinstance(waits, list) and len(waits) == n:
            arrival = arrival - _numbers(waits, where, "queue_times")
        elif row["max_concurrency"]:
            notes = ("requests arrive when they were sent: the file does not say how long the client held them back",)
    else:
        raise InputError(f"{where}: has no start_times, so when its requests arrived is unknown; must come from a"
                         " vllm bench serve that writes them (0.12 or newer), or from --request-rate inf")  # fmt: skip
    return row | {
        "notes": notes,
        "columns": {
            "arrival": arrival,
            "prompt_tokens": _numbers(prompt, where, "input_lens"),
            "output_tokens": np.where(first > 0, _numbers(output, where, "output_lens"), 0),  # 0: it failed
            "ttft": first,
            "e2el": first + np.array([one.sum() for one in gaps]),
            "gaps": gaps,
        },
    }


def csv_requests(text: str, where: str, run: str = "") -> Row:
    """A row per request; times in s on one clock (sent or arrived, first and last token), or latencies in ms.

    infersim's own requests.csv is one of these. Rows whose `status` is not completed failed.
    """
    table = read_csv(text, where)
    columns = table.columns
    if "config" in columns:
        configs = list(dict.fromkeys(columns["config"]))
        if (run and run not in configs) or (not run and len(configs) > 1):
            raise InputError(
                f"{where}: holds the runs {', '.join(configs[:8])}; must name one, as {where}#{configs[0]}"
            )
        kept = [i for i, config in enumerate(columns["config"]) if config == (run or configs[0])]
    elif run:
        raise InputError(f"{where}#{run}: the file has no column config; must be {where}")
    else:
        kept = list(range(len(table.lines)))
    if not kept:
        raise InputError(f"{where}: only a header; must have a row per request")
    missing: list[str] = []

    def column(*names: str) -> np.ndarray | None:
        for name in names:
            if name in columns:
                return np.array([_float(columns[name][i]) for i in kept])
        missing.append(" or ".join(names))
        return None

    sent, arrived = column("sent_s", "arrival_s", "start_s"), column("arrival_s", "sent_s", "start_s")
    prompt, output = column("prompt_tokens", "input_toks", "input_tokens"), column("output_tokens", "output_toks")
    if "first_token_s" in columns and "last_token_s" in columns:
        first, last = column("first_token_s"), column("last_token_s")
        ttft, e2el = (first - sent, last - sent) if sent is not None else (first, last)
    else:
        ttft, e2el = column("ttft_ms"), column("e2el_ms")
        ttft, e2el = (None, None) if ttft is None or e2el is None else (ttft / 1e3, e2el / 1e3)
    if missing:
        raise InputError(f"{where}: has no column {'; nor '.join(dict.fromkeys(missing))} (columns:"
                         f" {', '.join(name[:30] for name in list(columns)[:12])})")  # fmt: skip
    if "status" in columns and output is not None:
        output = np.where([columns["status"][i] == "completed" for i in kept], output, 0)
    by_name = {"arrival": arrived, "prompt_tokens": prompt, "output_tokens": output, "ttft": ttft, "e2el": e2el}
    return {"summary": {}, "columns": by_name}


AIPERF = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2el": "request_latency"}
AIPERF_STATISTICS = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


def aiperf_summary(document: dict, where: str) -> Row:
    """profile_export_aiperf.json (schema 1.4): {unit, avg, p50, ...} per metric."""
    summary = {}
    for metric, tag in AIPERF.items():
        block = document.get(tag)
        if isinstance(block, dict):
            unit = _time_unit(block.get("unit", "ms"), where, tag)
            for statistic, key in AIPERF_STATISTICS.items():
                if _is_number(block.get(key)):
                    summary[f"{statistic}_{metric}_ms"] = block[key] * unit * 1e3
    throughput, count = document.get("request_throughput"), document.get("request_count")
    if isinstance(throughput, dict) and _is_number(throughput.get("avg")):
        summary["request_throughput"] = throughput["avg"]
    asked = document.get("input_config")
    load = asked.get("loadgen", {}) if isinstance(asked, dict) and isinstance(asked.get("loadgen"), dict) else {}
    rate, limit = load.get("request_rate"), load.get("concurrency")
    if limit is None and isinstance(asked, dict):
        limit = asked.get("concurrency")  # genai-perf's
    return {
        "summary": summary,
        "request_rate": rate if _is_number(rate) else math.inf if _is_number(limit) else None,
        "max_concurrency": int(limit) if _is_number(limit) else None,
        "num_requests": int(count["avg"]) if isinstance(count, dict) and _is_number(count.get("avg")) else 0,
    }


def aiperf_requests(documents: list[dict], where: str) -> Row:
    """profile_export.jsonl: {metadata, metrics, error} per request."""
    names = ("arrival", "prompt_tokens", "output_tokens", "ttft", "e2el")
    tags = {"prompt_tokens": "input_sequence_length", "output_tokens": "output_sequence_length",
            "ttft": "time_to_first_token", "e2el": "request_latency"}  # fmt: skip
    columns: dict[str, list[float]] = {name: [] for name in names}
    for number, one in enumerate(documents):
        metadata, metrics = one.get("metadata") or {}, one.get("metrics") or {}
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            raise InputError(f"{where}: record {number}: metadata and metrics must be objects")
        columns["arrival"].append(_float(metadata.get("request_start_ns")) * 1e-9)
        for name, tag in tags.items():
            block = metrics.get(tag)
            block = block if isinstance(block, dict) else {}
            value = _float(block.get("value")) if not one.get("error") else math.nan
            is_time = name in ("ttft", "e2el") and block
            columns[name].append(value * (_time_unit(block.get("unit", "ms"), where, tag) if is_time else 1))
    return {"summary": {}, "columns": columns}


GUIDELLM = {"ttft": ("time_to_first_token_ms", 1.0), "tpot": ("inter_token_latency_ms", 1.0),
            "e2el": ("request_latency", 1e3)}  # fmt: skip


def guidellm_results(document: dict, where: str) -> list[Row]:
    """guidellm's benchmarks.json: a run per benchmark, with its successful requests where they were kept."""
    if not isinstance(document["benchmarks"], list) or not document["benchmarks"]:
        raise InputError(f"{where}: benchmarks must be a list of at least one run")
    return [_guidellm_run(one if isinstance(one, dict) else {}) for one in document["benchmarks"]]


def _guidellm_run(run: dict) -> Row:
    found = run.get("metrics")
    metrics: dict = found if isinstance(found, dict) else {}
    summary: dict[str, float] = {}
    for metric, (tag, to_ms) in GUIDELLM.items():
        block = metrics.get(tag)
        block = block.get("successful", block) if isinstance(block, dict) else {}
        given = block.get("percentiles")
        percentiles: dict = given if isinstance(given, dict) else {}
        values = {"mean": block.get("mean"), "median": block.get("median", percentiles.get("p50"))}
        values |= {key: percentiles.get(key) for key in ("p90", "p95", "p99")}
        summary |= {f"{key}_{metric}_ms": value * to_ms for key, value in values.items() if _is_number(value)}
    kept = run.get("requests")
    done = kept.get("successful") if isinstance(kept, dict) else None
    failed = sum(len(kept.get(key) or ()) for key in ("errored", "incomplete")) if isinstance(kept, dict) else 0
    strategy = run.get("config", {}).get("strategy", {}) if isinstance(run.get("config"), dict) else {}
    streams = strategy.get("streams") if isinstance(strategy, dict) else None
    row: Row = {"summary": summary, "failed": failed, "num_requests": len(done or ())}
    row |= {"max_concurrency": int(streams), "request_rate": math.inf} if _is_number(streams) and streams > 0 else {}
    if not done or not isinstance(done[0], dict) or "time_to_first_token_ms" not in done[0]:
        return row
    columns = {
        "arrival": [_float(one.get("request_start_time", one.get("start_time"))) for one in done],
        "prompt_tokens": [_float(one.get("prompt_tokens")) for one in done],
        "output_tokens": [_float(one.get("output_tokens")) for one in done],
        "ttft": [_float(one.get("time_to_first_token_ms")) / 1e3 for one in done],
        "e2el": [_float(one.get("request_latency")) for one in done],
    }
    return row | {"columns": columns}


def _time_unit(unit: Any, where: str, tag: str) -> float:
    if unit not in TIME_UNITS:
        raise InputError(f"{where}: {tag}.unit must be one of {', '.join(TIME_UNITS)} (got {short(unit)})")
    return TIME_UNITS[unit]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_float(value))


def _float(value: Any) -> float:
    """The number, or NaN for what is none: that request failed."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _numbers(values: Any, where: str, name: str) -> np.ndarray:
    try:
        array = np.array(values if isinstance(values, list) else None, "f8")
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is None or array.ndim != 1:
        raise InputError(f"{where}: {name} must be a list of numbers")
    return array
