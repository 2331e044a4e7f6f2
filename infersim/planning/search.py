"""The cheapest deployment that holds an SLO: candidates in order of a lower bound on their cost, simulated until the
next one cannot be cheaper."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from infersim.config.plan import Plan, load_plan
from infersim.config.scenario import Given, Scenario

from .answer import answer_of
from .bounds import Lengths
from .candidate import Candidate, Found, Rejected, as_one, candidates_of, examine, is_fixed

OVERLOAD = 1.1  # a replica that completes x requests/s under overload sustains at most this times x
PRECISION = 0.02  # of the largest load
STEP = 1.25  # by which a load that is held is raised to find one that is not
LOWEST = 1e-3  # requests/s: below, a deployment holds the SLO at no rate
USERS = 16  # of one replica: where the search for the most begins
Progress = Callable[[int, int], None]
"""called with trials made and trials known to be left"""


def plan(given: Given, overrides: Sequence[str] = (), progress: Progress | None = None) -> dict[str, Any]:
    """The answer to a plan file, JSON-ready. InputError for what is no plan."""
    return search(*load_plan(given, overrides), progress)


def search(plan: Plan, scenarios: Sequence[Scenario], progress: Progress | None = None) -> dict[str, Any]:
    """`feasible`, `best` and `runner_up` (deployment, rate, cost, metrics, slo_met), `binding`, and how many candidates
    were considered, simulated and pruned, by reason."""
    scenarios = [as_one(scenario) for scenario in scenarios]
    candidates, rejected = candidates_of(plan, scenarios)
    find = _most if plan.maximises else _cheapest
    found = find(plan, candidates, rejected, progress)
    return answer_of(plan, scenarios, candidates, rejected, found, largest_load)


def _cheapest(plan: Plan, candidates: list[Candidate], rejected: Rejected, progress: Progress | None) -> list[Found]:
    """Best first: the queue holds each candidate with the fewest replicas that may do; failing, it comes back with
    more. What comes off the queue and holds the SLO is the cheapest, and the next other deployment the runner-up."""
    unseen = 0  # replicas of one that is not examined, at the least cost that it may have
    queue = [(c.unit * c.least, c.number, unseen, c) for c in candidates]
    heapq.heapify(queue)
    lengths: dict[str, Lengths] = {}
    found: list[Found] = []
    trials = forbidden = 0
    while queue:
        cost, _, replicas, c = heapq.heappop(queue)
        second = [one for one in found if one.candidate.arrangement != found[0].candidate.arrangement]
        if second and cost > second[0].key[0]:
            break
        if found and cost > found[0].key[0] and c.arrangement == found[0].candidate.arrangement:
            continue  # no runner-up
        if replicas == unseen:
            if examine(c, plan, lengths, rejected):
                heapq.heappush(queue, (c.unit * c.least, c.number, c.least, c))
            else:
                forbidden += 1
            continue
        decision = c.decide(replicas, c.load, plan)
        trials += 1
        if progress:
            progress(trials, len(queue))
        if decision.met:
            found = sorted([*found, Found(c, replicas, c.load, decision)], key=lambda one: one.key)
            continue
        more = replicas + 1
        if decision.saturated and decision.rate and not c.scenario.workload.users:
            more = max(more, math.ceil(replicas * c.load / (OVERLOAD * decision.rate)))
        if more <= c.most and not is_fixed(c.scenario):
            heapq.heappush(queue, (c.unit * more, c.number, more, c))
    rejected.reasons["a lower bound on its cost is above the answer's"] += (
        sum(not c.decisions for c in candidates) - forbidden
    )
    return found


def _most(plan: Plan, candidates: list[Candidate], rejected: Rejected, progress: Progress | None) -> list[Found]:
    """The largest load on all that is allowed: candidates in order of an upper bound on it, each tried at the second
    best so far first."""
    found: list[Found] = []
    lengths: dict[str, Lengths] = {}
    candidates = [c for c in candidates if examine(c, plan, lengths, rejected)]
    ranked = sorted(candidates, key=lambda c: (-c.most * c.rate, c.number))
    for i, c in enumerate(ranked):
        second = next((one for one in found if one.candidate.arrangement != found[0].candidate.arrangement), None)
        to_beat = second.load if second else 0.0
        if c.most * c.rate <= to_beat:
            rejected.reasons["an upper bound on its rate is below the answer's"] += len(ranked) - i
            break
        if progress:
            progress(i, len(ranked) - i)
        if to_beat and not c.decide(c.most, to_beat, plan).met:
            continue
        load = largest_load(c, c.most, plan, to_beat)
        if load > 0:
            found.append(Found(c, c.most, load, c.decide(c.most, load, plan)))
            found.sort(key=lambda one: (-one.load, one.candidate.number))
    return found


def largest_load(c: Candidate, replicas: int, plan: Plan, held: float) -> float:
    """The largest load of so many replicas that holds the SLO, to 2 % or one user: bisection from `held` (0: none
    known), which it first tries to exceed by steps, to a bound."""
    users = bool(c.scenario.workload.users)
    if users and not held:
        high = float(USERS * replicas)
        while high >= 1 and not c.decide(replicas, high, plan).met:
            high //= 2
        held = high  # 0: not one
        if not held:
            return 0.0
    low, high, step = held, replicas * c.rate, 2.0 if users else STEP
    while low and low < high:
        more = min(math.ceil(low * step) if users else low * step, high)
        if not c.decide(replicas, more, plan).met:
            high = more
            break
        low = more
    while high - low > max(PRECISION * high, 1.0 if users else 0.0) and high > LOWEST:
        middle = math.sqrt(low * high) if low else high / 2
        middle = round(middle) if users else middle
        decision = c.decide(replicas, middle, plan)
        if decision.met:
            low = middle
        else:
            high = max(low, min(middle, decision.rate * OVERLOAD)) if decision.saturated and not users else middle
    return low
