"""What a deployment completes when far more arrives: the rate that it keeps up with."""

import math

import numpy as np

from infersim.config.scenario import Scenario

from .confidence import student_t
from .result import Result

SIZES = (
    2000,
    8192,
)  # requests that all arrive at once; more where so many do not tell, but not of pools: it takes long
GENERATIONS = 8  # as many requests as run at once: of fewer most would begin together, or end together
BLOCKS = 10  # of the completions in the middle half
LEVEL, CLEAR = 0.995, 0.05  # one-sided confidence of the rate, and the half-width that is narrow enough
ROUTERS = ("round-robin", "random", "least-outstanding", "power-of-two")
"""policies that spread what arrives at once as they spread what arrives one by one"""


def overloaded(scenario: Scenario, num_requests: int) -> Scenario | None:
    """So many of the same requests, all at once. None where those would not be served as they are when they come one by
    one, or their rate is not constant."""
    load, cluster = scenario.workload, scenario.cluster
    changing = load.trace or load.curve or load.spikes or load.ramp_up or not load.request_rate
    apart = load.tenants or load.models or load.timeout or load.users or load.n > 1 or load.images or load.turns != 1
    between = (
        cluster.kinds
        or any(g.autoscaler for g in cluster.groups)
        or cluster.admission
        or cluster.failures
        or cluster.encode
    )
    choosing = cluster.replicas > 1 and (cluster.router.policy not in ROUTERS or cluster.router.signal_age)
    ordered = scenario.engine.scheduling_policy not in (None, "fcfs")
    long = cluster.prefill and num_requests > SIZES[0]
    if long or changing or math.isinf(load.request_rate or math.inf) or apart or between or choosing or ordered:
        return None
    update = {"request_rate": math.inf, "num_requests": num_requests, "duration": None, "burstiness": 1.0}
    simulation = scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0})
    return scenario.model_copy(update={"workload": load.model_copy(update=update), "simulation": simulation})


def completion_rate(result: Result) -> tuple[float, float] | None:
    """[low, high], requests/s that are completed between the first and the last quarter of an overload. None if it was
    too short for that.

    Whatever waits in front, a system is stable that completes more than arrives when enough waits, and unstable that
    completes less (Baccelli & Foss, On the saturation rule for the stability of queues, J. Appl. Prob. 32:494, 1995).
    """
    n = len(result.requests)
    if not result.completed.all() or n < GENERATIONS * int(result.replicas.rows["peak_running"].sum()):
        return None
    ended = np.sort(result.requests["last_token"])
    each = np.diff(ended[np.linspace(n // 4, 3 * n // 4, BLOCKS + 1).astype(int)])
    half = student_t(LEVEL, BLOCKS - 1) * float(each.std(ddof=1)) / math.sqrt(BLOCKS) / float(each.mean())
    rate = (3 * n // 4 - n // 4) / float(each.sum())
    return (rate / (1 + half), rate / (1 - half) if half < 1 else math.inf)
