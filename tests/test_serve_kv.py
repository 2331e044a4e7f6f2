"""KV events of `infersim serve`: what routers that score by prefix believe is what the caches hold."""

import concurrent.futures
import hashlib
import json
import time

import numpy as np
import pytest
from served import MODEL, Served, idle, scenario

from infersim.run import simulate
from infersim.serve import outcome
from infersim.serve.kv_events import SALTS

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")


class Subscriber:
    """A router's view: blocks by hash, from the events alone. Hashes its own, from token ids, as llm-d's does."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(b"kv@")
        self.sub.connect(endpoint)
        self.count, self.own, self.seqs = {}, {}, []

    def take(self, payload):
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.count.clear()
                case "BlockRemoved":
                    for one in event["block_hashes"]:
                        self.count[one] -= 1
                case "BlockStored":
                    parent, size = event["parent_block_hash"], event["block_size"]
                    assert parent is None or self.count.get(parent, 0) > 0
                    assert len(event["token_ids"]) == size * len(event["block_hashes"])
                    keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
                    for i, one in enumerate(event["block_hashes"]):
                        piece = event["token_ids"][i * size : (i + 1) * size]
                        text = hashlib.sha256(repr((self.own.get(parent), piece, keys[i])).encode()).hexdigest()
                        assert self.own.setdefault(one, text) == text  # one hash, one text
                        self.count[one] = self.count.get(one, 0) + 1
                        parent = one

    def listen(self, seconds=0.3):
        while self.sub.poll(seconds * 1e3):
            topic, seq, payload = self.sub.recv_multipart()
            assert topic.startswith(b"kv@127.0.0.1:")
            assert topic.endswith(b"@" + MODEL.encode())
            self.seqs.append(int.from_bytes(seq, "big"))
            self.take(payload)

    def match(self, ids, size=16):
        """Leading tokens that it believes are cached."""
        there, parent, n = {self.own[one] for one, k in self.count.items() if k > 0}, None, 0
        while n + size < len(ids):
            parent = hashlib.sha256(repr((parent, ids[n : n + size], None)).encode()).hexdigest()
            if parent not in there:
                break
            n += size
        return n

    def held(self):
        return {one: k for one, k in self.count.items() if k}


def free_endpoint():
    with zmq.Context() as context, context.socket(zmq.PUB) as one, context.socket(zmq.PUB) as other:
        while True:
            port = one.bind_to_random_port("tcp://127.0.0.1")
            try:
                other.bind(f"tcp://127.0.0.1:{port + 1}")
                return f"tcp://*:{port}", f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
            except zmq.ZMQError:
                one.unbind(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("seed", [0, 1])
def test_events_tell_what_the_cache_holds(seed):
    """Random conversations in a small cache: after them the events' blocks are the engine's, and a router that hashes
    token ids itself says beforehand how many tokens of a prompt will be found."""
    own, endpoint, replay = free_endpoint()
    spec = scenario(engine={"max_num_seqs": 8, "num_gpu_blocks_override": 400, "max_model_len": 2000})
    random = np.random.default_rng(seed)
    with Served(spec, kv_events=own) as served:
        view = Subscriber(endpoint)
        view.listen()
        stems = [random.integers(0, 9, 300).tolist() for _ in range(4)]

        def ask(k):
            prompt = (
                stems[k % 4][: int(random.integers(1, 300))]
                + random.integers(0, 9, int(random.integers(1, 200))).tolist()
            )
            salt = {"cache_salt": "s"} if k % 7 == 0 else {}
            return served.post(
                "/v1/completions", prompt=prompt, max_tokens=int(random.integers(1, 80)), ignore_eos=True, **salt
            )

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(60)))
        idle(served)
        view.listen()
        assert view.seqs == list(range(view.seqs[0], view.seqs[0] + len(view.seqs)))
        hashes = served.live.fleet.blocks["hash"][0].view("u8")
        expected = dict(zip(*np.unique(hashes[hashes != 0], return_counts=True), strict=True))
        assert view.held() == {int(one): int(k) for one, k in expected.items()}
        assert len(view.own) > len(view.held())  # some were overwritten
        for k in range(8):
            prompt = stems[k % 4][:200]
            believed = view.match(prompt)
            usage = served.post("/v1/completions", prompt=prompt, max_tokens=2, ignore_eos=True)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == believed
            view.listen(0.2)
        sources = json.loads(served.ask("GET", "/kv_event_sources")[1])
        assert (sources["0"]["endpoint"], sources["0"]["publisher"]) == (own, "zmq")

        with view.context.socket(zmq.REQ) as asked:
            late = Subscriber(endpoint)
            asked.connect(replay)
            asked.send((0).to_bytes(8, "big"))
            topic, seq, payload = asked.recv_multipart()
            assert (topic[:3], int.from_bytes(seq, "big")) == (b"kv@", 0)
        with view.context.socket(zmq.DEALER) as asked:
            asked.connect(replay)
            asked.send_multipart((b"", (0).to_bytes(8, "big")))
            seqs = []
            while True:
                _, topic, seq, payload = asked.recv_multipart()
                if int.from_bytes(seq, "big", signed=True) < 0:
                    break
                seqs.append(int.from_bytes(seq, "big"))
                late.take(payload)
            assert seqs == list(range(len(seqs)))
            assert late.held() == view.held()
        assert served.ask("POST", "/reset_prefix_cache")[0] == 200
        view.listen()
        assert not view.held()
        for one in (view, late):
            one.context.destroy(0)


class Groups(Subscriber):
    """The same of a model with several groups of layers: blocks by group and hash."""

    def take(self, payload):
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    self.count[event["group_idx"], one] -= 1
                continue
            assert event["type"] == "BlockStored"
            assert (event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")) == (
                ("sliding_window", 128) if event["group_idx"] == 0 else ("full_attention", None)
            )
            parent, size = event["parent_block_hash"], event["block_size"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for i, one in enumerate(event["block_hashes"]):
                piece = event["token_ids"][i * size : (i + 1) * size]
                text = hashlib.sha256(repr((self.own[parent] if parent else None, piece, None)).encode()).hexdigest()
                assert self.own.setdefault(one, text) == text  # one hash, one text, in every group
                self.count[event["group_idx"], one] = self.count.get((event["group_idx"], one), 0) + 1
                parent = one

    def match(self, ids, size=16):
        """Leading tokens of which the full layers have all blocks and the windows the last eight (127 keys)."""
        there, parent, found, run, n = {}, None, 0, 0, 0
        for (group, one), k in self.count.items():
            there.setdefault(group, set()).update({self.own[one]} if k > 0 else ())
        while n + size < len(ids):
            parent = hashlib.sha256(repr((parent, ids[n : n + size], None)).encode()).hexdigest()
            if parent not in there[1]:
                break
            n += size
            run = run + 1 if parent in there[0] else 0
            found = n if run >= 8 or run * size == n else found
        return found


@pytest.mark.parametrize("seed", [4, 5])
def test_events_of_several_groups_tell_what_each_holds(seed):
    """gpt-oss: layers that see 128 keys beside layers that see all. By group the events' blocks are the engine's, and
    by them a router says beforehand how much of a prompt will be found."""
    own, endpoint, _ = free_endpoint()
    engine = {"max_num_seqs": 8, "num_gpu_blocks_override": 500, "max_model_len": 2000}
    random, name = np.random.default_rng(seed), "gpt-oss-20b"
    with Served(scenario(model=name, engine=engine), kv_events=own) as served:
        view = Groups(endpoint)
        time.sleep(0.3)
        stems = [random.integers(0, 9, 600).tolist() for _ in range(4)]

        def ask(k):
            prompt = stems[k % 4][: int(random.integers(1, 600))] + [k] * int(random.integers(1, 200))
            return served.post("/v1/completions", prompt=prompt, max_tokens=int(random.integers(1, 80)))

        def heard(seconds=0.3):
            while view.sub.poll(seconds * 1e3):
                view.take(view.sub.recv_multipart()[2])

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(80)))
        idle(served)
        heard()
        hashes = served.live.fleet.blocks["hash"][0]
        expected = dict(zip(*np.unique(hashes[hashes != 0], return_counts=True), strict=True))
        found = {int(np.uint64(one).astype("i8") ^ SALTS[group]): k for (group, one), k in view.held().items()}
        assert found == {int(one): int(k) for one, k in expected.items()}
        assert {group for group, _ in view.held()} == {0, 1}
        lengths = []
        for k in range(12):
            prompt = stems[k % 4][: 150 + 40 * (k // 4)]
            lengths.append(view.match(prompt))
            usage = served.post("/v1/completions", prompt=prompt, max_tokens=2, ignore_eos=True)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == lengths[-1]
            heard(0.2)
        assert max(lengths) >= 128
        view.context.destroy(0)


def test_adapters_and_salts_are_extra_keys():
    own, endpoint, _ = free_endpoint()
    with Served(scenario(), kv_events=own) as served:
        served.ask("POST", "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/a"})
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.subscribe(b"")
            sub.connect(endpoint)
            time.sleep(0.2)
            served.post("/v1/completions", model="sql", prompt=[1] * 40, max_tokens=1, cache_salt="mine")
            assert sub.poll(2000)
            _, (event,), rank = msgspec.msgpack.decode(sub.recv_multipart()[2])
    assert rank == 0
    assert (event["lora_name"], event["medium"], event["group_idx"]) == ("sql", "GPU", 0)
    assert event["extra_keys"] == [["sql", "mine"], ["sql"]]
    assert event["token_ids"] == [1] * 32


def test_a_router_may_choose_the_data_parallel_rank():
    with Served(scenario(parallelism={"attention_data": 2})) as served:
        body = {"prompt": "a", "max_tokens": 2}
        for rank in ("1", "1", "0", "x", "1"):
            assert served.ask("POST", "/v1/completions", body, {"X-data-parallel-rank": rank})[0] == 200
        assert served.ask("POST", "/v1/completions", body, {"X-data-parallel-rank": "2"})[0] == 400
        assert served.live.fleet.requests["rank"][[0, 1, 2, 4]].tolist() == [1, 1, 0, 1]


def pools(prefill=1, decode=1, **transfer):
    link = {"bandwidth": "10 GB/s", "latency": "1 ms"} | transfer
    return {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}, "transfer": link}


def first_hop(served, prompt, **more):
    """The side-car's request to a prefill replica, and its answer's parameters."""
    nothing = {f"remote_{name}": None for name in ("engine_id", "block_ids", "host", "port")}
    wish = {"do_remote_decode": True, "do_remote_prefill": False} | nothing
    body = {"prompt": prompt, "max_tokens": 1, "stream": False, "kv_transfer_params": wish} | more
    status, data, _ = served.ask("POST", "/v1/completions", body, port=served.port + 1)
    assert status == 200, data
    return json.loads(data)["kv_transfer_params"]


def test_the_side_cars_two_hops():
    """What llm-d's routing side-car does: blocks stay where they were computed until they have been pulled, the first
    token comes after their bytes went over the link, and the decode replica computes one token of the prompt."""
    with Served(scenario(cluster=pools(bandwidth="1 GB/s")), ports=True) as served:
        prompt = list(range(2000))
        said = first_hop(served, prompt)
        assert said["do_remote_prefill"] is True
        assert {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "tp_size"} <= said.keys()
        assert len(said["remote_block_ids"][0]) == 125
        fleet = served.live.fleet
        assert fleet.schedulers["free_blocks"][1] == fleet.knobs["num_gpu_blocks"][1] - 1 - 125
        steps = int(fleet.replicas["num_scheduled_tokens"][0])
        began = time.perf_counter()
        whole = served.post("/v1/completions", prompt=prompt, max_tokens=5, ignore_eos=True, kv_transfer_params=said)
        assert 0.26 < time.perf_counter() - began < 3  # the client waited as long, and no timer went off late
        assert whole["usage"]["completion_tokens"] == 5
        assert int(fleet.replicas["num_scheduled_tokens"][0]) - steps == 5  # the last of the prompt, and four of output
        size = 125 * 16 * 2 * 32 * 8 * 128 * 2  # keys and values of 32 layers, 8 heads of 128, bf16
        ttft = whole["metrics"]["time_to_first_token_ms"] / 1e3
        assert size / 1e9 + 0.001 < ttft < size / 1e9 + 0.001 + 0.1
        idle(served)  # every block is free, on both
        page = served.ask("GET", "/metrics")[1].decode()
        assert 'vllm:nixl_xfer_time_seconds_count{model_name="Llama-3.1-8B",engine="0"} 1\n' in page
        assert f'vllm:nixl_bytes_transferred_sum{{model_name="Llama-3.1-8B",engine="0"}} {float(size)}\n' in page
        assert ',source="external_kv_transfer"} 1999\n' in page
        assert ',stage="in_progress"} 0\n' in page
        status, data, _ = served.ask("POST", "/v1/completions", {"prompt": prompt, "kv_transfer_params": said})
        assert (status, "no replica keeps" in json.loads(data)["error"]["message"]) == (500, True)
    with Served(scenario()) as served:
        assert served.ask("POST", "/v1/completions", {"prompt": "a", "kv_transfer_params": said})[0] == 400


def test_kept_blocks_are_freed_whatever_becomes_of_them():
    """Nobody comes for them, who came goes away while they are on their way, either replica dies."""
    with Served(scenario(cluster=pools(bandwidth="0.2 GB/s")), ports=True) as served:
        first_hop(served, list(range(500)))
        served.post("/simulate/speed", speed=1000)
        time.sleep(0.1)
        idle(served)  # the lease is over
        assert "nixl_num_kv_expired_reqs_total" in served.ask("GET", "/metrics", port=served.port + 1)[1].decode()
        assert served.live.hand_over.expired == [0, 1]
        served.post("/simulate/speed", speed=1)
        for crash in (None, 0, 1):
            said = first_hop(served, list(range(1000 + 100 * (crash or 0), 3000)))
            body = {"prompt": list(range(1000, 3000)), "max_tokens": 50, "kv_transfer_params": said, "stream": True}
            answer = []
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                done = pool.submit(served.ask, "POST", "/v1/completions", body, {"X-Request-Id": "one"})
                while not served.live.num_live:
                    time.sleep(0.005)
                time.sleep(0.1)
                if crash is None:
                    served.ask("POST", "/abort_requests", {"request_ids": ["cmpl-one"]})
                else:
                    served.post("/simulate/crash", replica=crash, duration=0.01)
                answer = done.result(20)
            assert answer[0] == (200 if crash is None else 503)
            idle(served)
            assert not served.live.hand_over.coming
            time.sleep(0.05)


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding"])
def test_pools_behind_one_port_are_the_pools_of_a_run(router):
    """Recorded and run offline: the same hand-overs, to the clock's resolution; at least while memory is enough."""
    cluster = pools(2, 2)
    cluster["prefill"]["router"] = cluster["decode"]["router"] = router
    spec = scenario(cluster=cluster)
    random = np.random.default_rng(5)
    with Served(spec) as served:
        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            for _ in range(40):
                body = {"prompt": random.integers(0, 9, int(random.integers(20, 3000))).tolist(), "ignore_eos": True}
                pool.submit(served.post, "/v1/completions", max_tokens=int(random.integers(2, 40)), **body)
                time.sleep(float(random.exponential(0.02)))
        idle(served)
        _, requests = outcome.traffic(served.live)
        live = outcome.result(served.live)
    again = simulate(spec, requests)
    assert len(live.requests) == 40
    for name in ("num_output_tokens", "prompt_tokens", "replica"):
        np.testing.assert_array_equal(again.requests[name], live.requests[name], name)
    for name in ("arrival", "scheduled", "first_token", "last_token"):
        np.testing.assert_allclose(again.requests[name], live.requests[name], atol=1e-6, err_msg=name)
