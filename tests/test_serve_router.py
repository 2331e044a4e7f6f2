"""A real router over four replicas: LiteLLM's proxy, by the recipe of docs/serve.md.

Runs where `litellm` is on the PATH or LITELLM says where it is (`pip install 'litellm[proxy]'`, 600 MB), else skipped.
"""

import asyncio
import contextlib
import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from endpoint import endpoint

PROGRAM = os.environ.get("LITELLM") or shutil.which("litellm")
DOCS = Path(__file__).parents[1] / "docs" / "serve.md"


@contextlib.contextmanager
def proxy(folder, first):
    """LiteLLM's port: docs/serve.md's recipe over the replicas at `first` and the ports behind it."""
    recipe = re.search(r"```\n(model_list:.*?)```", DOCS.read_text(), re.DOTALL)[1]
    ports = sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", recipe)))
    assert ports == ["8000", "8001", "8002", "8003"]
    (folder / "litellm.yaml").write_text(
        re.sub(r"127\.0\.0\.1:800(\d)", lambda m: f"127.0.0.1:{first + int(m[1])}", recipe)
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with open(folder / "litellm.log", "w") as log:
        command = [PROGRAM, "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(240):
            assert process.poll() is None, (folder / "litellm.log").read_text()[-2000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
                break
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="litellm is not installed")
def test_litellms_proxy_over_four_replicas_one_of_which_crashes(tmp_path):
    openai = pytest.importorskip("openai")

    async def chat(client, k):
        stream = await client.chat.completions.create(
            model="Llama-3.1-8B",
            messages=[{"role": "user", "content": "of the world"}],
            max_tokens=20 + k % 7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        words, usage = 0, None
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                words += len(chunk.choices[0].delta.content.split())
        assert words == usage.completion_tokens == 20 + k % 7
        return usage.prompt_tokens

    async def play(port, first):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            prompts = sum(await asyncio.gather(*(chat(client, k) for k in range(40))))
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.chat.completions.create(
                    model="Llama-3.1-8B", messages=[{"role": "user", "content": "a"}], max_tokens=10**8
                )
            crash = json.dumps({"replica": 0, "duration": 1e6}).encode()
            urllib.request.urlopen(f"http://127.0.0.1:{first}/simulate/crash", crash).close()
            return prompts + sum(await asyncio.gather(*(chat(client, k) for k in range(40))))

    options = ("--ports-per-replica", "--set", "cluster.replicas=4", "--out", str(tmp_path / "out"))
    with endpoint(*options, stdout=subprocess.DEVNULL) as (server, first):
        with proxy(tmp_path, first) as port:
            prompts = asyncio.run(play(port, first))
        server.send_signal(signal.SIGINT)
        server.wait(60)
    with open(tmp_path / "out" / "requests.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 80
    assert {row["replica"] for row in rows} == {"0", "1", "2", "3"}
    assert {row["replica"] for row in rows[40:]} <= {"1", "2", "3"}
    assert sum(int(row["prompt_tokens"]) for row in rows) == prompts
    assert sum(int(row["output_tokens"]) for row in rows) == 2 * sum(20 + k % 7 for k in range(40))
