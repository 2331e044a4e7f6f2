"""KV events of `infersim serve`: what routers that score by prefix believe is what the caches hold."""

import concurrent.futures
import hashlib
import json
import time

import numpy as np
import pytest
from served import MODEL, Served, idle, scenario

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
                    for i, one in enumerate(event["block_hashes"]):
                        piece = event["token_ids"][i * size : (i + 1) * size]
                        text = hashlib.sha256(repr((self.own.get(parent), piece)).encode()).hexdigest()
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
            parent = hashlib.sha256(repr((parent, ids[n : n + size])).encode()).hexdigest()
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
