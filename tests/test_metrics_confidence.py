"""Student's t without scipy, intervals over replications, and the end of a warm-up."""

import math

import numpy as np
import pytest
from synthetic import queue, result_of_queue, scenario_of

from infersim.config.errors import InputError
from infersim.metrics.confidence import combine, student_t, student_t_cdf
from infersim.metrics.sampling import mean_interval, percentile_intervals
from infersim.metrics.warmup import check_warmup, mser5, warmup_time


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_quantiles_are_those_of_the_printed_table(df, quantile):
    """Abramowitz & Stegun, table 26.10, A(t) = 0.95."""
    assert student_t(0.975, df) == pytest.approx(quantile, abs=6e-4)
    assert student_t_cdf(-student_t(0.975, df), df) == pytest.approx(0.025)


def test_the_interval_of_two_replications():
    means, half_widths = combine([{"x": 1.0, "y": None}, {"x": 3.0, "y": 2.0}])
    assert means == {"x": 2.0, "y": None}
    assert half_widths == {"x": pytest.approx(12.706, abs=1e-3), "y": None}
    assert combine([{"x": 1.0}]) == ({"x": 1.0}, {})


def test_intervals_cover_the_closed_form_about_as_often_as_they_say():
    """M/M/1 at 0.5: 100 intervals of 8 replications each; 95 expected."""
    covered = 0
    for i in range(100):
        runs = []
        for j in range(8):
            arrival, departure, _ = queue(0.5, 2000, seed=1000 * i + j)
            runs.append({"sojourn": float((departure - arrival)[200:].mean())})
        means, half_widths = combine(runs)
        covered += abs(means["sojourn"] - 2.0) <= half_widths["sojourn"]
    assert 89 <= covered <= 100


def test_mser5_cuts_the_transient_and_little_more():
    random = np.random.default_rng(0)
    values = random.normal(10, 1, 2000)
    values[:200] += np.linspace(20, 0, 200)
    assert 130 <= mser5(values) <= 400
    assert mser5(random.normal(10, 1, 2000)) <= 1000
    assert mser5(np.ones(100)) == 0
    assert mser5(np.ones(3)) == 0


def test_a_warm_up_in_seconds_or_found_by_itself():
    run = result_of_queue(0.8, 2000)
    auto = scenario_of(
        simulation={"warmup": "auto"}, workload={"input_tokens": 1, "output_tokens": 1, "request_rate": 1}
    )
    assert 0 <= warmup_time(auto, run.requests) < run.requests["sent"][1001]
    assert warmup_time(scenario_of(simulation={"warmup": "2 s"}), run.requests) == 2
    with pytest.raises(InputError, match=r"leaves no request to measure; must be at most \d+(\.\d+)? s: the last one"):
        warmup_time(scenario_of(simulation={"warmup": 1e9}), run.requests)


def test_a_warm_up_cannot_be_found_without_a_rate():
    with pytest.raises(InputError, match=r"simulation.warmup: auto needs .* must be"):
        check_warmup(scenario_of(simulation={"warmup": "auto"}))


def queue_sojourns(rho, n, seed):
    """Of an M/M/1 queue after 3,000 customers: exponential with mean 1 / (1 - rho), each like the one before."""
    random = np.random.default_rng(seed)
    gaps, services = random.exponential(1 / rho, n + 3000), random.exponential(1, n + 3000)
    walk = np.concatenate(([0.0], np.cumsum(services[:-1] - gaps[1:])))
    return (walk - np.minimum.accumulate(walk) + services)[3000:]


@pytest.mark.parametrize(("rho", "n"), [(0.0, 200), (0.0, 2000), (0.5, 1000), (0.5, 5000), (0.8, 2000), (0.8, 20_000)])
def test_intervals_of_one_run_hold_the_quantile_although_requests_depend_on_each_other(rho, n):
    """95 % are meant; a queue at 0.8 of its capacity remembers for some 50 customers, so that a run is short."""
    bounded = 0
    for share in (0.5, 0.9, 0.99):
        true, inside = -math.log(1 - share) / (1 - rho), 0
        for seed in range(100):
            values = queue_sojourns(rho, n, seed) if rho else np.random.default_rng(seed).exponential(1.0, n)
            [[low, high]] = percentile_intervals(values, np.array([share]))
            inside += low <= true and (high is None or true <= high)
            bounded += high is not None
        assert inside >= 88
    assert bounded >= 100  # the median's always


def test_intervals_of_means_hold_the_mean_and_shrink():
    found = [mean_interval(queue_sojourns(0.5, 4000, seed)) for seed in range(100)]
    assert sum(low <= 2 <= high for low, high in found) >= 90
    longer = mean_interval(queue_sojourns(0.5, 64_000, 1))
    assert longer[1] - longer[0] < (found[1][1] - found[1][0]) / 2


def test_too_few_requests_bound_nothing_above():
    assert percentile_intervals(np.arange(10.0), np.array([0.5])) == []
    assert percentile_intervals(np.random.default_rng(1).random(100), np.array([0.99]))[0][1] is None
    assert mean_interval(np.arange(10.0)) is None
