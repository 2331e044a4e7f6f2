"""A draft model on a GPU of its own: the round trip in every step, the memory that it leaves, and what it costs."""

import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.explain.cost import cost_of, num_gpus
from infersim.explain.summary import summarize
from infersim.run import run

SPECULATION = {
    "method": "draft_model",
    "model": "Llama-3.2-1B",
    "num_speculative_tokens": 3,
    "acceptance": {"rate": 0.7},
}
CHAT = {
    "model": "Llama-3.1-70B",
    "hardware": "h100-sxm",
    "parallelism": {"tensor": 4},
    "workload": {"num_requests": 40, "max_concurrency": 1, "input_tokens": 300, "output_tokens": 100},
}


def scenario_of(drafter: dict | None = None, speculation: dict | None = None, **keys):
    spec = SPECULATION | (speculation or {}) | ({"drafter": drafter} if drafter else {})
    return build_scenario(CHAT | {"speculation": spec} | keys, "test")


def test_the_price_is_that_of_one_gpu_and_two_ways_over_the_link():
    """Against the same GPU drafting with --draft-tensor-parallel-size 1: only the round trip, where anybody drafts."""
    near = deployment_of(scenario_of(speculation={"draft_tensor_parallel_size": 1})).draft_cost()
    apart = deployment_of(scenario_of({"latency": "50 us"})).draft_cost()
    assert apart.once[0] == near.once[0] == 0
    n = min(len(apart.once), len(near.once))
    assert apart.once[1:n] == pytest.approx(near.once[1:n] + 100e-6)
    assert apart.following[:n] == pytest.approx(near.following[:n])
    faster = deployment_of(scenario_of({"latency": 0, "hardware": "h200-sxm"})).draft_cost()
    assert faster.following[1] < near.following[1]


def test_its_weights_and_keys_lie_elsewhere():
    plain = deployment_of(build_scenario(CHAT, "test")).memory
    apart = deployment_of(scenario_of({"latency": 0})).memory
    near = deployment_of(scenario_of()).memory
    assert apart.num_gpu_blocks == plain.num_gpu_blocks > near.num_gpu_blocks
    small = deployment_of(scenario_of({"latency": 0, "hardware": "l4"})).memory
    assert small.num_gpu_blocks < plain.num_gpu_blocks  # an L4 holds fewer of the draft model's keys


def test_every_step_waits_for_the_round_trip():
    """One request at a time, prompts of one step: busy time grows by two latencies for each step, nothing else."""
    near, far = (run(scenario_of({"latency": latency}))[0] for latency in (0, "2 ms"))
    assert far.num_steps == near.num_steps
    assert far.busy_time - near.busy_time == pytest.approx(4e-3 * near.num_steps, rel=1e-6)
    summarize([far])


def test_far_enough_away_drafting_does_not_pay():
    """At 1 ms a draft of three still beats none; at 100 ms it does not."""
    plain = run(build_scenario(CHAT, "test"))[0].end_time
    assert (
        run(scenario_of({"latency": "1 ms"}))[0].end_time < plain < run(scenario_of({"latency": "100 ms"}))[0].end_time
    )


def test_each_replica_that_generates_has_one():
    """5 GPUs for each of two replicas; with prefill apart, its replica has none."""
    scenario = scenario_of({"latency": 0, "hardware": "l4"}, cluster={"replicas": 2})
    result = run(scenario)[0]
    assert result.replicas.gpus.tolist() == [5, 5]
    assert num_gpus(scenario) == cost_of(result, summarize([result])["metrics"])["gpus"] == 10
    split = {"prefill": {}, "decode": {}, "transfer": {"bandwidth": "50 GB/s"}}
    result = run(scenario_of({"latency": 0}, cluster=split))[0]
    assert result.replicas.gpus.tolist() == [5, 4]
    assert num_gpus(result.scenario) == 9
    summarize([result])


@pytest.mark.parametrize(
    ("drafter", "speculation", "problem"),
    [
        ({"latency": 0}, {"method": "eagle3", "model": None}, "drafter: only a draft_model"),
        ({"latency": 0}, {"draft_tensor_parallel_size": 1}, "drafter: only a draft_model, on one GPU"),
        ({"latency": 0, "hardware": "h300"}, {}, "speculation.drafter.hardware: 'h300': no such hardware profile"),
        (
            {"latency": 0, "hardware": "l4"},
            {"model": "Llama-3.1-70B"},
            "speculation.drafter: model: Llama-3.1-70B does",
        ),
        ({}, {"drafter": {}}, "speculation.drafter.latency: missing"),
    ],
)
def test_what_cannot_be_is_one_line(drafter, speculation, problem):
    with pytest.raises(InputError, match=problem) as error:
        run(scenario_of(drafter, speculation))
    assert len(error.value.problems) == 1
