"""An endpoint in this process, for tests of `infersim serve`."""

# ruff: noqa: E402  (what follows needs the extra infersim[serve])
import asyncio
import contextlib
import http.client
import json
import threading
import time

import numpy as np
import pytest

for needed in ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "zmq"):
    pytest.importorskip(needed)

import uvicorn

from infersim.config.scenario import build_scenario
from infersim.serve.app import Endpoint
from infersim.serve.http import Bounded
from infersim.serve.live import Live
from infersim.serve.server import listen
from infersim.serve.text import Estimate

MODEL = "Llama-3.1-8B"


def scenario(replicas=1, router="round-robin", **more):
    load = {"request_rate": 10, "num_requests": 100, "input_tokens": 100, "output_tokens": {"uniform": [4, 30]}}
    cluster = {"replicas": replicas, "router": router}
    parts = {"model": MODEL, "hardware": "h100-sxm", "workload": load | {"max_tokens": "output_length"}}
    return build_scenario(parts | {"cluster": cluster} | more, "test")


class Asks:
    """What asks a port."""

    def __init__(self, port):
        self.port = port

    def ask(self, method, path, body=None, headers=None, port=None):
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=30)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def open(self, path, body, headers, port):
        """A connection on which a request has been sent."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def post(self, path, **body):
        status, data, _ = self.ask("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def stream(self, path, **body):
        """The events of a stream, and when each came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body | {"stream": True}))
            answer, events, times = connection.getresponse(), [], []
            assert answer.status == 200
            for line in answer:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    events.append(json.loads(line[6:]))
                    times.append(time.perf_counter())
            return events, np.array(times)
        finally:
            connection.close()


class Served(Asks):
    """An endpoint in a thread of its own."""

    def __init__(self, spec, speed=1.0, ports=False, kv_events=None):
        import uvloop

        self.loop = uvloop.new_event_loop()
        self.live = Live(spec, speed, self.loop)
        number = len(self.live.deployments) if ports else 1
        self.sockets = self._consecutive(number)
        self.port = self.sockets[0].getsockname()[1]
        if kv_events is not None:
            from infersim.serve.kv_events import KvEvents

            topics = [f"kv@127.0.0.1:{self.port + r}@{model}" for r, model in enumerate(self.live.models)]
            self.live.events = KvEvents(self.live, kv_events, topics)
        app = self.endpoint = Endpoint(self.live, Estimate(), self.port if ports else None)
        config = uvicorn.Config(app, http=Bounded, log_level="critical", lifespan="off", timeout_keep_alive=60)
        config.timeout_graceful_shutdown = 2
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._run)

    @staticmethod
    def _consecutive(number):
        while True:
            sockets = [listen("127.0.0.1", 0)]
            with contextlib.suppress(Exception):
                first = sockets[0].getsockname()[1]
                sockets += [listen("127.0.0.1", first + k) for k in range(1, number)]
                return sockets
            for sock in sockets:
                sock.close()

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve(sockets=self.sockets))
        if self.live.events is not None:
            self.loop.run_until_complete(self.live.events.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        for sock in self.sockets:
            sock.close()

    def replies(self):
        """What is being answered."""
        return self.endpoint.replies


def idle(served):
    """Nothing lives any more, and every block is free."""
    for _ in range(200):
        if not served.live.num_live:
            break
        time.sleep(0.02)
    served.ask("GET", "/simulate/state")
    fleet = served.live.fleet
    assert served.live.num_live == 0
    free = fleet.schedulers["free_blocks"].sum()
    assert free == ((fleet.knobs["num_gpu_blocks"] - 1) * fleet.knobs["ranks"]).sum()
    assert (fleet.schedulers["num_running"] == 0).all()
