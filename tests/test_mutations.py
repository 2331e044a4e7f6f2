"""Claims fail when the product is wrong: the committed table of faults and claims, each claim under one fault."""

from pathlib import Path

import pytest
from mutations import MUTATIONS, killed

REPORTS = Path(__file__).parents[1] / "reports"


def _cells(name: str) -> list[list[str]]:
    lines = (REPORTS / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]


NOTICED = {row[0]: row[1].split(", ") for row in _cells("mutations.md") if row[0] in {m.name for m in MUTATIONS}}
AGREEING = {row[0] for row in _cells("mutations.md") if len(row) == 3 and row[0] != "claim"}


def _pairs() -> dict[str, list[str]]:
    """Faults with claims to ask: every claim once, every fault at least once."""
    pairs: dict[str, list[str]] = {name: [] for name in NOTICED}
    for id in sorted(AGREEING):
        faults = [name for name, ids in NOTICED.items() if id in ids]
        assert faults, f"{id} notices no fault"
        pairs[min(faults, key=lambda name: len(NOTICED[name]))].append(id)
    return {name: ids or NOTICED[name][:1] for name, ids in pairs.items()}


def test_every_fault_and_every_claim_stand_in_the_table():
    """Claims that agree by simulation or closed form are those of the reproduction report."""
    assert set(NOTICED) == {mutation.name for mutation in MUTATIONS}
    agreements = (REPORTS / "reproduction.md").read_text(encoding="utf-8").split("## Agreements")[1].split("## ")[0]
    rows = [line.split(" | ") for line in agreements.splitlines() if line.startswith("| ")]
    assert {row[0].strip("| ") for row in rows if row[1] in ("simulated", "closed form")} == AGREEING
    assert all(ids != ["**none**"] for ids in NOTICED.values())


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_claims_notice_the_fault(mutation):
    ids = _pairs()[mutation.name]
    assert killed(mutation, ids) == [id for id in NOTICED[mutation.name] if id in ids]
