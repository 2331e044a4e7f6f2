"""Laws of kernels: seconds as a function of shape, with a handful of numbers per device, class and dtype.

    t = (fixed + serial + smooth_max(memory, compute)) x correction

A law's numbers are an OperatorEfficiency's: bandwidth, flops, fixed, softness, and `terms` (config/hardware.TERMS). Its
arguments are numbers or arrays that broadcast. `infersim calibrate kernels` fits them; cost/roofline.py prices with
them.
"""

from typing import NamedTuple

import numpy as np

from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.engine.compiled.law import log2
from infersim.engine.compiled.state import QUERY_TILE

# Heights and widths of the output tiles that GEMM kernels of cuBLAS and CUTLASS have, and ways to split K.
TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128))
SPLITS = (2, 4, 8, 16)
WHOLE_TILE = 128 * 256
STEP = 64
"""rows of M between which no tile count changes"""
SPLIT_ROWS = 1024
"""taller matrices fill the SMs without a split along K"""


def gemm_compute(shares: OperatorEfficiency, hardware: Hardware, peak: float, m, n, k) -> np.ndarray:
    """Seconds of a GEMM's arithmetic: waves of output tiles over the SMs, of the best tile and split along K.

    A wave takes what its tile takes on one SM; the last wave costs as much as a full one.
    """
    if np.ndim(m) and not np.ndim(n) and not np.ndim(k):  # no tile count changes within a step of rows
        steps = np.ceil(np.asarray(m, dtype=float) / STEP).astype(int)
        best = _waves(shares, hardware, peak, np.arange(steps.max(initial=0) + 1) * float(STEP), n, k)[steps]
    else:
        best = _waves(shares, hardware, peak, m, n, k)
    m, n, k, best = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (m, n, k, best)))
    low = m <= SPLIT_ROWS
    if low.any():
        best = best.copy()
        best[low] = np.minimum(best[low], _split(shares, hardware, peak, m[low], n[low], k[low]))
    return best


def _column(shares: OperatorEfficiency, hardware: Hardware, peak: float, height: int, width: int) -> float:
    """Seconds of one tile and column of K on one SM."""
    slower = max(1.0, WHOLE_TILE / (height * width)) ** shares.terms["small_tile"]
    return 2.0 * height * width * slower / (shares.flops * peak / (hardware.num_sms or 1))


def _waves(shares: OperatorEfficiency, hardware: Hardware, peak: float, m, n, k) -> np.ndarray:
    """Seconds of the best tile without a split."""
    times = [
        np.ceil(np.ceil(m / height) * np.ceil(n / width) / (hardware.num_sms or 1))
        * _column(shares, hardware, peak, height, width)
        for height, width in TILES
    ]
    return np.minimum.reduce(times) * (k + shares.terms["tile_depth"])


def _split(shares: OperatorEfficiency, hardware: Hardware, peak: float, m, n, k) -> np.ndarray:
    """Seconds of the best tile and split along K."""
    partial = shares.terms["split_traffic"] * 8.0 * m * n / hardware.memory_bandwidth
    tiles = [
        (np.ceil(m / height) * np.ceil(n / width), _column(shares, hardware, peak, height, width))
        for height, width in TILES
    ]
    times = []
    for split in SPLITS:
        waves = [np.ceil(count * (split / (hardware.num_sms or 1))) * column for count, column in tiles]
        depth = k / split + shares.terms["tile_depth"]
        times.append(np.minimum.reduce(waves) * depth + split * partial)
    return np.minimum.reduce(times)


def quantization(shares: OperatorEfficiency, hardware: Hardware, m, k, moved: float) -> np.ndarray:
    """Seconds of quantising m rows of k inputs before the GEMM; `moved`: bytes read and written per element.

    At the class's own bandwidth where it was measured without.
    """
    share = shares.terms.get("quantization_bandwidth", shares.bandwidth)
    per_row = k * moved / (share * hardware.memory_bandwidth) + shares.terms.get("quantization_row", 0.0)
    return m * per_row * (moved > 0.0)


def gemm_coordinates(m, n, k) -> dict[str, np.ndarray]:
    """Where a GEMM of m tokens, n outputs and k inputs stands in its class's correction."""
    return {"m": log2(m), "n": log2(n), "k": log2(k)}


class Attention(NamedTuple):
    """Seconds per sum of a step (operators.Sums) of one attention kernel.

    memory = kv * keys + activations * queries; compute = pair * pairs + query * queries + tile * query tiles, where a
    decode's pairs are its keys and its queries its sequences.
    """

    kv: float
    activations: float
    pair: float
    query: float
    tile: float


def attention(
    shares: OperatorEfficiency,
    hardware: Hardware,
    peak: float,
    *,
    pair_flops,
    key_bytes,
    query_bytes,
    heads,
    kv_heads,
    head_dim,
) -> Attention:
    """The coefficients of an attention kernel from its FLOPs per pair, bytes per key and query, and its heads."""
    terms = shares.terms
    narrow = (np.minimum(head_dim, 128.0) / 128.0) ** terms.get("narrow_head", 0.0)
    pair = pair_flops / (shares.flops * narrow * peak)
    per_byte = 1.0 / (shares.bandwidth * hardware.memory_bandwidth)
    return Attention(
        kv=key_bytes * per_byte,
        activations=query_bytes * per_byte + kv_heads * terms.get("sequence_time", 0.0),
        pair=pair,
        query=pair * terms.get("query_keys", 0.0),
        tile=pair * terms.get("tile_keys", 0.0) * QUERY_TILE * kv_heads / heads,
    )


def attention_coordinates(phase: str, hardware: Hardware, queries, pairs, heads, kv_heads, head_dim) -> dict:
    """Where a step stands in an attention class's correction.

    work: of a prefill query rows per SM, of a decode sequences x key heads; keys: the mean number that a query sees.
    """
    unit = heads / (hardware.num_sms or 1) if phase == "prefill" else kv_heads
    return {
        "work": log2(queries) + np.log2(unit),
        "keys": log2(pairs / queries),
        "head_dim": log2(np.minimum(head_dim, 256.0)),
        "group": log2(heads / kv_heads),
    }


CUSTOM_BYTES = 8 * 2**20
"""messages from this size on go through NCCL (vLLM CustomAllreduce.max_size)"""


PAIRED_RANKS = 4
"""up to so many ranks vLLM's own kernel does all that it can; more leave the sum to the switches where that is quicker
(SymmMemCommunicator, multimem_all_reduce: 6 and 8)"""


def all_reduce(shares: OperatorEfficiency, hardware: Hardware, ranks, size) -> np.ndarray:
    """Seconds of summing `size` bytes over the ranks of one node, and leaving the sum on each.

    vLLM's own kernel: every rank reads all of the others' (one shot), or its part of theirs and then their sums (two
    shots, two synchronisations), over links that join all, or between two devices. Else NCCL. Switches that add up send
    each rank's data once up and its part of the sum once down, with a synchronisation before and after.
    """
    n, size = np.broadcast_arrays(np.asarray(ranks, dtype=float), np.asarray(size, dtype=float))
    link, ring = link_bandwidth(hardware, n), 2.0 * (n - 1.0) / n
    one = shares.fixed + (n - 1.0) * size / (shares.bandwidth * link)
    two = 2.0 * shares.fixed + ring * size / (shares.bandwidth * link)
    terms = shares.terms
    library = terms["library_fixed"] + terms["hop"] * (n - 2.0) + ring * size / (terms["library_bandwidth"] * link)
    own = (size < CUSTOM_BYTES) & ((n <= hardware.link.domain_size) | (n == 2))
    seconds = np.where(own, np.minimum(one, two), library)
    if "switch_fixed" in terms and hardware.link.in_switch_reduction:
        switch = terms["switch_fixed"] + (1.0 + 1.0 / n) * size / (terms["switch_bandwidth"] * link)
        seconds = np.where(n > PAIRED_RANKS, np.minimum(seconds, switch), seconds)
    return seconds


def exchange(shares: OperatorEfficiency, hardware: Hardware, ranks, size) -> np.ndarray:
    """Seconds of an all-gather, reduce-scatter or all-to-all of `size` bytes per rank: each sends (n - 1) / n of it.

    NCCL takes the quicker of its protocols: low latency (flags beside the data), or simple, for bulk.
    """
    n, terms = np.asarray(ranks, dtype=float), shares.terms
    seconds = (n - 1.0) / n * size / link_bandwidth(hardware, n)  # at the link's own rate
    quick = shares.fixed + seconds / terms["quick_bandwidth"]
    bulk = terms["bulk_fixed"] + seconds / shares.bandwidth
    return terms["hop"] * (n - 2.0) + np.minimum(quick, bulk)


def link_bandwidth(hardware: Hardware, ranks) -> np.ndarray:
    """Bytes per second and direction between so many devices of a node: over the link if it joins them, else PCIe;
    a link that joins one device is what all of the node share, and rules."""
    link = hardware.link
    outside = link.bandwidth if link.domain_size == 1 else hardware.pcie_bandwidth or link.bandwidth
    return np.where(np.asarray(ranks) <= link.domain_size, link.bandwidth, outside)


def collective_coordinates(ranks, size) -> dict[str, np.ndarray]:
    """Where a collective stands in its class's correction."""
    return {"size": log2(size), "ranks": log2(ranks)}


def moe_coordinates(routed, touched, hidden, inter) -> dict[str, np.ndarray]:
    """Where fused experts stand in their class's correction."""
    return {"tokens": log2(np.maximum(routed / touched, 1 / 64)), "experts": log2(touched), "hidden": log2(hidden),
            "inter": log2(inter)}  # fmt: skip
