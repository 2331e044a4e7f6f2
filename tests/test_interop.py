"""Files of other tools: written as they write them, read as they mean them."""

import json
import subprocess
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from infersim.calibration.results import read_results
from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.hub import repository
from infersim.config.scenario import build_scenario, load_scenario
from infersim.config.started import read_started
from infersim.deployment import deployments_of
from infersim.metrics.latency import measure
from infersim.models.catalog import load_model, names
from infersim.planning.steps import steps_of
from infersim.report.chrome_trace import chrome_trace
from infersim.report.export import write_export
from infersim.report.vllm_bench import vllm_bench
from infersim.run import run
from infersim.workload.build import build_requests


@pytest.fixture(scope="module")
def result():
    """One run with every gap kept."""
    return run(load_scenario("llama-8b-h100", ["workload.num_requests=200"]), save_detailed=True)[0]


def test_vllm_bench_file_says_what_vllm_would(result):
    """Recomputed from its own detailed lists with vLLM's definitions, every summary number is the file's."""
    document = json.loads(json.dumps(vllm_bench(result, save_detailed=True)))
    ttfts, latencies = np.array(document["ttfts"]), np.array(document["latencies"])
    outputs = np.array(document["output_lens"])
    tpots = (latencies - ttfts)[outputs > 1] / (outputs[outputs > 1] - 1)
    itls = np.concatenate(document["itls"])
    starts = np.array(document["start_times"])
    duration = (starts + latencies).max()  # the clock starts with the benchmark
    assert document["duration"] == pytest.approx(duration)
    assert document["output_throughput"] == pytest.approx(outputs.sum() / duration)
    assert document["total_token_throughput"] == pytest.approx((outputs.sum() + sum(document["input_lens"])) / duration)
    for name, values, close in (
        ("ttft", ttfts, 1e-9),
        ("tpot", tpots, 1e-9),
        ("e2el", latencies, 1e-9),
        ("itl", itls, 0.005),
    ):
        assert document[f"mean_{name}_ms"] == pytest.approx(values.mean() * 1e3, rel=close)
        assert document[f"std_{name}_ms"] == pytest.approx(values.std() * 1e3, rel=close)
        assert document[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99) * 1e3, rel=close)
    assert sum(map(len, document["itls"])) == document["total_output_tokens"] - document["completed"]
    lists = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "latencies"}
    assert not lists & vllm_bench(result).keys()


def test_peaks_are_those_of_seconds(result):
    """The most tokens in a second is at least the mean rate, and the most requests at least the engine's own peak."""
    document = vllm_bench(result)
    assert document["max_output_tokens_per_s"] >= document["output_throughput"]
    assert document["max_concurrent_requests"] >= result.peak_running


def test_our_file_is_read_back(result, tmp_path):
    """Write, read: the metrics of the run."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(vllm_bench(result)))
    (found,) = read_results([str(path)])
    metrics = measure(result)
    assert found.client == "vllm bench serve"
    assert found.num_requests == 200
    assert found.summary == {
        name: value for name, value in metrics.items() if value is not None and name != "duration_s"
    }
    assert found.mean_input == pytest.approx(result.requests["prompt_tokens"].mean())


def test_aiperf_means_other_things(tmp_path):
    """Its inter_token_latency is vLLM's tpot, its inter_chunk_latency vLLM's itl; units are read."""
    document = {
        "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 45.0, "p99": 90.0},
        "inter_token_latency": {"unit": "ms", "avg": 9.0, "p99": 12.0},
        "inter_chunk_latency": {"unit": "ns", "avg": 8.5e6},
        "request_latency": {"unit": "s", "avg": 2.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 1234.0},
        "request_count": {"unit": "requests", "avg": 77},
    }
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps(document))
    (found,) = read_results([str(path)])
    assert (found.client, found.num_requests) == ("aiperf", 77)
    assert found.summary == pytest.approx({
        "mean_ttft_ms": 50.0, "median_ttft_ms": 45.0, "p99_ttft_ms": 90.0, "mean_tpot_ms": 9.0, "p99_tpot_ms": 12.0,
        "mean_itl_ms": 8.5, "mean_e2el_ms": 2000.0, "output_throughput": 1234.0,
    })  # fmt: skip


def test_guidellm_means_other_things(tmp_path):
    """Its inter_token_latency is vLLM's tpot; its time_per_output_token, with the first token, is none of ours."""

    def block(mean, **percentiles):
        return {"successful": {"mean": mean, "median": percentiles.get("p50", mean), "percentiles": percentiles}}

    metrics = {
        "time_to_first_token_ms": block(50.0, p50=45.0, p99=90.0),
        "time_per_output_token_ms": block(11.0),
        "inter_token_latency_ms": block(9.0, p99=12.0),
        "request_latency": block(2.0),
        "output_tokens_per_second": block(1234.0),
        "request_totals": {"successful": 77, "errored": 1},
    }
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
    (found,) = read_results([str(path)])
    assert (found.client, found.num_requests, found.failed) == ("guidellm", 77, 1)
    assert found.summary["mean_tpot_ms"] == 9.0
    assert found.summary["mean_e2el_ms"] == 2000.0
    assert found.summary["p99_ttft_ms"] == 90.0
    assert "mean_itl_ms" not in found.summary


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "not json", '{"benchmarks": [1]}', '{"benchmarks": []}', "[" * 100_000]
)
def test_other_files_are_refused(tmp_path, text):
    """One line that names the file and what it should be."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.json"):
        read_results([str(path)])
    outcome = CliRunner().invoke(app, ["show", "bench", str(path)])
    assert outcome.exit_code == 2
    assert "Traceback" not in outcome.output


def test_show_bench(result, tmp_path):
    """A measured file on the terminal."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(vllm_bench(result)))
    outcome = CliRunner().invoke(app, ["show", "bench", str(path)])
    assert outcome.exit_code == 0
    assert "mean_ttft_ms" in outcome.stdout


def test_exports(tmp_path):
    """Command lines carry every setting that was simulated; shell and YAML are valid; a folder is asked for."""
    base = ["run", "llama-70b-4xh100", "--set", "workload.num_requests=50", "--set", "precision.kv_cache=fp8",
            "--set", "cluster.replicas=3", "--out", str(tmp_path / "o")]  # fmt: skip
    for kind in ("deployment", "k8s", "vllm-bench"):
        outcome = CliRunner().invoke(app, [*base, "--export", kind])
        assert outcome.exit_code == 0, outcome.output
    words = (tmp_path / "o" / "vllm.sh").read_text()
    for flag in ("--tensor-parallel-size 4", "--kv-cache-dtype fp8", "--max-num-seqs 1024", "--max-model-len 131072",
                 "--gpu-memory-utilization 0.92", "--enable-prefix-caching"):  # fmt: skip
        assert flag in words, flag
    assert "--tp-size 4" in (tmp_path / "o" / "sglang.sh").read_text()
    assert "--tp_size 4" in (tmp_path / "o" / "trtllm.sh").read_text()
    assert "--dataset-path trace.jsonl" in (tmp_path / "o" / "bench.sh").read_text()  # its lengths are lognormal
    for script in (tmp_path / "o").glob("*.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True)
    deployment, service = yaml.safe_load_all((tmp_path / "o" / "k8s.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert deployment["spec"]["replicas"] == 3
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert json.loads((tmp_path / "o" / "vllm-bench.json").read_text())["completed"] == 50
    drafts = "speculation={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.5}}"
    changes = (drafts, "precision.weights=fp8", "engine.enforce_eager=true")
    more = [*(word for change in changes for word in ("--set", change)), "--export", "deployment"]
    assert CliRunner().invoke(app, [*base, *more]).exit_code == 0
    words = (tmp_path / "o" / "vllm.sh").read_text()
    assert """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""" in words
    assert "--enable-lora" not in words
    assert "--quantization fp8" in words
    assert "--enforce-eager" in words
    for wrong in (["--export", "k8s"], ["--export", "helm", "--out", str(tmp_path / "o")]):
        assert CliRunner().invoke(app, ["run", "llama-8b-h100", *wrong]).exit_code == 2


def test_chrome_trace(result, tmp_path):
    """Valid trace events: spans inside the run that tile each request's time, counters, and names for every track."""
    steps = steps_of(result, seconds=2.0)
    trace = json.loads(json.dumps(chrome_trace(result, steps)))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "C", "X"}
    spans = [event for event in events if event["ph"] == "X"]
    end = result.requests["last_token"].max() * 1e6
    assert all(span["ts"] >= 0 and span["dur"] > 0 and span["ts"] + span["dur"] <= end * (1 + 1e-9) for span in spans)
    request = [span for span in spans if span["pid"] == 3 and span["tid"] == 0]
    assert [span["name"] for span in request] == ["waiting", "prefill", "decode"]
    row = result.requests[0]
    assert sum(span["dur"] for span in request) == pytest.approx((row["last_token"] - row["sent"]) * 1e6)
    mine = [span for span in spans if span["pid"] == 4]
    assert len(mine) == len(steps["steps"]) > 50
    assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-3 for one, two in pairwise(mine))  # steps follow one another
    assert sum(span["args"]["tokens"] for span in mine) == sum(step["tokens"] for step in steps["steps"])
    assert trace["otherData"]["contains"][2:] == ["requests: 200 of 200", "steps: the busiest 2 s of replica 0"]
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(span["pid"], span["tid"]) for span in spans} <= named
    assert {e["name"] for e in events if e["ph"] == "C"} == {"running", "waiting", "kv_usage"}
    path = tmp_path / "t.json"
    outcome = CliRunner().invoke(
        app, ["run", "llama-8b-h100", "--set", "workload.num_requests=20", "--chrome-trace", str(path)]
    )
    assert outcome.exit_code == 0
    assert json.loads(path.read_text())["traceEvents"]


SERVED = {
    "plain": {},
    "every flag": {
        "parallelism": {"tensor": 2, "pipeline": 2},
        "precision": {"kv_cache": "fp8", "weights": "fp8"},
        "engine": {
            "preset": "vllm-0.19",
            "max_model_len": 4096,
            "max_num_seqs": 77,
            "max_num_batched_tokens": 3000,
            "block_size": 32,
            "gpu_memory_utilization": 0.8,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "long_prefill_token_threshold": 1000,
            "stream_interval": 4,
            "num_gpu_blocks_override": 900,
            "scheduling_policy": "priority",
        },
    },
    "not in chunks": {"engine": {"preset": "vllm-0.11", "enable_chunked_prefill": False, "max_model_len": 2048}},
    "tiers": {"engine": {"kv_offloading_size": "8 GiB"}},
    "fp16 and experts": {
        "model": "DeepSeek-V3",
        "hardware": "h200-sxm",
        "parallelism": {"attention_data": 8, "expert": 8},
    },
    "drafts": {
        "speculation": {
            "method": "draft_model",
            "model": "Llama-3.2-1B",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
            "acceptance": {"rate": 0.7},
        }
    },
    "ngram": {"speculation": {"method": "ngram", "num_speculative_tokens": 4, "acceptance": {"rate": 0.7}}},
    "adapters": {"lora": {"adapters": {"a": 32, "b": 32}, "max_loras": 2, "max_lora_rank": 32}},
    "autoscaler": {
        "cluster": {
            "replicas": 2,
            "autoscaler": {"policy": "queue", "target": 3, "min": 2, "max": 5, "scale_down_delay": 60},
        }
    },
    "replicas": {"cluster": {"replicas": 3, "router": "least-outstanding"}},
    "llm-d's scorers": {
        "cluster": {"replicas": 2, "router": {"policy": "weighted", "scorers": {"queue": 1, "prefix": 5}}}
    },
    "Dynamo": {"cluster": {"replicas": 2, "router": {"policy": "kv-aware", "overlap_weight": 2}}},
    "kinds": {
        "cluster": {
            "router": "least-kv",
            "kinds": [
                {"replicas": 2, "hardware": "h200-sxm", "engine": {"max_num_seqs": 99}},
                {"replicas": 1, "parallelism": {"tensor": 2}},
            ],
        }
    },
    "pools": {
        "cluster": {
            "prefill": {"replicas": 2, "parallelism": {"tensor": 2}},
            "decode": {"replicas": 3, "engine": {"max_num_seqs": 64}, "router": "least-kv"},
            "transfer": {"bandwidth": "25 GB/s", "latency": "2 ms"},
        }
    },
    "Dynamo's pools": {
        "cluster": {
            "prefill": {"router": "least-outstanding"},
            "decode": {"router": "kv-aware"},
            "transfer": {"bandwidth": "25 GB/s"},
        }
    },
}


def deployed(scenario):
    """Everything that a run of the scenario is made of, whichever way it was written."""
    found = []
    for deployment, kind in deployments_of(scenario):
        engine = asdict(deployment.engine) | {"origin": None, "preset": None}
        router = getattr(kind, "router", scenario.cluster.router)
        drafts = deployment.speculation
        if drafts and drafts.model:
            drafts = drafts.model_copy(update={"model": load_model(drafts.model).name})
        sizes = kind.replicas, getattr(kind, "autoscaler", None)
        found.append((deployment.placement, engine, deployment.memory, drafts, deployment.lora, sizes, router))
    return found, scenario.cluster.transfer


@pytest.mark.parametrize("case", SERVED)
def test_manifests_are_read_back_as_the_same_deployment(case, tmp_path):
    workload = {"request_rate": 5, "num_requests": 20, "input_tokens": 50, "output_tokens": 5}
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload} | SERVED[case]
    result = run(build_scenario(data, "test"))[0]
    paths, _ = write_export("k8s", tmp_path, result, None, {})
    text = Path(paths[0]).read_text()
    assert "&id" not in text
    started = read_started(text, "k8s.yaml")
    again = build_scenario(started.keys | {"workload": workload}, "read back")
    assert deployed(again) == deployed(result.scenario)


@pytest.mark.parametrize("case", ["plain", "every flag", "not in chunks", "tiers", "ngram", "drafts", "adapters"])
def test_a_line_is_read_back_as_the_same_deployment(case, tmp_path):
    workload = {"request_rate": 5, "num_requests": 20, "input_tokens": 50, "output_tokens": 5}
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload} | SERVED[case]
    result = run(build_scenario(data, "test"))[0]
    write_export("deployment", tmp_path, result, build_requests(result.scenario.workload, 0, Path()), {})
    outcome = CliRunner().invoke(app, ["show", "deployment", str(tmp_path / "vllm.sh"), "--hardware", "h100-sxm"])
    assert outcome.exit_code == 0, outcome.output
    again = build_scenario(yaml.safe_load(outcome.output) | {"workload": workload}, "read back")
    assert deployed(again) == deployed(result.scenario)


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize(("preset", "module", "model", "tensor"), [
    ("sglang-0.5", "dynamo.sglang", "--model-path", "--tp-size"),
    ("trtllm-1.0-no-evict", "dynamo.trtllm", "--model", "--tensor-parallel-size"),
])  # fmt: skip
def test_dynamo_runs_the_engine_that_was_simulated(preset, module, model, tensor, pools, tmp_path):
    """Each worker is its engine's, in that engine's image and words; none of them is read back as vLLM's."""
    cluster = {"replicas": 2, "router": "kv-aware"}
    if pools:
        cluster = {"prefill": {}, "decode": {"router": "kv-aware"}, "transfer": {"bandwidth": "25 GB/s"}}
    engine = {"preset": preset, "enable_prefix_caching": True}
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine, "cluster": cluster,
            "parallelism": {"tensor": 2},
            "workload": {"request_rate": 5, "num_requests": 20, "input_tokens": 50, "output_tokens": 5}}  # fmt: skip
    result = run(build_scenario(data, "test"))[0]
    paths, _ = write_export("k8s", tmp_path, result, None, {})
    text = Path(paths[0]).read_text()
    [graph] = yaml.safe_load_all(text)
    workers = [each for name, each in graph["spec"]["services"].items() if name != "Frontend"]
    assert len(workers) == 1 + pools
    for worker in workers:
        main = worker["extraPodSpec"]["mainContainer"]
        options = dict(pairwise(main["args"]))
        assert (options["-m"], options[model], options[tensor]) == (module, "meta-llama/Llama-3.1-8B", "2")
        assert "--port" not in options
        assert options.get("--disaggregation-mode") == worker.get("subComponentType")
        assert ("sglang-runtime" if "sglang" in module else "tensorrtllm-runtime") in main["image"]
    with pytest.raises(InputError, match=r"dynamo\.vllm"):
        read_started(text, "k8s.yaml")


def test_a_line_as_people_write_it():
    line = "CUDA_VISIBLE_DEVICES=0 vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2 --max-num-seqs=64"
    keys = read_started(f"{line} --no-enable-prefix-caching", "x").keys
    assert keys == {"model": "meta-llama/Llama-3.1-8B-Instruct", "parallelism": {"tensor": 2},
                    "engine": {"max_num_seqs": 64, "enable_prefix_caching": False}}  # fmt: skip
    faults = {"vllm serve M --max-num-seq 3": "did you mean max_num_seqs", "ls": "vllm serve MODEL",
              "vllm serve M --dtype int3": "not understood", "vllm serve --port 1": "names no model"}  # fmt: skip
    for wrong, text in faults.items():
        with pytest.raises(InputError, match=text):
            read_started(wrong, "x")


def test_numbers_of_a_line_may_be_short_as_in_vllm():
    line = "vllm serve m --max-model-len 25.6k --max-num-batched-tokens 8K --kv-cache-memory-bytes 256M"
    assert read_started(line, "line").keys["engine"] == {
        "max_model_len": 25_600, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 2**28
    }  # fmt: skip
    with pytest.raises(InputError, match="--max-model-len '4x': not understood"):
        read_started("vllm serve m --max-model-len 4x", "line")


def test_pools_are_exported_with_their_roles(tmp_path):
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": {"request_rate": 5, "num_requests": 20,
            "input_tokens": 50, "output_tokens": 5}} | SERVED["pools"]  # fmt: skip
    path = tmp_path / "pools.yaml"
    path.write_text(yaml.safe_dump(data))
    for kind in ("deployment", "k8s"):
        outcome = CliRunner().invoke(app, ["run", str(path), "--export", kind, "--out", str(tmp_path / "out")])
        assert outcome.exit_code == 0
        assert "leaves out cluster.transfer" in outcome.stderr
    for role in ("prefill", "decode"):
        assert "NixlConnector" in (tmp_path / "out" / f"vllm-{role}.sh").read_text()
    assert "--vllm-pd-disaggregation" in (tmp_path / "out" / "router.sh").read_text()
    text = (tmp_path / "out" / "k8s.yaml").read_text()
    assert "# left out: cluster.transfer" in text
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    assert {"Deployment", "InferencePool", "ConfigMap", "Service"} <= found.keys()
    assert "--connector=nixlv2" in text
    for script in (tmp_path / "out").glob("*.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True)


@pytest.mark.parametrize(
    "load",
    [
        {"curve": [[0, 1], [30, 3], [60, 1]], "spikes": [{"at": 10, "duration": 5, "factor": 3}]},
        {"prefixes": {"count": 3, "tokens": 100}},
        {"turns": 3, "think_time": 2},
    ],
)
def test_what_no_option_says_is_sent_as_a_trace(load, tmp_path):
    """The benchmark's trace, read by infersim, is the traffic of the run: times, lengths and shared text."""
    workload = {
        "request_rate": 5,
        "num_requests": 60,
        "input_tokens": {"uniform": [30, 90]},
        "output_tokens": 20,
    } | load
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload}
    result = run(build_scenario(data, "test"))[0]
    write_export("deployment", tmp_path, result, build_requests(result.scenario.workload, 0, Path()), {})
    assert "--dataset-name timed_trace --dataset-path trace.jsonl" in " ".join(
        (tmp_path / "bench.sh").read_text().replace("\\\n", " ").split()
    )
    again = run(
        build_scenario(
            data | {"workload": {"trace": str(tmp_path / "trace.jsonl"), "max_tokens": "output_length"}}, "test"
        )
    )[0]
    for name in ("prompt_tokens", "num_output_tokens"):
        assert sorted(again.requests[name].tolist()) == sorted(result.requests[name].tolist())
    sent = [np.sort(each.requests["sent"]) for each in (again, result)]
    assert sent[0] - sent[0][0] == pytest.approx(sent[1] - sent[1][0], abs=1e-5)
    if "curve" not in load:
        hits = [int(each.requests["num_cached_tokens"].sum()) for each in (again, result)]
        assert hits[0] == pytest.approx(hits[1], rel=0.25)  # a block holds the end of one text and the start of another
        assert hits[0] > 0


def test_models_have_the_names_of_their_repositories():
    known = {name: repository(name) for name in names()}
    assert sum(found is not None for found in known.values()) > 100
    assert all(load_model(found).name == name for name, found in known.items() if found)
    assert repository("my-org/my-model") == "my-org/my-model"
    assert repository("no such model") is None
