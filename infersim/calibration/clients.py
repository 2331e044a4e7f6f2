"""One reader per benchmark client: its JSON or CSV -> vLLM's metric names and seconds per request.

Each returns the fields of results.Measured, with `columns` (arrival, prompt_tokens, output_tokens, ttft, e2el, all in s
or tokens; gaps) where the client kept requests. Names that mean something else elsewhere are mapped: aiperf's
inter_token_latency and guidellm's inter_token_latency_ms are vLLM's tpot, aiperf's inter_chunk_latency is its itl;
guidellm's time_per_output_token counts the first token and is not read. A field that is read and holds no number is an
error that names it.
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
NAMES = tuple(f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS)


def _field(holder: Any, key: str, where: str, path: str = "") -> float | None:
    """A number that a client wrote; None if it wrote nothing, or that there is none (null, NaN)."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not _is_number(value):
        raise InputError(f"{where}: {path}{key}: must be a number (got {short(value)})")
    return float(value)


def _object(holder: Any, key: str, where: str, path: str = "") -> dict:
    """An object in a client's file; empty if it wrote none."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, dict | None):
        raise InputError(f"{where}: {path}{key}: must be an object (got {short(value)})")
    return value or {}


def _load(rate: Any, limit: Any, where: str, names: tuple[str, str]) -> Row:
    """What the client was asked for. inf, in either, is without limit: as vLLM, SGLang and JSON write it."""
    infinite = ("inf", "Infinity", math.inf)
    asked, most = (
        None if value in infinite else _field({name: value}, name, where)
        for name, value in zip(names, (rate, limit), strict=True)
    )
    for name, value in zip(names, (asked, most), strict=True):
        if value is not None and value < 0:
            raise InputError(f"{where}: {name}: must not be below 0 (got {value:g})")
    everything = rate in infinite or (not asked and most)
    return {"request_rate": math.inf if everything else asked or None, "max_concurrency": int(most) if most else None}


def _means(inputs: float | None, outputs: float | None, requests: float = 1) -> Row:
    """Mean tokens of prompts and answers, where the file says them."""
    return {"mean_input": inputs / requests if inputs and requests else None,
            "mean_output": outputs / requests if outputs and requests else None}  # fmt: skip


def _share_of(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _text(*values: Any) -> str | None:
    """The first text among them, or in a list among them."""
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return next((each for each in flat if isinstance(each, str) and each), None)


def vllm_results(document: dict, where: str) -> Row:
    """`vllm bench serve --save-result`; --save-detailed adds the requests (vLLM 0.11 to 0.33, benchmarks/serve.py).

    sglang.bench_serving (0.5) writes the same keys but for the latency of a whole request, mean_e2e_latency_ms, and
    total_throughput.
    """
    others = {name: name.replace("e2el", "e2e_latency") for name in NAMES} | {
        "total_token_throughput": "total_throughput"
    }
    summary: dict[str, float] = {}
    for name in (*NAMES, *RATES, "request_goodput"):
        value = _field(document, name, where)
        value = _field(document, others[name], where) if value is None and name in others else value
        summary |= {} if value is None else {name: value}
    completed = _field(document, "completed", where) or 0
    inputs, outputs = (_field(document, f"total_{of}_tokens", where) for of in ("input", "output"))
    limit = document.get("max_concurrency")
    row = {
        "client": "sglang.bench_serving" if "mean_e2e_latency_ms" in document else "vllm bench serve",
        "model": _text(document.get("model_id")),
        "summary": summary,
        **_load(document.get("request_rate"), limit, where, ("request_rate", "max_concurrency")),
        **_means(inputs, outputs, completed),
        "num_requests": int(completed),
        "failed": int(_field(document, "failed", where) or 0),
        "accepted_share": _share_of(_field(document, "spec_decode_accepted_tokens", where), outputs),
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
    return {"client": "requests", "summary": {}, "columns": by_name}


AIPERF = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "itl": "inter_chunk_latency",
          "e2el": "request_latency"}  # fmt: skip
AIPERF_RATES = {"request_throughput": "request_throughput", "output_throughput": "output_token_throughput",
                "total_token_throughput": "total_token_throughput", "request_goodput": "goodput"}  # fmt: skip
AIPERF_STATISTICS = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
AIPERF_LOADS = ("concurrency", "poisson", "gamma", "constant")
AIPERF_VARIES = ("rate_series", "rate_ramp", "concurrency_ramp", "adaptive_scale")
TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


def aiperf_summary(document: dict, where: str) -> Row:
    """profile_export_aiperf.json (schema 1.4), and genai-perf's: {unit, avg, p50, ...} per metric."""
    summary = {}
    for metric, tag in AIPERF.items():
        if block := _object(document, tag, where):
            unit = _time_unit(block.get("unit", "ms"), where, tag)
            for statistic, key in AIPERF_STATISTICS.items():
                if (value := _field(block, key, where, f"{tag}.")) is not None:
                    summary[f"{statistic}_{metric}_ms"] = value * unit * 1e3

    def mean(tag: str) -> float | None:
        return _field(_object(document, tag, where), "avg", where, f"{tag}.")

    summary |= {name: value for name, tag in AIPERF_RATES.items() if (value := mean(tag)) is not None}
    asked = _object(document, "input_config", where)
    models, endpoint = (_object(asked, key, where, "input_config.") for key in ("models", "endpoint"))
    items = models.get("items")
    named = [one.get("name") for one in items if isinstance(one, dict)] if isinstance(items, list) else None
    return {
        "client": "aiperf",
        "model": _text(named, endpoint.get("model_names"), asked.get("model_names"), asked.get("model")),
        "summary": summary,
        **_aiperf_load(asked, where),
        **_means(mean("input_sequence_length"), mean("output_sequence_length")),
        "num_requests": int(mean("request_count") or 0),
        "failed": int(mean("error_request_count") or 0),
    }


def _aiperf_load(asked: dict, where: str) -> Row:
    """Of input_config: phases in aiperf 0.13, loadgen before, perf_analyzer.stimulus in genai-perf 0.0.16, and keys of
    its own before."""
    path, rate = "input_config.", "request_rate"
    if (phases := asked.get("phases")) is not None:
        listed = phases if isinstance(phases, list) else []
        measured = [one for one in listed if isinstance(one, dict) and one.get("kind") != "warmup"]
        if len(measured) != 1:
            raise InputError(f"{where}: {path}phases: must be a list of one phase beside warmup (got {short(phases)})")
        (load,), path, rate = measured, f"{path}phases.", "rate"
        fixed = load.get("type") in AIPERF_LOADS
        if wrong := next((key for key in AIPERF_VARIES if load.get(key)), None if fixed else "type"):
            kinds = ", ".join(AIPERF_LOADS)
            raise InputError(
                f"{where}: {path}{wrong}: must be one of {kinds}, unchanged (got {short(load.get(wrong))})"
            )
    elif load := _object(asked, "loadgen", where, path):
        path += "loadgen."
    elif load := _object(_object(asked, "perf_analyzer", where, path), "stimulus", where, f"{path}perf_analyzer."):
        path += "perf_analyzer.stimulus."
        if other := [key for key in load if key not in ("concurrency", rate)]:
            raise InputError(f"{where}: {path}{other[0]}: must be concurrency or {rate}")
    else:
        load = asked
    return _load(load.get(rate), load.get("concurrency"), where, (f"{path}{rate}", f"{path}concurrency"))


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
    return {"client": "aiperf", "summary": {}, "columns": columns}


GUIDELLM = {"ttft": ("time_to_first_token_ms", 1.0), "tpot": ("inter_token_latency_ms", 1.0),
            "e2el": ("request_latency", 1e3)}  # fmt: skip


GUIDELLM_RATES = {"request_throughput": "requests_per_second", "output_throughput": "output_tokens_per_second",
                  "total_token_throughput": "tokens_per_second"}  # fmt: skip


def guidellm_results(document: dict, where: str) -> list[Row]:
    """guidellm's benchmarks.json: a run per benchmark, with its successful requests where they were kept."""
    if not isinstance(document["benchmarks"], list) or not document["benchmarks"]:
        raise InputError(f"{where}: benchmarks must be a list of at least one run")
    spec = _object(_object(document, "config", where), "spec", where, "config.")  # of 0.8; args of older ones
    backend = _object(spec, "backend", where, "config.spec.")
    model = _text(_object(document, "args", where).get("model"), backend.get("model"))
    return [
        _guidellm_run(one if isinstance(one, dict) else {}, model, where, f"benchmarks.{i}.")
        for i, one in enumerate(document["benchmarks"])
    ]


def _guidellm_run(run: dict, model: str | None, where: str, path: str) -> Row:
    metrics = _object(run, "metrics", where, path)

    def block(tag: str) -> dict:
        found = _object(metrics, tag, where, f"{path}metrics.")
        return _object(found, "successful", where, f"{path}metrics.{tag}.") or found

    def mean(tag: str) -> float | None:
        return _field(block(tag), "mean", where, f"{path}metrics.{tag}.")

    summary: dict[str, float] = {}
    for metric, (tag, to_ms) in GUIDELLM.items():
        percentiles = _object(block(tag), "percentiles", where, f"{path}metrics.{tag}.")
        for key in STATISTICS:
            value = _field(block(tag), key, where, f"{path}metrics.{tag}.")
            name = "p50" if key == "median" else key
            value = _field(percentiles, name, where, f"{path}metrics.{tag}.percentiles.") if value is None else value
            summary |= {} if value is None else {f"{key}_{metric}_ms": value * to_ms}
    summary |= {name: value for name, tag in GUIDELLM_RATES.items() if (value := mean(tag)) is not None}
    kept = _object(run, "requests", where, path)
    done = kept.get("successful")
    totals = _object(metrics, "request_totals", where, f"{path}metrics.") or _object(run, "request_totals", where, path)
    counted = {
        key: _field(totals, key, where, f"{path}request_totals.") for key in ("successful", "errored", "incomplete")
    }
    lengths = {key: len(kept[key]) if isinstance(kept.get(key), list) else 0 for key in counted}
    counts = {key: int(lengths[key] if value is None else value) for key, value in counted.items()}
    config = _object(run, "config", where, path)
    strategy, backend = (_object(config, key, where, f"{path}config.") for key in ("strategy", "backend"))
    names = (f"{path}config.strategy.rate", f"{path}config.strategy.streams")
    row: Row = {
        "client": "guidellm",
        "model": _text(model, backend.get("model")),
        "summary": summary,
        **_load(strategy.get("rate"), strategy.get("streams"), where, names),
        **_means(mean("prompt_token_count"), mean("output_token_count")),
        "num_requests": counts["successful"],
        "failed": counts["errored"] + counts["incomplete"],
    }
    if strategy.get("type_") == "synchronous":
        row |= {"request_rate": math.inf, "max_concurrency": 1}
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
