"""Encode replicas: the images of a prompt are encoded here, each by itself, and their embeddings go over the link."""

from typing import TYPE_CHECKING

import numpy as np

from ..config.cluster import Cluster
from ..engine.compiled.state import COMPLETED

if TYPE_CHECKING:
    from .front import Front


class Encode:
    """What comes before the front door for requests with images. A row of the fleet is one image."""

    def __init__(self, front: "Front", spec: Cluster):
        self.front = front
        n = len(front.requests)
        numbers = spec.ranges[-1]
        self.pool = front.make_pool(spec.encode.router, list(numbers), 0)
        self.images = front.requests.images.tolist()
        """of each request"""
        patches = int(front.fleet.knobs["max_model_len"][numbers[0]]) - 1
        total = sum(self.images)
        first = front.fleet.add(patches, 1, 1, total)
        rows = iter(range(first, first + total))
        self.rows = [[next(rows) for _ in range(m)] for m in self.images]
        """of each request's images, of its last attempt"""
        self.request_of = {row: i for i, mine in enumerate(self.rows) for row in mine}
        front.owner |= self.request_of
        self.left = [0] * n
        """images of each request that are not encoded yet"""
        self.began = np.full(n, np.nan)
        self.arrived = np.full(n, np.nan)
        """f8[n]: when the embeddings of each had come over the link"""
        self.tokens = patches // spec.encode.encoder.patches_per_token
        self.latency = spec.transfer.latency
        self.bytes = 0.0
        self.encoded = 0

    def begin(self, i: int, time: float) -> None:
        """Request i's images go to encode replicas; it is lost if there are none."""
        fleet, pool = self.front.fleet, self.pool
        allowed = pool.allowed()
        if allowed is not None and not allowed.any():
            self.front.lose(i, time)
            return
        self.began[i], self.left[i] = time, self.images[i]
        for k, row in enumerate(self.rows[i]):
            if fleet.requests["replica"][row] >= 0:  # of an earlier attempt
                row = self.rows[i][k] = fleet.add_like(row)
                self.request_of[row] = self.front.owner[row] = i
            fleet.send(row, pool.choose(i, allowed), time)

    def finished(self, i: int, row: int) -> None:
        """One image has been encoded; the last one lets the embeddings go."""
        self.encoded += 1
        self.left[i] -= 1
        if not self.left[i]:
            self.front.clock.process(self._send(i, self.front.token[i]))

    def _send(self, i: int, token: int):
        front = self.front
        if self.latency:
            yield front.clock.at(front.clock.now + self.latency)
        site = front.sites[front.pool_of_request(i).members[0]]
        size = self.images[i] * self.tokens * site.embedding_bytes
        self.bytes += size
        yield front.link.transfer(size)
        if front.is_current(i, token):
            self.arrived[i] = front.clock.now
            front.enter(i, front.clock.now)

    def withdraw(self, i: int, time: float) -> None:
        """Request i's attempt has ended."""
        requests = self.front.fleet.requests
        for row in self.rows[i]:
            if requests["replica"][row] >= 0 and requests["status"][row] < COMPLETED:
                self.front.fleet.abort(row, time)

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
