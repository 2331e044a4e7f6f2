"""Overheads of a live server: recovered where they are known, refused where they cannot be, checked on real servers."""

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from shared import SHARED, needs_shared
from typer.testing import CliRunner

from infersim.calibration.clients import aiperf_summary, guidellm_results, vllm_results
from infersim.calibration.overheads import bounded_solution, fit_overheads, mean_errors, predict
from infersim.calibration.results import read_results
from infersim.calibration.validation import validate
from infersim.cli.app import app
from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.scenario import build_scenario
from infersim.run import run

TRUE = {"worker_step_time": 1.5e-3, "worker_sequence_time": 20e-6, "host_request_time": 8e-3}
FREE = {"host_prompt_token_time": 0.0, "host_request_latency": 0.0}  # what these servers' front ends do not take
LENGTHS = {"input_tokens": {"uniform": [100, 900]}, "output_tokens": {"uniform": [20, 120]}, "num_requests": 300}


def scenario_of(engine=None, **workload):
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LENGTHS | workload}
    data["engine"] = FREE | (engine or {})
    return build_scenario(data, "test")


def vllm_json(path, engine=None, seed=0, **workload):
    """What `vllm bench serve --save-result --save-detailed` would write about infersim's own server."""
    scenario = scenario_of(engine, **workload)
    result = run(scenario.model_copy(update={"simulation": scenario.simulation.model_copy(update={"seed": seed})}),
                 save_detailed=True)[0]  # fmt: skip
    r, counts = result.requests, result.requests["num_output_tokens"]
    gaps = [result.itl_gaps[o : o + n - 1].tolist() for o, n in zip(result.itl_offsets, counts, strict=True)]
    ttft = r["first_token"] - r["sent"]
    document = {
        "request_rate": workload.get("request_rate", "inf"),
        "max_concurrency": workload.get("max_concurrency"),
        "completed": len(r),
        "failed": 0,
        "input_lens": r["prompt_tokens"].tolist(),
        "output_lens": counts.tolist(),
        "ttfts": ttft.tolist(),
        "itls": gaps,
        "start_times": (1000 + r["sent"]).tolist(),
        "queue_times": (r["sent"] - r["arrival"]).tolist(),
        "mean_ttft_ms": float(ttft.mean()) * 1e3,
        "mean_tpot_ms": float(np.mean([np.mean(one) for one in gaps])) * 1e3,
    }
    path.write_text(json.dumps(document))
    return str(path)


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return [vllm_json(folder / f"{rate}.json", TRUE, rate, request_rate=rate) for rate in (2, 10, 30)]


def test_known_overheads_are_recovered_within_5_percent(rates):
    fit = fit_overheads(scenario_of(), read_results(rates), ["step", "sequence", "request"])
    for name, value in TRUE.items():
        assert fit.values[name] == pytest.approx(value, rel=0.05)
    for held_out in fit.held_out:  # 5 % of the request time is 2 % of a short prompt's ttft
        assert abs(held_out["tpot"]) < 0.01
        assert abs(held_out["ttft"]) < 0.02
    assert max(abs(run["tpot"]) for run in fit.before) > 0.05  # there was something to find


def test_without_async_scheduling_the_engine_core_is_fitted(tmp_path):
    engine = {"async_scheduling": False, "host_step_time": 2e-3, "host_sequence_time": 30e-6, "host_request_time": 5e-3}
    paths = [vllm_json(tmp_path / f"{rate}.json", engine, request_rate=rate) for rate in (2, 30)]
    fit = fit_overheads(scenario_of({"async_scheduling": False}), read_results(paths), ["step", "sequence", "request"])
    for name, value in engine.items():
        if name != "async_scheduling":
            assert fit.values[name] == pytest.approx(value, rel=0.05)


def test_a_batch_that_never_changes_cannot_tell_steps_from_sequences(tmp_path):
    same = {"input_tokens": 512, "output_tokens": 100, "max_concurrency": 16, "num_requests": 64}
    runs = read_results([vllm_json(tmp_path / "closed.json", TRUE, **same)])
    with pytest.raises(InputError) as error:
        fit_overheads(scenario_of(), runs, ["step", "sequence"])
    assert any("worker_step_time is not identified" in line and "--max-concurrency 1" in line
               for line in error.value.problems)  # fmt: skip
    fit = fit_overheads(scenario_of({"host_request_time": TRUE["host_request_time"]}), runs, ["step"])
    assert fit.values["worker_step_time"] == pytest.approx(1.5e-3 + 16 * 20e-6, rel=0.1)  # both, at this batch


def test_queueing_hides_the_time_per_request(tmp_path):
    workload = {"request_rate": 40, "num_requests": 150, "output_tokens": 200}
    engine = {"max_num_seqs": 8}
    runs = read_results([vllm_json(tmp_path / "full.json", TRUE | engine, **workload)])
    rng = np.random.default_rng(1)
    noisy = [one.__class__(**(vars(one) | {"ttft": one.ttft * rng.lognormal(0, 0.1, len(one.ttft))})) for one in runs]
    with pytest.raises(InputError, match=r"host_request_time is not identified.*--request-rate"):
        fit_overheads(scenario_of(engine), noisy, ["request"])


def test_nothing_is_fitted_to_a_prediction_that_is_too_slow(tmp_path):
    path = vllm_json(tmp_path / "fast.json", request_rate=20)
    slow = scenario_of()
    slow = slow.model_copy(update={"hardware": slow.hardware.model_copy(update={"memory_bandwidth": 2.5e12})})
    try:
        values = fit_overheads(slow, read_results([path]), ["step"]).values
    except InputError as error:
        refusals = ("calibrate the device first", "is not identified")
        assert any(refusal in error.problems[0] for refusal in refusals)  # noqa: PT017 (either outcome is right)
    else:
        assert values == {"worker_step_time": 0.0}


def test_a_prediction_of_itself_has_no_error(rates):
    (document,) = validate(scenario_of(TRUE), read_results(rates[:1]))
    assert document["errors"]["mean_itl_ms"]["error"] == pytest.approx(0, abs=1e-6)
    assert all(abs(row["error"]) < 1e-6 for row in document["errors"].values())
    assert document["points_to"].startswith("nothing")
    assert document["measured"]["state"] == document["predicted"]["state"] == "stable"


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"worker_step_time": 3e-3}, "engine.worker_step_time"),
        ({"host_request_time": 60e-3}, "engine.host_request_time"),
    ],
)
def test_the_residual_points_to_what_is_different(tmp_path, engine, named):
    path = vllm_json(tmp_path / "r.json", engine, request_rate=20)
    (document,) = validate(scenario_of(), read_results([path]))
    assert named in document["points_to"]


def test_causes_are_moved_in_every_kind_of_replicas(tmp_path):
    """An engine and a device that a kind has of its own are those that ran."""
    path = vllm_json(tmp_path / "r.json", {"worker_step_time": 3e-3}, request_rate=20)
    scenario = scenario_of({"worker_step_time": 1.0})  # nobody's: the kinds have their own
    kinds = [{"engine": FREE | {"max_num_seqs": 512}, "hardware": load_hardware("h100-sxm").model_dump(mode="json")}]
    cluster = Cluster.validate({"kinds": kinds}, "test")
    (document,) = validate(scenario.model_copy(update={"cluster": cluster}), read_results([path]))
    assert "engine.worker_step_time" in document["points_to"]
    with pytest.raises(InputError, match="engines of their own"):
        fit_overheads(scenario.model_copy(update={"cluster": cluster}), read_results([path]), ["step"])


def test_without_requests_the_workload_is_drawn_from_the_scenario(tmp_path):
    document = json.loads(Path(vllm_json(tmp_path / "r.json", TRUE, request_rate=10)).read_text())
    for key in ("input_lens", "output_lens", "ttfts", "itls", "start_times", "queue_times"):
        del document[key]
    (one,) = read_results([write(tmp_path / "summary.json", document)])
    assert one.requests is None
    (outcome,) = validate(scenario_of(TRUE), [one])
    assert outcome["errors"]["mean_tpot_ms"]["error"] == pytest.approx(0, abs=1e-6)  # the same seed draws the same
    assert any("drawn from the scenario" in note for note in outcome["notes"])
    assert outcome["points_to"] == ""
    with pytest.raises(InputError, match="not identified"):
        fit_overheads(scenario_of(), [one], ["step", "sequence", "request"])  # two numbers, three unknowns


def test_least_squares_with_bounds():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(20, 3))
    assert bounded_solution(matrix, matrix @ [1.0, 0.0, 2.0]) == pytest.approx([1, 0, 2])
    clipped = bounded_solution(matrix, matrix @ [1.0, -5.0, 2.0])
    gradient = matrix.T @ (matrix @ clipped - matrix @ [1.0, -5.0, 2.0])
    assert clipped.min() == 0
    assert np.all(np.where(clipped > 0, np.abs(gradient) < 1e-9, gradient > -1e-9))  # Karush, Kuhn and Tucker


# --- readers ----------------------------------------------------------------------------------------------------------
def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_aiperf_summary_and_records(tmp_path):
    block = {"unit": "ms", "avg": 100.0, "p50": 90.0, "p90": 150.0, "p95": 160.0, "p99": 200.0}
    summary = {"time_to_first_token": block, "inter_token_latency": block, "request_latency": block | {"unit": "s"}}
    (one,) = read_results([write(tmp_path / "a.json", summary)])
    assert one.summary["mean_tpot_ms"] == 100  # aiperf's inter token latency is vLLM's tpot
    assert one.summary["p99_e2el_ms"] == 200_000
    records = [
        {"metadata": {"request_start_ns": 10**9 * (5 - i)}, "error": None,
         "metrics": {"time_to_first_token": {"value": 20.0, "unit": "ms"},
                     "request_latency": {"value": 1.0, "unit": "s"},
                     "input_sequence_length": {"value": 10 + i, "unit": "tokens"},
                     "output_sequence_length": {"value": 50, "unit": "tokens"}}}
        for i in range(3)
    ]  # fmt: skip
    records.append({"metadata": {"request_start_ns": 0}, "metrics": {}, "error": {"message": "timeout"}})
    (one,) = read_results([write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))])
    assert one.requests.arrival.tolist() == [0, 1, 2]
    assert one.requests.prompt_tokens.tolist() == [12, 11, 10]  # in order of arrival
    assert one.tpot == pytest.approx(np.full(3, 0.98 / 49))
    assert one.failed == 1


def test_guidellm_runs(tmp_path):
    def distribution(mean):
        return {
            "successful": {"mean": mean, "median": mean, "percentiles": {"p90": mean, "p95": mean, "p99": 2 * mean}}
        }

    request = {"request_start_time": 7.0, "prompt_tokens": 10, "output_tokens": 5, "time_to_first_token_ms": 100.0,
               "request_latency": 0.5, "time_per_output_token_ms": 100.0}  # fmt: skip
    metrics = {"time_to_first_token_ms": distribution(100), "inter_token_latency_ms": distribution(20),
               "request_latency": distribution(0.5), "time_per_output_token_ms": distribution(100)}  # fmt: skip
    document = {"benchmarks": [{"metrics": metrics}, {"metrics": metrics, "requests": {"successful": [request] * 3}}]}
    first, second = read_results([write(tmp_path / "g.json", document)])
    assert first.summary["mean_tpot_ms"] == 20  # not time_per_output_token, which counts the first token
    assert first.summary["p99_e2el_ms"] == 1000
    assert second.tpot == pytest.approx(np.full(3, 0.1))


def test_own_requests_csv_is_a_result(tmp_path):
    scenario = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LENGTHS | {"request_rate": 10}}
    write(tmp_path / "s.yaml", yaml.safe_dump(scenario))
    invoke = CliRunner().invoke
    assert invoke(app, ["run", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")]).exit_code == 0
    outcome = invoke(app, ["validate", str(tmp_path / "out" / "requests.csv"), "--scenario", str(tmp_path / "s.yaml")])
    assert outcome.exit_code == 0, outcome.stderr
    assert "+0.0%" in outcome.stdout
    assert "residual points to: nothing" in outcome.stdout


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ({"mean_ttft_ms": -3}, "mean_ttft_ms must be a number >= 0"),
        ("[1, 2]", "must be vllm bench serve or"),
        ({"a": 1}, "holds no latencies"),
        ({"benchmarks": []}, "benchmarks must be a list"),
        ({"mean_ttft_ms": math.nan}, "holds no latencies"),
        ({"ttfts": [0.1], "itls": [[0.1]], "input_lens": [5], "output_lens": [2, 2]}, "equally long"),
        ({"ttfts": [0.1], "itls": ["x"], "input_lens": [5], "output_lens": [2], "request_rate": "inf"}, "itls must be"),
        ({"ttfts": [0.1], "itls": [[0.1]], "input_lens": [5], "output_lens": [2], "request_rate": 3}, "start_times"),
        ({"ttfts": [0.0], "itls": [[]], "input_lens": [5], "output_lens": [0], "request_rate": "inf"}, "no request"),
        ("arrival_s,prompt_tokens\n1,2\n", "has no column output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_ms,e2el_ms\n0,5,5,100,50\n", "first token comes"),
        ("config,arrival_s\na,1\nb,2\n", "holds the runs a, b"),
        ({"time_to_first_token": {"unit": "fortnights", "avg": 1.0}}, "unit must be one of"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_one_line(tmp_path, content, problem):
    path = write(tmp_path / "r", content)
    with pytest.raises(InputError, match=problem) as error:
        read_results([path])
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(path)


def test_wrong_use_is_exit_2(tmp_path, rates):
    invoke = CliRunner().invoke
    write(tmp_path / "s.yaml", yaml.safe_dump({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LENGTHS}))
    common = [rates[0], "--scenario", str(tmp_path / "s.yaml")]
    for arguments, problem in [
        (["calibrate", "server", *common, "--fit", "steps"], "did you mean step?"),
        (["calibrate", "server", *common, "--out", str(tmp_path / "s.yaml")], "--force"),
        (["calibrate", "server", "nothing.json", *common[1:]], "cannot be read"),
        (["validate", *common, "--skip", "300"], "leaves no request"),
        (["validate", *common, "--set", "engine.max_model_len=200"], "rejects"),
    ]:
        outcome = invoke(app, arguments)
        assert outcome.exit_code == 2
        assert problem in outcome.stderr


# --- real servers -----------------------------------------------------------------------------------------------------
REQUESTS = SHARED / "data" / "e2e" / "vllm_requests.csv"


def real_server(hardware, **engine):
    """vLLM 0.19 with Llama-3.1-8B, as the log's notes have it."""
    settings = {"preset": "vllm-0.19", "max_num_batched_tokens": 2048} | engine
    return build_scenario(
        {"model": "Llama-3.1-8B", "hardware": hardware, "engine": settings, "workload": LENGTHS}, "test"
    )


@needs_shared
@pytest.mark.parametrize(
    ("run_of", "hardware", "engine"),
    [
        ("rtxpro6000_llama3.1-8b_tp1", "rtx-pro-6000", {"max_num_seqs": 128}),  # overloaded
        ("rtx4090_llama3.1-8b_tp1", "rtx-4090", {"max_num_seqs": 256, "max_model_len": 32768,
                                                 "num_gpu_blocks_override": 2588}),  # short of memory
    ],
)  # fmt: skip
def test_a_real_run_that_needs_no_overhead_is_predicted_without(run_of, hardware, engine):
    """The best fit is lost in its error, so it is refused; without any, the requests beyond the first hundred have TPOT
    within 2 % and TTFT within 5 %."""
    (run,) = read_results([f"{REQUESTS}#{run_of}"])
    scenario = real_server(hardware, **engine)
    with pytest.raises(InputError, match=r"worker_step_time is not identified: it is \d+ [um]s \+- \d+ us"):
        fit_overheads(scenario, [run], ["step"], fit_requests=100)
    held_out = mean_errors(predict(scenario, run), run, slice(100, None))
    assert abs(held_out["tpot"]) < 0.02
    assert abs(held_out["ttft"]) < 0.05


@pytest.mark.parametrize(
    "key", ["ttfts", "itls", "input_lens", "start_times", "duration", "request_rate", "mean_ttft_ms"]
)
def test_a_number_of_400_digits_is_no_traceback(tmp_path, key):
    results = {
        "ttfts": [0.1],
        "itls": [[0.1]],
        "input_lens": [5],
        "output_lens": [2],
        "start_times": [0],
        "duration": 2,
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results | {key: [10**400] if isinstance(results.get(key), list) else 10**400}))
    with contextlib.suppress(InputError):
        read_results([str(path)])


def test_a_closed_loop_is_read_from_every_client():
    """SGLang writes Infinity and max_concurrency, guidellm streams, genai-perf concurrency."""
    sglang = {"request_rate": math.inf, "max_concurrency": 4, "completed": 16, "mean_ttft_ms": 60.0,
              "mean_e2e_latency_ms": 2600.0}  # fmt: skip
    found = vllm_results(sglang, "x")
    assert (found["request_rate"], found["max_concurrency"]) == (math.inf, 4)
    assert found["summary"]["mean_e2el_ms"] == 2600.0
    strategy = {"config": {"strategy": {"type_": "concurrent", "streams": 4}}, "metrics": {}}
    (found,) = guidellm_results({"benchmarks": [strategy]}, "x")
    assert (found["request_rate"], found["max_concurrency"]) == (math.inf, 4)
    found = aiperf_summary({"input_config": {"concurrency": 4}}, "x")
    assert (found["request_rate"], found["max_concurrency"]) == (math.inf, 4)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"mean_ttft_ms": "60"}, "mean_ttft_ms"),
        ({"mean_ttft_ms": 60, "completed": "all"}, "completed"),
        ({"mean_ttft_ms": 60, "max_concurrency": "many"}, "max_concurrency"),
        ({"mean_ttft_ms": 60, "request_rate": -1}, "request_rate"),
        ({"mean_ttft_ms": 60, "mean_e2e_latency_ms": [1]}, "mean_e2e_latency_ms"),
        ({"time_to_first_token": {"avg": "60"}}, "time_to_first_token.avg"),
        ({"time_to_first_token": {"avg": 60}, "input_config": {"loadgen": []}}, "input_config.loadgen"),
        ({"time_to_first_token": {"avg": 60}, "input_config": {"concurrency": True}}, "input_config.concurrency"),
        ({"time_to_first_token": {"avg": 60}, "input_config": {"phases": []}}, "input_config.phases"),
        ({"time_to_first_token": {"avg": 60}, "input_config": {"phases": [{"type": "user_centric", "rate": 1}]}},
         "input_config.phases.type"),
        ({"time_to_first_token": {"avg": 60},
          "input_config": {"phases": [{"type": "poisson", "rate": 1, "rate_ramp": {"duration": 3}}]}},
         "input_config.phases.rate_ramp"),
        ({"time_to_first_token": {"avg": 60},
          "input_config": {"perf_analyzer": {"stimulus": {"session_concurrency": 2}}}},
         "input_config.perf_analyzer.stimulus.session_concurrency"),
        ({"benchmarks": [{"metrics": {"request_latency": {"successful": {"mean": "x"}}}}]},
         "benchmarks.0.metrics.request_latency.mean"),
        ({"benchmarks": [{"config": {"strategy": {"streams": "x"}}}]}, "benchmarks.0.config.strategy.streams"),
    ],
)  # fmt: skip
def test_a_field_that_is_no_number_is_named(tmp_path, document, field):
    with pytest.raises(InputError, match=field.replace(".", r"\.") + ": must"):
        read_results([write(tmp_path / "r.json", document)])


CLIENTS = {
    "vllm": {"request_rate": "inf", "max_concurrency": 4, "model_id": "Qwen/Qwen3-8B", "completed": 16,
             "mean_tpot_ms": 9, "mean_ttft_ms": 60, "total_input_tokens": 3200, "total_output_tokens": 2048},
    "sglang": {"request_rate": math.inf, "max_concurrency": 4, "completed": 16, "mean_ttft_ms": 60, "mean_tpot_ms": 9,
               "mean_e2e_latency_ms": 1200, "total_throughput": 500, "total_input_tokens": 3200,
               "total_output_tokens": 2048},
    "genai-perf": {"time_to_first_token": {"avg": 60}, "inter_token_latency": {"avg": 9}, "request_count": {"avg": 16},
                   "input_config": {"concurrency": 4, "model": ["Qwen/Qwen3-8B"]},
                   "input_sequence_length": {"avg": 200}, "output_sequence_length": {"avg": 128}},
    "aiperf": {"time_to_first_token": {"unit": "ms", "avg": 60}, "inter_token_latency": {"avg": 9},
               "request_count": {"avg": 16}, "input_sequence_length": {"avg": 200},
               "output_sequence_length": {"avg": 128},
               "input_config": {"models": {"items": [{"name": "Qwen/Qwen3-8B"}]}, "phases": [
                   {"kind": "warmup", "type": "concurrency", "concurrency": 1},
                   {"kind": "profiling", "type": "concurrency", "requests": 16, "concurrency": 4}]}},
    "genai-perf of 2025": {"time_to_first_token": {"avg": 60}, "request_count": {"avg": 16},
                           "inter_token_latency": {"avg": 9}, "input_sequence_length": {"avg": 200},
                           "output_sequence_length": {"avg": 128},
                           "input_config": {"model_names": ["Qwen/Qwen3-8B"],
                                            "perf_analyzer": {"stimulus": {"concurrency": 4}}}},
    "guidellm": {"config": {"spec": {"backend": {"model": "Qwen/Qwen3-8B"}}}, "benchmarks": [
        {"config": {"strategy": {"type_": "concurrent", "streams": 4}},
         "metrics": {"time_to_first_token_ms": {"successful": {"mean": 60}}, "request_totals": {"successful": 16},
                     "inter_token_latency_ms": {"successful": {"mean": 9}},
                     "prompt_token_count": {"successful": {"mean": 200}},
                     "output_token_count": {"successful": {"mean": 128}}}}]},
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_what_file_and_scenario_say_otherwise_is_a_warning_that_names_both(tmp_path, client):
    (run,) = read_results([write(tmp_path / "r.json", CLIENTS[client])])
    assert (run.max_concurrency, run.num_requests, run.mean_input, run.mean_output) == (4, 16, 200, 128)
    same = {"request_rate": "inf", "max_concurrency": 4, "input_tokens": 200, "output_tokens": 128}
    other = {"request_rate": 3, "max_concurrency": 7, "input_tokens": 4000, "output_tokens": 100}
    right, wrong = (
        build_scenario({"model": model, "hardware": "h100-sxm", "workload": load}, "test")
        for model, load in (("Qwen3-8B", same), ("Llama-3.1-8B", other))
    )
    assert validate(right, [run])[0]["warnings"] == []
    said = "\n".join(validate(wrong, [run])[0]["warnings"])
    for pair in ("200 on average in the file and 4,000", "128 on average in the file and 100", "4 in the file and 7",
                 "inf in the file and 3"):  # fmt: skip
        assert pair in said
    assert client == "sglang" or "model is Qwen/Qwen3-8B, the scenario's Llama-3.1-8B" in said


def test_prompts_of_a_file_begin_alike_as_the_scenario_says(tmp_path):
    prefixes = {"count": 1, "tokens": 384}
    load = {"request_rate": 2, "num_requests": 40, "input_tokens": 160, "output_tokens": 20}
    file = vllm_json(tmp_path / "r.json", prefixes=prefixes, **load)
    (run,) = read_results([file])
    told, untold = (validate(scenario_of(**load, **more), [run])[0] for more in ({"prefixes": prefixes}, {}))
    for row in told["errors"].values():
        assert abs(row["error"]) < 1e-3
    assert untold["errors"]["mean_ttft_ms"]["error"] > 0.02  # all computed again
    assert told["notes"] == [
        f"prompts begin alike as workload.prefixes says: {39 * 384:,} of their tokens are found cached"
    ]
    assert untold["notes"] == ["no prompts begin alike (the file does not say; workload.prefixes would)"]
    with pytest.raises(InputError, match=r"a prompt of 544 tokens cannot begin with 600; must be shorter"):
        validate(scenario_of(**load, prefixes=prefixes | {"tokens": 600}), [run])


def test_drafts_that_the_file_says_were_accepted_are_held_against_the_scenarios(tmp_path):
    document = CLIENTS["vllm"] | {"spec_decode_accepted_tokens": 1024}
    (run,) = read_results([write(tmp_path / "r.json", document)])
    assert run.accepted_share == 0.5
    load = {"max_concurrency": 4, "input_tokens": 200, "output_tokens": 128}
    scenario = build_scenario({"model": "Qwen3-8B", "hardware": "h100-sxm", "workload": load}, "test")
    (said,) = validate(scenario, [run])[0]["warnings"]
    assert "accepted drafts are 50.0% of the output tokens in the file and 0.0% in the scenario" in said


def test_a_validation_is_a_page(tmp_path, rates):
    write(tmp_path / "s.yaml", yaml.safe_dump({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LENGTHS}))
    page = tmp_path / "page.html"
    outcome = CliRunner().invoke(
        app, ["validate", rates[0], "--scenario", str(tmp_path / "s.yaml"), "--report", str(page)]
    )
    assert outcome.exit_code == 0, outcome.output
    text = page.read_text()
    assert "ttft, measured and predicted" in text
    assert "<svg" in text
