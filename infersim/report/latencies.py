"""The sections of reports on latencies: how they are distributed, and how they rise with the load."""

from typing import Any

from .parts import Named, of_run, shown, table, thin
from .svg import Mark, Series, chart
from .terminal import interval_text

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
STATISTICS = ("mean", "median", "p90", "p95", "p99")
AXES = {"request_rate": "requests/s", "max_concurrency": "clients", "time_scale": "stretch of the trace's times"}


def _limits(briefing: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    slo = briefing["answer"]["slo"]
    return [limit for limit in slo["limits"] if f"_{metric}_" in limit["name"]] if slo else []


def latency(named: Named, numbers: bool = True) -> dict[str, Any]:
    """Quantiles, and the distribution of each metric with the runs side by side. numbers: beneath each chart."""
    tables, charts = [], []
    for name, briefing in named.items():
        metrics, confidence = briefing["answer"]["metrics"], briefing["answer"]["confidence"]
        tables.append(_latencies(of_run("Latency, ms", name), metrics))
        if confidence:
            caption = of_run("Half-widths of the 95 % confidence intervals, ms", name)
            tables.append(_latencies(caption, confidence["half_width"]))
        if sampling := briefing["answer"]["sampling"]:
            texts = {key: interval_text(pair) for key, pair in sampling["interval"].items()}
            caption = of_run("Where chance alone may move it in a run of so many requests: 95 % intervals, ms", name)
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
                    thin(rows),
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
        per = ("tokens_per_gpu", "tokens_per_user")
        rows = [[p[axis], p["state"], *(p["metrics"][c] for c in columns), *(p[c] for c in per)] for p in points]
        head = [f"offered {AXES[axis]}", "verdict", "requests/s", "output tokens/s", "mean ttft ms", "p99 ttft ms",
                "mean tpot ms", "p99 tpot ms", "mean e2el ms", "tokens/s per GPU", "tokens/s of a user"]  # fmt: skip
        tables.append(table(of_run("Loads", name), head, rows))
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
