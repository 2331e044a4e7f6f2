"""What there is to fit in each class of operators: its law's prediction, bytes, parameters and correction axes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infersim.cost.correction import factor
from infersim.cost.laws import (
    attention,
    attention_coordinates,
    gemm_compute,
    gemm_coordinates,
    quantization,
    smooth_max,
    softness,
)
from infersim.spec.hardware import Hardware, OperatorEfficiency

from .fit import Parameter
from .tables import Rows


@dataclass(frozen=True)
class Work:
    """Rows of one class as physics sees them: bytes that must move and the seconds of FLOPs at peak."""

    bytes: np.ndarray
    flops_seconds: np.ndarray

    def floor(self, hardware: Hardware) -> np.ndarray:
        """Seconds that no such device can beat."""
        return np.maximum(self.bytes / hardware.memory_bandwidth, self.flops_seconds)


@dataclass(frozen=True)
class Class:
    """One class of operators.

    seconds(shares, hardware, rows) is the law without its correction; shape: the columns that make a shape, whole
    shapes are held out; knots: axis of the correction -> how many; warm: the engine finds this class's inputs cached
    too, since the kernels before it have just written them.
    """

    seconds: Callable[[OperatorEfficiency, Hardware, Rows], np.ndarray]
    work: Callable[[Hardware, Rows], Work]
    coordinates: Callable[[Hardware, Rows], dict[str, np.ndarray]]
    shape: tuple[str, ...]
    knots: dict[str, int]
    parameters: tuple[Parameter, ...]
    warm: bool = False

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
    "nvfp4": (0.5 + 1 / 16, 0.5 + 1 / 16, "fp4", 0.0),
}
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def peak(hardware: Hardware, dtype: str) -> float:
    """FLOP/s in this dtype; a device without it computes in 16 bits."""
    return hardware.flops.get(dtype) or hardware.flops.get("bf16") or hardware.flops["fp16"]


def _gemm_work(hardware: Hardware, rows: Rows) -> Work:
    m, n, k = (rows.columns[name] for name in "mnk")
    weight, activation, dtype, _ = MATRICES[rows.dtype]
    return Work(n * k * weight + m * (k * activation + n * 2.0), 2.0 * m * n * k / peak(hardware, dtype))


def _gemm_seconds(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> np.ndarray:
    m, n, k = (rows.columns[name] for name in "mnk")
    _, _, dtype, moved = MATRICES[rows.dtype]
    memory = _gemm_work(hardware, rows).bytes / (shares.bandwidth * hardware.memory_bandwidth)
    compute = gemm_compute(shares, hardware, peak(hardware, dtype), m, n, k)
    serial = quantization(shares, hardware, m, k, moved)
    return shares.fixed + serial + smooth_max(memory, compute, softness(shares.knee))


def _attention_amounts(rows: Rows) -> dict[str, np.ndarray]:
    heads, kv_heads, head_dim = (rows.columns[name] for name in ("heads", "kv_heads", "head_dim"))
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
    return shares.fixed + smooth_max(memory, compute, softness(shares.knee))


def _attention_coordinates(phase: str) -> Callable[[Hardware, Rows], dict[str, np.ndarray]]:
    def coordinates(hardware: Hardware, rows: Rows) -> dict[str, np.ndarray]:
        names = ("queries", "pairs", "heads", "kv_heads", "head_dim")
        return attention_coordinates(phase, hardware, *(rows.columns[name] for name in names))

    return coordinates


BANDWIDTH = Parameter("bandwidth", 0.85, 0.05, 1.0)
FLOPS = Parameter("flops", 0.75, 0.02, 1.0)
SOFTNESS = Parameter("softness", 0.05, 1e-4, 1.0)
ATTENTION_SHAPE = ("heads", "kv_heads", "head_dim", "window", "sequences")
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
        parameters=(BANDWIDTH, FLOPS, SOFTNESS, Parameter("sequence_time", 1e-8, 1e-10, 1e-6)),
    ),
}
QUANTIZATION = (
    Parameter("quantization_bandwidth", 0.5, 0.05, 1.0),
    Parameter("quantization_row", 1e-9, 1e-13, 1e-7),
)


def parameters(operator_class: str, dtype: str) -> tuple[Parameter, ...]:
    """What to fit for this class and dtype, the fixed time aside."""
    quantised = operator_class == "gemm" and MATRICES[dtype][3] > 0
    return CLASSES[operator_class].parameters + (QUANTIZATION if quantised else ())
