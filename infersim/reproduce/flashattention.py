"""FlashAttention 1, 2, 3: Dao et al. 2022 (arXiv 2205.14135), Dao 2023 (2307.08691), Shah et al. 2024 (2407.08608)."""

import numpy as np

from infersim.config.hardware import load_hardware
from infersim.cost.attention_io import (
    ACHIEVED,
    KERNELS,
    backward_elements,
    backward_flops,
    block_sizes,
    forward_elements,
    forward_flops,
    sram_elements,
    unfused_passes,
)

from .claims import CLOSED_FORM, SIMULATION, Claim, relation, share_holding

TWO_WAYS = "Two Ways to Go Faster (notes)"
NOTES = "The Papers Behind Modern Inference Optimisation (notes)"
FLASH1 = "Dao et al. 2022, FlashAttention"
FLASH2 = "Dao 2023, FlashAttention-2"
FLASH3 = "Shah et al. 2024, FlashAttention-3"

# Figure 2: GPT-2 medium, forward and backward, on an A100
N, D, HEADS = 1024, 64, 16 * 64
SRAM = 192 * 1024 / 2  # elements; the size used is not stated, an A100 multiprocessor has 192 KiB
FLASH1_CAUSAL = 70e12  # FLOP/s, FlashAttention-2 README, A100, causal, head dimension 64, 1024 tokens


def total_gigabytes(kernel: str) -> float:
    elements = forward_elements(kernel, N, D, SRAM) + backward_elements(kernel, N, D, SRAM)
    if kernel == "standard":
        elements += unfused_passes(mask=True, dropout=True) * N * N
    return HEADS * elements * 2 / 1e9


def _flops_ratio() -> float:
    flash, standard = (forward_flops(N, D) + backward_flops(kernel, N, D) for kernel in ("flash1", "standard"))
    return flash / standard


def _runtimes() -> tuple[float, float]:
    """ms: standard moves its bytes at what a stream reaches; flash computes at its published rate, half for causal."""
    a100 = load_hardware("a100-sxm-40gb")
    standard = total_gigabytes("standard") * 1e9 / (0.849 * a100.memory_bandwidth)
    flops = HEADS * (forward_flops(N, D) + backward_flops("flash1", N, D)) / 2
    return standard * 1e3, flops / FLASH1_CAUSAL * 1e3


def _grid() -> list[tuple[int, int, float]]:
    return [(n, d, m) for n in (512, 2048, 8192, 65536) for d in (64, 128) for m in (2**15, 2**16, 2**17) if m <= n * d]


def _standard_order() -> float:
    ratios = [forward_elements("standard", n, d, m) / (n * d + n * n) for n, d, m in _grid()]
    return share_holding(1 <= ratio <= 4 for ratio in ratios)


def _flash_order() -> float:
    ratios = [forward_elements("flash1", n, d, m) / (n * n * d * d / m) for n, d, m in _grid()]
    return share_holding(3 <= ratio <= 20 for ratio in ratios)


def _blocks_fit() -> float:
    """Four tiles of B_c rows fit the memory but for the rounding up, and queries never exceed d."""
    cases = []
    for _, d, m in _grid():
        keys, queries = block_sizes(d, m)
        cases.append(4 * d * (keys - 1) < m and queries <= d and queries <= keys)
    return share_holding(cases)


def _block_sweep() -> float:
    """Traffic falls with the block size, and beyond 256 it no longer binds: the run time is flat."""
    a100 = load_hardware("a100-sxm-40gb")
    seconds, previous, cases = [], np.inf, []
    for block in (64, 128, 256, 512):
        bytes_moved = HEADS * forward_elements("flash1", N, D, 4 * D * block) * 2
        cases.append(bytes_moved < previous)
        previous = bytes_moved
        rate = ACHIEVED["flash1", "ampere"][0] * a100.flops["fp16"]
        seconds.append(max(bytes_moved / a100.memory_bandwidth, HEADS * forward_flops(N, D) / rate))
    return share_holding([*cases, seconds[0] > seconds[2], seconds[2] == seconds[3]])


# --- the notes -------------------------------------------------------------------------------------------------------
def _traffic() -> float:
    grid = [(n, d, m) for n in (1024, 8192, 65536) for d in (64, 128) for m in (2**14, 2**16) if d <= m <= n * d]
    cases = [1 <= forward_elements("standard", n, d, m) / (n * d + n * n) <= 4 for n, d, m in grid]
    return share_holding(
        cases + [3 <= forward_elements("flash1", n, d, m) * m / (n * d) ** 2 <= 20 for n, d, m in grid]
    )


def _sram() -> float:
    small, large = load_hardware("rtx-4090"), load_hardware("h100-sxm")
    return share_holding(
        forward_elements(kernel, 16384, 128, sram_elements(large))
        < forward_elements(kernel, 16384, 128, sram_elements(small))
        for kernel in KERNELS
        if kernel != "standard"
    )


def _quadratic() -> float:
    pairs = [(n, d) for n in (512, 4096, 32768) for d in (64, 128, 256)]
    return share_holding(forward_flops(2 * n, d) == 4 * forward_flops(n, d) for n, d in pairs)


def _more_flops_less_time() -> float:
    a100, cases = load_hardware("a100-sxm-80gb"), []
    for n in (1024, 4096, 16384):
        flops = [backward_flops(kernel, n, 64) for kernel in ("standard", "flash1")]
        times = [
            flops[i] / (ACHIEVED[kernel, "ampere"][0] * a100.flops["bf16"])
            for i, kernel in enumerate(("standard", "flash1"))
        ]
        cases += [flops[1] > flops[0], times[1] < times[0]]
    return share_holding(cases)


def _generations() -> float:
    shares = {key: share for key, (share, _) in ACHIEVED.items()}
    return share_holding(
        [
            shares["flash1", "ampere"] < shares["flash2", "ampere"],
            shares["flash1", "hopper"] < shares["flash2", "hopper"] < shares["flash3", "hopper"],
            abs(shares["flash2", "ampere"] - shares["flash2", "hopper"]) > 0.1,
        ]
    )


def claims() -> tuple[Claim, ...]:
    a100, h100 = load_hardware("a100-sxm-80gb"), load_hardware("h100-sxm")
    return (
        relation("fa1.io.std", FLASH1, _standard_order, "1 to 4 times N d + N^2 over N, d and M"),
        relation("fa1.io.flash", FLASH1, _flash_order, "3 to 20 times N^2 d^2 / M over N, d and M"),
        relation("fa1.alg1.blocks", FLASH1, _blocks_fit, "B_c = ceil(M / 4d), B_r = min(B_c, d)"),
        Claim(
            "fa1.fig2.gflops",
            FLASH1,
            75.2 / 66.6,
            "FLOPs of flash over standard",
            CLOSED_FORM,
            _flops_ratio,
            "the ratio; the absolute numbers are 12 times too small for the workload that the figure states",
        ),
        Claim(
            "fa1.fig2.hbm",
            FLASH1,
            (40.3, 4.4),
            "GB",
            0.10,
            lambda: (total_gigabytes("standard"), total_gigabytes("flash1")),
            "assumed: 192 KiB of SRAM; mask and dropout unfused",
        ),
        Claim(
            "fa1.fig2.runtime",
            FLASH1,
            (41.7, 7.3),
            "ms",
            0.10,
            _runtimes,
            "assumed: causal; flash at its rate in the FlashAttention-2 README",
            why="standard attention is priced as its bytes at 85 % of the A100's 1,555 GB/s, what copies reach;"
            " PyTorch's 40.3 GB in 41.7 ms are 62 %",
        ),
        relation("fa1.fig2mid", FLASH1, _block_sweep, "blocks of 64, 128, 256, 512; the points are only in the figure"),
        Claim(
            "fa2.headline",
            FLASH2,
            (0.73, 0.72),
            "share of peak: forward, training",
            CLOSED_FORM,
            lambda: (230e12 / a100.flops["bf16"], 225e12 / a100.flops["bf16"]),
            "230 and 225 TFLOP/s on the profile's peak",
        ),
        Claim(
            "fa3.headline",
            FLASH3,
            (0.75, 0.35),
            "share of peak: flash3, flash2",
            SIMULATION,
            lambda: (740e12 / h100.flops["fp16"], ACHIEVED["flash2", "hopper"][0]),
            "740 TFLOP/s on the profile's peak; flash2 as in the README's figure",
        ),
        relation("fa.traffic", NOTES, _traffic, "within constants of theorem 2"),
        relation("fa.sram", NOTES, _sram, "an H100's against an RTX 4090's shared memory"),
        relation("fa.quadratic", NOTES, _quadratic, "twice the tokens, four times the FLOPs"),
        relation(
            "fa.flops_up", NOTES, _more_flops_less_time, "backward pass, standard against flash1, A100", "behaviour"
        ),
        relation(
            "sys.flashattention23", TWO_WAYS, _generations, "published shares of peak on A100 and H100", "behaviour"
        ),
    )
