"""Job completion time of agents."""

import json

import numpy as np
import pytest

from infersim.config.scenario import build_scenario
from infersim.explain.summary import summarize
from infersim.run import run


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
