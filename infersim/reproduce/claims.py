"""What the literature says, recomputed: one row per claim."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from infersim.spec.base import near
from infersim.spec.errors import InputError


@dataclass(frozen=True)
class Claim:
    """One number and how we come by it. `tolerance` is relative to `expected`; None from `compute`: not applicable."""

    id: str
    source: str
    expected: float
    unit: str
    tolerance: float
    compute: Callable[[], float | None]
    note: str
    kind: str = "value"


def check(claims: Iterable[Claim]) -> dict[str, Any]:
    """`results`, one row per claim, and how many of them are ok, failed, not_applicable."""
    results = []
    for claim in claims:
        got = claim.compute()
        ok = None if got is None else abs(got - claim.expected) <= claim.tolerance * abs(claim.expected)
        row = {name: getattr(claim, name) for name in ("id", "source", "kind", "expected", "unit", "tolerance", "note")}
        results.append(row | {"got": got, "ok": ok})
    verdicts = [row["ok"] for row in results]
    return {
        "results": results,
        "ok": verdicts.count(True),
        "failed": verdicts.count(False),
        "not_applicable": verdicts.count(None),
    }


def select(claims: tuple[Claim, ...], ids: list[str]) -> list[Claim]:
    """The claims of these ids, or of these groups (the part before the dot); all without any. InputError if unknown."""
    known = {claim.id for claim in claims} | {claim.id.partition(".")[0] for claim in claims}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise InputError(f"reproduce {name[:80]}: no such claim{near(name, sorted(known))}" for name in unknown)
    return [claim for claim in claims if not ids or claim.id in ids or claim.id.partition(".")[0] in ids]
