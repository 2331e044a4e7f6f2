"""A cluster serves its requests: in one compiled call where nothing interacts, else between events of a simpy clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.cluster import Cluster
from ..config.errors import InputError
from ..config.router import STATIC_POLICIES
from ..engine.compiled.state import COMPLETED
from ..engine.fleet import Fleet
from ..workload.requests import Requests
from .clients import Clients, columns_beside
from .site import Site, adapters_of, pools_of
from .static import assign, draws

if TYPE_CHECKING:
    from .front import Front

Progress = Callable[[float, float, int, int], None]
"""called now and then with the clock and the last arrival (s), requests finished, requests in all"""

SLICE = 0.1  # wall seconds between looks at the keyboard


@dataclass(frozen=True)
class Served:
    """What became of the requests."""

    requests: np.ndarray
    """engine.state.REQUEST[n], one for each request whatever became of it"""
    rows: np.ndarray
    """i4 or i8[n]: the fleet's row of each that completed it, or was its last"""
    available: np.ndarray
    """f8[R]: seconds that each replica was there"""
    end: float
    """s: when the last request had ended"""
    route: dict[str, Any]
    retries: int
    interrupted: bool
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """f8 or i4[n]: what else there is to say of each request"""


def serve(
    spec: Cluster,
    fleet: Fleet,
    sites: list[Site],
    requests: Requests,
    clients: Clients,
    seed: int,
    progress: Progress | None,
    look: Callable[[Fleet | None], None] = lambda fleet: None,
) -> Served:
    """Run all requests to their end, through the replicas of the fleet in the order of spec.groups. look: called before
    they are run, where that is one call."""
    n, k = len(requests), len(sites)
    last = float(requests.arrival[-1])
    for name, router in spec.routers.items():
        if router.policy == "session" and requests.session is None:
            raise InputError(f"{name}: session needs a workload with sessions (turns, users or a trace with them)")
    policy = spec.router.policy
    adapters = adapters_of(requests, sites)
    alone = adapters is None and (k == 1 or (policy in STATIC_POLICIES and not clients.max_concurrency))
    if alone and requests.after is None and not (clients.timeout or spec.interacts):
        fleet.knobs["max_concurrency"] = clients.max_concurrency
        replica = 0 if k == 1 else _assign(policy, sites, requests, seed)
        columns = (requests.arrival, requests.prompt_tokens, requests.output_tokens, clients.max_tokens)
        fleet.submit(replica, *columns, **columns_beside(requests, clients))
        look(fleet)
        interrupted = _advance(fleet, last, progress)
        end = _end(fleet)
        route = {"policy": policy if k > 1 else None}
        return Served(fleet.requests, np.arange(n, dtype="i4"), np.full(k, end), end, route, 0, interrupted)

    look(None)
    from .autoscaler import Autoscaler  # simpy is for runs that need it
    from .failures import Failures
    from .front import Front
    from .handover import HandOver
    from .pool import seconds_available

    front = (HandOver if spec.prefill else Front)(spec, fleet, sites, requests, clients, seed, adapters)
    scalers = [
        Autoscaler(group.autoscaler, name, front, front.home[numbers[0]], list(numbers))
        for name, group, numbers in zip(spec.group_names, spec.groups, spec.ranges, strict=True)
        if group.autoscaler
    ]
    for scaler in scalers:
        front.clock.process(scaler.run())
    front.begin()
    Failures(front).begin(spec.failures)
    interrupted = _play(front, last, progress)
    end = max(_end(fleet), front.end)
    route = front.route(end) | ({"autoscalers": [s.figures() for s in scalers]} if scalers else {})
    return Served(
        front.records(),
        np.array(front.row),
        seconds_available(front.all_pools, len(sites), end),
        end,
        route,
        int(np.maximum(front.attempts - 1, 0).sum()),
        interrupted,
        front.columns(),
    )


def _assign(policy: str, sites: list[Site], requests: Requests, seed: int) -> np.ndarray:
    """i8[n]: the replica of each request under a static policy, model by model."""
    models = list(dict.fromkeys(site.model for site in sites))
    which, chance, replica = pools_of(requests, sites), draws(len(requests), seed), np.zeros(len(requests), "i8")
    for number, model in enumerate(models):
        members = np.array([r for r, site in enumerate(sites) if site.model == model])
        weights = np.array([sites[r].weight for r in members])
        mine = which == number
        replica[mine] = members[assign(policy, weights, chance[mine])]
    return replica


def _end(fleet: Fleet) -> float:
    """When engines and API servers have done all they had to do (s)."""
    return max(float(fleet.replicas["now"].max()), float(fleet.requests["last_token"].max()))


def _advance(fleet: Fleet, last_arrival: float, progress: Progress | None) -> bool:
    """Advance to the end, in slices of simulated time that take about SLICE on the wall. True if interrupted."""
    until, step = 0.0, max(last_arrival, 1.0) / 64
    try:
        while not np.isinf(fleet.next_time()):
            until = max(until, fleet.next_time()) + step
            started = time.perf_counter()
            fleet.advance(until)
            wall = max(time.perf_counter() - started, SLICE / 100)
            step *= min(max(SLICE / wall, 0.25), 4.0)
            _report(fleet, last_arrival, progress)
    except KeyboardInterrupt:
        return True
    return False


def _play(front: "Front", last_arrival: float, progress: Progress | None) -> bool:
    """Let the front door play to the end. True if interrupted."""
    looked = time.perf_counter()

    def look() -> None:
        nonlocal looked
        if time.perf_counter() - looked > SLICE:
            _report(front.fleet, last_arrival, progress)
            looked = time.perf_counter()

    try:
        front.play(look)
    except KeyboardInterrupt:
        return True
    return False


def _report(fleet: Fleet, last_arrival: float, progress: Progress | None) -> None:
    if progress is not None:
        finished = int((fleet.requests["status"] >= COMPLETED).sum())
        progress(float(fleet.replicas["now"].max()), last_arrival, finished, fleet.num_requests)
