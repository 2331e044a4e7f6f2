"""Several replicas behind a router: exact where it must be, as queueing theory says where it is random."""

import numpy as np
import pytest
from shared import SHARED, needs_shared

from infersim.cluster.clients import Clients
from infersim.cluster.clock import Clock
from infersim.cluster.front import Front
from infersim.cluster.prefixes import PrefixIndex, PrefixTree
from infersim.cluster.routers import POLICIES
from infersim.cluster.serve import serve
from infersim.cluster.signals import Signals
from infersim.cluster.site import Site
from infersim.cluster.static import assign, draws
from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.summary import summarize
from infersim.run import run, simulate
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests, own_text

CHAT = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "workload": {
        "request_rate": 20,
        "num_requests": 600,
        "input_tokens": {"lognormal": {"median": 500, "sigma": 1}},
        "output_tokens": {"lognormal": {"median": 60, "sigma": 1}},
    },
}
TIMES = ("status", "sent", "scheduled", "first_token", "last_token", "num_preemptions")


def scenario_of(cluster: dict, **workload):
    return build_scenario(CHAT | {"cluster": cluster, "workload": CHAT["workload"] | workload}, "test")


def server_of(batch: int = 1) -> ReplicaSpec:
    """A server of `batch` places: every step takes 1 s however many are in it."""
    linear, head = np.zeros((4 * batch + 1, len(state.RESOURCES))), np.zeros((batch + 1, len(state.RESOURCES)))
    linear[1:, 0] = 1.0
    knobs = make_knobs(
        block_size=16, num_gpu_blocks=1001, max_num_seqs=batch, max_num_batched_tokens=4 * batch, max_model_len=4000
    )
    return ReplicaSpec(knobs, StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE)))


def requests_of(arrival, output_tokens, **segments) -> Requests:
    n = len(arrival)
    return Requests(arrival, np.ones(n, "i4"), np.asarray(output_tokens, "i4"), np.arange(n), **segments)


def sites_of(k: int) -> list[Site]:
    return [Site(1.0, 0.0, 1, 0.0)] * k


def serve_all(cluster: dict, specs: list[ReplicaSpec], requests: Requests) -> np.ndarray:
    fleet = Fleet(specs)
    spec = Cluster.validate(cluster | {"replicas": len(specs)}, "test")
    return serve(spec, fleet, sites_of(len(specs)), requests, Clients(requests.output_tokens), 0, None).requests


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"session"}))
@pytest.mark.parametrize("max_concurrency", [0, 7])
def test_one_replica_behind_any_router_is_that_replica(policy, max_concurrency):
    """Event by event through the front door, or in one compiled call: the same records, to the last bit."""
    scenario = scenario_of({"router": policy}, max_concurrency=max_concurrency or None)
    alone = run(scenario)[0]
    deployment = deployment_of(scenario)
    fleet = Fleet([ReplicaSpec(deployment.knobs(), deployment.step_cost())])
    requests = Requests(*(alone.requests[c] for c in ("arrival", "prompt_tokens", "output_tokens")), alone.request_ids)
    clients = Clients(alone.requests["max_tokens"], max_concurrency)
    front = Front(scenario.cluster, fleet, sites_of(1), requests, clients, 0)
    front.begin()
    front.play(lambda: None)
    for name in TIMES:
        assert np.array_equal(fleet.requests[name], alone.requests[name]), name
    assert fleet.replicas["busy_time"][0] == alone.busy_time


@pytest.mark.parametrize("policy", ["round-robin", "random", "weighted-random"])
def test_a_static_split_equals_separate_runs(policy):
    """Requests i with replica(i) = r, run alone on one replica, have the records that they have in the cluster."""
    scenario = scenario_of({"kinds": [{"replicas": 2, "weight": 3}, {"replicas": 1}], "router": policy})
    together = run(scenario)[0].requests
    replica = assign(policy, np.array([3.0, 3, 1]), draws(len(together), 0))
    assert np.array_equal(together["replica"], replica)
    deployment = deployment_of(scenario)
    for r in range(3):
        mine = together[replica == r]
        fleet = Fleet([ReplicaSpec(deployment.knobs(), deployment.step_cost())])
        fleet.submit(0, *(mine[c] for c in ("arrival", "prompt_tokens", "output_tokens", "max_tokens")))
        fleet.advance()
        for name in TIMES:
            assert np.array_equal(fleet.requests[name], mine[name]), name


@pytest.mark.parametrize("policy", ["round-robin", "random", "weighted-random"])
def test_assigned_at_once_or_one_by_one_is_the_same(policy):
    scenario = scenario_of({"replicas": 4, "router": policy})
    at_once = run(scenario)[0].requests
    deployment = deployment_of(scenario)
    fleet = Fleet([ReplicaSpec(deployment.knobs(), deployment.step_cost())] * 4)
    requests = Requests(*(at_once[c] for c in ("arrival", "prompt_tokens", "output_tokens")), np.arange(len(at_once)))
    front = Front(scenario.cluster, fleet, sites_of(4), requests, Clients(at_once["max_tokens"]), 0)
    front.begin()
    front.play(lambda: None)
    for name in ("replica", *TIMES):
        assert np.array_equal(fleet.requests[name], at_once[name]), name


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"session"}))
@pytest.mark.parametrize("age", [0, 0.25])
def test_conservation_and_report_under_every_policy(policy, age):
    """`summarize` checks the laws of conservation; every request is in exactly one replica's figures."""
    looks = policy not in ("round-robin", "random", "weighted-random")
    router = {"policy": policy, **({"signal_age": age} if looks else {})}
    document = summarize(run(scenario_of({"replicas": 5, "router": router})))
    assert sum(row["completed"] for row in document["replicas"]) == document["counts"]["completed"] == 600
    assert document["route"]["policy"] == policy
    assert document["route"]["requests_max_over_mean"] >= 1


def test_weights_are_shares():
    """A replica of weight 3 gets three times the requests of one of weight 1 (binomial, 5 standard deviations)."""
    n = 40_000
    counts = np.bincount(assign("weighted-random", np.array([3.0, 1.0]), draws(n, 1)))
    assert abs(counts[0] - 0.75 * n) < 5 * np.sqrt(n * 0.75 * 0.25)


def test_random_split_of_a_poisson_stream_is_as_many_single_queues():
    """Geometric service (steps of 1 s), random routing: each replica is M/Geo/1, mean wait by Pollaczek-Khinchine.

    Mean sojourn over 40,000 requests, within 4 standard errors of batch means.
    """
    n, k, p, rho = 40_000, 4, 0.1, 0.5
    random = np.random.default_rng(3)
    arrival = np.cumsum(random.exponential(1 / (k * rho * p), n))
    service = random.geometric(p, n)
    done = serve_all({"router": "random"}, [server_of()] * k, requests_of(arrival, service))
    sojourn = done["last_token"] - done["sent"]
    second_moment = (2 - p) / p**2
    expected = 1 / p + rho * p * second_moment / (2 * (1 - rho))
    batches = sojourn[n // 10 :].reshape(50, -1).mean(axis=1)
    assert abs(batches.mean() - expected) < 4 * batches.std(ddof=1) / np.sqrt(50)


def test_more_knowledge_waits_less():
    """Single servers at 90 % load: random waits longest, two choices less, the shortest queue least (Mitzenmacher)."""
    n, k = 20_000, 8
    random = np.random.default_rng(4)
    arrival = np.cumsum(random.exponential(10 / (k * 0.9), n))
    requests = requests_of(arrival, random.geometric(0.1, n))
    sojourn = {}
    for policy in ("random", "round-robin", "power-of-two", "least-outstanding"):
        done = serve_all({"router": policy}, [server_of()] * k, requests)
        sojourn[policy] = float((done["last_token"] - done["sent"]).mean())
    assert sojourn["least-outstanding"] < sojourn["power-of-two"] < sojourn["round-robin"] < sojourn["random"]


def test_staler_signals_raise_the_tail():
    """Between two reports all requests go where it looked idlest: a herd that grows with the age of the report."""
    n, k = 8_000, 8
    random = np.random.default_rng(5)
    arrival = np.cumsum(random.exponential(10 / (k * 0.7), n))
    requests = requests_of(arrival, random.geometric(0.1, n))
    p99 = []
    for age in (0, 20, 200):
        done = serve_all({"router": {"policy": "least-outstanding", "signal_age": age}}, [server_of()] * k, requests)
        p99.append(np.percentile(done["last_token"] - done["sent"], 99))
    assert p99[0] < 0.9 * p99[1] < 0.9**2 * p99[2]


def test_a_stale_report_is_what_was_true_then():
    """Reports at 0, 10, 20 s: whatever arrives between goes by the counts at the last one."""
    arrival = np.array([1.0, 2.0, 3.0, 11.0, 12.0, 13.0])
    router = {"policy": "least-outstanding", "signal_age": 10}
    done = serve_all({"router": router}, [server_of()] * 2, requests_of(arrival, [100, 100, 1, 1, 1, 1]))
    # until 10 s both look empty and take turns; at 10 s replica 0 still has two requests, replica 1 one
    assert done["replica"].tolist() == [0, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("policy", ["least-outstanding", "kv-aware"])
def test_reports_that_would_say_the_same_are_left_out(policy, monkeypatch):
    """Much of the time nothing happens: the same choices as with every report made, from a third of them."""
    cluster = {"replicas": 3, "router": {"policy": policy, "signal_age": 0.002}}
    scenario = scenario_of(cluster, num_requests=200, request_rate=0.5, turns=3, think_time=1)
    made, report = [0], Signals.report

    def count(signals):
        made[0] += 1
        report(signals)

    monkeypatch.setattr(Signals, "report", count)
    some = run(scenario)[0]
    few, made[0] = made[0], 0
    next_report = Clock._next_report
    monkeypatch.setattr(
        Clock,
        "_next_report",
        lambda clock, until, reported, _, *others: next_report(clock, until, reported, [False], *others),
    )
    every = run(scenario)[0]
    for name in ("replica", *TIMES):
        assert np.array_equal(some.requests[name], every.requests[name]), name
    assert 3 * few < made[0]


def test_prefix_index_remembers_the_longest_common_prefix():
    """Prompts as segments of 10 tokens: 1 2 3, 1 2 4, 5; replica 1 has the first, replica 0 the last."""
    ids = np.array([1, 2, 3, 1, 2, 4, 5])
    tree = PrefixTree(
        requests_of(
            np.zeros(3),
            [1] * 3,
            segment_offsets=np.array([0, 3, 6, 7]),
            segment_ids=ids,
            segment_lengths=np.full(7, 10, "i4"),
        )
    )
    index = PrefixIndex(tree, np.array([40.0, 40.0]))
    index.add(0, 1)
    index.add(2, 0)
    assert index.overlap(1).tolist() == [0, 20]
    assert index.overlap(2).tolist() == [10, 0]
    index.add(1, 1)
    assert index.sizes.tolist() == [10, 40]
    index.add(2, 1)  # 50 tokens do not fit 40: the least recently used goes, which is the end of request 0's prompt
    assert index.overlap(0).tolist() == [0, 20]
    index.forget(1)
    assert index.overlap(1).tolist() == [0, 0]


@needs_shared
def test_kv_aware_routing_beats_round_robin_on_the_mooncake_conversations():
    """Half the blocks that conversations have in common are in one replica only: going there saves their prefill.

    Without a front end's waits: a request that is still there holds no blocks, so that the router sends more behind it.
    """
    none = {"host_request_time": 0, "host_prompt_token_time": 0, "host_request_latency": 0}
    trace = str(SHARED / "data" / "traces" / "mooncake_conversation.jsonl.gz")
    found = {}
    for policy in ("round-robin", "kv-aware"):
        data = {"workload": {"trace": trace, "num_requests": 3000}, "cluster": {"replicas": 8, "router": policy},
                "engine": none}  # fmt: skip
        found[policy] = summarize(run(build_scenario(CHAT | data, "test")))
    ttft = {policy: document["metrics"]["mean_ttft_ms"] for policy, document in found.items()}
    assert ttft["kv-aware"] < 0.85 * ttft["round-robin"]


def test_kv_aware_routing_loses_when_one_prefix_takes_nearly_all_traffic():
    """Where the prefix is cached the next request is cheap, so nearly all go there and decode in one crowded batch,
    although each other replica would have to compute the prefix only once; the more the cache weighs, the worse."""
    n, k = 1000, 8
    random = np.random.default_rng(9)
    segments = {
        "segment_offsets": np.arange(n + 1),
        "segment_ids": np.where(random.random(n) < 0.97, 0, np.arange(n)),
        "segment_lengths": np.full(n, 8000, "i4"),
    }
    arrival = np.cumsum(random.exponential(1 / 60, n))
    requests = Requests(arrival, np.full(n, 8100, "i4"), np.full(n, 300, "i4"), np.arange(n), **segments)
    e2el = []
    for router in ("round-robin", {"policy": "kv-aware", "overlap_weight": 4}):
        result = simulate(scenario_of({"replicas": k, "router": router}), requests)
        e2el.append(summarize([result])["metrics"]["mean_e2el_ms"])
    assert e2el[1] > 1.5 * e2el[0]


def test_a_match_is_what_the_engine_then_finds():
    """Sessions in KV pools too small for them: what a replica is said to have cached is what its next step reuses."""
    scenario = scenario_of({"replicas": 2}, turns=6, request_rate=4, num_requests=300)
    requests = build_requests(scenario.workload, 0, None)
    knobs = deployment_of(scenario).knobs()
    knobs["num_gpu_blocks"] = 601
    knobs["max_model_len"] = 9000
    fleet = Fleet([ReplicaSpec(knobs, deployment_of(scenario).step_cost())] * 2, shares_text=True)
    n = len(requests)
    columns = (requests.prompt_tokens, requests.output_tokens, requests.output_tokens, n)
    fleet.add(*columns, names=own_text(requests.request_id), segments=requests.segments)
    found = []
    for i in range(n):
        fleet.advance()
        expected = fleet.match(i).copy()
        fleet.send(i, i % 3 % 2, 100.0 * i)
        fleet.advance()
        if fleet.requests["status"][i] == state.COMPLETED:  # some are longer than 9000 tokens
            assert fleet.requests["num_cached_tokens"][i] == expected[i % 3 % 2]
            found.append(int(expected.max()))
    assert 0 < np.count_nonzero(found) < len(found)


@pytest.mark.parametrize("policy", ["round-robin", "least-outstanding", "kv-aware"])
def test_a_thousand_replicas(policy):
    """Every replica's KV pool fits into memory, and each gets its share: n / k exactly in turns; by load as follows.

    Let F requests, f of them in one replica, have ended when the last one arrives. Whoever is sent a request has the
    fewest, hence at most the mean, (n - 1 - F) / k rounded down: with those that have ended it was sent at most
    f + (n - 1) // k + 1. And some replica has at least the mean of all n - F, so somebody was sent one while everybody
    had at least that less one: everybody was sent at least ceil((n - F) / k) - 1. Both with what the router knows to
    have ended, of which there are at most F.
    """
    n, k = 3000, 1000
    scenario = scenario_of({"replicas": k, "router": policy}, num_requests=n, request_rate=6000, output_tokens=50)
    result = run(scenario)[0]
    r = result.requests
    assert result.completed.all()
    sent = np.bincount(r["replica"], minlength=k)
    if policy == "round-robin":
        assert set(sent) == {n // k}
    if policy == "least-outstanding":
        ended = r["last_token"] <= r["sent"].max()
        assert (sent <= np.bincount(r["replica"][ended], minlength=k) + (n - 1) // k + 1).all()
        assert sent.min() >= -(-(n - ended.sum()) // k) - 1
        assert 0 < ended.sum() < n / 2  # or it would say little


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"replicas": 0}, "cluster.replicas: must be a whole number >= 1"),
        ({"router": "fastest"}, "cluster.router: must be one of"),
        ({"kinds": [{"hardware": "h200-sxx"}]}, "cluster.kinds.0.hardware: 'h200-sxx': no such hardware profile"),
        ({"kinds": [{"replicas": 2}], "replicas": 3}, "kinds have 2 replicas and replicas is 3"),
        ({"router": {"policy": "random", "signal_age": 1}}, "signal_age is for a policy that looks at the replicas"),
        ({"router": {"policy": "least-kv", "signal_age": 1e-9}}, "signal_age must be 0 or at least 1 ms"),
        (
            {"failures": [{"mean_time_between": 1e-9, "duration": 1}]},
            "mean_time_between: must be greater than or equal",
        ),
        ({"router": {"policy": "least-kv", "scorers": {"queue": 1}}}, "scorers are for policy weighted"),
        ({"kinds": [{"model": "Llama-3.1-405B"}]}, "weights"),
        ({"kinds": [{}, {"model": "Llama-3.2-1B"}]}, "cluster.kinds.1.model: must be that of kinds.0"),
    ],
)
def test_a_bad_topology_is_one_line_that_names_the_key(cluster, problem):
    with pytest.raises(InputError, match=problem.replace("(", r"\(")) as error:
        run(scenario_of(cluster))
    assert len(error.value.problems) == 1
