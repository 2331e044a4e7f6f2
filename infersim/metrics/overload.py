"""What a deployment completes when far more arrives: the rate that it keeps up with."""

import math
from typing import Any

import numpy as np

from infersim.config.scenario import Scenario

from .confidence import student_t
from .result import Result

LEAST, MOST = 2048, 8192
"""requests that all arrive at once; of pools only LEAST, as more take long"""
GENERATIONS = 8  # as many requests as run at once: of fewer most would begin together, or end together
MOST_STEPS, MOST_BLOCKS = 1_000_000, 100_000_000  # of an overload: seconds on the wall
BLOCKS = 10  # of the completions in the middle half
LEVEL, CLEAR = 0.995, 0.05  # one-sided confidence of the rate, and the half-width that is narrow enough
ROUTERS = ("round-robin", "random", "least-outstanding", "power-of-two")
"""policies that spread what arrives at once as they spread what arrives one by one"""


def sizes(result: Result) -> list[int]:
    """How many requests an overload of this run's deployment needs, by how many of them its KV cache holds, and how
    many at most; none that would take too many steps, or KV blocks, of which there may be a million for each."""
    if result.scenario.cluster.prefill:
        return [LEAST]
    blocks = result.block_time / result.running_time if result.running_time else 0.0  # of one request
    held = float(result.replicas.usable_blocks[0]) / blocks if blocks else math.inf
    running = min(held, result.engine.max_num_seqs * result.ran[0].deployment.parallelism.attention_data)
    needed = 2 ** math.ceil(math.log2(max(1.1 * GENERATIONS * running, 1.0)))
    in_steps = result.num_steps * result.running_time / max(result.busy_time, 1e-9)  # of all requests together
    most = MOST_STEPS * max(running, 1.0) * len(result.requests) / max(in_steps, 1.0)
    r = result.requests[result.completed]  # prompts, which may go in one after another
    prefill = float((r["first_token"] - r["scheduled"]).sum()) * result.num_steps / max(result.busy_time, 1e-9)
    most = min(most, MOST_STEPS * len(r) / max(prefill, 1.0), MOST_BLOCKS / max(blocks, 1.0))
    return [n for n in sorted({min(max(needed, LEAST), MOST), MOST}) if n <= most]


def overloaded(scenario: Scenario, num_requests: int) -> tuple[Scenario, int] | None:
    """So many of the same requests, all at once, and how many such deployments there are: replicas that share nothing
    but a router complete as many times what one does. None where requests would not be served as they are when they
    come one by one, or their rate is not constant. With an autoscaler: all its replicas."""
    load, cluster = scenario.workload, scenario.cluster
    changing = load.trace or load.curve or load.spikes or load.ramp_up or not load.request_rate
    differ = load.tenants or load.models or load.timeout or load.users or load.n > 1 or load.images or load.turns != 1
    between = (
        cluster.kinds
        or (cluster.prefill and any(g.autoscaler for g in cluster.groups))
        or (cluster.autoscaler and (load.max_concurrency or cluster.kv_store))
        or cluster.admission
        or cluster.failures
        or cluster.role_switch
        or cluster.encode
    )
    choosing = cluster.most > 1 and (cluster.router.policy not in ROUTERS or cluster.router.signal_age)
    ordered = scenario.engine.scheduling_policy not in (None, "fcfs")
    if changing or math.isinf(load.request_rate or math.inf) or differ or between or choosing or ordered:
        return None
    alike = {"request_rate": math.inf, "num_requests": num_requests, "duration": None, "burstiness": 1.0}
    update: dict[str, Any] = {"workload": load.model_copy(update=alike)}
    simulation = scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0, "seed": 0})
    apart = not (cluster.prefill or cluster.kv_store or load.max_concurrency)
    if apart:
        update["cluster"] = cluster.model_copy(update={"replicas": 1, "autoscaler": None})
    return scenario.model_copy(update=update | {"simulation": simulation}), cluster.most if apart else 1


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
