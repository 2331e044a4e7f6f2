"""containers/Dockerfile, line by line, where no container engine is: what it copies, installs and runs is there."""

import contextlib
import fnmatch
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lines():
    """(instruction, the rest of it)."""
    text = (ROOT / "containers" / "Dockerfile").read_text().replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line and not line.startswith("#")]


def test_every_line_is_one_that_is_checked_here():
    kinds = [kind for kind, _ in lines()]
    assert kinds == ["FROM", "WORKDIR", "COPY", "RUN", "USER", "RUN", "EXPOSE", "ENTRYPOINT", "CMD"]
    at = dict(lines())
    python = tuple(map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim", at["FROM"]).groups()))
    assert python >= tuple(map(int, re.search(r">=(\d+)\.(\d+)", PROJECT["requires-python"]).groups()))
    assert at["COPY"] == ". ."
    ignored = (ROOT / ".dockerignore").read_text().split()
    needed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for path in needed:  # what is in the repository is in the image
        assert not any(fnmatch.fnmatch(path.split("/")[0], one) for one in ignored), path
    install = next(rest for kind, rest in lines() if kind == "RUN")
    (extra,) = re.findall(r"'\.\[(\w+)\]'", install)
    assert extra in PROJECT["optional-dependencies"]
    assert f"useradd --create-home {at['USER']}" in install  # its home takes the compiled engine
    assert json.loads(at["ENTRYPOINT"]) == ["infersim"]
    assert PROJECT["scripts"]["infersim"]


@pytest.mark.skipif(sys.platform != "linux", reason="the image is Linux")
def test_what_it_runs_runs(tmp_path):
    """The command of the last RUN, then ENTRYPOINT and CMD on another port: `docker stop` lets it write what it has."""
    pytest.importorskip("uvicorn")
    run = [rest for kind, rest in lines() if kind == "RUN"][-1]
    program = [sys.executable, "-m", "infersim"]
    words = shlex.split(run.partition(">")[0])
    assert words[0] == "infersim"
    subprocess.run([*program, *words[1:]], check=True, stdout=subprocess.DEVNULL, timeout=300)
    at = dict(lines())
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = str(sock.getsockname()[1])
    command = json.loads(at["CMD"])
    assert at["EXPOSE"] == "8000"
    assert "--port" not in command  # the default
    process = subprocess.Popen([*program, *command, "--port", port, "--record", str(tmp_path / "trace.jsonl")])
    try:
        for _ in range(600):
            time.sleep(0.05)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", b'{"prompt": "a"}').close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
        assert json.loads((tmp_path / "trace.jsonl").read_text())["input_length"] == 1
    finally:
        process.kill()
        process.wait()
