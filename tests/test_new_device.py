"""A new device is a YAML file, wherever it lies: no code knows a device by its name."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.hardware import Hardware, load_hardware
from infersim.config.resources import names
from infersim.config.scenario import build_scenario
from infersim.run import run

PACKAGE = Path(__file__).parents[1] / "infersim"
DATASHEET = {
    "name": "newcomer",
    "vendor": "someone",
    "generation": "unheard-of",
    "memory_capacity": "96 GB",
    "memory_usable": "94 GB",
    "memory_bandwidth": "4 TB/s",
    "flops": {"bf16": "1200 TFLOP/s", "fp8": "2400 TFLOP/s"},
    "link": {"name": "own", "bandwidth": "500 GB/s", "domain_size": 8},
    "pcie_bandwidth": "64 GB/s",
    "sources": ["the vendor's datasheet"],
}
MEASURED = {"bandwidth": 0.8, "flops": 0.7, "fixed": "5 us", "softness": 0.1, "provenance": "measured", "source": "us"}
CLASSES = ("gemm", "moe", "attention_prefill", "attention_decode", "elementwise", "collective")
FULL = DATASHEET | {
    "num_sms": 120,
    "shared_memory_per_sm": "228 KiB",
    "l2_cache": "64 MiB",
    "tdp": "800 W",
    "efficiency": dict.fromkeys(CLASSES, MEASURED),
    "launch": {"graph": "1 us", "eager": "2 us", "source": "us"},
    "beside_prefill": {"least": 1.5, "growth": 1e-10, "head": "10 ns", "block": "5 ns", "source": "us"},
}
LIKE = DATASHEET | {"efficiencies_of": "b200-sxm"}


@pytest.fixture(params=[FULL, DATASHEET, LIKE], ids=["all numbers", "datasheet", "like another"])
def device(request, tmp_path):
    """A profile in a folder of its own, and what it says."""
    path = tmp_path / "newcomer.yaml"
    path.write_text(yaml.safe_dump(request.param))
    return path, request.param


def infersim(*arguments):
    outcome = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def test_it_runs_is_planned_and_shown(device, tmp_path):
    path, said = device
    scenario = tmp_path / "scenario.yaml"
    workload = {"num_requests": 20, "request_rate": 5, "input_tokens": 200, "output_tokens": 20}
    data = {"model": "Llama-3.1-8B", "hardware": path.name, "workload": workload}
    scenario.write_text(yaml.safe_dump(data))
    document = infersim("run", scenario)
    assert document["scenario"]["hardware"]["name"] == "newcomer"
    kinds = {row["provenance"] for row in document["provenance"]}
    assert kinds == ({"measured"} if said is FULL else {"assumed"})

    plan = tmp_path / "plan.yaml"
    limit = {"slo": {"p99_e2el_ms": 60_000}, "max_gpus": 1, "objective": "gpus"}
    candidates = {"candidates": {"hardware": [path.name], "parallelism": [{"tensor": 1}]}}
    plan.write_text(yaml.safe_dump({key: data[key] for key in ("model", "workload")} | limit | candidates))
    assert "newcomer" in json.dumps(infersim("plan", plan))

    rows = {row["what"]: row for row in infersim("show", "profile", path)}
    for what in ("gemm.bf16", "attention_prefill", "attention_decode", "elementwise"):
        assert rows[what]["provenance"] == ("measured" if said is FULL else "assumed")
        relative = "b200-sxm" if said is LIKE else "h100-sxm"
        if said is not FULL and what != "elementwise":
            assert rows[what]["source"].startswith(f"as {relative}: ")


def test_its_own_numbers_decide():
    """A device that says all is priced by what it says: half the bandwidth and half the share are a quarter's."""

    def tpot(**changes):
        hardware = FULL | changes
        workload = {"num_requests": 1, "max_concurrency": 1, "input_tokens": 10, "output_tokens": 200}
        scenario = {"model": "Llama-3.1-8B", "hardware": hardware, "workload": workload}
        (request,) = run(build_scenario(scenario, "test"))[0].requests
        return (request["last_token"] - request["first_token"]) / 199

    slower = {"efficiency": dict.fromkeys(CLASSES, MEASURED | {"bandwidth": 0.4}), "memory_bandwidth": "2 TB/s"}
    weights = 16.06e9 - 128256 * 4096 * 2  # all but the token table
    assert tpot(**slower) - tpot() == pytest.approx(weights * (1 / (0.4 * 2e12) - 1 / (0.8 * 4e12)), rel=0.05)


def test_who_it_is_like_must_be_known():
    with pytest.raises(InputError, match=r"efficiencies_of must be a packaged profile .*did you mean mi300x"):
        Hardware.validate(DATASHEET | {"efficiencies_of": "mi300"}, "x.yaml")


EXAMPLES = {
    "config/plan.py": "an example in a message",
    "cli/show.py": "an example in a message",
    "calibration/cases.py": "any device: the operators of a 16-bit pass are the same on all",
    "calibration/tables.py": "a defect of one published table",
}


def test_code_has_no_device_name():
    """Reproduced papers aside, which name the devices that they measured."""
    word = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names('hardware_profiles')))})(?![\w-])")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "reproduce" and word.search(path.read_text())
    }
    assert found == set(EXAMPLES)


def test_every_packaged_device_answers_to_its_own_names():
    """No two have one name, of which the longest that a driver's holds decides."""
    called = [name for each in names("hardware_profiles") for name in load_hardware(each).also_called]
    assert len(called) == len(set(called))
