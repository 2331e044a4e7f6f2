"""A store of KV that all replicas share."""

import numpy as np

from ..config.cluster import KvStore
from ..engine.fleet import Fleet
from .prefixes import PrefixIndex, PrefixTree
from .site import Site


class Store:
    """Which prompts and answers it has; the engine is told how much of a prompt when the request comes to a replica."""

    def __init__(self, spec: KvStore, fleet: Fleet, sites: list[Site], tree: PrefixTree):
        block, self._fleet = np.array([site.block_bytes for site in sites]), fleet
        fleet.knobs["store_latency"], fleet.knobs["store_block_time"] = spec.latency, block / spec.bandwidth
        tokens = spec.size / block[0] * float(fleet.knobs["block_size"][0])
        self.index = PrefixIndex(tree, np.array([tokens]))

    def look_up(self, i: int, row: int) -> None:
        """Row `row` of request i is about to go to a replica."""
        self._fleet.requests["stored_tokens"][row] = int(self.index.overlap(i)[0])
