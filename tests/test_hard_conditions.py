"""A full disk, no home, a read-only installation, few files, little memory, two first runs at once: an answer or clear
words, and nothing lost."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")]
ROOT = Path(__file__).parents[1]
RUN = ["run", "llama-8b-h100", "--set", "workload.num_requests=500"]


def start(words: list[str], limits=(), cwd: Path | None = None, **environment: str | None) -> subprocess.Popen:
    """The command, under limits (RLIMIT_*, value), with variables set, or removed by None."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "infersim", *words],
        env={name: value for name, value in found.items() if value is not None},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [resource.setrlimit(limit, (value, value)) for limit, value in limits],
    )


def outcome(*words, **conditions) -> tuple[int, str, str]:
    process = start(*words, **conditions)
    out, error = process.communicate(timeout=300)
    assert "Traceback" not in out + error
    return process.returncode, out, error


@pytest.fixture(scope="module")
def answer():
    return outcome(RUN)[1]


def test_a_full_disk_is_said_and_keeps_what_was_there(tmp_path, answer):
    words = [*RUN, "--out", str(tmp_path / "out")]
    assert outcome(words)[0] in (0, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    code, _, error = outcome([*words, "--seed", "7"], limits=[(resource.RLIMIT_FSIZE, 10_000)])
    assert (code, "cannot be written: File too large" in error) == (2, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("limit", [(resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_AS, 2**30)])
def test_few_files_and_little_memory(limit, answer):
    assert outcome(RUN, limits=[limit])[1] == answer
    sweep = ["sweep", "llama-8b-h100", "--over", "engine.max_num_seqs=8,16", "--set", "workload.num_requests=50"]
    if limit[0] == resource.RLIMIT_NOFILE:
        assert outcome([*sweep, "--workers", "2"], limits=[limit])[0] == 0


def test_two_first_runs_at_once_without_a_home_from_a_read_only_installation(tmp_path, answer):
    installed, temporary = tmp_path / "installed", tmp_path / "temporary"
    temporary.mkdir()
    for name in ("infersim", "hardware_profiles", "engine_presets", "drafters", "scenarios", "workloads"):
        shutil.copytree(ROOT / name, installed / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [installed, *installed.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    gone = dict.fromkeys(("HOME", "INFERSIM_CACHE_DIR"))
    there = {"PYTHONPATH": str(installed), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    two = [start(RUN, cwd=tmp_path, **gone, **there) for _ in range(2)]
    for process in two:
        out, error = process.communicate(timeout=400)
        assert (out, "Traceback" in error) == (answer, False)
    for path in [installed, *installed.rglob("*")]:
        path.chmod(0o755)
