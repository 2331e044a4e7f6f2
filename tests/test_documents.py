"""What the verbs write with --json is what their JSON Schemas say."""

import json

import pytest
from test_cli_show import show
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.planning.document import DOCUMENTS

LOAD = {"request_rate": 4, "num_requests": 100, "input_tokens": 500, "output_tokens": 50}
FILE = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOAD}
PLAN = {
    "model": "Llama-3.1-8B",
    "workload": LOAD | {"num_requests": 400},
    "slo": {"p99_ttft_ms": 500},
    "max_gpus": 2,
    "candidates": {"hardware": ["h100-sxm", "l40s"], "parallelism": [{"tensor": 1}, {"tensor": 2}]},
}
IMPOSSIBLE = PLAN | {"slo": {"p99_ttft_ms": 0.01}}
GOODPUT = PLAN | {"objective": "goodput", "candidates": {"hardware": ["l40s"]}, "max_gpus": 1}
POOLS = FILE | {"cluster": {"prefill": {}, "decode": {}, "transfer": {"bandwidth": "5 GB/s"}}}
TURNS = FILE | {
    "workload": LOAD | {"turns": 3, "think_time": 1, "tenants": {"a": {}, "b": {}}},
    "slo": {"p99_ttft_ms": 9},
}
RUNS = [
    ("result", TURNS, []),
    ("result", POOLS, []),
    ("plan", PLAN, []),
    ("plan", IMPOSSIBLE, []),
    ("plan", GOODPUT, []),
    ("compare", FILE, ["--set", "precision.weights=fp8,engine.max_num_seqs=4", "--set", "parallelism.tensor=2"]),
    ("sweep", FILE, ["--over", "model=Llama-3.1-8B,Llama-3.1-405B", "--workers", "1"]),
]


@pytest.mark.parametrize(("of", "keys", "words"), RUNS)
def test_what_is_written_obeys_its_schema(of, keys, words, tmp_path):
    (tmp_path / "file.yaml").write_text(json.dumps(keys))
    verb = "run" if of == "result" else of
    outcome = CliRunner().invoke(app, [verb, str(tmp_path / "file.yaml"), *words, "--json"])
    assert outcome.exit_code in (0, 1), outcome.stderr
    DOCUMENTS[of].model_validate_json(outcome.stdout)  # strict, and no key beyond
    schema = json.loads(show("schema", "--of", of).stdout)
    found = json.loads(outcome.stdout)
    assert schema["properties"]["schema_version"]["const"] == found["schema_version"]
    assert set(schema["required"]) <= set(found) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_a_key_too_many_is_no_answer():
    with pytest.raises(ValueError, match="Extra inputs"):
        DOCUMENTS["sweep"].model_validate({"schema_version": 1, "over": {}, "points": [], "more": 1})


def test_what_has_no_schema_is_named():
    assert "must be one of scenario, result, plan, compare, sweep" in show("schema", "--of", "studio").stderr
