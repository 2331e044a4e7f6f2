"""The report of a plan: the answer and its rivals, the search, then the sections of a run of the best."""

from typing import Any

from infersim.explain.change import more, plain
from infersim.metrics.result import Result

from .html import Page
from .latencies import latency, load
from .parts import card, reproduce, shown, span, table
from .plan import (
    deployment_row,
    describe,
    efficiencies_text,
    equals_text,
    error_lines,
    margin_text,
    nothing_text,
    prices_lines,
    shape_of,
    to_win_text,
)
from .sections import error_tables, inputs, memory, over_time, prices_apart, provenance, resources, what_if
from .svg import Mark, Series, chart

Briefed = dict[str, tuple[Result, dict[str, Any]]]
"""`best` and `runner-up`: a run and planning.briefing's"""
Trial = tuple[str, dict[str, Any]]
"""a deployment that was simulated, in words, and what came out at one rate"""
HEADS = {
    "cost": "The cheapest",
    "gpus": "The fewest GPUs",
    "energy": "The least energy",
    "goodput": "The most requests",
    "users": "The most users",
}


def plan_page(document: dict[str, Any], briefed: Briefed, command: list[str]) -> Page:
    """document: planning.search's; command: the words that reproduce it."""
    named = {name: briefing for name, (_, briefing) in briefed.items()}
    if not document["feasible"]:
        last = reproduce(command) | {"notes": document["assumed"]}
        why = nothing_text(document)
        text: dict[str, Any] = {"id": "answer", "title": "Answer", "text": f"{why[0].upper()}{why[1:]}."}
        text |= {"tables": [_slo(document), *_deployments(document)], "notes": prices_lines(document)}
        found = [text, _candidates(document), _search(document), last]
        return Page("No deployment holds the SLO", document["binding"]["text"], False, found)
    best = {"best": named["best"]}
    rests = provenance(named)
    found = [
        _answer(document),
        _rivals(document),
        _candidates(document),
        latency(named),
        load(named),
        memory(named),
        over_time(named["best"]),
        resources(best),
        what_if(best),
        rests | {"notes": [*prices_lines(document), *document["assumed"], *rests["notes"]]},
        _search(document),
        inputs(best, {name: result for name, (result, _) in briefed.items()}, command),
    ]
    head = f"{HEADS[document['objective']]}: {describe(document['best']['deployment'])}"
    return Page(head, f"Holds the SLO at {_rates(document['best'])}", True, found)


def _rates(answer: dict[str, Any]) -> str:
    largest = f", and up to {plain(answer['largest_rate'])} ({more(answer['headroom'])})" if answer["headroom"] else ""
    return f"{plain(answer['rate'])} requests/s{largest}"


def _slo(document: dict[str, Any]) -> dict[str, Any]:
    return table("What was asked, ms", ["limit", "at most"], [list(limit) for limit in document["slo"].items()])


def _answer(document: dict[str, Any]) -> dict[str, Any]:
    best, cost = document["best"], document["best"]["cost"]
    binding = document["binding"]
    cards = [
        card(
            "Cost per hour", span(cost["usd_per_hour"], "USD"), f"{cost['gpus']} GPU{'s' if cost['gpus'] > 1 else ''}"
        ),
        card(
            "Million output tokens",
            span(cost["usd_per_million_output_tokens"], "USD"),
            f"{span(cost['usd_per_million_tokens'], 'USD')} with prompt tokens",
        ),
        card("Requests/s", f"{plain(best['rate'])}", f"up to {plain(best['largest_rate'])}: {more(best['headroom'])}"),
        card("First limit to break", binding["limit"], "at a higher rate"),
        card("Energy of an output token", span(cost["joules_per_output_token"], "J"), "GPUs at their power limit"),
    ]
    rows = [
        [x["name"], x["mean"], x["upper"], x["run_upper"], x["limit"], round(100 * (1 - x["mean"] / x["limit"]), 1)]
        for x in best["limits"]
    ]
    head = ["limit", f"mean of {best['replications']} runs", "upper 95 %", "one more run, 99 %", "at most", "% left"]
    tables = [table("Limits", head, rows), *prices_apart(cost)]
    text = f"The first limit to break at a higher rate is {binding['limit']}. What binds: {binding['text']}."
    tables[1:1] = error_tables({"": best["model_error"]}, {"": best["metrics"]})
    return {"id": "answer", "title": "Answer", "text": text, "cards": cards, "tables": tables,
            "notes": error_lines(best, document["stays"])}  # fmt: skip


def _rivals(document: dict[str, Any]) -> dict[str, Any]:
    """The best and the runner-up side by side."""
    answers = {"best": document["best"], "runner-up": document["runner_up"]}
    answers = {name: answer for name, answer in answers.items() if answer}
    figures = {
        "deployment": lambda a: describe(a["deployment"]),
        "GPUs": lambda a: a["cost"]["gpus"],
        "USD per hour": lambda a: span(a["cost"]["usd_per_hour"], ""),
        "USD per million output tokens": lambda a: span(a["cost"]["usd_per_million_output_tokens"], ""),
        "J per output token": lambda a: span(a["cost"]["joules_per_output_token"], ""),
        "largest rate, requests/s": lambda a: a["largest_rate"],
        "first limit to break": lambda a: a["binding"]["limit"],
        "what binds": lambda a: a["binding"]["text"],
        "rests on": efficiencies_text,
    }
    rows = [[figure, *(shown(of(answer)) for answer in answers.values())] for figure, of in figures.items()]
    rows += [
        [name, *(shown(answer["metrics"][name]) for answer in answers.values())]
        for name in ("p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "p99_e2el_ms", "output_throughput")
    ]
    text = f"Runner-up: {margin_text(document['margin'])}." if document["margin"] else "Nothing else holds the SLO."
    if document["to_win"]:
        text += f" It would win {to_win_text(document['to_win'])}."
    if document["equals"]:
        text += f" {equals_text(document)}."
    return {
        "id": "rivals",
        "title": "Best and runner-up",
        "text": text,
        "tables": [*_deployments(document), table("The best and the runner-up", ["figure", *answers], rows)],
    }


def _deployments(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [list(deployment_row(row)) for row in document["deployments"]]
    return [table("The best different deployments", ["USD/h", "deployment", "SLO"], rows)] if rows else []


def _candidates(document: dict[str, Any]) -> dict[str, Any]:
    """Everything that was simulated: what it costs and how near it comes, and throughput against speed for a user."""
    trials: list[Trial] = []
    for each in document["simulated_candidates"]:
        for rate in each["rates"]:
            deployment = each["deployment"] | {"replicas": rate["replicas"], "gpus": rate["gpus"]}
            about = {"hardware": deployment["hardware"], "shape": shape_of(deployment)}
            trials.append((describe(deployment), rate | about))
    if not trials:
        return {}
    devices = list(dict.fromkeys(t["hardware"] for _, t in trials))
    groups: dict[tuple[str, bool], list[Trial]] = {}
    for words, trial in sorted(trials, key=lambda t: (devices.index(t[1]["hardware"]), t[1]["state"] != "met")):
        groups.setdefault((trial["hardware"], trial["state"] == "met"), []).append((words, trial))

    def points(x: Any, y: str) -> list[Series]:
        """A colour for each device; what misses the SLO is hollow, and each deployment is named once."""
        shapes = {key: [t["shape"] for _, t in group] for key, group in groups.items()}
        return [
            Series(f"{device}{'' if holds else ', misses'}", [x(t) for _, t in group], [t[y] for _, t in group], True,
                   [f"{words}, {plain(t['rate'])} requests/s" for words, t in group], kind=devices.index(device),
                   hollow=not holds, names=["" if s in names[:i] else s for i, s in enumerate(names)] if holds else ())
            for ((device, holds), group), names in zip(groups.items(), shapes.values(), strict=True)
        ]  # fmt: skip

    holding = sum(t["state"] == "met" for _, t in trials)
    priced = all(t["usd_per_hour"] for _, t in trials)
    x, unit = (lambda t: sum(t["usd_per_hour"]) / 2, "USD/h") if priced else (lambda t: t["gpus"], "GPUs")
    charts = [
        {
            "title": "What it costs, and how near it comes",
            "note": "the tightest limit: mean over what is allowed; below the line it holds",
            "svg": chart(
                "The tightest limit against the cost",
                f"{holding} of {len(trials)} trials hold the SLO.",
                points(x, "tightest"),
                unit,
                "mean / limit",
                y_log=True,
                marks=[Mark(1.0, "SLO", vertical=False)],
            ),
        },
        {
            "title": "Throughput per GPU against speed for a user",
            "note": "up and to the right is better; each point a deployment at a rate",
            "svg": chart(
                "Output tokens per second and GPU against tokens per second of one user",
                "Each point is a deployment that was simulated.",
                points(lambda t: t["tokens_per_user"], "tokens_per_gpu"),
                "tokens/s of one user",
                "output tokens/s per GPU",
            ),
        },
    ]
    names = list(trials[0][1]["limits"])
    head = ["deployment", "requests/s", "verdict", "GPUs", "USD/h", *names, "tokens/s per GPU", "tokens/s of a user"]
    rows = [
        [words, t["rate"], "saturated" if t["saturated"] else t["state"], t["gpus"],
         sum(t["usd_per_hour"]) / 2 if t["usd_per_hour"] else None, *(t["limits"][name] for name in names),
         t["tokens_per_gpu"], t["tokens_per_user"]]
        for words, t in trials
    ]  # fmt: skip
    return {"id": "candidates", "title": "Candidates", "charts": charts, "folded": [table("All trials", head, rows)]}


def _search(document: dict[str, Any]) -> dict[str, Any]:
    rows = [[reason, count] for reason, count in document["pruned_by"].items()]
    text = f"{document['considered']:,} candidates: {document['simulated']:,} simulated, {document['pruned']:,} not."
    tables = [table("Not simulated", ["reason", "candidates"], rows)] if rows else []
    return {"id": "search", "title": "Search", "text": text, "tables": tables}
