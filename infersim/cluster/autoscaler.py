"""Starts and stops replicas so that a figure of each stays near its target."""

import math
from collections import deque
from functools import partial

import numpy as np

from ..config.cluster import Autoscaler as Spec
from .door import Door
from .pool import DRAINING, OFF, READY, STARTING, Pool
from .site import Site

TOLERANCE = 0.1  # HPA's default: a figure this near its target changes nothing


def start_seconds(spec: Spec, site: Site) -> float:
    """From the decision until the replica serves: node, weights, warm-up."""
    load = site.weights_bytes / spec.startup.load_bandwidth if spec.startup.load_bandwidth else 0.0
    return spec.startup.node + load + spec.startup.warmup


class Recent:
    """The largest of the numbers within `delay` seconds."""

    def __init__(self, delay: float):
        self.delay = delay
        self.looks: deque[tuple[float, int]] = deque()
        """(time, number) of those after which none is as large: the largest first"""

    def most(self, now: float, number: int) -> int:
        """With one more number, at a time that is not before the others."""
        while self.looks and self.looks[0][0] <= now - self.delay:
            self.looks.popleft()
        while self.looks and self.looks[-1][1] <= number:
            self.looks.pop()
        self.looks.append((now, number))
        return self.looks[0][1]


class Autoscaler:
    """Looks at one group of a pool's replicas every `interval`, as long as requests are left."""

    def __init__(self, spec: Spec, name: str, front: Door, pool: Pool, group: list[int]):
        self.spec, self.name, self.front, self.pool = spec, name, front, pool
        self.replicas = np.array(group)
        self.places = np.array([pool.place[replica] for replica in group])
        """i8[]: where they stand in the pool"""
        site = front.sites[group[0]]
        self.seconds = start_seconds(spec, site)
        self.wake_seconds = site.weights_bytes / site.host_bandwidth if spec.startup.sleep else self.seconds
        """from the decision until a replica serves that has served before"""
        self.recent = Recent(spec.scale_down_delay)
        self.busy_before = 0.0
        self.looked = 0.0
        self.ended_before = 0
        self.mine = front.rows_of(pool)
        """bool[n]: requests of the pool"""
        self.arrivals = np.sort(front.requests.arrival[self.mine])
        self.starts = self.stops = 0
        self.start_of: dict[int, int] = {}
        """the number of each place's last start"""
        self.most = self.count(READY)
        self.known = {pool.members[r] for r in self._first(READY, len(group))}
        """replicas that have served"""
        self.ready: list[tuple[float, int]] = [(0.0, self.most)]
        """(s, replicas that serve from then on)"""
        pool.wakers.append(self.wake)

    def count(self, *states: int) -> int:
        """How many of its replicas are in one of these states."""
        own = self.pool.state[self.places]
        return sum(int(np.count_nonzero(own == state)) for state in states)

    def run(self):
        """A simpy process."""
        clock, k = self.front.clock, 0
        while self.front.left:
            k += 1
            yield clock.watch(k * self.spec.interval)
            if self.front.left:
                self.scale_to(self.wanted())

    def wake(self) -> bool:
        """A request has found no replica at all: one starts at once, if there is any that can."""
        if self.count(STARTING):
            return True
        if not self.count(OFF, DRAINING):
            return False
        self.scale_to(1)
        return True

    def wanted(self) -> int:
        """Replicas that the policy asks for now."""
        spec, now = self.spec, self.front.clock.now
        there = max(self.count(READY), 1)
        ratio = self.figure() * there / spec.target
        wanted = there if abs(ratio / there - 1) <= TOLERANCE else math.ceil(ratio - 1e-9)
        waited_for = self.pool.queue and not self.pool.ready().any() and self.count(STARTING)
        wanted = min(max(wanted, spec.min, 1 if waited_for else 0), spec.max)
        return self.recent.most(now, wanted)

    def figure(self) -> float:
        """The policy's figure of one ready replica."""
        pool, now, policy = self.pool, self.front.clock.now, self.spec.policy
        ready = self.places[pool.state[self.places] == READY]
        there, signals = max(len(ready), 1), pool.router.signals
        beside = max(int(pool.ready().sum()), 1)  # who shares what waits at the front door
        if policy == "outstanding":
            return float(signals.in_flight[ready].sum()) / there + len(pool.queue) / beside
        if policy == "queue":
            return float(signals.waiting[ready].sum()) / there + len(pool.queue) / beside
        if policy == "kv_usage":
            return float(signals.kv_usage[ready].mean()) if len(ready) else float(len(pool.queue) > 0)
        if policy == "utilization":
            busy, elapsed = float(self.front.fleet.replicas["busy_time"][self.replicas].sum()), now - self.looked
            share = (busy - self.busy_before) / max(elapsed, 1e-9) / there
            self.busy_before, self.looked = busy, now
            return max(share, float(len(pool.queue) > 0))
        if policy in ("ttft", "tpot"):
            return self._latency()
        ahead = now + self.seconds
        low, high = np.searchsorted(self.arrivals, (ahead, ahead + self.spec.interval))
        return float(high - low) / self.spec.interval / beside

    def _latency(self) -> float:
        """Mean TTFT or TPOT of the pool's requests that have ended since the last look."""
        rows, sent = self.front.ended_of(self)
        if self.spec.policy == "ttft":
            seconds = (rows["first_token"] - sent)[rows["first_token"] >= 0]
        else:
            rows = rows[rows["num_output_tokens"] > 1]
            seconds = (rows["last_token"] - rows["first_token"]) / (rows["num_output_tokens"] - 1)
        return float(seconds.mean()) if len(seconds) else float(len(self.pool.queue) > 0) * self.spec.target * 2

    def scale_to(self, wanted: int) -> None:
        """Start replicas, those first that were about to go; or let some go when they have finished their requests."""
        pool, clock = self.pool, self.front.clock
        there = self.count(READY, STARTING)
        for r in self._first(DRAINING, wanted - there):
            pool.become(pool.members[r], READY, clock.now)
            there += 1
        for r in self._first(OFF, wanted - there):
            pool.become(pool.members[r], STARTING, clock.now)
            self.starts += 1
            there += 1
            known = pool.members[r] in self.known
            clock.call_at(
                clock.now + (self.wake_seconds if known else self.seconds), partial(self._started, r, self.starts)
            )
            self.start_of[r] = self.starts
        self.most = max(self.most, there)
        for r in self._first(STARTING, there - wanted):  # who serves nobody yet goes first (Kubernetes)
            pool.become(pool.members[r], OFF, clock.now)
            self.stops += 1
            there -= 1
        surplus = min(there - wanted, self.count(READY))
        if surplus > 0:  # the idlest go
            ready = self.places[pool.state[self.places] == READY]
            load = pool.router.signals.in_flight[ready]
            for r in ready[np.argsort(load, kind="stable")][:surplus].tolist():
                pool.become(pool.members[r], DRAINING, clock.now)
                self.stops += 1
            pool.drain(clock.now)
        self._note()
        self.front.admit(pool, clock.now)

    def _first(self, state: int, n: int) -> list[int]:
        """Places of the first n of its replicas in a state."""
        return self.places[self.pool.state[self.places] == state][: max(n, 0)].tolist()

    def _started(self, r: int, number: int) -> None:
        """A replica is ready, unless that start was called off."""
        if self.pool.state[r] == STARTING and self.start_of[r] == number:
            self.pool.become(self.pool.members[r], READY, self.front.clock.now)
            self.known.add(self.pool.members[r])
            self._note()
            self.front.admit(self.pool, self.front.clock.now)

    def _note(self) -> None:
        if (count := self.count(READY)) != self.ready[-1][1]:
            self.ready.append((self.front.clock.now, count))

    def figures(self) -> dict:
        """JSON-ready."""
        return {
            "group": self.name,
            "starts": self.starts,
            "stops": self.stops,
            "peak_replicas": self.most,
            "startup_s": self.seconds,
            "ready": self.ready,
        }
