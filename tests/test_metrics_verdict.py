"""The verdict on queues whose stability is known."""

import numpy as np
import pytest
from synthetic import queue, result_of, scenario_of, single_server

from infersim.config.scenario import build_scenario
from infersim.engine.compiled.state import REJECTED
from infersim.metrics.verdict import Verdict, combine_verdicts, judge, judge_backlog
from infersim.run import run

SEEDS = range(40)


def verdict_of_queue(rho, n, seed, deterministic=False):
    return judge_backlog(*queue(rho, n, seed, deterministic))


@pytest.mark.parametrize("rho", [0.5, 0.9])
@pytest.mark.parametrize("n", [100, 1000, 10_000])
def test_a_stable_queue_is_not_called_saturated(rho, n):
    verdicts = [verdict_of_queue(rho, n, seed) for seed in SEEDS]
    assert sum(v.state == "saturated" for v in verdicts) <= 1
    assert all(v.backlog_per_s == 0 for v in verdicts if v.state == "stable")


@pytest.mark.parametrize(("rho", "n"), [(1.2, 10_000), (2.0, 1000), (5.0, 300)])
def test_an_overloaded_queue_is_called_saturated_and_the_growth_is_arrivals_minus_capacity(rho, n):
    verdicts = [verdict_of_queue(rho, n, seed) for seed in SEEDS]
    assert all(v.state == "saturated" for v in verdicts)
    assert np.mean([v.backlog_per_s for v in verdicts]) == pytest.approx(rho - 1, rel=0.1)


def test_at_exactly_critical_load_at_most_a_few_in_a_hundred_fire():
    assert sum(verdict_of_queue(1.0, 2000, seed).state == "saturated" for seed in range(200)) <= 10


def test_bursty_arrivals_are_no_overload():
    """Gamma gaps with a coefficient of variation of 3 at load 0.8."""
    fired = 0
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        arrival = np.cumsum(random.gamma(1 / 9, 9 / 0.8, 2000))
        service = random.exponential(1.0, 2000)
        fired += judge_backlog(arrival, single_server(arrival, service), service).state == "saturated"
    assert fired <= 1


@pytest.mark.parametrize("sojourn", [1.0, 5.0, 14.0])
def test_a_batch_that_fills_up_without_a_queue_is_stable(sojourn):
    """Infinitely many servers, arrivals for 30 s: the number in the system grows to rate x sojourn, and that is all."""
    fired = 0
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        arrival = np.cumsum(random.exponential(30 / 1000, 1000))
        service = random.exponential(sojourn, 1000)
        fired += judge_backlog(arrival, arrival + service, service).state == "saturated"
    assert fired == 0


def shared_server(rate, n, seed):
    """Requests that share a server, as a batch does: a step of 7 ms + 50 us per request gives each one a token.

    100 tokens each, so that at most 1 / (100 x 50 us) = 200 requests/s leave.
    """
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))
    ended, now, step, joined, left = np.zeros(n), 0.0, 0, 0, 0
    last_step = np.zeros(n, int)
    while left < n:
        if joined == left:
            now = max(now, arrival[joined])
        while joined < n and arrival[joined] <= now:
            last_step[joined] = step + 100
            joined += 1
        step += 1
        now += 0.007 + 5e-5 * (joined - left)
        while left < joined and last_step[left] <= step:
            ended[left] = now
            left += 1
    return arrival, ended, np.full(n, 100 * 0.00705)


@pytest.mark.parametrize(("rate", "state"), [(50, "stable"), (120, "stable"), (260, "saturated"), (400, "saturated")])
def test_requests_that_slow_each_other_down_saturate_beyond_capacity_without_any_queue(rate, state):
    verdicts = [judge_backlog(*shared_server(rate, 4000, seed)).state for seed in range(4)]
    assert verdicts == [state] * 4


def test_a_burst_has_no_rate_to_keep_up_with():
    n = 500
    together = judge_backlog(np.zeros(n), np.arange(1.0, n + 1), np.ones(n))
    nearly = judge_backlog(np.linspace(0, 0.5, n), np.arange(1.0, n + 1), np.ones(n))
    assert (together.state, nearly.state) == ("stable", "stable")
    assert together.backlog_per_s == 0


def test_deterministic_queues_just_beside_the_limit():
    arrival, service = np.arange(5000) / 0.99, np.ones(5000)
    assert judge_backlog(arrival, single_server(arrival, service), service).state == "stable"
    arrival = np.arange(5000) / 1.1
    verdict = judge_backlog(arrival, single_server(arrival, service), service)
    assert verdict == Verdict("saturated", pytest.approx(0.1, rel=0.02), verdict.reason)


def test_an_interrupted_run_is_judged_by_what_was_seen():
    arrival, departure, service = queue(2.0, 2000, seed=1)
    until = arrival[1000]
    ended = np.where(departure <= until, departure, np.inf)
    assert judge_backlog(arrival, ended, service, until).state == "saturated"


def test_a_closed_loop_from_time_zero_is_stable():
    """8 clients in a closed loop at 10 requests/s: what waits at the client is no backlog that grows with time."""
    n = 400
    ended = np.repeat(np.arange(1, n // 8 + 1), 8) * 0.8
    workload = {"input_tokens": 1, "output_tokens": 1, "max_concurrency": 8}
    run = result_of(np.zeros(n), ended - 0.8, ended, ended, scenario=scenario_of(workload=workload))
    assert judge(run).state == "stable"
    assert "8" in judge(run).reason


def test_rejected_only_if_nothing_could_be_served():
    run = result_of([0.0, 1.0], [0.0, 1.0], [0.5, 1.5], [0.5, 1.5])
    run.requests["status"][0] = REJECTED
    assert judge(run).state == "stable"
    run.requests["status"][1] = REJECTED
    assert judge(run).state == "rejected"


def test_replications_vote_and_the_worse_wins_a_tie():
    stable, saturated = Verdict("stable", 0.0, "a"), Verdict("saturated", 2.0, "b")
    assert combine_verdicts([stable]) == stable
    assert combine_verdicts([stable, stable, saturated]).state == "stable"
    assert combine_verdicts([stable, saturated]).state == "saturated"
    assert combine_verdicts([stable, saturated, Verdict("saturated", 4.0, "c")]).backlog_per_s == 3


def test_sessions_are_judged_while_new_ones_begin():
    """2 sessions/s of 4 turns are 8 requests/s; what follows the last one's first turn is a tail."""
    workload = {"request_rate": 2, "num_requests": 1200, "turns": 4, "think_time": "2 s", "input_tokens": 100,
                "output_tokens": 20}  # fmt: skip
    (result,) = run(build_scenario({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload}, "test"))
    verdict = judge(result)
    assert verdict.state == "stable"
    arrive = float(verdict.reason.split()[0])
    assert arrive == pytest.approx(8, rel=0.2)
