"""Early exit in closed form."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infersim.cost.early_exit import entropy, expected_cost, gain, needed_share, wait_for_all_gain

costs = st.lists(st.floats(0.01, 10), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
@given(costs, st.integers(0, 2**31))
def test_expected_cost_is_the_mean_over_inputs(segments, seed):
    """Each input walked through its layers one by one."""
    random = np.random.default_rng(seed)
    heads = random.random(len(segments) - 1) * 0.1
    exits = random.integers(0, len(segments), 500)
    shares = np.bincount(exits, minlength=len(segments)) / 500
    total = 0.0
    for exit_ in exits:
        for i, segment in enumerate(segments):
            total += segment
            if i < len(heads):
                total += heads[i]
            if i == exit_:
                break
    assert expected_cost(shares, segments, heads) == pytest.approx(total / 500)


@given(st.floats(0.05, 0.95), st.floats(0, 0.2), st.floats(0, 0.2))
def test_needed_share_is_where_the_gain_is_one(depth, head, backfill):
    share = needed_share(depth, head, backfill)
    if share <= 1:
        cost = head + share * (depth + backfill) + (1 - share)
        assert cost == pytest.approx(1)


@given(costs)
def test_no_gain_when_all_need_full_depth(segments):
    shares = [0.0] * (len(segments) - 1) + [1.0]
    heads = [0.0] * (len(segments) - 1)
    assert gain(shares, segments, heads) == pytest.approx(1)


def test_gain_grows_with_the_share_that_exits():
    gains = [gain([s, 1 - s], [0.4, 0.6], [0.01]) for s in np.linspace(0, 1, 11)]
    assert all(a < b for a, b in pairwise(gains))
    assert gains[0] < 1 < gains[-1]


@given(st.floats(0, 0.6), st.floats(0.05, 0.95), st.integers(32, 1024))
def test_a_batch_that_waits_for_all_gains_nothing(share, depth, batch):
    """At most 3 % at batch 32 and above with at most 60 % exits; here far below."""
    assert wait_for_all_gain(share, depth, 0.0, batch) < 1.0001


def test_entropy_is_largest_for_the_unsure():
    assert entropy(np.array([0.25] * 4)) == pytest.approx(np.log(4))
    assert entropy(np.array([1.0, 0, 0, 0])) == pytest.approx(0)
