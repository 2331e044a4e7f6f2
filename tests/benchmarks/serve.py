"""How late `infersim serve` is, and how much it streams: a server and a client on 127.0.0.1, both on this machine.

    python tests/benchmarks/serve.py [--streams 500] [--replicas 8] [--seconds 15] [--factor 3.2]

Streams are spread over the replicas, each slowed by `factor` so that a stream has about 40 tokens/s; they begin one
after another in the first third of the time. Each process has a core of its own where there are two. Lateness is the
server's own figure; the client's share of the CPU stands beside it. Meanwhile another process reads /metrics.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from endpoint import endpoint

SCRAPE = """
import http.client, sys, time
port, seconds, took, running = int(sys.argv[1]), float(sys.argv[2]), [], 0.0
one = http.client.HTTPConnection("127.0.0.1", port)
time.sleep(seconds * 0.4)
for _ in range(int(seconds * 0.5 / 0.05)):
    time.sleep(0.05)
    began = time.perf_counter()
    one.request("GET", "/metrics")
    page = one.getresponse().read()
    took.append((time.perf_counter() - began) * 1e3)
    lines = [line for line in page.decode().splitlines() if ":num_requests_running{" in line]
    running = max(running, sum(float(line.split()[-1]) for line in lines))
took.sort()
print(f"/metrics, every 50 ms: {took[len(took) // 2]:.2f} ms (p50), {took[len(took) * 9 // 10]:.2f} ms (p90), of"
      f" {len(lines)} replicas with {running:.0f} running requests")
"""
"""what a router does meanwhile, in a process of its own"""


def ask(port: int, path: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=30) as answer:
        return answer.read()


async def stream(port: int, begin: float, until: float) -> int:
    """Chunks of a stream from `begin` to `until`."""
    await asyncio.sleep(begin - time.perf_counter())
    body = json.dumps({"prompt": [1] * 8, "max_tokens": 50_000, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    chunks = 0
    while time.perf_counter() < until:
        chunks += (await reader.read(65536)).count(b"data: ")
    writer.close()
    return chunks


async def load(port: int, streams: int, seconds: float) -> int:
    now = time.perf_counter()
    begins = [now + seconds / 3 * k / streams for k in range(streams)]
    return sum(await asyncio.gather(*(stream(port, begin, now + seconds) for begin in begins)))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("streams", 500), ("replicas", 8), ("seconds", 15), ("factor", 3.2)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if hasattr(os, "sched_setaffinity"):  # a core for each
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-1:])
        quiet["preexec_fn"] = lambda: os.sched_setaffinity(0, cores[:1])
    started = time.perf_counter()
    with endpoint("--set", f"cluster.replicas={given.replicas}", **quiet) as (server, port):
        print(f"start-up {time.perf_counter() - started:.2f} s")
        for replica in range(given.replicas):
            ask(port, "/simulate/slow", {"replica": replica, "factor": given.factor})
        scraping = subprocess.Popen([sys.executable, "-c", SCRAPE, str(port), str(given.seconds)])
        before = resource.getrusage(resource.RUSAGE_SELF)
        chunks = asyncio.run(load(port, given.streams, given.seconds)) * 6 / 5  # of a third, half the streams are there
        after = resource.getrusage(resource.RUSAGE_SELF)
        mine = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        state = json.loads(ask(port, "/simulate/state"))
        print(f"{chunks / given.seconds:,.0f} tokens/s, {chunks / given.seconds / given.streams:.1f} of each stream")
        print(f"lateness {state['lateness']}")
        print(f"the client took {mine / given.seconds:.2f} of a core; load average {os.getloadavg()[0]:.1f}")
        scraping.wait(30)
        server.terminate()
        server.wait(30)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"the server took {used.ru_utime + used.ru_stime:.1f} s of CPU in all, start-up and report included")


if __name__ == "__main__":
    main()
