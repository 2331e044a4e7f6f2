"""What a router sees of the replicas: counts as they are, or as they were when the replicas last reported."""

import numpy as np

from ..engine.fleet import Fleet


class Signals:
    """Of the replicas first ... first + k - 1 of a fleet. With `aged` everything is as of the last `report`."""

    def __init__(self, fleet: Fleet, first: int, k: int, aged: bool):
        ranks = int(fleet.call["ranks"][0])
        pool, queues = slice(first, first + k), slice(first * ranks, (first + k) * ranks)
        self._aged = aged
        self._finished = fleet.replicas["num_finished"][pool]
        self._waiting = fleet.schedulers["num_waiting"][queues].reshape(k, ranks)
        self._free = fleet.schedulers["free_blocks"][queues].reshape(k, ranks)
        self.blocks = (fleet.knobs["num_gpu_blocks"][pool].astype("f8") - 1) * ranks
        self.routed = np.zeros(k, "i8")
        """requests sent to each, ever: the router's own count"""
        self.report()

    def report(self) -> None:
        """The replicas say how they are."""
        self._reported = (self._outstanding(), self._waiting.sum(axis=1), self._usage())

    def _outstanding(self) -> np.ndarray:
        return self.routed - self._finished

    def _usage(self) -> np.ndarray:
        return 1.0 - self._free.sum(axis=1) / self.blocks

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
        return self._reported[1] if self._aged else self._waiting.sum(axis=1)

    @property
    def kv_usage(self) -> np.ndarray:
        """f8[k]: share of a replica's KV blocks that are held."""
        return self._reported[2] if self._aged else self._usage()
