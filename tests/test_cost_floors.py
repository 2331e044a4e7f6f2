"""The bandwidth arithmetic of published notes falls out of the cost model at efficiency 1."""

from dataclasses import replace

import pytest

from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.cost.floors import floor_itl, floor_ttft
from infersim.cost.placement import Placement
from infersim.models.catalog import load_model
from infersim.reproduce.bandwidth import reference_70b

REFERENCE = Placement(reference_70b(), load_hardware("h100-sxm"))


def test_a_70b_decode_step_streams_140_gb():
    """140 GB / 3.35 TB/s = 41.8 ms, 23.9 tokens/s."""
    assert REFERENCE.model.num_params * 2 == 140e9
    assert floor_itl(REFERENCE, context=0) == pytest.approx(0.0418, rel=0.005)
    assert 1 / floor_itl(REFERENCE, context=0) == pytest.approx(23.9, rel=0.005)


def test_a_context_of_8192_adds_its_keys_and_values():
    """2 x 80 layers x 8 heads x 128 x 8192 x 2 bytes = 2.68 GB, 0.80 ms."""
    assert REFERENCE.model.kv_bytes_per_token(2) * 8192 == 2684354560
    added = floor_itl(REFERENCE, context=8192) - floor_itl(REFERENCE, context=0)
    assert added == pytest.approx(2684354560 / 3.35e12)
    assert added == pytest.approx(0.00080, rel=0.01)


def test_four_bit_weights_take_a_quarter():
    """35 GB, 10.4 ms, 96 tokens/s."""
    step = floor_itl(REFERENCE, context=0, weight_bits=4)
    assert step == pytest.approx(0.0104, rel=0.01)
    assert 1 / step == pytest.approx(96, rel=0.01)


def test_grouped_queries_read_an_eighth_of_the_cache():
    model = REFERENCE.model
    attention = model.layers[0].attention
    assert attention.num_heads / attention.num_kv_heads == 8
    assert 2 * 80 * attention.num_heads * 128 * 2 / model.kv_bytes_per_token(2) == 8


def test_decode_is_bound_by_bandwidth_and_prefill_by_compute():
    hardware = REFERENCE.hardware
    half = {key: rate / 2 for key, rate in hardware.flops.items()}
    slow = replace(REFERENCE, hardware=hardware.model_copy(update={"flops": half}))
    assert floor_itl(slow, 1000) == floor_itl(REFERENCE, 1000)
    assert floor_ttft(slow, 4096) == 2 * floor_ttft(REFERENCE, 4096)
    # 2 FLOPs per parameter and token, and the triangle of attention; the LM head sees one token
    head = 128256 * 8192
    flops = 2 * (70e9 - head) * 4096 + 2 * head + 80 * 4 * 64 * 128 * 4096 * 4097 / 2
    assert floor_ttft(REFERENCE, 4096) == pytest.approx(flops / 989e12, rel=1e-3)


def test_a_window_bounds_what_is_read():
    deployed = replace(REFERENCE, model=load_model("Gemma-3-27B"))
    step = floor_itl(deployed, context=100_000) - floor_itl(deployed, context=50_000)
    full = sum(layer.attention.window == 0 for layer in deployed.model.layers)
    assert step == pytest.approx(full * 50_000 * 2 * 16 * 128 * 2 / 3.35e12)


def test_ranks_divide_the_floor():
    eight = floor_itl(replace(REFERENCE, parallelism=Parallelism(tensor=8)), 8192)
    assert eight == pytest.approx(floor_itl(REFERENCE, 8192) / 8, rel=0.01)  # what no rank divides is on all of them
