"""Prefill and decode on separate replicas: prompts are computed here, their KV goes over a link, tokens come there.

As vLLM's KV connectors and NIXL do it: the prefill replica generates one token, which is thrown away, and keeps the
prompt's blocks; the decode replica takes blocks for the whole prompt before anything is sent, and waits if it has none
(meanwhile the prefill replica's stay taken: back-pressure); when all has arrived it computes the last prompt token
again, which gives the first output token.
"""

from collections import deque

import numpy as np

from ..config.cluster import Cluster, Transfer
from ..engine.compiled.state import COMPLETED
from ..engine.fleet import Fleet
from ..workload.requests import Requests
from .clients import Clients, columns_beside
from .front import Front
from .link import Link
from .pool import Pool
from .site import Site
from .switch import RoleSwitch


def kv_bytes(fleet: Fleet, site: Site, replica: int, tokens: int, blocks: int) -> float:
    """Bytes of a prompt's KV of which `blocks` are to come to a replica, itself a `site`."""
    ranks = int(fleet.call["ranks"][0])
    filled = -(-tokens // int(fleet.knobs["block_size"][replica])) * int(
        fleet.schedulers["num_tables"][replica * ranks]
    )
    return min(blocks, filled) * site.block_bytes  # a piece for all that may come is mostly empty


def left_to_send(transfer: Transfer, size: float, site: Site, bandwidth: float, meanwhile: float) -> float:
    """Of so many bytes: all, or with overlap what did not go in the seconds while the prompt was computed."""
    return size if transfer.overlap == "none" else max(size / site.num_layers, size - bandwidth * meanwhile)


class HandOver(Front):
    """A front door to a prefill pool and a decode pool, which answers."""

    link: Link

    def __init__(
        self,
        spec: Cluster,
        fleet: Fleet,
        sites: list[Site],
        requests: Requests,
        clients: Clients,
        seed: int,
        adapters: list[str] | None = None,
    ):
        super().__init__(spec, fleet, sites, requests, clients, seed, adapters)
        assert spec.prefill is not None and spec.transfer is not None
        self.transfer = spec.transfer
        n = len(requests)
        self.pool: Pool = self.pools[0]
        both = self.pool.members
        self.prefill: Pool = self.made.make(spec.prefill.router, both if spec.role_switch else list(spec.ranges[1]), 0)
        self.switch: RoleSwitch | None = None
        if spec.role_switch:
            self.switch = RoleSwitch(spec.role_switch, self, self.pool, self.prefill, spec.ranges)
            self.clock.process(self.switch.run())
        self.bytes = 0.0
        """of KV handed over"""
        columns = (requests.prompt_tokens, 1, 1, n)
        start = fleet.add(*columns, **columns_beside(requests, clients))
        fleet.requests["hold"][start:] = 1
        self.prefill_row = list(range(start, start + n))
        self.owner |= {row: row - start for row in self.prefill_row}
        self.severed = False
        """the link is cut for ever"""
        self.on_their_way: set[int] = set()
        """requests whose prompt has been computed and has not arrived"""
        self.split = np.zeros(n, bool)
        """bool[n]: whether its last attempt went by a prefill replica"""
        self.computed = np.full(n, np.nan)
        """f8[n]: when each prompt was computed"""
        self.reserved = np.full(n, np.nan)
        """f8[n]: when there was room for it"""
        self.received = np.full(n, np.nan)
        """f8[n]: when its KV had arrived"""

    def _is_worth_it(self, i: int, allowed: np.ndarray | None) -> bool:
        """The decider: by what the decode replica that the router would choose now would have to compute (llm-d,
        Dynamo's conditional disaggregation)."""
        least = self.transfer.hand_over
        if isinstance(least, str):
            return least == "always"
        prompt, router = int(self.requests.prompt_tokens[i]), self.pool.router
        return prompt >= least and prompt - router.cached(i, router.wish(i, allowed)) >= least

    def rows_of(self, pool: Pool) -> np.ndarray:
        return np.ones(len(self.requests), bool) if pool is self.prefill else super().rows_of(pool)

    def goes_on(self, row: int) -> bool:
        return super().goes_on(row) or row == self.prefill_row[self.owner.get(row, row)]

    def needs(self, pool: Pool) -> bool:
        """A decode replica can compute prompts too."""
        return pool is not self.prefill

    def dispatch(self, i: int, allowed: np.ndarray | None, time: float) -> None:
        """A prefill replica gets request i, or a decode replica if the decider says so or nobody can hand it over."""
        self.computed[i] = self.reserved[i] = self.received[i] = np.nan  # what an earlier attempt left
        there = self.prefill.allowed()
        nobody = self.severed or (there is not None and not there.any())
        self.split[i] = not nobody and self._is_worth_it(i, allowed)
        if not self.split[i]:
            super().dispatch(i, allowed, time)
            return
        if self.fleet.requests["replica"][self.prefill_row[i]] >= 0:
            self.prefill_row[i] = self.fleet.add_like(self.prefill_row[i])
            self.owner[self.prefill_row[i]] = i
        self.deliver(i, self.prefill_row[i], self.prefill.choose(i, there), time)

    def handed_over(self, i: int, row: int, time: float) -> bool:
        if row == self.prefill_row[i]:
            self.computed[i] = min(time, self.clock.now)  # not when its API server has sent the token
            self.clock.process(self._hand_over(i, self.token[i], row))
            return True
        self._make_room(int(self.fleet.requests["replica"][row]))
        return False

    def _hand_over(self, i: int, token: int, row: int):
        clock, transfer, answer = self.clock, self.transfer, self.row[i]
        allowed = self.pool.allowed()
        if allowed is not None and not allowed.any():
            allowed = self.pool.ready()  # what was let in is let through
        if self.severed or (allowed is not None and not allowed.any()):
            self.lose(i, clock.now)
            return
        self.on_their_way.add(i)
        replica = self.pool.choose(i, allowed)
        if self.slots is not None and (
            adapter := self.adapters[i]
        ):  # before memory, so that nobody waits for it in a circle
            ready = clock.event()
            self.slots.deliver(answer, adapter, replica, ready.succeed)
            yield ready
            if not self.is_current(i, token):
                return
        blocks = self.fleet.reserve(answer, replica, clock.now)
        if blocks < 0:
            room = clock.event()
            self.pool.reserving.setdefault(replica, deque()).append((i, token, room))
            blocks = yield room
        if not self.is_current(i, token):
            return
        self.reserved[i] = clock.now
        if before := transfer.latency + transfer.request_time:
            yield clock.at(clock.now + before)
        yield self.link.transfer(self._bytes(i, row, blocks, replica))
        if self.is_current(i, token):
            self.on_their_way.discard(i)
            self.received[i] = clock.now
            self.fleet.release(row, clock.now)
            self.fleet.send(answer, replica, clock.now)
            self.drain()

    def _bytes(self, i: int, row: int, blocks: int, replica: int) -> float:
        """What still has to be sent of request i."""
        size = kv_bytes(self.fleet, self.sites[replica], replica, int(self.requests.prompt_tokens[i]), blocks)
        self.bytes += size
        meanwhile = self.computed[i] - float(self.fleet.requests["scheduled"][row])
        return left_to_send(self.transfer, size, self.sites[replica], self.link.bandwidth, meanwhile)

    def _make_room(self, replica: int) -> None:
        """Blocks may have become free: hand-overs that wait for them go on, in order."""
        queue = self.pool.reserving.get(replica)
        while queue:
            i, token, room = queue[0]
            blocks = self.fleet.reserve(self.row[i], replica, self.clock.now) if self.is_current(i, token) else 0
            if blocks < 0:
                return
            queue.popleft()
            room.succeed(blocks)

    def withdraw(self, i: int, time: float) -> None:
        super().withdraw(i, time)
        self.on_their_way.discard(i)
        row = self.fleet.requests[self.prefill_row[i]]
        if row["replica"] >= 0:
            if row["status"] < COMPLETED:
                self.abort(self.prefill_row[i], time)
            elif row["num_blocks"] > 0:
                self.fleet.release(self.prefill_row[i], time)
        for replica in self.pool.members:
            self._make_room(replica)
        self.drain()

    def cut(self, is_cut: bool, for_ever: bool) -> None:
        """What can never arrive is lost."""
        super().cut(is_cut, for_ever)
        self.severed |= for_ever
        if for_ever:
            for i in sorted(self.on_their_way):
                self.lose(i, self.clock.now)

    def drain(self) -> None:
        super().drain()
        if self.switch:
            self.switch.go_on()

    @property
    def all_pools(self) -> list[Pool]:
        return [*super().all_pools, self.prefill]

    def records(self) -> np.ndarray:
        records, prefill = super().records(), self.fleet.requests[self.prefill_row]
        here = self.split
        for name in ("scheduled", "num_cached_tokens", "num_cpu_cached_tokens", "num_disk_cached_tokens",
                     "num_stored_cached_tokens"):  # fmt: skip
            records[name][here] = prefill[name][here]
        records["num_preemptions"][here] += prefill["num_preemptions"][here]
        return records

    def columns(self) -> dict[str, np.ndarray]:
        def of_split(values: np.ndarray) -> np.ndarray:
            return np.where(self.split, values, np.nan)  # else of an earlier attempt

        return super().columns() | {
            "prefill_replica": np.where(self.split, self.fleet.requests["replica"][self.prefill_row], -1),
            "prefilled_s": of_split(self.computed),
            "wait_for_room_ms": of_split(self.reserved - self.computed) * 1e3,
            "transfer_ms": of_split(self.received - self.reserved) * 1e3,
        }

    def route(self, end: float) -> dict:
        def mean(values: np.ndarray) -> float | None:
            values = values[~np.isnan(values)]
            return float(values.mean()) * 1e3 if len(values) else None

        switched = {"role_switch": self.switch.figures()} if self.switch else {}
        return (
            super().route(end)
            | switched
            | {
                "prefill_policy": self.prefill.router.spec.policy,
                "handed_over": int((~np.isnan(self.received)).sum()),
                "transfer_bytes": self.bytes,
                "mean_wait_for_room_ms": mean(self.reserved - self.computed),
                "mean_transfer_ms": mean(self.received - self.reserved),
            }
        )
