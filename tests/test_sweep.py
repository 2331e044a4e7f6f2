"""Sweeps: grids, and the same bytes however they are run or interrupted."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.scenario import load_scenario
from infersim.explain.summary import finite, summarize
from infersim.planning.grid import grid, parse_axis
from infersim.planning.sweep import rows, sweep
from infersim.run import run

SMALL = ["workload.num_requests=200"]
OVER = {"engine.max_num_seqs": [8, 32], "workload.request_rate": [2, 10]}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,2,4", [1, 2, 4]),
        ("a=[bf16, fp8]", ["bf16", "fp8"]),
        ("a=1:4:1", [1, 2, 3, 4]),
        ("a=0.1:0.5:0.1", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("a=1:64:*4", [1, 4, 16, 64]),
        ("a=1:63:*4", [1, 4, 16]),
        ("a=inf", ["inf"]),
        ("a=true", [True]),
        ("a={mean: 512, range_ratio: 0.5},256", [{"mean": 512, "range_ratio": 0.5}, 256]),
    ],
)
def test_values_of_an_axis(text, values):
    """A list, a YAML list, and inclusive arithmetic and geometric ranges."""
    assert parse_axis(text) == ("a", values)


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1:0:1", "a=1:4:0", "a=1:4:*1", "a=0:4:*2", "a=1:x:2", "a=[]"])
def test_what_is_no_axis(text):
    """One line that names the option."""
    with pytest.raises(InputError, match=r"--over .*: (must|has|a range|more)"):
        parse_axis(text)


def test_grid_is_the_product():
    """Every combination once, the last key fastest."""
    assert grid({"a": [1, 2], "b": "xy"}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_a_point_is_a_run():
    """Each point's answer is what `run` says of the scenario with those settings."""
    outcomes = sweep("llama-8b-h100", OVER, SMALL, workers=1)
    for outcome in outcomes:
        settings = [f"{key}={value}" for key, value in outcome["set"].items()]
        assert outcome["answer"] == finite(summarize(run(load_scenario("llama-8b-h100", [*SMALL, *settings]))))
    assert [row["engine.max_num_seqs"] for row in rows(outcomes)] == [8, 8, 32, 32]


def test_workers_do_not_change_a_byte(tmp_path):
    """One process, two processes, and half of it found on disk leave the same files."""
    for name, workers in (("one", 1), ("two", 2)):
        sweep("llama-8b-h100", OVER, SMALL, tmp_path / name, workers)
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")
    seen = []
    for file in sorted((tmp_path / "two" / "points").iterdir())[:2]:
        file.unlink()
    sweep("llama-8b-h100", OVER, SMALL, tmp_path / "two", 1, progress=lambda *at: seen.append(at))
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")
    assert seen == [(2, 4, 2), (3, 4, 2), (4, 4, 2)]


def test_a_point_whose_files_hold_something_else_is_another_point(tmp_path):
    """Of the same size and name: the model, the trace, the rates that were accepted."""
    model = json.dumps({"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 32,
                        "num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096})  # fmt: skip
    (tmp_path / "config.json").write_text(model)
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,50\n1,100,50\n")
    (tmp_path / "accepted.csv").write_text("0.2,0.1\n0.8,0.3\n")
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"trace": "accepted.csv"}}
    keys = {"model": "./config.json", "hardware": "h100-sxm", "workload": {"trace": "trace.csv"}}
    (tmp_path / "s.yaml").write_text(json.dumps(keys | {"speculation": speculation}))

    def answers():
        return sweep(tmp_path / "s.yaml", {"engine.max_num_seqs": [8]}, out=tmp_path / "map", workers=1)[0]["answer"]

    seen = [answers()]
    assert answers() == seen[0]
    for file, old, new in (
        ("config.json", ": 32,", ": 16,"),
        ("trace.csv", "100", "900"),
        ("accepted.csv", "0.8", "0.9"),
    ):
        path = tmp_path / file
        stamp = path.stat()
        path.write_text(path.read_text().replace(old, new))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
        seen.append(answers())
    assert len({json.dumps(answer, sort_keys=True) for answer in seen}) == 4
    assert len(list((tmp_path / "map" / "points").iterdir())) == 4


def test_a_point_that_cannot_run_is_an_answer(tmp_path):
    """70B on one GPU does not fit: the point says so, the others run."""
    result = CliRunner().invoke(
        app, ["sweep", "llama-70b-4xh100", "--over", "parallelism.tensor=1,4", "--set", SMALL[0], "--workers", "1",
              "--out", str(tmp_path / "s")],
    )  # fmt: skip
    assert result.exit_code == 0
    assert "cannot run:" in result.stdout
    assert "does not fit" in (tmp_path / "s" / "sweep.csv").read_text()


def test_a_point_that_was_edited_is_computed_again(tmp_path):
    first = sweep("llama-8b-h100", {"engine.max_num_seqs": [8]}, SMALL, tmp_path, workers=1)
    (file,) = (tmp_path / "points").iterdir()
    for edited in ("5", "[]", "{}", '{"answer": {}}', file.read_text().replace('"seed": 0', '"seed": 1')):
        file.write_text(edited)
        assert sweep("llama-8b-h100", {"engine.max_num_seqs": [8]}, SMALL, tmp_path, workers=1) == first


def test_wrong_points_are_all_named():
    """Every invalid point's problem, before anything runs."""
    with pytest.raises(InputError) as caught:
        sweep("llama-8b-h100", {"engine.max_num_seqs": [0, -1], "engine.presett": ["x"]})
    assert len(caught.value.problems) == 3


def _bytes(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_ctrl_c_ends_all_processes_with_one_line(tmp_path):
    """A terminal sends it to the workers too, here while they start: no traceback of theirs, none is left."""
    command = [sys.executable, "-m", "infersim", "sweep", "llama-8b-h100", "--over", "workload.request_rate=1:60:1",
               "--set", "workload.num_requests=20000", "--workers", "2", "--out", str(tmp_path / "cut")]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **quiet)
    while len(_children(process.pid)) < 3:  # joblib's tracker and two workers
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
            continue
        return
    pytest.fail("a worker is still there after 10 s")


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
def test_killed_twenty_times_and_resumed(tmp_path):
    """Killed at random moments and started again, a sweep ends with the same bytes as one that was left alone."""
    command = [sys.executable, "-m", "infersim", "sweep", "llama-8b-h100", "--over", "workload.request_rate=1:60:1",
               "--over", "engine.max_num_seqs=16,64", "--set", "workload.num_requests=4000", "--workers"]  # fmt: skip
    subprocess.run([*command, "2", "--out", str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    draw, points = random.Random(1), tmp_path / "cut" / "points"
    done = []
    for _ in range(20):
        process = subprocess.Popen(
            [*command, draw.choice("12"), "--out", str(tmp_path / "cut")],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        before, moment = len(list(points.glob("[!.]*"))), draw.randrange(4)
        while process.poll() is None and len(list(points.glob("[!.]*"))) < before + moment:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done.append(len(list(points.glob("[!.]*"))))
    subprocess.run([*command, "1", "--out", str(tmp_path / "cut")], check=True, stdout=subprocess.DEVNULL)
    for left in (tmp_path / "cut").rglob(".*"):  # the file that was being written when it was killed
        left.unlink()
    assert done == sorted(done)
    assert done[0] < done[-1] < 120
    assert _bytes(tmp_path / "whole") == _bytes(tmp_path / "cut")


@pytest.mark.slow
def test_two_node_ray_cluster(tmp_path):
    """The same sweep on a real Ray cluster of two nodes leaves the same bytes as on this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'infersim[ray]'")
    binary, address = os.path.join(os.path.dirname(sys.executable), "ray"), "127.0.0.1:6411"
    node = ["--block", "--num-cpus", "1", "--disable-usage-stats", "--object-store-memory", "80000000"]
    command = [sys.executable, "-m", "infersim", "sweep", "llama-8b-h100", "--over", "workload.request_rate=1:24:1",
               "--set", SMALL[0]]  # fmt: skip
    ray = ["--executor", "ray", "--address", address]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        head = ["--head", "--port", "6411", "--include-dashboard", "false", "--temp-dir", folder]
        nodes = []
        try:
            for start in (head, ["--address", address]):
                nodes.append(subprocess.Popen([binary, "start", *start, *node], **quiet))
                _wait_for_nodes(binary, address, len(nodes))
            subprocess.run([*command, *ray, "--out", str(tmp_path / "cluster")], check=True, **quiet)
        finally:
            for process in reversed(nodes):
                process.terminate()
                process.wait(60)
    subprocess.run([*command, "--workers", "1", "--out", str(tmp_path / "here")], check=True, stdout=subprocess.DEVNULL)
    assert _bytes(tmp_path / "cluster") == _bytes(tmp_path / "here")


def _wait_for_nodes(binary, address, wanted):
    """Until `ray status` counts so many nodes."""
    for _ in range(60):
        status = subprocess.run([binary, "status", "--address", address], capture_output=True, text=True).stdout
        if status.count("node_") >= wanted:
            return
        time.sleep(1)
    pytest.fail(f"no {wanted} nodes after a minute: {status}")


def test_json_has_every_point():
    """--json prints one document."""
    result = CliRunner().invoke(
        app, ["sweep", "llama-8b-h100", "--over", "workload.request_rate=1,2", "--set", SMALL[0], "--json",
              "--workers", "1"],
    )  # fmt: skip
    document = json.loads(result.stdout)
    assert [point["set"] for point in document["points"]] == [
        {"workload.request_rate": 1},
        {"workload.request_rate": 2},
    ]
