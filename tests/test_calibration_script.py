"""tests/device/calibrate_h200.sh: what it runs, and that it ends in time with what it has."""

import os
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "device" / "calibrate_h200.sh"

# Stands for python3: notes how it was called; `calibrate` sleeps, then writes its profile.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = "-" ]; then cat > /dev/null; exit 0; fi
echo "called $*"
[ "$4" = calibrate ] || [ "$3" = calibrate ] || exit 0
while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done
sleep {seconds} && touch "$out"
"""


@pytest.fixture
def script(tmp_path):
    def run(seconds, **environment):
        python = tmp_path / "python"
        python.write_text(PYTHON.replace("{seconds}", str(seconds)))
        python.chmod(0o755)
        variables = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out"), **environment}
        started = time.monotonic()
        outcome = subprocess.run(["bash", SCRIPT], env=variables, capture_output=True, text=True, timeout=60)
        return outcome, time.monotonic() - started

    return run


def test_it_measures_quickly_then_in_full(script):
    outcome, _ = script(0, DEVICE="cpu")
    assert outcome.returncode == 0, outcome.stderr
    calls = [line for line in outcome.stdout.splitlines() if line.startswith("called")]
    assert ["--quick" in call for call in calls] == [True, False, False]
    assert all("--device cpu" in call for call in calls[:2])
    assert "show profile" in calls[2]
    assert "full.yaml" in calls[2]


def test_it_serves_with_the_profile_that_was_measured(script, tmp_path):
    profile = tmp_path / "measured.yaml"
    profile.write_text("name: x")
    outcome, _ = script(0, DEVICE="cpu", PARTS="live", PROFILE=str(profile))
    assert outcome.returncode == 0, outcome.stderr
    calls = [line for line in outcome.stdout.splitlines() if line.startswith("called")]
    assert calls == ["called -c import vllm", f"called tests/live/live.py cpu {tmp_path}/out/live"]
    assert (tmp_path / "out/live/device.yaml").read_text() == "name: x"
    outcome, _ = script(0, PARTS="live")
    assert outcome.returncode == 1
    assert "PROFILE names no file" in outcome.stdout


def test_it_ends_before_its_limit(script):
    outcome, seconds = script(20, LIMIT="3", LEAST="2")
    assert outcome.returncode == 1
    assert seconds < 10
    assert "full: no time left" in outcome.stdout
