"""How a front door chooses a replica. A policy is a row of POLICIES: what each replica would cost, the least wins."""

from collections.abc import Callable

import numpy as np

from ..config.router import Router as RouterSpec
from ..workload.draws import generator
from .prefixes import PrefixIndex, PrefixTree
from .signals import Signals
from .static import draws, shares


class Router:
    """Chooses among the replicas 0 ... k - 1 of its pool, for requests 0 ... n - 1.

    weights: f8[k], for weighted-random; tree: for policies that remember prefixes; sessions: of the requests;
    block_size: i8[k], tokens; match: i4[k] of a request, tokens that each replica has cached now, as KV events tell;
    adapters: of the requests.
    """

    def __init__(
        self,
        spec: RouterSpec,
        signals: Signals,
        weights: np.ndarray,
        n: int,
        seed: int,
        tree: PrefixTree | None,
        sessions: list[int] | None,
        prompt_tokens: list[int],
        block_size: np.ndarray,
        match: Callable[[int], np.ndarray],
        adapters: list[str],
    ):
        self.spec = spec
        self.signals = signals
        self.weights = weights
        self.sessions = sessions or []
        self.prompt_tokens = prompt_tokens
        self.block_size = block_size
        self.match = match
        self.adapters = adapters
        self.k = len(weights)
        self.last = -1
        self.draws = draws(n, seed).tolist()
        self.second_draws = generator(seed, "router", "second").random(n).tolist()
        self.homes: dict[int, int] = {}
        self.index = PrefixIndex(tree, signals.blocks * block_size) if tree is not None else None
        self._choose = POLICIES[spec.policy]

    def choose(self, i: int, allowed: np.ndarray | None) -> int:
        """The replica for request i, of those in bool[k] (None: all). Counts it as sent there."""
        chosen = self.wish(i, allowed)
        self.last = chosen
        self.signals.routed[chosen] += 1
        if self.index is not None:
            self.index.add(i, chosen)
        return chosen

    def wish(self, i: int, allowed: np.ndarray | None) -> int:
        """The replica that it would choose now."""
        return self._choose(self, i, allowed)

    def cached(self, i: int, replica: int) -> int:
        """Tokens of request i's prompt that it knows, or believes, to be in a replica's cache."""
        if self.spec.policy == "kv-aware":
            return int(self.match(i)[replica])
        return int(self.index.overlap(i)[replica]) if self.index is not None else 0

    def forget(self, replica: int) -> None:
        """A replica is gone, and its cache with it."""
        if self.index is not None:
            self.index.forget(replica)
        self.homes = {session: home for session, home in self.homes.items() if home != replica}

    def least(self, cost: np.ndarray, allowed: np.ndarray | None) -> int:
        """The allowed replica of least cost; of equals the next one after the last chosen."""
        if allowed is not None:
            cost = np.where(allowed, cost, np.inf)
        costs = cost.tolist()
        lowest = min(costs)
        behind = costs[self.last + 1 :]  # a few numbers, which numpy takes longer for
        return self.last + 1 + behind.index(lowest) if lowest in behind else costs.index(lowest)


def _round_robin(router: Router, i: int, allowed: np.ndarray | None) -> int:
    return (router.last + 1) % router.k if allowed is None else router.least(np.zeros(router.k), allowed)


def _random(router: Router, i: int, allowed: np.ndarray | None) -> int:
    weights = router.weights if router.spec.policy == "weighted-random" else np.ones(router.k)
    names = np.arange(router.k) if allowed is None else np.flatnonzero(allowed)
    return int(names[np.searchsorted(shares("weighted-random", weights[names]), router.draws[i], side="right")])


def _least_outstanding(router: Router, i: int, allowed: np.ndarray | None) -> int:
    return router.least(router.signals.outstanding, allowed)


def _power_of_two(router: Router, i: int, allowed: np.ndarray | None) -> int:
    """Two different replicas by chance, the one with fewer requests (Mitzenmacher 2001)."""
    names = np.arange(router.k) if allowed is None else np.flatnonzero(allowed)
    one = int(router.draws[i] * len(names))
    if len(names) == 1:
        return int(names[0])
    other = (one + 1 + int(router.second_draws[i] * (len(names) - 1))) % len(names)
    one, other = int(names[one]), int(names[other])
    outstanding = router.signals.outstanding
    return one if outstanding[one] <= outstanding[other] else other


def _least_kv(router: Router, i: int, allowed: np.ndarray | None) -> int:
    return router.least(router.signals.kv_usage, allowed)


def _session(router: Router, i: int, allowed: np.ndarray | None) -> int:
    """A session stays where its first request went, the replica with the fewest requests then."""
    home = router.homes.get(router.sessions[i])
    if home is None or not (allowed is None or allowed[home]):
        home = router.homes[router.sessions[i]] = router.least(router.signals.in_flight, allowed)
    return home


def _prefix_aware(router: Router, i: int, allowed: np.ndarray | None) -> int:
    """SGLang's cache-aware router: the longest prefix, unless it is short or the load is out of balance."""
    load, spec = router.signals.outstanding, router.spec
    here = load if allowed is None else load[allowed]
    low, high = int(here.min()), int(here.max())
    if high - low > spec.balance_abs_threshold and high > low * spec.balance_rel_threshold:
        return router.least(load, allowed)
    assert router.index is not None
    overlap = router.index.overlap(i)
    if allowed is not None:
        overlap = np.where(allowed, overlap, 0.0)
    if overlap.max() > spec.cache_threshold * router.prompt_tokens[i]:
        return router.least(-overlap, allowed)
    return router.least(router.index.sizes, allowed)


def _kv_aware(router: Router, i: int, allowed: np.ndarray | None) -> int:
    """Dynamo's KV router: overlap_weight x blocks of the prompt to compute + blocks in use, by precise KV events."""
    to_compute = (router.prompt_tokens[i] - router.match(i)) / router.block_size
    in_use = router.signals.kv_usage * router.signals.blocks
    return router.least(router.spec.overlap_weight * to_compute + in_use, allowed)


def _weighted(router: Router, i: int, allowed: np.ndarray | None) -> int:
    """llm-d: weighted sum of scores from 0 to 1 (Gateway API Inference Extension's queue, kv and prefix scorers)."""
    signals, weights = router.signals, router.spec.scorers
    score = np.zeros(router.k)
    for weight, name in ((weights.queue, "waiting"), (weights.outstanding, "outstanding")):
        if weight:
            score += weight * _fewest(getattr(signals, name), allowed)
    if weights.kv_usage:
        score += weights.kv_usage * (1.0 - signals.kv_usage)
    if weights.prefix and router.index is not None:
        score += weights.prefix * router.index.overlap(i) / router.prompt_tokens[i]
    if weights.lora_affinity and router.adapters and router.adapters[i]:
        name = router.adapters[i]
        score += weights.lora_affinity * np.array([loaded.affinity(name) for loaded in signals.adapters])
    return router.least(-score, allowed)


def _fewest(counts: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    """1 for the least of the allowed, 0 for the most, in proportion between."""
    here = counts if allowed is None else counts[allowed]
    low, high = int(here.min()), int(here.max())
    return (high - counts) / (high - low) if high > low else np.ones(len(counts))


POLICIES: dict[str, Callable[[Router, int, np.ndarray | None], int]] = {
    "round-robin": _round_robin,
    "random": _random,
    "weighted-random": _random,
    "least-outstanding": _least_outstanding,
    "power-of-two": _power_of_two,
    "least-kv": _least_kv,
    "session": _session,
    "prefix-aware": _prefix_aware,
    "kv-aware": _kv_aware,
    "weighted": _weighted,
}
