"""What each replica of a run did, and how evenly the router spread the work."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from infersim.engine.compiled.state import COMPLETED


@dataclass(frozen=True)
class Replicas:
    """R replicas, and every visit that a request paid to one of them."""

    names: tuple[str, ...]
    """of each: the device it runs on"""
    gpus: np.ndarray
    """i8[R]: GPUs of each"""
    usd_per_hour: np.ndarray
    """f8[R, 2]: low and high price of each, NaN if unknown"""
    rows: np.ndarray
    """engine.state.REPLICA[R]"""
    usable_blocks: np.ndarray
    """i8[R]: KV blocks that requests can hold"""
    available: np.ndarray
    """f8[R]: seconds that each was there"""
    visits: np.ndarray
    """engine.state.REQUEST[m]: a request that is sent again, or handed over, pays several visits"""
    aborted_time: float
    """request-seconds of visits that were aborted"""

    def figures(self) -> list[dict[str, Any]]:
        """One JSON-ready mapping per replica."""
        counts = self._counts(np.ones(len(self.visits), bool))
        completed = self._counts(self.visits["status"] == COMPLETED)
        outputs = self._counts(np.ones(len(self.visits), bool), self.visits["num_output_tokens"])
        came = self.visits["scheduled"] >= 0
        cached, prompts = (self._counts(came, self.visits[name]) for name in ("num_cached_tokens", "prompt_tokens"))
        available = np.maximum(self.available, 1e-300)
        rows, blocks = self.rows, np.maximum(self.usable_blocks, 1)
        columns = {
            "replica": np.arange(len(rows)),
            "hardware": self.names,
            "gpus": self.gpus,
            "available_s": self.available,
            "requests": counts,
            "completed": completed,
            "output_tokens": outputs,
            "preemptions": rows["num_preemptions"],
            "busy_share": rows["busy_time"] / available,
            "mean_running": rows["running_time"] / available,
            "mean_waiting": rows["waiting_time"] / available,
            "peak_running": rows["peak_running"],
            "mean_kv_usage": rows["block_time"] / blocks / available,
            "peak_kv_usage": rows["peak_blocks"] / blocks,
            "cached_share": cached / np.maximum(prompts, 1),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def paid(self, duration: float) -> dict[str, Any]:
        """Seconds of replicas and of GPUs that were there, their mean number over the run of `duration` (s), and their
        price in USD, as [low, high]."""
        usd = (self.available[:, None] / 3600 * self.usd_per_hour).sum(axis=0)
        return {
            "replica_seconds": float(self.available.sum()),
            "gpu_seconds": float((self.available * self.gpus).sum()),
            "mean_gpus": float((self.available * self.gpus).sum()) / duration if duration else None,
            "usd": None if np.isnan(usd).any() else usd.tolist(),
        }

    def balance(self) -> dict[str, float | None]:
        """How uneven the replicas' shares are: most over mean, and the coefficient of variation."""
        loads = {"requests": self._counts(np.ones(len(self.visits), bool)), "busy_time": self.rows["busy_time"]}
        figures = {}
        for name, load in loads.items():
            mean = float(load.mean())
            figures[f"{name}_max_over_mean"] = float(load.max()) / mean if mean > 0 else None
            figures[f"{name}_cv"] = float(load.std()) / mean if mean > 0 else None
        return figures

    def _counts(self, which: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """i8[R]: visits in bool[m] per replica, or the sum of their values."""
        which = which & (self.visits["replica"] >= 0)
        weights = None if values is None else values[which]
        return np.bincount(self.visits["replica"][which], weights, len(self.rows)).astype("i8")
