"""What the studio's page says of a run: the answer in a sentence and five numbers, and sections beside the report's."""

import math
from typing import Any

from infersim.explain.change import more
from infersim.explain.uncertainty import ends_of

from .lanes import lanes
from .parts import shown, span, table
from .svg import Series, chart
from .terminal import copies, state, title

GIB = 2**30
WORDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency"}
HELPS = 0.03  # a what-if that brings less is no help


def head_of(brief: dict[str, Any]) -> dict[str, Any]:
    """The answer first. brief: planning.briefing's, and as far as they are known `largest` (planning.outlook's
    largest), `half_width` (of the metrics, over `runs` runs), `what_if`, `other` (another head's metrics and cost)."""
    answer = brief["answer"]
    met = answer["slo"]["met"] if answer["slo"] else None
    stable = answer["verdict"]["state"] == "stable"
    mood = "bad" if met is False or answer["verdict"]["backlog_per_s"] else "good" if stable else ""
    return {
        "title": title(answer),
        "sentence": sentence(brief),
        "mood": mood,
        "numbers": _numbers(brief),
        "lines": _lines(brief),
    }


def sentence(brief: dict[str, Any]) -> str:
    """Whether it holds, by how much, with its error bar, and whether the run was long enough."""
    answer, half = brief["answer"], brief.get("half_width") or {}
    slo, verdict = answer["slo"], answer["verdict"]
    if verdict["backlog_per_s"]:
        return f"Does not keep up: {verdict['reason']}."
    if answer["interrupted"]:
        return f"{state(answer)}: {verdict['reason']}."
    known = [limit for limit in slo["limits"] if limit["value"] is not None] if slo else []
    if not known:
        word = "Keeps up" if verdict["state"] == "stable" else state(answer).capitalize()
        return f"{word}: {verdict['reason']}."
    worst = max(known, key=lambda limit: limit["value"] / limit["limit"])
    statistic, metric, _ = worst["name"].split("_")
    width = half.get(worst["name"].replace("p50_", "median_"))
    bar = f" ± {_two(width)} ({brief['runs']} runs)" if width is not None else ""
    size = f"{WORDS[metric]} {statistic} is {shown(worst['value'])}{bar} ms"
    if slo["met"] is False:
        over = worst["value"] / worst["limit"]
        if over <= 1:
            return f"Misses: {size}, within its limit, but {state(answer)}: {verdict['reason']}."
        return f"Misses: {size}, {worst['limit']:g} are allowed ({over - 1:.0%} too much)."
    room = f"{size} of {worst['limit']:g} allowed, {1 - worst['value'] / worst['limit']:.0%} to spare"
    if width is not None and worst["value"] + width > worst["limit"]:
        room += ", less than its error bar"
    elif any(x["limit"] < ends[1] for x in known if (ends := ends_of(answer["model_error"], x["name"], x["value"]))):
        room += ", less than deployments like this differ by"
    if slo["met"]:
        return f"Holds: {room}."
    return f"Holds in this run, which is too short to tell: {room}."


def _two(width: float) -> str:
    """Two digits, as an error bar has."""
    return f"{width:,.0f}" if width >= 10 else f"{width:.2g}"


def _numbers(brief: dict[str, Any]) -> list[dict[str, Any]]:
    """name, text, value (exact), note, and what another run has instead."""
    answer, cost, half = brief["answer"], brief["cost"], brief.get("half_width") or {}
    metrics, limits = answer["metrics"], {x["name"]: x for x in (answer["slo"] or {"limits": []})["limits"]}
    other = brief.get("other")
    found = []
    for name, words, unit in (
        ("p99_ttft_ms", "TTFT p99", "ms"),
        ("p99_tpot_ms", "TPOT p99", "ms"),
        ("output_throughput", "Output", "tokens/s"),
    ):
        limit = limits.get(name)
        notes = [f"± {_two(half[name])}"] if half.get(name) is not None else []
        notes += [f"at most {limit['limit']:g}"] if limit else []
        notes += (
            [f"median {shown(metrics[name.replace('p99', 'median')])}"] if name.startswith("p99") and not limit else []
        )
        notes += [f"{shown(metrics['request_throughput'])} requests/s"] if name == "output_throughput" else []
        found.append(
            {
                "name": words,
                "text": f"{shown(metrics[name])} {unit}",
                "value": metrics[name],
                "key": name,
                "note": ", ".join(notes),
                "bad": bool(limit and limit["met"] is False),
                "other": _against(metrics[name], other and other["metrics"][name]),
            }
        )
    usd = cost["usd_per_million_output_tokens"]
    before = other and other["cost"]["usd_per_million_output_tokens"]
    found.append(
        {
            "name": "Million output tokens",
            "text": span(usd, "USD"),
            "value": usd,
            "key": "usd_per_million_output_tokens",
            "note": f"{span(cost['usd_per_hour'], 'USD')} an hour" if usd else "the price of the GPU is not known",
            "bad": False,
            "other": _against(usd and sum(usd) / 2, before and sum(before) / 2),
        }
    )
    largest = brief.get("largest")
    rate = largest and largest["largest_rate"]
    note = (
        "how far the load can grow"
        if not largest
        else more(largest["headroom"])
        if largest["headroom"]
        else largest["note"]
    )
    found.append(
        {
            "name": "Largest rate",
            "text": f"{shown(rate)} requests/s" if rate else "…" if largest is None else "–",
            "value": rate,
            "key": "largest_rate",
            "note": note,
            "bad": bool(largest and largest["headroom"] is not None and largest["headroom"] < 0),
            "other": "",
        }
    )
    return found


def _against(value: float | None, other: float | None) -> str:
    """`A 182, -18 %`."""
    if value is None or not other:
        return ""
    return f"A {shown(other)}, {value / other - 1:+.1%}"


def _lines(brief: dict[str, Any]) -> list[dict[str, str]]:
    """Questions that a person has, and their answers."""
    answer, cost, largest = brief["answer"], brief["cost"], brief.get("largest")
    hardware = answer["scenario"]["hardware"]["name"]
    now = f"{cost['gpus']:g} {hardware}"
    met = answer["slo"] and answer["slo"]["met"]
    keeps = answer["verdict"]["state"] == "stable"
    holds = (
        "enough" if met else "not enough" if met is False else "keeps up" if keeps and not answer["slo"] else "as it is"
    )
    gpus = f"{now}: {holds}"
    gpus += "" if answer["slo"] else "; set a limit under Limits (SLO) to see whether users would agree"
    if largest and largest["enough"]:
        enough = largest["enough"]
        few = enough["gpus"] < cost["gpus"]
        words = f"{enough['gpus']} {hardware} ({enough['replicas']} replica{'s' * (enough['replicas'] > 1)})"
        if enough["gpus"] != cost["gpus"]:
            gpus = f"{words} {'would be enough' if few else 'are needed'}; here are {now}"
        else:
            gpus = f"{words}: enough, and fewer are not" if enough["replicas"] > 1 else f"{words}: enough"
    elif largest and largest["enough_note"]:
        gpus = largest["enough_note"]
    breaks = answer["explain"]["binding"]
    if largest and largest["breaks"]:
        what = limit_words(largest["breaks"])
        above = largest["largest_rate"]
        breaks = (
            f"{what}, above {shown(above)} requests/s. Now: {breaks}"
            if above
            else f"{what}, at any load. Now: {breaks}"
        )
    return [
        {"question": "How many GPUs?", "answer": gpus},
        {"question": "What breaks first?", "answer": breaks},
        {"question": "What would help?", "answer": _helps(brief)},
        {"question": "How sure is that?", "answer": _sure(answer)},
    ]


def _sure(answer: dict[str, Any]) -> str:
    """How far measured deployments of this kind were from what was predicted."""
    error, limited = answer["model_error"], (answer["slo"] or {"limits": []})["limits"]
    values = {x["name"]: x["value"] for x in limited}
    values = values or {name: answer["metrics"][name] for name in ("p99_ttft_ms", "p99_tpot_ms")}
    found = {name: ends for name, value in values.items() if (ends := ends_of(error, name, value))}
    if not found:
        return error["text"][0]
    limits = {x["name"]: x["limit"] for x in limited}
    names = ", ".join(f"{limit_words(name)} {span(list(ends), 'ms')}" for name, ends in found.items())
    beyond = [limit_words(name) for name, ends in found.items() if ends[1] > limits.get(name, math.inf)]
    fate = f"; {' and '.join(beyond)} may miss" if beyond else "; all of it within the limits" if limits else ""
    return f"in 4 of 5 measured deployments of this kind, by the errors of means: {names}{fate}"


def limit_words(name: str) -> str:
    """`TTFT p99` of p99_ttft_ms."""
    statistic, _, rest = name.partition("_")
    return f"{WORDS[rest.removesuffix('_ms')]} {statistic}" if rest.removesuffix("_ms") in WORDS else name


def _helps(brief: dict[str, Any]) -> str:
    """The what-ifs that bring most, of the limit that is nearest."""
    if "what_if" not in brief:
        ceiling = brief["answer"]["explain"]["ceiling"]
        return ceiling or "…"
    base, *rows = brief["what_if"] or [None]
    if not rows:
        return "nothing of what was tried can run here"
    limits = [x for x in (brief["answer"]["slo"] or {"limits": []})["limits"] if x["value"] is not None]
    name = max(limits, key=lambda x: x["value"] / x["limit"])["name"] if limits else "mean_e2el_ms"
    name = name.replace("p50_", "median_")
    statistic, metric, _ = name.split("_")
    gains = []
    for row in rows:
        before, after = base["metrics"][name], row["metrics"][name]
        if before and after and after < (1 - HELPS) * before:
            gains.append((after / before - 1, row["change"]))
    if not gains:
        return f"nothing of what was tried lowers {WORDS[metric]} {statistic} by {HELPS:.0%}"
    gains.sort()
    return f"{WORDS[metric]} {statistic}: " + "; ".join(f"{change} ({gain:+.0%})" for gain, change in gains[:3])


def memory_log(answer: dict[str, Any]) -> str:
    """The lines that vLLM prints of its memory when it starts (its kv_cache_utils, 0.11 to 0.33)."""
    memory, engine = answer["memory"], answer["engine"]
    tokens = memory["num_gpu_blocks"] * memory["block_size"]
    return (
        f"Available KV cache memory: {memory['kv_bytes'] / GIB:.2f} GiB\n"
        f"GPU KV cache size: {tokens:,} tokens\n"
        f"Maximum concurrency for {engine['max_model_len']:,} tokens per request: {memory['max_concurrency']:.2f}x"
    )


def lengths(histograms: dict[str, tuple[list[float], list[float]]]) -> dict[str, Any]:
    """The lengths that were drawn. histograms: name -> edges, shares."""
    charts = []
    for name, (edges, shares) in histograms.items():
        percent = [100 * share for share in shares]
        words = f"{name.capitalize()} lengths"
        series = [Series(name, edges, percent)]
        charts.append({"title": words, "svg": chart(words, "Shares by length.", series, "tokens", "% of requests")})
    return {"id": "lengths", "title": "Lengths", "charts": charts}


def requests_section(bars: dict[str, list]) -> dict[str, Any]:
    """The timeline of single requests."""
    if not bars["lane"]:
        return {}
    words = f"The first {len(bars['lane']):,} requests"
    picture = {"title": words, "note": "each bar a request; point at one to read it", "svg": lanes(words, bars)}
    return {"id": "requests", "title": "Requests one by one", "charts": [picture]}


MOST_NAMED = 8  # requests of a step by name


def steps_section(found: dict[str, Any]) -> dict[str, Any]:
    """One second step by step. found: planning.steps'."""
    steps = found["steps"]
    words = f"Step by step from {found['at']:,.1f} s"
    if not steps:
        why = "no step ends in this second, or replicas interact while they run, which is not watched"
        return {"id": "steps", "title": words, "text": f"Nothing to show: {why}."}
    since = [1e3 * (step["end"] - found["at"]) for step in steps]
    prompts = [sum(tokens for _, tokens, _ in step["prompts"]) for step in steps]
    others = [step["tokens"] - own for step, own in zip(steps, prompts, strict=True)]
    batch, blocks = [len(s["prompts"]) + len(s["decodes"]) for s in steps], [s["blocks"] for s in steps]
    waiting, points = [step["waiting"] for step in steps], len(steps) < 200
    charts = [
        ("Tokens of each step", "tokens", [("of prompts", prompts), ("of answers", others)]),
        ("Requests in the batch, and waiting", "requests", [("in the batch", batch), ("waiting", waiting)]),
        ("KV blocks held", "blocks", [("held", blocks)]),
    ]
    rows = [
        [round(step["end"], 4), round(step["ms"], 3), len(step["decodes"]), ", ".join(_parts(step)), step["waiting"],
         step["blocks"]]
        for step in steps
    ]  # fmt: skip
    head = ["ends, s", "ms", "decode", "computes", "waiting", "KV blocks"]
    where = f"replica {found['replica']}, the busiest" if found["replica"] else "each point a step"
    return {
        "id": "steps",
        "title": words,
        "charts": [
            {"title": title, "note": where, "svg": chart(title, f"{len(steps)} steps.", [
                Series(name, since, y, points, joined=points) for name, y in series], "ms", unit)}
            for title, unit, series in charts
        ],
        "folded": [table("Every step", head, rows)],
    }  # fmt: skip


def _parts(step: dict[str, Any]) -> list[str]:
    """Prompts and answers that a step computes."""
    named = [f"{tokens:,} of {whole:,} prompt tokens of {i}" for i, tokens, whole in step["prompts"][:MOST_NAMED]]
    more = len(step["prompts"]) - MOST_NAMED
    named += [f"{more} more prompts"] if more > 0 else []
    decodes = step["decodes"]
    dots = " …" if len(decodes) > MOST_NAMED else ""
    named += [f"answers of {' '.join(map(str, decodes[:MOST_NAMED]))}{dots}"] if decodes else []
    return named + ([f"preempts {' '.join(map(str, step['preempted']))}"] if step["preempted"] else [])


def settings_section(answer: dict[str, Any]) -> dict[str, Any]:
    """Every knob of the engine with its value and where it comes from, and what was assumed."""
    engine = answer["engine"]
    rows = [[name, _word(engine[name]), where] for name, where in engine["origin"].items()]
    return {
        "id": "assumed",
        "title": "What it rests on",
        "notes": answer["assumed"],
        "folded": [table("Every setting of the engine", ["setting", "value", "from"], rows)],
    }


def _word(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


def plan_section(document: dict[str, Any]) -> dict[str, Any]:
    """A plan's candidates as rows: what was tried, whether it holds, what it costs."""
    rows, asked = [], document["request_rate"]
    for trial in document["simulated_candidates"]:
        deployment = trial["deployment"]
        for rate in trial["rates"]:
            if asked is not None and rate["rate"] != asked:
                continue
            sizes, usd = deployment["parallelism"], rate["usd_per_hour"]
            division = " x ".join(f"{key} {n}" for key, n in sizes.items() if key in PARALLEL and n > 1)
            held = [x["rate"] for x in trial["rates"] if x["replicas"] == rate["replicas"] and x["state"] == "met"]
            rows.append(
                {
                    "hardware": deployment["hardware"],
                    "parallel": division or "one GPU",
                    "replicas": rate["replicas"],
                    "gpus": rate["gpus"],
                    "rate": shown(max(held)) if held else "–",
                    "usd": span(usd, "") if usd else "–",
                    "usd_value": sum(usd) / 2 if usd else "",
                    "limits": ", ".join(f"{limit_words(x)} {shown(value)}" for x, value in rate["limits"].items()),
                    "tightest": f"{100 * rate['tightest']:,.0f}",
                    "tightest_value": rate["tightest"],
                    "state": "saturated" if rate["saturated"] else rate["state"],
                    "load": {
                        "hardware": deployment["hardware"],
                        "parallelism": {key: n for key, n in sizes.items() if key in PARALLEL},
                        "cluster.replicas": rate["replicas"],
                    },
                }
            )
    rows.sort(key=lambda row: (row["state"] != "met", row["usd_value"] or 1e9))
    if document["best"]:
        head = f"Best: {_deployment(document['best'])}, {span(document['best']['cost']['usd_per_hour'], 'USD')} an hour"
        runner = document["runner_up"]
        head += f"; then {_deployment(runner)}" if runner else ""
    else:
        head = f"Nothing holds the limits: {document['binding']['text']}"
    pruned = ", ".join(f"{count} {why}" for why, count in document["pruned_by"].items())
    note = f"{document['considered']} considered, {document['simulated']} simulated" + (
        f"; left out: {pruned}" if pruned else ""
    )
    return {"head": head, "rows": rows, "note": note}


PARALLEL = ("tensor", "pipeline", "attention_data", "expert", "context", "prefill_context")


def _deployment(answer: dict[str, Any]) -> str:
    found, most = answer["deployment"], shown(answer["largest_rate"])
    each = found["gpus"] // found["replicas"]
    return f"{copies(found['replicas'], each, found['hardware'])}, up to {most} requests/s"


def measured_section(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Measured runs against the prediction for the same requests; they are points of the load curve too. documents:
    calibration.validation's."""
    tables, notes = [], []
    for document in documents:
        rows = [
            [name, error["measured"], error["predicted"], round(100 * error["error"], 1)]
            for name, error in document["errors"].items()
            if name.split("_")[0] in ("mean", "median", "p99", "request", "output")
        ]
        words = f"{document['where']}: measured and predicted"
        tables.append(table(words, ["metric", "measured", "predicted", "% off"], rows))
        if document["points_to"]:
            notes.append(f"{document['where']} points to {document['points_to']}")
        notes += document["notes"]
    return {"id": "measured", "title": "Measured and predicted", "tables": tables, "notes": notes}
