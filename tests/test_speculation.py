"""Closed forms of speculation, acceptance tables against measured acceptance, and the rejection rule's exactness."""

import csv

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shared import SHARED, needs_shared

from infersim.config.errors import InputError
from infersim.config.speculation import Acceptance, Speculation
from infersim.cost.speculation import acceptance_rate, best_k, speedup, tokens_needed, tokens_per_step
from infersim.reproduce.rejection import (
    alpha_of,
    operations_ratio,
    speculate,
    speedup_with_oracle,
    tokens_per_step_by_position,
)
from infersim.workload.acceptance import acceptance_table, conditional_rates, spread_over_requests

probabilities = st.floats(0, 1)


def speculation(k: int, **acceptance) -> Speculation:
    """All requests alike, unless the test says otherwise."""
    alike = Acceptance(**{"request_spread": 0.0} | acceptance)
    return Speculation(method="eagle", num_speculative_tokens=k, acceptance=alike)


@given(probabilities, st.integers(0, 20))
def test_tokens_per_step_is_the_sum_of_the_chances(alpha, k):
    assert tokens_per_step(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)))
    assert tokens_per_step(alpha, k) == pytest.approx(tokens_per_step_by_position([alpha] * k))


@given(st.floats(0.01, 0.99), st.floats(0.001, 0.99))
def test_speculation_gains_if_and_only_if_alpha_exceeds_c(alpha, c):
    """Leviathan, corollary 3.9: some k gains iff alpha > c, and then at least (1 + alpha) / (1 + c)."""
    assume(abs(alpha - c) > 1e-9)
    k = best_k(alpha, c)
    assert (k > 0) == (alpha > c)
    if k:
        assert speedup(alpha, k, c) >= (1 + alpha) / (1 + c) - 1e-12
    assert speedup_with_oracle(alpha, c) >= speedup(alpha, k, c) - 1e-12


@given(st.floats(0.05, 0.95), st.integers(1, 12))
def test_alpha_of_inverts_tokens_per_step(alpha, k):
    assert alpha_of(tokens_per_step(alpha, k), k) == pytest.approx(alpha, abs=1e-9)


def test_break_even_is_where_the_speedup_is_one():
    """a = 1 + C_draft / C_target, and more where verification costs more than a step."""
    assert tokens_needed(16.8, 41.8) == pytest.approx(1 + 16.8 / 41.8)
    assert tokens_needed(16.8, 41.8, verify_time=50.0) == pytest.approx(66.8 / 41.8)
    alpha = alpha_of(tokens_needed(4 * 0.1, 1.0), 4)
    assert speedup(alpha, 4, 0.1) == pytest.approx(1)


def test_operations_grow_by_what_is_thrown_away():
    assert operations_ratio(1.0, 5, 0.0) == pytest.approx(1)
    assert operations_ratio(0.0, 5, 0.0) == 6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0.05, 4))
def test_rejection_sampling_keeps_the_target_distribution(seed, k, sharpness):
    """Chi-square of the tokens at every position, among the steps that reach it; 1e-6 of such tests fail by chance."""
    random = np.random.default_rng(seed)
    size, steps = 6, 20_000
    target = random.dirichlet(np.full(size, sharpness), k + 1) * 0.999 + 0.001 / size
    draft = random.dirichlet(np.full(size, sharpness), k) * 0.999 + 0.001 / size
    accepted, tokens = speculate(target, draft, steps, random)
    for i in range(k + 1):
        drawn = tokens[tokens[:, i] >= 0, i]
        expected = target[i] * len(drawn)
        if expected.min() < 5:
            continue
        statistic = ((np.bincount(drawn, minlength=size) - expected) ** 2 / expected).sum()
        assert statistic < 36.0  # five degrees of freedom: 1e-6
    rates = [acceptance_rate(p, q) for p, q in zip(target, draft, strict=False)]
    want = tokens_per_step_by_position(rates) - 1
    assert accepted.mean() == pytest.approx(want, abs=5 * np.sqrt(k) / np.sqrt(steps) * k)


def test_a_wrong_rule_fails_the_same_chi_square():
    """Drawing the replacement from the target itself, a common mistake, is found by the test above."""
    random = np.random.default_rng(1)
    target, draft = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.4, 0.4])
    n = 20_000
    proposal = random.choice(3, n, p=draft)
    keep = random.random(n) * draft[proposal] < target[proposal]
    tokens = np.where(keep, proposal, random.choice(3, n, p=target))
    expected = target * n
    assert ((np.bincount(tokens, minlength=3) - expected) ** 2 / expected).sum() > 36.0


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [(3.78, 5, [1, 1, 0.78, 0, 0]), (1.0, 3, [0, 0, 0]), (4.0, 3, [1, 1, 1]), (9.0, 3, [1, 1, 1])],
)
def test_synthetic_acceptance_length_spends_the_earliest_positions(length, k, rates):
    table = acceptance_table(speculation(k, synthetic_acceptance_length=length))
    assert table.accepted[0, 0] == pytest.approx(rates)
    assert table.mean_tokens_per_step == pytest.approx(min(length, k + 1))


@given(st.lists(probabilities, min_size=1, max_size=7))
def test_synthetic_acceptance_rates_are_chances_of_prefixes(rates):
    rates = sorted(rates, reverse=True)
    table = acceptance_table(speculation(len(rates), synthetic_acceptance_rates=rates))
    assert table.accepted[0, 0] == pytest.approx(rates, abs=1e-12)


@given(
    st.lists(st.floats(0.02, 0.98), min_size=1, max_size=6), st.floats(0, 2), probabilities
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_spread_over_requests_keeps_the_mean(rates, spread, later):
    """Tokens over steps of all requests is what it is without the spread."""
    acceptance = {"conditional": rates, "request_spread": spread, "later_spread_share": later}
    table = acceptance_table(speculation(len(rates), **acceptance))
    assert table.mean_tokens_per_step == pytest.approx(tokens_per_step_by_position(rates), rel=1e-4)
    assert np.all(np.diff(table.accepted, axis=2) <= 1e-12)


def measured() -> list[dict]:
    with (SHARED / "data" / "speculation" / "acceptance.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["K"] = int(row["K"])
        row["rates"] = [float(row[f"cond{i}"]) for i in range(1, row["K"] + 1)]
    return rows


@needs_shared
def test_measured_tokens_per_step_by_position():
    """Within 1 % at every K."""
    for row in measured():
        table = acceptance_table(speculation(row["K"], conditional=row["rates"]))
        assert table.mean_tokens_per_step == pytest.approx(float(row["tokens_per_step"]), rel=0.01)


REQUESTS = 250  # assumed: the file does not say over how many requests its steps are spread


def spread_of_requests(row: dict, first: float, later: float) -> float:
    """Standard deviation over requests of their tokens per step, each of the same number of steps."""
    spreads = np.full(row["K"], later)
    spreads[0] = first
    accepted = spread_over_requests(np.array(row["rates"]), spreads)
    means = accepted.sum(1)
    variances = (accepted * (2 * np.arange(row["K"]) + 1)).sum(1) - means**2
    steps = float(row["steps"]) / REQUESTS
    return float(np.sqrt(means.var() + variances.mean() / steps))


@needs_shared
@pytest.mark.parametrize("dataset", ["cnn", "gsm8k"])
@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_measured_spread_over_requests(dataset, method):
    """Fitted on K = 1 and 4; within 15 % at the others, where independent draws are far off."""
    rows = {row["K"]: row for row in measured() if (row["dataset"], row["method"]) == (dataset, method)}

    def error(k: int, first: float, later: float) -> float:
        return spread_of_requests(rows[k], first, later) / float(rows[k]["per_req_sd"]) - 1

    first = min(np.arange(0.0, 1.0, 0.025), key=lambda s: abs(error(1, s, s)))
    later = min(np.arange(0.0, first + 0.01, 0.025), key=lambda s: abs(error(4, first, s)))
    for k in rows.keys() - {1, 4}:
        assert abs(error(k, first, later)) < 0.15, (k, first, later)
    assert error(7, 0.0, 0.0) < -0.15


@needs_shared
@pytest.mark.parametrize("dataset", ["cnn", "gsm8k"])
def test_ngram_first_position_follows_from_the_two_state_chain(dataset):
    """Fitted at K = 1 and 3, the chain tells how first acceptance falls as more drafts are verified."""
    rows = {row["K"]: row for row in measured() if (row["dataset"], row["method"]) == (dataset, "ngram")}

    def first(k: int, enter: float, stay: float) -> float:
        table = acceptance_table(speculation(k, match={"enter": enter, "stay": stay})).accepted[0]
        full = table[0, -1] / (1 - table[1, -1] + table[0, -1])
        return (1 - full) * table[0, 0] + full * table[1, 0]

    def error(k: int, enter: float, stay: float) -> float:
        return first(k, enter, stay) / rows[k]["rates"][0] - 1

    grid = [(e, s) for e in np.arange(0.02, 0.2, 0.005) for s in np.arange(0.4, 0.95, 0.01)]
    best = min(grid, key=lambda p: abs(error(1, *p)) + abs(error(3, *p)))
    for k in rows.keys() - {1, 3}:
        assert abs(error(k, *best)) < 0.15, (k, best)


def test_traffic_classes_are_told_apart(tmp_path):
    """A class per kind of text, assigned by chance; a trace assigns line by line."""
    classes = {name: {"share": share, "rate": rate, "request_spread": 0.0}
               for name, share, rate in (("chat", 1, 0.8), ("json", 3, 0.2))}  # fmt: skip
    table = acceptance_table(Speculation(method="eagle", num_speculative_tokens=2, classes=classes))
    uniform = np.random.default_rng(0).random(10_000)
    rows = table.rows(np.arange(10_000), uniform)
    assert (rows == 1).mean() == pytest.approx(0.75, abs=0.02)
    assert table.accepted[:, 0, 0] == pytest.approx([0.8, 0.2])
    (tmp_path / "t.csv").write_text("0.9,0.8\n0.1\n")
    table = acceptance_table(speculation(3, trace=str(tmp_path / "t.csv")))
    assert table.rows(np.array([0, 1, 2, 7]), uniform[:4]).tolist() == [0, 1, 0, 1]
    assert table.accepted[:, 0] == pytest.approx(np.array([[0.9, 0.72, 0.576], [0.1, 0.01, 0.001]]))


@pytest.mark.parametrize("text", ["", "a,b\n", "1.5\n", "-0.1\n"])
def test_a_broken_trace_is_one_line(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=r"speculation\.acceptance\.trace"):
        acceptance_table(speculation(3, trace=str(tmp_path / "t.csv")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"method": "eagle", "num_speculative_tokens": 3}, "acceptance or classes"),
        ({"method": "eagle", "num_speculative_tokens": 0, "acceptance": {"rate": 0.5}}, "num_speculative_tokens"),
        ({"method": "eagle", "num_speculative_tokens": 3, "acceptance": {}}, "exactly one of"),
        ({"method": "eagle", "num_speculative_tokens": 3, "acceptance": {"rate": 1.5}}, "acceptance.rate"),
        (
            {"method": "eagle", "num_speculative_tokens": 3, "acceptance": {"synthetic_acceptance_rates": [0.5, 0.6]}},
            "must not increase",
        ),
        ({"method": "draft_model", "num_speculative_tokens": 3, "acceptance": {"rate": 0.5}}, "model must be given"),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 8,
                "tree": {"depth": 4, "width": 2},
                "acceptance": {"rate": 1},
            },
            "draft trees",
        ),
    ],
)
def test_broken_descriptions_are_named(data, message):
    with pytest.raises(InputError) as error:
        Speculation.validate(data, "x.yaml")
    assert any(message in line for line in error.value.problems)


def test_conditional_rates_repeat_the_last():
    assert conditional_rates(Acceptance(conditional=[0.5, 0.4]), 4).tolist() == [0.5, 0.4, 0.4, 0.4]
