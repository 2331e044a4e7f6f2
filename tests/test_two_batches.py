"""Two-batch overlap: what it hides, what it costs, and when it does nothing."""

import numpy as np
import pytest

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.two_batches import LEAST_TOKENS, with_two_batches
from infersim.deployment import deploy
from infersim.engine.compiled.state import ATTENTION_PRICE, COLLECTIVES, COMPUTE, WEIGHTS
from infersim.engine.price import StepCost


def priced(sent: float) -> StepCost:
    """Steps of 1 s of weights and 10 ms of experts per token, of which each takes `sent` s to be exchanged."""
    linear, shared = np.zeros((101, 9)), np.zeros((101, 9))
    tokens = np.arange(101)
    linear[1:, WEIGHTS] = 1.0
    shared[:, COMPUTE], shared[:, COLLECTIVES] = 0.01 * tokens, sent * tokens
    return StepCost(linear, np.zeros((2, 9)), np.zeros(0, ATTENTION_PRICE), shared=shared)


@pytest.mark.parametrize("sent", [0.001, 0.02, 0.2])
def test_the_longer_of_computation_and_exchange(sent):
    """Of n tokens and 4 layers: max(2 + 0.01 n, sent n) + min of both / 8; weights are read twice."""
    cost = with_two_batches(priced(sent), 4)
    for n in (LEAST_TOKENS, 33, 100):
        total = cost.linear[n].sum() + cost.shared[n].sum()
        compute, exchange = 2 + 0.01 * n, sent * n
        assert total == pytest.approx(max(compute, exchange) + min(compute, exchange) / 8)
    few = slice(0, LEAST_TOKENS)
    assert np.array_equal(cost.linear[few], priced(sent).linear[few])
    assert np.array_equal(cost.shared[few], priced(sent).shared[few])


def test_it_pays_for_long_steps_and_not_for_short_ones():
    """DeepSeek-V3 on 16 H200: of 4,096 tokens per GPU the exchange, half of the step, is hidden, and no step is shorter
    than what it computes. With few tokens reading experts twice costs more than that hides."""
    total = []
    for dbo in (False, True):
        parallelism = Parallelism(
            attention_data=16, expert=16, all2all_backend="deepep_high_throughput", enable_dbo=dbo
        )
        engine = Engine(max_num_batched_tokens=4096, max_num_seqs=64, max_model_len=4096)
        cost = deploy("DeepSeek-V3", load_hardware("h200-sxm"), Precision(), parallelism, engine).step_cost()
        total.append(cost.linear.sum(-1) + cost.shared.sum(-1))
    few, many = ((total[0] / np.maximum(total[1], 1e-9) - 1)[n] for n in (40, 4096))
    assert many > 0.2
    assert 0 <= cost.shared[4096, COLLECTIVES] < 0.3 * cost.shared[4096].sum()
    assert few < 0


def test_it_needs_deepeps_exchange():
    with pytest.raises(InputError, match="enable_dbo: vLLM overlaps DeepEP"):
        Parallelism.validate({"attention_data": 2, "expert": 2, "enable_dbo": True}, "x")
