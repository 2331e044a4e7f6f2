"""Does the system keep up with what arrives? A verdict that a stable system does not fail by chance."""

from dataclasses import dataclass, replace

import numpy as np

from infersim.engine.compiled.state import REJECTED

from .confidence import student_t
from .latency import HISTOGRAM_CENTRES
from .result import Result

INTERVALS = 20
WHOLE, HALF = 0.99, 0.975  # one-sided confidence that the backlog grows, over all and over the second half
SHARE_OF_BACKLOG = 0.1  # growth in the second half below this share of the final backlog is a fluctuation
BURST = "a burst, without a rate to keep up with"
STATES = ("rejected", "saturated", "stable")
"""worst first"""


@dataclass(frozen=True)
class Verdict:
    """state: one of STATES, rejected if no request could be served; backlog_per_s: its growth, 0 unless saturated."""

    state: str
    backlog_per_s: float
    reason: str


def judge(result: Result) -> Verdict:
    """The verdict on one run."""
    rejected = result.requests["status"] == REJECTED
    if len(rejected) and rejected.all():
        return Verdict("rejected", 0.0, f"all {len(rejected):,} requests were rejected")
    r = result.requests[~rejected]
    order = np.argsort(r["arrival"], kind="stable")  # what follows another request has no place of its own
    ended = np.where(result.completed[~rejected], r["last_token"], np.inf)
    until = min(result.opened_until, result.end_time if result.interrupted else np.inf)
    verdict = judge_backlog(r["arrival"][order], ended[order], _unloaded(result)[~rejected][order], until)
    if limit := result.scenario.workload.max_concurrency:
        return replace(verdict, reason=f"{verdict.reason}; the client has at most {limit} in the system")
    return verdict


def _unloaded(result: Result) -> np.ndarray:
    """f8[n]: about what each request would take alone: its own prefill, then the shortest gap of the run each token."""
    r = result.requests
    counted = np.flatnonzero(result.itl_histogram)
    gap = HISTOGRAM_CENTRES[counted[0]] if len(counted) else 0.0
    prefill = np.where(r["first_token"] >= 0, r["first_token"] - r["scheduled"], 0.0)
    return prefill + gap * (np.minimum(r["output_tokens"], r["max_tokens"]) - 1)


def judge_backlog(arrival: np.ndarray, ended: np.ndarray, unloaded: np.ndarray, until: float = np.inf) -> Verdict:
    """The verdict on times of arrival (in order) and of completion (inf: never), f8[n] in s, observed until `until`.

    `unloaded` f8[n]: seconds that each request would take in an empty system. The excess is the number of requests that
    would have been completed in that time and are not: a batch that fills up is no excess, a queue is, and so are
    requests that slow each other down. The period in which requests arrive is cut into 20 intervals. The system is
    saturated if the excess

    1. grows over the period by more than chance, a one-sided t test (99 %) of its 20 increments;
    2. goes on growing in the second half, the same test (97.5 %) of the last 10;
    3. grows there by a tenth of the final backlog (arrivals - completions) at least.

    Why this works: overloaded, the excess is a random walk with positive drift; at critical load a reflected one
    without drift; below, it is stationary, so that its increments are negatively correlated and the test errs to the
    safe side (Iglehart & Whitt, Advances in Applied Probability 2:150, 1970; Asmussen, Applied Probability and Queues,
    2003, ch. X). The increments bring their own scale, whatever the burstiness. A run of fewer than some ten sojourn
    times below critical load has not reached its steady state, and may be called saturated: it was, so far.

    Requests that all arrive within the time that one takes alone are a burst without a rate to keep up with (all at
    once, and so a closed loop too): stable.

    The growth is that of arrivals - completions per second over the second half.
    """
    start, until = (float(arrival[0]), min(until, float(arrival[-1]))) if len(arrival) else (0.0, 0.0)
    if until - start <= (np.percentile(unloaded, 50) if len(arrival) else 0.0):
        return Verdict("stable", 0.0, BURST)
    edges = np.linspace(start, until, INTERVALS + 1)
    arrived, due, completed = (
        np.searchsorted(np.sort(times), edges, side="right") for times in (arrival, arrival + unloaded, ended)
    )
    excess = np.diff(due - completed)
    second_half = excess[INTERVALS // 2 :]
    arrivals_per_s, completions_per_s = (
        float(counts[-1] - counts[INTERVALS // 2]) / (until - edges[INTERVALS // 2]) for counts in (arrived, completed)
    )
    rates = f"{arrivals_per_s:.3g} requests/s arrive, {completions_per_s:.3g} are completed"
    if (
        _positive(excess, WHOLE)
        and _positive(second_half, HALF)
        and second_half.sum() >= SHARE_OF_BACKLOG * (arrived[-1] - completed[-1])
    ):
        return Verdict("saturated", arrivals_per_s - completions_per_s, rates)
    return Verdict("stable", 0.0, rates)


def _positive(increments: np.ndarray, confidence: float) -> bool:
    """Whether the mean of the increments is above zero, by Student's t test."""
    n = len(increments)
    return increments.mean() > student_t(confidence, n - 1) * increments.std(ddof=1) / np.sqrt(n)


def combine_verdicts(verdicts: list[Verdict]) -> Verdict:
    """Of several replications: what most of them are, the worse of two equals; growth is the mean of those."""
    state = max(STATES, key=lambda state: sum(v.state == state for v in verdicts))
    those = [v for v in verdicts if v.state == state]
    share = f" ({len(those)} of {len(verdicts)} replications)" if len(verdicts) > 1 else ""
    return Verdict(state, sum(v.backlog_per_s for v in those) / len(those), those[0].reason + share)
