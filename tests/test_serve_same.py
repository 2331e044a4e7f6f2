"""Same engine, same answers: what `infersim serve` did in real time, done again without a clock."""

import concurrent.futures
import json
import time

import numpy as np
import pytest
from served import Served, idle, scenario

from infersim.engine.fleet import Fleet
from infersim.run import simulate
from infersim.serve import outcome
from infersim.workload.acceptance import acceptance_table

COMMANDS = ("add", "send", "abort", "fail", "slow_down", "reserve", "release", "clear")
"""what a fleet is told"""
SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": 4000}
STEMS = np.random.default_rng(0).integers(0, 9, (3, 900)).tolist()


def listen(live):
    """Everything that the fleet of `live` is told from now on, and up to when it had been advanced."""
    heard, inside = [], []

    def heard_by(name, command):
        def told(*args, **more):
            if not inside:
                heard.append((live.until, name, args, more))
            inside.append(name)
            try:
                return command(*args, **more)
            finally:
                inside.pop()

        return told

    for name in COMMANDS:
        setattr(live.fleet, name, heard_by(name, getattr(live.fleet, name)))
    return heard


def again(live, heard):
    """A fleet that is told the same."""
    spec = live.scenario
    fleet = Fleet(
        live.specs,
        ranks=int(live.fleet.call["ranks"][0]),
        shares_text=True,
        acceptance=acceptance_table(spec.speculation) if spec.speculation else None,
        seed=spec.simulation.seed,
    )
    for name in ("store_latency", "store_block_time"):
        fleet.knobs[name] = live.fleet.knobs[name]
    for until, name, args, more in heard:
        fleet.advance(until)
        getattr(fleet, name)(*args, **more)
        for column in ("hold", "stored_tokens") if name == "add" else ():  # set at once by whoever added it
            fleet.requests[column][-1] = live.fleet.requests[column][fleet.num_requests - 1]
    fleet.advance(live.until)
    return fleet


def torment(served, random, number, ports=1):
    """Clients who share prompts, and leave; replicas that crash, or become slow; requests that an operator ends."""

    def client(k):
        prompt = STEMS[k % 3][: int(stems[k])] + [k] * int(own[k])
        body = {"prompt": prompt, "max_tokens": int(outputs[k]), "ignore_eos": bool(exact[k]), "priority": k % 3}
        headers, port = {"X-Request-Id": str(k), "X-Session-Id": str(k % 5)}, served.port + k % ports
        if leaves[k]:
            one = served.open("/v1/completions", body | {"stream": True}, headers, port)
            time.sleep(float(waits[k]))
            one.close()
        else:
            served.ask("POST", "/v1/completions", body, headers, port)

    stems, own, outputs = (random.integers(1, most, number) for most in (900, 600, 60))
    exact, leaves, waits = random.random(number) < 0.7, random.random(number) < 0.25, random.exponential(0.1, number)
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        for k in range(number):
            pool.submit(client, k)
            time.sleep(float(random.exponential(0.008)))
            if k % 20 == 7:
                served.ask("POST", "/abort_requests", {"request_ids": [f"cmpl-{k - 1}", f"cmpl-{k - 2}"]})
            if k % 30 == 13:
                replica = int(random.integers(len(served.live.rows)))
                served.post("/simulate/slow", replica=replica, factor=float(random.uniform(1, 4)))
            if k % 40 == 25:
                served.post("/simulate/crash", replica=int(random.integers(len(served.live.rows))), duration=0.1)


POOLS = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "transfer": {"bandwidth": "2 GB/s", "latency": "1 ms"}}
SCALER = {"policy": "outstanding", "target": 4, "max": 4, "interval": 0.2, "scale_down_delay": 0.4}
CASES = {
    "plain": {},
    "preempted": {"engine": {**SMALL, "num_gpu_blocks_override": 300}},
    "routed": {"engine": SMALL, "cluster": {"replicas": 3, "router": "prefix-aware"}},
    "by events": {"engine": SMALL, "cluster": {"replicas": 2, "router": "kv-aware"}},
    "apart": {"engine": SMALL, "cluster": POOLS},
    "sglang": {"engine": {**SMALL, "preset": "sglang-0.5"}},
    "drafted": {"speculation": {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": 0.7}}},
    "ranks": {"engine": SMALL, "parallelism": {"attention_data": 2, "tensor": 1}},
    "scaled": {"cluster": {"replicas": 1, "autoscaler": SCALER | {"startup": {"warmup": 0.2}}}},
    "stored": {"cluster": {"replicas": 2, "kv_store": {"size": "20 GB", "bandwidth": "10 GB/s"}}},
}


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("case", CASES)
def test_in_real_time_the_fleet_does_what_it_does_without_a_clock(case, seed):
    """Whatever comes in between, to the last bit of every record; and nothing leaks."""
    random = np.random.default_rng(seed)
    with Served(scenario(**CASES[case])) as one:
        heard = listen(one.live)
        torment(one, random, 60)
        idle(one)
        twin = again(one.live, heard)
    assert len(heard) > 60
    for name in one.live.fleet.requests.dtype.names:
        np.testing.assert_array_equal(twin.requests[name], one.live.fleet.requests[name], name)
    for name in ("num_steps", "num_scheduled_tokens", "busy_time", "num_preemptions", "outstanding_time"):
        np.testing.assert_array_equal(twin.replicas[name], one.live.fleet.replicas[name], name)
    if one.live.hand_over:
        assert not one.live.hand_over.coming


AGED = {"policy": "least-outstanding", "signal_age": 0.05}
ROUTED = {
    "aged": {"replicas": 3, "router": AGED},
    "prefix-aware": {"replicas": 3, "router": "prefix-aware"},
    "power-of-two": {"replicas": 3, "router": "power-of-two"},
    "weighted": {"replicas": 3, "router": {"policy": "weighted", "scorers": {"queue": 1, "prefix": 2, "kv_usage": 1}}},
    "kv-aware": {"replicas": 3, "router": "kv-aware"},
    "stored": {"replicas": 2, "kv_store": {"size": "2 GB", "bandwidth": "10 GB/s", "latency": "1 ms"}},
    "sometimes apart": POOLS | {"transfer": POOLS["transfer"] | {"hand_over": 700}},
}


@pytest.mark.parametrize("case", ROUTED)
def test_what_chooses_among_replicas_chooses_as_in_a_run(case):
    random, number = np.random.default_rng(1), 50
    own, stems, outputs = (random.integers(1, most, number) for most in (600, 900, 40))
    spec = scenario(cluster=ROUTED[case], engine=SMALL)
    with Served(spec) as one:
        with concurrent.futures.ThreadPoolExecutor(number) as pool:
            for k in range(number):
                prompt = STEMS[k % 3][: int(stems[k])] + [k] * int(own[k])
                pool.submit(one.post, "/v1/completions", prompt=prompt, max_tokens=int(outputs[k]), ignore_eos=True)
                time.sleep(float(random.exponential(0.02)))
        idle(one)
        _, requests = outcome.traffic(one.live)
        live = outcome.result(one.live)
    twin = simulate(spec, requests)
    for name in ("replica", "num_output_tokens", "num_cached_tokens", "num_stored_cached_tokens"):
        np.testing.assert_array_equal(twin.requests[name], live.requests[name], name)
    for name in ("arrival", "scheduled", "first_token", "last_token"):
        np.testing.assert_allclose(twin.requests[name], live.requests[name], atol=1e-6, err_msg=name)
    if case == "stored":
        assert live.requests["num_stored_cached_tokens"].sum() > 0
    if case == "sometimes apart":
        assert 0 < (one.live.fleet.requests["hold"] > 0).sum() < number


def test_texts_that_nobody_holds_are_forgotten():
    """A router that remembers prefixes keeps as much as replicas have, however many requests come."""
    from infersim.serve import door

    spare, door.SPARE = door.SPARE, 500
    try:
        spec = scenario(2, "prefix-aware", engine={"num_gpu_blocks_override": 200, "max_model_len": 2000})
        with Served(spec, speed=100.0) as one:
            for k in range(120):
                one.post("/v1/completions", prompt=[k] * 400, max_tokens=1)
            status = json.loads(one.ask("GET", "/simulate/state")[1])
            assert status["requests"]["finished"] == 120
            held = set().union(*(index.held for index in one.live.door.texts.indices))
            assert len(held) <= 2 * 199
            assert len(one.live.door.texts.tokens) <= 2 * 2 * 199 + 500 + 25
    finally:
        door.SPARE = spare
