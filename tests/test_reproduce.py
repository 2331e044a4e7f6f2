"""The notes' numbers come out of the cost model; the tool says when they do not."""

import json

import pytest
import yaml
from shared import SHARED, needs_shared
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.reproduce.claims import Claim, check, select
from infersim.reproduce.notes import NOTES
from infersim.spec.errors import InputError

LATER = {"kv.gain", "sd.speedup"}  # behaviours with a range


def test_every_value_claim_is_reproduced():
    outcome = check(NOTES)
    assert (outcome["ok"], outcome["failed"], outcome["not_applicable"]) == (len(NOTES), 0, 0)


@needs_shared
def test_the_table_is_that_of_the_notes():
    claims = yaml.safe_load((SHARED / "facts" / "notes_claims.yaml").read_text())["claims"]
    stated = {c["id"]: (float(c["value"]), float(c["tol"])) for c in claims if c["kind"] == "value"}
    assert {claim.id: (claim.expected, claim.tolerance) for claim in NOTES} == stated


def test_a_number_beside_the_claim_fails_and_one_that_cannot_be_had_is_not_applicable():
    claims = [
        Claim("a.low", "s", 100.0, "s", 0.01, lambda: 98.9, ""),
        Claim("a.edge", "s", 100.0, "s", 0.01, lambda: 99.0, ""),
        Claim("a.none", "s", 100.0, "s", 0.01, lambda: None, ""),
    ]
    outcome = check(claims)
    assert [row["ok"] for row in outcome["results"]] == [False, True, None]
    assert (outcome["ok"], outcome["failed"], outcome["not_applicable"]) == (1, 1, 1)


def test_claims_are_chosen_by_id_or_group():
    assert [claim.id for claim in select(NOTES, ["bw.step"])] == ["bw.step"]
    assert all(claim.id.startswith("sd.") for claim in select(NOTES, ["sd"]))
    assert len(select(NOTES, [])) == len(NOTES)
    with pytest.raises(InputError, match=r"bw.stepp: no such claim; did you mean bw.step\?"):
        select(NOTES, ["bw.stepp"])


def test_the_verb_prints_the_contract():
    outcome = CliRunner().invoke(app, ["reproduce", "bw.step", "kv", "--json"])
    assert outcome.exit_code == 0
    document = json.loads(outcome.stdout)
    assert document["ok"] == 2
    keys = {"id", "source", "kind", "expected", "got", "tolerance", "ok", "note"}
    assert all(keys <= set(row) for row in document["results"])
    assert "2 ok, 0 failed" in CliRunner().invoke(app, ["reproduce", "bw.step", "kv"]).stdout
    assert CliRunner().invoke(app, ["reproduce", "nothing"]).exit_code == 2
