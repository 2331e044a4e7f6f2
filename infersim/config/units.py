"""Quantities with units: "3.35 TB/s", "80 GiB", "989 TFLOP/s", "500 ms". Inside infersim everything is an SI float."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import core_schema

DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

# unit -> (what to call it in an error, an example of what is right, {spelling: factor})
UNITS: dict[str, tuple[str, str, dict[str, float]]] = {
    "B": ("a size in bytes", "80 GB or 80 GiB", {p + "B": f for p, f in (DECIMAL | BINARY).items()}),
    "B/s": ("a bandwidth in bytes", "3.35 TB/s", {p + "B/s": f for p, f in (DECIMAL | BINARY).items()}),
    "FLOP/s": ("a rate", "989 TFLOP/s", {p + u: f for p, f in DECIMAL.items() for u in ("FLOP/s", "FLOPS")}),
    "s": ("a time", "500 ms", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}),
    "ms": ("a time in ms", "500 or 0.5 s", {"ms": 1.0, "s": 1e3, "us": 1e-3, "µs": 1e-3}),
    "W": ("a power", "700 W", {"W": 1.0, "kW": 1e3}),
    "Hz": ("a frequency", "1.98 GHz", {p + "Hz": DECIMAL[p] for p in ("", "k", "M", "G")}),
    "1/s": ("a rate per second", "10 or 10 1/s", {"1/s": 1.0, "req/s": 1.0}),
    "USD/h": ("a price", "2.50 USD/h", {"USD/h": 1.0}),
    "": ("a number without a unit", "0.9", {}),
}

MOST = {"s": 1e9, "ms": 1e12, "1/s": 1e9}  # 32 years: a longer clock no longer tells microseconds apart

QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.{0,20})?\s*")


def parse_quantity(value: Any, unit: str) -> float:
    """The value in SI `unit`, one of UNITS; a bare number is in that unit already.

    ValueError, in one line, for anything that is not a finite number >= 0 with a unit of that kind, or more than the
    MOST of that unit.
    """
    kind, example, spellings = UNITS[unit]
    wrong = f"must be {kind} such as {example}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{wrong} (got {short(value)})")
    number: Any = value
    if isinstance(value, str):
        match = QUANTITY.fullmatch(value) if len(value) < 80 else None
        if not match:
            raise ValueError(f"{wrong} (got {short(value)})")
        number, given = match[1], (match[2] or "").strip()
        if given:
            if given not in spellings:
                near = [s for s in spellings if s.lower() == given.lower()]
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{wrong} (got {short(value)}, unit {given!r} is not one of these{hint})")
            with localcontext(Context(traps=[])):  # in decimal, so that 1.1 ms and 1100 us are one number
                number = Decimal(number) * Decimal(repr(spellings[given]))
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{wrong}, finite (got {short(value)})")
    if result < 0:
        raise ValueError(f"{wrong}, not negative (got {short(value)})")
    if result > MOST.get(unit, math.inf):
        raise ValueError(f"{wrong}, of at most {MOST[unit]:g} (got {short(value)})")
    return result


def parse_count(value: Any, least: int = 1, most: int = 10**15) -> int:
    """A whole number in [least, most]; "1e6" and 1e6 are whole numbers too. ValueError otherwise."""
    wrong = f"must be a whole number >= {least}"
    try:
        number = float(value) if isinstance(value, str) and len(value) < 80 else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number // 1:  # NaN, inf: not equal
        raise ValueError(f"{wrong} (got {short(value)})")
    if number < least:
        raise ValueError(f"{wrong} (got {short(value)})")
    if number > most:
        raise ValueError(f"must be a whole number of at most {most:.0e} (got {short(value)})")
    return int(number)


def short(value: Any) -> str:
    """One short line that shows a wrong value, whatever it is (nested, endless, binary)."""
    if isinstance(value, dict | list | tuple | set):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value[:100] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, eq=False)  # hashed by identity
class Parsed:
    """For Annotated: `parse` reads what a user wrote, and `schema` (JSON Schema) describes that to editors."""

    parse: Callable[[Any], Any]
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))

    def __get_pydantic_json_schema__(self, _: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)


def quantity(unit: str) -> Parsed:
    """A quantity is read by `parse_quantity` and described to editors as number or string."""
    kind, example, _ = UNITS[unit]
    schema = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}], "title": f"{kind} such as {example}"}
    return Parsed(lambda value: parse_quantity(value, unit), schema)


Bytes = Annotated[float, quantity("B")]
BytesPerSecond = Annotated[float, quantity("B/s")]
FlopsPerSecond = Annotated[float, quantity("FLOP/s")]
Seconds = Annotated[float, quantity("s")]
Milliseconds = Annotated[float, quantity("ms")]
Watts = Annotated[float, quantity("W")]
UsdPerHour = Annotated[float, quantity("USD/h")]
Number = Annotated[float, quantity("")]
Count = Annotated[int, Parsed(parse_count, {"type": "integer", "minimum": 1})]
CountOrZero = Annotated[int, Parsed(lambda value: parse_count(value, least=0), {"type": "integer", "minimum": 0})]
Share = Annotated[Number, Field(gt=0, le=1)]
"""a share in (0, 1]"""
Weight = Annotated[Number, Field(ge=1e-9, le=1e9)]
"""against others, or what is divided by: neither may overflow"""
