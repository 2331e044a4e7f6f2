"""`infersim show`: what it lists can be used, what it prints can be parsed."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.presets import packaged_presets
from infersim.config.resources import names
from infersim.explain.summary import SCHEMA_VERSION


def show(*arguments):
    return CliRunner().invoke(app, ["show", *arguments])


def test_a_model_alone():
    fields = json.loads(show("model", "meta-llama/llama-3.1-8b", "--json").stdout)
    assert fields["parameters"] == 8_030_261_248
    assert "8,030,261,248" in show("model", "Llama-3.1-8B").stdout


def test_a_model_on_hardware_has_memory_and_floors():
    arguments = ["model", "Llama-3.1-8B", "--hardware", "h100-sxm", "--json"]
    one = json.loads(show(*arguments).stdout)
    assert {"parameters", "weights_bytes", "kv_bytes_per_token", "num_gpu_blocks"} <= set(one)
    assert one["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    # the floor of a step: every weight but the embedding once, and the keys and values of the context
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 1024 * one["kv_bytes_per_token"]
    assert one["floor_itl_ms"] == pytest.approx(read / 3.35e12 * 1e3, rel=1e-3)
    two = json.loads(show(*arguments, "--tensor-parallel-size", "2").stdout)
    assert two["kv_bytes_per_token"] == one["kv_bytes_per_token"] / 2
    assert two["num_gpu_blocks"] > 2 * one["num_gpu_blocks"]
    older = json.loads(show(*arguments, "--set", "engine.preset=vllm-0.19").stdout)
    assert older["engine"] == "vllm-0.19"
    assert older["num_gpu_blocks"] < one["num_gpu_blocks"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("model", "no-such-model"),
        ("model", "Llama-3.1-8B", "--tensor-parallel-size", "2"),
        ("model", "Llama-3.1-8B", "--hardware", "no-such-device"),
        ("model", "Llama-3.1-405B", "--hardware", "l4"),
        ("model", "Llama-3.1-8B", "--hardware", "h100-sxm", "--set", "engine.preset=vllm-9"),
        ("hardware", "no-such-device"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments):
    outcome = show(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert len(outcome.stderr.splitlines()) == 1


def test_hardware_is_listed_and_shown_in_full():
    listed = show("hardware").stdout
    assert all(name in listed for name in names("hardware_profiles"))
    profile = yaml.safe_load(show("hardware", "h100-sxm").stdout)
    assert profile["memory_bandwidth"] == 3.35e12
    assert profile["sources"]
    assert json.loads(show("hardware", "H100-SXM", "--json").stdout) == profile
    assert len(json.loads(show("hardware", "--json").stdout)) == len(names("hardware_profiles"))


def test_lists_are_searched_by_a_part_of_a_name_vendor_or_family():
    named = [row["name"] for row in json.loads(show("hardware", "AMD", "--json").stdout)]
    assert named == [name for name in names("hardware_profiles") if name.startswith("mi")]
    assert {row["family"] for row in json.loads(show("models", "gemma", "--json").stdout)} > {"gemma2", "gemma3_text"}
    for what in ("hardware", "models"):
        assert "nothing has 'no-such-thing' in it" in show(what, "no-such-thing").stderr


def test_engines_models_workloads_scenarios_and_the_schema():
    assert [row["name"] for row in json.loads(show("engines", "--json").stdout)] == list(packaged_presets())
    table = show("engines").stdout.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[1:]] == list(packaged_presets())
    models = json.loads(show("models", "--json").stdout)
    assert {"Llama-3.1-8B", "OPT-13B"} <= {row["name"] for row in models}
    assert "Llama-3.1-8B" in show("models").stdout
    for folder in ("workloads", "scenarios"):
        assert [row["name"] for row in json.loads(show(folder, "--json").stdout)] == names(folder)
        assert all(name in show(folder).stdout for name in names(folder))
    assert json.loads(show("schema").stdout)["properties"]["model"]
    result = json.loads(show("schema", "--of", "result").stdout)
    assert result["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert set(result["required"]) == set(result["properties"]) - {"unknowns"}
    assert result["additionalProperties"] is False


def test_a_profile_shows_its_errors_on_held_out_kernels():
    lines = {line.split()[0]: line for line in show("profile", "b200-sxm").stdout.splitlines() if line.strip()}
    for name in ("gemm.bf16", "moe.nvfp4", "all_reduce.bf16@trtllm"):
        assert "90th percentile" in lines[name]


@pytest.mark.parametrize("engine", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 3}, {"max_num_batched_tokens": 2}])
def test_break_even_of_an_engine_of_few_sequences(engine, tmp_path):
    """The batch by context is at most what the engine takes."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 0.5}}
    load = {"request_rate": 1, "num_requests": 20, "input_tokens": 10, "output_tokens": 20}
    keys = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine, "workload": load}
    (tmp_path / "s.yaml").write_text(json.dumps(keys | {"speculation": speculation}))
    outcome = show("break-even", str(tmp_path / "s.yaml"), "--json")
    over = json.loads(outcome.stdout)["speculation"]["over_context"]
    assert [row["batch"] for row in over] == ([] if engine == {"max_num_batched_tokens": 2} else [1] * len(over))
    assert show("break-even", str(tmp_path / "s.yaml")).exit_code == 0
