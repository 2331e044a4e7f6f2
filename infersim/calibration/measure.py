"""Measuring every case in interleaved rounds: what is done is saved and found again; what is unsound is rejected.

A device is anything with `info` (a JSON-ready dict with `device`, `driver`, `torch`, `stack`) and `sample(case, n)`.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from infersim.config.errors import InputError
from infersim.config.hardware import Hardware

from .cases import Case, floor

LIMIT = 1.05  # times what the datasheet allows
SPREAD = 0.10
DRIFT = 0.05  # by which a device may slow down from the first half of the rounds to the second
IDENTITY = ("device", "driver", "torch", "stack", "threads")
"""of a device: measurements of another are not gone on with"""


class Device(Protocol):
    info: dict[str, Any]

    def sample(self, case: Case, samples: int) -> list[float]:
        """Seconds per pass, `samples` times."""

    def lost(self) -> bool:
        """Whether it runs nothing any more."""


@dataclass(frozen=True)
class Measurement:
    """One case's outcome. seconds and spread are NaN where nothing was measured; rejected: why it does not count."""

    case: Case
    seconds: float
    spread: float
    """relative difference between two halves of the rounds: how well the number repeats itself"""
    samples: int
    rejected: str = ""


@dataclass(frozen=True)
class Plan:
    """How often. CPUs share their machine: the minimum of many rounds; GPUs: the median of a few."""

    rounds: int
    samples: int
    statistic: str


CPU_PLAN, GPU_PLAN = Plan(7, 1, "minimum"), Plan(3, 5, "median")
QUICK = {"minimum": Plan(4, 1, "minimum"), "median": Plan(2, 3, "median")}


def measure(
    device: Device,
    cases: list[Case],
    plan: Plan,
    path: Path,
    hardware: Hardware | None = None,
    progress: Callable[[int, int, int], None] = lambda done, total, found: None,
) -> list[Measurement]:
    """Measure what `path` (JSON lines) does not hold yet, round by round, then judge it.

    What does not repeat itself yet gets up to as many rounds again.

    `hardware` is the datasheet's view, if there is one. A case that fails is not tried again; others go on. An
    interruption leaves what was measured in the file. InputError if the file is another device's.
    """
    times, errors = _load(path, device.info, {case.name for case in cases})
    done = sum(len(found) for found in times.values())
    total = plan.rounds * len(cases)
    found = done
    with open(path, "a", encoding="utf-8") as file:
        for number in range(2 * plan.rounds):
            extra = number >= plan.rounds
            for case in cases:
                have = times.setdefault(case.name, {})
                if case.name in errors or number in have or (extra and not _unsound(have, plan)):
                    continue
                entry: dict[str, Any] = {"case": case.name, "round": number}
                try:
                    entry["seconds"] = have[number] = [float(t) for t in device.sample(case, plan.samples)]
                except (RuntimeError, MemoryError, ValueError, TypeError, OSError) as error:
                    entry["error"] = errors[case.name] = _reason(error)
                except Exception as error:
                    if type(error).__name__ != "Unsupported":
                        raise
                    entry["error"] = errors[case.name] = str(error)
                file.write(json.dumps(entry) + "\n")
                file.flush()
                if "error" in entry and device.lost():
                    raise InputError(
                        f"{case.name}: the device failed and runs nothing any more ({entry['error']}); the same command"
                        " goes on without it"
                    )
                done += not extra
                progress(min(done + plan.rounds * len(errors), total - 1), total, found)
    progress(total, total, found)
    return [judge(case, times.get(case.name, {}), errors.get(case.name, ""), plan, hardware) for case in cases]


def _reason(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
    if "out of memory" in line.lower() or isinstance(error, MemoryError) or "can't allocate" in line.lower():
        return f"out of memory: {line}"
    return f"failed: {line}"


def _load(
    path: Path, info: dict[str, Any], known: set[str]
) -> tuple[dict[str, dict[int, list[float]]], dict[str, str]]:
    """Times by case and round, and errors by case, of an earlier start; writes the header of a new file."""
    identity = {key: info.get(key) for key in IDENTITY}
    if not path.exists():
        path.write_text(json.dumps({"measured_on": identity}) + "\n", encoding="utf-8")
        return {}, {}
    times: dict[str, dict[int, list[float]]] = {}
    errors: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    entries = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line break was cut short
        try:
            entries.append(json.loads(line))
        except ValueError:
            raise InputError(f"{path}: line {number}: not JSON; remove the file, or add --force") from None
    if not entries or entries[0].get("measured_on") != identity:
        theirs = entries[0].get("measured_on") if entries else None
        raise InputError(
            f"{path}: holds measurements of {_words(theirs) if isinstance(theirs, dict) else 'something else'},"
            f" and this is {_words(identity)}; name another --out, or add --force"
        )
    for entry in entries[1:]:
        if entry.get("case") in known:
            if "error" in entry:
                errors[entry["case"]] = entry["error"]
            else:
                times.setdefault(entry["case"], {})[entry["round"]] = entry["seconds"]
    if lines[-1]:
        _truncate(path, lines[:-1])
    return times, errors


def _truncate(path: Path, lines: list[str]) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)


def _words(identity: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in identity.items() if value)


def _value(samples: list[float], plan: Plan) -> float:
    return float(np.min(samples) if plan.statistic == "minimum" else np.median(samples))


def _spread(rounds: dict[int, list[float]], plan: Plan) -> float:
    """|a / b - 1| of the statistic over even and odd rounds; of one round, over its samples. inf if there is one."""
    if not rounds:
        return math.inf
    parts = [rounds[r] for r in sorted(rounds)]
    if len(parts) == 1:
        parts = [[t] for t in parts[0]]
    halves = [[t for part in parts[i::2] for t in part] for i in range(2)]
    if not all(halves) or not np.all(np.isfinite(halves[0] + halves[1])):
        return math.inf
    a, b = (_value(half, plan) for half in halves)
    return abs(a - b) / min(a, b) if min(a, b) > 0 else math.inf


def _slowed(rounds: dict[int, list[float]], plan: Plan) -> float:
    """By how much the second half of the rounds is slower than the first."""
    ordered = [_value(rounds[r], plan) for r in sorted(rounds)]
    half = len(ordered) // 2
    return _value(ordered[-half:], plan) / _value(ordered[:half], plan) - 1 if half else 0.0


def _unsound(rounds: dict[int, list[float]], plan: Plan) -> str:
    """Why these rounds are not to be trusted, if so."""
    if not all(math.isfinite(t) and t > 0 for found in rounds.values() for t in found):
        return "times that are not numbers above 0"
    if (slower := _slowed(rounds, plan)) > SPREAD:
        return f"slowed down by {slower:.0%} while it was measured (a clock that throttles?)"
    if (spread := _spread(rounds, plan)) > SPREAD:
        return f"repeats itself only within {spread:.0%}"
    return ""


def judge(case: Case, rounds: dict[int, list[float]], error: str, plan: Plan, hardware: Hardware | None) -> Measurement:
    """What a case's rounds amount to, and why they are not to be trusted, if so."""
    samples = [t for r in sorted(rounds) for t in rounds[r]]
    if error or not samples:
        return Measurement(case, math.nan, math.nan, len(samples), error or "not measured")
    rejected = _unsound(rounds, plan)
    seconds, spread = _value(samples, plan), _spread(rounds, plan)
    if not rejected and hardware is not None and seconds * LIMIT < (least := floor(case, hardware)):
        rejected = f"{least / seconds:.0%} of what the datasheet allows"
    return Measurement(case, seconds, spread, len(samples), rejected)


def drift(measurements_by_round: dict[str, dict[int, list[float]]], plan: Plan) -> float:
    """By how much the whole device slowed down, first half of the rounds to second: the median over cases."""
    ratios = []
    for rounds in measurements_by_round.values():
        samples = [t for found in rounds.values() for t in found]
        if len(rounds) > 1 and np.all(np.isfinite(samples)) and min(samples) > 0:
            ratios.append(_slowed(rounds, plan))
    return float(np.median(ratios)) if ratios else 0.0


def saved_drift(path: Path, plan: Plan) -> float:
    """`drift` of the measurements that a file holds."""
    times: dict[str, dict[int, list[float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        entry = json.loads(line)
        if "seconds" in entry:
            times.setdefault(entry["case"], {})[entry["round"]] = entry["seconds"]
    return drift(times, plan)


def repeat_spread(measurements: list[Measurement], group: str = "step") -> float:
    """The machine's own: the median spread of the cases of a group."""
    spreads = [m.spread for m in measurements if m.case.group == group and math.isfinite(m.spread)]
    return float(np.median(spreads)) if spreads else math.nan
