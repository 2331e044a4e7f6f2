"""Hand-over, admission, clients that give up, autoscaling and failures: closed forms, floors, what must not happen."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infersim.cluster.autoscaler import Recent
from infersim.cluster.clients import Clients
from infersim.cluster.clock import Clock
from infersim.cluster.link import Link
from infersim.cluster.serve import Served, serve
from infersim.cluster.site import Site
from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.summary import summarize
from infersim.metrics.conservation import check_conservation
from infersim.planning.steps import steps_of
from infersim.report.chrome_trace import chrome_trace
from infersim.run import run
from infersim.workload.requests import Requests

MODEL = {"model": "Llama-3.1-8B", "hardware": "h100-sxm"}
LONG_PROMPTS = {"input_tokens": {"lognormal": {"median": 3000, "sigma": 0.5}}, "output_tokens": 200}


def server(
    step: float = 1.0, blocks: int = 1001, batch: int = 1, prompts: int = 16, token_time: float = 0.0
) -> ReplicaSpec:
    """A server whose every step takes `step` seconds; `prompts` tokens at most in one; blocks of 16 tokens."""
    linear, head = np.zeros((prompts + 1, len(state.RESOURCES))), np.zeros((batch + 1, len(state.RESOURCES)))
    linear[1:, 0] = step
    knobs = make_knobs(
        block_size=16, num_gpu_blocks=blocks, max_num_seqs=batch, max_num_batched_tokens=prompts, max_model_len=1000,
        host_token_time=token_time,
    )  # fmt: skip
    return ReplicaSpec(knobs, StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE)))


def requests_of(arrival, prompt_tokens=1, output_tokens=1, **columns) -> Requests:
    n = len(arrival)
    prompt, output = (np.broadcast_to(np.asarray(x, "i4"), n).copy() for x in (prompt_tokens, output_tokens))
    return Requests(np.asarray(arrival, "f8"), prompt, output, np.arange(n), **columns)


def serve_all(cluster: dict, specs: list[ReplicaSpec], requests: Requests, block_bytes=0.0, **clients) -> Served:
    fleet = Fleet(specs, shares_text=requests.segments is not None)
    sites = [Site(1.0, block_bytes, 32, 10e9) for spec in specs]
    spec = Cluster.validate(cluster, "test")
    return serve(spec, fleet, sites, requests, Clients(requests.output_tokens, **clients), 0, None)


def pools(bandwidth=1e12, **transfer) -> dict:
    return {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "transfer": {"bandwidth": bandwidth, **transfer}}


def scenario_of(cluster: dict, **workload):
    return build_scenario(MODEL | {"cluster": cluster, "workload": LONG_PROMPTS | workload}, "test")


# --- the link ---------------------------------------------------------------------------------------------------------


def transfers(sizes_at: list[tuple[float, float]], bandwidth: float, changes=()) -> list[float]:
    """When transfers of (time, size) end, with the bandwidth set anew at (time, bandwidth)."""
    clock, ends = Clock(Fleet([server()])), []
    link = Link(clock, bandwidth)

    def one(at, size):
        yield clock.at(at)
        yield link.transfer(size)
        ends.append(clock.now)

    for at, size in sizes_at:
        clock.process(one(at, size))
    for at, value in changes:
        clock.call_at(at, lambda value=value: link.set_bandwidth(value))
    clock.play(0, lambda *_: None, lambda: None)
    return ends


def test_a_link_is_shared_evenly():
    """Alone: size / bandwidth. Together: 1 and 3 bytes at 1 B/s end after 2 and 4 s. A late comer slows the first."""
    assert transfers([(5.0, 3.0)], 2.0) == [6.5]
    assert transfers([(0.0, 1.0), (0.0, 3.0)], 1.0) == [2.0, 4.0]
    assert transfers([(0.0, 2.0), (1.0, 2.0)], 1.0) == [3.0, 4.0]


def test_a_cut_link_waits():
    """Half done at 1 s, cut for 10 s, then the rest."""
    assert transfers([(0.0, 2.0)], 1.0, [(1.0, 0.0), (11.0, 1.0)]) == [12.0]


# --- prefill and decode -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [1, 4, 9])
def test_one_prefill_worker_under_c_prompts_takes_half_of_c_plus_1_service_times(c):
    """Prompts that fill a step are computed one after another: the k-th is ready after k steps, (c + 1) / 2 on average.

    The decode replica adds one step of its own to the first token (it computes the last prompt token again).
    """
    r = serve_all(pools(), [server(1e-6, batch=16), server(1.0)], requests_of(np.zeros(c), 16, 2)).requests
    assert (r["first_token"] - r["sent"]).mean() == pytest.approx((c + 1) / 2, abs=1e-4)


def test_hand_over_takes_latency_and_bytes_over_bandwidth():
    """64 prompt tokens are 4 blocks of 1000 B: 0.5 s of latency and 4 s at 1000 B/s after the prefill of 1 s."""
    cluster, specs = pools(1000, latency=0.5), [server(1e-6, prompts=64), server(1.0, prompts=64)]
    served = serve_all(cluster, specs, requests_of([0.0], 64, 3), block_bytes=1000)
    assert served.requests["first_token"][0] == pytest.approx(1 + 0.5 + 4, abs=1e-4)
    assert served.columns["transfer_ms"][0] == pytest.approx(4500)
    assert served.route["transfer_bytes"] == 4000


def test_layers_that_go_while_others_are_computed_leave_one_to_wait_for():
    """The link is faster than the prefill: only the last of 32 layers is left, a 32nd of the bytes."""
    cluster, specs = pools(40_000, overlap="layers"), [server(1e-6, prompts=64), server(1.0, prompts=64)]
    served = serve_all(cluster, specs, requests_of([0.0], 64, 3), block_bytes=1000)
    assert served.columns["transfer_ms"][0] == pytest.approx(1e3 * 4000 / 32 / 40_000)


def test_short_prompts_stay_where_they_decode():
    specs = [server(1e-3, prompts=64), server(1.0, prompts=64)]
    served = serve_all(pools(hand_over=32), specs, requests_of([0.0, 0.0], [16, 48], 3))
    assert served.columns["prefill_replica"].tolist() == [-1, 1]
    assert served.requests["first_token"][0] == pytest.approx(1e-3)


def test_never_handed_over_is_the_decode_pool_alone():
    """The same records as a cluster of the decode replicas; always is what a threshold of no tokens is."""
    random = np.random.default_rng(3)
    requests = requests_of(np.cumsum(random.exponential(1.0, 200)), random.integers(1, 60, 200), 5)
    specs = [server(0.1, prompts=64, batch=4)] * 3
    router = {"router": "least-outstanding"}
    never = serve_all(pools(hand_over="never") | {"decode": {"replicas": 2} | router}, specs, requests).requests
    alone = serve_all({"replicas": 2} | router, specs[:2], requests).requests
    for name in ("replica", "scheduled", "first_token", "last_token"):
        assert np.array_equal(never[name], alone[name])
    always, zero = (serve_all(pools(hand_over=x), specs[:2], requests).requests for x in ("always", 0))
    assert np.array_equal(always, zero)


@pytest.mark.parametrize(
    ("policy", "goes"), [("kv-aware", [1, -1, 1]), ("prefix-aware", [1, -1, 1]), ("least-outstanding", [1, 1, 1])]
)
def test_what_is_cached_does_not_count(policy, goes):
    """Three prompts of 200 tokens, the second with 160 in common with the first: 40 to compute are below 100, so it
    stays where they are cached, if the decode router knows; a router that knows nothing counts all 200."""
    spec = server(1e-3, prompts=256, batch=4)
    spec.knobs["enable_prefix_caching"] = 1
    segments = {"segment_offsets": np.arange(4), "segment_ids": np.array([7, 7, 8]), "segment_lengths": np.full(3, 160)}
    cluster = pools(hand_over=100) | {"decode": {"router": policy}}
    served = serve_all(cluster, [spec, spec], requests_of([0.0, 10.0, 20.0], 200, 4, **segments))
    assert served.columns["prefill_replica"].tolist() == goes


def test_deciding_by_uncached_length_wins_where_conversations_grow():
    """Later turns find most of their prompt cached where they decode: sending all of them through prefill replicas that
    do not have it computes it again."""
    turns = {"turns": 8, "think_time": 2, "request_rate": 3, "num_requests": 800, "input_tokens": 400}
    means = {}
    for hand_over in ("always", 600):
        cluster = {"prefill": {"replicas": 3}, "decode": {"replicas": 2, "router": "kv-aware"},
                   "transfer": {"bandwidth": "50 GB/s", "hand_over": hand_over}}  # fmt: skip
        means[hand_over] = summarize(run(scenario_of(cluster, **turns)))["metrics"]["mean_ttft_ms"]
    assert means[600] < 0.9 * means["always"]


def test_a_full_decode_replica_holds_the_prefill_replica_back():
    """Room for one sequence in each: the second prompt waits for room, the third cannot even be computed."""
    specs = [server(1.0, blocks=64, prompts=1000, batch=4), server(0.5, blocks=64, prompts=1000, batch=4)]
    cluster = pools()
    served = serve_all(cluster, specs, requests_of([0.0, 0.0, 0.0], 900, 20))
    r = served.requests
    assert served.columns["wait_for_room_ms"][1] > 15e3
    assert r["scheduled"][2] >= r["last_token"][0]
    assert (r["status"] == state.COMPLETED).all()


def test_what_the_decode_replica_has_cached_is_not_sent():
    """Two prompts with 160 tokens in common, one after the other: the second sends only its own blocks."""
    spec = server(1e-3, prompts=256, batch=4)
    spec.knobs["enable_prefix_caching"] = 1
    segments = {"segment_offsets": np.arange(3), "segment_ids": np.array([7, 7]), "segment_lengths": np.full(2, 160)}
    served = serve_all(pools(), [spec, spec], requests_of([0.0, 10.0], 200, 4, **segments), block_bytes=1000)
    assert served.route["transfer_bytes"] == 13_000 + 3_000


def test_a_piece_of_memory_for_all_that_may_come_is_sent_as_far_as_it_is_filled():
    """Orca reserves max_model_len; what goes over the link is the prompt's KV, token by token."""
    cluster = pools() | {"decode": {"replicas": 1, "engine": {"preset": "orca"}}}
    scenario = scenario_of(cluster, num_requests=20, input_tokens=300, output_tokens=5)
    document = summarize(run(scenario))
    assert document["route"]["transfer_bytes"] == 20 * 300 * document["memory"]["kv_bytes_per_token"]


@pytest.mark.parametrize("apart", [False, True])
def test_nobody_is_let_in_before_they_have_come(apart):
    """An answer ends when its last token is made, which is told when the host comes to look: who has come meanwhile
    has not waited."""
    admission = {"admission": {"max_outstanding": 2}}
    cluster = pools("50 MB/s") | admission if apart else admission
    data = {"model": "Pythia-70M", "hardware": "a40", "engine": {"host_step_time": "30 ms"}, "cluster": cluster}
    load = {"request_rate": 25, "num_requests": 300, "input_tokens": 5, "output_tokens": {"uniform": [1, 3]}}
    result = run(build_scenario(data | {"workload": load}, "test"))[0]
    check_conservation(result)
    assert result.columns()["front_door_ms"].min() == 0


def test_a_record_says_where_a_request_was_and_what_it_waited_for():
    """Front door, prefill, room, link, decode: in order, and what the columns say adds up to the first token."""
    cluster = pools("5 GB/s") | {"admission": {"max_outstanding": 4}}
    result = run(scenario_of(cluster, request_rate=6, num_requests=200))[0]
    columns, r = result.columns(), result.requests
    door, prefilled = columns["front_door_ms"] / 1e3, columns["prefilled_s"]
    there = prefilled + (columns["wait_for_room_ms"] + columns["transfer_ms"]) / 1e3
    assert door.max() > 0
    assert (r["sent"] + door <= r["scheduled"] + 1e-9).all()
    assert (r["scheduled"] < prefilled).all()
    assert (there < r["first_token"]).all()
    assert set(columns["prefill_replica"]) == {1}
    assert set(columns["replica"]) == {0}
    trace = chrome_trace(result, steps_of(result))
    assert "no steps" in trace["otherData"]["contains"][3]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 3]
    of_one = [e for e in spans if e["tid"] == 7]
    assert [e["name"] for e in of_one if e["name"] != "waiting for room"][-4:] == [
        "prefill", "transfer", "first token", "decode"]  # fmt: skip
    assert of_one[-1]["args"]["prefill_replica"] == 1
    for before, after in pairwise(of_one):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])


def test_a_hand_over_does_not_wait_for_the_api_server():
    """Keys and values are there when the prefill ends, whenever its token is sent: no wait is negative."""
    spec = server(1.0, batch=16, token_time=4.0)
    columns = serve_all(pools(), [spec, server(1e-6, token_time=4.0)], requests_of(np.zeros(4), 16, 2)).columns
    assert (columns["wait_for_room_ms"] >= 0).all()


@pytest.mark.parametrize("engine", [{}, {"enable_prefix_caching": False}, {"preset": "sglang-0.5"}])
def test_memory_is_held_from_its_reservation_to_its_release(engine):
    """Requests far apart: before one comes nothing is held, however long nobody looked. Between, it is its blocks."""
    cluster = pools("5 GB/s") | {"transfer": {"bandwidth": 5e9, "latency": 0.05}}
    data = MODEL | {"cluster": cluster, "engine": {"num_gpu_blocks_override": 9000} | engine}
    data["workload"] = {"num_requests": 20, "input_tokens": 1000, "output_tokens": 2, "request_rate": 1,
                        "burstiness": "inf"}  # fmt: skip
    result = run(build_scenario(data, "test"))[0]
    r, columns = result.requests, result.columns()
    size = result.engine.block_size
    decode, prefill = result.replicas.rows["block_time"] * size
    held = (r["last_token"] - columns["prefilled_s"]).sum() * 1000
    assert decode == pytest.approx(held, rel=0.03)
    held = (columns["prefilled_s"] - r["scheduled"] + columns["transfer_ms"] / 1e3).sum() * 1000
    assert prefill == pytest.approx(held, rel=0.03)


def test_every_gap_is_kept_across_a_hand_over():
    """With every gap kept: as many as tokens between the first and the last, and they add up to the generation."""
    failures = [{"replica": 0, "at": 5, "duration": 5}]
    result = run(scenario_of(pools() | {"failures": failures}, num_requests=60, request_rate=4, retries=3), None, True)[
        0
    ]
    assert result.retries > 0
    r = result.requests[result.completed]
    starts = result.itl_offsets[result.completed]
    sums = [result.itl_gaps[s : s + n - 1].sum() for s, n in zip(starts, r["num_output_tokens"], strict=True)]
    assert sums == pytest.approx(r["last_token"] - r["first_token"], rel=1e-5)


def test_an_interrupted_run_reports_what_there_is():
    """A key pressed after a while: what has ended is reported, the rest is unfinished."""

    def press(*_):
        raise KeyboardInterrupt

    cluster = pools() | {"failures": [{"replica": 0, "at": 5, "duration": 5}]}
    result = run(scenario_of(cluster, num_requests=20_000, request_rate=8), press)[0]
    document = summarize([result])
    assert document["interrupted"]
    assert document["counts"]["unfinished"] > 0
    assert document["counts"]["completed"] > 0


def test_a_faster_link_is_never_slower():
    """The same requests with ten and a hundred times the bandwidth: total latency falls."""
    total = []
    for bandwidth in ("1 GB/s", "10 GB/s", "100 GB/s"):
        cluster = pools(bandwidth)
        total.append(summarize(run(scenario_of(cluster, request_rate=2, num_requests=200)))["metrics"]["mean_e2el_ms"])
    assert total[0] > total[1] > total[2]


def test_disaggregation_wins_in_a_band_and_loses_outside():
    """Output tokens/s of four replicas by the pace that users get (DistServe, OSDI 2024; Splitwise, ISCA 2024).

    Who must see a token every 9.5 ms is disturbed by others' prompts unless they are computed elsewhere: split replicas
    carry more. Who asks for no such pace gets more from replicas that do both, because split ones idle on one side. And
    who wants nearly the speed of an empty machine has fewer neighbours on four replicas that decode than on two.
    """
    split = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "transfer": {"bandwidth": "50 GB/s"}}
    both = {"replicas": 4, "router": "least-outstanding"}
    loads = (1, 8, 16, 40)
    found = [
        [summarize(run(scenario_of(c, request_rate=rate, num_requests=1000)))["metrics"] for rate in loads]
        for c in (split, both)
    ]

    def carried(metrics: list[dict], pace: float) -> float:
        return max((m["output_throughput"] for m in metrics if m["mean_tpot_ms"] <= pace), default=0.0)

    empty = [metrics[0]["mean_tpot_ms"] for metrics in found]
    paces = (sum(empty) / 2, 9.5, 60)
    apart, together = ([carried(metrics, pace) for pace in paces] for metrics in found)
    assert apart[0] == 0 < together[0]
    assert apart[1] > 1.5 * together[1]
    assert apart[2] < 0.85 * together[2]


# --- admission and clients --------------------------------------------------------------------------------------------


def test_one_queue_for_k_servers_is_erlangs():
    """Single servers that the front door gives one request at a time are M/M/k: mean wait by Erlang's C formula.

    Service is geometric with mean 50 steps, nearly exponential (a variance 2 % smaller: Allen & Cunneen's factor).
    """
    n, k, rho, mean = 20_000, 4, 0.8, 50
    random = np.random.default_rng(7)
    arrival = np.cumsum(random.exponential(mean / (k * rho), n))
    requests = requests_of(arrival, 1, random.geometric(1 / mean, n))
    cluster = {"replicas": k, "router": "least-outstanding", "admission": {"max_outstanding": 1}}
    r = serve_all(cluster, [server()] * k, requests).requests
    load = k * rho
    last = load**k / math.factorial(k) / (1 - rho)
    waits = last / (sum(load**i / math.factorial(i) for i in range(k)) + last)
    expected = waits * mean / (k * (1 - rho)) * (2 - 1 / mean) / 2
    batches = (r["scheduled"] - r["sent"])[n // 10 :].reshape(30, -1).mean(axis=1)
    assert abs(batches.mean() - expected) < 3 * batches.std(ddof=1) / np.sqrt(30)


def test_a_full_queue_refuses_the_least_urgent():
    """One server, room for two in the queue: of five at once, two of low priority are refused; high goes first."""
    cluster = {"replicas": 1, "admission": {"max_outstanding": 1, "max_queue": 2}}
    priority = np.array([1, 1, 0, 1, 0])
    r = serve_all(cluster, [server()], requests_of(np.zeros(5)), priority=priority).requests
    assert (r["status"] == state.REJECTED).tolist() == [False, True, False, True, False]
    assert set(r["reason"][r["status"] == state.REJECTED]) == {state.QUEUE_FULL}
    assert r["last_token"][[0, 2, 4]].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("limit", "answered"),
    [
        ({"max_num_queued_reqs": 2}, 2),
        ({"max_num_queued_reqs": 0}, 0),
        ({"max_num_queued_tokens": 3}, 2),  # 0, then 2 prompt tokens are there; the third finds 4
        ({"max_num_queued_tokens": 5}, 3),
        ({"max_num_queued_reqs": 9, "max_num_queued_tokens": 99}, 5),
    ],
)
def test_a_replica_refuses_what_is_too_much_for_it(limit, answered):
    """Five prompts of two tokens at once, one request a second: as many are answered as vLLM's API server lets in."""
    r = serve_all({"replicas": 1, "admission": limit}, [server()], requests_of(np.zeros(5), 2)).requests
    assert (r["status"] == state.COMPLETED).tolist() == [True] * answered + [False] * (5 - answered)
    assert r["last_token"][:answered].tolist() == list(range(1, answered + 1))


def test_a_request_with_its_first_token_is_no_longer_queued_and_a_refused_one_comes_back():
    """The second finds two tokens in prefill; tried again after a second it finds none, though the first still runs."""
    cluster = {"replicas": 1, "admission": {"max_num_queued_tokens": 2}}
    served = serve_all(cluster, [server(batch=2)], requests_of([0.0, 0.5], 2, 4), retries=1, backoff=1.0)
    assert (served.requests["status"] == state.COMPLETED).all()
    assert served.requests["scheduled"].tolist() == [0.0, 2.0]


def test_a_limit_on_ttft_sheds_load():
    """Twice the load: with max_num_queued_tokens of 0.5 s of prefill what is served is served soon."""
    slow = {"num_requests": 300, "request_rate": 30, "input_tokens": 4000, "output_tokens": 1}
    whole = run(scenario_of({"replicas": 1}, **slow))[0]
    rate = 4000 * whole.completed.sum() / (whole.requests["last_token"].max() - whole.requests["arrival"].min())
    limit = {"max_num_queued_tokens": int(0.5 * rate)}
    (shed,) = run(scenario_of({"replicas": 1, "admission": limit}, **slow))
    ttft = [np.quantile((each.requests["first_token"] - each.requests["arrival"])[each.completed], 0.99)
            for each in (whole, shed)]  # fmt: skip
    assert ttft[1] < 1 < ttft[0]
    assert 0 < shed.completed.sum() < 300
    texts = {str(each) for column in shed.columns().values() for each in column if "HTTP" in str(each)}
    assert texts == {"a replica had max_num_queued_reqs or max_num_queued_tokens (HTTP 503)"}


def test_clients_give_up_at_their_timeout():
    """A server that takes 10 s a request, one each 5 s: nobody is answered later than 15 s after sending."""
    r = serve_all({"replicas": 1}, [server()], requests_of(np.arange(0, 500, 5.0), 1, 10), timeout=15.0).requests
    done = r["status"] == state.COMPLETED
    assert set(r["status"]) == {state.COMPLETED, state.TIMED_OUT}
    assert (r["last_token"] - r["sent"])[done].max() <= 15


def test_clients_do_not_wait_for_an_answer_that_the_api_server_has_yet_to_send():
    """The engine is done within a second, of each second; sending takes 4 s an answer. Of a hundred requests those are
    answered whose turn comes within 15 s."""
    spec = server(step=1.0, batch=8, token_time=4.0)
    served = serve_all({"replicas": 1}, [spec], requests_of(np.arange(0, 100, 1.0)), timeout=15.0)
    r = served.requests
    done = r["status"] == state.COMPLETED
    assert set(r["status"]) == {state.COMPLETED, state.TIMED_OUT}
    assert (r["last_token"] - r["sent"])[done].max() <= 15
    assert 3 <= done.sum() <= 6


def test_what_the_api_server_has_yet_to_send_dies_with_its_replica():
    """Eight answers are made in a second and take 4 s each to send. A crash at 10 s loses them, and the server's queue:
    a request at 20 s is answered a step and its sending later."""
    cluster = {"replicas": 1, "failures": [{"at": 10.0, "duration": 1.0}]}
    arrival = [0.0] * 8 + [20.0]
    served = serve_all(cluster, [server(step=1.0, batch=8, token_time=4.0)], requests_of(arrival))
    r = served.requests
    assert r["status"].tolist() == [state.LOST] * 8 + [state.COMPLETED]
    assert r["last_token"][8] == 20 + 1 + 4


def test_retries_come_with_doubled_backoff():
    """A refused request comes again after 1 s and 2 s more, and is served once the server is free at 3 s."""
    cluster = {"replicas": 1, "admission": {"max_outstanding": 1, "max_queue": 0}}
    served = serve_all(cluster, [server()], requests_of([0.0, 0.5], 1, [3, 1]), retries=2, backoff=1.0)
    assert served.retries == 2
    assert served.requests["last_token"][1] == 0.5 + 1 + 2 + 1
    assert served.requests["sent"][1] == 0.5


# --- scaling and failures ---------------------------------------------------------------------------------------------


def test_a_scaler_settles_where_its_target_is():
    """32 requests at a time on average and 4 to each replica: 8 replicas, give or take HPA's tolerance."""
    random = np.random.default_rng(8)
    n = 3000
    requests = requests_of(np.cumsum(random.exponential(10 / 32, n)), 1, 10)
    scaler = {"policy": "outstanding", "target": 4, "max": 20, "interval": 5, "scale_down_delay": 30}
    cluster = {"replicas": 1, "router": "least-outstanding", "autoscaler": scaler}
    served = serve_all(cluster, [server(batch=8, prompts=32)] * 20, requests)
    assert (served.requests["status"] == state.COMPLETED).all()
    assert served.available.sum() / served.end == pytest.approx(9, abs=2)


def test_scaled_to_zero_a_request_waits_for_a_replica_to_start():
    """Node 20 s, 10 GB of weights at 1 GB/s, warm-up 5 s: 35 s; between bursts nothing is there and nothing is paid."""
    requests = requests_of([0.0, 1000.0], 1, 2)
    startup = {"node": 20, "load_bandwidth": "1 GB/s", "warmup": 5}
    scaler = {"target": 4, "min": 0, "max": 2, "scale_down_delay": 60, "startup": startup}
    served = serve_all({"replicas": 1, "autoscaler": scaler}, [server()] * 2, requests)
    first = served.requests["first_token"] - served.requests["sent"]
    assert first.tolist() == [1.0, 36.0]
    figures = {"group": "replicas", "starts": 1, "stops": 1, "peak_replicas": 1, "startup_s": 35.0}
    figures["ready"] = [(0.0, 1), (15.0, 0), (1035.0, 1)]
    assert served.route["autoscalers"] == [figures]
    assert served.available.sum() < 150


def test_a_replica_that_slept_wakes_in_the_time_of_its_weights_over_pcie(tmp_path):
    """vLLM's sleep mode, level 1: no node, no load from storage, no warm-up. Two requests, 1,000 s apart."""
    (tmp_path / "two.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,2\n1000,100,2\n")
    first = []
    for sleep in (False, True):
        startup = {"node": 20, "load_bandwidth": "1 GB/s", "warmup": 5, "sleep": sleep}
        scaler = {"target": 4, "min": 0, "max": 1, "scale_down_delay": 60, "startup": startup}
        data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": {"trace": str(tmp_path / "two.csv")},
                "cluster": {"autoscaler": scaler}}  # fmt: skip
        scenario = build_scenario(data, "")
        r = run(scenario)[0].requests
        first.append(np.diff(r["first_token"] - r["sent"])[0])
    deployment = deployment_of(scenario)
    weights = deployment.memory.weights_bytes
    assert first == pytest.approx([25 + weights / 1e9, weights / deployment.hardware.pcie_bandwidth], rel=1e-3)


def test_a_predictive_scaler_is_ready_when_the_spike_comes():
    """It starts replicas one start-up time ahead of the arrivals, a reactive one only when the queue is there."""
    arrival = np.concatenate((np.arange(0, 600, 10.0), 600 + np.arange(0, 300, 0.5)))
    waits = {}
    for policy, target in (("predictive", 0.2), ("queue", 1)):
        scaler = {"policy": policy, "target": target, "max": 16, "interval": 10, "startup": {"node": 60}}
        cluster = {"replicas": 1, "router": "least-outstanding", "autoscaler": scaler}
        r = serve_all(cluster, [server()] * 16, requests_of(arrival, 1, 5)).requests
        waits[policy] = float((r["scheduled"] - r["sent"]).mean())
    assert waits["predictive"] < 0.2 * waits["queue"]


def test_each_group_of_a_mixed_cluster_scales_by_itself():
    """One kind takes twice as long: with the same target of requests each it needs twice the replicas, by Little."""
    random = np.random.default_rng(8)
    n = 6000
    requests = requests_of(np.cumsum(random.exponential(10 / 32, n)), 1, 10)
    scaler = {"policy": "outstanding", "target": 4, "max": 24, "interval": 5, "scale_down_delay": 30}
    kinds = [{"replicas": 1, "autoscaler": scaler}, {"replicas": 2}]
    specs = [server(batch=8, prompts=32)] * 24 + [server(2.0, batch=8, prompts=32)] * 2
    served = serve_all({"kinds": kinds, "router": "least-outstanding"}, specs, requests)
    assert (served.requests["status"] == state.COMPLETED).all()
    # in flight: 32 on fast replicas alone; the slow two hold 4 each, which is 0.4 requests/s of 3.2: 28 in 7 replicas
    assert served.available[24:].tolist() == [served.end] * 2
    assert served.available[:24].sum() / served.end == pytest.approx(8, abs=2)
    assert served.route["autoscalers"][0]["group"] == "kinds.0"


def test_prefill_and_decode_scale_by_their_own_load():
    """Prompts of a second each at 4/s, then answers of 20 steps of 0.1 s: by Little 4 prefill replicas of target 1 with
    one prompt each, and 8 answers at a time, on 2 decode replicas of target 4."""
    random = np.random.default_rng(8)
    n = 2000
    requests = requests_of(np.cumsum(random.exponential(1 / 4, n)), 16, 20)
    scaler = {"policy": "outstanding", "target": 1.5, "max": 12, "interval": 5, "scale_down_delay": 30}
    cluster = pools() | {
        "prefill": {"replicas": 1, "autoscaler": scaler},
        "decode": {"replicas": 1, "autoscaler": scaler | {"target": 4, "max": 6}},
    }
    specs = [server(0.1, batch=8, prompts=32)] * 6 + [server(1.0)] * 12
    served = serve_all(cluster, specs, requests)
    assert (served.requests["status"] == state.COMPLETED).all()
    assert served.available[:6].sum() / served.end == pytest.approx(2.5, abs=1)
    assert served.available[6:].sum() / served.end == pytest.approx(5.5, abs=2)
    assert [row["group"] for row in served.route["autoscalers"]] == ["decode", "prefill"]


SWITCH = {
    "interval": 1, "prefill_queue_scale_up_threshold": 1, "prefill_queue_scale_down_threshold": 1,
    "decode_kv_scale_up_threshold": 0.5, "decode_kv_scale_down_threshold": 0.5,
}  # fmt: skip


def switching(decode: int, prefill: int, **settings) -> dict:
    groups = {"decode": {"replicas": decode}, "prefill": {"replicas": prefill}}
    return pools() | groups | {"role_switch": SWITCH | settings}


def test_replicas_that_idle_as_decoders_compute_the_prompts_that_wait():
    """Nine prompts at once, three replicas of 1 s a prompt, one token each. At 1 s eight wait with the one that
    prefills and nobody holds KV, so one more does; the next look may find another, but one decodes always. The new one
    serves who comes from then on: the ninth request, at 1.6 s, is computed alone. It holds nobody's KV from before."""
    served = serve_all(switching(2, 1), [server()] * 3, requests_of([0.0] * 8 + [1.6], 16, 1))
    assert (served.requests["status"] == state.COMPLETED).all()
    figures = served.route["role_switch"]
    assert figures["roles"] == [(0.0, 2, 1), (1.0, 1, 1), (1.0, 1, 2)]
    assert (figures["to_prefill"], figures["to_decode"], figures["mean_drain_s"]) == (1, 0, 0.0)
    assert served.columns["prefilled_s"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, pytest.approx(2.6)]
    assert served.available == pytest.approx(served.end)


def test_a_replica_finishes_its_requests_before_it_switches():
    """7 of the decode replica's 12 blocks are held when somebody looks at 9 s, and both prefill replicas compute a
    prompt. One leaves when its prompt is done, at 9.6 s, and its KV has gone over; it decodes `switch_time` later."""
    requests = requests_of([0.0, 8.4, 8.6], [112, 16, 16], 30)
    cluster = switching(1, 2, interval=9, switch_time=0.25)
    served = serve_all(cluster, [server(blocks=13, batch=4)] * 3, requests, block_bytes=1.0)
    assert (served.requests["status"] == state.COMPLETED).all()
    figures = served.route["role_switch"]
    assert figures["roles"] == [(0.0, 1, 2), (9.0, 1, 1), (pytest.approx(9.85), 2, 1)]
    assert (figures["to_decode"], figures["mean_drain_s"]) == (1, pytest.approx(0.6))


@given(st.integers(0, 2**32 - 1))
def test_who_never_looks_never_switches(seed):
    """Two pools that share all replicas, of which none moves, decide to the bit what two pools of their own do."""
    random = np.random.default_rng(seed)
    requests = requests_of(np.sort(random.random(30)), random.integers(1, 40, 30), random.integers(1, 9, 30))
    policies = ["round-robin", "random", "least-outstanding", "power-of-two", "least-kv", "weighted"]
    routers = {name: {"replicas": 3, "router": str(random.choice(policies))} for name in ("decode", "prefill")}
    cluster, specs = pools(1e4) | routers, [server(0.01, blocks=20, batch=4, prompts=64)] * 6
    apart = serve_all(cluster, specs, requests, block_bytes=100.0)
    joined = serve_all(cluster | {"role_switch": {"interval": 1e9}}, specs, requests, block_bytes=100.0)
    assert joined.requests.tolist() == apart.requests.tolist()
    for name, column in apart.columns.items():
        np.testing.assert_array_equal(joined.columns[name], column)
    assert joined.available.tolist() == apart.available.tolist()


def test_a_computed_prompt_is_not_lost_to_scaling_down():
    """A prefill replica that is to go keeps the KV until it has arrived, however slow the link."""
    scaler = {"policy": "outstanding", "target": 1, "max": 4, "interval": 1, "scale_down_delay": 0}
    cluster = pools(100) | {"prefill": {"replicas": 4, "autoscaler": scaler}}
    specs = [server(1e-3)] + [server(0.1)] * 4
    served = serve_all(cluster, specs, requests_of(np.zeros(4), 16, 2), block_bytes=1000)
    assert (served.requests["status"] == state.COMPLETED).all()
    assert served.requests["first_token"].max() > 30
    assert served.route["autoscalers"][0]["stops"] == 3


@pytest.mark.parametrize("repair", [0.5, 2.0])
def test_failures_by_chance_leave_the_share_of_time_that_renewal_theory_says(repair):
    """Availability = mean time between / (that + mean time to repair); 4 replicas for 4000 s, 4 standard errors."""
    cluster = {"replicas": 4, "failures": [{"mean_time_between": 5, "duration": repair}]}
    served = serve_all(cluster, [server(0.01)] * 4, requests_of(np.arange(0.0, 4000, 1.0), 1, 1), retries=3)
    share = served.available.sum() / served.end / 4
    cycles = 4 * served.end / (5 + repair)
    expected = 5 / (5 + repair)
    error = expected * (1 - expected) * np.sqrt(2 / cycles)  # of a ratio of two exponential means
    assert abs(share - expected) < 4 * error
    again = serve_all(cluster, [server(0.01)] * 4, requests_of(np.arange(0.0, 4000, 1.0), 1, 1), retries=3)
    assert np.array_equal(served.requests, again.requests)


def test_what_is_broken_twice_is_whole_when_both_are_mended():
    failures = [{"at": 1, "duration": 10}, {"at": 5, "duration": 2}, {"at": 20}, {"at": 25, "duration": 1}]
    cluster = {"replicas": 1, "failures": failures}
    r = serve_all(cluster, [server()], requests_of([6.0, 8.0, 30.0], 1, 1)).requests
    assert r["scheduled"].tolist()[:2] == [11, 12]
    assert r["status"][2] == state.LOST


def test_failures_by_chance_do_not_keep_a_dead_run_alive():
    """The only replica dies for good while others' failures would go on for ever: what waits is lost, the run ends."""
    failures = [{"at": 1}, {"kind": "slow", "mean_time_between": 1, "duration": 1}]
    r = serve_all({"replicas": 1, "failures": failures}, [server()], requests_of([0.0, 2.0], 1, 5)).requests
    assert set(r["status"]) == {state.LOST}


def test_repairs_that_help_nobody_do_not_keep_a_dead_run_alive():
    """Of two pools the first dies for good, the second has failures by chance for ever: what waits is lost."""
    for kind in ("slow", "crash"):
        chance = {"kind": kind, "mean_time_between": 5, "duration": 5}
        kinds = [{"replicas": 1}, {"replicas": 8, "model": "Llama-3.2-1B", "served_model_name": "small"}]
        result = run(
            build_scenario(
                {
                    **MODEL,
                    "cluster": {"kinds": kinds, "router": "least-outstanding", "failures": [{"at": 5}]
                                + [chance | {"replica": r} for r in range(1, 9)]},
                    "workload": {"request_rate": 10, "num_requests": 100, "input_tokens": 800, "output_tokens": 100,
                                 "retries": 3, "models": {"Llama-3.1-8B": 1, "small": 3}},
                },
                "test",
            )
        )[0]  # fmt: skip
        late = result.requests["sent"] > 5
        for number, name in enumerate(result.models):
            status = result.requests["status"][late & (result.model == number)]
            assert set(status) == {state.COMPLETED if name == "small" else state.LOST}


@pytest.mark.parametrize("sleep", [False, True])
@pytest.mark.parametrize("preset", ["vllm-0.33", "sglang-0.5"])
def test_a_replica_that_was_stopped_has_no_prefix_cache(preset, sleep):
    """Each request finds a replica that was started for it: nothing of the prompts' common text is left."""
    load = {"request_rate": 0.005, "num_requests": 6, "input_tokens": 100, "output_tokens": 5,
            "prefixes": {"count": 1, "tokens": 2000}}  # fmt: skip
    data = MODEL | {"workload": load, "engine": {"preset": preset}}
    startup = {"warmup": 1} | ({"sleep": True} if sleep else {})
    scaler = {
        "policy": "outstanding",
        "target": 1,
        "min": 0,
        "max": 1,
        "interval": 1,
        "scale_down_delay": 1,
        "startup": startup,
    }
    (kept,) = run(build_scenario(data, "x"))
    (stopped,) = run(build_scenario(data | {"cluster": {"autoscaler": scaler}}, "x"))
    assert (kept.requests["num_cached_tokens"][1:] >= 1900).all()
    gaps = np.diff(stopped.requests["arrival"]) > 10
    assert gaps.sum() >= 4
    assert not stopped.requests["num_cached_tokens"][1:][gaps].any()


def test_waits_for_a_repair_that_helps():
    """Nothing else is to come when the only replica is mended."""
    cluster = {"replicas": 1, "failures": [{"at": 1, "duration": 100}]}
    r = serve_all(cluster, [server()], requests_of([2.0], 1, 1)).requests
    assert (r["status"][0], r["scheduled"][0]) == (state.COMPLETED, 101)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), max_size=60), st.floats(0, 100))
def test_an_autoscaler_keeps_the_most_that_was_wanted_lately(looks, delay):
    """As if it looked through all of the delay each time; what it remembers does not grow where less is wanted."""
    recent, times = Recent(delay), np.cumsum([gap for gap, _ in looks])
    for i, (now, (_, wanted)) in enumerate(zip(times, looks, strict=True)):
        before = [w for t, (_, w) in zip(times[:i], looks, strict=False) if t > now - delay]
        assert recent.most(now, wanted) == max([*before, wanted])


def test_a_thousand_retries_without_backoff_and_none_that_would_last_for_ever():
    served = serve_all({"replicas": 1}, [server()], requests_of([0.0], 1, 9), timeout=1e-3, retries=1100, backoff=0.0)
    assert served.retries == 1100
    with pytest.raises(InputError, match="retries: a backoff that doubles 1099 times"):
        scenario_of({}, retries=1100)


def test_a_crash_loses_what_is_in_the_replica_and_retries_bring_it_back():
    """Two servers of 10 s a request, the first dies at 25 s: it has requests 4 and 6; both are lost, or come again."""
    requests = requests_of(np.arange(10) * 5.0, 1, 10)
    cluster = {"replicas": 2, "failures": [{"replica": 0, "at": 25}]}
    r = serve_all(cluster, [server(batch=2, prompts=8)] * 2, requests).requests
    assert np.flatnonzero(r["status"] == state.LOST).tolist() == [4]
    served = serve_all(cluster, [server(batch=2, prompts=8)] * 2, requests, retries=1)
    assert (served.requests["status"] == state.COMPLETED).all()
    assert served.retries == 1
    assert (served.requests["replica"][4:] == 1).all()


def test_without_any_replica_left_everything_is_lost():
    served = serve_all({"replicas": 1, "failures": [{"at": 3}]}, [server()], requests_of([0.0, 10.0, 20.0], 1, 2))
    assert served.requests["status"].tolist() == [state.COMPLETED, state.LOST, state.LOST]


def test_a_slow_replica_is_slow_as_long_as_it_is():
    """Steps that take 3 s instead of 1 s between 10 and 20 s."""
    cluster = {"replicas": 1, "failures": [{"kind": "slow", "at": 10, "duration": 10, "factor": 3}]}
    r = serve_all(cluster, [server()], requests_of([0.0, 10.5, 30.0], 1, 2)).requests
    assert (r["last_token"] - r["sent"]).tolist() == [2, 6, 2]


def test_nothing_is_handed_over_through_a_partition():
    cluster = pools(1e6) | {"failures": [{"kind": "partition", "at": 5, "duration": 10}]}
    specs = [server(1e-6, batch=8, prompts=16), server(0.1)]
    served = serve_all(cluster, specs, requests_of(np.arange(0.0, 20.0), 16, 2), block_bytes=1000)
    arrived = served.requests["sent"] + served.columns["transfer_ms"] / 1e3
    assert (served.requests["status"] == state.COMPLETED).all()
    cut = (served.requests["first_token"] > 5.2) & (served.requests["first_token"] < 15)
    assert not cut.any()
    assert np.isfinite(arrived).all()


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"prefill": {}, "transfer": {"bandwidth": "1 GB/s"}}, "decode: missing"),
        ({"prefill": {}, "decode": {}}, "transfer: missing"),
        ({"prefill": {}, "decode": {}, "transfer": {"bandwidth": 0}}, "cluster.transfer.bandwidth: must be greater"),
        ({"prefill": {"model": "Llama-3.1-70B", "parallelism": {"tensor": 4}}, "decode": {},
          "transfer": {"bandwidth": "1 GB/s"}}, "cluster.prefill.model: must be that of the decode replicas"),
        (pools() | {"prefill": {"router": "session"}}, "cluster.prefill.router: session needs a workload with"),
        (pools() | {"router": "random"}, "router: each pool has its own"),
        ({"replicas": 3, "autoscaler": {"target": 1, "max": 2}}, "replicas: must lie between"),
        ({"autoscaler": {"target": 1, "max": 2, "min": 3}}, "min must not be above max"),
        ({"failures": [{"kind": "partition", "at": 1}]}, "failures.0: a partition needs"),
        ({"failures": [{"replica": 1, "at": 1}]}, "failures.0.replica: must be below 1"),
        ({"kinds": [{}, {}], "autoscaler": {"target": 1, "max": 2}}, "autoscaler: each group has its own"),
        (pools(hand_over="sometimes"), "cluster.transfer.hand_over: must be one of 'always', 'never'"),
        (pools(hand_over=-1), "cluster.transfer.hand_over: must be a whole number >= 0"),
        (pools() | {"autoscaler": {"target": 1, "max": 2}}, "autoscaler: each group has its own; give decode.auto"),
        ({"role_switch": {}}, "role_switch: is between prefill and decode"),
        (pools() | {"role_switch": {"decode_kv_scale_up_threshold": 0.4}}, "decode_kv_scale_down_threshold must not"),
        (pools() | {"role_switch": {}, "decode": {"hardware": "h200-sxm"}}, "role_switch: prefill and decode must be"),
        (pools() | {"role_switch": {}, "failures": [{"at": 1}]}, "role_switch: is not modelled with autoscalers and"),
        (pools() | {"prefill": {"autoscaler": {"target": 1, "max": 2, "min": 0}}}, "prefill.autoscaler.min: must be"),
        ({"kinds": [{"replicas": 3, "autoscaler": {"target": 1, "max": 2}}]}, "kinds.0.replicas: must lie between"),
        ({"failures": [{}]}, "failures.0: must have at or mean_time_between"),
    ],
)  # fmt: skip
def test_a_bad_topology_is_one_line_that_names_the_key(cluster, problem):
    with pytest.raises(InputError, match=problem) as error:
        run(scenario_of(cluster))
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("engine", "parallelism", "workload"),
    [
        ({}, {"attention_data": 2}, {"request_rate": 5, "num_requests": 30, "turns": 3, "think_time": 1}),
        ({"preset": "vllm-0.15", "max_model_len": 700, "num_gpu_blocks_override": 100}, {"attention_data": 2},
         {"request_rate": 100, "num_requests": 93, "n": 2}),
        ({"preset": "trtllm-1.0-no-evict"}, {}, {"request_rate": 20, "num_requests": 50, "n": 2}),
        ({"preset": "trtllm-1.0-no-evict", "max_model_len": 700, "num_gpu_blocks_override": 60}, {"attention_data": 2},
         {"request_rate": 100, "num_requests": 100, "n": 2}),
        ({"preset": "orca", "max_model_len": 700, "num_gpu_blocks_override": 5000}, {},
         {"request_rate": 100, "num_requests": 100}),
    ],
)  # fmt: skip
def test_pools_short_of_memory_end_with_every_request_answered(engine, parallelism, workload):
    """Ranks, shared text, prompts that wait for one another, pieces, and nobody evicted: reserving for a hand-over and
    admission take the same blocks of the same rank, and never all of them for prompts that cannot go on."""
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "parallelism": parallelism,
        "engine": engine,
        "workload": {"input_tokens": 90, "output_tokens": 20} | workload,
        "cluster": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "transfer": {"bandwidth": "1 GB/s"}},
    }
    counts = summarize(run(build_scenario(parts, "test")))["counts"]
    assert counts["completed"] == counts["submitted"]
