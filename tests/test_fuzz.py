"""The fuzzer draws every key, gives the same scenario for a number for ever, and notices what is wrong."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
sys.path.insert(0, str(FUZZ))
os.environ.setdefault("INFERSIM_BOUNDSCHECK", "")  # scenarios.py asks for bounds checks, which these tests do without

import draw
import laws

import scenarios
from infersim.config.scenario import build_scenario
from infersim.engine.compiled import build
from infersim.run import run


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return draw.write_traces(tmp_path_factory.mktemp("traces"))


def test_every_key_of_the_schema_is_drawn(traces):
    used = set().union(*(draw.used(draw.scenario(0, number, traces)) for number in range(4000)))
    assert draw.keys() - used == set(), "draw these in tests/fuzz/draw.py"


def test_a_number_is_the_same_scenario_for_ever(traces):
    assert draw.scenario(3, 14, traces) == draw.scenario(3, 14, traces) != draw.scenario(4, 14, traces)


def test_random_scenarios_break_no_law(traces):
    found = [laws.examine(draw.scenario(7, number, traces), number == 0) for number in range(60)]
    assert [one for one in found if one[0] not in (laws.OK, laws.REFUSED)] == []
    assert sum(kind == laws.OK for kind, _ in found) > 40


PLAIN = {"model": "GPT-2", "hardware": "l4", "workload": {"num_requests": 3, "input_tokens": 9, "output_tokens": 4}}


def test_what_contradicts_itself_dies_or_does_not_end_is_noticed(monkeypatch):
    assert laws.examine(PLAIN) == (laws.OK, "")
    assert laws.examine(PLAIN | {"model": "GPT-9"})[0] == laws.REFUSED
    wrong = {"explain": {"busy_share": 1.2, "kv_shares": None}, "metrics": {"median_ttft_ms": -3.0}}
    assert [law.partition(":")[0] for law in laws._shares(wrong)] == [".explain.busy_share", ".metrics.median_ttft_ms"]
    monkeypatch.setattr(laws, "run", lambda *_, **__: 1 / 0)
    assert laws.examine(PLAIN)[0].startswith("ZeroDivisionError in test_fuzz.py")
    monkeypatch.setattr(scenarios, "examine", lambda _: os.kill(os.getpid(), 9))
    assert scenarios.outcome(PLAIN, 20) == "died of SIGKILL"
    monkeypatch.setattr(scenarios, "examine", lambda _: [None for _ in iter(int, 1)])
    assert scenarios.outcome(PLAIN, 0.3) == "hang"


def test_what_breaks_a_law_is_made_smaller(monkeypatch):
    data = {
        "workload": {"users": 40, "turns": 3, "think_time": 2.0},
        "engine": {"reserve": "first-chunk"},
        "seeds": [1, 2],
    }
    monkeypatch.setattr(
        scenarios, "outcome", lambda data, _: "x" if data.get("workload", {}).get("users", 0) > 5 else ""
    )
    assert scenarios.shrink(data, "x") == {"workload": {"users": 6}}


def test_bounds_checks_are_compiled_to_a_cache_of_their_own(monkeypatch):
    monkeypatch.delenv("INFERSIM_BOUNDSCHECK", raising=False)
    plain = build.key()
    monkeypatch.setenv("INFERSIM_BOUNDSCHECK", "1")
    assert build.key() != plain


@pytest.mark.slow
def test_no_index_is_out_of_bounds():
    """The oracle's scenarios and some of the fuzzer's, by an engine that aborts where one is."""
    environment = os.environ | {"INFERSIM_BOUNDSCHECK": "1"}
    suite = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FUZZ.parent / "test_engine_oracle.py")]
    suite.append(f"{__file__}::test_found_and_mended")
    oracle = subprocess.run(suite, env=environment, capture_output=True, text=True, check=False)
    assert oracle.returncode == 0, oracle.stdout[-3000:]
    command = [sys.executable, str(FUZZ / "scenarios.py"), "0.3", "--seed", "11"]
    fuzz = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert fuzz.returncode == 0, fuzz.stdout[-3000:]


# --- scenarios in which the books were once wrong ---------------------------------------------------------------------
LOAD = {"num_requests": 6, "input_tokens": 30, "output_tokens": 12, "request_rate": 20}
WINDOWS = {"model": "Mistral-7B-v0.1", "hardware": "h100-sxm"}
FOUND = {
    "tokens that wait for the API server come closer than steps": {
        "model": "Phi-3-mini-4k",
        "hardware": "tpu-v5e",
        "engine": {
            "preset": "trtllm-1.0-max-utilization",
            "scheduler_reserve_full_isl": False,
            "allocator": "buddy",
            "reserve": "max-model-len",
            "preemption_mode": "recompute",
            "host_prompt_token_time": 0,
            "host_token_time": "1 ms",
            "attention_kernel": "standard",
            "enable_chunked_prefill": False,
        },
        "workload": {
            "num_requests": 13,
            "input_tokens": 26,
            "output_tokens": {"quantiles": {"p0": 1, "p50": 1, "p100": 2}},
            "users": 11,
            "timeout": 0.0612,
            "max_tokens": 33,
        },
        "simulation": {"seed": 61},
    },
    "one kind of replicas has its memory in pieces and another in pages": PLAIN
    | {
        "hardware": "h100-sxm",
        "model": "Llama-3.1-8B",
        "engine": {"num_gpu_blocks_override": 80002},
        "workload": {"input_tokens": 1, "output_tokens": 1},
        "cluster": {"kinds": [{"engine": {"allocator": "contiguous", "num_gpu_blocks_override": 80002}}, {}]},
    },
    "text cached at a step's end is not text of that step": PLAIN
    | {
        "engine": {
            "preset": "trtllm-1.0-max-utilization",
            "enable_chunked_prefill": False,
            "max_model_len": 300,
            "num_gpu_blocks_override": 15,
        },
        "workload": {
            "num_requests": 34,
            "input_tokens": {"quantiles": {"p0": 52, "p50": 63, "p100": 126}},
            "output_tokens": {"lognormal": {"mean": 2, "sigma": 0.5, "max": 80}},
            "users": 1,
            "turns": 2,
        },
        "simulation": {"seed": 90},
    },
    "goodput of two replications": PLAIN
    | {"workload": LOAD, "slo": {"p50_ttft_ms": 1e5}, "simulation": {"replications": 2}},
    "a place is free before a request arrives that is there when the host looks": PLAIN
    | {
        "engine": {"host_step_time": "1 ms", "host_sequence_time": "30 ms"},
        "workload": {
            "num_requests": 60,
            "input_tokens": {"uniform": [10, 300]},
            "output_tokens": {"uniform": [1, 3]},
            "request_rate": 30,
            "max_concurrency": 8,
        },
        "cluster": {"replicas": 2, "router": "least-outstanding"},
    },
    "a single request in a session": PLAIN
    | {"workload": {"num_requests": 1, "input_tokens": 1, "output_tokens": 2, "turns": {"uniform": [1, 2]}}},
    "one kind of replicas jumps and another does not": PLAIN
    | {
        "engine": {"jump_forward_share": 0.7},
        "workload": LOAD | {"output_tokens": {"uniform": [1, 60]}, "num_requests": 60},
        "cluster": {"kinds": [{"engine": {"max_num_seqs": 50}}, {"replicas": 2}]},
    },
    "a replica goes while its step goes on, whose requests were given up": {
        "model": "Yi-6B",
        "hardware": "h100-pcie",
        "engine": {"preset": "static"},
        "workload": {"num_requests": 3, "input_tokens": 3000, "output_tokens": 1, "turns": 5, "timeout": 0.01},
        "cluster": {
            "replicas": 2,
            "autoscaler": {"policy": "ttft", "target": 10, "min": 0, "max": 3, "interval": 0.05, "scale_down_delay": 1},
        },
    },
    "a replica dies twice before it has sent an answer": {
        "model": "Qwen2.5-0.5B",
        "hardware": "h100-sxm",
        "engine": {"host_token_time": "30 ms"},
        "workload": {
            "num_requests": 8,
            "input_tokens": 10,
            "output_tokens": {"uniform": [2, 5]},
            "users": 16,
            "retries": 2,
        },
        "cluster": {"replicas": 2, "failures": [{"mean_time_between": 0.1, "duration": 0.011}]},
        "simulation": {"seed": 1},
    },
    "a replica dies again while its scheduler would still be busy": {
        "model": "Llama-3.2-1B",
        "hardware": "h100-pcie",
        "engine": {"host_sequence_time": "30 ms"},
        "workload": {
            "num_requests": 29,
            "input_tokens": 5,
            "output_tokens": 35,
            "request_rate": 699,
            "max_concurrency": 4,
        },
        "cluster": {"failures": [{"mean_time_between": 0.031, "kind": "crash", "duration": 0.00121}]},
    },
    "prompts with windows are handed over turn after turn": {
        "model": "gpt-oss-20b",
        "hardware": "h100-sxm",
        "workload": {"num_requests": 40, "input_tokens": 500, "output_tokens": 20, "request_rate": 20, "turns": 4},
        "cluster": {"prefill": {}, "decode": {}, "transfer": {"bandwidth": "10 GB/s"}},
    },
    "chunks that end with the answer, whose first token comes with them": PLAIN
    | {
        "engine": {"stream_interval": 50, "stream_first_token": False},
        "workload": LOAD | {"output_tokens": {"uniform": [1, 30]}, "num_requests": 60},
    },
    "windows whose blocks are reserved at once": WINDOWS
    | {
        "engine": {"reserve": "max-model-len", "num_gpu_blocks_override": 400},
        "workload": LOAD | {"input_tokens": 3000},
    },
}

FOUND["a load in the background, and a client that waits for its answer"] = PLAIN | {
    "workload": {"num_requests": 12, "input_tokens": 20, "output_tokens": 4, "max_concurrency": 1,
                 "prefixes": {"count": 6, "tokens": 200}},
    "engine": {"num_gpu_blocks_override": 65, "max_model_len": 1000, "enable_prefix_caching": True,
               "kv_offloading_size": "1 GB", "kv_offloading_load": "background", "kv_offloading_latency": "50 ms"},
}  # fmt: skip
FOUND["the ends of what a number may be"] = PLAIN | {
    "workload": LOAD | {"request_rate": 1e9, "tenants": {"a": {"share": 1e-9}, "b": {"share": 1e9}}},
    "speculation": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 1e-320}},
    "cluster": {"replicas": 1, "autoscaler": {"policy": "outstanding", "target": 1e-9, "max": 2}},
}
FOUND["prompts too long for a model with windows are looked for in every cache"] = WINDOWS | {
    "workload": LOAD | {"num_requests": 30, "input_tokens": {"uniform": [10, 3000]}},
    "engine": {"max_model_len": 400},
    "cluster": {"replicas": 2, "router": "kv-aware"},
}


@pytest.mark.parametrize("name", FOUND)
def test_found_and_mended(name):
    assert laws.examine(FOUND[name]) == (laws.OK, "")


def test_shortest_first_takes_about_as_long_for_each_request_however_many_wait():
    load = {"input_tokens": {"uniform": [10, 3000]}, "output_tokens": 2, "request_rate": "inf"}
    seconds = []
    for n in (20_000, 80_000):
        data = PLAIN | {
            "hardware": "h100-sxm",
            "model": "Llama-3.1-8B",
            "engine": {"scheduling_policy": "shortest-first"},
            "workload": load | {"num_requests": n},
        }
        begin = time.process_time()
        run(build_scenario(data, "x"))
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 10 * seconds[0] + 0.5, seconds  # 4 times, and caches; without places to walk from, 16 and more


def test_what_could_never_be_reserved_at_once_is_refused():
    engine = {"reserve": "whole-prompt", "num_gpu_blocks_override": 400, "max_model_len": 8000}
    kind, why = laws.examine(WINDOWS | {"engine": engine, "workload": LOAD})
    assert (kind, "must be at most 6384" in why) == (laws.REFUSED, True), why
