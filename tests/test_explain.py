"""What binds, its ceiling, and the document that every output shows."""

import dataclasses
import json

import numpy as np
import pytest
from synthetic import result_of, result_of_queue, scenario_of

from infersim.config.hardware import load_hardware
from infersim.config.scenario import build_scenario
from infersim.cost.floors import floor_ttft
from infersim.cost.placement import Placement
from infersim.engine.compiled.state import OVER_MAX_MODEL_LEN, REJECTED
from infersim.explain.binding import find_binding
from infersim.explain.change import by, more, plain
from infersim.explain.summary import summarize
from infersim.models.catalog import load_model
from infersim.report.files import to_json
from infersim.report.terminal import render
from infersim.run import run as run_scenario


def run(split, **fields):
    arrival = np.arange(100.0)
    fields = {"time_by_resource": np.array([*split, 0.0]), "busy_time": float(sum(split)), **fields}
    return result_of(arrival, arrival, arrival + 0.2, arrival + 0.8, prompts=50, outputs=4, **fields)


def test_the_resource_that_takes_most_time_binds_and_amdahl_bounds_the_gain():
    binding = find_binding(run([6, 1, 0, 2, 1, 0, 0, 0]))
    assert binding.name == "weights"
    assert "60%" in binding.text
    assert binding.factor == pytest.approx(10 / 4)
    assert find_binding(run([1, 1, 0, 6, 1, 0, 0, 0])).name == "compute"


def test_that_requests_wait_is_said_and_no_limit_is_named_by_its_peak():
    waiting = {"waiting_time": 50.0, "running_time": 50.0}
    full = run([4, 1, 0, 2, 2, 0, 1, 0], peaks=(1024, 26_000), **waiting)
    assert find_binding(full).name == "weights"
    assert "requests wait for 50%" in find_binding(full).text
    assert "wait" not in find_binding(dataclasses.replace(full, waiting_time=0.0)).text


def test_a_run_without_a_step_has_no_constraint():
    assert find_binding(run([0] * 8)).name == "none"


def test_the_document_is_plain_json_with_the_promised_keys():
    document = json.loads(to_json(summarize([run([6, 1, 0, 2, 1, 0, 0, 0])])))
    statistics = [
        f"{s}_{m}_ms" for s in ("mean", "median", "p90", "p95", "p99") for m in ("ttft", "tpot", "itl", "e2el")
    ]
    rates = ["duration_s", "request_throughput", "output_throughput", "total_token_throughput", "request_goodput"]
    assert set(document["metrics"]) == {*statistics, *rates}
    assert list(document["counts"]) == [
        "submitted", "completed", "rejected", "timed_out", "lost", "unfinished", "preemptions", "retries",
    ]  # fmt: skip
    memory = {"weights_bytes", "activation_bytes", "overhead_bytes", "kv_bytes", "block_size", "num_gpu_blocks"}
    assert memory | {"kv_bytes_per_token"} <= set(document["memory"])
    explain = document["explain"]
    assert {"binding", "time_by_resource", "floor_itl_ms", "floor_ttft_ms"} <= set(explain)
    assert sum(explain["time_by_resource"].values()) == pytest.approx(explain["busy_s"])
    assert set(document["verdict"]) == {"state", "backlog_per_s", "reason", "needed_requests", "burst"}
    assert document["scenario"]["engine"]["preset"] == "vllm-0.33"
    assert document["slo"] is None
    assert document["confidence"] is None


def test_an_slo_is_met_only_by_a_system_that_keeps_up():
    slo = scenario_of(slo={"p99_ttft_ms": 1e9})
    assert summarize([result_of_queue(0.5, 2000, scenario=slo)])["slo"]["met"]
    assert not summarize([result_of_queue(2.0, 2000, scenario=slo)])["slo"]["met"]
    missed = summarize([result_of_queue(0.5, 2000, scenario=scenario_of(slo={"p50_ttft_ms": 500}))])["slo"]
    assert not missed["met"]
    assert missed["limits"][0]["value"] > 500


def test_an_slo_on_gaps_alone_limits_no_single_request():
    arrival = np.arange(1000.0)
    slo = {"p99_itl_ms": 300}
    document = summarize(
        [result_of(arrival, arrival, arrival + 0.2, arrival + 0.4, outputs=2, scenario=scenario_of(slo=slo))]
    )
    assert document["slo"]["met"]
    assert document["slo"]["goodput_share"] is document["metrics"]["request_goodput"] is None


def test_replications_give_means_and_intervals():
    document = summarize([result_of_queue(0.5, 2000, seed=seed) for seed in (1, 2, 3)])
    assert document["metrics"]["mean_ttft_ms"] == pytest.approx(2000, rel=0.2)
    assert document["confidence"]["half_width"]["mean_ttft_ms"] > 0
    assert document["confidence"]["half_width"]["mean_itl_ms"] is None


def test_what_was_assumed_is_said():
    result = run([6, 1, 0, 2, 1, 0, 0, 0], notes=("ticks of 3 s are spread",))
    rejected = result.requests[:2]
    result.requests["status"][:2], result.requests["reason"][:2] = REJECTED, OVER_MAX_MODEL_LEN
    rejected["num_output_tokens"] = 0
    result.itl_histogram[np.flatnonzero(result.itl_histogram)[0]] -= 6
    result = dataclasses.replace(result, outstanding_time=98 * 0.8)
    text = "\n".join(summarize([result])["assumed"])
    for words in (
        "prefix caching on",
        "ticks of 3 s",
        "rejects 2 requests",
        "efficiencies published: gemm bf16",
        "max_model_len 131,072",
    ):
        assert words in text


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("replications", [1, 3])
def test_the_report_fits_the_terminal_and_leaves_nothing_out(replications, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    notes = tuple(f"a note of some length about the liberties taken with the data, number {i}" for i in range(20))
    document = summarize([run([6, 1, 1, 2, 1, 1, 1, 1], notes=notes)] * replications)
    lines = [text for _, text in render(document, ["out/result.json", "out/requests.csv"])]
    assert all(len(line) <= columns for line in lines)
    assert lines[-1].endswith("out/requests.csv")
    text, whole = "\n".join(lines), " ".join(" ".join(lines).split())
    assert all(note in whole for note in notes)
    for word in ("TOO SHORT TO TELL", "ttft", "p99", "binding", "ceiling", "floors", "memory", "KV blocks", "assumed"):
        assert word in text


@pytest.mark.parametrize(("clients", "text"), [(1, "1 client in a closed loop"), (5000, "5,000 clients in a closed")])
def test_a_closed_loop_is_named_after_its_clients(clients, text):
    arrival = np.arange(10.0)
    workload = {"input_tokens": 1, "output_tokens": 1, "request_rate": "inf", "max_concurrency": clients}
    run = result_of(arrival, arrival, arrival + 0.2, arrival + 0.2, scenario=scenario_of(workload=workload))
    assert text in render(summarize([run]), [])[0][1]


def test_the_floor_of_a_first_token_counts_what_is_computed():
    """A prompt of which the prefix cache has nearly all is quicker than the FLOPs of the whole."""
    workload = {"request_rate": 1, "num_requests": 50, "prefixes": {"count": 1, "tokens": 8000}, "input_tokens": 64,
                "output_tokens": 4}  # fmt: skip
    scenario = build_scenario({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload}, "test")
    (result,) = run_scenario(scenario)
    ttft = result.requests["first_token"] - result.requests["sent"]
    whole = floor_ttft(Placement(load_model("Llama-3.1-8B"), load_hardware("h100-sxm")), 8064)
    assert result.floors["ttft"] < ttft.min() < whole


def test_numbers_are_read_without_powers_of_ten():
    assert [plain(x) for x in (4.867e-13, 2.16e-5, 0.0, -0.0, 12.345, 12345.6)] == [
        "0.0000000000004867", "0.0000216", "0", "0", "12.35", "12,346"]  # fmt: skip
    assert [by(x) for x in (-0.655, 2.872, 128.05)] == ["-65.5%", "+287.2%", "129 times"]
    assert [more(x) for x in (0.27, 0.0004, 2.1)] == ["+27%", "+0.04%", "3.1 times"]
