"""Weight-only INT4 kernels by name: what they gain while bytes bind, and what unpacking costs when they do not.

Two ways to use packed weights: a vector kernel that unpacks each weight once per row of activations, and a matrix
kernel that unpacks once and feeds the tensor cores. Kernels differ in both, and in the number of rows at which they go
from one to the other. Unpacking is arithmetic outside the tensor cores: it scales with the device's fp32 rate.
"""

from dataclasses import dataclass

from infersim.config.hardware import Hardware


@dataclass(frozen=True)
class WeightOnlyKernel:
    """bits: per weight, scales included. row_ops: fp32 FLOPs per weight and row of the vector kernel, used up to
    vector_rows rows (and while it is faster, if `fastest`). unpack_ops: fp32 FLOPs per weight before the matrix
    product, 0 where they hide behind it. flops: achieved share of the tensor cores' peak.
    """

    name: str
    bits: float
    vector_rows: int
    row_ops: float
    unpack_ops: float
    flops: float
    fastest: bool = False
    source: str = "IST-DASLab/marlin README, A10, 18432 x 73728, group size 128, batch 1 to 128, read off the figure"


KERNELS = {
    kernel.name: kernel
    for kernel in (
        WeightOnlyKernel("marlin", 4.125, 0, 0.0, 0.0, 0.945),
        WeightOnlyKernel("awq", 4.125, 128, 30.2, 310.0, 0.9, fastest=True),
        WeightOnlyKernel("exllamav2", 4.125, 32, 9.4, 230.0, 0.9),
        WeightOnlyKernel("bnb", 4.5, 1, 34.0, 265.0, 0.9),
    )
}


def linear_time(hardware: Hardware, rows: float, weights: float) -> float:
    """Seconds of a 16-bit linear layer of so many weights on `rows` rows: bytes or FLOPs at peak."""
    return weights * max(2 / hardware.memory_bandwidth, 2 * rows / hardware.flops["fp16"])


def weight_only_time(kernel: WeightOnlyKernel, hardware: Hardware, rows: float, weights: float) -> float:
    """Seconds of the same layer with packed weights."""
    memory = kernel.bits / 8 / hardware.memory_bandwidth
    fp32 = hardware.flops["fp32"]
    vector = max(memory, kernel.row_ops * rows / fp32)
    matrix = max(memory, kernel.unpack_ops / fp32 + 2 * rows / (kernel.flops * hardware.flops["fp16"]))
    if rows > kernel.vector_rows:
        return weights * matrix
    return weights * (min(vector, matrix) if kernel.fastest else vector)


def gain(kernel: WeightOnlyKernel, hardware: Hardware, rows: float) -> float:
    """Time in 16 bits over time with packed weights."""
    return linear_time(hardware, rows, 1.0) / weight_only_time(kernel, hardware, rows, 1.0)


def crossover_rows(kernel: WeightOnlyKernel, hardware: Hardware, limit: int = 8192) -> int | None:
    """The first number of rows at which the kernel is no faster than 16 bits; None up to `limit`."""
    return next((rows for rows in range(1, limit + 1) if gain(kernel, hardware, rows) <= 1.0), None)
