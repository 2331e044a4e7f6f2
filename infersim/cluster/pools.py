"""The pools of one run: a router and its replicas for each model, and for what comes before the answer."""

import numpy as np

from ..config.cluster import Cluster
from ..config.router import Router as RouterSpec
from ..engine.fleet import Fleet
from ..workload.requests import Requests
from .adapters import Slots
from .clock import Clock
from .pool import Pool
from .prefixes import PrefixTree
from .routers import Router
from .signals import Signals
from .site import Site, pools_of


def needs_prefixes(router: RouterSpec) -> bool:
    """Whether a policy remembers what prompts have in common."""
    return router.policy == "prefix-aware" or (router.policy == "weighted" and router.scorers.prefix > 0)


class Pools:
    """Makes pools, and knows which of them answers a request. rows: the fleet's row of each request; adapters: the LoRA
    adapter of each, if there are any."""

    def __init__(
        self,
        spec: Cluster,
        fleet: Fleet,
        sites: list[Site],
        requests: Requests,
        rows: list[int],
        clock: Clock,
        seed: int,
        adapters: list[str] | None,
    ):
        self.spec, self.fleet, self.sites, self.requests = spec, fleet, sites, requests
        self.rows, self.clock, self.seed = rows, clock, seed
        self.adapters = adapters or []
        self.slots = Slots(clock, fleet, sites) if adapters is not None else None
        self.tree: PrefixTree | None = None
        """what prompts have in common, where anybody needs it"""
        self.home: dict[int, Pool] = {}
        """the pool of each replica"""
        by_model: dict[str | None, list[int]] = {}
        for name, numbers in zip(spec.group_names, spec.ranges, strict=True):
            if name != "encode" and (name != "prefill" or spec.role_switch):
                by_model.setdefault(sites[numbers[0]].model, []).extend(numbers)
        router = spec.decode.router if spec.decode else spec.router
        limit = (spec.admission.max_outstanding or 0) if spec.admission else 0
        self.answering = [self.make(router, members, limit) for members in by_model.values()]
        """a pool for each model"""
        self.which = pools_of(requests, sites).tolist()
        """the number of each request's among them"""

    def make(self, router: RouterSpec, members: list[int], max_outstanding: int) -> Pool:
        """A pool of these replicas, of which those are there with which its groups begin."""
        requests, names = self.requests, np.array(members)
        if self.tree is None and needs_prefixes(router):
            self.tree = PrefixTree(requests)
        signals = Signals(self.fleet, names, router.signal_age > 0, self.slots)
        chooser = Router(
            router,
            signals,
            np.array([self.sites[replica].weight for replica in members]),
            len(requests),
            self.seed,
            self.tree if needs_prefixes(router) else None,
            None if requests.session is None else requests.session.tolist(),
            requests.prompt_tokens.tolist(),
            self.fleet.knobs["block_size"][names],
            lambda i: self.fleet.match(self.rows[i], router.host_cache_hit_weight)[names],
            self.adapters,
        )
        if router.signal_age:
            self.clock.add_report(router.signal_age, signals.report)
        groups = zip(self.spec.groups, self.spec.ranges, strict=True)
        ready = {replica for group, numbers in groups for replica in numbers[: group.replicas]}
        pool = Pool(self.fleet, names, chooser, np.isin(names, list(ready)), max_outstanding, self.slots)
        self.home |= dict.fromkeys(members, pool)
        return pool

    def of(self, i: int) -> Pool:
        """The replicas that may answer request i."""
        return self.answering[self.which[i]]
