"""What `infersim serve` holds in memory: what goes on, not what has been."""

import asyncio
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import served  # noqa: F401  (needs what it needs)
from endpoint import endpoint

from infersim.engine.memory import grown
from infersim.serve.on_disk import STEP, OnDisk


def fill(grow, number):
    """Rows written one after another, as records are."""
    rows = np.zeros(0, "f8")
    for i in range(number):
        rows = grow(rows, i, i + 1)
        rows[i] = i
    return rows


def test_rows_on_disk_are_those_in_memory():
    number = 3 * STEP // 8 + 5
    grow = OnDisk()
    first = grow(np.arange(3.0), 3, 4)
    second = grow(first, 4, STEP // 8 + 1)
    second[3] = 7.0
    np.testing.assert_array_equal(second[:4], [0, 1, 2, 7])
    assert first[3] == 7.0  # whoever still has the old array has the same rows
    np.testing.assert_array_equal(fill(OnDisk(), number)[:number], np.arange(number))
    assert len(fill(grown, 5)) >= 5


def test_a_full_disk_costs_memory_and_nothing_else(capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * STEP, hard))  # a third step is an error, as on a full disk
    try:
        number = 5 * STEP // 8
        np.testing.assert_array_equal(fill(OnDisk(), number)[:number], np.arange(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("records stay in memory") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_requests_that_ended_leave_memory():
    """The same number again and again: the process grows by less than 400 bytes a request (records have 1,400)."""
    number = 4000

    def held(pid):
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])

    async def client(port, numbers):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for k in numbers:
            body = json.dumps({"prompt": [k] * 1000, "max_tokens": 3, "ignore_eos": True}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        writer.close()

    async def ask(port, numbers):
        numbers = iter(numbers)
        await asyncio.gather(*(client(port, numbers) for _ in range(8)))

    with endpoint("--speed", "1000", stdout=subprocess.DEVNULL) as (server, port):
        asyncio.run(ask(port, range(number)))
        before = held(server.pid)
        asyncio.run(ask(port, range(number, 3 * number)))
        assert held(server.pid) - before < 400 * 2 * number
