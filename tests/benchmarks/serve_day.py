"""A day of traffic against `infersim serve`, as fast as it goes: does the clock drift, does memory grow?

    python tests/benchmarks/serve_day.py [--hours 24] [--rate 0.03] [--speed 1440]
    python tests/benchmarks/serve_day.py --trace azure2023_conv.csv.gz --speed 30

Without a trace arrivals rise and fall over the day, and lengths are like Azure's conversations (log-normal, medians
1,020 and 129 tokens). A trace that is shorter than the day is played again from its start.
Drift is how much later requests came than they were meant to, in the last hour against the first; memory is what the
server holds more at the end than after a quarter, per request between.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from endpoint import endpoint

from infersim.config.scenario import build_scenario
from infersim.workload.build import build_requests


def ask(port: int, path: str) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.loads(answer.read() or b"{}")


def memory(pid: int) -> float:
    """MB that a process holds."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1e3  # type: ignore[index]


def day(hours: float, rate: float) -> list[tuple[float, int, int]]:
    """Arrival (simulated s), prompt and output tokens of each request."""
    draw, time_, found = random.Random(1), 0.0, []
    while True:
        time_ += draw.expovariate(2 * rate)
        if time_ > hours * 3600:
            return found
        if draw.random() < 0.5 * (1 + 0.8 * math.sin(2 * math.pi * time_ / 86400)):
            prompt, output = (
                min(max(int(draw.lognormvariate(math.log(m), s)), 1), 8000) for m, s in ((1020, 1), (129, 1))
            )
            found.append((time_, prompt, min(output, 1000)))


def played(trace: str, hours: float) -> list[tuple[float, int, int]]:
    """The same of a trace, again and again for so many hours."""
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "workload": {"trace": trace, "max_tokens": "output_length"},
    }
    rows = build_requests(build_scenario(parts, "the day").workload, 0, Path())
    columns = (rows.arrival - rows.arrival[0]).tolist(), rows.prompt_tokens.tolist(), rows.output_tokens.tolist()
    once, found = list(zip(*columns, strict=True)), list[tuple[float, int, int]]()
    for turn in range(math.ceil(hours * 3600 / once[-1][0])):
        found += [(turn * once[-1][0] + arrival, prompt, output) for arrival, prompt, output in once]
    return [row for row in found if row[0] < hours * 3600]


class Client:
    """Connections that are used again and again."""

    def __init__(self, port: int):
        self.port, self.idle = port, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()

    async def post(self, body: bytes) -> None:
        head = b""
        while not head:  # the server closes connections that were idle for a minute
            reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
        self.idle.append((reader, writer))


async def play(port: int, pid: int, load: list[tuple[float, int, int]], speed: float) -> tuple[float, float]:
    """MB of the server after a quarter and at the end."""
    client, held, tasks = Client(port), [], set()
    begun = time.perf_counter() - (await asyncio.to_thread(ask, port, "/simulate/state"))["simulated_s"] / speed
    for k, (arrival, prompt, output) in enumerate(load):
        if (wait := begun + arrival / speed - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        if k == len(load) // 4:
            held.append(memory(pid))
        body = json.dumps({"prompt": [k % 50_000] * prompt, "max_tokens": output, "ignore_eos": True}).encode()
        task = asyncio.ensure_future(client.post(body))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return held[0], memory(pid)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("hours", 24.0), ("rate", 0.03), ("speed", 1440.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--trace", default="")
    given = parser.parse_args()
    load = played(given.trace, given.hours) if given.trace else day(given.hours, given.rate)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with (
        tempfile.TemporaryDirectory() as folder,
        endpoint("--speed", str(given.speed), "--record", f"{folder}/day.jsonl", **pipes) as (server, port),
    ):
        load = [(a + 30 * given.speed / 60, p, o) for a, p, o in load]
        began = time.perf_counter()
        quarter, end = asyncio.run(play(port, server.pid, load, given.speed))
        took = time.perf_counter() - began
        state = ask(port, "/simulate/state")
        print(f"{len(load):,} requests in {took:.0f} s: {state['simulated_s'] / 3600:.2f} h, {state['requests']}")
        grown = (end - quarter) / (0.75 * len(load)) * 1e3
        print(f"memory: {quarter:.0f} MB after a quarter, {end:.0f} MB at the end, {grown:.2f} kB a request")
        server.send_signal(2)
        print(server.communicate(timeout=120)[0].splitlines()[-1])
        came = [json.loads(line)["timestamp"] for line in Path(folder, "day.jsonl").read_text().splitlines()]
        late = [(there - meant[0]) / given.speed * 1e3 for there, meant in zip(came, load, strict=True)]
        part = len(late) // 24
        first, last = sorted(late[:part])[part // 2], sorted(late[-part:])[part // 2]
        print(f"requests came {first:.1f} ms (wall, median) late in the first hour, {last:.1f} ms in the last")


if __name__ == "__main__":
    main()
