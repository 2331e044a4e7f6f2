"""What the prefix caches hold, told over ZMQ as vLLM 0.32 does (vllm/distributed/kv_events.py).

Frames are topic, number (8 bytes, big endian) and a batch in msgpack: [time, events, rank], each event a map. Who has
missed some asks the replay socket for a number and gets all from there on, and a last one numbered -1.
"""

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from infersim.config.errors import InputError
from infersim.engine.compiled.state import COMPLETED

from .ask import Row
from .live import Live

BUFFERED = 10_000  # batches kept for replay: vLLM's default


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that hold text from now on: of one request, one behind another."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks whose text was overwritten."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The cache is empty."""


class Publisher:
    """The sockets of one scheduler: the events' on an endpoint's port + number, replay's behind those of all."""

    def __init__(self, context: zmq.Context, endpoint: str, number: int, count: int, topic: str, rank: int):
        self.topic, self.rank, self._seq = topic, rank, 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)
        address, _, port = endpoint.rpartition(":")
        self.endpoint, self.replay_endpoint = (f"{address}:{int(port) + k}" for k in (number, count + number))
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._replay = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
        for sock, at in ((self._pub, self.endpoint), (self._replay, self.replay_endpoint)):
            sock.linger = 0
            sock.bind(at) if "*" in at or sock is self._replay else sock.connect(at)

    def publish(self, events: list) -> None:
        """Send a batch."""
        payload = msgspec.msgpack.encode((time.time(), events, self.rank))
        seq = self._seq.to_bytes(8, "big")
        self._seq += 1
        self._buffer.append((seq, payload))
        self._pub.send_multipart((self.topic.encode(), seq, payload))

    async def replay(self) -> None:
        """Answers who missed some, for ever."""
        topic = self.topic.encode()
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                for seq, payload in [one for one in self._buffer if one[0] >= frames[2]]:
                    await self._replay.send_multipart((frames[0], b"", topic, seq, payload))
                await self._replay.send_multipart((frames[0], b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    def close(self) -> None:
        self._pub.close()
        self._replay.close()


class KvEvents:
    """Compares what blocks hold with what was told of them, after every moment of the fleet.

    topics: of each replica. InputError for an endpoint that cannot be, and for engines that know no hashes of blocks.
    """

    def __init__(self, live: Live, endpoint: str, topics: list[str]):
        fleet, self.live = live.fleet, live
        for deployment in live.deployments:
            if not deployment.engine.enable_prefix_caching or fleet.knobs["radix"].any():
                raise InputError("--kv-events: needs a prefix cache of hashed blocks, as vLLM's presets have it")
        ranks = int(fleet.call["ranks"][0])
        self._context, count = zmq.Context(), len(topics) * ranks
        try:
            self.publishers = [
                Publisher(self._context, endpoint, k, count, topics[k // ranks], k % ranks) for k in range(count)
            ]
        except (zmq.ZMQError, ValueError) as error:
            self._context.destroy(0)
            raise InputError(f"--kv-events {endpoint}: {error}; must be like tcp://*:5557, free here") from None
        self._replays = [live.loop.create_task(one.replay()) for one in self.publishers]
        self._told = np.zeros_like(fleet.blocks["hash"])
        """what was told that each block holds, 0 for nothing"""
        self._tails: dict[int, int] = {}
        """of each row that has not ended: the hash of its last block that was told of"""
        self._steps, self._ends = (fleet.replicas[name].copy() for name in ("num_steps", "last_end"))

    def look(self) -> None:
        """The fleet has gone on by at most one step of each replica: tell of what has changed. What a step fills is
        known when it is scheduled, or with asynchronous scheduling when it ends."""
        steps, ends = (self.live.fleet.replicas[name] for name in ("num_steps", "last_end"))
        for r in np.flatnonzero((steps != self._steps) | (ends != self._ends)).tolist():
            rows = self.live.array(r)
            ranks = int(self.live.fleet.call["ranks"][0])
            for k in range(r * ranks, (r + 1) * ranks):
                of_rank = rows if ranks == 1 else rows[self.live.fleet.requests["rank"][rows] == k - r * ranks]
                if events := [*self._removed(k), *self._stored(r, k, of_rank)]:
                    self.publishers[k].publish(events)
        self._steps[:], self._ends[:] = steps, ends

    def _removed(self, k: int) -> list[BlockRemoved]:
        told = self._told[k]
        gone = np.flatnonzero((told != 0) & (told != self.live.fleet.blocks["hash"][k]))
        hashes = told[gone].view("u8").tolist()
        told[gone] = 0
        return [BlockRemoved(hashes, "GPU", 0)] if hashes else []

    def _stored(self, r: int, k: int, rows: np.ndarray) -> list[BlockStored]:
        fleet, size = self.live.fleet, int(self.live.fleet.knobs["block_size"][r])
        requests, held, told = fleet.requests, fleet.blocks["hash"][k], self._told[k]
        ended = requests["status"][rows] == COMPLETED
        hashed = np.where(ended | (requests["table"][rows] >= 0), requests["num_hashed_blocks"][rows], 0)
        notes = self.live.notes["told"]
        before = np.minimum(notes[rows], hashed)
        notes[rows] = hashed
        events = []
        for i in np.flatnonzero(hashed > before).tolist():
            entry = self.live.rows[r][int(rows[i])]
            if requests["table"][rows[i]] < 0:
                events += self._last(k, requests[rows[i]], entry, int(before[i]), size)
                continue
            table = fleet.tables[k][requests["table"][rows[i]]]
            first, end = int(before[i]), int(hashed[i])
            own = table[first:end]
            new = np.flatnonzero((own > 0) & (told[own] != held[own]))
            for run in np.split(new, np.flatnonzero(np.diff(new) > 1) + 1) if len(new) else ():
                blocks, begin = own[run], first + int(run[0])
                told[blocks] = held[blocks]
                adapter = entry.model if entry.model in self.live.adapters else None
                keys = [((adapter,) if adapter else ()) + ((entry.salt,) if entry.salt and b == 0 else ())
                        for b in range(begin, begin + len(run))]  # fmt: skip
                parent = int(held[table[begin - 1]]) % 2**64 if begin else None
                ids = entry.ids(begin * size, (begin + len(run)) * size)
                hashes = held[blocks].astype("u8").tolist()
                extra = [key or None for key in keys] if any(keys) else None
                event = BlockStored(hashes, parent, ids, size, 1 if adapter else None, "GPU", adapter, extra, 0)
                events.append(event)
            self._tails[int(rows[i])] = int(held[table[end - 1]]) % 2**64
        for row in rows[ended].tolist():
            self._tails.pop(row, None)
        return events

    def _last(self, k: int, request: np.void, entry: Row, first: int, size: int) -> list[BlockStored]:
        """The block that a request filled in the step that ended it, whose table is gone: its hash is the request's."""
        key, told = request["chain"], self._told[k]
        new = np.flatnonzero((self.live.fleet.blocks["hash"][k] == key) & (told != key))
        if int(request["num_hashed_blocks"]) != first + 1 or not len(new):
            return []
        told[new[0]] = key
        adapter = entry.model if entry.model in self.live.adapters else None
        ids, parent = entry.ids(first * size, (first + 1) * size), self._tails.get(entry.row)
        extra: list[tuple[str, ...] | None] | None = [(adapter,)] if adapter else None
        lora = 1 if adapter else None
        return [BlockStored([int(key) % 2**64], parent, ids, size, lora, "GPU", adapter, extra, 0)]

    def cleared(self, r: int) -> None:
        """A replica's cache is empty."""
        ranks = int(self.live.fleet.call["ranks"][0])
        for k in range(r * ranks, (r + 1) * ranks):
            self._told[k] = 0
            self.publishers[k].publish([AllBlocksCleared()])

    def sources(self, replicas: list[int]) -> dict[str, dict[str, Any]]:
        """What vLLM's /kv_event_sources says, by rank."""
        ranks = int(self.live.fleet.call["ranks"][0])
        return {
            str(i): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": one.endpoint,
                "replay_endpoint": one.replay_endpoint,
                "buffer_steps": BUFFERED,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": one.topic,
            }
            for i, one in enumerate(self.publishers[r * ranks + k] for r in replicas for k in range(ranks))
        }

    async def close(self) -> None:
        """Ends what was begun."""
        for task in self._replays:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._replays, return_exceptions=True)
        for one in self.publishers:
            one.close()
        self._context.destroy(0)
