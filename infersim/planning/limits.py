"""Which limit holds requests back: each likely one is lifted, and the run repeated."""

from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.explain.binding import QUEUE_SHARE, Binding, find_binding
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.run import run

MOST_REQUESTS = 5000  # of a repeated run
NOTABLE = 0.05  # a gain below is no limit
NAMES = {
    "kv_blocks": ("KV memory", "twice as many KV blocks"),
    "max_num_seqs": ("max_num_seqs", "twice as many sequences"),
    "max_num_batched_tokens": ("max_num_batched_tokens", "twice the token budget"),
    "prefill": ("the prefill pool", "another prefill replica"),
    "decode": ("the decode pool", "another decode replica"),
    "encode": ("the encode pool", "another encode replica"),
}
"""limit -> what it is called, and what was changed"""


def lift_limits(result: Result) -> list[dict[str, Any]]:
    """What lifting each likely limit brings, the most helpful first: {limit, change, faster: how many times shorter the
    mean end-to-end latency is}. Empty if requests hardly wait, or the workload is a recording.

    The same requests, the first MOST_REQUESTS of them: a difference is the limit's, not that of other draws.
    """
    in_system = result.waiting_time + result.running_time
    waits = in_system > 0 and result.waiting_time / in_system > QUEUE_SHARE
    load = result.scenario.workload
    if not waits or result.interrupted or load.trace is not None or load.num_requests is None:
        return []
    simulation = result.scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0, "seed": result.seed})
    workload = load.model_copy(update={"num_requests": min(load.num_requests, MOST_REQUESTS)})
    scenario = result.scenario.model_copy(update={"simulation": simulation, "workload": workload})
    before = _latency(scenario)
    found = []
    for limit, lifted in _lifted(scenario, result) if before else []:
        after = _latency(lifted)
        if before and after:
            found.append({"limit": limit, "change": NAMES[limit][1], "faster": before / after})
    return sorted(found, key=lambda row: -row["faster"])


def with_limits(document: dict[str, Any], result: Result) -> dict[str, Any]:
    """The answer of a run with `explain.lifted`, and what binds according to it."""
    rows = lift_limits(result)
    explain = document["explain"] | {"lifted": rows}
    if not rows:
        return document | {"explain": explain}
    waiting = result.waiting_time / (result.waiting_time + result.running_time)
    brought = "; ".join(f"{row['change']}: {_words(row['faster'])}" for row in rows)
    best = rows[0]
    if best["faster"] >= 1 + NOTABLE:
        text = f"{NAMES[best['limit']][0]}: requests wait for {waiting:.0%} of their time in the engine"
        ceiling = f"simulated again with {brought}"
        found = Binding(best["limit"], text, best["faster"], ceiling)
    else:  # requests wait, and none of these limits is why
        resource = find_binding(result, admission=False)
        ceiling = f"{resource.ceiling}; simulated again with {brought}"
        found = Binding(resource.name, resource.text, resource.factor, ceiling)
    return document | {
        "explain": explain
        | {
            "binding": found.text,
            "binding_constraint": found.name,
            "ceiling": found.ceiling,
            "ceiling_factor": found.factor,
        }
    }


def _words(faster: float) -> str:
    if abs(faster - 1) < 0.005:
        return "no difference"
    if faster >= 2:
        return f"{faster:.3g} times faster"
    change = 1 - 1 / faster if faster >= 1 else 1 / faster - 1
    return f"{change:.0%} {'faster' if faster >= 1 else 'slower'}"


def _latency(scenario: Scenario) -> float | None:
    try:
        result = run(scenario)[0]
    except InputError:
        return None
    if result.interrupted:
        raise KeyboardInterrupt
    return measure(result)["mean_e2el_ms"] if result.completed.all() else None


def _lifted(scenario: Scenario, result: Result) -> list[tuple[str, Scenario]]:
    """Each limit, and the scenario without it."""
    cluster, engine = scenario.cluster, scenario.engine
    pools = [(name, pool) for name in ("prefill", "decode", "encode") if (pool := getattr(cluster, name)) is not None]
    found = []
    for name, pool in pools:
        if pool.autoscaler is None:
            more = pool.model_copy(update={"replicas": pool.replicas + 1})
            counted = cluster.replicas + (name != "encode")
            changed = cluster.model_copy(update={name: more, "replicas": counted})
            found.append((name, scenario.model_copy(update={"cluster": changed})))
    if len(result.ran) == 1:
        memory, now = result.memory, result.engine
        twice = {
            "kv_blocks": {"num_gpu_blocks_override": 2 * memory.num_gpu_blocks},
            "max_num_seqs": {"max_num_seqs": 2 * now.max_num_seqs, "num_gpu_blocks_override": memory.num_gpu_blocks},
            "max_num_batched_tokens": {
                "max_num_batched_tokens": 2 * now.max_num_batched_tokens,
                "num_gpu_blocks_override": memory.num_gpu_blocks,
            },
        }
        found += [
            (limit, scenario.model_copy(update={"engine": engine.model_copy(update=update)}))
            for limit, update in twice.items()
        ]
    return found
