"""Memory traffic and arithmetic of attention kernels by what they keep on the chip (FlashAttention, arXiv 2205.14135).

Amounts are elements and FLOPs of one head: N queries and keys of dimension d, no causal mask. sram is the number of
elements that fit the on-chip memory of a streaming multiprocessor (the paper's M).
"""

import math

from infersim.config.engine import AttentionKernel
from infersim.config.hardware import Hardware
from infersim.config.published import published

KERNELS: tuple[AttentionKernel, ...] = ("standard", "flash1", "flash2", "flash3")
KEY_TILE = 64  # keys and values of a tile that flash2 and flash3 stream past their queries

# Passes over the N x N matrix beyond reading and writing it for the products and the softmax (4 forward, 7 backward):
# a mask reads and writes the scores once forward; dropout reads and writes them, and a byte per element, each way.
MASK_PASSES, DROPOUT_PASSES = (2.0, 0.0), (2.5, 2.5)


def achieved(kernel: AttentionKernel, generation: str) -> float:
    """Published share of peak of long sequences on devices of a generation that was measured."""
    figures = published().attention_kernels[generation][kernel]
    return figures.achieved / figures.peak


def sram_elements(hardware: Hardware, element_bytes: float = 2) -> float:
    """Elements that the shared memory of one multiprocessor holds; ValueError where the profile does not tell."""
    if hardware.shared_memory_per_sm is None:
        raise ValueError(f"{hardware.name} has no shared_memory_per_sm")
    return hardware.shared_memory_per_sm / element_bytes


def block_sizes(d: int, sram: float) -> tuple[int, int]:
    """B_c keys and B_r queries of a tile of FlashAttention (algorithm 1, line 1)."""
    keys = math.ceil(sram / (4 * d))
    return keys, min(keys, d)


def forward_elements(kernel: AttentionKernel, n: int, d: int, sram: float) -> float:
    """Elements read and written in the forward pass.

    standard (algorithm 0): Q, K, V and O once, and the N x N matrix four times. flash1 (algorithm 1): K and V once; per
    tile of keys Q and O read, O written. flash2, flash3: Q and O once; per tile of queries K and V read.
    """
    if kernel == "standard":
        return 4.0 * n * d + 4.0 * n * n
    if kernel == "flash1":
        return (2 + 3 * math.ceil(n / block_sizes(d, sram)[0])) * float(n * d)
    return (2 + 2 * math.ceil(n / query_tile(d, sram))) * float(n * d)


def backward_elements(kernel: AttentionKernel, n: int, d: int, sram: float) -> float:
    """Elements read and written in the backward pass (algorithms 3 and 4; flash2 and flash3 as algorithm 4)."""
    if kernel == "standard":
        return 8.0 * n * d + 7.0 * n * n
    return (4 + 5 * math.ceil(n / block_sizes(d, sram)[0])) * float(n * d)


def query_tile(d: int, sram: float) -> int:
    """Queries whose tile fits beside one tile of keys and one of values; in steps of 16, at least 16."""
    return max(16, int(sram / d - 2 * KEY_TILE) // 16 * 16)


def forward_flops(n: int, d: int) -> float:
    """Scores and values: the same for every kernel; tiling does not change the square."""
    return 4.0 * n * n * d


def backward_flops(kernel: AttentionKernel, n: int, d: int) -> float:
    """Four products, and a fifth that recomputes the scores where they were not stored."""
    return (8.0 if kernel == "standard" else 10.0) * n * n * d


def unfused_passes(mask: bool, dropout: bool) -> float:
    """Passes over the N x N matrix, forward and backward, that mask and dropout add as kernels of their own."""
    return mask * sum(MASK_PASSES) + dropout * sum(DROPOUT_PASSES)


def training_time(kernel: AttentionKernel, n: int, d: int, heads: int, hardware: Hardware, rate: float) -> float:
    """Seconds of forward and backward of `heads` heads in 16 bits: bytes at peak bandwidth, or FLOPs at `rate`."""
    sram = sram_elements(hardware)
    elements = forward_elements(kernel, n, d, sram) + backward_elements(kernel, n, d, sram)
    flops = forward_flops(n, d) + backward_flops(kernel, n, d)
    return heads * max(2 * elements / hardware.memory_bandwidth, flops / rate)
