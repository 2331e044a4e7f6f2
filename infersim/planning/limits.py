"""Which limit holds requests back: each one that was reached is lifted, and the run repeated."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from infersim.config.cluster import Kind
from infersim.config.errors import InputError
from infersim.config.router import STATIC_POLICIES, Policy, Router
from infersim.config.scenario import Scenario
from infersim.explain.binding import QUEUE_SHARE, Binding, find_binding, waiting_share
from infersim.explain.change import plain
from infersim.metrics.result import Ran, Result
from infersim.run import run

from .unknowns import unknowns

MOST_REQUESTS = 5000  # of a repeated run
SEE_CACHES = ("prefix-aware", "kv-aware", "weighted", "session")  # policies of routers
NEAR_LIMIT = 0.9  # a limit whose peak use is above this share may be one that requests wait for
NOTABLE = 0.05  # a gain below is no limit
NO_DIFFERENCE = "no difference"
ENGINE = {
    "kv_blocks": ("KV memory", "twice as many KV blocks"),
    "max_num_seqs": ("max_num_seqs", "twice as many sequences"),
    "max_num_batched_tokens": ("max_num_batched_tokens", "twice the token budget"),
    "api_server": ("the API server", "an API server twice as fast"),
    "max_loras": ("LoRA slots", "twice as many LoRA slots"),
}
"""limit of a replica -> what it is called, and what was changed"""


class Lift(NamedTuple):
    """A limit, what it is called, what was changed, and the scenario without it; hardware: whether that takes more."""

    limit: str
    name: str
    change: str
    scenario: Scenario
    hardware: bool = False


def lift_limits(result: Result) -> list[dict[str, Any]]:
    """What lifting each limit that was reached brings, the most helpful first.

    limit, name, change; `faster`: how many times shorter the end-to-end latency is, the mean over the requests that are
    completed in both runs; `completed`: the share of requests that are, before and after; `hardware`: whether it takes
    more accelerators. Of two that bring the same, a setting comes first. Empty if requests hardly wait.

    The same requests, the first MOST_REQUESTS of them: a difference is the limit's, not that of other draws.
    """
    if result.interrupted or _waiting(result) <= QUEUE_SHARE:
        return []
    load = result.scenario.workload
    simulation = result.scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0, "seed": result.seed})
    workload = load.model_copy(update={"num_requests": min(len(result.requests), MOST_REQUESTS)})
    scenario = result.scenario.model_copy(update={"simulation": simulation, "workload": workload})
    lifts = list(_lifts(scenario, result))
    before = attempt(scenario) if lifts else None
    rows = []
    for lift in lifts if before else []:
        if before and (after := attempt(lift.scenario)) and (faster := _faster(before, after)):
            shares = [float(one.completed.mean()) for one in (before, after)]
            rows.append({"limit": lift.limit, "name": lift.name, "change": lift.change, "faster": faster,
                         "completed": shares, "hardware": lift.hardware})  # fmt: skip
    rows.sort(key=_gain, reverse=True)
    settings = [row for row in rows if not row["hardware"] and _gain(row) > _gain(rows[0]) / (1 + NOTABLE)]
    return settings[:1] + [row for row in rows if row not in settings[:1]]


def _gain(row: dict[str, Any]) -> float:
    """How much better requests fare: those answered at all, times how much faster."""
    before, after = row["completed"]
    return row["faster"] * after / before


def with_limits(document: dict[str, Any], result: Result) -> dict[str, Any]:
    """The answer of a run with `explain.lifted`, what binds according to it, and `unknowns` (planning.unknowns)."""
    rows = lift_limits(result)
    document = document | {"unknowns": unknowns(result, document["metrics"])}
    explain = document["explain"] | {"lifted": rows}
    if not rows:
        return document | {"explain": explain}
    moved = [f"{row['change']}: {words}" for row in rows if (words := _words(row)) != NO_DIFFERENCE]
    still = ", ".join(row["change"] for row in rows if _words(row) == NO_DIFFERENCE)
    brought = f"simulated again with {'; '.join(moved)}" if moved else "simulated again"
    brought += f"; {NO_DIFFERENCE}: {still}" if still else ""
    best = rows[0]
    if _gain(best) >= 1 + NOTABLE:
        text = f"{best['name']}: requests wait for {_waiting(result):.0%} of their time"
        found = Binding(best["limit"], text, best["faster"], brought)
    else:  # requests wait, and none of these limits is why
        resource = find_binding(result)
        ceiling = f"{resource.ceiling}; {brought}"
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


def _words(row: dict[str, Any]) -> str:
    faster, (before, after) = row["faster"], row["completed"]
    done = f"{after:.0%} of requests completed instead of {before:.0%}, " if abs(after - before) >= 0.005 else ""
    if abs(faster - 1) < 0.005:
        return f"{done}as fast" if done else NO_DIFFERENCE
    if faster >= 2:
        return f"{done}{plain(faster, 3)} times faster"
    change = 1 - 1 / faster if faster >= 1 else 1 / faster - 1
    return f"{done}{change:.0%} {'faster' if faster >= 1 else 'slower'}"


def _waiting(result: Result) -> float:
    """The share of their time, from being sent to the last token, in which requests do not run; of those that get no
    answer, all of it."""
    r, done = result.requests, result.completed
    if not done.any():
        return 1.0
    running = max(result.running_time - result.replicas.aborted_time, 0.0)
    total = float((r["last_token"] - r["sent"])[done].sum())
    answered = float(done.mean())
    waits = max(1 - running / total if total > 0 else 0.0, waiting_share(result))
    return waits * answered + 1 - answered


def attempt(scenario: Scenario) -> Result | None:
    """One run; None if it cannot run, or nobody is served."""
    try:
        result = run(scenario)[0]
    except InputError:
        return None
    if result.interrupted:
        raise KeyboardInterrupt
    return result if result.completed.any() else None


def _faster(before: Result, after: Result) -> float | None:
    """How many times shorter the latency of the requests is that are completed in both."""
    names = [one.request_ids[one.completed] for one in (before, after)]
    _, i, j = np.intersect1d(names[0], names[1], assume_unique=True, return_indices=True)
    sums = []
    for one, rows in ((before, i), (after, j)):
        r = one.requests[one.completed][rows]
        sums.append(float((r["last_token"] - r["sent"]).sum()))
    return sums[0] / sums[1] if len(i) and sums[1] > 0 else None


def _lifts(scenario: Scenario, result: Result) -> Iterator[Lift]:
    """Each limit that this run reached, and the scenario without it."""
    yield from _more_replicas(scenario)
    yield from _between(scenario, result)
    for ran in result.ran:
        if ran.role != "encode":
            yield from _engine_lifts(scenario, result, ran)


def _varied(scenario: Scenario, words: tuple[str, str, str], update: dict[str, Any], hardware: bool = False) -> Lift:
    """words: the limit, what it is called, and the change; update: of the cluster."""
    cluster = scenario.cluster.model_copy(update=update)
    return Lift(*words, scenario.model_copy(update={"cluster": cluster}), hardware)


def _more_replicas(scenario: Scenario) -> Iterator[Lift]:
    """Of pools and kinds, which one needs another replica."""
    cluster = scenario.cluster
    for name in ("decode", "prefill", "encode"):
        pool = getattr(cluster, name)
        if pool is not None and pool.autoscaler is None:
            more = pool.model_copy(update={"replicas": pool.replicas + 1})
            update = {name: more, "replicas": cluster.replicas + (name != "encode")}
            yield _varied(scenario, (name, f"the {name} pool", f"another {name} replica"), update, True)
    kinds = cluster.kinds or []
    for i, kind in enumerate(kinds if len(kinds) > 1 else ()):
        if kind.autoscaler is None:
            more_kinds = [*kinds]
            more_kinds[i] = kind.model_copy(update={"replicas": kind.replicas + 1})
            device = (kind.hardware or scenario.hardware).name
            words = (f"kinds.{i}", f"replicas of kinds.{i} ({device})", f"another of kinds.{i}")
            yield _varied(scenario, words, {"kinds": more_kinds, "replicas": cluster.replicas + 1}, True)
    if cluster.encode and not cluster.prefill and not kinds and cluster.autoscaler is None:
        words = ("replicas", "the replicas that decode", "another replica that decodes")
        yield _varied(scenario, words, {"replicas": cluster.replicas + 1}, True)


def _between(scenario: Scenario, result: Result) -> Iterator[Lift]:
    """What stands between clients and engines."""
    cluster = scenario.cluster
    busy = (result.route.get("link_busy_share") or 0.0) > NEAR_LIMIT  # prompts that wait for it hold their blocks
    if cluster.transfer and (busy or _notable(result, "transfer_ms", "encode_ms")):
        link = cluster.transfer.model_copy(update={"bandwidth": 2 * cluster.transfer.bandwidth})
        words = ("transfer", "the link between the pools", "twice the link's bandwidth")
        yield _varied(scenario, words, {"transfer": link})
    if cluster.admission and (_notable(result, "front_door_ms") or not result.completed.all()):
        words = ("admission", "admission at the front door", "no limit at the front door")
        yield _varied(scenario, words, {"admission": None})
    if cluster.failures:
        yield _varied(scenario, ("failures", "replicas that are down", "none that fails"), {"failures": ()})
    if scaler := cluster.autoscaler:
        words = ("autoscaler", "the autoscaler", "all its replicas from the start")
        yield _varied(scenario, words, {"replicas": scaler.max, "autoscaler": None})
    for name, policy in _routers(scenario, result):
        router = Router(policy=policy)
        of, key = (f" of the {name} pool", f"{name}.router") if name else ("", "router")
        update = {name: getattr(cluster, name).model_copy(update={"router": router})} if name else {"router": router}
        yield _varied(scenario, (key, f"the router{of}", f"{policy} routing{of}"), update)


def _notable(result: Result, *names: str) -> bool:
    """Whether requests spend a notable share of their time on what these columns count."""
    r = result.requests[result.completed]
    spent = sum(float(np.nansum(result.route_columns[name])) for name in names if name in result.route_columns) / 1e3
    return spent > NOTABLE * float((r["last_token"] - r["sent"]).sum())


def _routers(scenario: Scenario, result: Result) -> Iterator[tuple[str, Policy]]:
    """Routers that choose among several replicas, by their pool ("": of all), and a policy that sees what theirs does
    not: how busy the replicas are, or what they have cached."""
    cluster = scenario.cluster
    cached = result.session is not None or bool(result.replicas.visits["num_cached_tokens"].any())
    for key, router in cluster.routers.items():
        name = key.removeprefix("cluster.").removesuffix("router").rstrip(".")
        if (getattr(cluster, name).most if name else sum(g.most for g in cluster.groups if isinstance(g, Kind))) < 2:
            continue
        caches = any(ran.deployment.engine.enable_prefix_caching for ran in result.ran if ran.role != "encode")
        if cached and caches and name != "encode" and router.policy not in SEE_CACHES:
            yield name, "prefix-aware"
        if router.policy in (*STATIC_POLICIES, "session") or router.signal_age:
            yield name, "least-outstanding"


def _engine_lifts(scenario: Scenario, result: Result, ran: Ran) -> Iterator[Lift]:
    """Limits of the replicas of one kind."""
    deployment, rows, requests = ran.deployment, result.replicas.rows[ran.replicas], result.requests
    memory, now = deployment.memory, deployment.engine
    places = now.max_num_seqs * deployment.parallelism.attention_data // result.num_sequences
    blocks = (rows["peak_blocks"] / result.replicas.usable_blocks[ran.replicas]).max()
    same = {"num_gpu_blocks_override": memory.num_gpu_blocks}
    twice: dict[str, dict[str, Any]] = {}
    if blocks >= NEAR_LIMIT or now.enable_prefix_caching or now.allocator != "paged" or now.reserve != "first-chunk":
        twice["kv_blocks"] = {"num_gpu_blocks_override": 2 * memory.num_gpu_blocks}
    if int(rows["peak_running"].max()) >= places * NEAR_LIMIT:
        twice["max_num_seqs"] = {"max_num_seqs": 2 * now.max_num_seqs, **same}
    twice["max_num_batched_tokens"] = {"max_num_batched_tokens": 2 * now.max_num_batched_tokens, **same}
    times = {"host_request_time": len(requests), "host_token_time": int(requests["num_output_tokens"].sum()),
             "host_prompt_token_time": int(requests["prompt_tokens"].sum())}  # fmt: skip
    busy = sum(getattr(now, name) * count for name, count in times.items())
    if busy > NOTABLE * result.end_time * len(_numbers(ran)):
        twice["api_server"] = {name: getattr(now, name) / 2 for name in times}
    for name, update in twice.items():
        yield _of_kind(scenario, result, ran, name, engine=update)
    lora = deployment.lora
    if lora and result.route.get("mean_adapter_wait_ms") and lora.max_loras < len(lora.adapters):
        slots = {"max_loras": min(2 * lora.max_loras, len(lora.adapters))}
        yield _of_kind(scenario, result, ran, "max_loras", engine=same, lora=slots)


def _of_kind(scenario: Scenario, result: Result, ran: Ran, limit: str, **updates: dict[str, Any]) -> Lift:
    """The scenario with settings of the replicas of one kind changed: the scenario's own, where all are of one kind."""
    name, change = ENGINE[limit]
    cluster = scenario.cluster
    alone = len([other for other in result.ran if other.role != "encode"]) == 1
    if alone and not cluster.kinds:
        own = {key: getattr(scenario, key).model_copy(update=update) for key, update in updates.items()}
        return Lift(limit, name, change, scenario.model_copy(update=own))
    groups = dict(zip(cluster.group_names, cluster.groups, strict=True))
    mine = [key for key, numbers in zip(groups, cluster.ranges, strict=True) if numbers.start in _numbers(ran)]
    for key in mine:
        group = groups[key]
        own = {part: (getattr(group, part) or getattr(scenario, part)).model_copy(update=update)
               for part, update in updates.items()}  # fmt: skip
        groups[key] = group.model_copy(update=own)
    if cluster.prefill:
        changed: dict[str, Any] = {key: groups[key] for key in mine}
    else:
        changed = {"kinds": [group for key, group in groups.items() if key != "encode"]}
    lifted = scenario.model_copy(update={"cluster": cluster.model_copy(update=changed)})
    if alone:
        return Lift(limit, name, change, lifted)
    of = f"of the {ran.role} pool" if cluster.prefill else f"of {', '.join(mine)}"
    return Lift(f"{mine[0]}.{limit}", f"{name} {of}", f"{change} {of}", lifted)


def _numbers(ran: Ran) -> range:
    return range(ran.replicas.start, ran.replicas.stop)
