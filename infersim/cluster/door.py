"""What failures and autoscalers ask of a front door: a run's (front.py), or that of `infersim serve`."""

from typing import Protocol

import numpy as np

from ..engine.fleet import Fleet
from ..workload.requests import Requests
from .clock import Clock
from .pool import Pool
from .site import Site


class Looker(Protocol):
    """Who asks now and then what has ended."""

    ended_before: int
    """requests that had ended when it last asked"""
    mine: np.ndarray
    """bool[n]: those that it asks for"""


class Door(Protocol):
    """Before the replicas that answer."""

    fleet: Fleet
    sites: list[Site]
    requests: Requests
    seed: int
    left: int
    """requests that have not ended"""
    pools: list[Pool]
    """a pool for each model"""
    home: dict[int, Pool]
    """the pool of each replica"""

    @property
    def clock(self) -> Clock: ...

    def rows_of(self, pool: Pool) -> np.ndarray:
        """bool[n]: requests that come by this pool."""

    def ended_of(self, looker: Looker) -> tuple[np.ndarray, np.ndarray]:
        """state.REQUEST[m] of a looker's requests that have ended since it last asked, and when they were sent (s)."""

    def admit(self, pool: Pool, time: float) -> None:
        """Send on what waits at the front door for a pool, as far as there are replicas for it."""

    def fail_replica(self, replica: int, time: float) -> None:
        """A replica dies: what it was doing is lost."""

    def may_end(self, gone: set[int]) -> bool:
        """Whether there is a request left whose pools are not all among the replicas that are gone for ever."""

    def cut(self, is_cut: bool, for_ever: bool) -> None:
        """The link between the pools breaks, or is whole again."""
