"""The sections of reports: what each shows of one or several runs, as cards, charts, tables, notes, blocks of text."""

import json
from typing import Any

from infersim.metrics.result import Result

from .export import bench_command, starting_commands
from .html import Page
from .parts import card, reproduce, shown, span, table
from .svg import Mark, Series, bar, chart
from .terminal import interval_text, state, title

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


Named = dict[str, dict[str, Any]]
"""name of a run -> its planning.briefing; a single run's name is empty"""


def run_page(briefing: dict[str, Any], result: Result, command: list[str]) -> Page:
    """The report of one run: planning.briefing's, and the words that reproduce it."""
    answer, named = briefing["answer"], {"": briefing}
    found = [
        answer_of(briefing),
        attainment(briefing),
        latency(named),
        load(named),
        memory(named),
        over_time(briefing),
        resources(named),
        what_if(named),
        provenance(named),
        inputs(named, {"": result}, command),
    ]
    good = answer["verdict"]["state"] == "stable" and (answer["slo"] is None or answer["slo"]["met"])
    return Page(title(answer), f"{state(answer)}: {answer['verdict']['reason']}", good, found)


def _of(what: str, name: str) -> str:
    """What, of which run if there are several."""
    return f"{what}: {name}" if name else what


def _limits(briefing: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    slo = briefing["answer"]["slo"]
    return [limit for limit in slo["limits"] if f"_{metric}_" in limit["name"]] if slo else []


def answer_of(briefing: dict[str, Any]) -> dict[str, Any]:
    answer, cost = briefing["answer"], briefing["cost"]
    metrics, explain, slo, counts = answer["metrics"], answer["explain"], answer["slo"], answer["counts"]
    with_prompts = f"{span(cost['usd_per_million_tokens'], 'USD')} with prompt tokens"
    throughput = f"{shown(metrics['request_throughput'])} requests/s"
    cards = [
        card("Output tokens/s", shown(metrics["output_throughput"]), throughput),
        card("TTFT p99", f"{shown(metrics['p99_ttft_ms'])} ms", f"median {shown(metrics['median_ttft_ms'])} ms"),
        card("TPOT p99", f"{shown(metrics['p99_tpot_ms'])} ms", f"median {shown(metrics['median_tpot_ms'])} ms"),
        card(
            "Cost per hour", span(cost["usd_per_hour"], "USD"), f"{cost['gpus']} GPU{'s' if cost['gpus'] > 1 else ''}"
        ),
        card("Million output tokens", span(cost["usd_per_million_output_tokens"], "USD"), with_prompts),
        card("Energy of an output token", span(cost["joules_per_output_token"], "J"), "GPUs at their power limit"),
    ]
    if slo is not None:
        names = ", ".join(limit["name"] for limit in slo["limits"])
        cards.insert(0, card("SLO", {True: "met", False: "missed", None: "undecided"}[slo["met"]], names))
    ceiling = f" ({explain['ceiling']})" if explain["ceiling"] else ""
    text = (
        f"{counts['completed']:,} of {counts['submitted']:,} requests completed."
        f" What binds: {explain['binding']}{ceiling}."
    )
    tables = error_tables({"": answer["model_error"]}, {"": metrics}) + prices_apart(cost)
    return {"id": "answer", "title": "Answer", "text": text, "cards": cards, "tables": tables,
            "notes": answer["model_error"]["text"]}  # fmt: skip


def error_tables(errors: dict[str, dict[str, Any]], metrics: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The intervals of model error of each run; none where nothing of the kind was measured."""
    rows = [[*([name] if name else []), metric, metrics[name][metric], *ends]
            for name, error in errors.items() for metric, ends in error["intervals"].items()]  # fmt: skip
    head = [*(["run"] if "" not in errors else []), "figure", "predicted", "from", "to"]
    return [table("In 4 of 5 deployments of this kind", head, rows)] if rows else []


def prices_apart(cost: dict[str, Any]) -> list[dict[str, Any]]:
    """A table of what prompt, cached and output tokens cost; none if prices are not known."""
    apart = cost["usd_per_million_apart"]
    rows = [[f"{kind.replace('_', ' ')} tokens", *usd] for kind, usd in apart.items() if usd]
    return [table("USD per million tokens, by time spent", ["tokens", "low", "high"], rows)] if rows else []


def attainment(briefing: dict[str, Any]) -> dict[str, Any]:
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
        tables.append(table("Limits of the run, ms", ["limit", "value", "at most", "% left", "verdict"], rows))
    if briefing["attainment"]:
        shares = [*briefing["attainment"].items(), ("all of them", slo["goodput_share"])]
        rows = [[name, None if share is None else round(100 * share, 2)] for name, share in shares]
        tables.append(table("Requests within the limits of one request", ["limit", "% of requests"], rows))
    return {"id": "slo", "title": "SLO attainment", "tables": tables}


def latency(named: Named, numbers: bool = True) -> dict[str, Any]:
    """Quantiles, and the distribution of each metric with the runs side by side. numbers: beneath each chart."""
    tables, charts = [], []
    for name, briefing in named.items():
        metrics, confidence = briefing["answer"]["metrics"], briefing["answer"]["confidence"]
        tables.append(_latencies(_of("Latency, ms", name), metrics))
        if confidence:
            caption = _of("Half-widths of the 95 % confidence intervals, ms", name)
            tables.append(_latencies(caption, confidence["half_width"]))
        if sampling := briefing["answer"]["sampling"]:
            texts = {key: interval_text(pair) for key, pair in sampling["interval"].items()}
            caption = _of("Where chance alone may move it in a run of so many requests: 95 % intervals, ms", name)
            tables.append(_latencies(caption, texts))
    for metric, words in METRICS.items():
        runs = {name: each for name, each in named.items() if metric in each["cdf"]}
        if not runs:
            continue
        shares = [share for share in next(iter(runs.values()))["cdf"]["share"] if share <= 0.999]
        columns = {name or metric: each["cdf"][metric][: len(shares)] for name, each in runs.items()}
        lowest, highest = min(map(min, columns.values())), max(map(max, columns.values()))
        about = []
        for name, each in runs.items():
            half, most = (each["answer"]["metrics"][f"{statistic}_{metric}_ms"] for statistic in ("median", "p99"))
            about.append(
                f"{name}{': half' if name else 'Half'} are within {shown(half)} ms, 99 percent within {shown(most)} ms."
            )
        percent = [100 * share for share in shares]
        rows = [list(row) for row in zip(percent, *columns.values(), strict=True)] if numbers else []
        charts.append(
            {
                "title": words.capitalize(),
                "note": f"share of {'tokens' if metric == 'itl' else 'requests'} that come at most so late",
                "svg": chart(
                    f"Distribution of {words}",
                    " ".join(about),
                    [Series(name, column, percent) for name, column in columns.items()],
                    "ms",
                    "%",
                    x_log=20 * lowest < highest < 10_000 * lowest,
                    marks=_limit_marks(runs, metric, vertical=True),
                ),
                "table": table(
                    f"Quantiles of {words}",
                    ["%", *(f"{name} ms".removeprefix(f"{metric} ") for name in columns)],
                    _thin(rows),
                )
                if numbers
                else None,
            }
        )
    return {"id": "latency", "title": "Latency", "tables": tables, "charts": charts}


def _limit_marks(named: Named, metric: str, vertical: bool) -> list[Mark]:
    """The limits on a metric, each once."""
    limits = [limit for briefing in named.values() for limit in _limits(briefing, metric)]
    return [Mark(at, name, vertical) for name, at in {limit["name"]: limit["limit"] for limit in limits}.items()]


def _latencies(caption: str, values: dict[str, Any]) -> dict[str, Any]:
    rows = [[metric, *(values.get(f"{statistic}_{metric}_ms") for statistic in STATISTICS)] for metric in METRICS]
    return table(caption, ["metric", *STATISTICS], rows)


def _thin(rows: list[list[Any]]) -> list[list[Any]]:
    """About ROWS of the rows, the last one always."""
    step = max(1, len(rows) // ROWS)
    return rows[::step] + (rows[-1:] if (len(rows) - 1) % step else [])


def load(named: Named) -> dict[str, Any]:
    """Latency against throughput with knee and limits, and throughput per GPU against the speed for a user."""
    runs = {name: briefing for name, briefing in named.items() if briefing["curve"]["points"]}
    if not runs:
        return {}
    columns = ("request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms",
               "mean_e2el_ms")  # fmt: skip
    tables, users = [], []
    for name, briefing in runs.items():
        points, axis = briefing["curve"]["points"], briefing["curve"]["axis"]
        rows = [
            [
                p[axis],
                p["state"],
                *(p["metrics"][column] for column in columns),
                p["tokens_per_gpu"],
                p["tokens_per_user"],
            ]
            for p in points
        ]
        head = [f"offered {AXES[axis]}", "verdict", "requests/s", "output tokens/s", "mean ttft ms", "p99 ttft ms",
                "mean tpot ms", "p99 tpot ms", "mean e2el ms", "tokens/s per GPU", "tokens/s of a user"]  # fmt: skip
        tables.append(table(_of("Loads", name), head, rows))
        known = [p for p in points if p["tokens_per_user"]]
        labels = [f"{p[axis]:.4g} {AXES[axis]}: {p['state']}" for p in known]
        x, y = ([p[column] for p in known] for column in ("tokens_per_user", "tokens_per_gpu"))
        users.append(Series(name or "load", x, y, True, labels, joined=True, names=[f"{p[axis]:.3g}" for p in known]))
    picture = chart(
        "Output tokens per second and GPU against tokens per second of one user",
        "Lighter loads are faster for a user and make less of the GPUs.",
        users,
        "tokens/s of one user",
        "output tokens/s per GPU",
    )
    axis = next(iter(runs.values()))["curve"]["axis"]
    note = f"up and to the right is better; each point another load, in {AXES[axis]}"
    charts = [_against_throughput(runs, metric) for metric in ("ttft", "tpot")]
    charts.append({"title": "Throughput per GPU against speed for a user", "note": note, "svg": picture})
    most = next(iter(runs.values()))["most_requests"]
    spans = {each["curve"]["span_s"] for each in runs.values()}
    how = f"at most {most:,} requests" if spans == {None} else "all requests of the workload's time, as it changes"
    text = f"The same deployment at other loads, each re-simulated with {how}."
    return {"id": "load", "title": "Load", "text": text, "charts": charts, "tables": tables}


def _against_throughput(named: Named, metric: str) -> dict[str, Any]:
    lines, marks, about = [], _limit_marks(named, metric, vertical=False), ["Latency rises with load."]
    for name, briefing in named.items():
        points, knee = briefing["curve"]["points"], briefing["curve"]["knee"]
        throughput = [p["metrics"]["output_throughput"] for p in points]
        for statistic in ("p99",) if name else ("median", "p99"):
            key = f"{statistic}_{metric}_ms"
            lines.append(Series(f"{statistic} {name or metric}", throughput, [p["metrics"][key] for p in points]))
            if seen := [p for p in briefing.get("measured", ()) if "output_throughput" in p and key in p]:
                x, y = ([p[column] for p in seen] for column in ("output_throughput", key))
                lines.append(Series(f"measured {statistic}", x, y, True))
        if not name and (now := briefing["answer"]["metrics"]["output_throughput"]):
            marks.append(Mark(now, "this run"))
        if knee is not None:
            marks.append(Mark(throughput[knee], f"knee {name}".strip()))
            about.append(
                f"The knee{f' of {name}' if name else ''} is at {shown(throughput[knee])} output tokens per second."
            )
    words = f"{metric} against output tokens per second"
    return {
        "title": f"{metric.upper()} against throughput",
        "note": "each point another load; the knee has the most throughput per latency",
        "svg": chart(words, " ".join(about), lines, "output tokens/s", "ms", y_log=True, marks=marks),
    }


def memory(named: Named) -> dict[str, Any]:
    """The memory waterfall of each run."""
    charts, texts = [], []
    for name, briefing in named.items():
        memory, engine = briefing["answer"]["memory"], briefing["answer"]["engine"]
        parts = {
            "weights": memory["weights_bytes"],
            "KV cache": memory["kv_bytes"],
            "adapters": memory["adapter_bytes"],
            "activations": memory["activation_bytes"],
            "CUDA graphs": memory["cuda_graph_bytes"],
            "other": memory["overhead_bytes"],
            "left to others": memory["total_bytes"] - memory["usable_bytes"],
        }
        cells = [(part, size / GIB) for part, size in parts.items() if size > 0]
        about = f"Of {memory['total_bytes'] / GIB:.4g} GiB, weights take {parts['weights'] / GIB:.4g} and the KV cache"
        texts.append(
            f"{name + ': ' if name else ''}{memory['num_gpu_blocks']:,} KV blocks of {memory['block_size']} tokens:"
            f" room for {memory['max_concurrency']:.3g} sequences of {engine['max_model_len']:,} tokens on a replica."
        )
        rows = [[part, size, round(100 * size * GIB / memory["total_bytes"], 1)] for part, size in cells]
        words = _of("Memory of one GPU", name)
        picture = bar(words, f"{about} {parts['KV cache'] / GIB:.4g}.", cells, "GiB")
        charts.append({"title": words, "svg": picture, "table": table(words, ["part", "GiB", "%"], rows)})
    return {"id": "memory", "title": "Memory", "text": " ".join(texts), "charts": charts}


def over_time(briefing: dict[str, Any]) -> dict[str, Any]:
    """What changed during the run."""
    lines, answer = briefing["timeline"], briefing["answer"]
    time = lines["time"]

    def figure(name: str, about: str, unit: str, **columns: list[float]) -> dict[str, Any]:
        series = [Series(label.replace("_", " "), time, values) for label, values in columns.items()]
        rows = [list(row) for row in zip(time, *columns.values(), strict=True)]
        head = ["s", *(each.name for each in series)]
        return {"title": name, "svg": chart(name, about, series, "s", unit), "table": table(name, head, _thin(rows))}

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
    count, there = len(answer["replicas"]), briefing["replicas_there"]
    text = f"{count} replica{'s' if count > 1 else ''} all the time."
    if there is not None and there < 0.999 * count:
        text = f"Of {count} replicas, {there:.3g} were there on average."
    if count > 1:
        about = f"At most {max(lines['replicas'], default=0):.4g} replicas hold a request."
        charts.append(figure("Replicas with a request", about, "replicas", replicas=lines["replicas"]))
    return {"id": "time", "title": "Over time", "text": text, "charts": charts}


def resources(named: Named) -> dict[str, Any]:
    """Time by resource, steps and bytes, and the operators under the roof."""
    charts, facts = [], {}
    for name, briefing in named.items():
        explain, work = briefing["answer"]["explain"], briefing["work"]
        busy = explain["busy_s"] or 1.0
        spent = sorted(explain["time_by_resource"].items(), key=lambda item: -item[1])
        spent = [(resource, seconds) for resource, seconds in spent if seconds > LEAST_SHARE * busy]
        most = f"Most of it, {spent[0][1] / busy:.0%}, is {spent[0][0]}." if spent else "No step was run."
        words = _of("Busy time by resource", name)
        rows = [[resource, seconds, round(100 * seconds / busy, 1)] for resource, seconds in spent]
        charts.append(
            {
                "title": words,
                "note": f"{explain['num_steps']:,} steps; busy {explain['busy_share'] or 0:.1%} of the time",
                "svg": bar(words, most, spent, "s"),
                "table": table(words, ["resource", "s", "%"], rows),
            }
        )
        charts.append(_roofline(briefing["roofline"], name))
        facts[name] = {
            "steps per output token": work["steps_per_output_token"],
            "mean step, ms": work["mean_step_ms"],
            "sequences decoded per step": work["decode_batch"],
            **{f"{kind}, GB per step and GPU": size / 1e9 for kind, size in (work["bytes_per_step"] or {}).items()},
            "share of the memory bandwidth while busy": work["bandwidth_share"],
            "share of the peak FLOP/s while busy": work["compute_share"],
            "floor of itl, ms": explain["floor_itl_ms"],
            "floor of ttft, ms": explain["floor_ttft_ms"],
        }
    rows = [[fact, *(mine.get(fact) for mine in facts.values())] for fact in next(iter(facts.values()))]
    return {
        "id": "why",
        "title": "Where the time goes",
        "text": "T = steps x time of a step; a step is bound by bytes or by FLOPs.",
        "charts": charts,
        "tables": [table("Steps and bytes", ["quantity", *(name or "value" for name in facts)], rows)],
    }


def _roofline(roof: dict[str, Any], name: str) -> dict[str, Any]:
    points, bandwidth = roof["points"], roof["bandwidth"]
    ridges = [peak / bandwidth for peak in roof["peaks"].values()]
    low = min([p["intensity"] for p in points] + [1.0]) / 2
    high = max([p["intensity"] for p in points] + ridges) * 3
    lines = [
        Series(f"{dtype} roof", [low, peak / bandwidth, high], [low * bandwidth, peak, peak])
        for dtype, peak in roof["peaks"].items()
    ]
    for phase in ("decode", "prefill"):
        mine = sorted((p for p in points if p["phase"] == phase), key=lambda p: -p["share"])
        labels = [f"{p['name']}, {phase}: {p['share']:.1%} of the step, bound by {p['bound']}" for p in mine]
        x, y = ([p[name] for p in mine] for name in ("intensity", "flops_per_s"))
        lines.append(Series(phase, x, y, True, labels, names=[p["name"] for p in mine]))
    about = "Operators by FLOP per byte and the FLOP per second that they reach, below the device's limits."
    rows = [
        [p["name"], p["phase"], p["intensity"], p["flops_per_s"] / 1e12, round(100 * p["share"], 1), p["bound"]]
        for p in points
    ]
    head = ["operator", "phase", "FLOP/byte", "TFLOP/s", "% of its step", "bound by"]
    return {
        "title": _of("Roofline of one GPU", name),
        "note": f"a decode step of {roof['batch']:.3g} sequences, and a prompt of {roof['prompt']:,} tokens",
        "svg": chart(_of("Roofline of one GPU", name), about, lines, "FLOP per byte", "FLOP/s", x_log=True, y_log=True),
        "table": table(_of("Operators on the roofline", name), head, rows),
    }


def what_if(named: Named) -> dict[str, Any]:
    """Each run with one change at a time."""
    names = ("p99_ttft_ms", "mean_tpot_ms", "output_throughput")
    head = ["change", "p99 ttft ms", "%", "mean tpot ms", "%", "output tokens/s", "%", "USD per million output tokens",
            "verdict"]  # fmt: skip
    tables = []
    for name, briefing in named.items():
        rows, cells = briefing["what_if"], []
        for row in rows:
            line, base = [row["change"]], rows[0]["metrics"]
            for metric in names:
                value = row["metrics"][metric]
                line += [value, round(100 * (value / base[metric] - 1), 1) if value and base[metric] else None]
            usd = row["cost"]["usd_per_million_output_tokens"]
            cells.append([*line, sum(usd) / 2 if usd else None, row["state"]])
        if len(rows) > 1:
            tables.append(table(_of("One change at a time", name), head, cells))
    if not tables:
        return {}
    most = f"at most {next(iter(named.values()))['most_requests']:,} requests"
    text = f"One change at a time, each re-simulated with the same draws ({most}); % is against the first row."
    return {"id": "what-if", "title": "What if", "text": text, "tables": tables}


def provenance(named: Named) -> dict[str, Any]:
    """Where the numbers behind the answer come from; what several runs share is said once."""
    head = ["operator", "dtype", "bandwidth share", "FLOP share", "fixed µs", "softness", "provenance", "source"]
    tables: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for name, briefing in named.items():
        answer = briefing["answer"]
        rows = [
            [row["operator"], row["dtype"], row["bandwidth"], row["flops"], row["fixed"] * 1e6, row["softness"],
             row["provenance"], row["source"]]
            for row in answer["provenance"]
        ]  # fmt: skip
        tables.setdefault(json.dumps(rows), table(_of("Efficiencies behind every time", name), head, rows))
        for line in answer["assumed"]:
            notes.setdefault(line, name)
    first = next(iter(named.values()))["answer"]
    text = "One replication: no intervals. Set simulation.replications for error bars."
    if first["confidence"]:
        level = first["confidence"]["level"]
        text = f"{len(first['seeds'])} replications; intervals are Student's t at {level:.0%}."
    return {
        "id": "provenance",
        "title": "What it rests on",
        "text": text,
        "notes": [f"{name + ': ' if name else ''}{line}" for line, name in notes.items()],
        "tables": list(tables.values()),
    }


def inputs(named: Named, results: dict[str, Result], command: list[str]) -> dict[str, Any]:
    """The commands that reproduce, start and measure it, and the inputs as resolved."""
    section = reproduce(command)
    for name, briefing in named.items():
        answer = briefing["answer"]
        texts = {
            **{
                f"Start the {f'{kind} replicas' if kind else 'same deployment'}": text
                for kind, text in starting_commands(results[name]).items()
            },
            "Measure it": bench_command(results[name]),
            "Scenario as resolved": json.dumps(answer["scenario"], indent=1, ensure_ascii=False),
            "Engine as resolved": json.dumps(answer["engine"], indent=1, ensure_ascii=False),
        }
        section["blocks"] += [
            {"title": _of(what, name), "text": text, "folded": what.endswith("resolved")}
            for what, text in texts.items()
        ]
    return section
