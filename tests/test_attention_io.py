"""Attention traffic: the bounds of FlashAttention's theorem 2, and that tiling changes constants only."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.published import published
from infersim.cost.attention_kernel import with_attention_kernel
from infersim.cost.placement import Placement
from infersim.cost.steptime import compile_step_cost
from infersim.deployment import resolve
from infersim.models.catalog import load_model
from infersim.reproduce.attention_io import (
    KERNELS,
    backward_flops,
    block_sizes,
    forward_elements,
    forward_flops,
    sram_elements,
    training_time,
    unfused_passes,
)

dims = st.sampled_from([64, 128, 256])


def test_a_named_kernel_replaces_the_measured_one():
    """Prompts take longer the older their kernel, by the published rates; decodes stay as they are."""
    rows = {}
    for kernel in (None, *KERNELS):
        device = with_attention_kernel(load_hardware("h100-sxm"), kernel)
        engine = resolve(Engine(max_model_len=8192), device, 131072)
        cost = compile_step_cost(Placement(load_model("Llama-3.1-8B"), device), engine)
        rows[kernel] = cost.attention[0]
    share = published().attention_kernels["hopper"]
    pair = [float(rows[kernel]["prefill_compute"]) for kernel in KERNELS]
    assert pair == sorted(pair, reverse=True)
    assert pair[0] / pair[3] == pytest.approx(share["flash3"].share / share["standard"].share)
    assert all(rows[kernel]["decode_kv"] == rows[None]["decode_kv"] for kernel in KERNELS)
    with pytest.raises(InputError, match="flash3 does not run on a100-sxm-80gb"):
        with_attention_kernel(load_hardware("a100-sxm-80gb"), "flash3")


@given(st.integers(10, 17), dims, st.integers(1, 8))
def test_traffic_is_of_the_order_of_theorem_2(log_n, d, kib):
    """Standard within 4 times N d + N^2; flash1 within a constant of N^2 d^2 / M wherever d <= M <= N d."""
    n, sram = 2**log_n, 32 * kib * 1024 / 2
    assert 1 <= forward_elements("standard", n, d, sram) / (n * d + n * n) <= 4
    if d <= sram <= n * d:
        assert 3 <= forward_elements("flash1", n, d, sram) / (n * n * d * d / sram) <= 20


@given(st.integers(8, 16), dims, st.sampled_from(["flash1", "flash2", "flash3"]))
def test_traffic_falls_as_on_chip_memory_grows(log_n, d, kernel):
    traffic = [forward_elements(kernel, 2**log_n, d, sram) for sram in np.geomspace(2**14, 2**20, 12)]
    assert all(a >= b for a, b in pairwise(traffic))


@given(st.integers(10, 16), dims)
def test_tiling_keeps_the_square(log_n, d):
    """Twice the tokens, four times the FLOPs, whatever the kernel; recomputation adds a fifth product backward."""
    n = 2**log_n
    assert forward_flops(2 * n, d) == 4 * forward_flops(n, d)
    for kernel in KERNELS:
        assert backward_flops(kernel, 2 * n, d) == 4 * backward_flops(kernel, n, d)
    assert backward_flops("flash1", n, d) / backward_flops("standard", n, d) == 1.25


def test_flash_does_more_arithmetic_in_less_time():
    a100 = load_hardware("a100-sxm-40gb")
    peak = a100.flops["fp16"]
    times = {kernel: training_time(kernel, 1024, 64, 1024, a100, peak) for kernel in KERNELS}
    assert times["flash1"] < times["standard"] / 3


def test_block_sizes_and_profiles():
    """192 KiB of 16-bit elements and d = 64: 384 keys by 64 queries. A profile without the size says so."""
    assert block_sizes(64, 192 * 1024 / 2) == (384, 64)
    assert sram_elements(load_hardware("h100-sxm")) > sram_elements(load_hardware("a100-sxm-80gb"))
    with pytest.raises(ValueError, match="tpu-v4 has no shared_memory_per_sm"):
        sram_elements(load_hardware("tpu-v4"))


def test_mask_and_dropout_add_seven_passes():
    assert unfused_passes(mask=True, dropout=True) == 7
    assert unfused_passes(mask=False, dropout=False) == 0
