"""What a user does with a server of the real engine, on results that one gave (tests/live/measured)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from live.cpu_time import in_cpu_time
from live.setups import NGRAM, SETUPS
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.models.catalog import load_model

MEASURED = Path(__file__).parent / "live" / "measured"
LOAD = {"input_tokens": {"uniform": [80, 240]}, "output_tokens": {"uniform": [24, 72]}, "num_requests": 100}


def infersim(*words):
    outcome = CliRunner().invoke(app, list(words))
    assert outcome.exit_code == 0, outcome.stderr
    return outcome.stdout


def test_runs_of_a_real_server_that_were_not_used_are_predicted(tmp_path, monkeypatch):
    shutil.copytree(MEASURED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    scenario = yaml.safe_load(infersim("show", "deployment", "serve.sh", "--hardware", "device.yaml"))
    assert scenario["engine"]["preset"] == "vllm-0.32"
    (tmp_path / "served.yaml").write_text(yaml.safe_dump(scenario | {"workload": LOAD | {"max_concurrency": 100}}))
    assert json.loads(infersim("run", "served.yaml", "--json"))["memory"]["num_gpu_blocks"] == 2048  # the server's

    fitted = ["one-at-a-time.json", "eight-at-a-time.json"]
    infersim("calibrate", "server", *fitted, "--scenario", "served.yaml", "--fit", "step", "--out", "host.yaml")
    engine = yaml.safe_load(Path("host.yaml").read_text())["engine"]
    step = float(engine["host_step_time"].removesuffix(" ms"))
    alone = json.loads(Path(fitted[0]).read_text())
    assert 0.5 < step < 1e3 * np.median(np.concatenate(alone["itls"]))  # more than is assumed, a part of a whole step
    scenario["engine"] |= engine
    (tmp_path / "served.yaml").write_text(yaml.safe_dump(scenario | {"workload": LOAD | {"max_concurrency": 100}}))

    words = ["validate", "four-at-a-time.json", "overload.json", "--scenario", "served.yaml", "--json"]
    several, overload = json.loads(infersim(*words))["runs"]
    assert several["warnings"] == []
    assert several["errors"]["request_throughput"]["error"] == pytest.approx(0, abs=0.07)  # a closed loop's
    for metric, bound in {"mean_tpot_ms": 0.07, "mean_e2el_ms": 0.07, "mean_ttft_ms": 0.15}.items():
        assert abs(several["errors"][metric]["error"]) < bound, metric
    assert overload["errors"]["request_throughput"]["error"] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(
    ("device", "hardware", "parameters", "blocks"),
    [("cpu", str(MEASURED / "device.yaml"), 53_486_592, 2048), ("cuda", "h200-sxm", 8_030_261_248, 20_480)],
)
def test_what_is_served_is_a_scenario(device, hardware, parameters, blocks, tmp_path, monkeypatch):
    setup = SETUPS[device]
    setup.write(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert load_model("./tiny").num_params == parameters  # on a GPU those of Llama-3.1-8B
    vocabulary = json.loads((tmp_path / "tiny" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(setup.config["vocab_size"]))
    for more in ([], ["--speculative-config", f"'{json.dumps(NGRAM)}'"]):
        (tmp_path / "serve.sh").write_text(" ".join(["vllm", "serve", *setup.serve, *more]))
        text = infersim("show", "deployment", "serve.sh", "--hardware", hardware)
        (tmp_path / "served.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | {"workload": LOAD}))
        answer = json.loads(infersim("run", "served.yaml", "--json", "--set", "workload.request_rate=1"))
        assert answer["memory"]["num_gpu_blocks"] == blocks


def test_what_others_took_of_the_core_does_not_count():
    """The server has all of its core until 10 s, and half of it from then on."""
    clock = np.array([0.0, 10.0, 30.0])
    run = {"start_times": [5.0, 12.0], "ttfts": [1.0, 2.0], "itls": [[1.0, 5.0], [4.0]], "mean_ttft_ms": 1500.0,
           "duration": 13.0, "request_throughput": 2 / 13}  # fmt: skip
    found = in_cpu_time(run, clock, np.array([0.0, 10.0, 20.0]))
    assert found["ttfts"] == [1.0, 1.0]
    assert found["itls"] == [[1.0, 4.0], [2.0]]  # 7 to 12: three whole seconds and two halves
    assert found["start_times"] == [5.0, 11.0]
    assert found["duration"] == 9.0
    assert found["request_throughput"] == pytest.approx(2 / 9)
    assert "mean_ttft_ms" not in found
