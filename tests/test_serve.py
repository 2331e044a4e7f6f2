"""`infersim serve`: real HTTP on 127.0.0.1, in this process and as a command."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from served import MODEL, Asks, Served, idle, scenario

from infersim.engine.compiled.state import ABORTED, COMPLETED
from infersim.run import simulate
from infersim.serve import outcome
from infersim.serve.ask import Ask
from infersim.serve.exposition import exposition
from infersim.serve.live import Live
from infersim.serve.server import listen
from infersim.serve.text import WORDS, Estimate, load_tokenizer, names_of
from infersim.workload.requests import Requests


@pytest.fixture(scope="module")
def served():
    with Served(scenario()) as one:
        yield one


def test_about_itself(served):
    assert served.ask("GET", "/health")[0] == served.ask("GET", "/ping")[0] == 200
    card = json.loads(served.ask("GET", "/v1/models")[1])["data"][0]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (MODEL, "model", "vllm", 131072)
    assert json.loads(served.ask("GET", "/version")[1])["version"] == "0.33"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_counts_of_both_ways_and_text_that_encodes_to_them(served, path):
    chat = "chat" in path
    text = "tell me more of the world"
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    asked |= {"model": MODEL, "max_tokens": 12, "ignore_eos": True}
    whole = served.post(path, **asked)
    choice = whole["choices"][0]
    said = choice["message"]["content"] if chat else choice["text"]
    assert whole["usage"]["completion_tokens"] == 12 == len(Estimate().encode(said))
    assert served.post("/tokenize", prompt=said)["count"] == 12
    assert choice["finish_reason"] == "length"
    events, _ = served.stream(path, **asked, stream_options={"include_usage": True})
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    if chat:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        chunks = chunks[1:]
        texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    else:
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == last["usage"]["completion_tokens"] == 12  # no chunk without a token
    assert len(Estimate().encode("".join(texts))) == 12
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 11 + ["length"]
    assert set(last["metrics"]) >= {"time_to_first_token_ms", "queue_time_ms", "mean_itl_ms"}


def test_tokens_come_when_the_engine_would_give_them(served):
    """The client's own gaps are those of the simulated steps; a hundredth of a step is never waited for less."""
    asked = {"model": MODEL, "prompt": "of", "max_tokens": 60, "ignore_eos": True}
    events, times = served.stream("/v1/completions", **asked, stream_options={"include_usage": True})
    itl = events[-1]["metrics"]["mean_itl_ms"] / 1e3
    assert np.diff(times[:60]).mean() == pytest.approx(itl, abs=0.003)
    assert itl > 0.004  # 16 GB of weights at 3.35 TB/s


def test_continuous_usage_choices_logprobs_ids_tools_and_json(served):
    asked = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}
    events, _ = served.stream("/v1/completions", **asked, stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[0]["usage"]["prompt_tokens"] == 3
    whole = served.post("/v1/completions", **asked, n=3, logprobs=1, return_token_ids=True)
    assert [one["index"] for one in whole["choices"]] == [0, 1, 2]
    assert whole["usage"] | {"completion_tokens": 18, "prompt_tokens": 3} == whole["usage"]
    for one in whole["choices"]:
        assert len(one["token_ids"]) == len(one["logprobs"]["tokens"]) == 6
        assert served.post("/detokenize", tokens=one["token_ids"])["prompt"] == one["text"]
    events, _ = served.stream("/v1/completions", **asked, stream_interval=4)
    texts = [event["choices"][0]["text"] for event in events]
    assert [len(Estimate().encode(text)) for text in texts] == [1, 4, 1]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "of"}], "max_tokens": 8, "ignore_eos": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = served.post("/v1/chat/completions", **chat, tools=[tool], tool_choice="required")["choices"][0]
    assert call["finish_reason"] == "tool_calls"
    assert json.loads(call["message"]["tool_calls"][0]["function"]["arguments"])["text"]
    one = served.post("/v1/chat/completions", **chat, response_format={"type": "json_object"})
    assert json.loads(one["choices"][0]["message"]["content"])["text"]


def test_a_prompt_that_was_there_before_is_cached(served):
    ids = list(range(1000, 1100))
    asked = {"model": MODEL, "prompt": ids, "max_tokens": 2}
    details = [served.post("/v1/completions", **asked)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert [one["cached_tokens"] for one in details] == [0, 96]  # six whole blocks of 16
    salted = served.post("/v1/completions", **asked, cache_salt="mine")["usage"]["prompt_tokens_details"]
    assert salted["cached_tokens"] == 0


WRONG = [
    (b"{", 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b"\xff\xfe", 400, "JSON"),
    (b"[]", 400, "must be a JSON object"),
    ({"model": "nope", "prompt": "a"}, 404, "does not exist"),
    ({"prompt": ""}, 400, "prompt must be"),
    ({"prompt": {"a": 1}}, 400, "prompt must be"),
    ({"prompt": [1, "a"]}, 400, "prompt must be"),
    ({"prompt": [-1]}, 400, "prompt must be"),
    ({"prompt": "a", "n": 10**9}, 400, "at most 128"),
    ({"prompt": "a", "max_tokens": 10**18}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**9}, 400, "context length"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 4}, 400, "min_tokens"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream must be"),
    ({"prompt": "a", "stream_options": 3}, 400, "stream_options"),
    ({"prompt": [5] * 131073}, 400, "context length"),
]


@pytest.mark.parametrize(("body", "status", "message"), WRONG)
def test_what_cannot_be_is_an_error_in_openais_form(served, body, status, message):
    got, data, _ = served.ask("POST", "/v1/completions", body)
    error = json.loads(data)["error"]
    assert got == status == error["code"]
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def waits(served, seconds):
    """The longest wait of a client that asks for the server's health again and again."""
    longest, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        assert served.ask("GET", "/health")[0] == 200
        longest = max(longest, time.perf_counter() - began)
    return longest


def test_other_hostile_things(served):
    assert served.ask("POST", "/v1/completions", b" " * (16 * 2**20 + 1))[0] == 413
    for path in ("/../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%00", "/v1/../metrics"):
        assert served.ask("GET", path)[0] == 404
    assert served.ask("GET", "/v1/completions")[0] == 405
    assert served.ask("POST", "/v1/completions", {"prompt": "a"}, {"X-Return-Error": "429"})[0] == 429
    half = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    for one in half:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    assert served.post("/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    for one in half:
        one.close()
    for junk in (b"\0" * 1000, b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as one:
            one.sendall(junk)
            assert one.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 505"))
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as one:  # a head without an end
        one.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                one.sendall(b"X-More: " + b"y" * 1000 + b"\r\n")
                time.sleep(0.0001)
            pytest.fail("the server took 10 MB of head")


def test_huge_texts_are_refused_before_they_are_read(served):
    """A text that cannot fit costs its sender's time, not everybody's."""
    text = "the world " * 1_600_000
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        chats = {"messages": [{"role": "user", "content": text}]}
        asked = [pool.submit(served.ask, "POST", "/v1/completions", {"prompt": text}) for _ in range(2)]
        asked += [pool.submit(served.ask, "POST", "/v1/chat/completions", chats) for _ in range(2)]
        longest = waits(served, 2)
        for one in asked:
            status, data, _ = one.result()
            assert (status, "maximum context length" in json.loads(data)["error"]["message"]) == (400, True)
    assert longest < 2  # this process writes and reads those texts too


def test_a_slow_reader_costs_nothing():
    """A client that does not read holds no more than its socket's buffers: what it missed comes merged."""
    with Served(scenario(), speed=50.0) as served:
        body = json.dumps({"prompt": "of", "max_tokens": 60_000, "ignore_eos": True, "stream": True}).encode()
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", served.port))
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert one.recv(100).startswith(b"HTTP/1.1 200")
            deadline = time.time() + 60
            while served.live.num_live and time.time() < deadline:
                time.sleep(0.05)
            (reply,) = served.replies().values()
            assert not served.live.num_live  # it has been generated, and waits
            assert len(reply._waiting) <= 1
            answer = b""
            one.settimeout(20)
            while b"data: [DONE]" not in answer:
                answer += one.recv(1 << 20)
        text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", answer)
        events = [json.loads(line[6:]) for line in text.split(b"\n\n") if line.startswith(b"data: {")]
        assert len(events) < 60_000  # the rest was merged into few
        idle(served)


@pytest.mark.slow
def test_ten_thousand_connections():
    """Idle ones, and ones that begin and never end: others are served meanwhile, memory stays small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_200:
        pytest.skip("a process may not have so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (10_200, hard))

    def memory():
        text = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text).group(1))  # kB

    try:
        with command() as (process, one):
            one.post("/v1/completions", prompt="a", max_tokens=2)
            before = memory()
            many = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(10_000)]
            for connection in many[::2]:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert one.post("/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
            assert waits(one, 2) < 1
            assert memory() - before < 400_000  # 40 kB a connection
            for connection in many:
                connection.close()
            time.sleep(1)
            assert one.post("/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def command(*more):
    """`infersim serve` as a process, and what asks it."""
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    line = [sys.executable, "-m", "infersim", "serve", "llama-8b-h100", "--port", str(port), *more]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        asked = Asks(port)
        for _ in range(300):
            with contextlib.suppress(OSError):
                if asked.ask("GET", "/health")[0] == 200:
                    break
            time.sleep(0.1)
        yield process, asked
    finally:
        process.kill()
        process.communicate()


GOLDEN = (Path(__file__).parent / "vllm_metrics.txt").read_text()
"""names, types and labels of vLLM 0.33, beside model_name and engine"""
OLD = {"gpu_cache_usage_perc": ("gauge", set()), "time_per_output_token_seconds": ("histogram", set())}
"""names that it has dropped and others still ask for"""


def golden(*parts):
    """name -> (type, labels) of some parts of the list."""
    found, part = {}, ""
    for line in GOLDEN.splitlines():
        if line.startswith("#"):
            part = line.removeprefix("# ")
        elif part in parts:
            name, kind, *labels = line.split()
            found[name] = (kind, set(labels))
    return found


def shape_of(family):
    labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
    return family.type, labels


def test_metrics_have_vllms_names_and_hold(served):
    parser = pytest.importorskip("prometheus_client.parser")
    served.post("/v1/completions", prompt="a", max_tokens=5, ignore_eos=True)
    page = served.ask("GET", "/metrics")[1].decode()
    families = {family.name.removeprefix("vllm:"): family for family in parser.text_string_to_metric_families(page)}
    assert {name: shape_of(family) for name, family in families.items()} == golden("always") | OLD
    for name, family in families.items():
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            assert (sample.labels.get("engine") == "0") == (name != "admission_rejections")
    requests = served.live.fleet.requests
    done = requests[requests["status"] == COMPLETED]

    def value(name, suffix, **labels):
        return sum(
            s.value
            for s in families[name].samples
            if s.name == f"vllm:{name}{suffix}" and labels.items() <= s.labels.items()
        )

    assert value("generation_tokens", "_total") == requests["num_output_tokens"].sum()
    assert value("request_success", "_total") == len(requests)
    assert value("e2e_request_latency_seconds", "_count") == len(done)
    assert value("time_to_first_token_seconds", "_count") == (requests["num_output_tokens"] > 0).sum()
    taken = (done["last_token"] - done["sent"]).sum()
    assert value("e2e_request_latency_seconds", "_sum") == pytest.approx(taken)


def test_metrics_take_less_than_two_milliseconds_at_a_thousand_running_requests():
    """Of this thread's CPU, at best: routers read them every 50 ms."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        live = Live(scenario(engine={"max_num_seqs": 1024}), 1e-3, loop)
        for i in range(1000):
            live.submit(Ask(8, 10_000, 10_000, (i,), (8,)), 0, lambda *_: None, lambda *_: [])
        live.now(1.0)
        took = []
        for k in range(30):
            live.now(1.1 + 0.05 * k)
            began = time.thread_time()
            page = exposition(live, [0])
            took.append(time.thread_time() - began)
        assert f'vllm:num_requests_running{{model_name="{MODEL}",engine="0"}} 1000\n'.encode() in page
        assert min(took) < 0.002


def families_of(page, engine):
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        family.name.removeprefix(f"{engine}:"): family
        for family in parser.text_string_to_metric_families(page.decode())
    }


def test_sglang_presets_have_sglangs_names_and_routes():
    """Names that routers ask for; /generate counts as the records do; a hit in the cache is told."""
    names = {"num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "cache_hit_rate",
             "cache_config_info", "prompt_tokens", "generation_tokens", "cached_tokens", "num_requests",
             "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
             "e2e_request_latency_seconds"}  # fmt: skip
    with Served(scenario(engine={"preset": "sglang-0.5"})) as served:
        body = {"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 7, "ignore_eos": True}}
        status, data = served.ask("POST", "/generate", body)[:2]
        assert status == 200
        answer = json.loads(data)
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 7
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
        again = json.loads(served.ask("POST", "/generate", body)[1])
        assert again["meta_info"]["cached_tokens"] >= 64
        events = served.ask("POST", "/generate", body | {"stream": True})[1].decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["meta_info"]["completion_tokens"] == 7
        assert json.loads(served.ask("GET", "/get_model_info")[1])["is_generation"]
        families = families_of(served.ask("GET", "/metrics")[1], "sglang")
        assert families.keys() == names
        (total,) = [s for s in families["generation_tokens"].samples if s.name.endswith("_total")]
        assert total.value == 21
        assert served.ask("POST", "/flush_cache")[0] == 200
        assert json.loads(served.ask("POST", "/generate", body)[1])["meta_info"]["cached_tokens"] == 0


def test_accepted_drafts_are_counted_by_position():
    """Every token is either a step's own or an accepted draft; later positions are accepted no more often."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": 0.8}}
    with Served(scenario(speculation=drafts)) as served:
        served.post("/v1/completions", prompt="a", max_tokens=200, ignore_eos=True)
        families = families_of(served.ask("GET", "/metrics")[1], "vllm")
        assert {name: shape_of(families[name]) for name in golden("with speculation")} == golden("with speculation")
        samples = [s for s in families["spec_decode_num_accepted_tokens_per_pos"].samples if s.name.endswith("_total")]
        accepted = [s.value for s in sorted(samples, key=lambda s: int(s.labels["position"]))]
        assert len(accepted) == 3
        assert accepted == sorted(accepted, reverse=True)
        assert accepted[0] > 0
        assert sum(accepted) + served.live.counts[0].chunks == 200


def test_tokens_in_and_out(served):
    """vLLM's /inference/v1/generate: as many ids as were asked for, streamed or not."""
    body = {"token_ids": list(range(50)), "sampling_params": {"max_tokens": 9, "ignore_eos": True}}
    answer = json.loads(served.ask("POST", "/inference/v1/generate", body)[1])
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == 9
    events = served.ask("POST", "/inference/v1/generate", body | {"stream": True})[1].decode().strip().split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["token_ids"] for event in events[:-1]]
    assert sum(map(len, pieces)) == 9
    assert served.ask("POST", "/inference/v1/generate", {"token_ids": "x"})[0] == 400


def test_adapters_are_models(served):
    """Loaded, an adapter is listed with its parent and answers, with a cache of its own; unloaded, it is unknown."""
    adapter = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    assert served.ask("POST", "/v1/load_lora_adapter", adapter)[0] == 200
    assert served.ask("POST", "/v1/load_lora_adapter", adapter)[0] == 400
    cards = json.loads(served.ask("GET", "/v1/models")[1])["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("sql", MODEL)]
    prompt = list(range(500, 600))
    for model, cached in ((MODEL, 0), ("sql", 0), ("sql", 96)):
        answer = served.post("/v1/completions", model=model, prompt=prompt, max_tokens=2, ignore_eos=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    families = families_of(served.ask("GET", "/metrics")[1], "vllm")
    assert shape_of(families["lora_requests_info"]) == golden("with adapters")["lora_requests_info"]
    assert families["lora_requests_info"].samples[0].labels["max_lora"] == "1"
    assert served.ask("POST", "/v1/unload_lora_adapter", adapter)[0] == 200
    assert served.ask("POST", "/v1/unload_lora_adapter", adapter)[0] == 404
    assert served.ask("POST", "/v1/completions", {"model": "sql", "prompt": "a"})[0] == 404


def test_pause_sleep_and_reset(served):
    """A pause ends what runs and holds back what comes; so does sleep, which forgets the cache."""
    body = {"prompt": list(range(1000, 1100)), "max_tokens": 50_000, "ignore_eos": True}
    found = []
    long = threading.Thread(target=lambda: found.append(json.loads(served.ask("POST", "/v1/completions", body)[1])))
    long.start()
    while not served.live.num_live:
        time.sleep(0.01)
    time.sleep(0.1)
    assert served.ask("POST", "/pause")[0] == 200
    long.join(10)
    assert found[0]["choices"][0]["finish_reason"] == "abort"
    assert json.loads(served.ask("GET", "/is_paused")[1]) == {"is_paused": True}
    later = threading.Thread(
        target=lambda: found.append(json.loads(served.ask("POST", "/v1/completions", body | {"max_tokens": 3})[1]))
    )
    later.start()
    time.sleep(0.2)
    assert len(found) == 1
    assert served.ask("POST", "/resume")[0] == 200
    later.join(10)
    assert found[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert served.ask("POST", "/sleep?level=1")[0] == 200
    states = families_of(served.ask("GET", "/metrics")[1], "vllm")["engine_sleep_state"].samples
    assert {s.labels["sleep_state"] for s in states if s.value} == {"weights_offloaded"}
    assert served.ask("POST", "/wake_up")[0] == 200
    answer = served.post("/v1/completions", **(body | {"max_tokens": 3}))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert served.ask("POST", "/reset_prefix_cache")[0] == 200
    answer = served.post("/v1/completions", **(body | {"max_tokens": 3}))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for path in ("/pause?mode=x", "/sleep?level=9"):
        assert served.ask("POST", path)[0] == 400
    idle(served)


def test_admission_holds_back_and_refuses():
    """cluster.admission: so many run, so many wait, further ones are told to come again; none is lost, and their
    waiting counts."""
    few = {"replicas": 1, "admission": {"max_outstanding": 2, "max_queue": 3}}
    with Served(scenario(cluster=few)) as served:
        body = {"prompt": list(range(50)), "max_tokens": 30, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: served.ask("POST", "/v1/completions", body), range(12)))
        refused = [answer for answer in answers if answer[0] == 429]
        done = [answer for answer in answers if answer[0] == 200]
        assert len(refused) + len(done) == 12
        assert len(done) >= 5
        assert refused
        assert served.live.fleet.num_requests == len(done)
        families = families_of(served.ask("GET", "/metrics")[1], "vllm")
        total = sum(s.value for s in families["admission_rejections"].samples if s.name.endswith("_total"))
        assert total == len(refused)
        requests = outcome.result(served.live).requests
        assert (requests["arrival"] <= requests["sent"]).all()
        assert (requests["sent"] - requests["arrival"]).max() > 0.05
        idle(served)


def test_queue_limits_refuse():
    """vLLM's max_num_queued_reqs counts what runs and what waits, max_num_queued_tokens prompts without a token."""
    few = {"replicas": 1, "admission": {"max_num_queued_reqs": 3, "max_num_queued_tokens": 5000}}
    with Served(scenario(cluster=few)) as served:
        body = {"prompt": [1] * 50, "max_tokens": 40, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda _: served.ask("POST", "/v1/completions", body), range(9)))
        assert {answer[0] for answer in answers} == {200, 503}
        assert all(answer[2]["retry-after"] == "1" for answer in answers if answer[0] == 503)
        assert served.ask("POST", "/v1/completions", body | {"n": 4})[0] == 503
        idle(served)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            longs = {"prompt": [2] * 60_000, "max_tokens": 1}
            one = pool.submit(served.ask, "POST", "/v1/completions", longs)
            while not served.live.num_live:
                time.sleep(0.001)
            assert served.ask("POST", "/v1/completions", body)[0] == 503
            assert one.result()[0] == 200
        families = families_of(served.ask("GET", "/metrics")[1], "vllm")
        refused = {s.labels["reason"]: s.value for s in families["admission_rejections"].samples}
        assert refused["max_num_queued_reqs"] == sum(answer[0] == 503 for answer in answers) + 1
        assert refused["max_num_queued_tokens"] == 1


def leave(port, number, tokens=100_000):
    """Open streams, read a first piece of each, and go away."""
    body = json.dumps({"prompt": "of the world", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for one in sockets:
        one.sendall(head + body)
    for one in sockets:
        assert one.recv(64).startswith(b"HTTP/1.1 200")
        one.close()


def test_who_goes_away_is_aborted_and_its_blocks_are_free(served):
    before = served.live.aborted
    leave(served.port, 30)
    idle(served)
    assert served.live.aborted == before + 30


@pytest.mark.slow
def test_ten_thousand_aborted_streams_leave_nothing():
    with Served(scenario()) as one:
        leave(one.port, 100)
        idle(one)
        tasks = len(asyncio.all_tasks(one.loop))
        for _ in range(100):
            leave(one.port, 100)
        idle(one)
        assert one.live.aborted == 10_100
        time.sleep(0.5)
        assert len(asyncio.all_tasks(one.loop)) <= tasks + 5


def traffic(served, number, random):
    """Clients of every kind, some of which go away."""

    def client(k):
        body = {"prompt": [int(random_ids[k] % 5)] * int(lengths[k]), "max_tokens": int(outputs[k]), "stream": True}
        body |= {"priority": 0, "ignore_eos": True, "model": MODEL}
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        if leaves[k]:
            answer.read(64)
            connection.close()
        else:
            answer.read()
            connection.close()

    random_ids, lengths = random.integers(0, 10, number), random.integers(1, 3000, number)
    outputs, leaves = random.integers(1, 60, number), random.random(number) < 0.1
    threads = [threading.Thread(target=client, args=(k,)) for k in range(number)]
    for thread in threads:
        thread.start()
        time.sleep(float(random.exponential(0.005)))
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("replicas", "router"), [(1, "round-robin"), (3, "round-robin"), (2, "least-outstanding")])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_engine_gives_the_same_answers(replicas, router, seed, tmp_path):
    """What was recorded, run offline, has the same schedule, up to the clock's resolution."""
    spec = scenario(replicas, router, engine={"max_num_seqs": 8, "max_num_batched_tokens": 1024})
    with Served(spec, speed=1.0) as one:
        traffic(one, 60, np.random.default_rng(seed))
        idle(one)
        rows, requests = outcome.traffic(one.live)
        records = one.live.fleet.requests[rows]
        outcome.write_trace(one.live, tmp_path / "trace.jsonl")
    assert len(rows) == 60
    first = int(np.argmax(records["status"] == ABORTED)) if (records["status"] == ABORTED).any() else len(rows)
    # after a client has gone nothing need be equal: a trace cannot say when
    began = records["arrival"][first:].min(initial=np.inf)
    gone = records["last_token"][records["status"] == ABORTED].min(initial=np.inf)
    again = simulate(spec, requests).requests
    kept = records["last_token"] < min(began, gone)
    for name in ("num_output_tokens", "num_cached_tokens", "num_preemptions", "last_step", "replica"):
        np.testing.assert_array_equal(again[name][kept], records[name][kept], name)
    for name in ("scheduled", "first_token", "last_token"):
        np.testing.assert_allclose(again[name][kept], records[name][kept], atol=1e-9)
    load = spec.workload.model_copy(
        update={"trace": str(tmp_path / "trace.jsonl"), "request_rate": None, "input_tokens": None,
                "output_tokens": None, "num_requests": None}
    )  # fmt: skip
    from infersim.run import run

    result = run(spec.model_copy(update={"workload": load}))[0]
    np.testing.assert_array_equal(result.requests["prompt_tokens"], requests.prompt_tokens)
    np.testing.assert_allclose(result.requests["arrival"], requests.arrival - requests.arrival[0], atol=1e-9)


def test_without_aborts_every_step_is_the_same():
    spec = scenario(1, engine={"max_num_seqs": 4, "max_num_batched_tokens": 512})
    with Served(spec, speed=1.0) as one:
        random = np.random.default_rng(3)
        threads = []
        for _ in range(40):
            body = {"prompt": [1] * int(random.integers(1, 2000)), "max_tokens": int(random.integers(1, 40))}
            body["ignore_eos"] = True  # else the scheduler knows a max_tokens that a trace does not have
            threads.append(threading.Thread(target=one.post, args=("/v1/completions",), kwargs=body))
            threads[-1].start()
            time.sleep(float(random.exponential(0.01)))
        for thread in threads:
            thread.join()
        rows, requests = outcome.traffic(one.live)
        live, steps = one.live.fleet.requests[rows], int(one.live.fleet.replicas["num_steps"][0])
        result = outcome.result(one.live)
    again = simulate(spec, requests)
    assert again.num_steps == steps == result.num_steps
    for name in ("num_cached_tokens", "num_preemptions", "last_step", "num_output_tokens"):
        np.testing.assert_array_equal(again.requests[name], live[name], name)
    for name in ("sent", "scheduled", "first_token", "last_token"):
        np.testing.assert_allclose(again.requests[name], live[name], atol=1e-9)


@pytest.mark.slow
def test_twenty_times_as_fast_keeps_order_and_times():
    """150 s of arrivals in eight seconds: simulated times within 2 % of those that the arrivals have offline."""
    spec, random = scenario(), np.random.default_rng(7)
    planned = np.arange(250) * 0.6
    prompt, output = random.integers(50, 2000, 250), random.integers(20, 400, 250)
    with Served(spec, speed=20.0) as one:
        clients = [http.client.HTTPConnection("127.0.0.1", one.port, timeout=60) for _ in planned]
        for client in clients:
            client.connect()
        served_from = one.live.clock.now() + 10.0
        for k, client in enumerate(clients):
            time.sleep(max((served_from + planned[k] - one.live.clock.now()) / 20, 0))
            body = {"prompt": [k] * int(prompt[k]), "max_tokens": int(output[k]), "ignore_eos": True}
            client.request("POST", "/v1/completions", json.dumps(body))
        for client in clients:
            assert client.getresponse().status == 200
            client.close()
        live = outcome.result(one.live).requests
    np.testing.assert_array_equal(live["prompt_tokens"], prompt)  # in their order
    again = simulate(spec, Requests(planned, prompt.astype("i4"), output.astype("i4"), np.arange(250))).requests
    for records in (live, again):
        records["first_token"] -= records["arrival"]
        records["last_token"] -= records["arrival"]
    for name in ("first_token", "last_token"):
        assert live[name].mean() == pytest.approx(again[name].mean(), rel=0.02)


def test_a_crash_loses_requests_and_the_replica_comes_back():
    with Served(scenario(2), ports=True) as one:
        done = []
        asked = {"prompt": "a", "max_tokens": 10_000, "ignore_eos": True}
        thread = threading.Thread(target=lambda: done.append(one.ask("POST", "/v1/completions", asked)))
        thread.start()
        while not one.live.num_live:
            time.sleep(0.01)
        assert one.post("/simulate/crash", replica=0, duration=0.5)["lost"] == 1
        assert one.ask("GET", "/health")[0] == 503
        assert one.ask("GET", "/health", port=one.port + 1)[0] == 200
        status, _, headers = one.ask("POST", "/v1/completions", {"prompt": "a"})
        assert (status, headers["retry-after"]) == (503, "1")
        thread.join()
        assert done[0][0] == 503
        time.sleep(0.6)
        assert one.ask("GET", "/health")[0] == 200
        assert one.post("/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
        idle(one)
        assert json.loads(one.ask("GET", "/simulate/result")[1])["metrics"]


def test_a_slow_replica_and_speed():
    with Served(scenario()) as one:
        asked = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
        plain = one.post("/v1/completions", **asked)["metrics"]["mean_itl_ms"]
        one.post("/simulate/slow", replica=0, factor=3)
        slow = one.post("/v1/completions", **asked)["metrics"]["mean_itl_ms"]
        assert slow == pytest.approx(3 * plain, rel=0.1)
        one.post("/simulate/slow", replica=0, factor=1)
        one.post("/simulate/speed", speed=20)
        started = time.perf_counter()
        fast = one.post("/v1/completions", prompt="a", max_tokens=1000, ignore_eos=True)["metrics"]
        assert fast["mean_itl_ms"] == pytest.approx(plain, rel=0.02)
        assert time.perf_counter() - started < 1000 * plain / 1e3 / 2


def test_text():
    estimate = load_tokenizer(None)
    for text in ("of", "The quick brown föx", "a  b\n", "", " the of and", "x" * 1000, "日本語"):
        assert estimate.decode(estimate.encode(text)) == text
    every = "".join(f" {word}" for word in WORDS) * 2
    assert len(estimate.encode(every)) == 2 * len(WORDS)
    names, lengths = names_of([1] * 40, "m")
    longer, _ = names_of([1] * 48, "m")
    assert lengths == [16, 16, 8]
    assert names[:2] == longer[:2]
    assert names[2] != longer[2]
    assert min(names) >= 0


def test_the_command(tmp_path):
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "infersim", "serve", "llama-8b-h100", "--port", str(port)]
    command += ["--record", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(300):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                with contextlib.closing(connection):
                    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 3}))
                    assert connection.getresponse().status == 200
                break
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "requests   1 of 1" in out
    assert "late" in out
    assert json.loads((tmp_path / "t.jsonl").read_text())["output_length"] >= 1
    assert (tmp_path / "out" / "result.json").exists()
    taken = subprocess.run([*command[:5], "--port", "99999"], capture_output=True, text=True)
    assert taken.returncode == 2


def test_the_openai_package():
    openai = pytest.importorskip("openai")
    with Served(scenario()) as one:

        async def many():
            async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none") as client:

                async def chat():
                    stream = await client.chat.completions.create(
                        model=MODEL,
                        messages=[{"role": "user", "content": "of the world"}],
                        max_completion_tokens=20,
                        stream=True,
                        stream_options={"include_usage": True},
                        extra_body={"ignore_eos": True},
                    )
                    chunks = [chunk async for chunk in stream]
                    said = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
                    return chunks[-1].usage.completion_tokens, len(Estimate().encode(said))

                assert (await asyncio.gather(*(chat() for _ in range(200)))) == [(20, 20)] * 200
                with pytest.raises(openai.NotFoundError):
                    await client.completions.create(model="nope", prompt="a")
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model=MODEL, prompt="a", max_tokens=10**9)

        asyncio.run(many())
        idle(one)


def test_what_only_a_run_can_have_is_refused():
    from infersim.config.errors import InputError

    spec = scenario()
    cluster = spec.cluster.model_copy(update={"encode": SimpleNamespace(autoscaler=None)})
    with contextlib.closing(asyncio.new_event_loop()) as loop, pytest.raises(InputError, match="encode"):
        Live(spec.model_copy(update={"cluster": cluster}), 1.0, loop)
