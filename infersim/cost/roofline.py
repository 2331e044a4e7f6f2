"""Operator and device -> seconds, split by resource: t = fixed + smooth_max(bytes / bandwidth, FLOPs / peak).

The time beyond the fixed one goes to the side that binds: to compute, or to weights, KV and activations in proportion
to their bytes. The fixed time is launch; a collective's time is collectives. The parts add up to the whole.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.engine.compiled.law import smooth_max
from infersim.engine.compiled.state import (
    ACTIVATIONS,
    COLLECTIVES,
    COMPUTE,
    KV,
    LAUNCH,
    RESOURCES,
    WEIGHTS,
)

from .collectives import Collective, collective
from .correction import factor
from .efficiency import efficiency
from .formats import UNPACK
from .laws import (
    Attention,
    attention,
    attention_coordinates,
    gemm_compute,
    gemm_coordinates,
    moe_coordinates,
    quantization,
)
from .operator import Operator, Sums, evaluate


@dataclass(frozen=True)
class Rate:
    """What a device makes of one class of operators: seconds per byte, per FLOP and per kernel."""

    per_byte: float
    per_flop: float
    per_unpacked: float
    """per weight that is turned back into 16 bits"""
    fixed: float
    softness: float
    peak: float
    """FLOP/s of the arithmetic at its datasheet rate"""
    shares: OperatorEfficiency
    hardware: Hardware
    collective: Collective | None = None
    """of a collective: what stands for all of that"""


def rate(hardware: Hardware, operator: Operator) -> Rate:
    """The rate of `operator` on this device."""
    shares = efficiency(hardware, operator.efficiency_class, operator.dtype)
    peak = peak_flops(hardware, operator)
    fixed = shares.fixed
    if "fused" in operator.shape:  # no kernel that quantises: what an FP8 matrix takes longer than a 16-bit one
        plain, quantised = (efficiency(hardware, "gemm", dtype).fixed for dtype in ("bf16", "fp8"))
        fixed = max(fixed - max(quantised - plain, 0.0), plain)
    return Rate(
        per_byte=1.0 / (shares.bandwidth * hardware.memory_bandwidth),
        per_flop=1.0 / (shares.flops * peak) if operator.flops else 0.0,
        # one integer instruction per lane and cycle: half of the FP32 FLOPs
        per_unpacked=UNPACK / (hardware.flops.get("fp32", peak / 16) / 2) if operator.unpack else 0.0,
        fixed=fixed,
        softness=shares.softness,
        peak=peak,
        shares=shares,
        hardware=hardware,
        collective=collective(
            hardware, operator.name, operator.dtype, operator.ranks, operator.apart, operator.crossing
        )
        if operator.message
        else None,
    )


def peak_flops(hardware: Hardware, operator: Operator) -> float:
    """The rate of the operator's arithmetic; a device without it does it in 16 bits."""
    flops: dict = hardware.flops
    return flops.get(operator.rate or operator.dtype) or flops.get("bf16") or flops["fp16"]


def add_time(split: np.ndarray, operator: Operator, rate: Rate, sums: Sums) -> None:
    """Add the seconds of all `count` kernels of the operator to split[..., resource].

    The sums are numbers or arrays of split's leading shape; those of an attention operator are its window's.
    """
    sums, count = operator.routed(sums), operator.count
    if rate.collective:
        split[..., COLLECTIVES] += operator.count * rate.collective.seconds(evaluate(operator.message, sums))
        return
    weights = rate.per_byte * evaluate(operator.weights, sums)
    kv = rate.per_byte * evaluate(operator.kv, sums)
    activations, compute, serial = _law(operator, rate, sums)
    memory = weights + kv + activations
    time = smooth_max(memory, compute, rate.softness)
    bound = memory >= compute
    scale = count * _correction(operator, rate, sums, rate.fixed + serial + time)
    stretch = scale * np.where(bound, time / np.maximum(memory, np.finfo(float).tiny), 0.0)
    split[..., LAUNCH] += scale * rate.fixed
    split[..., WEIGHTS] += weights * stretch
    split[..., KV] += kv * stretch
    split[..., ACTIVATIONS] += activations * stretch + scale * serial
    split[..., COMPUTE] += np.where(bound, 0.0, scale * time)


def _law(operator: Operator, rate: Rate, sums: Sums) -> tuple:
    """Seconds of moving activations, of computing, and of what comes before both, of one kernel.

    Where the class was calibrated, its law's (cost/laws.py); else in proportion to bytes and FLOPs.
    """
    shares, hardware, shape = rate.shares, rate.hardware, operator.shape
    compute: Any
    activations = rate.per_byte * evaluate(operator.activations, sums)
    if "tile_depth" in shares.terms and "k" in shape:
        m, n, k = sums[operator.per], shape["n"], shape["k"]
        moved = 2.0 + shape["quantised"] if shape["quantised"] and "fused" not in shape else 0.0
        activations = rate.per_byte * m * (k * (shape["quantised"] or 2.0) + n * 2.0)
        compute = gemm_compute(shares, hardware, rate.peak, m, n, k)
        return activations, compute, quantization(shares, hardware, m, k, moved)
    if "elsewhere" in shares.terms and operator.routing:
        elsewhere = 0.0 if operator.shared else shares.terms["elsewhere"]
        routing = operator.routing
        others = sums["tokens"] * routing.experts_per_token * (1.0 - 1.0 / routing.ranks)
        seen = operator.activations["expert_tokens"] * elsewhere * others
        return activations + rate.per_byte * seen, rate.per_flop * evaluate(operator.flops, sums), 0.0
    compute = rate.per_flop * evaluate(operator.flops, sums) + rate.per_unpacked * evaluate(operator.unpack, sums)
    if "heads" in shape:
        law = attention_law(operator, rate)
        activations = law.activations * sums[operator.per]
        compute = law.pair * sums[PAIRS[operator.per]]
        if operator.per == "prefill_tokens":
            compute = compute + law.query * sums[operator.per] + law.tile * sums["query_tiles"]
    return activations, compute, 0.0


PAIRS = {"decodes": "decode_keys", "prefill_tokens": "prefill_pairs"}
"""what a query of each phase meets"""


def attention_law(operator: Operator, rate: Rate) -> Attention:
    """The law of an attention kernel, per kernel."""
    keys = "decode_keys" if operator.per == "decodes" else "prefill_keys"
    return attention(
        rate.shares,
        rate.hardware,
        rate.peak,
        pair_flops=operator.flops[PAIRS[operator.per]],
        key_bytes=operator.kv[keys],
        query_bytes=operator.activations[operator.per],
        **operator.shape,
    )


def _correction(operator: Operator, rate: Rate, sums: Sums, seconds) -> np.ndarray | float:
    """What to multiply the law's seconds with: the measured correction, unless physics forbids so much."""
    shares, shape = rate.shares, operator.shape
    if shares.correction is None or not shape:
        return 1.0
    if "k" in shape:
        at = gemm_coordinates(np.maximum(sums[operator.per], 1.0), shape["n"], shape["k"])
    elif operator.routing:
        routed = sums["tokens"] * operator.routing.experts_per_token / operator.routing.ranks
        at = moe_coordinates(routed, np.maximum(sums["experts"], 1.0), shape["hidden"], shape["inter"])
    else:
        phase = "decode" if operator.per == "decodes" else "prefill"
        queries, pairs = (np.maximum(sums[name], 1e-9) for name in (operator.per, PAIRS[operator.per]))
        at = attention_coordinates(phase, rate.hardware, queries, pairs, **shape)
    moved = evaluate(operator.weights, sums) + evaluate(operator.kv, sums) * (operator.per == "decodes")
    floor = np.maximum(moved / rate.hardware.memory_bandwidth, evaluate(operator.flops, sums) / rate.peak)
    if operator.routing:  # tiles are filled up with nothing
        floor = moved / rate.hardware.memory_bandwidth
    return np.maximum(factor(shares.correction, at), floor / np.maximum(seconds, np.finfo(float).tiny))


def zero_split(*shape: int) -> np.ndarray:
    """f8[*shape, 9], by resource; in memory each resource stands by itself, as `add_time` goes over them."""
    return np.moveaxis(np.zeros((len(RESOURCES), *shape)), 0, -1)
