"""A pool of replicas behind a router: which of them are ready, and what they have been asked to do."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..engine.fleet import Fleet
from .routers import Router

READY, OFF, STARTING, DRAINING, DEAD = range(5)


@dataclass(frozen=True)
class Site:
    """What the cluster needs to know of one replica beside its engine."""

    weight: float
    """of router weighted-random"""
    block_bytes: float
    """of one KV block, on all its GPUs"""
    num_layers: int
    weights_bytes: float
    """on one GPU: what it loads when it starts"""


class Pool:
    """Replicas first ... first + k - 1 of the fleet. Numbers of replicas are the fleet's."""

    def __init__(self, fleet: Fleet, first: int, router: Router, ready: int, max_outstanding: int):
        k = router.k
        self.fleet, self.first, self.router, self.k = fleet, first, router, k
        self.max_outstanding = max_outstanding
        """0 for any number"""
        self.state = np.where(np.arange(k) < ready, READY, OFF)
        self.since = np.where(np.arange(k) < ready, 0.0, np.nan)
        """f8[k]: since when each has been there, NaN if it is not"""
        self.available = np.zeros(k)
        """f8[k], s: how long each was there before"""
        self.reserving: dict[int, deque] = {}
        """hand-overs that wait for KV blocks, by replica"""
        self.all_ready = ready == k

    def allowed(self) -> np.ndarray | None:
        """bool[k]: replicas that may be sent another request; None if all may."""
        if self.all_ready and not self.max_outstanding:
            return None
        allowed = self.state == READY
        if self.max_outstanding:
            allowed &= self.router.signals.in_flight < self.max_outstanding
        return allowed

    def ready(self) -> np.ndarray:
        """bool[k]: replicas that serve, however busy."""
        return self.state == READY

    def choose(self, i: int, allowed: np.ndarray | None) -> int:
        """The router's replica for request i."""
        return self.first + self.router.choose(i, allowed)

    def become(self, replica: int, state: int, time: float) -> None:
        """A replica changes its state."""
        r = replica - self.first
        there = (READY, STARTING, DRAINING)
        if self.state[r] in there and state not in there:
            self.available[r] += time - self.since[r]
            self.since[r] = np.nan
        elif self.state[r] not in there and state in there:
            self.since[r] = time
        self.state[r] = state
        self.all_ready = bool((self.state == READY).all())
        if state in (OFF, DEAD):
            self.router.forget(r)

    def count(self, *states: int) -> int:
        """How many replicas are in one of these states."""
        return int(np.isin(self.state, states).sum())

    def seconds_available(self, end: float) -> np.ndarray:
        """f8[k]: how long each replica has been there by `end`."""
        there = np.where(np.isnan(self.since), 0.0, end - np.nan_to_num(self.since))
        return np.clip(self.available + there, 0.0, end)
