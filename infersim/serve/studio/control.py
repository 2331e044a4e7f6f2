"""One input of the page: a key of the scenario, with its unit, range, value and default."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from infersim.config.errors import InputError

from .edit import WHERE, Remove


@dataclass(frozen=True)
class Control:
    """One input. kind: range (a slider and a number), choice, switch, text."""

    key: str
    label: str
    kind: str = "range"
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    whole: bool = True
    unit: str = ""
    """shown behind the value"""
    suffix: str = ""
    """what the YAML has behind the number, where it is not the key's own unit"""
    factor: float = 1.0
    """resolved value times this is what is shown"""
    choices: tuple[str, ...] = ()
    about: str = ""
    value: Any = None
    default: str = ""
    given: bool = False

    def written(self, value: Any) -> Any:
        """What the YAML holds for what the page sent. InputError for what this input cannot hold."""
        if value is None:
            return Remove
        if self.kind == "switch":
            return bool(value)
        if self.kind == "range":
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise InputError(f"{WHERE}: {self.key}: must be a number (got {str(value)[:40]!r})") from None
            if not math.isfinite(number):
                raise InputError(f"{WHERE}: {self.key}: must be finite (got {number})")
            short = int(number) if number == int(number) else number
            return f"{short} {self.suffix}" if self.suffix else short
        text = str(value)
        return int(text) if self.kind == "choice" and text.isdecimal() else text

    def bare(self) -> "Control":
        """Without what may change from answer to answer."""
        return replace(self, low=0.0, high=0.0, value=None, default="", given=False)

    def widened(self) -> "Control":
        """With a range that holds the value."""
        if self.kind != "range" or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            return self
        return replace(self, low=min(self.low, self.value), high=max(self.high, self.value))


Change = tuple[str, Any]
"""a key and its new value, or Remove"""


@dataclass(frozen=True)
class Form:
    """An input that chooses between ways of saying something: each option sets and removes several keys."""

    key: str
    label: str
    options: dict[str, list[Change]]
    value: str
    kind: str = field(default="choice", init=False)
    about: str = ""
    default: str = ""
    given: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.options)

    def bare(self) -> Control:
        """What the page shows of it."""
        return Control(self.key, self.label, self.kind, choices=self.choices, about=self.about)


Group = tuple[str, list[Control | Form]]
