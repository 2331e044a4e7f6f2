"""LoRA adapters that replicas load when a request needs one: slots, loads over the host's link, who waits for whom."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..engine.fleet import Fleet
from .clock import Clock
from .link import Link
from .site import Site


@dataclass(frozen=True)
class Loaded:
    """What a replica says of its adapters."""

    here: frozenset[str]
    """loaded, or on their way"""
    waited_for: frozenset[str]
    """that requests wait for"""
    has_room: bool
    """a slot is free, or holds an adapter that no request needs"""

    def affinity(self, name: str) -> float:
        """How well a request for an adapter fits there, from 0 to 1 (llm-d's lora-affinity-scorer)."""
        if name in self.here:
            return 1.0
        return 0.8 if self.has_room else 0.6 if name in self.waited_for else 0.0


class Slots:
    """Each replica's slots.

    A request whose adapter is in no slot waits until one is free or holds an adapter that nobody needs (the least
    recently needed goes), and until the adapter has been loaded; requests behind it whose adapter is there go first, as
    in vLLM's scheduler. Others run on while an adapter is loaded (S-LoRA, MLSys 2024) where the site overlaps loading;
    elsewhere the device copies it in front of the next step, which the request may be in (vLLM, SGLang's default).
    """

    def __init__(self, clock: Clock, fleet: Fleet, sites: list[Site]):
        self.clock, self.fleet, self.sites = clock, fleet, sites
        self.here: list[dict[str, bool]] = [{} for _ in sites]
        """of each replica: adapters in its slots, least recently needed first, and whether they are loaded"""
        self.needed: list[Counter[str]] = [Counter() for _ in sites]
        """of each replica: requests for each adapter that have it"""
        self.waiting: list[dict[str, list[int]]] = [{} for _ in sites]
        """of each replica: rows that wait for an adapter, the adapter waited for longest first"""
        self.links = [Link(clock, site.host_bandwidth) for site in sites]
        self.visits: dict[int, tuple[int, str, float, Callable[[], object]]] = {}
        """replica and adapter of each row that is there, when it came, and what is done when the adapter is there"""
        self.loads = 0
        self.stalled = 0.0
        """s that replicas' next steps waited for loads"""
        self.waits: dict[int, float] = {}
        """s that each row waited"""

    def deliver(self, row: int, adapter: str, replica: int, then: Callable[[], object]) -> None:
        """A row that needs an adapter comes to a replica now; `then` is done when the replica has it."""
        self.fleet.requests["replica"][row] = replica  # so that it can be aborted while it waits
        self.waiting[replica].setdefault(adapter, []).append(row)
        self.visits[row] = (replica, adapter, self.clock.now, then)
        self._go_on(replica)

    def leave(self, row: int) -> None:
        """A row has ended; it may never have needed an adapter."""
        if row not in self.visits:
            return
        replica, adapter, *_ = self.visits.pop(row)
        waiting = self.waiting[replica]
        if row in waiting.get(adapter, ()):
            waiting[adapter].remove(row)
            if not waiting[adapter]:
                del waiting[adapter]
        else:
            self.needed[replica][adapter] -= 1
        self._go_on(replica)

    def forget(self, replica: int) -> None:
        """The replica is gone, and what it had loaded with it."""
        self.here[replica], self.waiting[replica] = {}, {}
        self.needed[replica].clear()
        self.links[replica] = Link(self.clock, self.sites[replica].host_bandwidth)
        self.visits = {row: visit for row, visit in self.visits.items() if visit[0] != replica}

    def _go_on(self, replica: int) -> None:
        """An adapter that is waited for gets a slot if there is one; who waits for a loaded one goes to the engine."""
        here, waiting = self.here[replica], self.waiting[replica]
        for adapter in list(waiting):
            if adapter not in here:
                if len(here) >= self.sites[replica].max_loras:
                    idle = self._idle(replica)
                    if idle is None:
                        continue
                    del here[idle]
                here[adapter] = self._begin_load(replica, adapter, here)
            if here[adapter]:
                here[adapter] = here.pop(adapter)
                for row in waiting.pop(adapter):
                    _, _, since, then = self.visits[row]
                    self.waits[row] = self.clock.now - since
                    self.needed[replica][adapter] += 1
                    then()

    def _begin_load(self, replica: int, adapter: str, slots: dict[str, bool]) -> bool:
        """Whether what comes next finds the adapter there: the device's next step comes after the copy."""
        self.loads += 1
        site = self.sites[replica]
        if site.overlap_loading:
            self.clock.process(self._load(replica, adapter, slots))
            return False
        seconds = site.adapters[adapter] / site.host_bandwidth
        self.fleet.hold_up(replica, self.clock.now, seconds)
        self.stalled += seconds
        return True

    def _idle(self, replica: int) -> str | None:
        """The adapter that can go."""
        needed = self.needed[replica]
        return next((name for name, loaded in self.here[replica].items() if loaded and not needed[name]), None)

    def _load(self, replica: int, adapter: str, slots: dict[str, bool]):
        yield self.links[replica].transfer(self.sites[replica].adapters[adapter])
        if slots is self.here[replica]:
            slots[adapter] = True
            self._go_on(replica)

    def loaded(self, replica: int) -> Loaded:
        """As it is now."""
        here = self.here[replica]
        room = len(here) < self.sites[replica].max_loras or self._idle(replica) is not None
        return Loaded(frozenset(here), frozenset(self.waiting[replica]), room)

    def columns(self, rows: list[int]) -> dict[str, np.ndarray]:
        """What requests.csv says of the rows that answered."""
        return {"adapter_wait_ms": np.array([self.waits.get(row, np.nan) for row in rows]) * 1e3}

    def figures(self) -> dict:
        """JSON-ready."""
        waits = list(self.waits.values())
        return {
            "adapter_requests": len(waits),
            "adapter_loads": self.loads,
            "adapter_stalls_s": self.stalled,
            "mean_adapter_wait_ms": float(np.mean(waits)) * 1e3 if waits else None,
        }
