"""The verdict on queues whose stability is known."""

import contextlib
import heapq

import numpy as np
import pytest
from synthetic import queue, result_of, scenario_of
from verdicts import verdict_of

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.engine.compiled.state import REJECTED
from infersim.metrics.overload import ROUTERS, completion_rate, sizes
from infersim.metrics.verdict import (
    SATURATED,
    STABLE,
    TOO_SHORT,
    Flow,
    Verdict,
    combine_verdicts,
    judge,
    judge_flow,
    per_second,
)
from infersim.run import run

SEEDS = range(40)


def many_servers(arrival, service, k):
    """When each customer of k first-come first-served servers begins, and leaves."""
    free, begins = [0.0] * k, np.empty(len(arrival))
    for i, came in enumerate(arrival):
        begins[i] = max(came, heapq.heappop(free))
        heapq.heappush(free, begins[i] + service[i])
    return begins, begins + service


def flow_of(arrival, begins, leaves, alone, **keys):
    return Flow(arrival, begins, leaves, alone, refused=np.zeros(len(arrival), bool), **keys)


def flow_of_queue(kind, rho, n, seed):
    """Queues with Poisson arrivals and exponential services (M/M/k), or of constant times (D), of services with a
    coefficient of variation of 2.1 (H), or of gaps with one of 3 (bursty); offered load rho."""
    random = np.random.default_rng(seed)
    k = 20 if kind == "M/M/20" else 1
    gaps = {"D/M/1": np.ones(n), "bursty": random.gamma(1 / 9, 9, n)}.get(kind, random.exponential(1.0, n))
    arrival = np.cumsum(gaps) / rho / k
    long = random.random(n) < 0.1
    mixed = np.where(long, random.exponential(5, n), random.exponential(5 / 9, n))
    service = {"M/D/1": np.ones(n), "M/H/1": mixed}.get(kind, random.exponential(1.0, n))
    return flow_of(arrival, *many_servers(arrival, service, k), service)


def states_of(kind, rho, n, seeds=SEEDS):
    return [judge_flow(flow_of_queue(kind, rho, n, seed)).state for seed in seeds]


KINDS = ["M/M/1", "D/M/1", "M/D/1", "M/H/1", "bursty", "M/M/20"]


def test_near_critical_load_hardly_anything_is_said_that_is_wrong():
    """3 % below capacity saturated is wrong, 3 % above it stable: each of at most 1 run in 100."""
    sizes = (200, 1000, 5000)
    below = [state for kind in KINDS for n in sizes for state in states_of(kind, 0.97, n)]
    above = [state for kind in KINDS for n in sizes for state in states_of(kind, 1.03, n)]
    assert below.count(SATURATED) <= 0.01 * len(below)
    assert above.count(STABLE) <= 0.01 * len(above)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rho", "state"), [(0.5, STABLE), (0.7, STABLE), (1.3, SATURATED), (2.0, SATURATED)])
def test_away_from_it_5000_requests_decide(kind, rho, state):
    assert states_of(kind, rho, 5000, range(10)).count(state) >= 9


@pytest.mark.parametrize("kind", KINDS)
def test_too_short_says_how_many_requests_would_tell_and_so_many_do(kind):
    """Lengthened by what it asks for, a run is decided, and rightly, at 0.9 and at 1.1 times capacity."""
    for rho, state in ((0.9, STABLE), (1.1, SATURATED)):
        for seed in range(5):
            n, verdict = 300, Verdict(TOO_SHORT, 0.0, "", 300)
            while verdict.state == TOO_SHORT:
                n = max(n, verdict.needed_requests)
                assert n < 500_000
                verdict = judge_flow(flow_of_queue(kind, rho, n, seed))
            assert verdict.state == state


def test_few_requests_are_too_short_for_anything_but_a_queue_that_drains_slowly():
    assert set(states_of("M/M/1", 0.5, 60)) == {TOO_SHORT}
    assert set(states_of("M/M/1", 10.0, 100)) == {SATURATED}


def test_the_growth_is_arrivals_minus_capacity():
    found = [judge_flow(flow_of_queue("M/M/1", 2.0, 2000, seed)).backlog_per_s for seed in SEEDS]
    assert np.mean(found) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("sojourn", [1.0, 5.0, 14.0])
def test_a_batch_that_fills_up_without_a_queue_is_not_saturated(sojourn):
    """Infinitely many servers, arrivals for 30 s: the number in the system grows to rate x sojourn, and that is all."""
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        arrival = np.cumsum(random.exponential(30 / 1000, 1000))
        service = random.exponential(sojourn, 1000)
        assert judge_flow(flow_of(arrival, arrival, arrival + service, service)).state != SATURATED


def shared_server(rate, n, seed):
    """At most 256 requests that share a server, as a batch does: a step of 7 ms + 50 us per request gives each one a
    token. 100 tokens each, so that at most 256 / (100 x 19.8 ms) = 129 requests/s leave."""
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))
    begins, ended, now, step, joined, left = np.zeros(n), np.zeros(n), 0.0, 0, 0, 0
    last_step = np.zeros(n, int)
    while left < n:
        if joined == left:
            now = max(now, arrival[joined])
        while joined < n and arrival[joined] <= now and joined - left < 256:
            last_step[joined], begins[joined] = step + 100, now
            joined += 1
        step += 1
        now += 0.007 + 5e-5 * (joined - left)
        while left < joined and last_step[left] <= step:
            ended[left] = now
            left += 1
    return flow_of(arrival, begins, ended, np.full(n, 100 * 0.00705))


@pytest.mark.parametrize(("rate", "state"), [(50, STABLE), (100, STABLE), (160, SATURATED), (260, SATURATED)])
def test_requests_that_slow_each_other_down_saturate_beyond_capacity(rate, state):
    assert [judge_flow(shared_server(rate, 10_000, seed)).state for seed in range(3)] == [state] * 3


def test_a_burst_has_no_rate_to_keep_up_with_but_a_short_run_may_have_one():
    n, begins = 500, np.arange(500.0)
    together = judge_flow(flow_of(np.zeros(n), begins, begins + 1, np.ones(n)))
    assert (together.state, together.burst, together.backlog_per_s) == (STABLE, True, 0.0)
    arrival = np.linspace(0, 0.5, n)
    nearly = judge_flow(flow_of(arrival, np.maximum(arrival, begins), begins + 1.5, np.ones(n)))
    assert nearly.state == SATURATED  # 1000 arrive per second, and of those that wait 1 is admitted
    at_once = judge_flow(flow_of(arrival, arrival, arrival + 1, np.ones(n)))
    assert at_once.state == TOO_SHORT  # 500 servers, or more


def test_deterministic_queues_just_beside_the_limit():
    def verdict(rho):
        arrival, service = np.arange(5000) / rho, np.ones(5000)
        return judge_flow(flow_of(arrival, *many_servers(arrival, service, 1), service))

    assert verdict(0.99).state == STABLE
    assert verdict(1.1).state == SATURATED
    assert verdict(1.1).backlog_per_s == pytest.approx(0.1, rel=0.02)


def test_who_turns_requests_away_does_not_keep_up():
    n = 1000
    arrival, refused = np.arange(n) * 1.0, np.arange(n) % 5 == 0
    served = np.where(refused, np.inf, arrival)
    flow = Flow(arrival, served, served + 0.5, np.full(n, 0.5), refused=refused)
    verdict = judge_flow(flow)
    assert verdict.state == SATURATED
    assert "19.9% are refused" in verdict.reason


def test_an_interrupted_run_is_judged_by_what_was_seen():
    arrival, departure, service = queue(2.0, 2000, seed=1)
    until = arrival[1000]
    begins, ended = (np.where(times <= until, times, np.inf) for times in (departure - service, departure))
    assert judge_flow(flow_of(arrival, begins, ended, service, until=until)).state == SATURATED


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
    assert judge(run).state != "rejected"
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
    begin, arrive = (float(verdict.reason.split(what)[0].split()[-1]) for what in (" conversations/s", " requests/s"))
    assert begin == pytest.approx(2, rel=0.2)
    assert arrive == pytest.approx(8, rel=0.2)


@pytest.mark.parametrize("workload", [{"num_requests": 1}, {"num_requests": 3, "turns": 3, "think_time": "1 s"}])
def test_one_arrival_at_a_rate_says_nothing_of_it(workload):
    lengths = {"request_rate": 1, "input_tokens": 100, "output_tokens": 5}
    (result,) = run(
        build_scenario({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": lengths | workload}, "test")
    )
    verdict = judge(result)
    assert verdict.state == TOO_SHORT
    assert verdict.needed_requests >= 100


def test_users_who_wait_for_their_answers_are_decided_however_short_the_run():
    """Their first requests come in the first moments of any run: what more requests could not tell is not asked for."""
    workload = {"users": 20, "think_time": "5 s", "num_requests": 200, "input_tokens": 100, "output_tokens": 5}
    (result,) = run(build_scenario({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload}, "test"))
    verdict = judge(result)
    assert (verdict.state, verdict.burst, verdict.needed_requests) == (STABLE, True, None)
    assert "20 users" in verdict.reason


def test_rates_are_read_without_powers_of_ten():
    assert [per_second(rate) for rate in (0.012345, 999.4, 999.6, 1e6)] == ["0.0123", "999", "1,000", "1,000,000"]


def test_a_backlog_that_an_autoscaler_may_still_cure_is_not_saturated():
    """One replica at first, eight in the end, each ready 60 s after it is asked for: 4 times what one carries is too
    short to tell while they start, saturated if there are only two, at once, and stable once they have."""
    lengths = {"input_tokens": 500, "output_tokens": 200, "request_rate": 30}
    scaler = {"target": 20, "max": 8, "startup": {"node": 60}}

    def said(most, requests):
        cluster = {"autoscaler": scaler | {"max": most}}
        parts = {"model": "Llama-3.1-8B", "hardware": "l40s", "workload": lengths | {"num_requests": requests}}
        return judge(run(build_scenario(parts | {"cluster": cluster}, "test"))[0])

    short = said(8, 1500)
    assert short.state == TOO_SHORT
    assert "more replicas may be started" in short.reason
    assert said(8, 24_000).state == STABLE
    assert said(2, 24_000).state == SATURATED
    few = said(2, 1500)
    assert few.state == SATURATED
    assert "on all replicas" in few.reason


ONE_BY_ONE = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": {"max_num_seqs": 1}}


@pytest.mark.parametrize(("load", "state"), [(0.6, STABLE), (0.9, STABLE), (1.1, SATURATED), (2.0, SATURATED)])
def test_an_overload_tells_what_so_few_requests_do_not(load, state):
    """One at a time: it completes one request per mean running time, whatever waits."""
    lengths = {"input_tokens": 500, "output_tokens": 50, "num_requests": 60}
    built = build_scenario(ONE_BY_ONE | {"workload": lengths | {"request_rate": 1}}, "test")
    result = run(built)[0]
    r = result.requests
    rate = 1 / float((r["last_token"] - r["scheduled"]).mean())
    low, high = result.completes
    assert low <= 1.01 * rate
    assert high >= 0.99 * rate
    rated = build_scenario(ONE_BY_ONE | {"workload": lengths | {"request_rate": load * rate}}, "test")
    verdict = judge(run(rated)[0])
    assert verdict.state == state
    assert not verdict.in_balance


def test_an_overload_that_cannot_run_or_would_take_minutes_tells_nothing():
    """Common beginnings that are drawn too long for the model; prompts that go in token by token, two at a time."""
    engine, load = {"max_model_len": 300}, {"request_rate": 2, "num_requests": 8, "output_tokens": 1}
    parts = {"model": "Pythia-70M", "hardware": "a40", "engine": engine, "workload": load}
    for seed in range(20):
        load |= {"input_tokens": 150, "prefixes": {"tokens": {"quantiles": {"p0": 1, "p50": 150, "p100": 300}}}}
        with contextlib.suppress(InputError):
            judge(run(build_scenario(parts | {"simulation": {"seed": seed}}, "test"))[0])
    for seqs, tokens in ((2, 2000), (64, 640)):  # SGLang cuts one prompt at a time, however many may run
        small = {"preset": "sglang-0.5", "max_num_seqs": seqs, "long_prefill_token_threshold": 1}
        load = {"request_rate": 1000, "num_requests": 10, "input_tokens": tokens, "output_tokens": 5}
        result = run(build_scenario(parts | {"engine": small, "workload": load}, "test"))[0]
        assert sizes(result) == []
        assert judge(result).state == TOO_SHORT


@pytest.mark.parametrize(
    "parts",
    [{"workload": {"turns": 2}}, {"workload": {"timeout": 9}}, {"workload": {"curve": [[0, 1], [9, 2]]}},
     {"workload": {"tenants": {"a": {}, "b": {}}}}, {"engine": {"scheduling_policy": "shortest-first"}},
     {"cluster": {"autoscaler": {"target": 20, "max": 8}, "router": "least-kv"}},
     {"cluster": {"replicas": 2, "router": "least-kv"}}],
)  # fmt: skip
def test_what_an_overload_serves_otherwise_is_not_asked_of_one(parts):
    lengths = {"input_tokens": 500, "output_tokens": 50, "num_requests": 60, "request_rate": 5}
    load = {"workload": lengths | parts.get("workload", {})}
    built = build_scenario({"model": "Llama-3.1-8B", "hardware": "h100-sxm"} | parts | load, "test")
    assert run(built)[0].completes is None


@pytest.mark.parametrize("router", ROUTERS)
def test_replicas_complete_as_many_times_what_one_does(router):
    load = {"input_tokens": 500, "output_tokens": 50, "num_requests": 200, "request_rate": 5}
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": {"max_num_seqs": 64}}
    built = build_scenario(parts | {"workload": load, "cluster": {"replicas": 3, "router": router}}, "test")
    low, high = run(built)[0].completes
    at_once = load | {"request_rate": "inf", "num_requests": 3 * 2048}
    whole = build_scenario(parts | {"workload": at_once, "cluster": {"replicas": 3, "router": router}}, "test")
    least, most = completion_rate(run(whole)[0])
    assert low <= most
    assert least <= high


@pytest.mark.slow
def test_random_scenarios_around_their_capacity():
    """Thirty of those of tests/verdicts.py: nothing said that is wrong."""
    rows = [verdict_of(number) for number in range(30)]
    known = [row for row in rows if row.get("truth")]
    assert len(known) >= 25
    assert [row for row in known if {row["truth"], row["said"]} == {STABLE, SATURATED}] == []
