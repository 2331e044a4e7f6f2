"""Collectives as latency and bandwidth: bytes on the wire by algorithm, phases, and the links that they cross.

    t = phases * fixed + bytes on the wire / achieved bandwidth, of the algorithm that is fastest for the size

A message of S bytes (what the collective leaves on each of n ranks; of an all-to-all, what each rank has) makes a rank
send, and receive, `wire_factor` x S. Since the bytes are the algorithm's own, no share of the link exceeds 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.config.published import published

from .correction import factor
from .efficiency import efficiency
from .laws import PAIRED_RANKS, all_reduce, collective_coordinates, exchange, link_bandwidth

ALGORITHMS = {
    "all_reduce": ("one_shot", "two_shot"),
    "all_gather": ("direct",),
    "reduce_scatter": ("direct",),
    "all_to_all": ("direct",),
    "send": ("direct",),
}
PHASES = {"one_shot": 1, "two_shot": 2, "ring": 2, "in_switch": 2, "direct": 1}
"""synchronisations of all ranks; in aiconfigurator's custom_allreduce (H100, 8 GPUs, graph) the two-shot kernel, which
vLLM takes from 256 KiB on, starts at twice the 4.6 us of the one-shot kernel"""

# A node's devices reach others through one network card each, 400 Gbit/s (NVIDIA's DGX and HGX H100 and B200 reference
# designs). Shares and latency are assumed: NCCL over InfiniBand is commonly quoted at 80 to 90 % and 10 to 20 us.
NETWORK_BANDWIDTH, NETWORK_SHARE, NETWORK_FIXED = 50e9, 0.8, 15e-6


def wire_factor(kind: str, algorithm: str, ranks: int) -> float:
    """Bytes that a rank sends per byte of the message.

    all_reduce: one_shot, every rank sends all to all others; two_shot and ring, a reduce-scatter and an all-gather;
    in_switch (NVLink SHARP), once up to be reduced and its part once more.
    """
    n = ranks
    if kind == "send":
        return 1.0
    if kind == "all_reduce":
        return {"one_shot": n - 1.0, "two_shot": 2 * (n - 1) / n, "ring": 2 * (n - 1) / n, "in_switch": 1 + 1 / n}[
            algorithm
        ]
    return (n - 1) / n


def joined(hardware: Hardware, ranks: int) -> bool:
    """Whether the scale-up link joins so many devices; if not, they meet over PCIe or a network."""
    return ranks <= hardware.link.domain_size


def node_size(hardware: Hardware) -> int:
    """Devices of one node: what the link joins, and at least the 8 that a host's PCIe does."""
    return max(8, hardware.link.domain_size)


@dataclass(frozen=True)
class Collective:
    """What a device makes of one collective among `ranks`: seconds by size.

    inside: seconds in one node for sizes in bytes; outside: fixed seconds, and seconds per byte, between nodes.
    """

    inside: Callable[[np.ndarray], np.ndarray]
    outside: tuple[float, float] = (0.0, 0.0)

    def seconds(self, size) -> np.ndarray:
        """Seconds for a message of `size` bytes (number or array)."""
        size = np.asarray(size, dtype=float)
        fixed, per_byte = self.outside
        return self.inside(size) + fixed + per_byte * size


def collective(
    hardware: Hardware, kind: str, dtype: str, ranks: int, apart: int = 1, crossing: float = 0.0
) -> Collective:
    """The collective on this device's links; across nodes it has a part inside them and a part between.

    Every `apart`-th device takes part: stages and data-parallel ranks have others between them. DeepEP uses links and
    network at one time: its low-latency all-to-all sends each part straight to its rank, the forwarded one a token once
    to each node, `crossing` bytes for each of the message, and there over the links.
    """
    if kind in ("low_latency_all_to_all", "forwarded_all_to_all"):
        local = min(ranks, node_size(hardware))
        inside = collective(hardware, "all_to_all", dtype, local)
        if local == ranks:
            return inside
        linked = 1.0 if crossing else local / ranks
        fixed = PHASES["ring"] * NETWORK_FIXED
        per_byte = (crossing or 1 - local / ranks) / (NETWORK_SHARE * NETWORK_BANDWIDTH)
        return Collective(lambda size: np.maximum(inside.seconds(size * linked), fixed + per_byte * size))
    shares = efficiency(hardware, kind, dtype)
    local = min(ranks, max(1, node_size(hardware) // apart))
    nodes = -(-ranks // local)
    outside = (0.0, 0.0)
    if nodes > 1:
        # every device exchanges its share of the message with its peers in the other nodes
        between = wire_factor(kind, "ring", nodes) / (NETWORK_SHARE * NETWORK_BANDWIDTH)
        between *= 1.0 if kind in ("all_to_all", "send") else 1.0 / local
        outside = (PHASES["direct" if kind == "send" else "ring"] * NETWORK_FIXED, between)
    if local == 1:
        return Collective(np.zeros_like, outside)
    if "hop" in shares.terms:
        return Collective(lambda size: _calibrated(shares, hardware, kind, local, size), outside)
    if joined(hardware, local):
        bandwidth = shares.bandwidth * hardware.link.bandwidth
        in_switch = kind == "all_reduce" and hardware.link.in_switch_reduction and local > PAIRED_RANKS
        names = (*ALGORITHMS[kind], *(("in_switch",) if in_switch else ()))
        lines = [(PHASES[name] * shares.fixed, wire_factor(kind, name, local) / bandwidth) for name in names]
    else:  # a ring over PCIe
        bandwidth = shares.bandwidth * float(link_bandwidth(hardware, local))
        hops = 2 * (local - 2) if kind == "all_reduce" else max(local - 2, 0)
        lines = [(shares.fixed + hops * published().ring_hop.value, wire_factor(kind, "ring", local) / bandwidth)]
    return Collective(lambda size: np.minimum.reduce([fixed + per_byte * size for fixed, per_byte in lines]), outside)


def _calibrated(shares: OperatorEfficiency, hardware: Hardware, kind: str, ranks: int, size: np.ndarray) -> np.ndarray:
    """Seconds of a class that was calibrated: its law, corrected, and never above the link's rate."""
    size = np.maximum(size, 1.0)
    law = all_reduce if kind == "all_reduce" else exchange
    corrected = law(shares, hardware, ranks, size) * factor(shares.correction, collective_coordinates(ranks, size))
    least = min(wire_factor(kind, algorithm, ranks) for algorithm in (*ALGORITHMS[kind], "in_switch"))
    return np.maximum(corrected, least * size / link_bandwidth(hardware, ranks))
