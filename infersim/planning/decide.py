"""Does a deployment hold its limits at a rate? Replications until the answer is statistically clear."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.metrics.confidence import student_t
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.metrics.verdict import STABLE, TOO_SHORT, Verdict, judge
from infersim.run import longer, run

LOOKS = (1, 4, 6, 10)  # replications after which the answer may be clear; one is enough to see a clear miss
LEAST, MOST = LOOKS[1], LOOKS[-1]
MOST_REQUESTS = 20_000  # a run is lengthened so far until it tells whether the load is kept up with
EACH_USER = 20  # requests of each user at least, so that how they all begin at once counts little
LONGER, MORE = "longer runs", "more runs"
FAR = 2.0  # one replication at so many times a limit is clear by itself
MEAN_LEVEL = 0.95  # one-sided, of the mean over replications
RUN_LEVEL = 0.99  # one-sided, of one more replication: what a user would see


@dataclass(frozen=True)
class Decision:
    """state: met, missed or unclear, the last after as many replications as are worth their time.

    limits: per limit its mean, the upper 95 % bound of the mean, the upper 99 % bound of one more run, all in the
    limit's unit; metrics: means over replications; rate: requests per second that were completed; num_requests: of
    each replication, None of a trace.
    """

    state: str
    replications: int
    saturated: bool
    limits: list[dict[str, Any]]
    metrics: dict[str, float | None]
    rate: float
    num_requests: int | None
    result: Result

    @property
    def met(self) -> bool:
        return self.state == "met"

    @property
    def margin(self) -> float:
        """Share of the tightest limit that the mean leaves free."""
        return min(1 - limit["mean"] / limit["limit"] for limit in self.limits)

    @property
    def tightest(self) -> dict[str, Any]:
        return max(self.limits, key=lambda limit: limit["mean"] / limit["limit"])


def deployed(scenario: Scenario, replicas: int, load: float, seed: int, replications: int = 1) -> Scenario:
    """So many replicas at a request rate, or with so many users, of the whole; a cluster of several kinds of replicas
    stays as it is."""
    cluster, workload = scenario.cluster, scenario.workload
    update: dict[str, Any] = {"request_rate": load}
    if workload.users:
        requests = max(workload.num_requests or 0, EACH_USER * int(load))
        update = {"users": int(load), "num_requests": requests}
    return scenario.model_copy(
        update={
            "cluster": cluster if len(cluster.groups) > 1 else cluster.model_copy(update={"replicas": replicas}),
            "workload": workload.model_copy(update=update),
            "simulation": scenario.simulation.model_copy(update={"seed": seed, "replications": replications}),
        }
    )


def decide(
    scenario: Scenario, replicas: int, rate: float, min_goodput_share: float | None = None, at: Sequence[int] = LOOKS
) -> Decision:
    """Whether so many replicas hold the SLO of the scenario at `rate` together, in every run rather than on average.

    Met: the upper 99 % prediction bound of each limited statistic is within its limit (Student's t, after at least 4
    replications), in runs long enough to tell that the load is kept up with; where they are not, they are lengthened.
    Missed: a run is above a limit, after which the prediction bound never is below it (one of n lies at most
    (n - 1) / sqrt(n) deviations above their mean); of runs too short to tell, the lower 95 % bound of the mean; or the
    load cannot be kept up with. Unclear otherwise.
    at: replications after which it may be clear; where the last are fewer than 4, their means say which.
    InputError if it cannot run.
    """
    runs: list[dict[str, float | None]] = []
    verdicts: list[Verdict] = []

    def above(metrics: dict[str, float | None]) -> bool:
        return any(limit["mean"] > limit["limit"] for limit in _limits(scenario, [metrics], min_goodput_share))

    def clear(result: Result) -> bool:
        runs.append(measure(result))
        verdicts.append(judge(result))
        return _fails(result, verdicts[-1]) or (not verdicts[-1].needed_requests and above(runs[-1]))

    looks = list(at)
    while looks:
        more = deployed(scenario, replicas, rate, scenario.simulation.seed + len(runs), looks[0] - len(runs))
        results = run(more, enough=clear)
        if results[-1].interrupted:
            raise KeyboardInterrupt
        saturated = _fails(results[-1], verdicts[-1])
        asked = scenario.workload.request_rate
        if any(verdict.burst for verdict in verdicts) and asked is not None and rate <= asked:
            raise InputError(
                f"workload.num_requests: {len(results[-1].requests):,} requests at {rate:.4g}/s arrive at once;"
                " must be many more to tell which rate is kept up with"
            )
        limits = _limits(scenario, runs, min_goodput_share)
        needed = max(verdict.needed_requests or 0 for verdict in verdicts)
        state = "missed" if not needed and any(map(above, runs)) else _state(limits, len(runs), saturated, needed)
        if state == LONGER and scenario.workload.trace is not None:
            state = "unclear"  # a recording is as long as it is
        if state == LONGER:
            scenario, looks = longer(scenario, needed), list(at)
            runs.clear()
            verdicts.clear()
            continue
        if state == MORE:
            looks.pop(0)
            if looks:
                continue
            state = "met" if all(x["mean"] <= x["limit"] for x in limits) else "missed"
        means = {
            name: fmean(known) if len(known := [v for r in runs if (v := r[name]) is not None]) == len(runs) else None
            for name in runs[0]
        }
        completed = means["request_throughput"] or 0.0
        requests = scenario.workload.num_requests
        return Decision(state, len(runs), saturated, limits, means, completed, requests, results[-1])
    raise AssertionError("the last replication decides")


def _state(limits: list[dict[str, Any]], replications: int, saturated: bool, needed: int) -> str:
    """What so many replications say; or that it takes MORE of them, or LONGER ones: `needed` requests, 0 if they were
    long enough."""
    if saturated or any(limit["mean"] > FAR * limit["limit"] for limit in limits):
        return "missed"
    if replications >= LEAST and any(limit["lower"] > limit["limit"] for limit in limits):
        return "missed"  # of short runs too: longer ones would hardly be better
    if needed and (replications >= LEAST or all(limit["mean"] <= limit["limit"] for limit in limits)):
        return "unclear" if needed > MOST_REQUESTS else LONGER
    if needed or replications < LEAST:
        return MORE
    if all(limit["met"] for limit in limits):
        return "met"
    return MORE if replications < MOST else "unclear"


def _limits(
    scenario: Scenario, runs: list[dict[str, float | None]], min_goodput_share: float | None
) -> list[dict[str, Any]]:
    limits = [
        _bounds(name, limit, [_value(r[name.replace("p50_", "median_")]) for r in runs])
        for name, limit in scenario.slo.limits.items()
    ]
    if min_goodput_share is not None:
        shares = [(r["request_goodput"] or 0.0) / (r["request_throughput"] or math.inf) for r in runs]
        limits.append(_bounds("bad_share", 1 - min_goodput_share, [1 - share for share in shares]))
    return limits


def _value(value: float | None) -> float:
    return 0.0 if value is None else value  # no request had two tokens, say: nothing that could be late


def _bounds(name: str, limit: float, values: list[float]) -> dict[str, Any]:
    n, mean = len(values), fmean(values)
    spread = stdev(values) if n > 1 else 0.0
    half = student_t(MEAN_LEVEL, n - 1) * spread / math.sqrt(n) if n > 1 else 0.0
    run = student_t(RUN_LEVEL, n - 1) * spread * math.sqrt(1 + 1 / n) if n > 1 else 0.0
    return {
        "name": name,
        "limit": limit,
        "mean": mean,
        "lower": mean - half,
        "upper": mean + half,
        "run_upper": mean + run,
        "met": mean + run <= limit,
    }


def _fails(result: Result, verdict: Verdict) -> bool:
    """Whether a run shows that the load is not kept up with: no other is needed."""
    return not result.completed.all() or verdict.state not in (STABLE, TOO_SHORT)
