"""Which replicas are there: what breaks, on demand or as the scenario states, and what autoscalers start and stop."""

from collections import deque
from typing import Any

import numpy as np

from infersim.cluster.autoscaler import Autoscaler
from infersim.cluster.door import Looker
from infersim.cluster.failures import Failures
from infersim.cluster.pool import Pool
from infersim.cluster.site import Site
from infersim.config.cluster import Failure
from infersim.engine.compiled.state import ABORTED
from infersim.workload.requests import Requests

from .ask import Row

STATES = ("ready", "off", "starting", "draining", "dead")
"""by the numbers of cluster.pool"""
RECENT = 100_000  # requests that have ended since an autoscaler looked, at most


class Roster:
    """The replicas' states. It stands where a run has its front door: it has of it what failures and autoscalers use.

    live: the Live that it is part of; sites: of the fleet's replicas.
    """

    left = 1
    """requests to come: nobody knows better"""

    def __init__(self, live: Any, sites: list[Site]):
        cluster = live.scenario.cluster
        self.live, self.fleet, self.clock, self.sites = live, live.fleet, live.processes, sites
        self.seed = live.scenario.simulation.seed
        self.requests = Requests(*(np.zeros(0),) * 4)
        self.lost: list[int] = []
        """rows that went down with their replica"""
        self.changed = False
        """others may get in, or their blocks, since it was last False"""
        self._asked_slow: dict[int, float] = {}
        groups = list(zip(cluster.group_names, cluster.groups, cluster.ranges, strict=True))
        begin = [replica for _, group, numbers in groups for replica in numbers[: group.replicas]]
        self.pools = [
            Pool(self.fleet, members, router, np.isin(members, begin), 0, None)
            for router, members in live.door.members.items()
        ]
        self.home = {replica: pool for pool in self.pools for replica in pool.members}
        self.failures = Failures(self)
        self.scalers = [
            Autoscaler(group.autoscaler, name, self, self.home[numbers[0]], list(numbers))
            for name, group, numbers in groups
            if group.autoscaler
        ]
        self._ended = {id(s): deque[int](maxlen=RECENT) for s in self.scalers if s.spec.policy in ("ttft", "tpot")}
        for scaler in self.scalers:
            self.clock.process(scaler.run())
        self.failures.begin(cluster.failures)

    # --- what it is asked ---------------------------------------------------------------------------------------------

    def state(self, replica: int) -> int:
        """READY, or another of cluster.pool's."""
        pool = self.home[replica]
        return int(pool.state[pool.place[replica]])

    @property
    def complete(self) -> bool:
        """Whether every replica takes requests."""
        return all(pool.all_ready for pool in self.pools)

    def wake(self, replica: int) -> None:
        """A request found no replica of this one's pool: an autoscaler starts one, if it can."""
        any(wake() for wake in self.home[replica].wakers)

    def ended(self, row: int, replica: int) -> None:
        """A request has its answer."""
        for scaler in self.scalers if self._ended else ():
            if id(scaler) in self._ended and replica in scaler.pool.place:
                self._ended[id(scaler)].append(row)

    def settle(self) -> None:
        """Requests have ended: replicas that were only to finish them go."""
        for pool in self.pools:
            pool.drain(self.clock.now)

    def kv_usage(self, replica: int) -> float:
        """Share of a replica's KV blocks that are held."""
        ranks = int(self.fleet.call["ranks"][0])
        free = self.fleet.schedulers["free_blocks"][replica * ranks : (replica + 1) * ranks].sum()
        return 1.0 - float(free) / (
            int(self.fleet.knobs["ranks"][replica]) * (int(self.fleet.knobs["num_gpu_blocks"][replica]) - 1)
        )

    def queues(self, replica: int) -> tuple[int, int]:
        """Requests that run and requests that wait."""
        ranks = int(self.fleet.call["ranks"][0])
        mine = self.fleet.schedulers[replica * ranks : (replica + 1) * ranks]
        return int(mine["num_running"].sum()), int(mine["num_waiting"].sum())

    # --- what clients do to it ----------------------------------------------------------------------------------------

    def crash(self, replica: int, duration: float) -> None:
        """Now; it is back after `duration` (simulated s)."""
        self.clock.process(self.failures.break_down(Failure(at=0.0), replica, duration))

    def slow(self, replica: int, factor: float) -> None:
        """Its steps take so many times as long from the next one on, or as a stated failure says if that is more."""
        factors = self.failures.slow.setdefault(replica, [])
        if (before := self._asked_slow.get(replica)) is not None:
            factors.remove(before)
        self._asked_slow[replica] = factor
        factors.append(factor)
        self.fleet.slow_down(replica, max(factors))

    def forget(self) -> None:
        """Prefix caches of replicas without requests are empty from now on."""
        for replica, rows in enumerate(self.live.rows):
            if not rows:
                self._clear(replica)

    # --- what failures and autoscalers ask of a front door ------------------------------------------------------------

    def may_end(self, gone: set[int]) -> bool:
        """No run waits for it."""
        return True

    def admit(self, pool: Pool, time: float) -> None:
        """There may be room."""
        self.changed = True

    def cut(self, is_cut: bool, for_ever: bool) -> None:
        """The link between the pools breaks, or is whole again."""
        if self.live.hand_over is not None:
            self.live.hand_over.cut(is_cut)

    def rows_of(self, pool: Pool) -> np.ndarray:
        """bool[0]: no request is known before it comes."""
        return np.zeros(0, "?")

    def ended_of(self, looker: Looker) -> tuple[np.ndarray, np.ndarray]:
        """state.REQUEST[m] of its pool's requests that have ended since it last asked, and when they came (s)."""
        rows = list(self._ended[id(looker)])
        self._ended[id(looker)].clear()
        return self.fleet.requests[rows], np.array([self.live.asked(row) for row in rows])

    def fail_replica(self, replica: int, time: float) -> None:
        """It forgets everything, and what it was doing is lost."""
        live = self.live
        self._clear(replica)
        lost = list(live.rows[replica].values())
        live.empty(replica)
        for entry in lost:
            self._lose(entry, time)
        if live.hand_over is not None:  # prompts that others were to pull
            for row in live.hand_over.lose(replica):
                other = next(entries[row] for entries in live.rows if row in entries)
                live.drop(other)
                self.fleet.abort(row, time)
                self._lose(other, time)
        self.changed = True

    def _lose(self, entry: Row, time: float) -> None:
        """A replica died and took this with it."""
        live = self.live
        if live.hand_over is not None and live.hand_over.leave(entry.row):
            record = self.fleet.requests[entry.row]
            record["replica"], record["status"] = entry.replica, ABORTED
        self.lost.append(entry.row)
        live.counts[entry.replica].end(self.fleet.requests[entry.row], "error", live.asked(entry.row))
        entry.push(0, time, "abort")

    def _clear(self, replica: int) -> None:
        self.fleet.fail(replica, self.clock.now)
        self.live.cleared(replica)
