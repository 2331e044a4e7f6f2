"""What a router sees of the replicas: counts as they are, or as they were when the replicas last reported."""

import numpy as np

from ..engine.fleet import Fleet
from .adapters import Loaded, Slots


class Signals:
    """Of some replicas of a fleet, `members` i8[k]. With `aged` everything is as of the last `report`."""

    def __init__(self, fleet: Fleet, members: np.ndarray, aged: bool, slots: Slots | None):
        k, ranks = len(members), int(fleet.call["ranks"][0])
        together = members[-1] - members[0] == k - 1
        pool = slice(members[0], members[0] + k) if together else members
        self._aged = aged
        self._slots, self._members = slots, members.tolist()
        self._pool = pool
        self._finished = fleet.replicas["num_finished"]
        self._waiting = fleet.schedulers["num_waiting"].reshape(-1, ranks)
        self._free = fleet.schedulers["free_blocks"].reshape(-1, ranks)
        self.blocks = (fleet.knobs["num_gpu_blocks"][pool].astype("f8") - 1) * fleet.knobs["ranks"][pool]
        self.routed = np.zeros(k, "i8")
        """requests sent to each, ever: the router's own count"""
        self.report()

    def report(self) -> None:
        """The replicas say how they are."""
        self._reported = (self._outstanding(), self._waits(), self._usage(), self._adapters())

    def join(self, r: int) -> None:
        """Member r comes from another pool, idle: only what it is sent from now on counts."""
        self.routed[r] = self._finished[self._pool][r]
        for values in self._reported[:3]:
            values[r] = 0

    def _outstanding(self) -> np.ndarray:
        return self.routed - self._finished[self._pool]

    def _waits(self) -> np.ndarray:
        return self._of_ranks(self._waiting)

    def _usage(self) -> np.ndarray:
        return 1.0 - self._of_ranks(self._free) / self.blocks

    def _of_ranks(self, counts: np.ndarray) -> np.ndarray:
        """i8[k]: each member's sum over its ranks; counts: i4[R, ranks]."""
        own = counts[self._pool]
        return own.sum(axis=1) if counts.shape[1] > 1 else own[:, 0]

    def _adapters(self) -> list[Loaded]:
        return [self._slots.loaded(replica) for replica in self._members] if self._slots else []

    @property
    def adapters(self) -> list[Loaded]:
        """What each replica has loaded."""
        return self._reported[3] if self._aged else self._adapters()

    @property
    def in_flight(self) -> np.ndarray:
        """i8[k]: requests routed and not finished, which the router counts itself and so knows at any time."""
        return self._outstanding()

    @property
    def outstanding(self) -> np.ndarray:
        """i8[k]: requests that a replica has."""
        return self._reported[0] if self._aged else self._outstanding()

    @property
    def waiting(self) -> np.ndarray:
        """i8[k]: requests in a replica's waiting queue."""
        return self._reported[1] if self._aged else self._waits()

    @property
    def kv_usage(self) -> np.ndarray:
        """f8[k]: share of a replica's KV blocks that are held."""
        return self._reported[2] if self._aged else self._usage()
