"""Everything that a report of one run shows beyond the run's own answer."""

from typing import Any

import numpy as np

from infersim.config.scenario import build_scenario
from infersim.explain.cost import cost_of
from infersim.explain.roofline import roofline
from infersim.explain.summary import finite, summarize
from infersim.explain.work import RunWork
from infersim.metrics.latency import attainment, latency_quantiles
from infersim.metrics.result import Result
from infersim.metrics.timeline import timeline
from infersim.run import run

from .outlook import MOST_REQUESTS, load_curve, what_if

SHARES = np.unique(np.concatenate([np.linspace(0, 0.9, 46), np.linspace(0.9, 0.99, 19), np.linspace(0.99, 1.0, 11)]))


def glance(first: Result, document: dict[str, Any]) -> dict[str, Any]:
    """What a moment's look needs of a briefing: `answer` and `cdf`."""
    cdf: dict[str, list[float]] = {}
    if first.measured.any():
        cdf = {name: values.tolist() for name, values in latency_quantiles(first, SHARES).items()}
        cdf["share"] = SHARES.tolist()
    return {"answer": document, "cdf": finite(cdf)}


def outline(first: Result, document: dict[str, Any]) -> dict[str, Any]:
    """The part of a briefing that needs no more simulations: `answer`, `cdf` and `timeline`."""
    lines = {name: None if line is None else line.tolist() for name, line in timeline(first).items()}
    return glance(first, document) | {"timeline": finite(lines)}


def brief(results: list[Result], document: dict[str, Any]) -> dict[str, Any]:
    """What `brief_run` says, and re-simulated `curve` (the same deployment at other loads) and `what_if` (others)."""
    scenario = results[0].scenario
    return brief_run(results, document) | {"curve": load_curve(scenario), "what_if": what_if(scenario, results[0])}


def brief_run(results: list[Result], document: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready: the answer of the run (explain.summary's document), and what surrounds it.

    `cost`, `work`, `cdf` (shares and ms by metric), `attainment`, `timeline`, `replicas_there` (on average),
    `roofline` of the first replication; `most_requests` of what is re-simulated.
    """
    first = results[0]
    return outline(first, document) | finite({
        "cost": cost_of(first, document["metrics"]),
        "work": RunWork(first).facts(),
        "attainment": attainment(first),
        "replicas_there": float(first.replicas.available.sum()) / first.end_time if first.end_time else None,
        "roofline": roofline(first),
        "most_requests": MOST_REQUESTS,
    })  # fmt: skip


def brief_plan(document: dict[str, Any]) -> dict[str, tuple[Result, dict[str, Any]]]:
    """`best` and `runner-up` of a plan's answer, those that there are: a run of each and its briefing."""
    found = {}
    for name in ("best", "runner_up"):
        if document[name]:
            scenario = build_scenario(document[name]["scenario"], name)
            results = run(scenario)
            found[name.replace("_", "-")] = results[0], brief(results, summarize(results))
    return found
