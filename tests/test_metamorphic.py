"""Relations between two runs: what has no effect changes no bit, twice the device takes half the time, a trace that is
dealt out in turn is several runs."""

from pathlib import Path

import numpy as np
import pytest

from infersim.config.resources import load_yaml, packaged
from infersim.config.scenario import build_scenario
from infersim.engine.compiled.state import KNOBS
from infersim.run import run, simulate
from infersim.workload.build import build_requests

LOAD = {
    "num_requests": 60,
    "input_tokens": {"uniform": [20, 900]},
    "output_tokens": {"uniform": [1, 60]},
    "request_rate": 30,
}
PLAIN = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOAD}
TIMES = ["arrival", "sent", "scheduled", "first_token", "last_token", "num_output_tokens", "num_preemptions", "status"]


def records(data: dict) -> list:
    (result,) = run(build_scenario(data, "x"))
    return result.requests[TIMES].tolist()


def changed(**sections) -> dict:
    """PLAIN with more in its sections."""
    return PLAIN | {key: {**PLAIN.get(key, {}), **more} for key, more in sections.items()}


WITHOUT_EFFECT = {
    "a timeout that nobody waits for": changed(workload={"timeout": 1e6}),
    "retries of what never fails": changed(workload={"retries": 3, "backoff": 5}),
    "one tenant": changed(workload={"tenants": {"nancy": {"share": 2, "priority": 4}}}),
    "one model": changed(workload={"models": {"Llama-3.1-8B": 1}}),
    "more concurrency than requests": changed(workload={"max_concurrency": 1000}),
    "a curve that is level": changed(workload={"curve": [[0, 1], [1, 1]]}),
    "a spike after the end": changed(workload={"spikes": [{"at": 1e4, "duration": 1, "factor": 9}]}),
    "a spike of factor 1": changed(workload={"spikes": [{"at": 0.5, "duration": 1, "factor": 1}]}),
    "a failure after the end": changed(cluster={"failures": [{"at": 1e5}]}),
    "slowness of factor 1": changed(cluster={"failures": [{"kind": "slow", "at": 0.5, "factor": 1}]}),
    "a front door that lets everybody in": changed(cluster={"admission": {"max_outstanding": 1000, "max_queue": 5}}),
    "an autoscaler that has no choice": changed(cluster={"autoscaler": {"target": 1, "max": 1, "interval": 0.01}}),
    "a router of one": changed(cluster={"router": "weighted"}),
    "one kind, spelled out": changed(cluster={"kinds": [{"hardware": "h100-sxm"}]}),
    "limits": changed(slo={"p99_ttft_ms": 1, "goodput": {"e2el_ms": 5}}),
    "a threshold above every prompt": changed(engine={"long_prefill_token_threshold": 100_000}),
    "swapping where nobody is preempted": changed(engine={"preemption_mode": "swap"}),
    "a tier below a cache that evicts nothing": changed(engine={"kv_offloading_size": "40 GB"}),
    "a policy where nobody waits": changed(engine={"scheduling_policy": "priority"}),
    "beams of one": changed(workload={"beam_width": 1, "n": 1}),
    "sessions of one turn": changed(workload={"turns": 1}),
    "hand-over never": changed(
        cluster={"prefill": {}, "decode": {}, "transfer": {"bandwidth": "1 GB/s", "hand_over": "never"}}
    ),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_changes_no_bit(name):
    assert records(WITHOUT_EFFECT[name]) == records(PLAIN)


def test_drafts_that_are_never_made_change_no_bit():
    """But what speculation itself changes: vLLM does not schedule asynchronously beside n-grams."""
    plain = PLAIN | {"engine": {"async_scheduling": False}}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": 0.0}}
    never = drafts | {"num_speculative_tokens_per_batch_size": [[1, 0]]}
    assert records(plain | {"speculation": never}) == records(plain)


def doubled(quantity: str) -> str:
    number, unit = quantity.split()
    return f"{2 * float(number)} {unit}"


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "gpt-oss-20b", "Qwen3-30B-A3B"])
def test_twice_the_device_takes_half_the_time(model):
    """Where nothing but bytes and FLOPs takes time, all times halve if both rates and the arrivals double."""
    profile = load_yaml(packaged("hardware_profiles") / "h100-sxm.yaml")
    row = {"bandwidth": 0.8, "flops": 0.7, "fixed": 0, "softness": 0.1, "provenance": "assumed", "source": "this test"}
    classes = ("gemm", "moe", "attention_prefill", "attention_decode", "elementwise")
    profile["efficiency"] = dict.fromkeys(classes, row)
    profile["launch"] = {"graph": 0, "eager": 0, "source": "this test"}
    profile["beside_prefill"] = {"least": 1, "growth": 0, "head": 0, "block": 0, "source": "this test"}
    profile.pop("calibration", None)
    twice = profile | {"memory_bandwidth": doubled(profile["memory_bandwidth"])}
    twice["flops"] = {name: doubled(rate) for name, rate in profile["flops"].items()}
    free = dict.fromkeys(["eager_launch_time", *(name for name in KNOBS.names if name.startswith("host_"))], 0)
    slow, fast = (
        run(
            build_scenario(
                {"model": model, "hardware": device, "engine": free, "workload": LOAD | {"request_rate": rate}}, "x"
            )
        )[0].requests
        for device, rate in ((profile, 30), (twice, 60))
    )
    for name in ("arrival", "scheduled", "first_token", "last_token"):
        np.testing.assert_allclose(slow[name], 2 * fast[name], rtol=1e-9)


@pytest.mark.parametrize("engine", [{}, {"preset": "sglang-0.5"}, {"max_num_seqs": 3, "num_gpu_blocks_override": 200,
                                                                  "max_model_len": 1000}])  # fmt: skip
@pytest.mark.parametrize("extra", [{}, {"cluster": {"failures": [{"at": 1e5}]}}])  # at once, or request by request
def test_a_trace_dealt_out_in_turn_is_several_runs(engine, extra):
    data = PLAIN | {"engine": engine, "workload": LOAD | {"request_rate": 200}}
    together = {**extra, "cluster": {"replicas": 3, **extra.get("cluster", {})}}
    scenario = build_scenario(data, "x")
    requests = build_requests(scenario.workload, scenario.simulation.seed, Path())
    whole = simulate(build_scenario(data | together, "x"), requests)
    for replica in range(3):
        mine = np.arange(len(requests)) % 3 == replica
        alone = simulate(scenario, requests.keep(mine))
        assert whole.requests[mine][TIMES].tolist() == alone.requests[TIMES].tolist()
