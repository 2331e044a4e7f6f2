"""Groups of sequences (beams, samples of a prompt) that share KV blocks, against closed forms and whole histories."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.engine.compiled import state
from infersim.engine.compiled.draws import make_keys, uniforms
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.summary import summarize
from infersim.run import run

SETTING = {
    "model": "OPT-13B",
    "hardware": "a100-sxm-40gb",
    "engine": {"preset": "vllm-0"},
    "workload": {"num_requests": 30, "input_tokens": {"uniform": [10, 200]}, "output_tokens": {"uniform": [1, 150]}},
}


def fleet_of(k: int, turnover: float, block_size: int = 16, blocks: int = 10_000, **knobs) -> Fleet:
    """One replica whose every step takes a second."""
    defaults = {"max_num_seqs": 2 * k, "max_num_batched_tokens": 4096, "max_model_len": 1024, "chunked_prefill": False}
    linear, head = np.zeros((4097, 8)), np.zeros((2 * k + 1, 8))
    linear[1:, state.WEIGHTS] = 1.0
    cost = StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE))
    group = {"num_sequences": k, "beam_turnover": turnover, "num_gpu_blocks": blocks + 1, "block_size": block_size}
    return Fleet([ReplicaSpec(make_knobs(**defaults | group | knobs), cost)])


def held_without_turnover(k: int, prompt: int, tokens: int, size: int = 16) -> int:
    """Blocks of k sequences with so many tokens each that share the prompt's full blocks and no others."""
    return prompt // size + k * (-(-tokens // size) - prompt // size)


def scenario(engine=(), **workload):
    parts = SETTING | {"engine": SETTING["engine"] | dict(engine), "workload": SETTING["workload"] | workload}
    return build_scenario(parts, "test")


@pytest.mark.parametrize("k", [2, 3, 6])
@pytest.mark.parametrize(("prompt", "outputs"), [(40, 17), (48, 40), (1, 2), (7, 1)])
def test_sequences_that_go_on_from_their_own_share_the_prompt_s_full_blocks(k, prompt, outputs):
    fleet = fleet_of(k, turnover=0.0)
    fleet.submit(0, [0.0], [prompt], [outputs], [outputs])
    fleet.advance()
    held = [-(-prompt // 16), *(held_without_turnover(k, prompt, prompt + i) for i in range(1, outputs))]
    alone = [-(-prompt // 16), *(k * -(-(prompt + i) // 16) for i in range(1, outputs))]
    replica = fleet.replicas[0]
    assert replica["block_time"] == sum(held)
    assert replica["block_time"] + replica["shared_time"] == sum(alone)
    assert replica["peak_blocks"] == max(held)
    assert replica["num_scheduled_tokens"] == prompt + k * (outputs - 1)
    assert replica["num_block_copies"] == (k - 1 if prompt % 16 and outputs > 1 else 0)  # the last one keeps the block


def ancestry(name: int, k: int, turnover: float, outputs: int) -> list[np.ndarray]:
    """By the rule of draws: for each output token from the second on, the beam from which each beam goes on."""
    key = np.repeat(make_keys(0, "beams", np.array([name])), k)
    generations = []
    for token in range(2, outputs + 1):
        chance = uniforms(key, token * k + np.arange(k))
        drawn = np.minimum((chance / turnover * k).astype(int), k - 1)
        generations.append(np.where(chance < turnover, drawn, np.arange(k)))
    return generations


@given(
    st.integers(2, 6), st.integers(1, 40), st.integers(2, 30), st.sampled_from([1, 4, 16]), st.sampled_from([0.1, 1.0])
)
def test_blocks_are_those_of_different_texts(k, prompt, outputs, block_size, turnover):
    """In each step two beams hold the same block if and only if all text up to its end is the same."""
    fleet = fleet_of(k, turnover, block_size)
    fleet.submit(0, [0.0], [prompt], [outputs], [outputs])
    parents = ancestry(-1, k, turnover, outputs)
    texts = [list(range(prompt))] * k  # a prompt, then for each token of a beam a name that only it has
    for step in range(1, outputs):
        if step > 1:
            texts = [texts[parent] for parent in parents[step - 2]]
        texts = [[*text, (step, beam)] for beam, text in enumerate(texts)]
        fleet.advance(step + 0.5)
        blocks = {tuple(text[: i + block_size]) for text in texts for i in range(0, len(text), block_size)}
        assert fleet.requests["num_blocks"][0] == len(blocks)
        assert fleet.schedulers["num_shared"][0] == k * -(-len(texts[0]) // block_size) - len(blocks)
    fleet.advance()
    assert fleet.requests["status"][0] == state.COMPLETED
    assert fleet.schedulers["free_blocks"][0] == fleet.knobs["num_gpu_blocks"][0] - 1
    tokens = prompt + outputs - 1
    most = held_without_turnover(k, prompt, tokens, block_size)
    assert -(-tokens // block_size) <= fleet.replicas["peak_blocks"][0] <= most


def test_more_turnover_and_more_beams_share_more():
    def saved(k, turnover):
        rows = run(scenario(beam_width=k, beam_turnover=turnover, request_rate=2))[0].replicas.rows
        return float((rows["shared_time"] / (rows["shared_time"] + rows["block_time"]))[0])

    by_turnover = [saved(4, turnover) for turnover in (0.0, 0.05, 0.2, 1.0)]
    assert by_turnover == sorted(by_turnover)
    assert saved(2, 0.1) < saved(6, 0.1) < 5 / 6


def test_one_beam_is_no_group():
    """Bit for bit what a run without the key gives."""
    one, plain = (run(scenario(request_rate=3, **beams))[0] for beams in ({"beam_width": 1}, {}))
    assert one.requests.tobytes() == plain.requests.tobytes()
    assert one.busy_time == plain.busy_time


def test_beams_are_decoded_and_one_is_the_answer():
    result = run(scenario(beam_width=4, request_rate=3))[0]
    document = summarize([result])
    outputs = int(result.requests["num_output_tokens"].sum())
    assert document["counts"]["completed"] == 30
    assert document["explain"]["sequences"]["decoded_tokens"] == 4 * outputs
    assert result.num_scheduled_tokens == result.requests["prompt_tokens"].sum() + 4 * (outputs - 30)
    assert document["metrics"]["output_throughput"] == outputs / document["metrics"]["duration_s"]


def test_samples_compute_their_prompt_once_and_end_one_by_one():
    """The same requests as under vLLM 1, where each computes what the cache has not."""
    result = run(scenario(n=3, request_rate=2))[0]
    other = run(scenario(n=3, request_rate=2, engine={"preset": "vllm-0.11"}))[0]
    for name in ("prompt_tokens", "output_tokens", "num_output_tokens", "arrival"):
        assert np.array_equal(result.requests[name], other.requests[name])
    outputs, ends = (result.requests[name].reshape(-1, 3) for name in ("num_output_tokens", "last_token"))
    assert (np.argsort(outputs, axis=1, kind="stable") == np.argsort(ends, axis=1, kind="stable")).all()
    prompts = result.requests["prompt_tokens"][::3]
    assert result.num_scheduled_tokens == prompts.sum() + (outputs - 1).sum()
    document = summarize([result])
    assert document["counts"]["completed"] == 90
    assert document["explain"]["sequences"]["decoded_tokens"] == outputs.sum()
    assert 0 < document["explain"]["kv_blocks_saved"] < 2 / 3


def test_samples_look_alike_in_both_ways_of_sharing():
    """One prompt of full blocks: what is saved differs by the last block, which a cache does not give."""

    def saved(preset):
        engine = {"preset": preset, "max_model_len": 1024}
        load = {"num_requests": 1, "n": 4, "input_tokens": 128, "output_tokens": 80}
        return summarize(run(scenario(engine=engine, **load)))["explain"]["kv_blocks_saved"]

    assert saved("vllm-0") == pytest.approx(3 * 8 / (4 * (8 + 3)), rel=0.03)
    assert saved("vllm-0.33") == pytest.approx(3 * 7 / (4 * (8 + 3)), rel=0.03)


def test_with_a_prefix_cache_vllm_0_makes_requests_of_samples():
    """As it did from 0.6.4 on."""
    result = run(scenario(n=3, request_rate=2, engine={"enable_prefix_caching": True}))[0]
    assert result.num_sequences == 1
    assert len(result.requests) == 90


def test_whole_groups_are_swapped_and_come_back():
    """Memory for a few of them: all are answered, each as it would be alone, and each block goes out and comes back."""
    result = run(scenario(beam_width=4, engine={"num_gpu_blocks_override": 150, "max_model_len": 400}))[0]
    document = summarize([result])
    assert document["counts"]["completed"] == 30
    assert document["counts"]["preemptions"] > 0
    swapped = document["explain"]["sequences"]["swapped_blocks"]
    assert swapped > 0
    assert swapped % 2 == 0
    outputs = int(result.requests["num_output_tokens"].sum())
    assert result.num_scheduled_tokens == result.requests["prompt_tokens"].sum() + 4 * (outputs - 30)


@pytest.mark.parametrize(
    ("engine", "beams", "reason"),
    [
        ({"num_gpu_blocks_override": 60, "max_model_len": 400, "swap_space": 0}, 4, state.SWAP_SPACE_FULL),
        ({"num_gpu_blocks_override": 26, "max_model_len": 400}, 24, state.GROUP_TOO_LARGE),
    ],
)
def test_groups_that_cannot_go_on_are_rejected_with_the_reason(engine, beams, reason):
    result = run(scenario(beam_width=beams, output_tokens=60, engine=engine))[0]
    document = summarize([result])  # and the books balance
    rejected = result.requests["status"] == state.REJECTED
    assert rejected.any()
    assert (result.requests["reason"][rejected] == reason).all()
    assert document["counts"]["completed"] + rejected.sum() == 30


def test_groups_in_a_cluster_with_failures_and_impatient_clients():
    """Every request is accounted for, whatever its group holds when its replica dies or its client gives up."""
    parts = SETTING | {
        "engine": {"preset": "vllm-0", "num_gpu_blocks_override": 120, "max_model_len": 400},
        "cluster": {"replicas": 3, "failures": [{"replica": 1, "at": 2}]},
    }
    for load in ({"beam_width": 4}, {"n": 4}):
        load |= {"timeout": 9, "retries": 2, "request_rate": 20, "num_requests": 100}
        result = run(build_scenario(parts | {"workload": SETTING["workload"] | load}, "test"))[0]
        counts = summarize([result])["counts"]
        assert counts["submitted"] == 100 * load.get("n", 1)
        assert counts["completed"] > 0
        assert counts["timed_out"] + counts["retries"] > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": {"preset": "vllm-0.33"}}, "workload.beam_width: vllm-0.33 has no beams in its scheduler"),
        ({"engine": {"preset": "orca"}}, "engine.allocator must be paged"),
        ({"engine": {"preset": "orca", "allocator": "paged"}}, "engine.reserve must be first-chunk or whole-prompt"),
        ({"engine": {"preset": "vllm-0", "enable_prefix_caching": True}}, "enable_prefix_caching must be false"),
        ({"engine": {"preset": "vllm-0", "preemption_mode": "recompute"}}, "preemption_mode must be swap"),
        ({"engine": {"preset": "vllm-0", "max_num_seqs": 3}}, "must be at most engine.max_num_seqs, 3"),
        ({"engine": {"preset": "vllm-0", "async_scheduling": True}}, "async_scheduling must be false"),
        ({"engine": {"preset": "vllm-0", "jump_forward_share": 0.5}}, "jump_forward_share must be 0"),
        ({"parallelism": {"pipeline": 2}}, "parallelism.pipeline must be 1"),
        ({"model": "Mistral-7B-v0.1"}, "is modelled for full attention only"),
        (
            {"speculation": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 0.5}}},
            "speculation must be null",
        ),
        ({"cluster": {"prefill": {}, "decode": {}, "transfer": {"bandwidth": 1e11}}}, "are not handed over"),
        ({"workload": SETTING["workload"] | {"beam_width": 2, "n": 2}}, "must have n or beam_width, not both"),
        ({"workload": SETTING["workload"] | {"beam_turnover": 1.5}}, "beam_turnover: must be less than or equal to 1"),
    ],
)
def test_refused(changed, message):
    parts = SETTING | {"workload": SETTING["workload"] | {"beam_width": 4}} | changed
    with pytest.raises(InputError, match=message) as found:
        run(build_scenario(parts, "test"))
    assert len(found.value.problems) == 1
