"""Encode replicas: the images of a prompt are encoded here, each by itself, and their embeddings go over the link."""

from typing import Protocol

import numpy as np

from ..config.cluster import EncodePool
from ..engine.compiled.state import COMPLETED
from .link import Link
from .pools import Pools


class Attempts(Protocol):
    """What clients try, at the front door behind which the answering replicas are."""

    owner: dict[int, int]
    token: list[int]

    def is_current(self, i: int, token: int) -> bool:
        """Whether the attempt that had this token still goes on."""

    def enter(self, i: int, time: float) -> None:
        """Request i, with its embeddings, stands at the front door."""

    def lose(self, i: int, time: float) -> None:
        """Request i's attempt has been lost."""


class Encode:
    """What comes before the front door for requests with images. A row of the fleet is one image."""

    def __init__(self, spec: EncodePool, latency: float, made: Pools, link: Link, door: Attempts):
        self.fleet, self.clock, self.link, self.door = made.fleet, made.clock, link, door
        self.pool = made.make(spec.router, list(made.spec.ranges[-1]), 0)
        requests = made.requests
        n = len(requests)
        self.images: list[int] = [0] * n if requests.images is None else requests.images.tolist()
        """of each request"""
        patches = int(self.fleet.knobs["max_model_len"][self.pool.members[0]]) - 1
        total = sum(self.images)
        first = self.fleet.add(patches, 1, 1, total)
        rows = iter(range(first, first + total))
        self.rows = [[next(rows) for _ in range(m)] for m in self.images]
        """of each request's images, of its last attempt"""
        self.request_of = {row: i for i, mine in enumerate(self.rows) for row in mine}
        door.owner |= self.request_of
        self.left = [0] * n
        """images of each request that are not encoded yet"""
        self.began = np.full(n, np.nan)
        self.arrived = np.full(n, np.nan)
        """f8[n]: when the embeddings of each had come over the link"""
        width = np.array([made.sites[answering.members[0]].embedding_bytes for answering in made.answering])
        self.sizes = np.array(self.images) * (patches // spec.encoder.patches_per_token) * width[made.which]
        """f8[n]: bytes of each request's embeddings"""
        self.latency = latency
        self.bytes = 0.0
        self.encoded = 0

    def begin(self, i: int, time: float) -> None:
        """Request i's images go to encode replicas; it is lost if there are none."""
        fleet, pool = self.fleet, self.pool
        allowed = pool.allowed()
        if allowed is not None and not allowed.any():
            self.door.lose(i, time)
            return
        self.began[i], self.arrived[i], self.left[i] = time, np.nan, self.images[i]  # not when an earlier attempt's had
        for k, row in enumerate(self.rows[i]):
            if fleet.requests["replica"][row] >= 0:  # of an earlier attempt
                row = self.rows[i][k] = fleet.add_like(row)
                self.request_of[row] = self.door.owner[row] = i
            fleet.send(row, pool.choose(i, allowed), time)

    def finished(self, i: int, row: int) -> None:
        """One image has been encoded; the last one lets the embeddings go."""
        self.encoded += 1
        self.left[i] -= 1
        if not self.left[i]:
            self.clock.process(self._send(i, self.door.token[i]))

    def _send(self, i: int, token: int):
        clock = self.clock
        if self.latency:
            yield clock.at(clock.now + self.latency)
        size = self.sizes[i]
        self.bytes += size
        yield self.link.transfer(size)
        if self.door.is_current(i, token):
            self.arrived[i] = clock.now
            self.door.enter(i, clock.now)

    def withdraw(self, i: int, time: float) -> None:
        """Request i's attempt has ended."""
        requests = self.fleet.requests
        for row in self.rows[i]:
            if requests["replica"][row] >= 0 and requests["status"][row] < COMPLETED:
                self.fleet.abort(row, time)

    def columns(self) -> dict[str, np.ndarray]:
        """What requests.csv says of each request."""
        return {"images": np.array(self.images), "encode_ms": (self.arrived - self.began) * 1e3}

    def figures(self) -> dict:
        """JSON-ready."""
        seconds = (self.arrived - self.began)[~np.isnan(self.arrived)]
        return {
            "images": self.encoded,
            "embedding_bytes": self.bytes,
            "mean_encode_ms": float(seconds.mean()) * 1e3 if len(seconds) else None,
        }
