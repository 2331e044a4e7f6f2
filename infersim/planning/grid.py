"""The points of a sweep: every combination of the values that some settings take."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from infersim.config.errors import InputError
from infersim.config.resources import parse_yaml
from infersim.config.units import short

MAX_POINTS = 1_000_000
EXAMPLE = "engine.max_num_seqs=64,128,256 or workload.request_rate=1:10:0.5 or parallelism.tensor=1:8:*2"


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """A key and its values from `key=VALUES`: `1,2,4`, a YAML list, or an inclusive range.

    A range is `start:stop:step`, or `start:stop:*factor`. InputError for anything else.
    """
    key, equals, values = text.partition("=")
    key, values = key.strip(), values.strip()
    asked = f"--over {short(text)[1:-1]}"
    if not equals or not key or not values:
        raise InputError(f"{asked}: must be key=values, such as {EXAMPLE}")
    if values.count(":") == 2 and not values.startswith(("[", "{", "'", '"')):
        return key, _range(values, asked)
    parsed = parse_yaml(values if values.startswith("[") else f"[{values}]", asked)
    if not parsed:
        raise InputError(f"{asked}: has no values; must be such as {EXAMPLE}")
    return key, parsed


def _range(text: str, asked: str) -> list[float]:
    start, stop, step = text.split(":")
    geometric = step.startswith("*")
    try:
        first, last, by = float(start), float(stop), float(step.removeprefix("*"))
    except ValueError:
        raise InputError(f"{asked}: a range must be three numbers, start:stop:step or start:stop:*factor") from None
    endless = by <= 1 or first <= 0 if geometric else by <= 0
    if endless or not first <= last or not all(map(math.isfinite, (first, last, by))):
        raise InputError(f"{asked}: a range must rise from start to stop, by a step above 0 or a factor above 1")
    count = math.log(last / first, by) if geometric else (last - first) / by
    if count > MAX_POINTS:
        raise InputError(f"{asked}: more than {MAX_POINTS:,} values; must be a larger step")
    steps = range(math.floor(count + 1e-9) + 1)
    # 12 digits: 0.1 + 2 * 0.1 is meant to be 0.3
    values = [float(f"{first * by**i if geometric else first + i * by:.12g}") for i in steps]
    whole = all(value.is_integer() for value in values) and "." not in text
    return [int(value) for value in values] if whole else values


def grid(axes: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last key changing fastest. InputError for an empty axis or too many points."""
    lists = {key: list(values) for key, values in axes.items()}
    if not lists or not all(lists.values()):
        raise InputError(f"sweep: has no --over; must have at least one, such as {EXAMPLE}")
    if math.prod(map(len, lists.values())) > MAX_POINTS:
        raise InputError(f"sweep: more than {MAX_POINTS:,} points; must be fewer values")
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def as_overrides(point: Mapping[str, Any]) -> list[str]:
    """The point as `key=value` overrides of a scenario; JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in point.items()]
