"""The serving engine: a preset (presets.py) and what the user changes in it. Its knobs stand in engine/knobs.py."""

from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, create_model

from infersim.engine.knobs import KNOBS

from .base import Description, near
from .errors import InputError
from .presets import FOLDER, key_of, load_preset
from .resources import is_file, names
from .units import short

AttentionKernel = Literal["standard", "flash1", "flash2", "flash3"]


def _preset(value: Any) -> str:
    if isinstance(value, str) and (value in names(FOLDER) or is_file(Path(value))):
        try:
            load_preset(value)
        except InputError as error:
            raise ValueError("; ".join(error.problems)) from None
        return value
    raise ValueError(f"no such engine preset (got {short(value)}){near(str(value), names(FOLDER))}")


if TYPE_CHECKING:  # mypy cannot see the fields of classes made from a table
    _Keys = Any
    _Values = Any
else:
    _Keys = create_model(
        "_Keys",
        __base__=Description,
        preset=(Annotated[str, BeforeValidator(_preset)], "vllm-0.33"),
        **{knob.name: key_of(knob) for knob in KNOBS if knob.user},
    )
    _names = {"preset": str, "origin": dict[str, str]}  # two presets of one content are the same engine
    _fields = [(name, kind, field(compare=False)) for name, kind in _names.items()]
    _fields += [(knob.name, knob.type | None, field(compare=knob.name != "version")) for knob in KNOBS]
    _Values = make_dataclass("_Values", _fields, frozen=True)


class Engine(_Keys):
    """A preset and the flags that differ from it; names are vLLM's. Null means the preset's or the GPU's default.

    The preset is one of engine_presets/*.yaml by name, or the path of such a file.
    """


class ResolvedEngine(_Values):
    """Every knob with its value; times in seconds. In `origin` where each value came from: knob -> 'user', 'preset
    default', 'GPU default', 'model' or a rule."""
