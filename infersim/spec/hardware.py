"""Hardware profiles: what one accelerator can do, and who says so."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from .base import Description, near
from .precision import FORMATS
from .resources import find, load_yaml
from .units import Bytes, BytesPerSecond, Count, FlopsPerSecond, Number, Seconds, Share, UsdPerHour, Watts

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
OPERATOR_CLASSES = ("gemm", "moe", "attention_prefill", "attention_decode", "mla_prefill", "mla_decode", "recurrent",
                    "elementwise", "collective")  # fmt: skip


def _at_least(least: float, text: str) -> AfterValidator:
    """No such device is slower or smaller: a number meant in GB or TB/s, whose unit is missing."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"must be at least {text}; a number without a unit is in bytes or FLOPs (got {value:g})")
        return value

    return AfterValidator(check)


Provenance = Literal["measured", "calibrated", "datasheet", "published", "assumed"]


class OperatorEfficiency(Description):
    """How near one class of operator comes to the datasheet: t = fixed + (t_mem^knee + t_flop^knee)^(1/knee).

    t_mem = bytes / (bandwidth * memory bandwidth), t_flop = FLOPs / (flops * peak).
    """

    bandwidth: Share
    """share of the memory bandwidth that is reached, in (0, 1]"""
    flops: Share
    """share of the dense FLOP/s that is reached, in (0, 1]"""
    fixed: Seconds
    """seconds per operator that no byte or FLOP explains"""
    knee: Annotated[Number, Field(ge=1, le=100)]
    """exponent of the smooth maximum; larger is sharper"""
    provenance: Provenance
    source: str
    errors: dict[str, str] = Field(default_factory=dict)
    """how far measured kernels are from this, median and 90th percentile, by what was measured"""


class Link(Description):
    """The scale-up link between accelerators."""

    name: str
    bandwidth: Annotated[BytesPerSecond, _at_least(1e6, "1 MB/s")]
    """bytes per second in one direction, per accelerator, all links together"""
    domain_size: Count
    """accelerators that it joins; 1 if there is no link but PCIe"""


class Price(Description):
    """What renting one accelerator for an hour costs."""

    low: UsdPerHour
    high: UsdPerHour
    source: str

    @model_validator(mode="after")
    def _ordered(self) -> "Price":
        if self.low > self.high:
            raise ValueError(f"low must be at most high (got {self.low:g} and {self.high:g})")
        return self


class LaunchTime(Description):
    """Seconds from one small kernel's start to the next one's, both queued: replayed in a graph, or launched."""

    graph: Seconds
    eager: Seconds
    source: str


class Calibration(Description):
    """Where a measured profile comes from. Its efficiencies hold for the kernels of one software stack."""

    device: str
    """as the driver names it"""
    driver: str
    stack: Literal["torch", "vllm", "sglang", "trtllm"]
    version: str
    """of the stack"""
    date: str
    command: str
    repeat_spread: Number
    """relative difference between two halves of the measurements of whole model steps"""
    errors: dict[str, str]
    """predictions of what was measured and not fitted"""
    notes: list[str] = Field(default_factory=list)


class Hardware(Description):
    """One accelerator. Capacities in bytes, rates per second, FLOP/s dense (datasheets often quote sparse: half it)."""

    name: str
    vendor: str
    generation: str
    """architecture, e.g. ampere, ada, hopper, blackwell, cdna3, tpu: the key of the default efficiencies"""
    memory_capacity: Annotated[Bytes, _at_least(1e6, "1 MB")]
    """what the vendor sells"""
    memory_usable: Annotated[Bytes, _at_least(1e6, "1 MB")]
    """what the driver reports as total memory: vLLM's gpu_memory_utilization is a share of this"""
    memory_bandwidth: Annotated[BytesPerSecond, _at_least(1e6, "1 MB/s")]
    flops: dict[Literal[DTYPES], Annotated[FlopsPerSecond, _at_least(1e6, "1 MFLOP/s")]]
    num_sms: Count | None = None
    shared_memory_per_sm: Bytes | None = None
    """bytes that one block of threads can be given on an SM"""
    l2_cache: Bytes | None = None
    link: Link
    pcie_bandwidth: Annotated[BytesPerSecond, _at_least(1e6, "1 MB/s")] | None = None
    """bytes per second in one direction, to the host"""
    tdp: Watts | None = None
    price: Price | None = None
    efficiency: dict[str, OperatorEfficiency] = Field(default_factory=dict)
    """by operator class, or class.dtype: of matrices the format of their weights, else that of the elements"""
    launch: LaunchTime | None = None
    """default: published figures of the nearest device"""
    calibration: Calibration | None = None
    sources: list[str]
    disagreements: str = ""

    @model_validator(mode="after")
    def _sensible(self) -> "Hardware":
        problems = []
        if not {"bf16", "fp16"} & self.flops.keys():
            problems.append("flops must give bf16 or fp16")
        for key in self.efficiency:
            operator, _, dtype = key.partition(".")
            if operator not in OPERATOR_CLASSES:
                problems.append(f"efficiency.{key[:40]} is no operator class" + near(operator, list(OPERATOR_CLASSES)))
            elif dtype and dtype not in (*DTYPES, *FORMATS):
                problems.append(f"efficiency.{key[:40]} names no dtype" + near(dtype, [*DTYPES, *FORMATS]))
        if problems:
            raise ValueError("; ".join(problems))
        return self


def load_hardware(name_or_path: str | Path, near_file: Path | None = None, where: str = "") -> Hardware:
    """The profile by name, or at a path (from the folder of `near_file` first). InputError lists near names."""
    path = find("hardware_profiles", name_or_path, near_file, where)
    return Hardware.validate(load_yaml(path), str(path))
