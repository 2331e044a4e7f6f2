"""FlashAttention 1, 2, 3: Dao et al. 2022 (arXiv 2205.14135), Dao 2023 (2307.08691), Shah et al. 2024 (2407.08608)."""

from itertools import pairwise
from typing import Any

import numpy as np

from infersim.config.hardware import load_hardware
from infersim.config.published import published

from .attention_io import (
    KERNELS,
    achieved,
    backward_elements,
    backward_flops,
    block_sizes,
    forward_elements,
    forward_flops,
    sram_elements,
    training_time,
    unfused_passes,
)
from .claims import ARITHMETIC, SIMULATED, Claim, claim, share_holding
from .simulation import prompt_time

# Figure 2: GPT-2 medium, forward and backward, on an A100
N, D, HEADS = 1024, 64, 16 * 64
SRAM = 192 * 1024 / 2  # elements; the size used is not stated, an A100 multiprocessor has 192 KiB
FLASH1_CAUSAL = 70e12  # FLOP/s, FlashAttention-2 README, A100, causal, head dimension 64, 1024 tokens


def total_gigabytes(kernel: Any) -> float:
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
    """Four tiles of B_c rows fill the memory but for the rounding up, and queries never exceed d."""
    cases = []
    for _, d, m in _grid():
        keys, queries = block_sizes(d, m)
        cases.append(m <= 4 * d * keys < m + 4 * d and queries <= d and queries <= keys)
    return share_holding(cases)


def _block_sweep() -> float:
    """Traffic falls with the block size, and beyond 256 it no longer binds: the run time is flat."""
    a100 = load_hardware("a100-sxm-40gb")
    seconds, previous, cases = [], np.inf, []
    for block in (64, 128, 256, 512):
        bytes_moved = HEADS * forward_elements("flash1", N, D, 4 * D * block) * 2
        cases.append(bytes_moved < previous)
        previous = bytes_moved
        rate = achieved("flash1", "ampere") * a100.flops["fp16"]
        seconds.append(max(bytes_moved / a100.memory_bandwidth, HEADS * forward_flops(N, D) / rate))
    return share_holding([*cases, seconds[0] > seconds[2], seconds[2] == seconds[3]])


# --- the notes -------------------------------------------------------------------------------------------------------
def _prompts(kernel: str, hardware: str = "h100-sxm") -> list[float]:
    """Seconds of prompts of 8,192, 16,384 and 32,768 tokens."""
    engine = {"attention_kernel": kernel, "max_model_len": 33_000}
    return [prompt_time(tokens, hardware=hardware, engine=engine) for tokens in (8192, 16_384, 32_768)]


def _quadratic(kernel: str) -> tuple[float, float]:
    """Seconds that grow with the square: what twice the tokens take beyond twice the time, and four times."""
    one, two, four = _prompts(kernel)
    return two - 2 * one, four - 2 * two


def _traffic() -> float:
    """Of an engine's prompts: writing and reading the N x N matrix costs time that grows with N^2; tiles save most."""
    (standard, later), (tiled, _) = _quadratic("standard"), _quadratic("flash2")
    return share_holding([3.6 < later / standard < 4.4, tiled < 0.3 * standard])


def _square() -> float:
    """Twice the tokens, four times the time of attention, whatever the kernel; the constants differ."""
    both = [_quadratic(kernel) for kernel in ("flash1", "flash2")]
    return share_holding([*(3.6 < four / two < 4.4 for two, four in both), both[1][0] < 0.6 * both[0][0]])


def _sram() -> float:
    small, large = load_hardware("rtx-4090"), load_hardware("h100-sxm")
    return share_holding(
        forward_elements(kernel, 16384, 128, sram_elements(large))
        < forward_elements(kernel, 16384, 128, sram_elements(small))
        for kernel in KERNELS
        if kernel != "standard"
    )


def _more_flops_less_time() -> float:
    """Forward and backward at the device's peak: what is computed again costs less than writing and reading it."""
    a100, cases = load_hardware("a100-sxm-80gb"), []
    for n in (1024, 4096, 16384):
        flops = [backward_flops(kernel, n, 64) for kernel in ("standard", "flash1")]
        moved = [backward_elements(kernel, n, 64, sram_elements(a100)) for kernel in ("standard", "flash1")]
        times = [training_time(kernel, n, 64, 16, a100, a100.flops["bf16"]) for kernel in ("standard", "flash1")]
        cases += [flops[1] > flops[0], moved[1] < moved[0], times[1] < times[0]]
    return share_holding(cases)


def _generations() -> float:
    """Prompts of 32,768 tokens: each kernel is faster than the one before it, and flash2 gains more on an A100."""
    ampere, hopper = (
        [_prompts(kernel, device)[-1] for kernel in KERNELS if kernel in published().attention_kernels[name]]
        for device, name in (("a100-sxm-80gb", "ampere"), ("h100-sxm", "hopper"))
    )
    falling = [a > b for times in (ampere[1:], hopper[1:]) for a, b in pairwise(times)]
    return share_holding([*falling, abs((ampere[1] / ampere[2]) / (hopper[1] / hopper[2]) - 1) > 0.05])


def claims() -> tuple[Claim, ...]:
    rates: dict[str, Any] = {"rates of kernels by length": ("fa.tflops.tables",)}
    return (
        claim("fa1.io.std", ARITHMETIC, _standard_order, "1 to 4 times N d + N^2 over N, d and M"),
        claim("fa1.io.flash", ARITHMETIC, _flash_order, "3 to 20 times N^2 d^2 / M over N, d and M"),
        claim("fa1.alg1.blocks", ARITHMETIC, _blocks_fit, "B_c = ceil(M / 4d), B_r = min(B_c, d)"),
        claim("fa1.fig2.gflops", ARITHMETIC, _flops_ratio,
              "the ratio; the absolute numbers are 12 times too small for the workload that the figure states"),
        claim("fa1.fig2.hbm", ARITHMETIC, lambda: (total_gigabytes("standard"), total_gigabytes("flash1")),
              "assumed: 192 KiB of SRAM; mask and dropout unfused"),
        claim("fa1.fig2.runtime", ARITHMETIC, _runtimes,
              "assumed: causal; flash at its rate in the FlashAttention-2 README",
              why="standard attention is priced as its bytes at 85 % of the A100's 1,555 GB/s, what copies reach;"
              " PyTorch's 40.3 GB in 41.7 ms are 62 %"),
        claim("fa1.fig2mid", ARITHMETIC, _block_sweep,
              "blocks of 64, 128, 256, 512; the points are only in the figure", **rates),
        claim("fa.traffic", SIMULATED, _traffic, "prompts of 8,192 to 32,768 tokens, Llama-3.1-8B, H100", **rates),
        claim("fa.sram", ARITHMETIC, _sram, "an H100's against an RTX 4090's shared memory"),
        claim("fa.quadratic", SIMULATED, _square, "the same with flash1 and flash2", **rates),
        claim("fa.flops_up", ARITHMETIC, _more_flops_less_time, "standard against flash1, A100"),
        claim("sys.flashattention23", SIMULATED, _generations, "prompts of 32,768 tokens on A100 and H100", **rates),
    )  # fmt: skip
