"""Operator and device -> seconds, split by resource: t = fixed + smooth_max(bytes / bandwidth, FLOPs / peak).

The time beyond the fixed one goes to the side that binds: to compute, or to weights, KV and activations in proportion
to their bytes. The fixed time is launch; a collective's time is collectives. The parts add up to the whole.
"""

from dataclasses import dataclass

import numpy as np

from infersim.engine.state import (
    ACTIVATIONS,
    COLLECTIVES,
    COMPUTE,
    KV,
    LAUNCH,
    QUERY_TILE,
    RESOURCES,
    WEIGHTS,
)
from infersim.spec.hardware import Hardware

from .collectives import Collective, collective
from .efficiency import efficiency, tile_keys
from .formats import UNPACK
from .operator import Operator, Sums, evaluate


def smooth_max(a, b, softness: float):
    """Time of two activities of a and b seconds: the longer at softness 0 (perfect overlap), their sum at 1 (none)."""
    return 0.5 * (a + b + np.sqrt((a - b) ** 2 + 4.0 * softness * a * b))


@dataclass(frozen=True)
class Rate:
    """What a device makes of one class of operators: seconds per byte, per FLOP and per kernel."""

    per_byte: float
    per_flop: float
    per_unpacked: float
    """per weight that is turned back into 16 bits"""
    fixed: float
    softness: float
    tile_keys: float
    """extra keys per query of a prefill kernel"""
    collective: Collective | None = None
    """of a collective: what stands for all of that"""


def rate(hardware: Hardware, operator: Operator) -> Rate:
    """The rate of `operator` on this device."""
    shares = efficiency(hardware, operator.operator_class, operator.dtype)
    # knee is the exponent of a p-norm; the softness that gives the same time where both sides are equal
    softness = (2.0 ** (1.0 / shares.knee) - 1.0) ** 2
    peak = peak_flops(hardware, operator)
    return Rate(
        per_byte=1.0 / (shares.bandwidth * hardware.memory_bandwidth),
        per_flop=1.0 / (shares.flops * peak) if operator.flops else 0.0,
        # one integer instruction per lane and cycle: half of the FP32 FLOPs
        per_unpacked=UNPACK / (hardware.flops.get("fp32", peak / 16) / 2) if operator.unpack else 0.0,
        fixed=shares.fixed,
        softness=softness,
        tile_keys=tile_keys(hardware) if operator.operator_class == "attention_prefill" else 0.0,
        collective=collective(hardware, operator.name, operator.dtype, operator.ranks) if operator.message else None,
    )


def peak_flops(hardware: Hardware, operator: Operator) -> float:
    """The rate of the operator's arithmetic; a device without it does it in 16 bits."""
    flops = hardware.flops
    return flops.get(operator.rate or operator.dtype) or flops.get("bf16") or flops["fp16"]


def add_time(split: np.ndarray, operator: Operator, rate: Rate, sums: Sums) -> None:
    """Add the seconds of all `count` kernels of the operator to split[..., resource].

    The sums are numbers or arrays of split's leading shape; those of an attention operator are its window's.
    """
    if rate.collective:
        split[..., COLLECTIVES] += operator.count * rate.collective.seconds(evaluate(operator.message, sums))
        return
    sums = operator.routed(sums)
    split[..., LAUNCH] += operator.count * rate.fixed
    weights = operator.count * rate.per_byte * evaluate(operator.weights, sums)
    kv = operator.count * rate.per_byte * evaluate(operator.kv, sums)
    activations = operator.count * rate.per_byte * evaluate(operator.activations, sums)
    memory = weights + kv + activations
    flops = evaluate(operator.flops, sums)
    if rate.tile_keys:
        flops = flops + tile_flops(operator, rate) * sums["query_tiles"]
    compute = operator.count * (rate.per_flop * flops + rate.per_unpacked * evaluate(operator.unpack, sums))
    time = smooth_max(memory, compute, rate.softness)
    bound = memory >= compute
    stretch = np.where(bound, time / np.maximum(memory, np.finfo(float).tiny), 0.0)
    split[..., WEIGHTS] += weights * stretch
    split[..., KV] += kv * stretch
    split[..., ACTIVATIONS] += activations * stretch
    split[..., COMPUTE] += np.where(bound, 0.0, time)


def tile_flops(operator: Operator, rate: Rate) -> float:
    """FLOPs that a prefill kernel spends on a tile of queries beyond its causal pairs."""
    return operator.flops["prefill_pairs"] * QUERY_TILE * rate.tile_keys


def zero_split(*shape: int) -> np.ndarray:
    """f8[*shape, 8], by resource."""
    return np.zeros((*shape, len(RESOURCES)))
