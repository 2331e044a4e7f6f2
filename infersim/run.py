"""One run: description in, records out."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np

from .cluster.clients import Clients
from .cluster.serve import Progress, serve
from .cluster.site import Site, pools_of
from .config.cluster import EncodePool, Kind
from .config.errors import InputError
from .config.precision import BYTES
from .config.scenario import Scenario
from .config.workload import Workload
from .cost.lora import adapter_bytes
from .deployment import Deployment, deployments_of, served_name
from .engine.fleet import Fleet, NoProgress
from .engine.replica import ReplicaSpec
from .engine.streaming import stream
from .interrupt import uninterrupted
from .metrics.overload import CLEAR, completion_rate, overloaded, sizes
from .metrics.result import Result
from .metrics.verdict import judge
from .metrics.warmup import check_warmup
from .outcome import each_sample, result_of
from .workload.acceptance import acceptance_table
from .workload.build import build_requests
from .workload.requests import Requests, resolve_max_tokens


def run(
    scenario: Scenario,
    progress: Progress | None = None,
    save_detailed: bool = False,
    enough: Callable[[Result], bool] | None = None,
) -> list[Result]:
    """Simulate every replication of a scenario: one Result each, of seed, seed + 1, ...

    save_detailed keeps every inter-token gap; after a result that is `enough` no replication follows. InputError for
    what cannot run. A keyboard interrupt ends the run early: the results so far are returned, the last one marked
    `interrupted`.
    """
    check_warmup(scenario)
    kinds = deployments_of(scenario)
    sites = sites_of(scenario, kinds)
    results: list[Result] = []
    previous: Requests | None = None
    overload = partial(completes_overloaded, scenario)
    for seed in range(scenario.simulation.seed, scenario.simulation.seed + scenario.simulation.replications):
        try:
            requests = build_requests(scenario.workload, seed, Path())
        except KeyboardInterrupt:
            if not results:
                raise
            results[-1] = replace(results[-1], interrupted=True)
            break
        if previous is not None and scenario.speculation is None and _same(requests, previous):
            raise InputError(
                "simulation.replications: nothing in this workload is drawn, so every replication would be the same;"
                f" must be 1 (got {scenario.simulation.replications})"
            )
        previous = requests
        result = _simulate(scenario, kinds, sites, requests, seed, progress, save_detailed)
        results.append(replace(result, overload=overload))
        if results[-1].interrupted or (enough and enough(results[-1])):
            break
    return results


MOST_REQUESTS = 5_000_000
"""so far `run_until_decided` lengthens a run"""


def run_until_decided(
    scenario: Scenario, progress: Progress | None = None, save_detailed: bool = False
) -> list[Result]:
    """`run`, with as many more requests as it takes until no replication is too short to tell whether the system keeps
    up, or to be in balance; or with MOST_REQUESTS. InputError for a workload that is not drawn, or rises to its end."""
    if scenario.workload.trace is not None:
        raise InputError("--until-decided: this workload is a recording; must be drawn, with input_tokens")
    if scenario.workload.ramp_up:
        raise InputError("--until-decided: more requests only stretch workload.ramp_up; must be a request_rate")
    while True:
        results = run(scenario, progress, save_detailed)
        needed = max(judge(result).needed_requests or 0 for result in results)
        if not needed or results[-1].interrupted or len(results[-1].requests) >= MOST_REQUESTS:
            return results
        scenario = longer(scenario, min(needed, MOST_REQUESTS))


def longer(scenario: Scenario, num_requests: int | None) -> Scenario:
    """The same with so many requests, however long they take to arrive; None: as many as before."""
    if num_requests is None:
        return scenario
    workload = scenario.workload.model_copy(update={"num_requests": num_requests, "duration": None})
    return scenario.model_copy(update={"workload": workload})


def watched(scenario: Scenario, seed: int, watch: Callable[[Fleet], None]) -> None:
    """Simulates once more, and lets `watch` advance the fleet and look at it once all requests are submitted: where it
    is stopped changes nothing. What goes on after is not simulated. Where replicas interact, nobody is called."""
    kinds = deployments_of(scenario)
    with contextlib.suppress(_Seen):
        requests = build_requests(scenario.workload, seed, Path())
        _simulate(scenario, kinds, sites_of(scenario, kinds), requests, seed, None, False, watch)


class _Seen(Exception):
    """Everything that was to be watched has been."""


def simulate(scenario: Scenario, requests: Requests, save_detailed: bool = False) -> Result:
    """Serve these requests instead of the scenario's, once; what clients ask for is its workload's max_tokens."""
    kinds = deployments_of(scenario)
    sites = sites_of(scenario, kinds)
    return _simulate(scenario, kinds, sites, requests, scenario.simulation.seed, None, save_detailed)


def _priorities(load: Workload, requests: Requests) -> np.ndarray:
    """i8[n]: each request's tenant's priority, or the ms at which its first token is due."""
    tenants = [*(load.tenants or {}).values()]
    if not load.deadline_order:
        return np.array([tenant.priority for tenant in tenants])[requests.tenant]
    limits = np.array([getattr(tenant.goodput, "ttft_ms", None) or 0.0 for tenant in tenants])
    due = 1e3 * requests.arrival + limits[requests.tenant]
    return np.minimum(due, np.iinfo("i4").max).astype("i8")


def is_drawn(workload: Workload) -> bool:
    """Whether anything in the workload depends on the seed. InputError for a trace that cannot be read."""
    return not _same(*(build_requests(workload, seed, Path()) for seed in (0, 1)))


def _same(one: Requests, other: Requests) -> bool:
    columns = ("arrival", "prompt_tokens", "output_tokens", "delay")
    return all(np.array_equal(getattr(one, column), getattr(other, column)) for column in columns)


def sites_of(scenario: Scenario, kinds: list[tuple[Deployment, Kind | EncodePool]]) -> list[tuple[ReplicaSpec, Site]]:
    """Every replica that there may be at one time: for the engine, and for the cluster."""
    sites, load = [], scenario.workload
    for deployment, kind in kinds:
        replica = deployment.replica()
        if not isinstance(kind, Kind):
            site = Site(kind.weight, 0.0, 1, deployment.memory.weights_bytes, model=None)
            sites += [(replica, site)] * kind.most
            continue
        site = Site(
            kind.weight,
            deployment.memory.block_bytes * deployment.parallelism.kv_gpus,
            deployment.model.num_layers,
            deployment.memory.weights_bytes,
            host_bandwidth=deployment.hardware.pcie_bandwidth or np.inf,
            embedding_bytes=deployment.model.hidden_size * BYTES[deployment.precision.activations],
            **(_named(deployment, kind) if load.models or load.model_column else {}),
        )
        sites += [(replica, site)] * kind.most
    return sites


def _named(deployment: Deployment, kind: Kind) -> dict[str, Any]:
    """What requests may ask a replica for, and what it takes to have it there."""
    lora = deployment.lora
    return {"model": served_name(deployment, kind)} | (
        {
            "adapters": {name: adapter_bytes(deployment.placement, rank) for name, rank in lora.adapters.items()},
            "max_loras": lora.max_loras,
            "overlap_loading": lora.overlap_loading,
        }
        if lora
        else {}
    )


def _simulate(
    scenario: Scenario,
    kinds: list[tuple[Deployment, Kind | EncodePool]],
    sites: list[tuple[ReplicaSpec, Site]],
    requests: Requests,
    seed: int,
    progress: Progress | None,
    save_detailed: bool,
    watch: Callable[[Fleet], None] | None = None,
) -> Result:
    load = scenario.workload
    which = pools_of(requests, [site for _, site in sites])
    shortest = _shortest(kinds, [site.model for _, site in sites])
    longest = np.array([deployment.engine.max_model_len for deployment in shortest])
    longest = longest[which] if len(longest) > 1 else longest  # of ten million requests every column counts
    max_tokens = resolve_max_tokens(load, requests, longest)
    _check_lengths(shortest[0], requests, max_tokens, longest)
    streams = any(d.engine.stream_interval > 1 or not d.engine.stream_first_token for d, _ in kinds)
    fleet = Fleet(
        [spec for spec, _ in sites],
        ranks=max(deployment.parallelism.attention_data for deployment, _ in kinds),
        # else the histogram of all gaps is that of the completed requests' gaps, which alone count
        keep_gaps=bool(
            save_detailed or scenario.simulation.warmup or load.timeout or scenario.cluster.failures or streams
        ),
        shares_text=requests.segments is not None,
        acceptance=acceptance_table(scenario.speculation) if scenario.speculation else None,
        seed=seed,
    )
    sent, asked, stop_tokens = requests, max_tokens, None
    grouped = requests.samples > 1 and fleet.num_sequences > 1  # a row of the fleet stands for a prompt's samples
    if grouped:
        outputs, limits = (column.reshape(-1, requests.samples) for column in (requests.output_tokens, max_tokens))
        first = np.arange(len(requests)) % requests.samples == 0
        sent = replace(requests.keep(first), output_tokens=outputs.max(axis=1), samples=1)
        asked, stop_tokens = limits.max(axis=1), np.minimum(outputs, limits)
    clients = Clients(
        asked,
        load.max_concurrency or 0,
        load.timeout or 0.0,
        load.retries,
        load.backoff,
        None if sent.tenant is None else _priorities(load, sent),
        stop_tokens,
    )

    def look(fleet: Fleet | None) -> None:
        if watch and fleet:
            watch(fleet)
        if watch:
            raise _Seen

    try:
        served = serve(scenario.cluster, fleet, [site for _, site in sites], sent, clients, seed, progress, look)
    except NoProgress as stuck:
        if all(d.engine.gate_caps_windows or not d.engine.scheduler_reserve_full_isl for d, _ in kinds):
            raise
        raise InputError(
            f"engine.scheduler_reserve_full_isl: {stuck}, as in this release: its gate counts windows as whole"
            " sequences, of which one is larger than the KV cache; must be off, or requests shorter"
        ) from None
    with uninterrupted():
        if streams:
            each = [
                (d.engine.stream_interval, d.engine.stream_first_token) for d, kind in kinds for _ in range(kind.most)
            ]
            interval, alone = (np.array(column) for column in zip(*each, strict=True))
            stream(fleet, interval, alone)
            for name in ("first_token", "num_chunks"):
                served.requests[name] = fleet.requests[name][served.rows]
        if grouped:
            served = each_sample(served, fleet, requests.output_tokens, max_tokens)
        return result_of(scenario, kinds, [spec for spec, _ in sites], fleet, served, requests, seed)


def _shortest(kinds: list[tuple[Deployment, Kind | EncodePool]], models: list[str | None]) -> list[Deployment]:
    """For each model, the deployment with the shortest max_model_len. models: of each replica, None if it encodes."""
    first = 0
    found: dict[str, list[Deployment]] = {}
    for deployment, kind in kinds:
        if (model := models[first]) is not None:
            found.setdefault(model, []).append(deployment)
        first += kind.most
    return [min(same, key=lambda d: d.engine.max_model_len) for same in found.values()]


def _check_lengths(deployment: Deployment, requests: Requests, max_tokens: np.ndarray, longest: np.ndarray) -> None:
    """InputError if no request fits max_model_len: single ones are rejected and counted. longest: i8[n], or [1]."""
    need = requests.prompt_tokens.astype("i8") + np.minimum(max_tokens, requests.output_tokens)
    if (need > longest).all():
        raise InputError(
            f"workload: the shortest request needs {need.min()} tokens (prompt and output) and max_model_len is"
            f" {longest.max()} ({deployment.engine.origin['max_model_len']}); must fit, or raise engine.max_model_len"
        )


def completes_overloaded(scenario: Scenario, result: Result) -> tuple[float, float] | None:
    """metrics.overload.completion_rate of the scenario: None where an overload does not tell. At least 0 with an
    autoscaler, which may not start all its replicas."""
    found, times = None, 1
    for size in sizes(result):
        if (more := overloaded(scenario, size)) is None:
            break
        one, times = more
        found = _completion_rate(one, [ran.deployment for ran in result.ran])
        if found and found[1] - found[0] < 2 * CLEAR * found[0]:
            break
    return found and (0.0 if scenario.cluster.autoscaler else times * found[0], times * found[1])


def _completion_rate(one: Scenario, deployments: list[Deployment]) -> tuple[float, float] | None:
    """Of an overload of these very deployments, which no file that has changed since made."""
    for known, those, rate in _OVERLOADS[:]:
        if len(those) == len(deployments) and all(map(is_, those, deployments)) and known == one:
            return rate
    try:
        result = run(one)[0]
    except InputError:  # where all requests of this one draw are too long
        return None
    rate = completion_rate(result)
    if not result.interrupted:
        _OVERLOADS.append((one, deployments, rate))
        del _OVERLOADS[:-MOST_OVERLOADS]
    return rate


MOST_OVERLOADS = 32
_OVERLOADS: list[tuple[Scenario, list[Deployment], tuple[float, float] | None]] = []
"""those asked for last: runs that differ in seed, rate, replicas or number of requests have one in common"""
