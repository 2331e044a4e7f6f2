"""simpy's clock and the fleet's, joined: replicas run between two events, and wake processes when something happens."""

import math
from collections.abc import Callable
from heapq import heappush

import simpy
from simpy.events import NORMAL

from ..engine.fleet import Fleet


class Clock(simpy.Environment):
    """An Environment that advances the fleet between its events.

    report: called at the times k * report_interval before something is decided, so that signals can have an age.
    """

    def __init__(self, fleet: Fleet):
        super().__init__()
        self.fleet = fleet
        self.report_interval = 0.0
        self.report: Callable[[], None] = lambda: None

    def at(self, time: float) -> simpy.Event:
        """An event at `time` exactly: a Timeout is at now + (time - now), which need not be the same float."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (max(time, self._now), NORMAL, next(self._eid), event))
        return event

    def play(self, events: int, handle: Callable[[float, int, int], None], look: Callable[[], None]) -> None:
        """To the end: nothing is left to happen. `handle(time, row, kind)` gets the fleet's events of the mask.

        What is due at one moment is done in this order: processes, then replicas. `look` is called now and then.
        """
        advance, peek, step = self.fleet.advance, self.peek, self.step
        reported, count = -1, 0
        while True:
            until, busy, reporting = peek(), math.inf, False
            if self.report_interval:
                due = math.floor((self._now if events else min(until, 1e300)) / self.report_interval)
                due += due <= reported
                if until == math.inf and (busy := self.fleet.next_time()) < math.inf:
                    due = max(due, math.ceil(busy / self.report_interval))
                if due * self.report_interval <= until < math.inf or busy < math.inf:
                    until, reporting = due * self.report_interval, True
            found = advance(until, events)
            if len(found):
                for time, row, _, kind in found.tolist():
                    self._now = max(self._now, time)
                    handle(time, row, kind)
            elif reporting:
                reported = due
                self.report()
            elif until == math.inf:
                return
            else:
                step()
                while peek() == until:
                    step()
            count += 1
            if count & 1023 == 0:
                look()
