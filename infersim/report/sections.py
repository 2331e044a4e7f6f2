"""The sections of reports: what each shows of one or several runs, as cards, charts, tables, notes, blocks of text."""

import json
from typing import Any

from infersim.metrics.result import Result

from .export import bench_command, starting_commands
from .html import Page
from .latencies import latency, load
from .parts import Named, card, of_run, reproduce, shown, span, table, thin
from .svg import Series, bar, chart
from .terminal import state, title

GIB = 2**30
LEAST_SHARE = 5e-4  # of the busy time: a resource below it is not drawn


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
        rows = []
        for limit in slo["limits"]:
            value, most = limit["value"], limit["limit"]
            left = None if value is None else round(100 * (1 - value / most), 1)
            rows.append([limit["name"], value, most, left, "met" if limit["met"] else "missed"])
        tables.append(table("Limits of the run, ms", ["limit", "value", "at most", "% left", "verdict"], rows))
    if briefing["attainment"]:
        shares = [*briefing["attainment"].items(), ("all of them", slo["goodput_share"])]
        rows = [[name, None if share is None else round(100 * share, 2)] for name, share in shares]
        tables.append(table("Requests within the limits of one request", ["limit", "% of requests"], rows))
    return {"id": "slo", "title": "SLO attainment", "tables": tables}


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
        words = of_run("Memory of one GPU", name)
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
        return {"title": name, "svg": chart(name, about, series, "s", unit), "table": table(name, head, thin(rows))}

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
        words = of_run("Busy time by resource", name)
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
    words = of_run("Roofline of one GPU", name)
    return {
        "title": words,
        "note": f"a decode step of {roof['batch']:.3g} sequences, and a prompt of {roof['prompt']:,} tokens",
        "svg": chart(words, about, lines, "FLOP per byte", "FLOP/s", x_log=True, y_log=True),
        "table": table(of_run("Operators on the roofline", name), head, rows),
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
            tables.append(table(of_run("One change at a time", name), head, cells))
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
        tables.setdefault(json.dumps(rows), table(of_run("Efficiencies behind every time", name), head, rows))
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
            {"title": of_run(what, name), "text": text, "folded": what.endswith("resolved")}
            for what, text in texts.items()
        ]
    return section
