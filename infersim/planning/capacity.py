"""One deployment's room: the largest rate that it holds, what breaks above it, how many replicas are enough."""

import math
from collections.abc import Callable
from typing import Any

from infersim.config.errors import InputError
from infersim.config.plan import Plan
from infersim.config.scenario import Scenario
from infersim.explain.change import plain

from .bounds import Lengths, bounds_of
from .candidate import Candidate
from .outlook import MOST_REQUESTS
from .search import OVERLOAD

MOST_GPUS = 512
STEP = 1.5  # from a rate that is held to the next, and back
LEAST = 64  # below this share of the workload's rate none is looked for
PRECISION = 0.03


def capacity(scenario: Scenario, tell: Callable[[float, float], None]) -> dict[str, Any]:
    """largest_rate (requests/s; None if there is none to find), headroom (over the workload's rate), breaks (the limit
    that the lowest rate above it broke), enough ({replicas, gpus}: the fewest that hold the limits at that load)
    and note, enough_note (why one is missing). `tell` hears between which rates the largest one lies.

    Simulated with at most MOST_REQUESTS requests, or as many as it takes to tell whether the load is kept up with.
    """
    load, nothing = scenario.workload, {"largest_rate": None, "headroom": None, "breaks": "", "enough": None}
    rate = load.request_rate
    if rate is None or math.isinf(rate) or load.max_concurrency is not None:
        return nothing | {"note": "of traffic that comes at a rate", "enough_note": ""}
    workload = load.model_copy(update={"num_requests": min(load.num_requests or MOST_REQUESTS, MOST_REQUESTS)})
    simulation = scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0})
    scenario = scenario.model_copy(update={"workload": workload, "simulation": simulation})
    plan = Plan(candidates={}, max_gpus=MOST_GPUS, objective="gpus")
    whole = len(scenario.cluster.groups) > 1
    replicas = 1 if whole else scenario.cluster.replicas
    try:
        c = Candidate(0, scenario, 1.0, MOST_GPUS, bounds_of(scenario, Lengths(workload, simulation.seed)))
        most, above = _largest(c, replicas, rate, plan, tell)
    except InputError as error:
        return nothing | {"note": error.problems[0], "enough_note": ""}
    breaks = ""
    if above:
        decision = c.decide(replicas, above, plan)
        breaks = "throughput" if decision.saturated or not decision.limits else decision.tightest["name"]
    enough, note = _enough(c, rate, plan) if scenario.slo.limits and not whole else (None, "")
    headroom = most / rate - 1 if most else None
    return {"largest_rate": most or None, "headroom": headroom, "breaks": breaks, "enough": enough,
            "note": "" if most else "no rate is held", "enough_note": note}  # fmt: skip


def _largest(
    c: Candidate, replicas: int, rate: float, plan: Plan, tell: Callable[[float, float], None]
) -> tuple[float, float]:
    """The largest rate that is held, and the lowest that is not; 0 if there is none. From the workload's own rate."""
    low, high, step = 0.0, 0.0, rate
    most = replicas * c.rate
    while not (low and high):
        tell(low, high or most)
        if c.decide(replicas, step, plan).met:
            low = step
            if low >= most:
                return low, 0.0
            step = min(step * STEP, most)
        else:
            high = step
            step /= STEP
            if step < rate / LEAST:
                return 0.0, high
    while high - low > PRECISION * high:
        tell(low, high)
        middle = math.sqrt(low * high)
        if c.decide(replicas, middle, plan).met:
            low = middle
        else:
            high = middle
    return low, high


def _enough(c: Candidate, rate: float, plan: Plan) -> tuple[dict[str, int] | None, str]:
    if c.bounds and (violated := c.bounds.violated(c.scenario.slo.limits)):
        name, floor, limit = violated[0]
        return None, f"no number of these: {name} cannot be below {plain(floor)} and must be {limit:g}"
    replicas = max(1, math.ceil(rate / c.rate))
    while replicas * c.gpus <= plan.max_gpus:
        decision = c.decide(replicas, rate, plan)
        if decision.met:
            return {"replicas": replicas, "gpus": replicas * c.gpus}, ""
        idle = not decision.saturated and c.decide(replicas, rate / 16, plan).state == "missed"
        if idle:
            name = decision.tightest["name"]
            return None, f"more of these do not help: {name} is missed at a sixteenth of the load too"
        more = math.ceil(replicas * rate / (OVERLOAD * decision.rate)) if decision.saturated and decision.rate else 0
        replicas = max(replicas + 1, more)
    return None, f"more than {plan.max_gpus} of these"
