"""A pool of replicas behind a router: which of them are ready, and what they have been asked to do."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..config.errors import InputError
from ..config.units import short
from ..engine.fleet import Fleet
from ..workload.requests import Requests
from .routers import Router

if TYPE_CHECKING:
    from .adapters import Slots

READY, OFF, STARTING, DRAINING, DEAD = range(5)
THERE = (READY, STARTING, DRAINING)


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
    model: str | None = ""
    """what requests call the model that it serves; None: it encodes images"""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """bytes on one GPU of each LoRA adapter that it can load"""
    max_loras: int = 0
    """adapters that it has room for"""
    host_bandwidth: float = np.inf
    """B/s, from the host's memory to each GPU"""
    embedding_bytes: float = 0.0
    """of one prompt token that comes from an encoder"""


class Pool:
    """Some replicas of the fleet, `members` i8[k], that a router chooses among. Numbers of replicas are the fleet's."""

    def __init__(
        self,
        fleet: Fleet,
        members: np.ndarray,
        router: Router,
        ready: np.ndarray,
        max_outstanding: int,
        slots: "Slots | None",
    ):
        k = len(members)
        self.fleet, self.router = fleet, router
        self.members = members.tolist()
        self.place = {replica: r for r, replica in enumerate(self.members)}
        """where each replica stands in what follows"""
        self.max_outstanding = max_outstanding
        """0 for any number"""
        self.state = np.where(ready, READY, OFF)
        self.since = np.where(ready, 0.0, np.nan)
        """f8[k]: since when each has been there, NaN if it is not"""
        self.available = np.zeros(k)
        """f8[k], s: how long each was there before"""
        self.queue: list[tuple[int, int, int, int]] = []
        """requests that no replica may have yet: (priority, order, request, token), a heap"""
        self.reserving: dict[int, deque] = {}
        """hand-overs that wait for KV blocks, by replica"""
        self.slots = slots
        self.wakers: list[Callable[[], bool]] = []
        """asked in turn to start a replica when a request finds none"""
        self.all_ready = bool(ready.all())
        self.some_drain = False

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
        return self.members[self.router.choose(i, allowed)]

    def become(self, replica: int, state: int, time: float) -> None:
        """A replica changes its state."""
        r = self.place[replica]
        if self.state[r] in THERE and state not in THERE:
            self.available[r] += time - self.since[r]
            self.since[r] = np.nan
        elif self.state[r] not in THERE and state in THERE:
            self.since[r] = time
        self.state[r] = state
        self.all_ready = bool((self.state == READY).all())
        self.some_drain = DRAINING in self.state
        if state in (OFF, DEAD):
            self.router.forget(r)
            if self.slots is not None:
                self.slots.forget(replica)

    def drain(self, time: float) -> None:
        """Replicas that were only to finish their requests go when they have."""
        if self.some_drain:
            held = self.fleet.replicas["num_reserved"][self.members]  # computed prompts that are still on their way
            done = (self.state == DRAINING) & (self.router.signals.in_flight == 0) & (held == 0)
            for r in np.flatnonzero(done).tolist():
                self.become(self.members[r], OFF, time)

    def seconds_available(self, end: float) -> np.ndarray:
        """f8[k]: how long each replica has been there by `end`."""
        there = np.where(np.isnan(self.since), 0.0, end - np.nan_to_num(self.since))
        return np.clip(self.available + there, 0.0, end)


def pools_of(requests: Requests, sites: list[Site]) -> np.ndarray:
    """i8[n]: which model each request is for, or whose adapter, of the sites' in their order.

    InputError for a name that no replica serves.
    """
    if not requests.models:
        return np.zeros(len(requests), "i8")
    places: dict[str, int] = {}
    sites = [site for site in sites if site.model is not None]
    for model in dict.fromkeys(site.model for site in sites):
        places[model] = len(places)
    for site in sites:
        places |= dict.fromkeys(site.adapters, places[site.model])
    for name in requests.models:
        if name not in places:
            raise InputError(f"workload: no replica serves model {short(name)}; served are {', '.join(places)}")
    return np.array([places[name] for name in requests.models])[requests.model]


def adapters_of(requests: Requests, sites: list[Site]) -> list[str] | None:
    """The adapter that each request is for, "" for none; None if no request is for any."""
    known = {name for site in sites for name in site.adapters}
    names = [name if name in known else "" for name in requests.models]
    return [names[m] for m in requests.model.tolist()] if any(names) else None
