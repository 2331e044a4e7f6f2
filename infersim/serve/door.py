"""The front door: infersim's own routers, where one port stands for several replicas."""

from collections.abc import Callable

import numpy as np

from infersim.cluster.prefixes import PrefixTree
from infersim.cluster.routers import Router
from infersim.cluster.signals import Signals
from infersim.cluster.site import Site
from infersim.config.cluster import Router as RouterSpec
from infersim.config.scenario import Scenario
from infersim.engine.fleet import Fleet
from infersim.workload.draws import generator
from infersim.workload.requests import Requests

from .ask import Ask, Row

CHUNK = 4096  # draws made at a time


class Held(Signals):
    """The same, where a router knows of each replica the requests that it has, whoever sent them. rows: of all."""

    def __init__(self, fleet: Fleet, members: np.ndarray, rows: list[dict[int, Row]]):
        self._rows = [rows[replica] for replica in members.tolist()]
        super().__init__(fleet, members, False, None)

    def _outstanding(self) -> np.ndarray:
        return np.array([len(rows) for rows in self._rows])


class Door:
    """The routers of a scenario. models: what each replica serves; rows: the requests that each has; add: makes a row
    of the fleet of a request."""

    def __init__(
        self,
        scenario: Scenario,
        fleet: Fleet,
        models: list[str],
        sites: list[Site],
        rows: list[dict[int, Row]],
        add: Callable[[Ask], int],
    ):
        self._rows = rows
        cluster = scenario.cluster
        self.fleet, self.sites, self.seed, self._add = fleet, sites, scenario.simulation.seed, add
        self.members: dict[Router, np.ndarray] = {}
        """numbers of the replicas among which each router chooses"""
        self._sessions: dict[str, int] = {}
        self._probe = -1
        self._probe_for: Ask | None = None
        self._matched: Ask | None = None
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
        self.hands_over = bool(self.prefill and cluster.transfer and cluster.transfer.hand_over == "always")

    def _router(self, spec: RouterSpec, members: np.ndarray) -> Router:
        empty = Requests(*(np.zeros(0),) * 4)
        router = Router(
            spec,
            Held(self.fleet, members, self._rows),
            np.array([self.sites[r].weight for r in members]),
            0,
            self.seed,
            PrefixTree(empty) if spec.policy in ("prefix-aware", "weighted") else None,
            None,
            [],
            self.fleet.knobs["block_size"][members],
            lambda i: self.fleet.match(self._row_of(i), spec.host_cache_hit_weight)[members],
            [],
        )
        self.members[router] = members
        return router

    def choose(self, router: Router, ask: Ask, allowed: np.ndarray | None) -> int:
        """The place among a router's replicas where it sends a request; bool[k]: to which it may."""
        i = len(router.prompt_tokens)
        if i >= len(router.draws):
            more = CHUNK * (1 + len(router.draws) // CHUNK)
            router.draws = generator(self.seed, "router").random(more).tolist()
            router.second_draws = generator(self.seed, "router", "second").random(more).tolist()
        router.prompt_tokens.append(ask.prompt_tokens)
        router.sessions.append(self._session(ask.session))
        if router.index is not None:
            router.index._tree.add(list(ask.names), list(ask.lengths))
        if router.spec.policy == "kv-aware":
            self._matched = ask
        return router.choose(i, allowed)

    def _session(self, name: str) -> int:
        if not name:
            self._sessions[""] = self._sessions.get("", 0) - 1
            return self._sessions[""]
        return self._sessions.setdefault(name, len(self._sessions))

    def _row_of(self, i: int) -> int:
        """A row like the request that the router asks about, never sent."""
        assert self._matched is not None
        if self._probe_for is not self._matched:
            self._probe, self._probe_for = self._add(self._matched), self._matched
        return self._probe
