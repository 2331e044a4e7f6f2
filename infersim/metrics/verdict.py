"""Does the system keep up with what arrives? Stable, saturated, or a run too short to tell."""

import math
from dataclasses import dataclass, replace

import numpy as np

from infersim.engine.compiled.state import COMPLETED, OVER_MAX_MODEL_LEN, PROMPT_TOO_LONG, REJECTED

from .confidence import student_t
from .latency import HISTOGRAM_CENTRES
from .result import Result

INTERVALS = 20  # of the window: the tests of growth look at all, and at the last half
WHOLE, HALF = 0.995, 0.99  # one-sided confidence that the backlog grows, over all and over the second half
SHARE_OF_BACKLOG = 0.1  # growth in the second half below this share of the final backlog is a fluctuation
RELAXATIONS = 8  # in the second half of the window: sooner a batch is still filling up
DRAINED = 30  # requests that wait when arrivals end, from which on their rate of admission is the capacity
MEANS, RETURNS = 50, -4.0  # intervals of the test that the number in the system returns to its mean, critical value
PATIENCE = 8  # looks of an autoscaler and starts of a replica: sooner, more may come
LEAST = 100  # requests in the window: fewer are too short for the tests, but not to see a queue that drains slowly
TURNED_AWAY = 0.01  # share of what arrives that may be refused, time out or be lost
BEYOND = 1.03  # times the rate that an overload completes: nearer it tells nothing
TOO_LONG = (PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN)
STATES = ("rejected", "saturated", "too short to tell", "stable")
"""worst first"""
REJECTED_ALL, SATURATED, TOO_SHORT, STABLE = STATES


@dataclass(frozen=True)
class Verdict:
    """What one run says.

    state: one of STATES, rejected if no request could be served; backlog_per_s: growth of the backlog, requests/s, 0
    unless saturated; reason: a sentence; needed_requests: so many or more decide, or bring a stable system into
    balance; None where neither is open.
    """

    state: str
    backlog_per_s: float
    reason: str
    needed_requests: int | None = None
    burst: bool = False
    """everything arrived at once: there is no rate to keep up with"""

    @property
    def in_balance(self) -> bool:
        """Whether a longer run would have the same latencies."""
        return self.state == STABLE and self.needed_requests is None


@dataclass(frozen=True)
class Flow:
    """Requests in order of arrival, f8[n] in s; inf for what never happened.

    unloaded: seconds that each would take in an empty system; until: the last arrival that follows no other request, or
    the end of what was seen; opening: seconds from a conversation's first request to its last: so long does the rate of
    requests go on rising although conversations begin at one rate; room: when each began and ended to wait for room in
    another pool for its KV, None without one; refused: bool[n], turned away, timed out or lost; limit: most that the
    client has in the system at once, None without; conversations: how many there are; replicas: how many queues there
    may be; since: when the system had become what it is: before, it had fewer replicas.
    """

    arrival: np.ndarray
    scheduled: np.ndarray
    ended: np.ndarray
    unloaded: np.ndarray
    refused: np.ndarray
    until: float = math.inf
    opening: float = 0.0
    room: tuple[np.ndarray, np.ndarray] | None = None
    conversations: int = 0
    replicas: int = 1
    since: float = 0.0
    limit: int | None = None

    @property
    def queues(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """When each request that was not refused began and ended to wait, for each queue that it stands in."""
        queues = [(self.arrival, self.scheduled), *([self.room] if self.room else [])]
        if not self.refused.any():
            return queues
        return [(came[~self.refused], went[~self.refused]) for came, went in queues]


def judge(result: Result) -> Verdict:
    """The verdict on one run. What no server could take (longer than max_model_len) is no load, and left out."""
    r = result.requests
    rejected = r["status"] == REJECTED
    if len(r) and rejected.all():
        return Verdict(REJECTED_ALL, 0.0, f"all {len(r):,} requests were rejected")
    load = result.scenario.workload
    if load.users:  # they begin within moments, however long the run: longer tells no more of a rate
        loop = f"a closed loop of {load.users:,} users, without a rate to keep up with"
        return Verdict(STABLE, 0.0, loop, burst=True)
    unloaded = _unloaded(result)
    order: slice | np.ndarray = slice(None)  # of millions, views
    if rejected.any() or (r["arrival"][1:] < r["arrival"][:-1]).any():  # followers have no place of their own
        possible = np.flatnonzero(~rejected | ~np.isin(r["reason"], TOO_LONG))
        order = possible[np.argsort(r["arrival"][possible], kind="stable")]
    seen = result.end_time if result.interrupted else np.inf
    names = ("arrival", "scheduled", "status", "last_token")
    arrival, scheduled, status, last = (r[name][order] for name in names)  # not whole records
    flow = Flow(
        arrival,
        np.where(scheduled >= 0, scheduled, np.inf),
        np.where(status == COMPLETED, last, np.inf),
        unloaded[order],
        refused=status > COMPLETED,
        until=min(result.opened_until, seen),
        opening=_opening(result, unloaded),
        room=_wait_for_room(result, order),
        conversations=0 if result.session is None else int(result.session.max()) + 1,
        replicas=result.scenario.cluster.most,
        limit=load.max_concurrency,
    )
    verdict = judge_flow(flow)
    if verdict.state != STABLE and "autoscalers" in result.route:
        verdict = _after_scaling(result, flow, verdict)
    if verdict.state == TOO_SHORT and not verdict.burst and result.completes and load.request_rate:
        verdict = _by_overload(flow, verdict, load.request_rate, result.completes)
    if verdict.needed_requests and load.ramp_up:
        reason = (
            f"{verdict.reason.rpartition(';')[0]}; the rate rises to the end, so that no number of requests would tell"
        )
        return replace(verdict, reason=reason, needed_requests=None)
    if verdict.burst and load.request_rate is not None and math.isfinite(load.request_rate):
        needed = _round(max(2 * len(result.requests), LEAST))
        reason = _too_short("one arrival is no rate", needed)
        return replace(verdict, state=TOO_SHORT, reason=reason, needed_requests=needed)
    return verdict


def _by_overload(flow: Flow, verdict: Verdict, rate: float, completes: tuple[float, float]) -> Verdict:
    """What an overload of the same deployment says of a run that is too short to tell by itself. Saturated only if the
    run does not speak against it: more requests at once may keep each other from what a few do not."""
    low, high = completes
    rates = verdict.reason.rpartition(";")[0]
    first, until = float(flow.arrival[0]), min(flow.until, float(flow.arrival[-1]))
    grown = float(_growth(flow.arrival + flow.unloaded, flow.ended, first, until).sum())
    if rate > BEYOND * high and grown > 0.0:
        by = " on all replicas" if flow.replicas > 1 else ""
        return Verdict(SATURATED, rate - high, f"{rates}; at most {per_second(high)}{by} when more wait")
    if rate * BEYOND >= low:
        return verdict
    rates, needed = f"{rates}; at least {per_second(low)} when more wait", None
    if (longer := _lacks(flow, first, until)) > 1.0:
        needed = _round(len(flow.arrival) * min(longer, 10.0))
        rates += f"; latencies are those of a start: {needed:,} requests or more would show others"
    return Verdict(STABLE, 0.0, rates, needed)


def _after_scaling(result: Result, flow: Flow, verdict: Verdict) -> Verdict:
    """What does not look stable, judged again from when its autoscalers had started most replicas; a backlog is too
    short to tell of while they may start more."""
    first, until = float(flow.arrival[0]), min(flow.until, float(flow.arrival[-1]))
    since = patient = first
    groups = {name: group.autoscaler for name, group in
              zip(result.scenario.cluster.group_names, result.scenario.cluster.groups, strict=True)}  # fmt: skip
    for scaler in result.route["autoscalers"]:
        before = [(time, count) for time, count in scaler["ready"] if time <= until]
        most, spec = max(count for _, count in before), groups[scaler["group"]]
        at = next(time for time, count in before if count == most)
        since = max(since, at)
        if spec and most < spec.max:
            patient = max(patient, at + PATIENCE * (spec.interval + scaler["startup_s"]))
    later = judge_flow(replace(flow, since=since)) if since > first else verdict
    if later.state == STABLE or until >= patient:
        return later
    if verdict.state == TOO_SHORT:
        return verdict
    needed = _round(len(flow.arrival) * max(2.0, 1.5 * (patient - first) / max(until - first, 1e-9)))
    more = f"{verdict.reason}, and more replicas may be started"
    return Verdict(TOO_SHORT, 0.0, _too_short(more, needed), needed)


def _unloaded(result: Result) -> np.ndarray:
    """f8[n]: about what each request would take alone: its own prefill, then the shortest gap of the run each token."""
    r = result.requests
    counted = np.flatnonzero(result.itl_histogram)
    gap = HISTOGRAM_CENTRES[counted[0]] if len(counted) else 0.0
    prefill = np.where(r["first_token"] >= 0, r["first_token"] - r["scheduled"], 0.0)
    return prefill + gap * (np.minimum(r["output_tokens"], r["max_tokens"]) - 1)


def _opening(result: Result, unloaded: np.ndarray) -> float:
    """Seconds that 9 in 10 conversations would take in an empty system, from their first request to their last."""
    if result.session is None:
        return 0.0
    r, same = result.requests, result.session[1:] == result.session[:-1]
    thought = np.where(r["last_token"][:-1] >= 0, r["arrival"][1:] - r["last_token"][:-1], 0.0)
    taken = np.where(same, np.maximum(thought, 0.0) + unloaded[:-1], 0.0)
    taken = np.bincount(result.session, np.append(taken, 0.0))
    first, last = np.full(len(taken), np.inf), np.zeros(len(taken))
    np.minimum.at(first, result.session, r["arrival"])
    np.maximum.at(last, result.session, r["arrival"])
    return float(np.percentile(np.minimum(taken, last - first), 90))  # agents side by side: less than their sum


def _wait_for_room(result: Result, order: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    columns = result.route_columns
    if "prefilled_s" not in columns:
        return None
    came = columns["prefilled_s"][order]
    went = came + columns["wait_for_room_ms"][order] / 1e3
    return np.where(np.isnan(came), np.inf, came), np.where(np.isnan(went), np.inf, went)


def judge_flow(flow: Flow) -> Verdict:
    """The verdict on times of arrival, admission and completion.

    Requests that all arrive at one moment (a closed loop, say) have no rate to keep up with: stable. Otherwise the
    window is the time in which requests arrive, without the opening, in which conversations only begin, and without the
    drain at the end. In this order:

    Saturated, if
    1. more than 1 % of what arrives is refused, times out or is lost;
    2. `_growing`: the backlog grows by more than chance, and a batch that fills up is over; or
    3. `_drain_rate`: what waits when arrivals end is admitted at a significantly lower rate than it came.

    Stable, if a batch that fills up is over and
    4. `_empties`: nobody waits at some moment of each tenth of the second half, and nothing suggests growth; or
    5. `_returns`: the number in the system returns to its mean.

    At critical load each of 4 and 5 is true of 1 run in 100 or fewer (tests/test_metrics_verdict.py, queues of several
    kinds). Anything else is too short to tell.
    """
    n = len(flow.arrival)
    first, until = (float(flow.arrival[0]), min(flow.until, float(flow.arrival[-1]))) if n else (0.0, 0.0)
    at_most = f"; the client has at most {flow.limit} in the system" if flow.limit else ""
    if until == first:
        return Verdict(STABLE, 0.0, f"a burst, without a rate to keep up with{at_most}", burst=True)
    start = max(first + flow.opening, flow.since)
    if until - start <= flow.opening:
        needed = _round(n * max(2.5 * flow.opening / (until - first), 2.0))
        why = (
            f"conversations take {per_second(flow.opening)} s and begin for {per_second(until - first)} s only"
            if flow.opening
            else f"most replicas serve for {per_second(max(until - start, 0.0))} s only"
        )
        return Verdict(TOO_SHORT, 0.0, _too_short(why, needed), needed)
    window = until - start
    inside = (flow.arrival > start) & (flow.arrival <= until)
    arrive = inside.sum() / window
    complete = ((flow.ended > start) & (flow.ended <= until)).sum() / window
    refused = (flow.refused & inside).sum() / max(inside.sum(), 1)
    rates = f"{per_second(arrive)} requests/s arrive, {per_second(complete)} are completed"
    if flow.conversations:
        rates = f"{per_second(flow.conversations / (until - first))} conversations/s begin, {rates}"
    if refused:
        rates += f", {refused:.1%} are refused, time out or are lost"
    rates += f", in {window:,.0f} s{at_most}" if window >= 10 else f", in {window:.3g} s{at_most}"
    residence, _ = _relaxation(flow, start, until)
    enough = inside.sum() >= LEAST
    settled = (longer := _lacks(flow, start, until)) <= 1.0
    # of requests that an empty system would have completed and this one has not: a batch that fills up is no excess
    excess = _growth(flow.arrival + flow.unloaded, flow.ended, start, until)
    grows = settled and _growing(excess, (flow.arrival <= until).sum() - (flow.ended <= until).sum())
    if enough and not grows and window / 2 >= RELAXATIONS * residence:
        grows = any(
            _growing(_growth(came, went, start, until), (came <= until).sum() - (went <= until).sum())
            for came, went in flow.queues
        )
    if refused > TURNED_AWAY or grows or arrive > _drain_rate(flow, until):
        return Verdict(SATURATED, max(float(arrive * (1 - refused) - complete), 0.0), rates)
    returns = _returns(flow, start, until)
    if settled and (
        returns <= RETURNS or (not _rising(excess) and all(_empties(*queue, start, until) for queue in flow.queues))
    ):
        return Verdict(STABLE, 0.0, rates)
    needed = _round(n * min(max(longer, (RETURNS / min(returns, -1.0)) ** 2, 2.0), 10.0))
    return Verdict(TOO_SHORT, 0.0, _too_short(rates, needed), needed)


def _lacks(flow: Flow, start: float, until: float) -> float:
    """How many times as long a run must be until a batch that fills up is over."""
    inside = ((flow.arrival > start) & (flow.arrival <= until)).sum()
    return max(LEAST / max(inside, 1), 2 * RELAXATIONS * _relaxation(flow, start, until)[1] / (until - start))


def _too_short(why: str, needed: int) -> str:
    return f"{why}; it takes {needed:,} requests or more to tell"


def per_second(rate: float) -> str:
    """A rate in digits that people read."""
    return f"{rate:,.0f}" if rate >= 999.5 else f"{rate:.3g}"


def _round(number: float) -> int:
    """Up to two significant digits."""
    unit = 10 ** max(math.floor(math.log10(number)) - 1, 0)
    return math.ceil(number / unit) * unit


def _relaxation(flow: Flow, start: float, until: float) -> tuple[float, float]:
    """Seconds that a request runs, and those after which the number of running requests has forgotten where it began.

    A batch of n takes a + b n seconds a step, so that L tokens take r(n) = L (a + b n) and n / r(n) leave per second;
    the number relaxes at the derivative of that, L a / r(n)^2: in r(n)^2 / r(0) seconds.
    """
    admitted = (flow.scheduled > start) & (flow.scheduled <= until)
    if not admitted.any():
        return until - start, until - start
    ran = np.where(np.isfinite(flow.ended), flow.ended, until)[admitted] - flow.scheduled[admitted]
    took, alone = max(float(ran.mean()), 0.0), float(flow.unloaded[admitted].mean())
    return took, took * max(took / alone, 1.0) if alone > 0.0 else took


def _growth(came: np.ndarray, went: np.ndarray, start: float, until: float) -> np.ndarray:
    """f8[20]: how much more came than went in each twentieth of the window."""
    edges = np.linspace(start, until, INTERVALS + 1)
    more = (np.searchsorted(np.sort(times), edges, "right") for times in (came, went))
    return np.diff(next(more) - next(more)).astype("f8")


def _growing(increments: np.ndarray, backlog: int) -> bool:
    """Whether f8[20] growth of a backlog is more than chance: over the window (one-sided t test of its increments,
    99.5 %), in the second half too (99 %), and there by a tenth of the final backlog at least.

    Why this works: overloaded, the excess is a random walk with positive drift; at critical load a reflected one
    without drift; below, it is stationary, so that its increments are negatively correlated and the test errs to the
    safe side (Iglehart & Whitt, Advances in Applied Probability 2:150, 1970; Asmussen, Applied Probability and Queues,
    2003, ch. X). The increments bring their own scale, whatever the burstiness.
    """
    second_half = increments[INTERVALS // 2 :]
    return (
        _t(increments) > student_t(WHOLE, INTERVALS - 1)
        and _t(second_half) > student_t(HALF, INTERVALS // 2 - 1)
        and bool(second_half.sum() >= SHARE_OF_BACKLOG * backlog)
    )


def _rising(increments: np.ndarray) -> bool:
    """Whether there is the least sign of growth in the second half."""
    return _t(increments[INTERVALS // 2 :]) > 1.0


def _t(x: np.ndarray) -> float:
    """Student's t of a mean against 0."""
    spread, mean = float(x.std(ddof=1)), float(x.mean())
    return mean / (spread / math.sqrt(len(x))) if spread > 0.0 else math.copysign(math.inf, mean or -1.0)


def _drain_rate(flow: Flow, until: float) -> float:
    """What the system admits per second, at most, from those who wait when arrivals end: inf if too few do.

    More than enough wait then, so this is its capacity; the bound is three standard errors above, with a coefficient of
    variation of 2 (long and short requests). Replicas whose queues are shorter idle before the last queue is empty, so
    that of several the first who are admitted count too, and nothing is known where some came later than others.
    """
    waiting = (flow.arrival <= until) & (flow.scheduled > until) & ~flow.refused
    admitted = np.sort(flow.scheduled[waiting])
    if len(admitted) < DRAINED or math.isinf(admitted[-1]) or flow.since:
        return math.inf
    counts = [len(admitted)] if flow.replicas == 1 else [len(admitted) // 4, len(admitted) // 2, len(admitted)]
    return max(n / (float(admitted[n - 1]) - until) * (1 + 3 * 2 / math.sqrt(n)) for n in counts)


def _empties(came: np.ndarray, went: np.ndarray, start: float, until: float) -> bool:
    """Whether nobody waits at some moment of each tenth of the second half of the window."""
    edges = np.linspace((start + until) / 2, until, INTERVALS // 2 + 1)
    arrival, admitted = np.sort(came), np.sort(went)
    waiting = np.searchsorted(arrival, admitted, "right") - np.arange(1, len(admitted) + 1)
    empty = admitted[(waiting == 0) & np.isfinite(admitted)]
    at_edge = np.searchsorted(arrival, edges, "right") == np.searchsorted(admitted, edges, "right")
    within = np.searchsorted(empty, edges[1:], "right") > np.searchsorted(empty, edges[:-1], "right")
    return bool((within | at_edge[:-1]).all())


def _returns(flow: Flow, start: float, until: float) -> float:
    """The t statistic of Dickey & Fuller (Journal of the American Statistical Association 74:427, 1979) on the mean
    numbers in the system in 50 intervals: far below 0 if the number returns to a mean, near 0 if it wanders."""
    edges = np.linspace(start + 0.2 * (until - start), until, MEANS + 1)
    inside = np.diff(_integral(flow.arrival, edges) - _integral(flow.ended, edges))
    before, change = inside[:-1] - inside[:-1].mean(), np.diff(inside)
    square = float((before**2).sum())
    if square == 0.0:
        return -math.inf
    slope = float((before * change).sum()) / square
    rest = change - change.mean() - slope * before
    error = math.sqrt(float((rest**2).sum()) / (len(change) - 2) / square)
    return slope / error if error > 0.0 else math.copysign(math.inf, slope)


def _integral(times: np.ndarray, until: np.ndarray) -> np.ndarray:
    """f8[m]: the integral of the number of `times` that have passed, up to each of f8[m]."""
    times = np.sort(times[np.isfinite(times)])
    passed = np.searchsorted(times, until, "right")
    return passed * until - np.concatenate(([0.0], np.cumsum(times)))[passed]


def combine_verdicts(verdicts: list[Verdict]) -> Verdict:
    """Of several replications: what most of them are, the worse of two equals; growth is the mean of those."""
    state = max(STATES, key=lambda state: sum(v.state == state for v in verdicts))
    those = [v for v in verdicts if v.state == state]
    share = f" ({len(those)} of {len(verdicts)} replications)" if len(verdicts) > 1 else ""
    growth = sum(v.backlog_per_s for v in those) / len(those)
    return replace(those[0], backlog_per_s=growth, reason=those[0].reason + share)
