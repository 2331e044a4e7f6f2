"""Requests that are sent when others have ended: turns of a conversation, answers that agents side by side wait for."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..workload.requests import Requests


class Following:
    """Who waits for whose end."""

    def __init__(self, requests: Requests):
        self.first: Sequence[int] = range(len(requests))
        """the requests that wait for no other"""
        self._followers: dict[int, list[tuple[int, float]]] = {}
        """of each request those that wait for its end, and s beyond it"""
        self._waits: dict[int, int] = {}
        """how many ends each that waits for several has yet to see"""
        self._due: dict[int, float] = {}
        """and when it would be sent for those that it has seen"""
        if requests.after is not None:
            self.first = np.flatnonzero(requests.after < 0).tolist()
            assert requests.delay is not None  # given with `after`
            for i in np.flatnonzero(requests.after >= 0).tolist():
                self._followers.setdefault(int(requests.after[i]), []).append((i, float(requests.delay[i])))
            for i, before, delay in requests.joins:
                self._followers.setdefault(before, []).append((i, delay))
                self._waits[i] = self._waits.get(i, 1) + 1

    def __bool__(self) -> bool:
        return bool(self._followers)

    def after(self, i: int, time: float) -> Iterator[tuple[int, float]]:
        """Request i has ended: those that wait for no other any more, and when each is sent (s)."""
        for follower, delay in self._followers.get(i, ()):
            at = time + delay
            if follower in self._waits:
                self._due[follower] = at = max(at, self._due.get(follower, 0.0))
                self._waits[follower] -= 1
                if self._waits[follower]:
                    continue
            yield follower, at
