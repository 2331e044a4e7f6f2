"""Prompts as paths in a tree of prefixes, and a router's own, approximate view of which replica has which prefix."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import numpy as np

from ..workload.requests import Requests, own_text


class PrefixTree:
    """Every prefix of every prompt is a node; `tokens[node]` is its length.

    `own[i]` is the node that ends with all that request i said and generated, if a later prompt contains that.
    """

    def __init__(self, requests: Requests):
        self.tokens: list[int] = []
        self.own: dict[int, int] = {}
        self._paths: list[tuple[list[int], int]] = []
        """nodes of each request: the first so many of a list, which turns of a session, for one, have in common"""
        if requests.segments is None:
            self._paths = [([], 0)] * len(requests)
            return
        named = {name: i for i, name in enumerate(own_text(requests.request_id).tolist())}
        nodes: dict[tuple[int, int, int], int] = {}
        begins, counts, ids, lengths = (column.tolist() for column in requests.segments)
        paths: dict[int, list[int]] = {}
        for first, count in zip(begins, counts, strict=True):
            path = paths.setdefault(first, [])
            for place in range(first + len(path), first + count):
                parent, name, tokens = path[-1] if path else -1, ids[place], lengths[place]
                node = nodes.setdefault((parent, name, tokens), len(nodes))
                if node == len(self.tokens):
                    self.tokens.append(tokens + (self.tokens[parent] if path else 0))
                    if name in named:
                        self.own[named[name]] = node
                path.append(node)
            self._paths.append((path, count))

    def path(self, i: int) -> Iterable[int]:
        """Request i's prefixes, the shortest first."""
        return islice(*self._paths[i])


class PrefixIndex:
    """Which replica was sent which prefix, as a router remembers it: LRU over as many tokens as its KV pool holds.

    The replicas may have evicted it since: that is what makes the index approximate.
    """

    def __init__(self, tree: PrefixTree, capacity: np.ndarray):
        self._tree = tree
        self._capacity = capacity.tolist()
        """tokens of each replica's KV pool"""
        self._holders = [0] * len(tree.tokens)
        """replicas of each node, one bit each"""
        self._recent: list[OrderedDict[int, int]] = [OrderedDict() for _ in self._capacity]
        """nodes of each replica with their own tokens, least recently used first"""
        self._size = [0] * len(self._capacity)

    @property
    def sizes(self) -> np.ndarray:
        """i8[k]: tokens that the router believes to be cached in each replica."""
        return np.array(self._size)

    @property
    def held(self) -> set[int]:
        """Nodes that the router believes to be cached somewhere."""
        return set().union(*self._recent)

    def overlap(self, i: int) -> np.ndarray:
        """f8[k]: tokens of request i's prompt that the router believes to be cached in each replica."""
        self._grow()
        overlap = np.zeros(len(self._capacity))
        alive = (1 << len(self._capacity)) - 1
        length = 0
        for node in self._tree.path(i):
            still = alive & self._holders[node]
            if still != alive:
                if length:
                    overlap[_bits(alive ^ still)] = length
                alive = still
            if not alive:
                return overlap
            length = self._tree.tokens[node]
        overlap[_bits(alive)] = length
        return overlap

    def add(self, i: int, replica: int) -> None:
        """Request i was sent to a replica: its prefixes will be there."""
        self._grow()
        recent, bit, before = self._recent[replica], 1 << replica, 0
        path = list(self._tree.path(i))
        for node in [*path, self._tree.own[i]] if i in self._tree.own else path:
            tokens = self._tree.tokens[node]
            if node in recent:
                recent.move_to_end(node)
            else:
                recent[node] = tokens - before
                self._holders[node] |= bit
                self._size[replica] += tokens - before
            before = tokens
        while self._size[replica] > self._capacity[replica]:
            node, tokens = recent.popitem(last=False)
            self._holders[node] &= ~bit
            self._size[replica] -= tokens

    def _grow(self) -> None:
        """Requests may have come since."""
        if len(self._holders) < len(self._tree.tokens):
            self._holders += [0] * (len(self._tree.tokens) - len(self._holders))

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""
        for node in self._recent[replica]:
            self._holders[node] &= ~(1 << replica)
        self._recent[replica].clear()
        self._size[replica] = 0


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
