"""What the prefix caches hold, told over ZMQ as vLLM 0.32 does (vllm/distributed/kv_events.py).

Frames are topic, number (8 bytes, big endian) and a batch in msgpack: [time, events, rank], each event a map. Who has
missed some asks the replay socket for a number and gets all from there on, and a last one numbered -1.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from infersim.config.errors import InputError
from infersim.deployment import Deployment
from infersim.engine.compiled.hashes import SALT_TABLE
from infersim.engine.compiled.state import COMPLETED

from .ask import Row
from .live import Live

SALTS = np.arange(256) * np.int64(SALT_TABLE)
"""by group: what makes a hash of text the hash of a block of it; others are told of the text's"""
EVERY = ("full_attention", "mla_attention")
"""groups that keep all keys: told first, since what the others keep follows on it"""
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
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
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


def _kinds(deployment: Deployment) -> list[tuple[str, int | None]]:
    """vLLM's name of each group of a model's layers, and its window."""
    kinds = {layer.attention.kind for layer in deployment.model.layers}
    every = EVERY["mla" in kinds]
    some = "chunked_local_attention" if "chunk" in kinds else "sliding_window"
    named = {0: (every, None), 1: ("mamba", None)}
    return [
        named.get(group.window, (some, group.window if some == "sliding_window" else None))
        for group in deployment.memory.kv_groups
        for _ in range(group.tables)
    ]


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
        """what was told that each block holds, 0 for nothing, and ..."""
        self._groups = np.zeros(self._told.shape, "u1")
        """... of which group, by its number"""
        self._kinds = [_kinds(deployment) for deployment in live.deployments]
        self._order = [
            sorted(range(len(one)), key=[kind not in EVERY for kind, _ in one].__getitem__) for one in self._kinds
        ]
        self._tails: dict[int, int] = {}
        """of each row that has not ended: the hash of its text up to the last block that was told of"""
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

    def _removed(self, k: int) -> Iterator[BlockRemoved]:
        told = self._told[k]
        gone = np.flatnonzero((told != 0) & (told != self.live.fleet.blocks["hash"][k]))
        if len(gone):
            groups, hashes = self._groups[k][gone], (told[gone] ^ SALTS[self._groups[k][gone]]).view("u8")
            told[gone] = 0
            for group in np.unique(groups).tolist():
                yield BlockRemoved(hashes[groups == group].tolist(), "GPU", group)

    def _stored(self, r: int, k: int, rows: np.ndarray) -> Iterator[BlockStored]:
        fleet = self.live.fleet
        requests, held = fleet.requests, fleet.blocks["hash"][k]
        ended = requests["status"][rows] == COMPLETED
        hashed = np.where(ended | (requests["table"][rows] >= 0), requests["num_hashed_blocks"][rows], 0)
        notes = self.live.notes["told"]
        before = np.minimum(notes[rows], hashed)
        notes[rows] = hashed
        count, stride = (int(fleet.schedulers[name][k]) for name in ("num_tables", "table_stride"))
        for i in np.flatnonzero(hashed > before).tolist():
            request, first, end = requests[rows[i]], int(before[i]), int(hashed[i])
            entry, chain = self.live.rows[r][int(rows[i])], int(request["chain"])
            if request["table"] >= 0:
                tables = fleet.tables[k][request["table"]][: count * stride].reshape(count, stride)[:, first:end]
                keys = np.where(tables > 0, held[tables], 0)
            elif end == first + 1:  # the block that it filled in the step that ended it; its table is gone
                tables = np.array([[self._find(k, chain ^ salt)] for salt in SALTS[:count].tolist()])
                keys = np.where(tables > 0, (chain ^ SALTS[:count])[:, None], 0)
            else:
                continue
            chains = np.where(keys, keys ^ SALTS[:count, None], 0)
            text = chains[(chains != 0).argmax(axis=0), np.arange(end - first)]
            parents = [self._tails.get(entry.row) if first else None, *(int(one) % 2**64 for one in text[:-1])]
            new = (keys != 0) & (self._told[k][tables] != keys)
            for group in self._order[r]:
                places = np.flatnonzero(new[group])
                self._told[k][tables[group, places]] = keys[group, places]
                self._groups[k][tables[group, places]] = group
                for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else ():
                    if parents[int(run[0])] == 0:  # no group kept the text before it: nobody could find it by its text
                        self._told[k][tables[group, run]] = 0
                        continue
                    hashes = text[run].view("u8").tolist()
                    yield self._event(r, entry, hashes, parents[int(run[0])], first + int(run[0]), group)
            self._tails[entry.row] = chain % 2**64
        for row in rows[ended].tolist():
            self._tails.pop(row, None)

    def _event(self, r: int, entry: Row, hashes: list[int], parent: int | None, first: int, group: int) -> BlockStored:
        """Blocks of a request from its block `first` on."""
        size, adapter = int(self.live.fleet.knobs["block_size"][r]), entry.model
        end, kind, window = first + len(hashes), *self._kinds[r][group]
        lora = (adapter,) if adapter in self.live.adapters else ()
        keys = [(*lora, *((entry.salt,) if entry.salt and not b else ())) or None for b in range(first, end)]
        return BlockStored(
            hashes,
            parent,
            entry.ids(first * size, end * size),
            size,
            1 if lora else None,
            "GPU",
            adapter if lora else None,
            keys if any(keys) else None,
            group,
            kind,
            window,
        )

    def _find(self, k: int, key: int) -> int:
        """A block that has this hash and was not told of, or 0."""
        blocks = self.live.fleet.blocks[k]
        b = int(blocks["bucket"][key & (len(blocks) - 1)])
        while b and (int(blocks["hash"][b]) != key or int(self._told[k][b]) == key):
            b = int(blocks["chain"][b])
        return b

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
