"""Job completion time of agents."""

import json

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.config.workload import Workload
from infersim.explain.summary import summarize
from infersim.metrics.jobs import job_times
from infersim.run import run
from infersim.workload.build import build_requests


def test_a_job_is_its_requests_and_its_tools_one_after_another(tmp_path):
    """From the first request to the last token: latencies and tools add up, since each waits for the one before."""
    tools = [[0.5, 2.0, 7.0], [0.25], [1.0, 3.0]]
    lines = [
        {"arrival_time_ns": i * 1_000_000_000,
         "sub_requests": [{"input_toks": 300, "output_toks": 20, "tool_duration_ns": round(t * 1e9)} for t in job]}
        for i, job in enumerate(tools)
    ]  # fmt: skip
    (tmp_path / "agents.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": {"trace": str(tmp_path / "agents.jsonl")}}
    results = run(build_scenario(data, ""))
    answer, r = summarize(results)["jobs"], results[0].requests
    latency = np.bincount(results[0].session, r["last_token"] - r["sent"])
    expected = latency + [sum(job[:-1]) for job in tools]
    assert (answer["sessions"], answer["completed"]) == (3, 3)
    assert answer["mean_s"] == pytest.approx(expected.mean())
    assert answer["median_s"] == pytest.approx(np.median(expected))


def test_single_requests_are_no_jobs():
    load = {"num_requests": 5, "users": 2, "input_tokens": 50, "output_tokens": 5}
    results = run(build_scenario({"model": "GPT-2", "hardware": "l4", "workload": load}, ""))
    assert summarize(results)["jobs"] is None


TALK = {"turns": 4, "request_rate": 2, "num_requests": 300, "input_tokens": 200,
        "output_tokens": {"uniform": [10, 90]}, "think_time": 0.5}  # fmt: skip
AGENTS = {"count": {"uniform": [1, 4]}, "share": 0.7, "turns": {"uniform": [1, 3]}, "input_tokens": 150,
          "output_tokens": {"uniform": [5, 60]}, "think_time": 0.2}  # fmt: skip


def edges(requests):
    """(who waits, for whom, s beyond its end)."""
    later = np.flatnonzero(requests.after >= 0)
    return [*zip(later, requests.after[later], requests.delay[later], strict=True), *requests.joins]


def answer_of(load: dict, **cluster):
    return run(
        build_scenario({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": load, "cluster": cluster}, "")
    )


@pytest.mark.parametrize("more", [{}, {"users": 5, "request_rate": None}])
@pytest.mark.parametrize("inherits", [False, True])
def test_a_turn_waits_for_all_agents_that_it_needs(inherits, more):
    """Sent when the last of those that it waits for has ended, and its delay is over; jobs end with their sessions."""
    load = TALK | more | {"sub_agents": AGENTS | {"inherits": inherits}}
    requests, (result,) = build_requests(Workload.validate(load, ""), 0, None), answer_of(load)
    r, due = result.requests, requests.arrival.copy()
    assert len(r) == result.completed.sum() == 300
    assert len(requests.joins) > 30
    for row, before, delay in edges(requests):
        assert before < row
        due[row] = max(due[row], r["last_token"][before] + delay)
    assert np.allclose(r["sent"], due)
    ends = [r["last_token"][requests.session == k].max() for k in np.unique(requests.session)]
    begins = [r["sent"][requests.session == k].min() for k in np.unique(requests.session)]
    assert job_times(result)["mean_s"] == pytest.approx(np.mean(np.subtract(ends, begins)))


@pytest.mark.parametrize("inherits", [False, True])
def test_what_agents_and_their_session_have_read(inherits):
    """An agent's prompt is its own history, behind its session's if it inherits; the next turn reads last answers."""
    load = TALK | {"sub_agents": AGENTS | {"inherits": inherits}}
    requests, plain = (build_requests(Workload.validate(x, ""), 0, None) for x in (load, TALK))
    prompt, output, (begins, counts, ids, lengths) = requests.prompt_tokens, requests.output_tokens, requests.segments
    places = [slice(b, b + c) for b, c in zip(begins, counts, strict=True)]
    history = np.array([lengths[place].sum() for place in places])
    is_agent = prompt - history == 150  # a turn says 200, and what its agents answered
    own = np.flatnonzero(~is_agent)
    read = np.zeros(300, "i8")
    for row, before, _ in edges(requests):
        assert requests.session[row] == requests.session[before]
        follows = is_agent[before] == is_agent[row]
        if follows or (is_agent[row] and inherits):
            assert history[row] == prompt[before] + output[before]
            assert ids[places[row]][-1] == -1 - before
        elif is_agent[row]:
            assert history[row] == 0
        else:
            read[row] += output[before]
    assert (prompt - history - read)[own].tolist() == [200] * len(own)
    assert np.array_equal(output[own], plain.output_tokens[: len(own)])  # a session says what it said without agents


def test_a_job_takes_its_longest_path():
    """Every request alone on its replica takes what it takes alone: the job, the longest path through the graph."""
    load = {"turns": 2, "request_rate": "inf", "num_requests": 8, "input_tokens": 200, "output_tokens": 40,
            "sub_agents": {"count": 3, "turns": 2, "input_tokens": {"uniform": [100, 3000]},
                           "output_tokens": {"uniform": [10, 200]}}}  # fmt: skip
    requests = build_requests(Workload.validate(load, ""), 0, None)
    free = {"enable_prefix_caching": False}
    alone = []
    for prompt, output in zip(requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), strict=True):
        one = {"num_requests": 1, "input_tokens": prompt, "output_tokens": output}
        data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": free}
        r = run(build_scenario(data | {"workload": one}, ""))[0].requests[0]
        alone.append(r["last_token"] - r["sent"])
    data |= {"workload": load, "cluster": {"replicas": 8, "router": "round-robin"}}
    times = job_times(run(build_scenario(data, ""))[0])
    chains = [alone[1] + alone[2], alone[3] + alone[4], alone[5] + alone[6]]
    assert times["mean_s"] == pytest.approx(alone[0] + max(chains) + alone[7])


def graph_of(tmp_path, items, name="graph.jsonl"):
    (tmp_path / name).write_text(json.dumps({"arrival_time_ns": 0, "sub_requests": items}))
    return {"trace": str(tmp_path / name)}


def ask(tokens, tool):
    return {"input_toks": tokens, "output_toks": 20, "tool_duration_ns": round(tool * 1e9)}


def test_branches_of_a_trace_run_side_by_side(tmp_path):
    """Each branch's tools before what waits for it; branches behind branches, and within them."""
    inner = {"branches": [[ask(50, 0.1)], [ask(60, 3.0), ask(70, 0.5)]]}
    load = graph_of(tmp_path, [{"branches": [[ask(100, 1)], [ask(200, 2), inner]]}, inner, ask(80, 9)])
    requests, (result,) = build_requests(Workload.validate(load, ""), 0, tmp_path), answer_of(load)
    expected = {(2, 1, 2.0), (3, 1, 2.0), (4, 3, 3.0), (8, 5, 0.1), (8, 7, 0.5), (7, 6, 3.0)}
    expected |= {(row, before, tool) for row in (5, 6) for before, tool in ((0, 1.0), (2, 0.1), (4, 0.5))}
    assert {(int(a), int(b), round(float(d), 9)) for a, b, d in edges(requests)} == expected
    r = result.requests
    assert r["sent"][8] == pytest.approx(max(r["last_token"][5] + 0.1, r["last_token"][7] + 0.5))
    one = [ask(100, 1), ask(200, 2), ask(300, 3)]
    chain, same = (answer_of(graph_of(tmp_path, items, name))[0].requests for items, name in
                   ((one, "a.jsonl"), ([one[0], {"branches": [one[1:]]}], "b.jsonl")))  # fmt: skip
    assert np.array_equal(chain, same)  # a graph without fan-out is a conversation, to the bit


@pytest.mark.parametrize("items", [[{"branches": []}], [{"branches": [[]]}], [{"branches": [[{}]], "input_toks": 5}]])
def test_branches_that_are_none(tmp_path, items):
    with pytest.raises(InputError, match=r"graph.jsonl: line 1: (branches|sub_requests) must be a list of"):
        build_requests(Workload.validate(graph_of(tmp_path, items), ""), 0, tmp_path)


def test_single_turns_start_no_agents():
    with pytest.raises(InputError, match="sub_agents are for sessions"):
        Workload.validate({"users": 3, "input_tokens": 5, "output_tokens": 5, "sub_agents": AGENTS}, "")
