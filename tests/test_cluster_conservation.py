"""Whatever breaks, scales, waits or is given up: no request is lost or counted twice, and no KV block leaks."""

import random
from dataclasses import replace

import numpy as np
import pytest

from infersim.cluster.clients import Clients
from infersim.cluster.serve import serve
from infersim.cluster.site import Site
from infersim.config.cluster import Cluster
from infersim.config.scenario import build_scenario
from infersim.cost.floors import floor_itl, floor_ttft
from infersim.deployment import deployments_of
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.summary import summarize
from infersim.run import run
from infersim.workload.requests import Requests

SMALL, LARGE = "Llama-3.2-1B", "Llama-3.1-8B"
SCENARIOS = 1000
BATCH = 50


def a_replica(draw: random.Random) -> ReplicaSpec:
    """A small engine whose steps take 1 to 3 ms and more; KV for one to three long sequences."""
    block_size, longest = draw.choice([1, 4, 16]), draw.choice([32, 64])
    linear, head = np.zeros((33, len(state.RESOURCES))), np.zeros((9, len(state.RESOURCES)))
    linear[1:, 0] = draw.choice([1e-3, 3e-3])
    linear[:, 3] = draw.choice([0, 1e-4]) * np.arange(33)
    needed = -(-longest // block_size)
    asynchronous = draw.random() < 0.5
    knobs = make_knobs(
        block_size=block_size,
        num_gpu_blocks=1 + needed + draw.choice([0, needed, 2 * needed]),
        max_num_seqs=draw.choice([1, 2, 8]),
        max_num_batched_tokens=draw.choice([8, 32]),
        max_model_len=longest,
        steps_in_flight=1 + asynchronous,
        async_scheduling=asynchronous,
        reserve_full_isl=draw.random() < 0.5,
        enable_prefix_caching=draw.random() < 0.5,
        host_step_time=draw.choice([0, 5e-4]),
        host_request_time=draw.choice([0, 1e-3]),
    )
    return ReplicaSpec(knobs, StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE)))


def some_requests(draw: random.Random) -> Requests:
    """Up to 40 within a quarter of a second; some too long for any replica; some that follow one another."""
    n = draw.randint(1, 40)
    arrival = np.sort([draw.choice([0.0, 0.1, draw.random() / 4]) for _ in range(n)])
    prompt = np.array([draw.choice([1, 5, 20, 20, 31, 60, 90]) for _ in range(n)], "i4")
    after = None
    if draw.random() < 0.4:
        after = np.array([draw.randint(0, i - 1) if i and draw.random() < 0.5 else -1 for i in range(n)])
        arrival[1:] = arrival[:-1] if draw.random() < 0.2 else arrival[1:]
        arrival = np.maximum.accumulate(arrival)
    columns = {}
    if after is not None:
        columns = {"after": after, "delay": np.where(after >= 0, draw.choice([0.0, 0.05]), 0.0)}
        joins = [(i, j, 0.03) for i in np.flatnonzero(after >= 0).tolist() for j in range(i) if (i * j + n) % 7 == 1]
        rows, before, delay = np.array(joins or np.zeros((0, 3))).T
        columns |= {"join_rows": rows.astype("i8"), "join_after": before.astype("i8"), "join_delay": delay}
    offsets = np.arange(n + 1)
    segments = {
        "segment_offsets": offsets,
        "segment_ids": np.array([draw.randint(0, 3) for _ in range(n)]),
        "segment_lengths": np.minimum(prompt, 16),
    }
    session = np.array([draw.randint(0, 5) for _ in range(n)])
    output = np.array([draw.choice([1, 2, 8, 30]) for _ in range(n)], "i4")
    return Requests(arrival, prompt, output, np.arange(n), session=session, **columns, **segments)


def a_cluster(draw: random.Random) -> Cluster:
    policies = ["round-robin", "random", "weighted-random", "least-outstanding", "power-of-two", "least-kv", "session"]
    policies += ["prefix-aware", "kv-aware", "weighted", "weighted"]

    def router() -> dict:
        policy = draw.choice(policies)
        age = draw.choice([0, 0, 0.01, 0.1])
        return {"policy": policy, **({"signal_age": age} if policy in policies[3:6] else {})}

    def scaler(replicas: int, least: int) -> dict:
        return {
            "policy": draw.choice(["outstanding", "queue", "kv_usage", "utilization", "ttft", "tpot", "predictive"]),
            "target": draw.choice([0.1, 1, 5]),
            "min": draw.randint(least, 1),
            "max": replicas + draw.randint(0, 2),
            "interval": 0.02,
            "scale_down_delay": draw.choice([0, 0.1]),
            "startup": {"node": draw.choice([0, 0.05]), "load_bandwidth": 1e6, "warmup": 0.01},
        }

    def group(least: int) -> dict:
        replicas = draw.randint(1, 2)
        return {"replicas": replicas, **({"autoscaler": scaler(replicas, least)} if draw.random() < 0.4 else {})}

    replicas = draw.randint(1, 4)
    data = {"replicas": replicas, "router": router()}
    if draw.random() < 0.3:
        data = {
            "prefill": {"router": router(), **group(1)},
            "decode": {"router": router(), **group(1)},
            "transfer": {
                "bandwidth": draw.choice([1e4, 1e6, 1e12]),
                "latency": draw.choice([0, 0.002]),
                "overlap": draw.choice(["none", "layers"]),
                "hand_over": draw.choice(["always", "always", "never", 10]),
            },
        }
        if "autoscaler" not in data["prefill"] | data["decode"]:
            thresholds = {"prefill_queue_scale_up_threshold": 0.2, "decode_kv_scale_up_threshold": 0.01}
            data["role_switch"] = {"interval": 0.02, **thresholds, "decode_kv_scale_down_threshold": 0.01}
    elif draw.random() < 0.4:
        data["autoscaler"] = scaler(replicas, 0)
    elif draw.random() < 0.4:
        data = {"kinds": [group(0) for _ in range(draw.randint(1, 3))], "router": router()}
    if draw.random() < 0.2:
        shape = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
        data["encode"] = {"encoder": shape, "router": router(), **group(1)}
        data.setdefault("transfer", {"bandwidth": draw.choice([1e4, 1e12])})
    if draw.random() < 0.3:
        limit = {"max_queue": draw.choice([0, 3])} if draw.random() < 0.5 else {}
        data["admission"] = {"max_outstanding": draw.choice([1, 3]), **limit}
    if draw.random() < 0.5 and not (data.get("role_switch") and draw.random() < 0.9):
        data.pop("role_switch", None)
        kinds = ["crash", "crash", "slow"] + (["partition"] if "transfer" in data else [])
        most = Cluster.validate(data, "test").most
        data["failures"] = [
            {
                "kind": draw.choice(kinds),
                "replica": draw.randint(0, most - 1),
                "duration": draw.choice([None, 0.02, 0.1]),
                "factor": 3,
                **({"at": draw.random() / 3} if draw.random() < 0.7 else {"mean_time_between": 0.1}),
            }
            for _ in range(draw.randint(1, 3))
        ]
    return Cluster.validate(data, "test")


def grouped(one: ReplicaSpec, draw: random.Random) -> ReplicaSpec:
    """The same for requests of several sequences."""
    k = draw.choice([2, 4])
    knobs = {"num_sequences": k, "beam_turnover": draw.choice([0.0, 0.3]), "num_cpu_blocks": draw.choice([0, 5, 50])}
    knobs |= {"enable_prefix_caching": 0, "async_scheduling": 0, "steps_in_flight": 1, "reserve": 0, "kv_window": 0}
    knobs |= {"num_kv_groups": 1, "kv_multiplicity": 1, "max_num_seqs": max(int(one.knobs["max_num_seqs"]), k)}
    changed = ReplicaSpec(one.knobs.copy(), one.cost)
    for name, value in knobs.items():
        changed.knobs[name] = value
    return changed


def check(seed: int) -> None:
    draw = random.Random(seed)
    cluster, requests = a_cluster(draw), some_requests(draw)
    one = a_replica(draw)
    groups = zip(cluster.group_names, cluster.ranges, strict=True)
    of_group = [(draw.choice("AB") if name.startswith("kinds") else "A", numbers) for name, numbers in groups]
    models = [model for model, numbers in of_group for _ in numbers]
    if draw.random() < 0.7:
        models = ["A"] * len(models)
    adapters = {model: draw.choice([{}, {model + "1": 1.0, model + "2": 3.0}]) for model in "AB"}
    encoders = len(cluster.ranges[-1]) if cluster.encode else 0
    names = sorted(set(models[: len(models) - encoders]))
    names += [adapter for model in names for adapter in adapters[model]]
    base = {adapter: model for model in "AB" for adapter in (model, *adapters[model])}
    requests = replace(
        requests, model=np.array([draw.randrange(len(names)) for _ in requests.arrival]), models=tuple(names)
    )
    image = draw.randint(1, 31)
    encoder = ReplicaSpec(one.knobs.copy(), one.cost)
    encoder.knobs["max_model_len"], encoder.knobs["chunked_prefill"] = image + 1, 0
    encoder.knobs["max_num_batched_tokens"], encoder.knobs["enable_prefix_caching"] = 32, 0
    if encoders:
        images = np.array([draw.choice([0, 0, 1, 3]) for _ in requests.arrival], "i4")
        requests = replace(requests, images=images, prompt_tokens=requests.prompt_tokens + images * image)
    own = random.Random(-1 - seed)  # groups of sequences, beside what the seed has drawn
    if not (cluster.prefill or cluster.encode) and own.random() < 0.3:
        one = grouped(one, own)
    fleet = Fleet([one] * (cluster.most - encoders) + [encoder] * encoders, shares_text=True)
    clients = Clients(
        requests.output_tokens + draw.choice([0, 5]),
        draw.choice([0, 0, 1, 5]),
        draw.choice([0, 0, 0.02, 0.2]),
        draw.choice([0, 0, 1, 3]),
        0.01,
        np.array([draw.randint(0, 2) for _ in range(len(requests))]),
    )
    room, bandwidth = draw.randint(1, 2), draw.choice([30.0, 1e6])
    overlap = bool(seed % 2)
    sites = [
        Site(draw.choice([1.0, 3.0]), 1e3, 4, 1e4, model, adapters[model], room, overlap, bandwidth, 10.0)
        for model in models
    ]
    sites[len(sites) - encoders :] = [Site(1.0, 0.0, 1, 1e4, None)] * encoders
    served = serve(cluster, fleet, sites, requests, clients, seed, None)
    r = served.requests
    assert len(r) == len(requests)
    assert np.isin(r["status"], (state.COMPLETED, state.REJECTED, state.TIMED_OUT, state.LOST)).all()
    done = r[r["status"] == state.COMPLETED]
    assert (done["num_output_tokens"] == np.minimum(done["output_tokens"], done["max_tokens"])).all()
    assert (done["arrival"] <= done["sent"]).all()
    for before, after in (("sent", "scheduled"), ("scheduled", "first_token"), ("first_token", "last_token")):
        assert (done[before] <= done[after]).all()
    if requests.after is not None:
        later = (requests.after >= 0) & (r["status"] == state.COMPLETED)
        first = requests.after[later]
        finished = r["status"][first] == state.COMPLETED
        earliest = r["last_token"][first] + requests.delay[later]
        assert (r["arrival"][later] >= earliest)[finished].all()
        for row, before, delay in requests.joins:
            if r["status"][row] == r["status"][before] == state.COMPLETED:
                assert r["arrival"][row] >= r["last_token"][before] + delay
    if not clients.timeout:
        assert not (r["status"] == state.TIMED_OUT).any()
    if not cluster.failures:
        assert not (r["status"] == state.LOST).any()
    there = done["replica"]
    asked = [base[names[m]] for m in requests.model[r["status"] == state.COMPLETED]]
    assert (np.array(models)[there] == asked).all()
    visits = fleet.requests[fleet.requests["replica"] >= 0]
    assert (visits["status"] >= state.COMPLETED).all()
    assert (visits["num_blocks"] == 0).all()
    assert (fleet.schedulers["free_blocks"] == fleet.knobs["num_gpu_blocks"] - 1).all()
    assert (fleet.replicas["outstanding"] == 0).all()
    assert (fleet.replicas["num_reserved"] == 0).all()
    assert fleet.replicas["num_finished"].sum() == len(visits)
    completed = visits[visits["status"] == state.COMPLETED]
    encoded = completed["replica"] >= len(sites) - encoders
    answers = 2 if cluster.prefill else 1  # visits of one attempt at most
    attempts = len(r) + served.retries
    assert (~encoded).sum() <= answers * attempts
    if encoders:
        assert encoded.sum() <= attempts * 3
        assert encoded.sum() >= requests.images[r["status"] == state.COMPLETED].sum()
    if not cluster.prefill:  # every completed visit is a completed request, and the other way round
        assert (~encoded).sum() == len(done)
    sojourns = (visits["last_token"] - visits["sent"])[visits["status"] == state.COMPLETED].sum()
    little = fleet.replicas["outstanding_time"].sum()
    ended = fleet.aborted_time + fleet.replicas["given_up_time"].sum()
    assert little == pytest.approx(sojourns + ended, rel=1e-9, abs=1e-9)
    assert fleet.time_by_resource.sum() == pytest.approx(fleet.replicas["busy_time"].sum(), rel=1e-9, abs=1e-12)
    least = served.end * (1 - 1e-9) * bool(cluster.role_switch and not encoders)  # who changes its pool is paid for
    assert ((served.available >= least) & (served.available <= served.end + 1e-9)).all()


@pytest.mark.parametrize("first", range(0, SCENARIOS, BATCH))
def test_nothing_is_lost_or_counted_twice(first):
    """Random clusters, routers, hand-overs, scalers, limits, failures and clients, by seed."""
    for seed in range(first, first + BATCH):
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def a_scenario(draw: random.Random) -> dict:
    """A small chat on a cluster of real kinds of replicas, with some of all that there is."""
    cluster = draw.choice(
        [
            {"replicas": 3, "router": draw.choice(["round-robin", "power-of-two", "kv-aware", "weighted"])},
            {"kinds": [{"replicas": 2}, {"model": LARGE, "autoscaler": {"target": 2, "max": 3, "interval": 1}}]},
            {"prefill": {"hardware": draw.choice(["h100-sxm", "h200-sxm"])}, "decode": {"replicas": 2},
             "transfer": {"bandwidth": "10 GB/s", "overlap": draw.choice(["none", "layers"]),
                          "hand_over": draw.choice(["always", 300])}},
        ]
    )  # fmt: skip
    workload = {
        "num_requests": 100,
        "request_rate": draw.choice([5, 50]),
        "input_tokens": draw.choice([30, 400, 3000]),
        "output_tokens": draw.choice([2, 40]),
        "retries": 2,
        "models": {SMALL: 1} | ({LARGE: 1} if "kinds" in cluster else {}) | ({"law": 1} if draw.random() < 0.4 else {}),
    }
    lora = {"adapters": {"law": 16}} if "law" in workload["models"] else None
    if "kinds" in cluster and lora:
        cluster["kinds"][0]["lora"], lora = lora, None
    if draw.random() < 0.3:
        shape = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120}
        cluster |= {"encode": {"encoder": shape}, "transfer": cluster.get("transfer", {"bandwidth": "10 GB/s"})}
        workload["images"] = {"tokens": 100, "share": 0.5}
    if draw.random() < 0.3:
        cluster["failures"] = [{"mean_time_between": 5, "duration": 1}]
    if draw.random() < 0.3:
        cluster["admission"] = {"max_outstanding": 8}
    return {"model": SMALL, "hardware": "h100-sxm", "cluster": cluster, "workload": workload, "lora": lora}


@pytest.mark.parametrize("seed", range(24))
def test_laws_and_floors_hold_cluster_wide(seed):
    """Whole runs: `summarize` checks requests, blocks, tokens, time and Little's law; and nobody is faster than the
    bytes and FLOPs of its prompt and tokens at peak allow on the fastest replica that may serve it."""
    data = a_scenario(random.Random(seed))
    result = run(build_scenario(data, "test"))[0]
    summarize([result])
    parts = [d.placement for d, _ in deployments_of(result.scenario)]
    parts = [part for part in parts if part.model.name in (SMALL, LARGE)]
    r = result.requests[result.completed]
    ttft = {n: min(floor_ttft(part, int(n)) for part in parts) for n in set(r["prompt_tokens"].tolist())}
    assert (r["first_token"] - r["sent"] >= [ttft[n] for n in r["prompt_tokens"].tolist()]).all()
    itl = min(floor_itl(part, int(r["prompt_tokens"].min())) for part in parts)
    assert (r["last_token"] - r["first_token"] >= itl * (r["num_output_tokens"] - 1)).all()
