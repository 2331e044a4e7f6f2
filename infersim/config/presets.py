"""Engine presets: one version of one engine each, a YAML file that says what differs from another preset, and why."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from infersim.engine.knobs import KNOBS, Knob

from .base import Description
from .errors import InputError
from .hardware import Hardware
from .resources import find, is_file, load_yaml, names, packaged
from .units import Bytes, BytesPerSecond, Count, CountOrZero, Number, Seconds, Share

FOLDER = "engine_presets"
FLOATS = {"": Number, "share": Share, "s": Seconds, "B": Bytes, "B/s": BytesPerSecond}


def key_of(knob: Knob) -> tuple[Any, Any]:
    """A knob as a key of a description, as pydantic's create_model takes it: null unless it is given."""
    kind: Any = knob.type
    if knob.choices:
        kind = Literal[knob.choices]
    elif kind is int:
        kind = Count if knob.least else CountOrZero
    elif kind is float:
        kind = FLOATS[knob.unit]
    if bounds := dict[str, Any](knob.bounds):
        kind = Annotated[kind, Field(**bounds)]
    return (kind | None, Field(None, description=knob.about))


class BatchDefault(Description):
    """The server's defaults on devices of so much memory."""

    memory: Bytes = 0.0
    """at least"""
    unless: str | None = None
    """part of a device's name: not on these"""
    max_num_batched_tokens: Count
    max_num_seqs: Count

    def fits(self, device: Hardware) -> bool:
        return device.memory_usable >= self.memory and (self.unless is None or self.unless not in device.name.lower())


if TYPE_CHECKING:  # mypy cannot see the fields of a class made from a table
    _Keys = Any
else:
    _Keys = create_model("_Keys", __base__=Description, **{knob.name: key_of(knob) for knob in KNOBS})


class PresetFile(_Keys):
    """What one YAML file says: any knob may be a value, or `{value, source}`."""

    base: str | None = None
    """the preset from which this one differs: a name, or a path; default: that of the knobs' own defaults"""
    source: str
    """of all that it says and that has no source of its own"""
    notes: str = ""
    """what a reader should know of it"""
    batch_defaults: Annotated[list[BatchDefault], Field(min_length=1)] | None = None
    """max_num_batched_tokens and max_num_seqs by the device: the first row that fits"""


@dataclass(frozen=True)
class Preset:
    """One engine version: every knob with its value, and where each comes from; times in seconds."""

    name: str
    base: str | None
    source: str
    notes: str
    batch_defaults: list[BatchDefault]
    values: dict[str, Any]
    sources: dict[str, str]
    given: dict[str, Any]
    """what its own file says, of `values`"""

    def row(self) -> dict[str, Any]:
        """JSON-ready."""
        about = {"name": self.name, "base": self.base, "source": self.source, "notes": self.notes}
        rows = [row.model_dump(exclude_none=True) for row in self.batch_defaults]
        return about | {"batch_defaults": rows} | self.values | {"sources": self.sources}


def load_preset(name_or_path: str, near_file: Path | None = None) -> Preset:
    """The preset of that name, or that a YAML file describes. InputError says what is wrong with it."""
    if name_or_path in names(FOLDER):
        return _packaged(name_or_path)
    return _read(find(FOLDER, name_or_path, near_file), ())


def packaged_presets() -> dict[str, Preset]:
    """All that come with infersim, by name."""
    return {name: _packaged(name) for name in names(FOLDER)}


@cache
def _packaged(name: str) -> Preset:
    return _read(packaged(FOLDER) / f"{name}.yaml", ())


def _read(path: Path, seen: tuple[Path, ...]) -> Preset:
    where = str(path)
    if path.resolve() in seen:
        raise InputError(f"{where}: base: is this preset itself, or one that is based on it; must be another")
    data = load_yaml(path)
    own = {}
    if isinstance(data, dict):
        own = {key: each["source"] for key, each in data.items() if _stated(each)}
        data = {key: each["value"] if _stated(each) else each for key, each in data.items()}
    file = PresetFile.validate(data, where)
    values: dict[str, Any] = {knob.name: knob.default for knob in KNOBS}
    sources = {knob.name: knob.source for knob in KNOBS if knob.source}
    rows, base = file.batch_defaults, None
    if file.base is not None:
        if is_file(path.parent / file.base) or file.base not in names(FOLDER):
            base = _read(find(FOLDER, file.base, path, f"{where}: base"), (*seen, path.resolve()))
        else:
            base = _packaged(file.base)
        values, sources, rows = dict(base.values), dict(base.sources), rows or base.batch_defaults
    if rows is None:
        raise InputError(f"{where}: batch_defaults: missing; must be given by a preset that has no base")
    given = {knob.name: value for knob in KNOBS if (value := getattr(file, knob.name)) is not None}
    sources |= dict.fromkeys(given, file.source) | {key: str(text) for key, text in own.items()}
    name = base.name if base else None
    return Preset(path.stem, name, file.source, file.notes, rows, values | given, sources, given)


def _stated(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"value", "source"}
