"""Traffic whose requests wait for one another: users, conversations, agents; and rates that change over the day."""

import json
import random

import numpy as np
import pytest

from infersim.cluster.pool import Queue
from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.config.workload import Workload
from infersim.explain.summary import summarize
from infersim.metrics.tenants import jain
from infersim.run import run
from infersim.workload.arrivals import draw_arrivals
from infersim.workload.build import build_requests

TEXT = {"input_tokens": 200, "output_tokens": {"lognormal": {"median": 60, "sigma": 0.5}}}


def scenario_of(workload: dict, **cluster):
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": TEXT | workload, "cluster": cluster}
    return build_scenario(data, "test")


def workload_of(**keys) -> Workload:
    return Workload.validate(TEXT | keys, "test")


@pytest.mark.parametrize("replicas", [1, 3])
def test_users_obey_the_interactive_response_time_law(replicas):
    """Throughput = users / (response time + think time), Little's law of a closed loop (Denning & Buzen 1978).

    Of 40 users with 100 requests each, within 3 %: some users are done before others.
    """
    result = run(scenario_of({"users": 40, "think_time": 2, "num_requests": 4000}, replicas=replicas))[0]
    r = result.requests
    # while everybody is there: up to the first user's last answer
    horizon = min(r["last_token"][user::40].max() for user in range(40))
    inside = r["last_token"] < horizon
    cycle = (r["last_token"] - r["sent"])[inside].mean() + 2
    assert inside.sum() / horizon == pytest.approx(40 / cycle, rel=0.03)


def test_a_turn_follows_the_last_and_contains_it():
    """Each prompt is all prompts and answers before and 200 tokens more; sent after the answer and after thought."""
    scenario = scenario_of({"turns": {"uniform": [1, 6]}, "think_time": 3, "request_rate": 2, "num_requests": 900})
    requests = build_requests(scenario.workload, 0, None)
    r = run(scenario)[0].requests
    later = requests.after >= 0
    before = requests.after[later]
    assert (requests.session[later] == requests.session[before]).all()
    grown = r["prompt_tokens"][before] + r["num_output_tokens"][before] + 200
    assert np.array_equal(r["prompt_tokens"][later], grown)
    assert np.allclose(r["sent"][later], r["last_token"][before] + requests.delay[later])
    assert requests.delay[later].mean() == pytest.approx(3, rel=0.15)
    begins, counts, _, lengths = requests.segments
    history = np.array([lengths[first : first + count].sum() for first, count in zip(begins, counts, strict=True)])
    assert np.array_equal(history[later] + 200, requests.prompt_tokens[later])


def test_the_first_turns_do_not_depend_on_how_many_there_are():
    few, many = (build_requests(workload_of(turns=4, request_rate=1, num_requests=n), 5, None) for n in (100, 200))
    for name in ("prompt_tokens", "output_tokens", "session", "after"):
        assert np.array_equal(getattr(few, name), getattr(many, name)[:100])


def test_a_session_stays_where_it_began():
    scenario = scenario_of({"turns": 5, "request_rate": 4, "num_requests": 500}, replicas=4, router="session")
    requests = build_requests(scenario.workload, 0, None)
    replica = run(scenario)[0].requests["replica"]
    assert np.array_equal(replica[requests.after >= 0], replica[requests.after[requests.after >= 0]])
    assert set(replica) == {0, 1, 2, 3}


def test_agents_wait_for_their_tools(tmp_path):
    """LLMServingSim's agentic trace: each request begins when the one before has ended and its tool has run."""
    sub = [{"input_toks": 100 + k, "output_toks": 20, "tool_duration_ns": 10**9 * (k + 1)} for k in range(3)]
    rows = [{"session_id": f"s{i}", "arrival_time_ns": i * 10**8, "sub_requests": sub} for i in range(10)]
    trace = tmp_path / "agents.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": {"trace": str(trace)}}
    r = run(build_scenario(data, "test"))[0].requests.reshape(10, 3)
    for k in (0, 1):
        assert np.allclose(r["sent"][:, k + 1], r["last_token"][:, k] + k + 1)
    assert np.allclose(r["sent"][:, 0], np.arange(10) * 0.1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"arrival_time_ns": 0, "sub_requests": []}', "line 1: sub_requests must be a list of requests"),
        ('{"arrival_time_ns": 0, "sub_requests": [{"input_toks": 5}]}', "line 1: output_toks must be a number"),
        (
            '{"arrival_time_ns": 0, "sub_requests": [{"input_toks": 5, "output_toks": 5, "tool_duration_ns": -1}]}',
            "line 1: tool_duration_ns must not be negative",
        ),
    ],
)
def test_a_broken_agent_trace_is_an_error_with_its_line(tmp_path, line, problem):
    (tmp_path / "trace.jsonl").write_text(line)
    with pytest.raises(InputError, match=problem):
        build_requests(Workload.validate({"trace": str(tmp_path / "trace.jsonl")}, "test"), 0, tmp_path)


def test_a_flat_curve_changes_nothing():
    flat = draw_arrivals(workload_of(request_rate=7, curve=[[0, 1], [10, 1]]), 5000, 1)
    assert np.allclose(flat, draw_arrivals(workload_of(request_rate=7), 5000, 1))


def test_curve_and_spike_bring_their_share():
    """Evenly spaced arrivals: counts are the integral of the rate to within one request."""
    keys = {"request_rate": 100, "burstiness": "inf"}
    day = draw_arrivals(workload_of(**keys, curve=[[0, 0.5], [50, 1.5], [100, 0.5]]), 20_000, 1)
    for period in (0, 100):
        assert np.sum((day > period) & (day <= period + 50)) == pytest.approx(5000, abs=2)
        assert np.sum((day > period + 25) & (day <= period + 75)) == pytest.approx(6250, abs=2)
    spike = {"at": 20, "duration": 5, "factor": 8}
    times = draw_arrivals(workload_of(**keys, spikes=[spike]), 20_000, 1)
    assert np.sum((times > 20) & (times <= 25)) == pytest.approx(4000, abs=2)
    assert np.sum(times <= 20) == pytest.approx(2000, abs=2)


def test_tenants_are_named_and_their_fairness_is_jains():
    """One tenant of four with everything has the index 1/4; equal ones have 1."""
    assert jain(np.array([1.0, 0, 0, 0])) == 0.25
    assert jain(np.full(7, 3.0)) == 1
    tenants = {"gold": {"share": 1}, "free": {"share": 3}}
    document = summarize(run(scenario_of({"request_rate": 10, "num_requests": 2000, "tenants": tenants}, replicas=2)))
    by_name = document["tenants"]["by_name"]
    assert by_name["gold"]["requests"] + by_name["free"]["requests"] == 2000
    assert by_name["free"]["requests"] == pytest.approx(1500, abs=5 * np.sqrt(2000 * 0.25 * 0.75))
    assert 0.99 < document["tenants"]["jain_index"] <= 1


@pytest.mark.parametrize(
    ("workload", "cluster", "problem"),
    [
        ({"users": 5, "request_rate": 1}, {}, "must have users or request_rate"),
        ({"users": 5, "max_concurrency": 1}, {}, "must have users or max_concurrency"),
        ({"think_time": 5}, {}, "think_time is for users or sessions"),
        ({"spikes": [{"at": 1, "duration": 1, "factor": 2}]}, {}, "curve and spikes change a request_rate"),
        ({"request_rate": 1, "curve": [[1, 1], [2, 1]]}, {}, "curve must be points from 0 s on"),
        ({"request_rate": 1}, {"router": "session"}, "session needs a workload with sessions"),
        ({"request_rate": 1, "tenants": {}}, {}, "tenants"),
    ],
)
def test_contradictions_are_one_line(workload, cluster, problem):
    with pytest.raises(InputError, match=problem) as error:
        run(scenario_of(workload, **cluster))
    assert len(error.value.problems) == 1


def test_the_queue_at_the_front_door_is_a_sorted_list():
    """Whoever comes, goes and gives up: first and last are those of a list that is sorted anew each time."""
    draw, queue, plain = random.Random(5), Queue(), []
    for order in range(5000):
        if draw.random() < 0.6 or not plain:
            i, priority = draw.randrange(10**6), draw.randrange(3)
            if all(i != one for _, _, one in plain):
                queue.push(i, priority, order)
                plain.append((priority, order, i))
        else:
            gone = draw.choice([queue.first(), queue.last(), draw.choice(plain)[2]])
            queue.remove(gone)
            plain = [one for one in plain if one[2] != gone]
        plain.sort()
        assert len(queue) == len(plain)
        if plain:
            assert (queue.first(), queue.last()) == (plain[0][2], plain[-1][2])
