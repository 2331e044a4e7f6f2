"""What the literature says, computed again: one row per claim."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from infersim.config.base import near
from infersim.config.errors import InputError

Numbers = float | tuple[float, ...]

SIMULATED, CLOSED_FORM, ARITHMETIC = "simulated", "closed form", "arithmetic"
"""the evidence for a claim: a simulation ran; the product's cost models were evaluated; printed numbers and formulas of
papers were combined without the product"""
EVIDENCE = (SIMULATED, CLOSED_FORM, ARITHMETIC)
TOLERANCE = {SIMULATED: 0.20, CLOSED_FORM: 0.05, ARITHMETIC: 0.05}
"""relative, where the source gives none"""
OK, FAILED, FITTED, NOT_APPLICABLE = "ok", "failed", "fitted", "not applicable"


@dataclass(frozen=True)
class Claim:
    """One number, or several, and how we come by them.

    tolerance is relative to each number expected, or in its unit if `absolute`. kind: value; range, (low, high) that
    each number must lie in; relation, a statement that must hold for all of many inputs, `share_holding`.
    fitted_on: constants behind compute that were fitted, each with the ids of the rows that it was fitted on; a row
    that is among them is evidence of nothing. why: one line on a disagreement.
    compute gives None if the claim is not applicable: `note` says why.
    """

    id: str
    source: str
    evidence: str
    expected: Numbers
    unit: str
    tolerance: float
    compute: Callable[[], Numbers | None]
    note: str
    kind: str = "value"
    absolute: bool = False
    fitted_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    why: str = ""

    @property
    def fitted(self) -> bool:
        """Whether a constant was fitted on this very row."""
        return any(self.id in rows for rows in self.fitted_on.values())


def share_holding(cases: Iterable[bool]) -> float:
    """The share of inputs for which a relation holds: what a relation's claim expects to be 1."""
    cases = [bool(case) for case in cases]
    return sum(cases) / len(cases)


@cache
def printed() -> dict[str, dict[str, Any]]:
    """What the literature prints, by id (anchors.yaml): source, value or range, unit, tolerance, or a reason."""
    table = yaml.safe_load(files(__package__).joinpath("anchors.yaml").read_text(encoding="utf-8"))
    return {id: {"source": source, **row} for source, rows in table.items() for id, row in rows.items()}


def expected(id: str) -> tuple[float, ...]:
    """The numbers of a row."""
    value = printed()[id]["value"]
    return tuple(value) if isinstance(value, list) else (value,)


def claim(id: str, evidence: str, compute: Callable[[], Numbers], note: str = "", why: str = "", **fitted_on) -> Claim:
    """A claim on a printed row; fitted_on: constant = rows."""
    row = printed()[id]
    kind = next((kind for kind in ("value", "range") if kind in row), "relation")
    value = row.get(kind, 1.0)
    value = tuple(value) if isinstance(value, list) else value
    unit = row.get("unit", "share of inputs for which it holds")
    text = row.get("tolerance", "0 %" if kind == "relation" else f"{100 * TOLERANCE[evidence]} %")
    size, _, measure = text.partition(" ")
    if text == "exact":  # to the digits printed
        decimals = len(str(value).partition(".")[2]) if isinstance(value, float) else 0
        tolerance = 0.5 * 10.0**-decimals
    else:
        tolerance = float(size) / (100 if measure == "%" else 1)
    return Claim(
        id, row["source"], evidence, value, unit, tolerance, compute, note, kind, measure != "%", fitted_on, why
    )


def not_applicable(id: str) -> Claim:
    """A number that no simulator can compute again, or not from what its source prints."""
    return Claim(id, printed()[id]["source"], "", 0.0, "", 0, lambda: None, printed()[id]["reason"])


def _agrees(claim: Claim, got: Numbers) -> bool:
    expected, got = (numbers if isinstance(numbers, tuple) else (numbers,) for numbers in (claim.expected, got))
    margin = [claim.tolerance * (1 if claim.absolute else abs(number)) for number in expected]
    if claim.kind == "range":
        (low, high), (below, above) = expected, margin
        return all(low - below <= number <= high + above for number in got)
    return all(abs(a - b) <= most for a, b, most in zip(got, expected, margin, strict=True))


FIELDS = ("id", "source", "evidence", "kind", "expected", "unit", "tolerance", "absolute", "note", "fitted_on")


def verdict(claim: Claim, got: Numbers | None) -> str:
    if got is None:
        return NOT_APPLICABLE
    return FITTED if claim.fitted else OK if _agrees(claim, got) else FAILED


def check(claims: Iterable[Claim]) -> dict[str, Any]:
    """`results`, one row per claim; how many are ok, failed, fitted, not_applicable; `evidence`, ok and failed of each
    kind; `tally`, all of these in a line. Rows that a constant was fitted on count as neither."""
    results = []
    for claim in claims:
        got = claim.compute()
        found = verdict(claim, got)
        row = {name: getattr(claim, name) for name in FIELDS}
        if claim.why and found == FAILED:
            row["note"] = "; ".join(filter(None, (claim.note, claim.why)))
        if got is None:
            row["expected"] = None
        results.append(row | {"got": got, "verdict": found, "ok": {OK: True, FAILED: False}.get(found)})
    pairs = [(row["evidence"], row["verdict"]) for row in results]
    verdicts = [verdict for _, verdict in pairs]
    outcome = {
        "results": results,
        **{name.replace(" ", "_"): verdicts.count(name) for name in (OK, FAILED, FITTED, NOT_APPLICABLE)},
        "evidence": {kind: {name: pairs.count((kind, name)) for name in (OK, FAILED)} for kind in EVIDENCE},
    }
    return {"tally": _tally(outcome), **outcome}


def _tally(outcome: dict[str, Any]) -> str:
    """One line: agreements and disagreements by evidence, then what counts as neither."""
    kinds = [f"{kind}: {n[OK]} ok, {n[FAILED]} failed" for kind, n in outcome["evidence"].items() if n[OK] or n[FAILED]]
    return "; ".join([*kinds, f"fitted: {outcome['fitted']}", f"not applicable: {outcome['not_applicable']}"])


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
