"""Which replicas of `infersim serve` are there: failures that the scenario states, and autoscalers."""

import concurrent.futures
import json
import threading
import time

import numpy as np
import pytest
from served import Served, idle, scenario

from infersim.config.errors import InputError
from infersim.engine.compiled.state import LOST
from infersim.run import simulate
from infersim.serve import outcome
from infersim.serve.live import Live

SCALER = {"policy": "outstanding", "target": 2, "max": 4, "interval": 0.25, "scale_down_delay": 0.5}
SCALER |= {"startup": {"warmup": 0.3}}


def test_what_a_scenario_states_happens_as_in_a_run():
    """A crash, a slow replica and an autoscaler: the arrivals that came give the same records offline."""
    crash = {"kind": "crash", "replica": 0, "at": 1.0, "duration": 0.5}
    slow = {"kind": "slow", "replica": 1, "at": 0.4, "duration": 1.0, "factor": 3}
    cluster = {"replicas": 2, "router": "least-outstanding", "autoscaler": SCALER, "failures": [crash, slow]}
    spec, random = scenario(cluster=cluster), np.random.default_rng(5)
    lengths, waits = random.integers(20, 120, 80), random.exponential(0.03, 80)
    with Served(spec) as one:

        def client(k):
            body = {"prompt": [k] * 200, "max_tokens": int(lengths[k]), "ignore_eos": True}
            return one.ask("POST", "/v1/completions", body)[0]

        with concurrent.futures.ThreadPoolExecutor(80) as pool:
            tasks = [(pool.submit(client, k), time.sleep(waits[k]))[0] for k in range(80)]
            answers = [task.result() for task in tasks]
        idle(one)
        live = outcome.result(one.live)
        _, requests = outcome.traffic(one.live)
        seen = json.loads(one.ask("GET", "/simulate/result")[1])
    again = simulate(spec, requests)
    for name in ("replica", "status", "num_output_tokens"):
        np.testing.assert_array_equal(live.requests[name], again.requests[name], name)
    for name in ("sent", "scheduled", "first_token", "last_token"):
        np.testing.assert_allclose(live.requests[name], again.requests[name], atol=1e-9, err_msg=name)
    assert answers.count(503) == (live.requests["status"] == LOST).sum() > 0
    assert answers.count(200) == 80 - answers.count(503)
    there, then = (one.route["autoscalers"][0]["ready"] for one in (live, again))
    assert len(there) > 2
    assert there[: len(then)] == then  # a run ends with its last request
    assert seen["metrics"]


def test_a_replica_that_starts_answers_503_until_it_has():
    spec = scenario(cluster={"replicas": 1, "autoscaler": SCALER | {"target": 1, "max": 2, "startup": {"warmup": 1.0}}})
    with Served(spec, ports=True) as one:
        there = one.port + 1

        def state(port=there):
            return json.loads(one.ask("GET", "/simulate/state", port=port)[1])["replicas"][0]["state"]

        assert state() == "off"
        assert one.ask("GET", "/health")[0] == 200
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        clients = [threading.Thread(target=one.ask, args=("POST", "/v1/completions", body)) for _ in range(4)]
        for client in clients:
            client.start()
        while state() == "off":
            time.sleep(0.01)
        began = one.live.processes.now
        status, _, headers = one.ask("POST", "/v1/completions", {"prompt": "a"}, port=there)
        assert (status, headers["retry-after"], state()) == (503, "1", "starting")
        for path in ("/health", "/v1/models"):
            assert one.ask("GET", path, port=there)[0] == 503
        while one.ask("GET", "/health", port=there)[0] == 503:
            time.sleep(0.01)
        assert one.live.clock.now() - began == pytest.approx(1.0, abs=0.5)
        assert one.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}, port=there)[0] == 200
        for client in clients:
            client.join()
        while "off" not in (states := [state(one.port), state()]):  # one is enough: the idler goes
            time.sleep(0.05)
        assert one.ask("GET", "/health", port=one.port + states.index("off"))[0] == 503


def test_what_is_not_served_is_refused():
    for policy, failures, word in (
        ("predictive", [], "predictive"),
        ("queue", [{"kind": "partition", "at": 1.0}], "partition"),
    ):
        pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 1, "autoscaler": SCALER | {"policy": policy}}}
        pools |= {"transfer": {"bandwidth": "50 GB/s"}, "failures": failures}
        with pytest.raises(InputError, match=word):
            Live(scenario(cluster=pools), 1.0, None)
