"""Decisions recorded of vLLM's own Scheduler, release by release, replayed (tests/conformance)."""

import sys
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).parent / "conformance"
sys.path.insert(0, str(CONFORMANCE))

from replay import first_difference, preset_of, read

RECORDS = sorted((CONFORMANCE / "decisions").glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_decides_as_the_release(path):
    """Who is scheduled with how many tokens, who is preempted, what is found in the cache, which blocks are free."""
    records = read(path)
    different = [(r["scenario"]["id"], first_difference(r, preset_of(r["decisions"]["version"]))) for r in records]
    assert len(records) > 40
    assert [each for each in different if each[1]] == []


def test_records_stay_small():
    """Below 2 MB, all releases together."""
    assert sum(path.stat().st_size for path in RECORDS) < 2e6
