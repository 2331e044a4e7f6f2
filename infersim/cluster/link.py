"""A link that several transfers share: each of n gets an n-th of the bandwidth (processor sharing)."""

from heapq import heappop, heappush
from itertools import count

import simpy

from .clock import Clock


class Link:
    """bandwidth: B/s of the whole link. 0 while it is cut: transfers wait."""

    def __init__(self, clock: Clock, bandwidth: float):
        self.clock = clock
        self.bandwidth = bandwidth
        self._busy = 0.0
        self._served = 0.0
        """bytes that a transfer which was always there would have got"""
        self._since = 0.0
        self._flows: list[tuple[float, int, simpy.Event]] = []
        """(what `served` must come to, number, event), the next to end first"""
        self._numbers = count()
        self._wakes = 0

    def transfer(self, size: float) -> simpy.Event:
        """An event when `size` bytes have gone over."""
        self._catch_up()
        done = self.clock.event()
        heappush(self._flows, (self._served + size, next(self._numbers), done))
        self._plan()
        return done

    def set_bandwidth(self, bandwidth: float) -> None:
        """From now on."""
        self._catch_up()
        self.bandwidth = bandwidth
        self._plan()

    @property
    def busy(self) -> float:
        """Seconds until now with something to send."""
        return self._busy + (self.clock.now - self._since if self._flows else 0.0)

    def _catch_up(self) -> None:
        elapsed = self.clock.now - self._since
        if self._flows:
            self._served += elapsed * self.bandwidth / len(self._flows)
            self._busy += elapsed
        self._since = self.clock.now

    def _plan(self) -> None:
        """Wake up when the next transfer ends, unless something changes before."""
        self._wakes += 1
        if self._flows and self.bandwidth > 0:
            left = (self._flows[0][0] - self._served) * len(self._flows) / self.bandwidth
            wake = self._wakes
            self.clock.at(self.clock.now + max(left, 0.0)).callbacks.append(lambda _: self._wake(wake))

    def _wake(self, wake: int) -> None:
        if wake != self._wakes:
            return
        self._catch_up()
        self._served = max(self._served, self._flows[0][0])  # whatever rounding says, that one has ended
        while self._flows and self._flows[0][0] <= self._served:
            heappop(self._flows)[2].succeed()
        self._plan()
