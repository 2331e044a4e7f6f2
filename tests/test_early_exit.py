"""Early exit in closed form."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.early_exit import EarlyExit
from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.network import load_network
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.batch import batch_time
from infersim.cost.depth import compile_depths, needed_share
from infersim.deployment import deploy
from infersim.engine.early_exit import decode, full_depth
from infersim.engine.price import Depths
from infersim.reproduce.early_exit import entropy, expected_cost

costs = st.lists(st.floats(0.01, 10), min_size=2, max_size=6)


def gain(shares, segments, heads) -> float:
    """Cost without early exits over cost with them, one input at a time."""
    return sum(segments) / expected_cost(shares, segments, heads)


def wait_for_all_gain(share: float, depth: float, head: float, batch: int) -> float:
    """Time of full passes over that of a batch that stops at its exit only when all of its sequences may."""
    return 1 / (1 + head - share**batch * (1 - depth))


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


def depths(shares, batch: int = 16, per_request: bool = False, wait: float = 0.0) -> Depths:
    """Three segments of 4, 3 and 3 whatever the batch: weights bind. Exits and back-fill free unless told."""
    segments = np.repeat(np.array([[4.0], [3.0], [3.0]]), batch + 1, axis=1)
    return Depths(segments, np.zeros((2, batch + 1)), np.full(2, wait), np.array(shares), per_request)


@pytest.mark.parametrize("policy", ["leave_alone", "wait_for_all", "rebatch"])
@pytest.mark.parametrize("per_request", [False, True])
def test_full_depth_for_all_is_no_exit_at_all(policy, per_request):
    d = depths([0, 0, 1], per_request=per_request)
    result = decode(d, policy, 16, 2000, population=16)
    assert result.tokens_per_second == pytest.approx(full_depth(d, 16))
    assert result.depth == pytest.approx(1)


def test_one_sequence_that_needs_full_depth_leaves_a_waiting_batch_exactly_nothing():
    """Each request keeps its exit; among many there is one that goes to the end."""
    d = depths([0.6, 0.3, 0.1], batch=64, per_request=True)
    assert decode(d, "wait_for_all", 64, 5000).tokens_per_second == full_depth(d, 64)


def test_one_sequence_gains_the_mixture():
    d = depths([0.5, 0.3, 0.2])
    gained = decode(d, "wait_for_all", 1, 40_000).tokens_per_second / full_depth(d, 1)
    assert gained == pytest.approx(gain([0.5, 0.3, 0.2], [4, 3, 3], [0, 0]), rel=0.01)


def test_waiting_for_all_is_the_closed_form():
    d = depths([0.8, 0.0, 0.2], batch=4)
    gained = decode(d, "wait_for_all", 4, 60_000).tokens_per_second / full_depth(d, 4)
    assert gained == pytest.approx(wait_for_all_gain(0.8, 0.4, 0.0, 4), rel=0.02)


def test_rebatching_full_batches_approaches_the_mixture():
    """With enough sequences held, every launch is full and the batch gains what one sequence does."""
    d = depths([0.5, 0.3, 0.2])
    result = decode(d, "rebatch", 16, 20_000, population=64)
    assert result.tokens_per_second / full_depth(d, 16) == pytest.approx(
        gain([0.5, 0.3, 0.2], [4, 3, 3], [0, 0]), rel=0.02
    )
    assert result.mean_batch == pytest.approx(16, rel=0.01)


def test_holding_too_short_a_time_launches_small_batches():
    d = depths([0.5, 0.3, 0.2])
    patient, hasty = (decode(d, "rebatch", 16, 4000, max_wait=wait) for wait in (np.inf, 0.0))
    assert hasty.mean_batch < patient.mean_batch
    assert hasty.tokens_per_second < patient.tokens_per_second


def test_missing_keys_and_values_cost():
    free, dear = (decode(depths([0.5, 0.3, 0.2], wait=w), "rebatch", 16, 4000) for w in (0.0, 0.05))
    assert dear.tokens_per_second < free.tokens_per_second


def test_depths_of_a_model_add_up_to_its_step():
    """The segments and one LM head are the plain step, but for a second set of small launches."""
    engine = Engine(max_num_seqs=32, max_model_len=2048)
    d = deploy("Llama-3.1-8B", load_hardware("h100-sxm"), Precision(), Parallelism(), engine)
    described = EarlyExit(exit_layers=[16, 24], shares=[0.2, 0.2])
    parts = compile_depths(described, d.placement, d.engine, 500)
    assert parts.segments[:, 8].sum() == pytest.approx(batch_time(d.step_cost(), 8, 500), rel=0.02)
    assert parts.shares.tolist() == pytest.approx([0.2, 0.2, 0.6])
    computed = described.model_copy(update={"missing_kv": "recompute"})
    recomputed = compile_depths(computed, d.placement, d.engine, 500)
    assert np.all(recomputed.backfill > parts.backfill)
    assert parts.backfill[0] > parts.backfill[1] > 0
    with pytest.raises(InputError, match="below the 32 layers"):
        compile_depths(EarlyExit(exit_layers=[32], shares=[1]), d.placement, d.engine, 500)


def test_shares_from_a_calibrated_curve():
    """Each exit sees what the ones before it left."""
    curve = [[0.0, 0.0], [1.0, 0.5], [2.0, 1.0]]
    described = EarlyExit(exit_layers=[4, 8], confidence=[{"threshold": t, "curve": curve} for t in (0.5, 1.0)])
    assert described.token_shares == pytest.approx([0.25, 0.375, 0.375])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"exit_layers": [4], "shares": [1.2]}, "shares"),
        ({"exit_layers": [8, 4], "shares": [0.1, 0.1]}, "must ascend"),
        ({"exit_layers": [4]}, "shares or confidence"),
        ({"exit_layers": [4, 8], "shares": [0.5]}, "one entry for each of the 2 exits"),
        ({"exit_layers": [4, 8], "shares": [0.7, 0.7]}, "sum to at most 1"),
        ({"exit_layers": [4], "confidence": [{"threshold": 1, "curve": [[1, 0.5], [0, 0.7]]}]}, "must ascend"),
    ],
)
def test_broken_descriptions_are_named(data, message):
    with pytest.raises(InputError) as error:
        EarlyExit.validate(data, "x.yaml")
    assert any(message in line for line in error.value.problems)


NETWORK = """
layers: [{per_input: 1 ms}, {per_input: 2 ms}, {fixed: 1 ms, per_input: 6 ms}]
branches:
  - {after: 1, per_input: 0.5 ms, share: 0.6}
  - {after: 2, per_input: 0.5 ms, confidence: {threshold: 0.5, curve: [[0, 0], [1, 1]]}}
batches: [1, 8]
"""


def test_a_network_with_branches(tmp_path):
    """One input at a time: the mixture of BranchyNet; its own line for each problem."""
    (tmp_path / "net.yaml").write_text(NETWORK)
    described = load_network(tmp_path / "net.yaml")
    assert described.shares == pytest.approx([0.6, 0.2, 0.2])
    outcome = CliRunner().invoke(app, ["show", "network", str(tmp_path / "net.yaml"), "--json"])
    one, eight = json.loads(outcome.stdout)["over_batch"]
    expected = expected_cost([0.6, 0.2, 0.2], [1, 2, 7], [0.5, 0.5])
    assert one["whole_network_ms"] == pytest.approx(10)
    assert one["wait_for_all_ms"] == pytest.approx(expected, rel=0.03)
    assert eight["leave_alone_gain"] < 1 < eight["rebatch_gain"]
    assert "approximate" in CliRunner().invoke(app, ["show", "network", str(tmp_path / "net.yaml")]).stdout
    (tmp_path / "net.yaml").write_text(NETWORK.replace("after: 2", "after: 3"))
    outcome = CliRunner().invoke(app, ["show", "network", str(tmp_path / "net.yaml")])
    assert outcome.exit_code == 2
    assert "branches must ascend" in outcome.stderr
