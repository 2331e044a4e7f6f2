"""Prediction against measurement: errors by metric and percentile, and what the rest points to."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from infersim.config.cluster import Kind
from infersim.config.errors import InputError
from infersim.config.hardware import OperatorEfficiency
from infersim.config.scenario import Scenario
from infersim.cost.steptime import provenance
from infersim.metrics.latency import METRICS, STATISTICS
from infersim.metrics.result import Ran, Result
from infersim.metrics.verdict import Flow, Verdict, judge, judge_flow

from .overheads import setting
from .replay import Predicted, mismatches, predict
from .results import Measured

RATES = ("request_throughput", "output_throughput", "total_token_throughput")


def validate(scenario: Scenario, runs: list[Measured], skip: int = 0) -> list[dict[str, Any]]:
    """One JSON-ready document per run; the first `skip` requests are served but not compared."""
    return [_validate(scenario, run, skip) for run in runs]


def _validate(scenario: Scenario, run: Measured, skip: int) -> dict[str, Any]:
    if skip and (run.requests is None or skip >= len(run.requests)):
        raise InputError(f"{run.where}: --skip {skip} leaves no request; must be below the run's number of requests")
    rows = slice(skip, None) if run.requests is not None else slice(None)
    predicted = predict(scenario, run, save_detailed=run.gaps is not None)
    ours, theirs = predicted.metrics(rows), run.metrics(rows)
    names = [f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS]
    names += RATES if not skip else ()
    theirs = theirs | _throughput(run)
    errors = {
        name: {"measured": theirs[name], "predicted": ours[name], "error": ours[name] / theirs[name] - 1}
        for name in names
        if theirs.get(name) and ours.get(name) is not None
    }
    return {
        "where": run.where,
        "requests": run.num_requests - skip,
        "failed": run.failed,
        "errors": errors,
        "quantiles": _quantiles(run, predicted, rows),
        "measured": _verdict(_judge(run, predicted)),
        "predicted": _verdict(judge(predicted.result)),
        "points_to": points_to(scenario, run, predicted, rows),
        "warnings": mismatches(scenario, run, predicted.result),
        "notes": [*run.notes, *_notes(run, scenario, predicted.result)],
    }


def _quantiles(run: Measured, predicted: Predicted, rows: slice) -> dict[str, dict[str, list[float]]] | None:
    """metric -> measured and predicted, ms: their percentiles 1 to 99; None without requests."""
    if run.requests is None:
        return None
    pairs = {name: (getattr(run, name)[rows], getattr(predicted, name)[rows]) for name in ("ttft", "tpot", "e2el")}
    percent = np.arange(1, 100)
    return {
        name: {who: (np.nanpercentile(values, percent) * 1e3).tolist()
               for who, values in zip(("measured", "predicted"), pair, strict=True)}
        for name, pair in pairs.items()
        if not np.isnan(pair[0]).all()
    }  # fmt: skip


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    return asdict(verdict) if verdict else None


def _notes(run: Measured, scenario: Scenario, result: Result) -> list[str]:
    if run.requests is None:
        kept = {"aiperf": "profile_export.jsonl has them", "guidellm": "its JSON output has them"}
        more = kept.get(run.client, "--save-detailed")
        return [f"the client's file holds no requests ({more}): the workload is drawn from the scenario"]
    if not result.engine.enable_prefix_caching:
        return []
    if prefixes := scenario.workload.prefixes:
        cached = int(result.requests["num_cached_tokens"].sum(dtype="i8"))
        which = ", each by chance" if prefixes.count > 1 else ""
        return [f"prompts begin alike as workload.prefixes says{which}: {cached:,} of their tokens are found cached"]
    return ["no prompts begin alike (the file does not say; workload.prefixes would)"]


def _judge(run: Measured, predicted: Predicted) -> Verdict | None:
    """Whether the real server kept up; what a request takes alone is the prediction's."""
    if run.requests is None or run.max_concurrency:
        return None
    outputs = run.requests.output_tokens
    r = predicted.result.requests
    alone = r["first_token"] - r["scheduled"] + float(np.nanmin(predicted.tpot, initial=math.inf)) * (outputs - 1)
    arrival, nobody = run.requests.arrival, np.zeros(len(r), bool)
    first = arrival + np.maximum(run.ttft - (r["first_token"] - r["scheduled"]), 0.0)  # about when it was admitted
    return judge_flow(Flow(arrival, first, arrival + run.e2el, np.where(outputs > 1, alone, 0.0), refused=nobody))


def _throughput(run: Measured) -> dict[str, float]:
    if run.requests is None:
        return {}
    if said := {name: run.summary[name] for name in RATES if name in run.summary}:
        return said
    arrival = run.requests.arrival
    if run.max_concurrency:  # sent later than they arrived, by what the file does not say
        return {}
    duration = float((arrival + run.e2el).max() - arrival.min())
    outputs, prompts = int(run.requests.output_tokens.sum()), int(run.requests.prompt_tokens.sum())
    return dict(zip(RATES, (len(arrival) / duration, outputs / duration, (outputs + prompts) / duration), strict=True))


# --- what the residual points to --------------------------------------------------------------------------------------
SHARE = 0.9  # by which a share of a device's peak is moved to see what it does
POINTED = 0.3  # of the residual's square that a cause must explain to be named
ALIKE = 0.03  # causes that explain as much within this are named too: the run cannot tell them apart
SMALL = 0.02  # residuals whose root mean square is below say nothing


def points_to(scenario: Scenario, run: Measured, predicted: Predicted, rows: slice) -> str:
    """The causes that explain most of the residual of requests' TPOT and TTFT, and how much of it.

    Each cause is moved a little; the pattern that it leaves over the requests is held against the residual's.
    """
    residual = _residual(predicted, run, rows)
    if residual is None or len(residual) < 10:
        return ""
    size = float(np.sqrt(np.mean(residual**2)))
    if size < SMALL:
        return f"nothing: residuals of groups of requests are {size:.1%} of the measured"
    found = []
    for name, changed, amount, least in _causes(scenario, predicted):
        pattern = _residual(predict(changed, run), run, rows) - residual
        if pattern @ pattern > 1e-12:
            factor = -float(pattern @ residual) / float(pattern @ pattern)
            explained = 1 - float(np.sum((residual + factor * pattern) ** 2)) / float(residual @ residual)
            if factor * amount >= least:
                found.append((explained, name, factor * amount))
    if not found:
        return ""
    found.sort(reverse=True)
    if found[0][0] < POINTED:
        return f"no single cause (the best, {found[0][1]}, explains {found[0][0]:.0%} of the residual)"
    return ", or ".join(_named(*row) for row in found if row[0] >= found[0][0] - ALIKE)


def _named(explained: float, name: str, amount: float) -> str:
    if name.startswith("engine."):
        change = f"{amount * 1e3:+.3g} ms" if abs(amount) >= 1e-4 else f"{amount * 1e6:+.3g} us"
    else:
        change = f"{amount:+.0%} of its time"
    return f"{name} ({change} explains {explained:.0%} of the residual)"


GROUP = 10


def _residual(predicted: Predicted, run: Measured, rows: slice) -> np.ndarray | None:
    """Relative errors of TPOT, then of TTFT, of groups of consecutive requests."""
    if run.requests is None:
        return None
    parts = []
    for ours, theirs in ((predicted.tpot[rows], run.tpot[rows]), (predicted.ttft[rows], run.ttft[rows])):
        known = ~np.isnan(theirs) & ~np.isnan(ours)
        groups = max(1, int(known.sum()) // GROUP)
        means = [
            (float(a.mean()), float(b.mean()))
            for a, b in zip(np.array_split(ours[known], groups), np.array_split(theirs[known], groups), strict=True)
            if len(a)
        ]
        parts += [a / b - 1 for a, b in means]
    return np.array(parts)


def _causes(scenario: Scenario, predicted: Predicted):
    """(name, scenario with it moved, by how much, the least that can be): overheads in s, shares of a peak as a change
    of time, which no operator takes less of than at its peak. Every kind of replicas is moved, from what it was when it
    ran."""
    ran = [each for each in predicted.result.ran if each.role != "encode"]
    for kind, amount in (("step", 0.5e-3), ("sequence", 10e-6), ("request", 5e-3)):
        name = setting(kind, predicted.result.engine.async_scheduling)

        def later(engine: Any, _: Any, ran: Ran, name: str = name, amount: float = amount) -> dict[str, Any]:
            now = getattr(ran.deployment.engine, name)
            return {"engine": engine.model_copy(update={name: now + amount})}

        least = -min(getattr(each.deployment.engine, name) for each in ran)
        yield f"engine.{name}", _moved(scenario, predicted.result, later), amount, least
    rows = {
        (each.deployment.hardware.name, row["operator"], row["dtype"]): row
        for each in ran
        for row in provenance(each.deployment.placement)
        if row["operator"] not in ("launch", "collective", "elementwise")
    }
    for (device, operator, dtype), row in rows.items():
        for key, what in (("bandwidth", "bandwidth"), ("flops", "FLOP/s")):
            if not (peak := float(row[key]) * SHARE) > 0:
                continue
            fields = {name: row[name] for name in OperatorEfficiency.model_fields if name in row}
            slower = {f"{operator}.{dtype}": OperatorEfficiency(**fields | {key: peak})}

            def worse(_: Any, hardware: Any, __: Ran, device: str = device, slower: dict = slower) -> dict[str, Any]:
                if hardware.name != device:
                    return {}
                return {"hardware": hardware.model_copy(update={"efficiency": hardware.efficiency | slower})}

            moved = _moved(scenario, predicted.result, worse)
            yield f"{operator} {what} on {device}", moved, 1 / SHARE - 1, float(row[key]) - 1


def _moved(scenario: Scenario, result: Result, change: Callable[[Any, Any, Ran], dict[str, Any]]) -> Scenario:
    """The scenario with parts of each kind of replicas changed: of its engine, its hardware and what it ran as."""
    cluster, changed = scenario.cluster, []
    for group, numbers in zip(cluster.groups, cluster.ranges, strict=True):
        if isinstance(group, Kind):
            parts = group.engine or scenario.engine, group.hardware or scenario.hardware
            changed.append(change(*parts, result.kind_of(numbers.start)))
    if cluster.kinds:
        kinds = [kind.model_copy(update=own) for kind, own in zip(cluster.kinds, changed, strict=True)]
        return scenario.model_copy(update={"cluster": cluster.model_copy(update={"kinds": kinds})})
    if cluster.prefill and cluster.decode:
        pools = {"decode": cluster.decode, "prefill": cluster.prefill}
        own = {n: pool.model_copy(update=part) for (n, pool), part in zip(pools.items(), changed, strict=True)}
        return scenario.model_copy(update={"cluster": cluster.model_copy(update=own)})
    return scenario.model_copy(update=changed[0])
