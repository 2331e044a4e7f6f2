"""Data-parallel ranks step together: the slowest one's own work, and what all do on the tokens of all."""

import numpy as np
import pytest

from infersim.engine.compiled.state import ATTENTION_PRICE, COLLECTIVES, RESOURCES, WEIGHTS
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs

BUDGET, SEQUENCES = 64, 8


def table(seconds, resource, size=BUDGET):
    """f8[size + 1, 8]: `seconds` per row number."""
    result = np.zeros((size + 1, len(RESOURCES)))
    result[:, resource] = seconds * np.arange(size + 1)
    return result


def fleet(ranks, shared, **knobs):
    cost = StepCost(table(1.0, WEIGHTS), table(0.0, WEIGHTS, SEQUENCES), np.zeros(1, ATTENTION_PRICE), shared=shared)
    settings = {"block_size": 4, "num_gpu_blocks": 101, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": BUDGET,
                "max_model_len": 80} | knobs  # fmt: skip
    return Fleet([ReplicaSpec(make_knobs(**settings), cost)], ranks=ranks)


@pytest.mark.parametrize("prompts", [(10, 20), (7, 0), (5, 6)])
def test_a_step_is_the_slowest_rank_and_the_shared_work(prompts):
    """Prompts of 10 and 20 on two ranks: 20 s of the second, and 0.1 s for each of 15 tokens that a rank has on
    average, rounded up; then a token on each rank that has a request."""
    two = fleet(2, table(0.1, COLLECTIVES))
    for rank, prompt in enumerate(prompts):
        if prompt:
            two.submit(0, 0.0, prompt, 2, 2, rank=rank)
    two.advance()
    busy = sum(prompt > 0 for prompt in prompts)
    first = max(prompts) + 0.1 * -(-sum(prompts) // 2)
    assert two.requests["first_token"] == pytest.approx([first] * busy)
    assert two.requests["last_token"] == pytest.approx([first + 1 + 0.1 * 1] * busy)
    assert two.time_by_resource[WEIGHTS] == pytest.approx(max(prompts) + 1)
    assert two.time_by_resource[COLLECTIVES] == pytest.approx(0.1 * -(-sum(prompts) // 2) + 0.1)
    assert two.time_by_resource.sum() == pytest.approx(two.replicas["busy_time"].sum())


def test_a_short_table_is_refused():
    with pytest.raises(ValueError, match="ranks' shared work"):
        fleet(2, table(0.1, COLLECTIVES, BUDGET - 1))


def test_a_state_takes_one_block_however_long():
    """A window of 1 stands for a state: one block of its table, from the first token to the last."""
    one = fleet(1, None, num_kv_groups=2, kv_window=[0, 1], kv_multiplicity=[1, 3])
    one.submit(0, 0.0, 30, 40, 40)
    one.advance()
    assert one.replicas["peak_blocks"][0] == -(-69 // 4) + 3  # as the last step holds them
    assert one.schedulers["free_blocks"][0] == 100
