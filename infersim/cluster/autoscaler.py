"""Starts and stops replicas so that a figure of each stays near its target."""

import math

import numpy as np

from ..spec.cluster import Autoscaler as Spec
from .front import Front
from .pool import DRAINING, OFF, READY, STARTING, Site

TOLERANCE = 0.1  # HPA's default: a figure this near its target changes nothing


def start_seconds(spec: Spec, site: Site) -> float:
    """From the decision until the replica serves: node, weights, warm-up."""
    load = site.weights_bytes / spec.startup.load_bandwidth if spec.startup.load_bandwidth else 0.0
    return spec.startup.node + load + spec.startup.warmup


class Autoscaler:
    """Looks at the pool every `interval`, as long as requests are left."""

    def __init__(self, spec: Spec, front: Front):
        self.spec, self.front, self.pool = spec, front, front.pool
        self.seconds = start_seconds(spec, front.sites[0])
        self.enough_at: list[tuple[float, int]] = []
        """(time, wanted) of the looks within scale_down_delay"""
        self.busy_before = 0.0
        self.looked = 0.0
        self.ended_before = 0
        self.arrivals = np.sort(front.requests.arrival)
        self.starts = self.stops = 0
        self.most = self.pool.count(READY)
        front.on_empty = self.wake

    def run(self):
        """A simpy process."""
        clock, k = self.front.clock, 0
        while self.front.left:
            k += 1
            yield clock.at(k * self.spec.interval)
            alive = self.pool.count(READY, STARTING, DRAINING, OFF)
            if not self.front.left or (not alive and clock.peek() == math.inf):
                return
            self.scale_to(self.wanted())

    def wake(self) -> None:
        """A request has found no replica at all: one starts at once."""
        if self.pool.count(READY, STARTING) == 0 and self.pool.count(OFF, DRAINING):
            self.scale_to(1)

    def wanted(self) -> int:
        """Replicas that the policy asks for now."""
        spec, now = self.spec, self.front.clock.now
        there = max(self.pool.count(READY), 1)
        ratio = self.figure() * there / spec.target
        wanted = there if abs(ratio / there - 1) <= TOLERANCE else math.ceil(ratio - 1e-9)
        wanted = min(max(wanted, spec.min), spec.max)
        self.enough_at = [(t, w) for t, w in self.enough_at if t > now - spec.scale_down_delay] + [(now, wanted)]
        return max(w for _, w in self.enough_at)

    def figure(self) -> float:
        """The policy's figure of one ready replica."""
        pool, now, policy = self.pool, self.front.clock.now, self.spec.policy
        ready = pool.state == READY
        there, signals = max(int(ready.sum()), 1), pool.router.signals
        waiting_here = len(self.front.queue)
        if policy == "outstanding":
            return (float(signals.in_flight[ready].sum()) + waiting_here) / there
        if policy == "queue":
            return (float(signals.waiting[ready].sum()) + waiting_here) / there
        if policy == "kv_usage":
            return float(signals.kv_usage[ready].mean()) if ready.any() else float(waiting_here > 0)
        if policy == "utilization":
            busy, elapsed = float(self.front.fleet.replicas["busy_time"].sum()), now - self.looked
            share = (busy - self.busy_before) / max(elapsed, 1e-9) / there
            self.busy_before, self.looked = busy, now
            return max(share, float(waiting_here > 0))
        if policy == "ttft":
            return self._ttft()
        ahead = now + self.seconds
        low, high = np.searchsorted(self.arrivals, (ahead, ahead + self.spec.interval))
        return float(high - low) / self.spec.interval / there

    def _ttft(self) -> float:
        """Mean TTFT of the requests that have ended since the last look."""
        ended = self.front.ended[self.ended_before :]
        self.ended_before += len(ended)
        rows = self.front.fleet.requests[[self.front.row[i] for i in ended]]
        ttft = (rows["first_token"] - self.front.sent[ended])[rows["first_token"] >= 0]
        return float(ttft.mean()) if len(ttft) else float(len(self.front.queue) > 0) * self.spec.target * 2

    def scale_to(self, wanted: int) -> None:
        """Start replicas, those first that were about to go; or let some go when they have finished their requests."""
        pool, clock = self.pool, self.front.clock
        there = pool.count(READY, STARTING)
        for r in np.flatnonzero(pool.state == DRAINING)[: max(wanted - there, 0)].tolist():
            pool.become(pool.first + r, READY, clock.now)
            there += 1
        for r in np.flatnonzero(pool.state == OFF)[: max(wanted - there, 0)].tolist():
            pool.become(pool.first + r, STARTING, clock.now)
            self.starts += 1
            there += 1
            clock.call_at(clock.now + self.seconds, lambda r=r: self._started(pool.first + r))
        self.most = max(self.most, there)
        surplus = min(there - wanted, pool.count(READY))
        if surplus > 0:  # the idlest go
            ready = np.flatnonzero(pool.state == READY)
            load = pool.router.signals.in_flight[ready]
            for r in ready[np.argsort(load, kind="stable")][:surplus].tolist():
                pool.become(pool.first + r, DRAINING, clock.now)
                self.stops += 1
            self.front.drain()
        self.front.admit(clock.now)

    def _started(self, replica: int) -> None:
        if self.pool.state[replica - self.pool.first] == STARTING:
            self.pool.become(replica, READY, self.front.clock.now)
            self.front.admit(self.front.clock.now)

    def figures(self) -> dict:
        """JSON-ready."""
        return {"starts": self.starts, "stops": self.stops, "peak_replicas": self.most, "startup_s": self.seconds}
