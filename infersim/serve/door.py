"""The front door: infersim's own routers, where one port stands for several replicas."""

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np
import simpy

from infersim.cluster.clock import Clock
from infersim.cluster.pools import needs_prefixes
from infersim.cluster.prefixes import PrefixIndex, PrefixTree
from infersim.cluster.routers import Router
from infersim.cluster.signals import Signals
from infersim.cluster.site import Site
from infersim.cluster.store import Store
from infersim.config.router import Router as RouterSpec
from infersim.config.scenario import Scenario
from infersim.engine.fleet import Fleet
from infersim.workload.draws import generator
from infersim.workload.requests import Requests

from .ask import Ask, Row, Text

MOST_SESSIONS = 100_000
"""whose replicas a router remembers"""
SPARE = 2**16  # pieces of text that nobody holds any more, before they are forgotten


class Held(Signals):
    """The same, where a router knows of each replica the requests that it has, whoever sent them. rows: of all."""

    def __init__(self, fleet: Fleet, members: np.ndarray, aged: bool, rows: list[dict[int, Row]]):
        self._rows = [rows[replica] for replica in members.tolist()]
        super().__init__(fleet, members, aged, None)

    def _outstanding(self) -> np.ndarray:
        return np.array([len(rows) for rows in self._rows])


class Texts(PrefixTree):
    """Of the one request that is looked at, number 0: a node is a piece's name, which says what is before it too.

    Pieces that no index holds are forgotten now and then.
    """

    def __init__(self) -> None:
        super().__init__(Requests(*(np.zeros(0),) * 4))
        self.indices: list[PrefixIndex] = []
        self._path: list[int] = []
        self._pieces: dict[int, int] = {}
        self._free: list[int] = []
        self._most = SPARE

    def look_at(self, names: Sequence[int], lengths: Sequence[int]) -> None:
        """This is the prompt that an index is asked of next, or told of."""
        if len(self._pieces) > self._most:
            held = set().union(*(index.held for index in self.indices))
            self._free += [node for node in self._pieces.values() if node not in held]
            self._pieces = {name: node for name, node in self._pieces.items() if node in held}
            self._most = 2 * len(held) + SPARE
        path, length = list[int](), 0
        for name, tokens in zip(names, lengths, strict=True):
            length += tokens
            node = self._pieces.get(name)
            if node is None:
                node = self._pieces[name] = self._free.pop() if self._free else len(self.tokens)
                self.tokens[node : node + 1] = [length]
            path.append(node)
        self._path = path

    def path(self, i: int) -> Iterable[int]:
        return self._path


class Door:
    """The routers of a scenario, and its store of KV. models: what each replica serves; rows: the requests that each
    has; add: makes a row of the fleet of a request."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        models: list[str],
        sites: list[Site],
        rows: list[dict[int, Row]],
        add: Callable[[Ask], int],
    ):
        self._rows = rows
        cluster = scenario.cluster
        self.clock, self.fleet, self.sites, self.seed, self._add = (
            clock,
            clock.fleet,
            sites,
            scenario.simulation.seed,
            add,
        )
        self.members: dict[Router, np.ndarray] = {}
        """numbers of the replicas among which each router chooses"""
        self.texts = Texts()
        self._draws = [generator(self.seed, *more) for more in (("router",), ("router", "second"))]
        self._asked: Ask | None = None
        self.prefill: Router | None = None
        """of replicas that compute prompts for others"""
        names = np.array(models)
        members = {name: np.flatnonzero(names == name) for name in models}
        spec = cluster.router
        if cluster.prefill and cluster.decode:
            decode, prefill = (np.array(numbers) for numbers in cluster.ranges)
            self.prefill = self._router(cluster.prefill.router, prefill)
            spec, members = cluster.decode.router, {models[0]: decode}
        self.pools = {name: self._router(spec, mine) for name, mine in members.items()}
        """by model: of replicas that answer"""
        self._hand_over = cluster.transfer.hand_over if self.prefill and cluster.transfer else "never"
        self.store = Store(cluster.kv_store, self.fleet, sites, self.texts) if cluster.kv_store else None
        if self.store:
            self.texts.indices.append(self.store.index)
        self._idle: list[simpy.Event] = []
        """what ends when the next request comes"""
        for router in self.members:
            if router.spec.signal_age:
                clock.process(self._report(router))

    def _report(self, router: Router) -> Generator[simpy.Event, None, None]:
        """Replicas say how they are, now and then; while there are no requests nothing changes."""
        age, k = router.spec.signal_age, 0
        while True:
            k = max(k, math.floor(self.clock.now / age)) + 1
            yield self.clock.watch(k * age)
            router.signals.report()
            if not any(self._rows):
                self._idle.append(self.clock.event())
                yield self._idle[-1]

    def wake(self) -> None:
        """A request has come."""
        for event in self._idle:
            event.succeed()
        self._idle.clear()

    def look_up(self, ask: Ask, row: int) -> None:
        """A row is about to go to a replica: the engine is told how much of its prompt the store has."""
        if self.store:
            self.texts.look_at(ask.names, ask.lengths)
            self.store.look_up(0, row)

    def keep(self, text: Text | None, time: float) -> None:
        """A request has ended whose client has the answer at `time` (s): then the store has its prompt."""
        if self.store and text:
            if time > self.clock.now:
                self.clock.call_at(time, lambda: self.keep(text, time))
                return
            self.texts.look_at(*text)
            self.store.index.add(0, 0)

    def _router(self, spec: RouterSpec, members: np.ndarray) -> Router:
        router = Router(
            spec,
            Held(self.fleet, members, spec.signal_age > 0, self._rows),
            np.array([self.sites[r].weight for r in members]),
            1,
            self.seed,
            self.texts if needs_prefixes(spec) else None,
            [0],
            [0],
            self.fleet.knobs["block_size"][members],
            lambda _: self.fleet.match(self._row(), spec.host_cache_hit_weight)[members],
            [],
        )
        if router.index is not None:
            self.texts.indices.append(router.index)
        self.members[router] = members
        return router

    def choose(self, router: Router, ask: Ask, allowed: np.ndarray | None) -> int:
        """The place among a router's replicas where it sends a request; bool[k]: to which it may."""
        self._show(router, ask)
        return router.choose(0, allowed)

    def hands_over(self, ask: Ask, allowed: np.ndarray | None) -> bool:
        """Whether a prefill replica computes its prompt: as HandOver of a run decides it; bool[k]: who may answer."""
        least = self._hand_over
        if isinstance(least, str):
            return least == "always"
        if allowed is not None and not allowed.any():
            return False
        router = self.pools[ask.base]
        self._show(router, ask)
        return ask.prompt_tokens >= least and ask.prompt_tokens - router.cached(0, router.wish(0, allowed)) >= least

    def _show(self, router: Router, ask: Ask) -> None:
        """A request, as a router sees it: its number 0."""
        ask.draws = ask.draws or tuple(one.random() for one in self._draws)
        router.draws, router.second_draws = [ask.draws[0]], [ask.draws[1]]
        router.prompt_tokens[0], router.sessions[0] = ask.prompt_tokens, self._session(router, ask.session)
        if router.index is not None:
            self.texts.look_at(ask.names, ask.lengths)
        self._asked = ask

    @staticmethod
    def _session(router: Router, name: str) -> int:
        if not name:  # one of its own
            router.homes.pop(-1, None)
            return -1
        if len(router.homes) > MOST_SESSIONS:
            del router.homes[next(iter(router.homes))]
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")

    def _row(self) -> int:
        """The row of the request that the router asks about."""
        assert self._asked is not None
        if self._asked.row < 0:
            self._asked.row = self._add(self._asked)
        return self._asked.row
