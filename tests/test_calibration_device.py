"""Calibration of a device: known devices are recovered, broken measurements are told apart, torch's CPU runs it all."""

import contextlib
import functools
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from infersim.calibration import calibrate_device as whole
from infersim.calibration import measure as measuring
from infersim.calibration.cases import GPU, SMALL, amounts, cases, floor, model_of, quick
from infersim.calibration.efficiencies import predict, with_row
from infersim.calibration.measure import CPU_PLAN, GPU_PLAN, Plan, measure, repeat_spread
from infersim.calibration.profile import datasheet
from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.hardware import OperatorEfficiency, load_hardware

H200 = load_hardware("h200-sxm").model_copy(update={"efficiency": {}})
TRUE = {
    "gemm.bf16": (0.82, 0.71, 4e-6, 0.06756),
    "gemm.fp8": (0.75, 0.55, 6e-6, 0.06756),
    "attention_prefill": (1.0, 0.6, 9e-6, 0.0358),  # its bytes are never seen
    "attention_decode": (0.31, 0.5, 12e-6, 0.0358),
    "elementwise": (0.8, 1.0, 2.5e-6, 0.0358),
}


def true_device():
    hardware = H200
    for key, (bandwidth, flops, fixed, softness) in TRUE.items():
        row = OperatorEfficiency(
            bandwidth=bandwidth, flops=flops, fixed=fixed, softness=softness, provenance="measured", source="test"
        )
        hardware = with_row(hardware, key, row)
    return hardware


class Unsupported(Exception):
    pass


class Synthetic:
    """A device that takes exactly what the cost model says, but for 1 % of noise; `spoil` changes a sample."""

    is_cuda = True

    def __init__(self, sizes, spoil=lambda case, seconds, count: seconds, seed=0):
        self.info = {"device": "NVIDIA H200", "driver": "999", "torch": "9.9", "stack": "torch", "cache_bytes": 5e7,
                     "memory_bytes": 141e9, "devices": 1}  # fmt: skip
        self.model, self.hardware = model_of(sizes), true_device()
        self.random, self.spoil, self.count = np.random.default_rng(seed), spoil, 0
        self.exact = functools.cache(lambda name: predict(self.by_name[name], self.hardware))
        self.by_name = {case.name: case for case in cases(sizes, self.model)}

    def lost(self):
        return False

    def sample(self, case, samples):
        if case.dtype not in ("bf16", "fp8") or not case.work:
            if case.kind.startswith("launch"):
                return [{"launch_eager": 3e-6, "launch_graph": 1.5e-6}[case.kind]] * samples
            raise Unsupported(f"no {case.dtype} kernel")
        seconds = self.exact(case.name)
        found = []
        for _ in range(samples):
            self.count += 1
            found.append(self.spoil(case, seconds * self.random.lognormal(0, 0.01), self.count))
        return found


def run(tmp_path, spoil=lambda case, seconds, count: seconds, sizes=GPU, plan=GPU_PLAN):
    device = Synthetic(sizes, spoil)
    return whole.calibrate_device(device, sizes, tmp_path / "p.yaml", plan, H200)


def test_a_known_device_is_recovered_within_5_percent(tmp_path):
    document = run(tmp_path)
    profile = load_hardware(tmp_path / "p.yaml")
    for key, (bandwidth, flops, fixed, _) in TRUE.items():
        row = profile.efficiency[key]
        assert row.bandwidth == pytest.approx(bandwidth, rel=0.05), key
        if key not in ("elementwise", "attention_decode"):  # bound by memory
            assert row.flops == pytest.approx(flops, rel=0.05), key
        assert row.fixed == pytest.approx(fixed, rel=0.05), key
        assert row.provenance == "calibrated"
        assert "held out" in row.errors
    assert profile.launch.eager == 3e-6
    assert profile.calibration.stack == "torch"
    assert profile.memory_bandwidth == H200.memory_bandwidth  # the datasheet's stay
    assert document["step_error_median"] < 0.02  # steps were not fitted
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/png;base64") == 2
    assert "step.decode.1x128" in page
    reasons = {row["name"]: row["why"] for row in document["rejected"]}
    assert reasons["linear.int8.4096x4096.1"] == "no int8 kernel"


def test_a_device_without_a_datasheet_has_the_peaks_that_were_measured(tmp_path):
    device = Synthetic(quick(GPU))
    device.info |= {"device": "Some CPU", "threads": 2, "cache_bytes": 3e7}
    whole.calibrate_device(device, quick(GPU), tmp_path / "p.yaml", Plan(2, 1, "minimum"), datasheet(device.info))
    profile = load_hardware(tmp_path / "p.yaml")
    assert profile.generation == "cpu"
    assert 0.5 * H200.memory_bandwidth < profile.memory_bandwidth < H200.memory_bandwidth
    assert max(row.bandwidth for row in profile.efficiency.values()) <= 1


def test_devices_are_recognised():
    for torch_name, name in [("NVIDIA H200", "h200-sxm"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA L4", "l4"),
                             ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
                             ("NVIDIA L40S", "l40s"), ("NVIDIA H100 PCIe", "h100-pcie")]:  # fmt: skip
        assert datasheet({"device": torch_name}).name == name
    assert datasheet({"device": "Intel(R) Xeon(R) Processor"}) is None


# --- broken measurements ----------------------------------------------------------------------------------------------
def outcome(tmp_path, spoil, plan=GPU_PLAN, sizes=None):
    device = Synthetic(sizes or quick(GPU), spoil)
    listed = cases(sizes or quick(GPU), device.model)
    return measure(device, listed, plan, tmp_path / "m.jsonl", H200)


def test_one_slow_outlier_changes_nothing(tmp_path):
    def spoil(case, seconds, count):
        return seconds * (50 if count % 15 == 7 else 1)  # one of a case's 15 samples

    for one in outcome(tmp_path, spoil):
        if not one.rejected and one.case.work:
            assert one.seconds == pytest.approx(predict(one.case, true_device()), rel=0.03)
    assert sum(not one.rejected for one in outcome(tmp_path, spoil)) > 50


def test_a_clock_that_throttles_is_seen(tmp_path):
    total = len(cases(quick(GPU), model_of(GPU))) * GPU_PLAN.samples

    def spoil(case, seconds, count):
        return seconds * (1 + 0.25 * count / total)

    rejected = [one.rejected for one in outcome(tmp_path, spoil) if one.case.dtype == "bf16" and one.case.work]
    assert sum("slowed down" in why for why in rejected) > 0.9 * len(rejected)
    with pytest.raises(InputError, match="no measurement of a linear layer is usable"):
        run(tmp_path, spoil, quick(GPU))
    assert not (tmp_path / "p.yaml").exists()


def test_a_slow_neighbour_between_rounds_is_no_reason_with_minima(tmp_path):
    def spoil(case, seconds, count):
        return seconds * (1 + (count // 40) % 3)  # two thirds of the time slower

    plan = Plan(7, 2, "minimum")
    found = outcome(tmp_path, spoil, plan)
    good = [one for one in found if not one.rejected]
    assert len(good) > 10
    for one in good:
        if one.case.work:
            assert one.seconds == pytest.approx(predict(one.case, true_device()), rel=0.12)


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (math.nan, "not numbers above 0"),
        (-1.0, "not numbers above 0"),
        (0.0, "not numbers above 0"),
        (1e-9, "datasheet"),
    ],
)
def test_impossible_times_are_rejected(tmp_path, spoiled, reason):
    def spoil(case, seconds, count):
        return spoiled if case.name == "linear.bf16.6144x4096.8" else seconds

    sizes = quick(GPU)
    by_name = {one.case.name: one for one in outcome(tmp_path, spoil, sizes=sizes)}
    assert reason in by_name["linear.bf16.6144x4096.8"].rejected
    assert not by_name["linear.bf16.6144x4096.64"].rejected


def test_out_of_memory_ends_a_case_and_not_the_run(tmp_path):
    def spoil(case, seconds, count):
        if case.kind == "step" and case.shape["context"] > 8192:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return seconds

    document = run(tmp_path, spoil, quick(GPU))
    failed = [row for row in document["rejected"] if row["why"].startswith("out of memory")]
    assert {row["name"] for row in failed} == {"step.decode.1x32768", "step.decode.8x16384"}
    assert document["step_error_median"] < 0.02


def test_a_device_that_a_kernel_kills_is_not_blamed_on_the_cases_that_follow(tmp_path):
    killed = []

    def spoil(case, seconds, count):
        if case.name == "step.decode.1x128":
            killed.append(case.name)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return seconds

    device = Synthetic(quick(GPU), spoil)
    device.lost = lambda: bool(killed)
    arguments = quick(GPU), tmp_path / "p.yaml", GPU_PLAN, H200
    with pytest.raises(InputError, match=r"step.decode.1x128: the device failed .*illegal memory access"):
        measure(device, cases(quick(GPU), device.model), GPU_PLAN, whole.measurements_path(arguments[1]), H200)
    killed.clear()  # started anew
    document = whole.calibrate_device(device, *arguments)
    assert not killed
    assert [row["name"] for row in document["rejected"] if "illegal" in row["why"]] == ["step.decode.1x128"]


def test_an_interrupted_calibration_goes_on(tmp_path):
    limit = 100

    def spoil(case, seconds, count):
        if count > limit:
            raise KeyboardInterrupt
        return seconds

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, spoil, quick(GPU))
    raw = tmp_path / "p.measurements.jsonl"
    with open(raw, "a") as file:
        file.write('{"case": "linear.bf16.61')  # killed while it wrote
    before = raw.read_text().count("\n")
    limit = 10**9
    device = Synthetic(quick(GPU), spoil)
    whole.calibrate_device(device, quick(GPU), tmp_path / "p.yaml", GPU_PLAN, H200)
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    keys = [(line["case"], line["round"]) for line in lines[1:]]
    assert len(keys) == len(set(keys))  # nothing twice
    assert before - 1 > 10
    assert device.count <= GPU_PLAN.samples * (len(keys) - before + 2)


def test_measurements_of_another_device_are_not_gone_on_with(tmp_path):
    run(tmp_path, sizes=SMALL)
    (tmp_path / "p.yaml").unlink()
    device = Synthetic(SMALL)
    device.info["driver"] = "1000"
    with pytest.raises(InputError, match=r"driver 999.*driver 1000"):
        whole.calibrate_device(device, SMALL, tmp_path / "p.yaml", GPU_PLAN, H200)


def test_a_profile_is_not_overwritten(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("precious")
    invoke = CliRunner().invoke
    refused = invoke(app, ["calibrate", "device", "--device", "cpu", "--out", str(path)])
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert path.read_text() == "precious"
    for wrong, problem in [("gpu", "must be cpu, cuda"), ("cuda:99", "CUDA devices"), ("cuda:x", "must be cpu")]:
        outcome = invoke(app, ["calibrate", "device", "--device", wrong, "--out", str(tmp_path / "q.yaml")])
        assert outcome.exit_code == 2
        assert problem in outcome.stderr or "needs PyTorch" in outcome.stderr
    assert invoke(app, ["calibrate", "device", "--out", str(tmp_path / "q.txt")]).exit_code == 2


def test_a_calibrated_profile_says_whose_kernels_it_measured(tmp_path):
    run(tmp_path, sizes=quick(GPU))
    scenario = {"model": "Llama-3.1-8B", "hardware": "p.yaml",
                "workload": {"input_tokens": 100, "output_tokens": 10, "num_requests": 5}}  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario))
    outcome = CliRunner().invoke(app, ["run", str(tmp_path / "s.yaml"), "--json"])
    assert outcome.exit_code == 0, outcome.stderr
    assumed = json.loads(outcome.stdout)["assumed"]
    assert any("measured with torch 9.9's kernels, which stand for vllm" in line for line in assumed)
    shown = CliRunner().invoke(app, ["show", "profile", str(tmp_path / "p.yaml")])
    assert shown.exit_code == 0
    for word in ("datasheet", "calibrated", "measured", "assumed", "median", "TFLOP/s"):
        assert word in shown.stdout


# --- what a case is ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [SMALL, GPU, quick(GPU)], ids=["small", "gpu", "quick"])
def test_no_case_is_predicted_below_its_floor(sizes):
    model, hardware = model_of(sizes), true_device()
    listed = cases(sizes, model)
    assert len({case.name for case in listed}) == len(listed)
    for case in listed:
        if case.work and case.dtype in hardware.flops:
            assert predict(case, hardware) >= floor(case, hardware) > 0 or case.group in ("elementwise", "")


def test_a_step_reads_each_weight_once():
    model = model_of(GPU)
    step = next(case for case in cases(GPU, model) if case.name == "step.decode.1x1024")
    moved, flops = amounts(step)
    weights = 2 * (model.num_params - model.embedding_params)
    kv = 1024 * model.kv_bytes_per_token(2)
    assert moved == pytest.approx(weights + kv, rel=0.01)
    assert flops == pytest.approx(weights, rel=0.05)  # 2 FLOPs and 2 bytes per weight


def test_repeat_spread_is_that_of_steps(tmp_path):
    found = outcome(tmp_path, lambda case, seconds, count: seconds)
    assert 0 < repeat_spread(found) < 0.02


# --- torch ------------------------------------------------------------------------------------------------------------
def test_torch_measures_a_cpu_end_to_end(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from infersim.calibration import torch_device

    monkeypatch.setattr(whole, "CPU_PLAN", Plan(2, 1, "minimum"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch_device, "_cache_bytes", lambda path: 0)
    monkeypatch.setattr(torch_device, "LEAST_CACHE", 2**20)
    monkeypatch.setattr(whole, "CPU", SMALL)
    monkeypatch.setattr(measuring, "SPREAD", math.inf)  # whatever else this machine does
    path = tmp_path / "cpu.yaml"
    outcome = CliRunner().invoke(app, ["calibrate", "device", "--device", "cpu", "--out", str(path)])
    torch.set_num_threads(threads)
    assert outcome.exit_code == 0, outcome.stderr
    lines = outcome.stdout.strip().splitlines()
    assert lines[-1].startswith("whole model steps, not fitted: median")
    profile = load_hardware(path)
    assert profile.generation == "cpu"
    assert {"gemm.bf16", "attention_prefill", "attention_decode", "elementwise"} <= profile.efficiency.keys()
    assert "fp8" in outcome.stdout  # missing, with the reason
    assert (tmp_path / "cpu.html").stat().st_size > 10_000


class Graph:
    """Stands for torch.cuda.CUDAGraph: what is captured runs once, and a replay does nothing."""

    replays = 0

    def replay(self):
        Graph.replays += 1


def test_the_cuda_path_runs_every_kind_of_case(tmp_path, monkeypatch):
    """On a CPU, with stand-ins for CUDA's streams, events and graphs, and for what the driver says."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from infersim.calibration import torch_device

    clock = time.perf_counter
    event = lambda enable_timing: SimpleNamespace(  # noqa: E731
        record=lambda: None, elapsed_time=lambda end: 1.0 + clock() % 1e-3
    )
    stream = SimpleNamespace(wait_stream=lambda other: None)
    found = SimpleNamespace(name="NVIDIA H200", uuid="1-2", multi_processor_count=132, L2_cache_size=2**19,
                            total_memory=2**27)  # fmt: skip
    fakes = {
        "Event": event, "Stream": lambda device: stream, "current_stream": lambda device: stream, "CUDAGraph": Graph,
        "stream": lambda one: contextlib.nullcontext(), "graph": lambda one: contextlib.nullcontext(),
        "synchronize": lambda device: None, "empty_cache": lambda: None, "get_device_properties": lambda device: found,
        "device_count": lambda: 2,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    asked = []
    monkeypatch.setattr(torch_device, "_nvidia_smi", lambda key, device: asked.append(device) or "450.0")
    monkeypatch.setattr(torch_device, "POWER_SECONDS", 0.05)
    monkeypatch.setattr(
        torch_device.TorchDevice, "is_cuda", property(lambda self: True, lambda self, value: None), False
    )
    device = torch_device.TorchDevice("cpu", model_of(SMALL))
    assert device.info["devices"] == 2
    assert not device.lost()
    kinds = {}
    for case in cases(SMALL, device.model, 1):
        kinds.setdefault((case.kind, case.dtype if case.kind == "linear" else ""), case)
    for case in kinds.values():
        with contextlib.suppress(torch_device.Unsupported):
            assert len(device.sample(case, 3)) == 3
            assert all(math.isfinite(seconds) and seconds > 0 for seconds in device.sample(case, 3))
    assert Graph.replays > 3 * len(kinds)  # no time but a graph's
    device._random = lambda *shape: torch.ones(2, 2)
    assert device.power() == {"power_w": 450.0, "sm_clock_mhz": 450.0}
    assert set(asked) == {"GPU-1-2"}


def test_torch_operators_are_what_they_are_called():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from infersim.calibration.torch_model import Decoder, attention, norm, rotate

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    for tokens, keys in ((1, 64), (5, 5), (130, 150)):  # of a decode, a prompt, a prompt behind a context
        q, k, v = draw(3, 4, tokens, 8), draw(3, 2, keys, 8), draw(3, 2, keys, 8)
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
        hidden = torch.ones(tokens, keys).triu(keys - tokens + 1).bool()
        expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(attention(q, k, v), expected)
    x = draw(2, 1, 8)
    angle = draw(2, 1, 4)
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()).norm(dim=-1), x.norm(dim=-1))  # a rotation
    normed, total = norm(x, x, torch.ones(8))
    torch.testing.assert_close(normed.pow(2).mean(-1), torch.ones(2, 1), atol=1e-3, rtol=0)
    torch.testing.assert_close(total, 2 * x)

    model = model_of(SMALL)
    taken = []

    def take(*shape):
        taken.append(math.prod(shape))
        return torch.zeros(shape, dtype=torch.bfloat16)

    def matrix(n, k):
        weight = take(n, k)
        return lambda x: x @ weight.T

    decoder = Decoder(model, take, matrix, torch.device("cpu"))
    assert sum(taken) == model.num_params - model.other_params - sum(one.norm_params for one in model.layers)
    with torch.inference_mode():
        assert decoder.step(2, 64, 32)().shape == (3,)  # a token per sequence


def test_cpu_plan_is_the_minimum_of_seven_interleaved_rounds():
    assert (CPU_PLAN.rounds, CPU_PLAN.statistic) == (7, "minimum")
