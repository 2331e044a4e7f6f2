"""Routing that looks at no replica: all requests are assigned at once, and one by one a router does the same."""

import numpy as np

from ..workload.draws import generator


def assign(policy: str, weights: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """i8[n]: the replica of each request under a static policy, as `Router.choose` would choose one by one.

    weights: f8[k]; chance: f8[n], the draws of the requests.
    """
    if policy == "round-robin":
        return np.arange(len(chance)) % len(weights)
    return np.searchsorted(shares(policy, weights), chance, side="right")


def draws(n: int, seed: int) -> np.ndarray:
    """f8[n]: what a router draws for each request."""
    return generator(seed, "router").random(n)


def shares(policy: str, weights: np.ndarray) -> np.ndarray:
    """f8[k - 1]: where in [0, 1) the share of one replica ends and the next begins."""
    weights = weights if policy == "weighted-random" else np.ones(len(weights))
    return np.cumsum(weights)[:-1] / weights.sum()
