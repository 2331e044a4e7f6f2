"""Hardware profiles: what one accelerator can do, and who says so."""

import marshal
import math
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from .base import Description, near
from .precision import FORMATS
from .resources import find, load_yaml, names
from .units import Bytes, BytesPerSecond, Count, FlopsPerSecond, Number, Seconds, Share, Watts, short

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4"]
DTYPES = get_args(Dtype)
OPERATOR_CLASSES = ("gemm", "moe", "attention_prefill", "attention_decode", "mla_prefill", "mla_decode", "recurrent",
                    "elementwise", "collective", "all_reduce", "all_gather", "reduce_scatter",
                    "all_to_all")  # fmt: skip
MOST_KNOTS = 640  # of a correction


def _at_least(least: float, text: str) -> AfterValidator:
    """No such device is slower or smaller: a number meant in GB or TB/s, whose unit is missing."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"must be at least {text}; a number without a unit is in bytes or FLOPs (got {value:g})")
        return value

    return AfterValidator(check)


Provenance = Literal["measured", "calibrated", "datasheet", "published", "assumed"]


AXES = ("m", "n", "k", "size", "ranks", "tokens", "experts", "hidden", "inter", "work", "keys", "head_dim", "group")
"""axes of corrections, in the order in which their values run, the last one fastest"""


# What the laws of calibrated classes have beyond an OperatorEfficiency's four numbers (cost/laws.py).
TERMS = {
    "gemm": {
        "tile_depth": "columns of K that a tile's prologue and epilogue cost",
        "small_tile": "exponent by which the rate falls with a tile's area, below 128 x 256",
        "split_traffic": "times that the FP32 partial sums of a matrix split along K are written and read",
        "quantization_bandwidth": "share of the memory bandwidth at which inputs are quantised",
        "quantization_row": "seconds per row of inputs that are quantised",
    },
    "attention_prefill": {
        "query_keys": "further keys that a query's work amounts to",
        "tile_keys": "further keys that a tile of 128 queries' work on each key head amounts to, per query",
        "narrow_head": "exponent by which the rate falls with the head dimension, below 128",
    },
    "attention_decode": {"sequence_time": "seconds per sequence and key head"},
    "moe": {"elsewhere": "share of the traffic of tokens for other ranks' experts that moves here too"},
    "all_reduce": {
        "library_fixed": "seconds before the first byte where NCCL does it",
        "library_bandwidth": "share of the link's bandwidth that NCCL reaches",
        "hop": "seconds per rank beyond two where NCCL does it",
        "switch_fixed": "seconds before the first byte where the link's switches add up",
        "switch_bandwidth": "share of the link's bandwidth that this reaches",
    },
    "all_gather": {
        "hop": "seconds per rank beyond two",
        "quick_bandwidth": "share of the link's bandwidth of NCCL's low-latency protocols",
        "bulk_fixed": "seconds before the first byte of its simple protocol, which reaches `bandwidth`",
    },
}
TERMS |= {"reduce_scatter": TERMS["all_gather"], "all_to_all": TERMS["all_gather"]}
TERMS |= {"mla_prefill": TERMS["attention_prefill"], "mla_decode": TERMS["attention_decode"]}
OPTIONAL = ("quantization_bandwidth", "quantization_row", "query_keys", "tile_keys", "narrow_head", "sequence_time",
            "switch_fixed", "switch_bandwidth")  # fmt: skip
"""terms that a law does without"""
CORRECTED = {
    "gemm": ("m", "n", "k"),
    "moe": ("tokens", "experts", "hidden", "inter"),
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"), ("size", "ranks")),
    **dict.fromkeys(("attention_prefill", "attention_decode", "mla_prefill", "mla_decode"),
                    ("work", "keys", "head_dim", "group")),
}  # fmt: skip
"""axes of a class's correction"""


class Correction(Description):
    """What measured kernels deviate from their law: factors on a grid (cost/correction.py says between its knots)."""

    axes: dict[str, tuple[float, float, Count]]
    """name -> first knot, last knot, how many, evenly spaced, in powers of two"""
    values: str
    """logarithms of the factors in thousandths; m, n, k and the like run in this order however the axes are written"""

    @field_validator("axes")
    @classmethod
    def _in_order(cls, axes: dict[str, Any]) -> dict[str, Any]:
        """A mapping has no order: what sorts its keys must not change what it means."""
        if unknown := [name for name in axes if name not in AXES]:
            raise ValueError(f"{short(unknown[0])[1:-1]} is none; must be of {', '.join(AXES)}")
        return {name: axes[name] for name in AXES if name in axes}

    @model_validator(mode="after")
    def _complete(self) -> "Correction":
        size = math.prod(count for _, _, count in self.axes.values())
        words, wrong = _read(self.values)
        if words != size or size > MOST_KNOTS:
            raise ValueError(f"values must be {size} whole numbers, as the axes say, and at most {MOST_KNOTS}"
                             f" (got {words})")  # fmt: skip
        if wrong is not None:
            raise ValueError(f"values must be whole numbers between -5000 and 5000 (got {wrong[:20]!r})")
        for name, (first, last, count) in self.axes.items():
            if last <= first and count > 1:
                raise ValueError(f"axes.{name} must rise from its first to its last knot (got {first} to {last})")
        return self


@lru_cache(maxsize=1024)
def _read(values: str) -> tuple[int, str | None]:
    """How many words a correction's values have, and the first that is none. A plan reads the same profile often."""
    words = values.split()
    wrong = (word for word in words if not word.lstrip("-").isdecimal() or abs(int(word)) > 5000)
    return len(words), next(wrong, None)


class OperatorEfficiency(Description):
    """How close one class of operators comes to the datasheet: t = fixed + smooth_max(t_mem, t_flop).

    t_mem = bytes / (bandwidth * memory bandwidth), t_flop = FLOPs / (flops * peak), and
    smooth_max(a, b) = (a + b + sqrt((a - b)^2 + 4 softness a b)) / 2.
    """

    bandwidth: Share
    """share of the memory bandwidth that is reached, in (0, 1]"""
    flops: Share
    """share of the dense FLOP/s that is reached, in (0, 1]"""
    fixed: Seconds
    """seconds per operator that no byte or FLOP explains"""
    softness: Annotated[Number, Field(le=1)]
    """of the smooth maximum: 0 is the longer of the two times, 1 their sum"""
    provenance: Provenance
    source: str
    terms: dict[str, Number] = Field(default_factory=dict)
    """what else the law of this class has: TERMS in config/hardware.py"""
    errors: dict[str, str] = Field(default_factory=dict)
    """how far measured kernels are from this, median and 90th percentile, by what was measured"""
    correction: Correction | None = None


class Link(Description):
    """The scale-up link between accelerators."""

    name: str
    bandwidth: Annotated[BytesPerSecond, _at_least(1e6, "1 MB/s")]
    """bytes per second in one direction, per accelerator, all links together; with a domain_size of 1 what collectives
    get over PCIe, whatever pcie_bandwidth says of the way to the host"""
    domain_size: Count
    """accelerators that it joins; 1 if there is no link but PCIe"""
    in_switch_reduction: bool = False
    """its switches add up what devices send each other (NVLink SHARP, from NVLink4's switches on)"""


class LaunchTime(Description):
    """Seconds from one small kernel's start to the next one's, both queued: replayed in a graph, or launched."""

    graph: Seconds
    eager: Seconds
    source: str


class BesidePrefill(Description):
    """What a layer's decodes cost more in a step that also prefills (cost/mixed.py)."""

    least: Annotated[Number, Field(ge=1)]
    """keys read over those read alone, at few keys"""
    growth: Number
    """more of it per byte of keys and values that all decodes see"""
    head: Seconds
    """per query head of a decode"""
    block: Seconds
    """per query head of a decode, and tile of 128 queries of the longest prompt"""
    source: str


Stack = Literal["torch", "vllm", "sglang", "trtllm"]


class Calibration(Description):
    """Where a measured profile comes from. Its efficiencies hold for the kernels of one software stack."""

    device: str
    """as the driver names it"""
    driver: str
    stack: Stack
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
    """architecture, e.g. ampere, ada, hopper, blackwell, cdna3, tpu: what holds for all of its devices
    (hardware_profiles/published/generations.yaml)"""
    also_called: list[str] = Field(default_factory=list)
    """as its driver names it, and published tables do"""
    efficiencies_of: str | None = None
    """the packaged profile whose efficiencies stand, as an assumption, for those that this one has not; and whose
    generation for an unknown one. Default: the generation's"""
    memory_capacity: Annotated[Bytes, _at_least(1e6, "1 MB")]
    """what the vendor sells"""
    memory_usable: Annotated[Bytes, _at_least(1e6, "1 MB")]
    """what the driver reports as total memory: vLLM's gpu_memory_utilization is a share of this"""
    memory_bandwidth: Annotated[BytesPerSecond, _at_least(1e6, "1 MB/s")]
    flops: dict[Dtype, Annotated[FlopsPerSecond, _at_least(1e6, "1 MFLOP/s")]]
    num_sms: Count | None = None
    shared_memory_per_sm: Bytes | None = None
    """bytes that one block of threads can be given on an SM"""
    l2_cache: Bytes | None = None
    link: Link
    pcie_bandwidth: Annotated[BytesPerSecond, _at_least(1e6, "1 MB/s")] | None = None
    """bytes per second in one direction, to the host"""
    tdp: Watts | None = None
    efficiency: dict[str, OperatorEfficiency] = Field(default_factory=dict)
    """by operator class, or class.dtype: of matrices the format of their weights, else that of the elements; with
    @trtllm or another engine's name behind for a kernel of its own"""
    launch: LaunchTime | None = None
    """default: published figures of the nearest device"""
    beside_prefill: BesidePrefill | None = None
    """default: the generation's"""
    calibration: Calibration | None = None
    sources: list[str]
    disagreements: str = ""

    @cached_property
    def _told(self) -> bytes:
        return marshal.dumps(self.model_dump(mode="json"))

    def told(self) -> dict[str, Any]:
        """The profile JSON-ready, in SI units: a copy of its own, as it is long and every answer has it."""
        return marshal.loads(self._told)

    @model_validator(mode="after")
    def _sensible(self) -> "Hardware":
        problems = []
        if not {"bf16", "fp16"} & self.flops.keys():
            problems.append("flops must give bf16 or fp16")
        if self.efficiencies_of and self.efficiencies_of not in (known := names("hardware_profiles")):
            hint = near(self.efficiencies_of, known)
            problems.append(f"efficiencies_of must be a packaged profile (got {short(self.efficiencies_of)}){hint}")
        for key in self.efficiency:
            name, at, stack = key.partition("@")
            operator, _, dtype = name.partition(".")
            if at and stack not in get_args(Stack):
                problems.append(f"efficiency.{key[:40]} names no engine" + near(stack, list(get_args(Stack))))
            if operator not in OPERATOR_CLASSES:
                problems.append(f"efficiency.{key[:40]} is no operator class" + near(operator, list(OPERATOR_CLASSES)))
            elif dtype and dtype not in (*DTYPES, *FORMATS):
                problems.append(f"efficiency.{key[:40]} names no dtype" + near(dtype, [*DTYPES, *FORMATS]))
            else:
                problems += [
                    f"efficiency.{key[:40]}.{problem}" for problem in _wrong_law(operator, self.efficiency[key])
                ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _wrong_law(operator: str, shares: OperatorEfficiency) -> list[str]:
    """What its class's law cannot be worked out with."""
    known, terms, found = TERMS.get(operator, {}), shares.terms, []
    for name in sorted(terms.keys() - known.keys()):
        found.append(f"terms.{name[:40]} is no term of {operator}" + near(name, list(known)))
    if missing := [name for name in known if terms and name not in terms and name not in OPTIONAL]:
        found.append(f"terms must give {', '.join(missing)} too")
    if ("switch_fixed" in terms) != ("switch_bandwidth" in terms):
        found.append("terms must give both switch_fixed and switch_bandwidth, or neither")
    for name, value in terms.items():
        if name.endswith("_bandwidth") and not 0 < value <= 1:
            found.append(f"terms.{name} is a share; must be above 0 and at most 1 (got {value:g})")
    if shares.correction and shares.correction.axes.keys() != set(CORRECTED.get(operator, ())):
        right = ", ".join(CORRECTED.get(operator, ())) or "none: this class has no correction"
        found.append(f"correction.axes must be {right} (got {', '.join(shares.correction.axes)})")
    return found


def with_kernels_of(hardware: Hardware, stack: str) -> Hardware:
    """The device as this engine uses it: with its own kernels where the profile has any."""
    own = {key.partition("@")[0]: row for key, row in hardware.efficiency.items() if key.endswith(f"@{stack}")}
    return hardware.model_copy(update={"efficiency": {**hardware.efficiency, **own}}) if own else hardware


def load_hardware(name_or_path: str | Path, near_file: Path | None = None, where: str = "") -> Hardware:
    """The profile by name, or at a path (from the folder of `near_file` first). InputError lists near names."""
    path = find("hardware_profiles", name_or_path, near_file, where)
    file = path.stat()
    return _profile(path, file.st_mtime_ns, file.st_size, file.st_ino)


@lru_cache(maxsize=128)
def _profile(path: Path, *changed: int) -> Hardware:
    """The profile in a file; read again when that has changed."""
    return Hardware.validate(load_yaml(path), str(path))
