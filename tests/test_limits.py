"""Runs with one limit each: what is named is what helps most when it is lifted."""

import pytest

from infersim.config.scenario import build_scenario
from infersim.explain.summary import summarize
from infersim.planning.limits import lift_limits, with_limits
from infersim.run import run

BURST = {"request_rate": "inf", "num_requests": 300, "input_tokens": 200, "output_tokens": 200}
BASE = {"model": "Llama-3.1-8B", "hardware": "h100-sxm"}
LINK = {"bandwidth": "50 GB/s"}


def answer(**keys):
    results = run(build_scenario({**BASE, **keys}, "test"))
    return results[0], with_limits(summarize(results), results[0])["explain"]


def pools(prefill, decode):
    return {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}, "transfer": LINK}


CASES = {
    "few sequences": ("max_num_seqs", {"engine": {"max_num_seqs": 8}, "workload": BURST}),
    "few blocks": ("kv_blocks", {"engine": {"num_gpu_blocks_override": 400, "max_model_len": 2048}, "workload": BURST}),
    "a small budget": (
        "max_num_batched_tokens",
        {
            "engine": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
            "workload": {"request_rate": 8, "num_requests": 300, "input_tokens": 1500, "output_tokens": 4},
        },
    ),
    "one prefill replica": (
        "prefill",
        {
            "cluster": pools(1, 4),
            "workload": {"request_rate": 8, "num_requests": 300, "input_tokens": 8000, "output_tokens": 20},
        },
    ),
    "one decode replica": (
        "decode",
        {
            "cluster": pools(4, 1),
            "engine": {"max_num_seqs": 4},
            "workload": {"request_rate": 10, "num_requests": 300, "input_tokens": 100, "output_tokens": 200},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_limit_that_is_named_is_the_one_whose_lifting_helps_most(case):
    limit, keys = CASES[case]
    result, explain = answer(**keys)
    assert explain["binding_constraint"] == limit
    assert explain["lifted"][0]["limit"] == limit
    assert explain["ceiling_factor"] == explain["lifted"][0]["faster"] > 1.05
    assert explain["lifted"] == lift_limits(result)
    assert "simulated again" in explain["ceiling"]


def test_a_limit_whose_lifting_gains_nothing_is_not_named():
    """Compute is short: all wait for it, and no room that they were given would help."""
    heavy = {"request_rate": 60, "num_requests": 400, "input_tokens": 4000, "output_tokens": 2}
    _, explain = answer(workload=heavy)
    assert explain["lifted"]
    assert explain["binding_constraint"] == "compute"


def test_who_does_not_wait_is_not_simulated_again():
    result, explain = answer(
        workload={"request_rate": 2, "num_requests": 100, "input_tokens": 200, "output_tokens": 20}
    )
    assert lift_limits(result) == explain["lifted"] == []


def test_a_run_that_loses_requests_is_repeated_once_at_most(monkeypatch):
    """Its latencies are those of the few that got an answer: no run can be compared with it."""
    runs = []
    monkeypatch.setattr("infersim.planning.limits.run", lambda scenario: runs.append(scenario) or run(scenario))
    (result,) = run(build_scenario({**BASE, "workload": {**BURST, "timeout": "2 s"}}, "test"))
    assert not result.completed.all()
    assert lift_limits(result) == []
    assert len(runs) <= 1
