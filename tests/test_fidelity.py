"""The fidelity suite: its document's form, what a broken folder answers, and that impossible numbers make it fail."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from shared import SHARED, needs_shared

from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware

sys.path.insert(0, str(Path(__file__).parent / "fidelity"))
import run as suite

SILICON = {"group", "n", "unpredicted", "tpot_median_pct", "tpot_mape_pct", "ttft_median_pct", "ttft_mape_pct",
           "tpot_signed_pct", "ttft_signed_pct"}  # fmt: skip
KEYS = {
    "kernels": {"op", "system", "dtype", "n", "median_pct", "p90_pct", "split"},
    "vllm_requests": {"config", "n", "ttft_mean_err_pct", "ttft_p99_err_pct", "tpot_mean_err_pct", "e2e_mean_err_pct"},
    "silicon": SILICON,
    "published": {"group", "n", "unpredicted"},
    "step_times": {"group", "n", "unpredicted"},
}


def main(monkeypatch, capsys, data: Path) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["run.py", "--data", str(data), "--json"])
    code = suite.main()
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Path:
    """The measured data, a few rows of each table; of the requests one configuration."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "e2e").mkdir()
    (folder / "kernels").mkdir()
    e2e = SHARED / "data/e2e"
    rows = pd.read_parquet(e2e / "silicon_sample.parquet")
    rows[(rows["mode"] == "agg") & (rows.fam == "Llama-3.1-8B")].head(2).to_parquet(folder / suite.silicon.FILE)
    for module in (suite.published, suite.step_times, suite.vllm_requests):
        pd.read_csv(SHARED / "data" / module.FILE).head(4).to_csv(folder / module.FILE, index=False)
    (folder / suite.vllm_requests.META).write_bytes((SHARED / "data" / suite.vllm_requests.META).read_bytes())
    table = pd.read_parquet(SHARED / "data/kernels/custom_allreduce.parquet")
    table[table.system == "h100_sxm"].to_parquet(folder / "kernels/custom_allreduce.parquet")
    return folder


def parsed(text: str) -> dict:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@needs_shared
def test_the_document_has_the_promised_keys(cut, monkeypatch, capsys):
    code, out, _ = main(monkeypatch, capsys, cut)
    document = parsed(out)
    assert code == 0
    assert document.keys() == KEYS.keys()
    for name, entries in document.items():
        assert entries
        assert all(KEYS[name] <= entry.keys() for entry in entries)
    assert [entry["n"] for entry in document["vllm_requests"]] == [4]
    assert {"dense", "MoE"} <= {entry["group"] for entry in document["silicon"]}


def without(name: str, folder: Path, to: Path) -> Path:
    """A copy of the folder without one file."""
    for path in folder.rglob("*.*"):
        target = to / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        if str(path.relative_to(folder)) != name:
            target.write_bytes(path.read_bytes())
    return to


FILES = ["e2e/silicon_sample.parquet", "e2e/published.csv", "e2e/splitwise_step_times.csv", "e2e/vllm_requests.csv",
         "e2e/vllm_meta.json", "kernels/custom_allreduce.parquet"]  # fmt: skip


@needs_shared
@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_skips_its_set_and_a_broken_one_is_a_line(name, cut, tmp_path, monkeypatch, capsys):
    folder = without(name, cut, tmp_path)
    document, _ = suite.evaluate(folder)
    assert sum(not entries for entries in document.values()) == 1
    for content in (b"", b"\xff\x00\x01" * 100, b"a,b\n1,2\n"):
        if content.startswith(b"a,b") and name.startswith("kernels"):
            continue
        (folder / name).write_bytes(content)
        code, out, error = main(monkeypatch, capsys, folder)
        assert (code, out) == (2, "")
        assert error.startswith(str(folder / name))
        assert error.count("\n") == 1


def test_an_empty_folder_skips_all_and_no_folder_is_an_error(tmp_path, monkeypatch, capsys):
    code, out, _ = main(monkeypatch, capsys, tmp_path)
    assert (code, parsed(out)) == (0, {name: [] for name in KEYS})
    with pytest.raises(SystemExit) as ended:
        main(monkeypatch, capsys, tmp_path / "nowhere")
    assert ended.value.code == 2


@needs_shared
def test_tables_without_rows_are_skipped(cut, tmp_path):
    folder = without("", cut, tmp_path)
    for name in FILES:
        if name.endswith("parquet"):
            pd.read_parquet(folder / name).head(0).to_parquet(folder / name)
        elif name.endswith("csv"):
            pd.read_csv(folder / name).head(0).to_csv(folder / name, index=False)
    assert suite.evaluate(folder)[0] == {name: [] for name in KEYS}


def test_what_a_row_names_and_is_not_modelled_is_said():
    row = pd.Series(
        {"mode": "agg", "system": "abacus", "backend": "vllm", "backend_version": "0.19", "fam": "Llama-3.1-8B",
         "model_path": "meta-llama/Llama-3.1-8B", "precision": "bf16", "gemm_quant_mode": "bfloat16", "isl": 100,
         "osl": 10, "batch_size": 1, "tp_size": 1, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": 1,
         "moe_ep_size": 1, "silicon_data_source": "aic-auto-gap", "id": "1"}
    )  # fmt: skip
    assert suite.silicon.attempt(lambda: suite.silicon.predict(row)) == (None, "no counterpart of abacus")


@needs_shared
def test_a_measurement_that_stands_twice_is_of_one_deployment():
    """Dumps count ranks differently; whatever they say, equal times are of the same devices and clients."""
    rows = pd.read_parquet(SHARED / "data" / suite.silicon.FILE)
    measured = ["system", "backend", "fam", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms"]
    twice = rows[(rows["mode"] == "agg") & rows.duplicated(measured, keep=False) & (rows.fam != "gpt-oss-120b")]
    assert len(twice) > 100
    for _, group in twice.groupby(measured):
        scenarios = [suite.silicon.scenario_of(row) for _, row in group.iterrows()]
        found = [(each["parallelism"], each["workload"]["max_concurrency"]) for each in scenarios]
        assert all(each == found[0] for each in found), group.id.tolist()


H100 = load_hardware("h100-sxm")
IMPOSSIBLE = [
    ("bandwidth", {"gemm.bf16": H100.efficiency["gemm.bf16"].model_copy(update={"bandwidth": 1.2})}),
    ("flops", {"gemm": H100.efficiency["gemm.bf16"].model_copy(update={"flops": 1.01})}),
    ("fixed", {"attention_decode.bf16": H100.efficiency["attention_decode.bf16"].model_copy(update={"fixed": -1e-6})}),
    ("a kernel of an engine's own",
     {"all_reduce.bf16@trtllm": H100.efficiency["all_reduce.bf16@trtllm"].model_copy(update={"bandwidth": 1.2})}),
    ("a term", {"all_reduce.bf16": H100.efficiency["all_reduce.bf16"].model_copy(
        update={"terms": H100.efficiency["all_reduce.bf16"].terms | {"library_bandwidth": 1.1}})}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "efficiency"), IMPOSSIBLE, ids=[what for what, _ in IMPOSSIBLE])
def test_an_efficiency_above_one_fails_the_suite(what, efficiency, tmp_path, monkeypatch, capsys):
    better = H100.model_copy(update={"efficiency": H100.efficiency | efficiency})
    monkeypatch.setattr(suite, "names", lambda kind: ["h100-sxm"])
    monkeypatch.setattr(suite, "load_hardware", lambda name: better)
    code, out, error = main(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert error.startswith("impossible: h100-sxm ")
    assert parsed(out)


def test_a_profile_that_refuses_to_load_fails_the_suite(tmp_path, monkeypatch, capsys):
    def refuse(name):
        raise InputError(f"{name}: efficiency.gemm.bandwidth: must be less than or equal to 1 (got 1.2)")

    monkeypatch.setattr(suite, "load_hardware", refuse)
    code, _, error = main(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert "got 1.2" in error


@pytest.mark.parametrize("knob", ["host_step_time", "host_token_time", "worker_sequence_time", "eager_launch_time"])
def test_a_negative_overhead_fails_the_suite(knob, tmp_path, monkeypatch, capsys):
    presets = dict(suite.packaged_presets())
    preset = presets["vllm-0.19"]
    presets["vllm-0.19"] = replace(preset, values={**preset.values, knob: -1e-6})
    monkeypatch.setattr(suite, "packaged_presets", lambda: presets)
    code, _, error = main(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert error == f"impossible: vllm-0.19: {knob} -1e-06\n"
