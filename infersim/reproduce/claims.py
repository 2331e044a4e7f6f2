"""What the literature says, recomputed: one row per claim."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from infersim.config.base import near
from infersim.config.errors import InputError

Numbers = float | tuple[float, ...]

CLOSED_FORM, SIMULATION = 0.05, 0.20
"""relative tolerances where the source gives none"""


@dataclass(frozen=True)
class Claim:
    """One number, or several, and how we come by them.

    tolerance is relative to each number expected, or in its unit if `absolute`. kind: value; relation, a statement
    that must hold for all of many inputs (`share_holding`); behaviour, a simulated comparison; range, (low, high) that
    each number must lie in.
    compute gives None if this is not applicable: `note` says why. why: one line on a disagreement.
    """

    id: str
    source: str
    expected: Numbers
    unit: str
    tolerance: float
    compute: Callable[[], Numbers | None]
    note: str
    kind: str = "value"
    why: str = ""
    absolute: bool = False


def share_holding(cases: Iterable[bool]) -> float:
    """The share of inputs for which a relation holds: what a relation's claim expects to be 1."""
    cases = [bool(case) for case in cases]
    return sum(cases) / len(cases)


def relation(id: str, source: str, compute: Callable[[], float], note: str, kind: str = "relation") -> Claim:
    """A claim that something holds for all inputs tried."""
    return Claim(id, source, 1.0, "share of inputs for which it holds", 0, compute, note, kind)


def not_applicable(id: str, source: str, reason: str) -> Claim:
    """A number that no simulator can recompute, or not from what its source prints."""
    return Claim(id, source, 0.0, "", 0, lambda: None, reason)


def _agrees(claim: Claim, got: Numbers) -> bool:
    expected, got = (numbers if isinstance(numbers, tuple) else (numbers,) for numbers in (claim.expected, got))
    margin = [claim.tolerance * (1 if claim.absolute else abs(number)) for number in expected]
    if claim.kind == "range":
        (low, high), (below, above) = expected, margin
        return all(low - below <= number <= high + above for number in got)
    return all(abs(a - b) <= most for a, b, most in zip(got, expected, margin, strict=True))


FIELDS = ("id", "source", "kind", "expected", "unit", "tolerance", "absolute", "note")


def check(claims: Iterable[Claim]) -> dict[str, Any]:
    """`results`, one row per claim, and how many of them are ok, failed, not_applicable."""
    results = []
    for claim in claims:
        got = claim.compute()
        ok = None if got is None else _agrees(claim, got)
        row = {name: getattr(claim, name) for name in FIELDS}
        if ok is False and claim.why:
            row["note"] = f"{claim.note}; {claim.why}" if claim.note else claim.why
        if ok is None:
            row["expected"] = None
        results.append(row | {"got": got, "ok": ok})
    verdicts = [row["ok"] for row in results]
    return {
        "results": results,
        "ok": verdicts.count(True),
        "failed": verdicts.count(False),
        "not_applicable": verdicts.count(None),
    }


def select(claims: tuple[Claim, ...], ids: list[str]) -> list[Claim]:
    """The claims of these ids or groups (what stands before a dot); all without any. InputError if unknown."""

    def names(claim: Claim) -> set[str]:
        parts = claim.id.split(".")
        return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}

    known = set().union(*map(names, claims))
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise InputError(f"reproduce {name[:80]}: no such claim{near(name, sorted(known))}" for name in unknown)
    return [claim for claim in claims if not ids or names(claim) & set(ids)]
