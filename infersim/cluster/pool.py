"""A pool of replicas behind a router: which of them are ready, and what they have been asked to do."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from ..config.cluster import Admission
from ..engine.compiled.state import COMPLETED
from ..engine.fleet import Fleet
from .adapters import Slots
from .routers import Router

READY, OFF, STARTING, DRAINING, DEAD = range(5)
THERE = (READY, STARTING, DRAINING)


class Queue:
    """Requests that wait at the front door: the most urgent one first, of equals the one that came first."""

    def __init__(self) -> None:
        self._first: list[tuple[int, int, int]] = []
        self._last: list[tuple[int, int, int]] = []
        """heaps of the same, with some that have left"""
        self._place: dict[int, int] = {}
        """who waits -> its number in the order of coming"""

    def __len__(self) -> int:
        return len(self._place)

    def push(self, i: int, priority: int, order: int) -> None:
        """Request i comes; lower priorities are more urgent."""
        self._place[i] = order
        heappush(self._first, (priority, order, i))
        heappush(self._last, (-priority, -order, i))

    def remove(self, i: int) -> None:
        """Request i leaves, if it is there."""
        self._place.pop(i, None)

    def first(self) -> int:
        """The most urgent request; there is one."""
        while self._place.get(self._first[0][2]) != self._first[0][1]:
            heappop(self._first)
        return self._first[0][2]

    def last(self) -> int:
        """The least urgent request; there is one."""
        while self._place.get(self._last[0][2]) != -self._last[0][1]:
            heappop(self._last)
        return self._last[0][2]


class Pool:
    """Some replicas of the fleet, `members` i8[k], that a router chooses among. Numbers of replicas are the fleet's."""

    def __init__(
        self,
        fleet: Fleet,
        members: np.ndarray,
        router: Router,
        ready: np.ndarray,
        max_outstanding: int,
        slots: Slots | None,
    ):
        self.fleet, self.router = fleet, router
        self.members = members.tolist()
        self.place = {replica: r for r, replica in enumerate(self.members)}
        """where each replica stands in what follows"""
        self.max_outstanding = max_outstanding
        """0 for any number"""
        self.state = np.where(ready, READY, OFF)
        self.since = np.where(ready, 0.0, np.nan)
        """f8[k]: since when each has been there, NaN if it is not"""
        self.before: list[tuple[int, float, float]] = []
        """replicas, and from when to when they were there before"""
        self.queue = Queue()
        """requests that no replica may have yet"""
        self.reserving: dict[int, deque] = {}
        """hand-overs that wait for KV blocks, by replica"""
        self.slots = slots
        self.wakers: list[Callable[[], bool]] = []
        """asked in turn to start a replica when a request finds none"""
        self.all_ready = bool(ready.all())
        self.some_drain = False

    def allowed(self) -> np.ndarray | None:
        """bool[k]: replicas that may be sent another request; None if all may."""
        if self.all_ready and not self.max_outstanding:
            return None
        allowed = self.state == READY
        if self.max_outstanding:
            allowed &= self.router.signals.in_flight < self.max_outstanding
        return allowed

    def ready(self) -> np.ndarray:
        """bool[k]: replicas that serve, however busy."""
        return self.state == READY

    def choose(self, i: int, allowed: np.ndarray | None) -> int:
        """The router's replica for request i."""
        return self.members[self.router.choose(i, allowed)]

    def in_flight(self, replica: int) -> int:
        """Requests sent there and not finished."""
        return int(self.router.signals.in_flight[self.place[replica]])

    def refuses(self, replica: int, limits: Admission, rows: list[int]) -> bool:
        """Whether the replica's API server answers 503 to one request more, which is counted already (vLLM 0.32,
        AsyncLLM.check_admission). rows: the fleet's, of all requests."""
        if limits.max_num_queued_reqs is not None and self.in_flight(replica) > limits.max_num_queued_reqs:
            return True
        if limits.max_num_queued_tokens is None:
            return False
        each, requests = np.array(rows), self.fleet.requests  # not whole records
        there = (requests["replica"][each] == replica) & (requests["status"][each] < COMPLETED)
        there &= requests["first_token"][each] < 0
        return int(requests["prompt_tokens"][each][there].sum()) >= limits.max_num_queued_tokens

    def take_back(self, replica: int) -> None:
        """The request that was just sent there was refused."""
        self.router.signals.routed[self.place[replica]] -= 1

    def become(self, replica: int, state: int, time: float) -> None:
        """A replica changes its state."""
        r = self.place[replica]
        if self.state[r] in THERE and state not in THERE:
            # a step whose requests were all given up goes on to its end, unless the replica dies
            end = time if state == DEAD else max(time, float(self.fleet.replicas["latest_end"][replica]))
            self.before.append((replica, float(self.since[r]), end))
            self.since[r] = np.nan
        elif self.state[r] not in THERE and state in THERE:
            self.since[r] = max(time, float(self.fleet.replicas["latest_end"][replica]))
        self.state[r] = state
        self.all_ready = bool((self.state == READY).all())
        self.some_drain = DRAINING in self.state
        if state == OFF:  # it holds nothing any more; one that dies is cleared with what it was doing (Fleet.fail)
            self.fleet.clear(replica)
        if state in (OFF, DEAD):
            self.router.forget(r)
            if self.slots is not None:
                self.slots.forget(replica)

    def drain(self, time: float) -> None:
        """Replicas that were only to finish their requests go when they have."""
        if self.some_drain:
            held = self.fleet.replicas["num_reserved"][self.members]  # computed prompts that are still on their way
            done = (self.state == DRAINING) & (self.router.signals.in_flight == 0) & (held == 0)
            for r in np.flatnonzero(done).tolist():
                self.become(self.members[r], OFF, time)


def seconds_available(pools: list[Pool], num_replicas: int, end: float) -> np.ndarray:
    """f8[R]: how long each replica of the pools has been there by `end`."""
    seconds = np.zeros(num_replicas)
    for pool in pools:
        now = [(replica, since, end) for replica, since in zip(pool.members, pool.since.tolist(), strict=True)
               if not np.isnan(since)]  # fmt: skip
        for replica, since, until in [*pool.before, *now]:  # some come and go after the last answer
            seconds[replica] += max(min(until, end) - since, 0.0)
    return seconds
