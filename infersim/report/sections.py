"""The sections of a run's report: what each shows, as cards, charts, tables, notes and blocks of text."""

import json
import shlex
from typing import Any

from infersim.spec.scenario import Scenario

from .export import join, vllm_bench_command, vllm_serve
from .svg import Mark, Series, bar, chart

ROWS = 24  # of a line chart's table
GIB = 2**30
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
STATISTICS = ("mean", "median", "p90", "p95", "p99")
AXES = {"request_rate": "requests/s", "max_concurrency": "clients", "time_scale": "stretch of the trace's times"}
LEAST_SHARE = 5e-4  # of the busy time: a resource below it is not drawn


def sections(briefing: dict[str, Any], scenario: Scenario, command: list[str]) -> list[dict[str, Any]]:
    """All sections that have something to show. briefing: planning.briefing's."""
    answer = briefing["answer"]
    found = [
        _answer(briefing),
        _slo(briefing),
        _latency(briefing),
        _load(briefing),
        _memory(answer),
        _timeline(briefing),
        _resources(briefing),
        _what_if(briefing),
        _provenance(answer),
        _inputs(answer, scenario, command),
    ]
    return [section for section in found if section]


def _table(caption: str, head: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """Cells with what sorts them; a column is numeric if none of its cells is a text."""
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(head))]
    cells = [[{"text": _text(cell), "value": "" if cell is None else cell} for cell in row] for row in rows]
    return {"caption": caption, "head": head, "rows": cells, "numeric": numeric}


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _range(pair: list[float] | None, unit: str) -> str:
    if pair is None:
        return "–"
    low, high = pair
    return f"{low:.3g} {unit}" if high - low < 0.005 * high else f"{low:.3g}–{high:.3g} {unit}"


def _card(name: str, value: str, note: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _limits(briefing: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    slo = briefing["answer"]["slo"]
    return [limit for limit in slo["limits"] if f"_{metric}_" in limit["name"]] if slo else []


def _answer(briefing: dict[str, Any]) -> dict[str, Any]:
    answer, cost = briefing["answer"], briefing["cost"]
    metrics, explain, slo, counts = answer["metrics"], answer["explain"], answer["slo"], answer["counts"]
    with_prompts = f"{_range(cost['usd_per_million_tokens'], 'USD')} with prompt tokens"
    throughput = f"{_text(metrics['request_throughput'])} requests/s"
    cards = [
        _card("Output tokens/s", _text(metrics["output_throughput"]), throughput),
        _card("TTFT p99", f"{_text(metrics['p99_ttft_ms'])} ms", f"median {_text(metrics['median_ttft_ms'])} ms"),
        _card("TPOT p99", f"{_text(metrics['p99_tpot_ms'])} ms", f"median {_text(metrics['median_tpot_ms'])} ms"),
        _card(
            "Cost per hour", _range(cost["usd_per_hour"], "USD"), f"{cost['gpus']} GPU{'s' if cost['gpus'] > 1 else ''}"
        ),
        _card("Million output tokens", _range(cost["usd_per_million_output_tokens"], "USD"), with_prompts),
        _card("Energy of an output token", _range(cost["joules_per_output_token"], "J"), "GPUs at their power limit"),
    ]
    if slo is not None:
        names = ", ".join(limit["name"] for limit in slo["limits"])
        cards.insert(0, _card("SLO", "met" if slo["met"] else "missed", names))
    ceiling = f" ({explain['ceiling']})" if explain["ceiling"] else ""
    text = (
        f"{counts['completed']:,} of {counts['submitted']:,} requests completed."
        f" What binds: {explain['binding']}{ceiling}."
    )
    apart = cost["usd_per_million_apart"]
    rows = [[f"{kind.replace('_', ' ')} tokens", *usd] for kind, usd in apart.items() if usd]
    tables = (
        [_table("USD per million tokens, by the time spent on each", ["tokens", "low", "high"], rows)] if rows else []
    )
    return {"id": "answer", "title": "Answer", "text": text, "cards": cards, "tables": tables}


def _slo(briefing: dict[str, Any]) -> dict[str, Any]:
    slo = briefing["answer"]["slo"]
    if slo is None:
        return {}
    tables = []
    if slo["limits"]:
        rows = [
            [
                limit["name"],
                limit["value"],
                limit["limit"],
                None if limit["value"] is None else round(100 * (1 - limit["value"] / limit["limit"]), 1),
                "met" if limit["met"] else "missed",
            ]
            for limit in slo["limits"]
        ]
        tables.append(_table("Limits of the run, ms", ["limit", "value", "at most", "% left", "verdict"], rows))
    if briefing["attainment"]:
        shares = [*briefing["attainment"].items(), ("all of them", slo["goodput_share"])]
        rows = [[name, None if share is None else round(100 * share, 2)] for name, share in shares]
        tables.append(_table("Requests within the limits of one request", ["limit", "% of requests"], rows))
    return {"id": "slo", "title": "SLO attainment", "tables": tables}


def _latency(briefing: dict[str, Any]) -> dict[str, Any]:
    answer, cdf = briefing["answer"], briefing["cdf"]
    metrics, confidence = answer["metrics"], answer["confidence"]
    tables = [_latencies("Latency, ms", metrics)]
    if confidence:
        tables.append(_latencies("Half-widths of the 95 % confidence intervals, ms", confidence["half_width"]))
    charts = []
    for metric, name in METRICS.items():
        if metric not in cdf:
            continue
        pairs = [[100 * share, ms] for share, ms in zip(cdf["share"], cdf[metric], strict=True) if share <= 0.999]
        x = [ms for _, ms in pairs]
        median, p99 = metrics[f"median_{metric}_ms"], metrics[f"p99_{metric}_ms"]
        picture = chart(
            f"Distribution of {name}",
            f"Half are within {_text(median)} ms, 99 percent within {_text(p99)} ms.",
            [Series(metric, x, [share for share, _ in pairs])],
            "ms",
            "%",
            x_log=min(x) > 0 and max(x) > 20 * min(x),
            marks=[Mark(limit["limit"], limit["name"]) for limit in _limits(briefing, metric)],
        )
        charts.append(
            {
                "title": name.capitalize(),
                "note": f"share of {'tokens' if metric == 'itl' else 'requests'} that come at most so late",
                "svg": picture,
                "table": _table(f"Quantiles of {name}", ["%", "ms"], _thin(pairs)),
            }
        )
    return {"id": "latency", "title": "Latency", "tables": tables, "charts": charts}


def _latencies(caption: str, values: dict[str, Any]) -> dict[str, Any]:
    rows = [[metric, *(values[f"{statistic}_{metric}_ms"] for statistic in STATISTICS)] for metric in METRICS]
    return _table(caption, ["metric", *STATISTICS], rows)


def _thin(rows: list[list[Any]]) -> list[list[Any]]:
    """About ROWS of the rows, the last one always."""
    step = max(1, len(rows) // ROWS)
    return rows[::step] + (rows[-1:] if (len(rows) - 1) % step else [])


def _load(briefing: dict[str, Any]) -> dict[str, Any]:
    points, axis = briefing["curve"]["points"], briefing["curve"]["axis"]
    if not points:
        return {}
    columns = ("request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms",
               "mean_e2el_ms")  # fmt: skip
    rows = [
        [p[axis], p["state"], *(p["metrics"][name] for name in columns), p["tokens_per_gpu"], p["tokens_per_user"]]
        for p in points
    ]
    head = [f"offered {AXES[axis]}", "verdict", "requests/s", "output tokens/s", "mean ttft ms", "p99 ttft ms",
            "mean tpot ms", "p99 tpot ms", "mean e2el ms", "tokens/s per GPU", "tokens/s of a user"]  # fmt: skip
    charts = [_against_throughput(briefing, metric) for metric in ("ttft", "tpot")]
    users = [p for p in points if p["tokens_per_user"]]
    labels = [f"{p[axis]:.4g} {AXES[axis]}: {p['state']}" for p in users]
    x, y = ([p[name] for p in users] for name in ("tokens_per_user", "tokens_per_gpu"))
    picture = chart(
        "Output tokens per second and GPU against tokens per second of one user",
        "Lighter loads are faster for a user and make less of the GPUs.",
        [Series("load", x, y, True, labels)],
        "tokens/s of one user",
        "output tokens/s per GPU",
    )
    note = "up and to the right is better; each point another load"
    charts.append({"title": "Throughput per GPU against speed for a user", "note": note, "svg": picture})
    text = f"The same deployment at other loads, each re-simulated with at most {briefing['most_requests']:,} requests."
    return {"id": "load", "title": "Load", "text": text, "charts": charts, "tables": [_table("Loads", head, rows)]}


def _against_throughput(briefing: dict[str, Any], metric: str) -> dict[str, Any]:
    points, knee = briefing["curve"]["points"], briefing["curve"]["knee"]
    throughput = [p["metrics"]["output_throughput"] for p in points]
    lines = [
        Series(f"{statistic} {metric}", throughput, [p["metrics"][f"{statistic}_{metric}_ms"] for p in points])
        for statistic in ("median", "p99")
    ]
    marks = [Mark(limit["limit"], limit["name"], vertical=False) for limit in _limits(briefing, metric)]
    about = "Latency rises with load."
    if knee is not None:
        marks.append(Mark(throughput[knee], "knee"))
        about += f" The knee is at {_text(throughput[knee])} output tokens per second."
    title = f"{metric} against output tokens per second"
    return {
        "title": f"{metric.upper()} against throughput",
        "note": "each point another load; the knee has the most throughput per latency",
        "svg": chart(title, about, lines, "output tokens/s", "ms", y_log=True, marks=marks),
    }


def _memory(answer: dict[str, Any]) -> dict[str, Any]:
    memory, engine = answer["memory"], answer["engine"]
    parts = {
        "weights": memory["weights_bytes"],
        "KV cache": memory["kv_bytes"],
        "activations": memory["activation_bytes"],
        "CUDA graphs": memory["cuda_graph_bytes"],
        "other": memory["overhead_bytes"],
        "left to others": memory["total_bytes"] - memory["usable_bytes"],
    }
    cells = [(name, size / GIB) for name, size in parts.items() if size > 0]
    about = f"Of {memory['total_bytes'] / GIB:.4g} GiB, weights take {parts['weights'] / GIB:.4g} and the KV cache"
    text = (
        f"{memory['num_gpu_blocks']:,} KV blocks of {memory['block_size']} tokens: room for"
        f" {memory['max_concurrency']:.3g} sequences of {engine['max_model_len']:,} tokens on each replica."
    )
    rows = [[name, size, round(100 * size * GIB / memory["total_bytes"], 1)] for name, size in cells]
    figure = {
        "title": "Memory of one GPU",
        "svg": bar("Memory of one GPU", f"{about} {parts['KV cache'] / GIB:.4g}.", cells, "GiB"),
        "table": _table("Memory of one GPU", ["part", "GiB", "%"], rows),
    }
    return {"id": "memory", "title": "Memory", "text": text, "charts": [figure]}


def _timeline(briefing: dict[str, Any]) -> dict[str, Any]:
    lines, answer = briefing["timeline"], briefing["answer"]
    time = lines["time"]

    def figure(name: str, about: str, unit: str, **columns: list[float]) -> dict[str, Any]:
        series = [Series(label.replace("_", " "), time, values) for label, values in columns.items()]
        rows = [list(row) for row in zip(time, *columns.values(), strict=True)]
        table = _table(name, ["s", *(each.name for each in series)], _thin(rows))
        return {"title": name, "svg": chart(name, about, series, "s", unit), "table": table}

    running, waiting = lines["running"], lines["waiting"]
    most = f"At most {max(running, default=0):.4g} run and {max(waiting, default=0):.4g} wait."
    charts = [
        figure("Requests running and waiting", most, "requests", running=running, waiting=waiting),
        figure("Arrivals and completions", "Requests per second over the run.", "requests/s",
               arrivals=lines["arrivals"], completions=lines["completions"]),
        figure("Output tokens", "Tokens per second over the run.", "tokens/s", output_tokens=lines["output_tokens"]),
    ]  # fmt: skip
    if lines["kv_usage"] is not None:
        percent = [100 * share for share in lines["kv_usage"]]
        charts.append(figure("KV cache used", f"At most {max(percent, default=0):.3g} percent.", "%", used=percent))
    if preemptions := answer["counts"]["preemptions"]:
        about = f"{preemptions:,} preemptions in all."
        charts.append(figure("Requests that were preempted", about, "requests/s", by_their_start=lines["preempted"]))
    replicas = answer["scenario"]["cluster"]["replicas"]
    text = f"{replicas} replica{'s' if replicas > 1 else ''} all the time."
    return {"id": "time", "title": "Over time", "text": text, "charts": charts}


def _resources(briefing: dict[str, Any]) -> dict[str, Any]:
    explain, work = briefing["answer"]["explain"], briefing["work"]
    busy = explain["busy_s"] or 1.0
    spent = sorted(explain["time_by_resource"].items(), key=lambda item: -item[1])
    spent = [(name, seconds) for name, seconds in spent if seconds > LEAST_SHARE * busy]
    most = f"Most of it, {spent[0][1] / busy:.0%}, is {spent[0][0]}." if spent else "No step was run."
    time = {
        "title": "Busy time by resource",
        "note": f"{explain['num_steps']:,} steps; busy {explain['busy_share'] or 0:.1%} of the time",
        "svg": bar("Busy time by resource", most, spent, "s"),
        "table": _table(
            "Busy time by resource", ["resource", "s", "%"], [[name, t, round(100 * t / busy, 1)] for name, t in spent]
        ),
    }
    facts = [
        ["steps per output token", work["steps_per_output_token"]],
        ["mean step, ms", work["mean_step_ms"]],
        ["sequences decoded per step", work["decode_batch"]],
        *([f"{kind}, bytes per step and GPU", size] for kind, size in (work["bytes_per_step"] or {}).items()),
        ["share of the memory bandwidth while busy", work["bandwidth_share"]],
        ["share of the peak FLOP/s while busy", work["compute_share"]],
        ["floor of itl, ms", explain["floor_itl_ms"]],
        ["floor of ttft, ms", explain["floor_ttft_ms"]],
    ]
    return {
        "id": "why",
        "title": "Where the time goes",
        "text": "T = steps x time of a step; a step is bound by bytes or by FLOPs.",
        "charts": [time, _roofline(briefing["roofline"])],
        "tables": [_table("Steps and bytes", ["quantity", "value"], facts)],
    }


def _roofline(roof: dict[str, Any]) -> dict[str, Any]:
    points, bandwidth = roof["points"], roof["bandwidth"]
    ridges = [peak / bandwidth for peak in roof["peaks"].values()]
    low = min([p["intensity"] for p in points] + [1.0]) / 2
    high = max([p["intensity"] for p in points] + ridges) * 3
    lines = [
        Series(f"{dtype} roof", [low, peak / bandwidth, high], [low * bandwidth, peak, peak])
        for dtype, peak in roof["peaks"].items()
    ]
    for phase in ("decode", "prefill"):
        mine = [p for p in points if p["phase"] == phase]
        labels = [f"{p['name']}, {phase}: {p['share']:.1%} of the step, bound by {p['bound']}" for p in mine]
        x, y = ([p[name] for p in mine] for name in ("intensity", "flops_per_s"))
        lines.append(Series(phase, x, y, True, labels))
    about = "Operators by FLOP per byte and the FLOP per second that they reach, below the device's limits."
    rows = [
        [p["name"], p["phase"], p["intensity"], p["flops_per_s"] / 1e12, round(100 * p["share"], 1), p["bound"]]
        for p in points
    ]
    head = ["operator", "phase", "FLOP/byte", "TFLOP/s", "% of its step", "bound by"]
    return {
        "title": "Roofline of one GPU",
        "note": f"a decode step of {roof['batch']:.3g} sequences, and a prompt of {roof['prompt']:,} tokens",
        "svg": chart("Roofline of one GPU", about, lines, "FLOP per byte", "FLOP/s", x_log=True, y_log=True),
        "table": _table("Operators on the roofline", head, rows),
    }


def _what_if(briefing: dict[str, Any]) -> dict[str, Any]:
    rows = briefing["what_if"]
    if len(rows) < 2:
        return {}
    base = rows[0]["metrics"]
    names = ("p99_ttft_ms", "mean_tpot_ms", "output_throughput")
    cells = []
    for row in rows:
        line = [row["change"]]
        for name in names:
            value = row["metrics"][name]
            line += [value, round(100 * (value / base[name] - 1), 1) if value and base[name] else None]
        usd = row["cost"]["usd_per_million_output_tokens"]
        cells.append([*line, sum(usd) / 2 if usd else None, row["state"]])
    head = ["change", "p99 ttft ms", "%", "mean tpot ms", "%", "output tokens/s", "%", "USD per million output tokens",
            "verdict"]  # fmt: skip
    most = f"at most {briefing['most_requests']:,} requests"
    text = f"One change at a time, each re-simulated with the same draws ({most}); % is against the first row."
    return {"id": "what-if", "title": "What if", "text": text, "tables": [_table("One change at a time", head, cells)]}


def _provenance(answer: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [row["operator"], row["dtype"], row["bandwidth"], row["flops"], row["fixed"] * 1e6, row["softness"],
         row["provenance"], row["source"]]
        for row in answer["provenance"]
    ]  # fmt: skip
    head = ["operator", "dtype", "bandwidth share", "FLOP share", "fixed µs", "softness", "provenance", "source"]
    text = "One replication: no intervals. Set simulation.replications for error bars."
    if answer["confidence"]:
        level = answer["confidence"]["level"]
        text = f"{len(answer['seeds'])} replications; intervals are Student's t at {level:.0%}."
    tables = [_table("Efficiencies behind every time", head, rows)]
    return {"id": "provenance", "title": "What it rests on", "text": text, "notes": answer["assumed"], "tables": tables}


def _inputs(answer: dict[str, Any], scenario: Scenario, command: list[str]) -> dict[str, Any]:
    texts = {
        "Reproduce": shlex.join(command),
        "Start the same deployment": join(vllm_serve(scenario, answer["engine"])),
        "Measure it": join(vllm_bench_command(scenario)),
        "Scenario as resolved": json.dumps(answer["scenario"], indent=1, ensure_ascii=False),
        "Engine as resolved": json.dumps(answer["engine"], indent=1, ensure_ascii=False),
    }
    blocks = [{"title": name, "text": text, "folded": name.endswith("resolved")} for name, text in texts.items()]
    return {"id": "inputs", "title": "Inputs and commands", "blocks": blocks}
