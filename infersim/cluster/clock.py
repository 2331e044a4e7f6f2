"""simpy's clock and the fleet's, joined: replicas run between two events, and wake processes when something happens."""

import math
from collections.abc import Callable
from heapq import heappush

import simpy
from simpy.events import NORMAL

from ..engine.fleet import Fleet


class Clock(simpy.Environment):
    """An Environment that advances the fleet between its events."""

    def __init__(self, fleet: Fleet):
        super().__init__()
        self.fleet = fleet
        self._reports: list[tuple[float, Callable[[], None]]] = []
        self._ahead = 0
        """events to come that are not of a watch"""
        self._events = 0
        """of the fleet, that somebody is to be told of"""
        self.hope: Callable[[], bool] = lambda: False
        """whether something that is watched for may yet set things going"""

    def add_report(self, interval: float, report: Callable[[], None]) -> None:
        """`report` is called at the times k * interval before something is decided: signals have an age."""
        self._reports.append((interval, report))

    def at(self, time: float) -> simpy.Event:
        """An event at `time` exactly: a Timeout is at now + (time - now), which need not be the same float."""
        self._ahead += 1
        event = self.watch(time)
        event.callbacks.append(self._come)
        return event

    def watch(self, time: float) -> simpy.Event:
        """The same for what goes on and on (a look at the load, the next failure): alone it keeps no run going."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (max(time, self._now), NORMAL, next(self._eid), event))
        return event

    def _come(self, _: simpy.Event) -> None:
        self._ahead -= 1

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        """`action` at `time`, or now if that is past."""
        self.at(time).callbacks.append(lambda _: action())

    def pass_to(self, time: float) -> bool:
        """Lets the fleet run to `time`, if nobody is to be told anything before: else nothing is done."""
        alone = not self._queue and not self._reports and not self._events
        if alone:
            self.fleet.advance(time)
            self._now = time
        return alone

    def reach(self, time: float) -> None:
        """What is due by `time`, to which somebody else has advanced the fleet, happens."""
        while self.peek() <= time:
            self.step()
        self._now = max(self._now, time)

    def play(self, events: int, handle: Callable[[float, int, int], None], look: Callable[[], None]) -> None:
        """To the end: nothing is left to happen. `handle(time, row, kind)` gets the fleet's events of the mask.

        What is due at one moment is done in this order: processes, then replicas. `look` is called now and then.
        """
        advance, peek, step = self.fleet.advance, self.peek, self.step
        self._events = events
        reported = [-1] * len(self._reports)
        unchanged = [False] * len(self._reports)  # since the report, as far as is known
        count = 0
        while True:
            until = peek()
            due, reporting = -1, -1
            if reported:
                busy = self.fleet.next_time() if until == math.inf or any(unchanged) else -math.inf
                due, reporting = self._next_report(until, reported, unchanged, bool(events), busy)
                if reporting >= 0:
                    until = due * self._reports[reporting][0]
                unchanged = [same and reporting >= 0 and busy >= until for same in unchanged]
            found = advance(until, events)
            if len(found):
                unchanged = [False] * len(reported)
                for time, row, _, kind in found.tolist():
                    self._now = max(self._now, time)
                    handle(time, row, kind)
            elif reporting >= 0:
                reported[reporting] = due
                unchanged[reporting] = True
                self._reports[reporting][1]()
            elif until == math.inf or (not self._ahead and self._is_over(until)):
                return
            else:
                step()
                while peek() == until:
                    step()
            count += 1
            if count & 1023 == 0:
                look()

    def _is_over(self, until: float) -> bool:
        """Only watches are left, and nothing that they could see: later than now, every replica idle, and no hope."""
        return until > self._now and self.fleet.next_time() == math.inf and not self.hope()

    def _next_report(
        self, until: float, reported: list[int], unchanged: list[bool], eventful: bool, busy: float
    ) -> tuple[int, int]:
        """(k, which report) of the first that is due by `until`, before which nothing else happens; -1 if none is.

        Where the fleet's events decide nothing, only the last report before `until` matters. busy: when the fleet does
        something next, -inf if that was not looked up; until then a report says what the last one did, if nothing has
        changed since.
        """
        if until == math.inf and (busy == math.inf or not eventful):
            return 0, -1
        first, found = math.inf, (0, -1)
        for which, (interval, _) in enumerate(self._reports):
            if unchanged[which]:
                reported[which] = max(reported[which], math.floor(min(busy, until) / interval))
            due = reported[which] + 1 if eventful else max(math.floor(until / interval), reported[which] + 1)
            if due * interval <= until and due * interval < first:
                first, found = due * interval, (due, which)
        return found
