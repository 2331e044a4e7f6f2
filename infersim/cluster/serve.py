"""A cluster serves its requests: in one compiled call where nothing interacts, else between events of a simpy clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.fleet import Fleet
from ..engine.state import COMPLETED
from ..spec.cluster import STATIC_POLICIES, Cluster
from ..spec.errors import InputError
from ..workload.requests import Requests, own_text
from .routers import assign

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
    """i8[n]: the fleet's row of each that completed it, or was its last"""
    available: np.ndarray
    """f8[R]: seconds that each replica was there"""
    route: dict[str, Any]
    interrupted: bool


def serve(
    spec: Cluster,
    fleet: Fleet,
    weights: np.ndarray,
    requests: Requests,
    max_tokens: np.ndarray,
    seed: int,
    max_concurrency: int,
    progress: Progress | None,
) -> Served:
    """Run all requests to their end. weights: f8[R], the router's weight of each replica of the fleet."""
    n, k = len(requests), len(weights)
    last = float(requests.arrival[-1])
    route: dict[str, Any] = {"policy": spec.router.policy if k > 1 else None}
    if spec.router.policy == "session" and requests.session is None:
        raise InputError("cluster.router: session needs a workload with sessions (turns, users or a trace with them)")
    static = requests.after is None and (k == 1 or (spec.router.policy in STATIC_POLICIES and not max_concurrency))
    if static:
        fleet.knobs["max_concurrency"] = max_concurrency
        replica = 0 if k == 1 else assign(spec.router.policy, weights, n, seed)
        columns = (requests.arrival, requests.prompt_tokens, requests.output_tokens, max_tokens)
        fleet.submit(replica, *columns, names=own_text(requests.request_id), segments=requests.segments)
        interrupted = _advance(fleet, last, progress)
    else:
        from .front import Front  # simpy is for runs that need it

        front = Front(spec, fleet, weights, requests, max_tokens, seed, max_concurrency)
        interrupted = _play(front, last, progress)
    records = fleet.requests
    if not static:
        records = records.copy()
        records["arrival"] = front.arrived
    end = float(fleet.replicas["now"].max())
    return Served(records, np.arange(n), np.full(k, end), route, interrupted)


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
