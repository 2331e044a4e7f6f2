"""What others published about how near devices come to their datasheets, and what a generation has in common.

The data are hardware_profiles/published/*.yaml; cost/efficiency.py says which figure stands for which device.
"""

from functools import cache

from .base import Description
from .hardware import Hardware, LaunchTime, load_hardware
from .resources import load_yaml, names, packaged
from .units import FlopsPerSecond, Number, Share


class Figure(Description):
    """A published number and who published it."""

    value: Number
    source: str


class Figures(Description):
    """One row of OperatorEfficiency. `flops`, `softness` None: no FLOPs are counted. `fixed` None: a launch's time."""

    bandwidth: Figure
    flops: Figure | None = None
    softness: Figure | None = None
    fixed: Figure | None = None


class AttentionFigures(Description):
    """How fast an attention kernel prefills: share of peak = share / (1 + 2 keys / tokens)."""

    achieved: FlopsPerSecond
    """of long sequences"""
    peak: FlopsPerSecond
    share: Share
    keys: Number
    source: str


class Published(Description):
    """figures.yaml: operator class, or attention kernel's generation -> device or kernel -> its figures."""

    operators: dict[str, dict[str, Figures]]
    launch: dict[str, LaunchTime]
    attention_kernels: dict[str, dict[str, AttentionFigures]]
    ring_hop: Figure
    """seconds per further hop of a ring over PCIe"""


class Marlin(Description):
    """Marlin's experts, where the tables of experts hold other kernels."""

    flops: Share
    softness: Number
    source: str


class Generation(Description):
    """What devices of one generation have in common (a row of generations.yaml)."""

    efficiencies_of: list[str]
    """whose figures stand for those that a device has not, nearest first"""
    query_keys: Figure
    """keys that a prefill kernel works off beyond those that a query sees, per query"""
    attention_kernels: str
    """the generation whose published attention kernels stand for those of this one"""
    marlin: Marlin | None = None
    beside_prefill: str | None = None
    """the device whose BesidePrefill stands for this generation's; None: kernels pack the heads in any step"""


OTHER = "other"
"""the row of generations.yaml for devices that are like no known one"""


@cache
def published() -> Published:
    """The published figures."""
    path = packaged("hardware_profiles") / "published" / "figures.yaml"
    return Published.validate(load_yaml(path), str(path))


@cache
def generations() -> dict[str, Generation]:
    """The known generations, by name."""
    path = packaged("hardware_profiles") / "published" / "generations.yaml"
    return {name: Generation.validate(row, f"{path}: {name}") for name, row in load_yaml(path).items()}


@cache
def profile(name: str) -> Hardware | None:
    """The packaged profile of this name; None where only published figures are known of the device."""
    return load_hardware(name) if name in names("hardware_profiles") else None


def generation_of(hardware: Hardware) -> Generation:
    """The device's generation; if it is unknown, that of the device that it is said to be like."""
    known = generations()
    name = hardware.generation
    if name not in known and hardware.efficiencies_of and (like := profile(hardware.efficiencies_of)):
        name = like.generation
    return known.get(name, known[OTHER])


def relatives(hardware: Hardware) -> list[str]:
    """Names of devices whose figures may stand for this one's, itself first, nearest first."""
    own = [hardware.name, *([hardware.efficiencies_of] if hardware.efficiencies_of else [])]
    return [*own, *generation_of(hardware).efficiencies_of, *generations()[OTHER].efficiencies_of]
