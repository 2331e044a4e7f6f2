"""Prefill and decode on separate replicas: a computed prompt is kept until a request pulls it.

As vLLM's NIXL connector does it (pull_scheduler.py, 0.32): the answer to `do_remote_decode` says where the blocks are,
and the request with `do_remote_prefill` takes blocks for the whole prompt, pulls it, and computes its last token again.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from infersim.cluster.clock import Clock
from infersim.cluster.handover import kv_bytes, left_to_send
from infersim.cluster.link import Link
from infersim.cluster.site import Site
from infersim.config.cluster import Transfer
from infersim.engine.compiled.state import COMPLETED
from infersim.engine.fleet import Fleet

from .counts import Counts

LEASE = 30.0
"""simulated s that blocks are kept for a request that has not come yet: kv_lease_duration"""
SIDE_CHANNEL = 5600  # VLLM_NIXL_SIDE_CHANNEL_PORT


@dataclass
class Held:
    """A computed prompt whose blocks are kept."""

    row: int
    replica: int
    to: int = -1
    """the replica that pulls it"""


class HandOver:
    """Blocks that are kept, and pulls. sites: of the fleet's replicas."""

    def __init__(self, fleet: Fleet, clock: Clock, transfer: Transfer, sites: list[Site], counts: list[Counts]):
        self.fleet, self.clock, self.transfer, self.sites, self.counts = fleet, clock, transfer, sites, counts
        self.expired = [0] * len(sites)
        """of each replica: prompts for which nobody came in time"""
        self.link = Link(clock, transfer.bandwidth)
        self.held: dict[str, Held] = {}
        """by the id of the request that computed the prompt"""
        self.coming: dict[int, Held] = {}
        """by row: prompts that have not come yet"""
        self._room: dict[int, deque[tuple[int, simpy.Event]]] = {}
        """rows that wait for blocks, by replica, in their order"""

    def keep(self, name: str, row: int) -> dict[str, Any]:
        """A prompt has been computed: its blocks are kept. Returns what its answer says of them."""
        record = self.fleet.requests[row]
        replica, ranks = int(record["replica"]), int(self.fleet.call["ranks"][0])
        held = self.held[name] = Held(row, replica)
        self.clock.call_at(self.clock.now + LEASE, lambda: None if held.to >= 0 else self._expire(name))
        table = int(record["table"])
        tables = self.fleet.tables[replica * ranks + int(record["rank"])]
        blocks = tables[table][: int(record["table_length"])] if table >= 0 else np.arange(int(record["num_blocks"]))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks.tolist()],
            "remote_engine_id": f"infersim-{replica}",
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": SIDE_CHANNEL + replica,
            "tp_size": 1,
            "remote_num_tokens": int(record["prompt_tokens"]),
            "transfer_mode": "pull",
        }

    def _expire(self, name: str) -> None:
        if name in self.held:
            self.expired[self.held[name].replica] += 1
        self.drop(name)

    def drop(self, name: str) -> None:
        """Nobody will ask for them any more."""
        held = self.held.pop(name, None)
        if held is not None:
            self._release(held)

    def _release(self, held: Held) -> None:
        record = self.fleet.requests[held.row]
        if record["status"] == COMPLETED and record["num_blocks"] > 0:  # else its replica has died
            self.fleet.release(held.row, self.clock.now)

    def pull(self, name: str, row: int, replica: int) -> int:
        """An added row is sent to a replica when the KV of its prompt, which `name` computed, has come. Returns the row
        that computed it."""
        held = self.coming[row] = self.held.pop(name)
        held.to = replica
        self.clock.process(self._pull(held, row, replica))
        return held.row

    def _pull(self, held: Held, row: int, replica: int) -> Any:
        fleet, clock, transfer, site = self.fleet, self.clock, self.transfer, self.sites[replica]
        queue = self._room.setdefault(replica, deque())
        blocks = -1 if queue else fleet.reserve(row, replica, clock.now)
        if blocks < 0:
            queue.append((row, clock.event()))
            blocks = yield queue[-1][1]
        began, size = clock.now, 0.0
        if before := transfer.latency + transfer.request_time:
            yield clock.at(clock.now + before)
        if row in self.coming:
            source = fleet.requests[held.row]
            size = kv_bytes(fleet, site, replica, int(source["prompt_tokens"]), blocks)
            meanwhile = float(source["last_token"] - source["scheduled"])
            yield self.link.transfer(left_to_send(transfer, size, site, self.link.bandwidth, meanwhile))
        if self.coming.pop(row, None) is not None:
            self.counts[replica].moved(clock.now - began, size, int(fleet.requests["prompt_tokens"][row]) - 1)
            self._release(held)
            fleet.send(row, replica, clock.now)

    def leave(self, row: int) -> bool:
        """The client of a row has gone, or its replica. True if the row has had no blocks yet."""
        held = self.coming.pop(row, None)
        if held is None:
            return False
        self._release(held)
        return not self.fleet.requests["num_blocks"][row]

    def cut(self, is_cut: bool) -> None:
        """The link breaks, and what is on its way waits; or it is whole again."""
        self.link.set_bandwidth(0.0 if is_cut else self.transfer.bandwidth)

    def stages(self, replica: int) -> dict[str, int]:
        """Requests of a replica whose KV is to come, by vLLM's stages."""
        mine = [row for row, held in self.coming.items() if held.to == replica]
        begun = int((self.fleet.requests["num_blocks"][mine] > 0).sum())
        return {"waiting_to_start": len(mine) - begun, "in_progress": begun, "completed_waiting": 0}

    def lose(self, replica: int) -> list[int]:
        """A replica has died: prompts that it kept are nowhere. Returns rows that wait for one."""
        for name in [name for name, held in self.held.items() if held.replica == replica]:
            del self.held[name]
        return [row for row, held in self.coming.items() if held.replica == replica]

    def freed(self) -> None:
        """Blocks may be free: who waits longest gets them."""
        for replica, queue in self._room.items():
            while queue:
                row, room = queue[0]
                blocks = self.fleet.reserve(row, replica, self.clock.now) if row in self.coming else 0
                if blocks < 0:
                    break
                queue.popleft()
                room.succeed(blocks)
