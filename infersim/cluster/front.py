"""The front door of a cluster: requests arrive, a router sends each to a replica, clients learn that it is done."""

from collections import deque
from collections.abc import Callable

import numpy as np

from ..engine.fleet import Fleet
from ..engine.state import FINISHED
from ..spec.cluster import Cluster
from ..workload.requests import Requests, own_text
from .clock import Clock
from .prefixes import PrefixTree
from .routers import Router
from .signals import Signals


class Front:
    """One run of requests through replicas that a router chooses among, request by request.

    Row i of the fleet is request i. weights: f8[k], of the replicas; max_concurrency: requests that clients have open
    at most, 0 for any number.
    """

    def __init__(
        self,
        spec: Cluster,
        fleet: Fleet,
        weights: np.ndarray,
        requests: Requests,
        max_tokens: np.ndarray,
        seed: int,
        max_concurrency: int,
    ):
        self.fleet = fleet
        self.clock = Clock(fleet)
        self.max_concurrency = max_concurrency
        columns = (requests.prompt_tokens, requests.output_tokens, max_tokens, len(requests))
        fleet.add(*columns, names=own_text(requests.request_id), segments=requests.segments)
        self._last_token = fleet.requests["last_token"]
        self.arrived = requests.arrival.copy()
        """f8[n]: when each came to be, which of a request that follows another shows only in the run"""
        self.delay = [] if requests.delay is None else requests.delay.tolist()
        self.followers: dict[int, list[int]] = {}
        self.first = range(len(requests))
        """the requests that wait for no other"""
        if requests.after is not None:
            self.first = np.flatnonzero(requests.after < 0).tolist()
            for i in np.flatnonzero(requests.after >= 0).tolist():
                self.followers.setdefault(int(requests.after[i]), []).append(i)
        longest = int(fleet.knobs["max_model_len"].min())
        prompt = requests.prompt_tokens
        self.turned_away = ((prompt >= longest) | (prompt.astype("i8") + max_tokens > longest)).tolist()
        signals = Signals(fleet, 0, len(weights), aged=spec.router.signal_age > 0)
        tree = PrefixTree(requests) if needs_prefixes(spec.router) else None
        block_size = fleet.knobs["block_size"]
        sessions = None if requests.session is None else requests.session.tolist()
        self.router = Router(
            spec.router, signals, weights, len(requests), seed, tree, sessions, prompt.tolist(), block_size
        )
        self.clock.report_interval, self.clock.report = spec.router.signal_age, signals.report
        self.open = 0
        self.unsent: deque[int] = deque()
        """requests that wait for a place under max_concurrency"""

    def play(self, look: Callable[[], None]) -> None:
        """To the end of the run."""
        self.clock.process(self._arrivals())
        waits = self.max_concurrency or self.followers
        self.clock.play(FINISHED if waits else 0, self._finished, look)

    def _arrivals(self):
        clock, now = self.clock, -1.0
        arrival = self.arrived.tolist()
        for i in self.first:
            time = arrival[i]
            if time > now:
                yield clock.at(time)
                now = time
            self._arrive(i, time)

    def _arrive(self, i: int, time: float) -> None:
        self.arrived[i] = time
        self.unsent.append(i)
        self._send_what_may_be(time)

    def _send_what_may_be(self, time: float) -> None:
        while self.unsent and not 0 < self.max_concurrency <= self.open:
            i = self.unsent.popleft()
            self.open += not self.turned_away[i]
            self._send(i, time)

    def _send(self, i: int, time: float) -> None:
        self.fleet.send(i, self.router.choose(i, None), time)
        if self.turned_away[i]:
            self._ended(i, time)

    def _finished(self, _: float, row: int, kind: int) -> None:
        self.open -= 1
        time = float(self._last_token[row])  # the clock may be later: the engine was busy
        self._ended(row, time)
        self._send_what_may_be(time)

    def _ended(self, i: int, time: float) -> None:
        """The client knows what became of request i; what it sends next comes after its delay."""
        for follower in self.followers.get(i, ()):
            at = time + self.delay[follower]
            self.clock.at(at).callbacks.append(lambda _, i=follower, at=at: self._arrive(i, at))


def needs_prefixes(router) -> bool:
    """Whether a policy asks what prompts have in common."""
    return router.policy in ("prefix-aware", "kv-aware") or (router.policy == "weighted" and router.scorers.prefix > 0)
