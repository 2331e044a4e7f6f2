"""What there is to fit in each class of operators: its law's prediction, bytes, parameters and correction axes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.cost.correction import factor
from infersim.cost.laws import (
    all_reduce,
    attention,
    attention_coordinates,
    collective_coordinates,
    exchange,
    gemm_compute,
    gemm_coordinates,
    link_bandwidth,
    moe_coordinates,
    quantization,
)
from infersim.cost.moe import filled
from infersim.engine.compiled.law import smooth_max

from .fit import Parameter
from .tables import Rows


@dataclass(frozen=True)
class Work:
    """Rows of one class as physics sees them: bytes of memory that must move, seconds of FLOPs or of the link."""

    bytes: np.ndarray
    other_seconds: np.ndarray

    def floor(self, hardware: Hardware) -> np.ndarray:
        """Seconds that no such device can beat."""
        return np.maximum(self.bytes / hardware.memory_bandwidth, self.other_seconds)


@dataclass(frozen=True)
class Class:
    """One class of operators.

    seconds(shares, hardware, rows) is the law without its correction; shape: the columns that make a shape, whole
    shapes are held out; knots: axis of the correction -> how many, smoothness: how alike neighbours must be; warm: the
    engine finds this class's inputs cached too, since the kernels before it have just written them.
    """

    seconds: Callable[[OperatorEfficiency, Hardware, Rows], np.ndarray]
    work: Callable[[Hardware, Rows], Work]
    coordinates: Callable[[Hardware, Rows], dict[str, np.ndarray]]
    shape: tuple[str, ...]
    knots: dict[str, int]
    parameters: tuple[Parameter, ...]
    warm: bool = False
    smoothness: float = 0.1

    def predict(self, shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> np.ndarray:
        """Seconds with the correction, and never below the floor."""
        seconds = self.seconds(shares, hardware, rows) * factor(shares.correction, self.coordinates(hardware, rows))
        return np.maximum(seconds, self.work(hardware, rows).floor(hardware))


# Bytes of a weight with its scale, of an input as the multiplication sees it, dtype of the arithmetic, bytes that
# quantising an input moves.
MATRICES = {
    "bf16": (2.0, 2.0, "bf16", 0.0),
    "fp16": (2.0, 2.0, "fp16", 0.0),
    "fp8": (1.0, 1.0, "fp8", 3.0),
    "fp8_block": (1.0, 1.0 + 4 / 128, "fp8", 3.0),
    "int8": (1.0, 1.0, "int8", 0.0),
    "int8_wo": (1.0, 2.0, "bf16", 0.0),
    "int4": (0.5 + 2 / 128, 2.0, "bf16", 0.0),
    "nvfp4": (0.5 + 1 / 16, 0.5 + 1 / 16, "fp4", 2.5 + 1 / 16),
    "mxfp4": (0.5 + 1 / 32, 2.0, "bf16", 0.0),
    "mxfp4 x mxfp8": (0.5 + 1 / 32, 1.0 + 1 / 32, "fp8", 3.0),
}
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def matrix_format(hardware: Hardware, dtype: str) -> tuple[float, float, str, float]:
    """The row of MATRICES that a device multiplies a format by: those with FP4 arithmetic give MXFP4 weights MXFP8
    inputs (cost/formats.py)."""
    return MATRICES["mxfp4 x mxfp8" if dtype == "mxfp4" and "fp4" in hardware.flops else dtype]


def peak(hardware: Hardware, dtype: Any) -> float:
    """FLOP/s in this dtype; a device without it computes in 16 bits."""
    return hardware.flops.get(dtype) or hardware.flops.get("bf16") or hardware.flops["fp16"]


def _gemm_work(hardware: Hardware, rows: Rows) -> Work:
    m, n, k = (rows.columns[name] for name in "mnk")
    weight, activation, dtype, _ = matrix_format(hardware, rows.dtype)
    return Work(n * k * weight + m * (k * activation + n * 2.0), 2.0 * m * n * k / peak(hardware, dtype))


def _gemm_seconds(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> np.ndarray:
    m, n, k = (rows.columns[name] for name in "mnk")
    _, _, dtype, moved = matrix_format(hardware, rows.dtype)
    memory = _gemm_work(hardware, rows).bytes / (shares.bandwidth * hardware.memory_bandwidth)
    compute = gemm_compute(shares, hardware, peak(hardware, dtype), m, n, k)
    serial = quantization(shares, hardware, m, k, moved)
    return shares.fixed + serial + smooth_max(memory, compute, shares.softness)


def _attention_amounts(rows: Rows) -> dict[str, np.ndarray]:
    heads, kv_heads, head_dim = (rows.columns[name] for name in ("heads", "kv_heads", "head_dim"))
    key_bytes: Any
    if rows.operator_class.startswith("mla"):
        score, value = (576.0, 512.0) if rows.operator_class == "mla_decode" else (192.0, 128.0)
        shared = rows.operator_class == "mla_decode"
        key_bytes = 576.0 * KV_BYTES[rows.dtype] if shared else kv_heads * (score + value) * 2.0
        return {"pair_flops": 2.0 * heads * (score + value), "key_bytes": key_bytes,
                "query_bytes": 2.0 * heads * (score + value), "heads": heads, "kv_heads": kv_heads,
                "head_dim": head_dim}  # fmt: skip
    return {"pair_flops": 4.0 * heads * head_dim, "key_bytes": 2.0 * kv_heads * head_dim * KV_BYTES[rows.dtype],
            "query_bytes": 4.0 * heads * head_dim, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim}  # fmt: skip


def _attention_work(hardware: Hardware, rows: Rows) -> Work:
    c, amounts = rows.columns, _attention_amounts(rows)
    moved = c["keys"] * amounts["key_bytes"] + c["queries"] * amounts["query_bytes"]
    return Work(moved, c["pairs"] * amounts["pair_flops"] / peak(hardware, "bf16"))


def _attention_seconds(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> np.ndarray:
    c = rows.columns
    law = attention(shares, hardware, peak(hardware, "bf16"), **_attention_amounts(rows))
    memory = law.kv * c["keys"] + law.activations * c["queries"]
    compute = law.pair * c["pairs"] + law.query * c["queries"] + law.tile * c["tiles"]
    return shares.fixed + smooth_max(memory, compute, shares.softness)


def _attention_coordinates(phase: str) -> Callable[[Hardware, Rows], dict[str, np.ndarray]]:
    def coordinates(hardware: Hardware, rows: Rows) -> dict[str, np.ndarray]:
        names = ("queries", "pairs", "heads", "kv_heads", "head_dim")
        return attention_coordinates(phase, hardware, *(rows.columns[name] for name in names))

    return coordinates


def _experts_floor(hardware: Hardware, rows: Rows) -> Work:
    """Weights alone, and the FLOPs of real tokens."""
    c = rows.columns
    weight, _, dtype, _ = matrix_format(hardware, rows.dtype)
    matrices = 3.0 * c["hidden"] * c["inter"]
    return Work(c["touched"] * matrices * weight, 2.0 * c["routed"] * matrices / peak(hardware, dtype))


def _experts_seconds(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> np.ndarray:
    c = rows.columns
    weight, activation, dtype, moved = matrix_format(hardware, rows.dtype)
    hidden, inter, computed = c["hidden"], c["inter"], filled(c["routed"], c["touched"])
    quantised = activation if moved else 0.0
    per_token = (hidden + inter) * (2.0 + 2.0 * quantised) + (2.0 * inter + 2.0 * hidden) * 2.0
    seen = computed + shares.terms["elsewhere"] * (c["chosen"] - c["routed"])
    traffic = c["touched"] * 3.0 * hidden * inter * weight + seen * per_token + c["tokens"] * hidden * 2.0
    memory = traffic / (shares.bandwidth * hardware.memory_bandwidth)
    compute = 6.0 * computed * hidden * inter / (shares.flops * peak(hardware, dtype))
    return shares.fixed + smooth_max(memory, compute, shares.softness)


def _moe_coordinates(hardware: Hardware, rows: Rows) -> dict[str, np.ndarray]:
    return moe_coordinates(*(rows.columns[name] for name in ("routed", "touched", "hidden", "inter")))


def _wire(factor: Callable) -> Callable[[Hardware, Rows], Work]:
    def work(hardware: Hardware, rows: Rows) -> Work:
        n, size = rows.columns["ranks"], rows.columns["size"]
        return Work(0.0 * size, factor(n) * size / link_bandwidth(hardware, n))

    return work


def _exchange(law: Callable) -> Callable[[OperatorEfficiency, Hardware, Rows], np.ndarray]:
    return lambda shares, hardware, rows: law(shares, hardware, rows.columns["ranks"], rows.columns["size"])


def _collective(law: Callable, factor: Callable, parameters: tuple[Parameter, ...]) -> "Class":
    return Class(
        _exchange(law),
        _wire(factor),
        lambda hardware, rows: collective_coordinates(rows.columns["ranks"], rows.columns["size"]),
        shape=("ranks", "size"),
        knots={"size": 14, "ranks": 3},
        parameters=parameters,
    )


BANDWIDTH = Parameter("bandwidth", 0.85, 0.05, 1.0)
FLOPS = Parameter("flops", 0.75, 0.02, 1.0)
SOFTNESS = Parameter("softness", 0.05, 1e-4, 1.0)
ATTENTION_SHAPE = ("heads", "kv_heads", "head_dim", "window", "sequences")
SEQUENCE_TIME = Parameter("sequence_time", 1e-8, 1e-10, 1e-6)
HOP = Parameter("hop", 1e-6, 1e-8, 1e-5)
QUICK, BULK = Parameter("quick_bandwidth", 0.4, 0.02, 1.0), Parameter("bulk_fixed", 2e-5, 1e-6, 1e-4)
MLA_KNOTS = {"work": 7, "keys": 7, "head_dim": 1, "group": 8}
ATTENTION_KNOTS = {"work": 7, "keys": 7, "head_dim": 3, "group": 4}

CLASSES = {
    "gemm": Class(
        _gemm_seconds,
        _gemm_work,
        lambda hardware, rows: gemm_coordinates(*(rows.columns[name] for name in "mnk")),
        shape=("n", "k"),
        knots={"m": 16, "n": 8, "k": 5},
        parameters=(
            BANDWIDTH,
            FLOPS,
            SOFTNESS,
            Parameter("tile_depth", 128, 0, 2048, ratio=False),
            Parameter("small_tile", 0.1, 0, 1, ratio=False),
            Parameter("split_traffic", 1, 0.02, 64),
        ),
    ),
    "attention_prefill": Class(
        _attention_seconds,
        _attention_work,
        _attention_coordinates("prefill"),
        shape=ATTENTION_SHAPE,
        knots=ATTENTION_KNOTS,
        parameters=(
            BANDWIDTH,
            FLOPS,
            SOFTNESS,
            Parameter("query_keys", 200, 0, 2000, ratio=False),
            Parameter("tile_keys", 100, 0, 2000, ratio=False),
            Parameter("narrow_head", 0.3, 0, 1, ratio=False),
        ),
        warm=True,
    ),
    "attention_decode": Class(
        _attention_seconds,
        _attention_work,
        _attention_coordinates("decode"),
        shape=ATTENTION_SHAPE,
        knots=ATTENTION_KNOTS,
        parameters=(BANDWIDTH, FLOPS, SOFTNESS, SEQUENCE_TIME),
        smoothness=0.3,
    ),
    "moe": Class(
        _experts_seconds,
        _experts_floor,
        _moe_coordinates,
        shape=("hidden", "inter", "held"),
        knots={"tokens": 12, "experts": 6, "hidden": 2, "inter": 4},
        parameters=(BANDWIDTH, FLOPS, SOFTNESS, Parameter("elsewhere", 0.5, 0.0, 1.0, ratio=False)),
    ),
    "all_reduce": _collective(
        all_reduce, lambda n: np.minimum(np.minimum(n - 1.0, 2.0 - 2.0 / n), 1.0 + 1.0 / n),
        (BANDWIDTH, Parameter("library_fixed", 1e-5, 1e-6, 1e-4), Parameter("library_bandwidth", 0.8, 0.05, 1.0), HOP),
    ),
    **{kind: _collective(exchange, lambda n: 1.0 - 1.0 / n, (BANDWIDTH, HOP, QUICK, BULK))
       for kind in ("all_gather", "reduce_scatter", "all_to_all")},
}  # fmt: skip
CLASSES["mla_prefill"] = replace(CLASSES["attention_prefill"], knots=MLA_KNOTS)
CLASSES["mla_decode"] = replace(CLASSES["attention_decode"], knots=MLA_KNOTS)
QUANTIZATION = (Parameter("quantization_bandwidth", 0.5, 0.05, 1.0), Parameter("quantization_row", 1e-9, 1e-13, 1e-7))


SWITCH = (Parameter("switch_fixed", 1e-5, 1e-6, 1e-4), Parameter("switch_bandwidth", 0.5, 0.05, 1.0))


def parameters(operator_class: str, dtype: str, hardware: Hardware) -> tuple[Parameter, ...]:
    """What to fit for this class and dtype on this device, the fixed time aside."""
    quantised = operator_class == "gemm" and MATRICES[dtype][3] > 0
    switched = operator_class == "all_reduce" and hardware.link.in_switch_reduction
    return CLASSES[operator_class].parameters + QUANTIZATION * quantised + SWITCH * switched


def known(rows: Rows) -> bool:
    """Whether there is a law for these rows' class and dtype."""
    formats = KV_BYTES if rows.operator_class.startswith(("attention", "mla")) else MATRICES
    return rows.operator_class in CLASSES and rows.dtype in formats
