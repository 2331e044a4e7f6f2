"""`infersim calibrate device`, all of it: measure, fit, predict what was held back, write."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.config.hardware import Hardware
from infersim.files import replace_text
from infersim.report.calibration_page import calibration_page

from .cases import CPU, GPU, Sizes, amounts, cases, model_of, quick
from .efficiencies import predict, step_errors
from .measure import CPU_PLAN, DRIFT, GPU_PLAN, QUICK, Measurement, Plan, measure, saved_drift
from .profile import calibrate, datasheet, write_profile

WEIGHTS_SHARE = 0.35  # of the memory that the random model may take


def measurements_path(out: Path) -> Path:
    """Where the raw measurements of a profile lie."""
    return out.with_suffix(".measurements.jsonl")


def page_path(out: Path) -> Path:
    """Where the report of a profile lies."""
    return out.with_suffix(".html")


def check_out(out: Path, force: bool) -> None:
    """InputError if there is a profile already. `force` removes it and its measurements."""
    if out.exists() and not force:
        raise InputError(f"--out {out}: exists; must be a new file, or add --force")
    if not out.parent.is_dir() or out.is_dir() or out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {out}: must be a .yaml file in a folder that exists")
    if force:
        measurements_path(out).unlink(missing_ok=True)


def open_device(name: str, is_quick: bool) -> tuple[Any, Sizes]:
    """The torch device and the shapes for it. InputError without torch, or where there is no such device."""
    try:
        import torch
    except ImportError:
        raise InputError("calibrate device: needs PyTorch; pip install 'infersim[gpu]'") from None
    from .torch_device import TorchDevice

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise InputError(f"--device {name[:40]}: must be cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise InputError(
            f"--device {name}: torch {torch.__version__} sees {there} CUDA devices; must be one of them, or cpu"
        )
    if kind == "cuda":
        torch.cuda.set_device(int(number or 0))
    sizes = CPU if kind == "cpu" else GPU
    sizes = quick(sizes) if is_quick else sizes
    return TorchDevice(name, _fitting_model(sizes, kind, torch)), sizes


def _fitting_model(sizes: Sizes, kind: str, torch: Any) -> Any:
    """The random model with as many layers as the memory has room for."""
    model = model_of(sizes)
    if kind == "cpu":
        return model
    room = WEIGHTS_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2
    per_layer = model.layers[0].num_params(model.hidden_size)
    layers = int((room - 2 * model.vocab_size * model.hidden_size) // per_layer)
    if layers < 1:
        raise InputError("--device cuda: has too little memory for a layer of the model that is measured")
    return model_of(sizes, min(model.num_layers, layers))


def calibrate_device(
    device: Any,
    sizes: Sizes,
    out: Path,
    plan: Plan,
    base: Hardware | None = None,
    progress: Callable[[int, int, int], None] = lambda done, total, found: None,
) -> dict[str, Any]:
    """Measure, fit, write the profile and its report; the JSON-ready document that the terminal shows.

    `base` is the datasheet's profile of the device, if there is one.
    """
    raw = measurements_path(out)
    listed = cases(sizes, device.model, device.info.get("devices", 1))
    measured = measure(device, listed, plan, raw, base, progress)
    notes = [f"{plan.statistic} of {plan.rounds} interleaved rounds"]
    if (slower := saved_drift(raw, plan)) > DRIFT:
        notes.append(
            f"the device slowed down by {slower:.0%} while it was measured: a clock that throttles, or neighbours"
        )
    if hasattr(device, "power") and (power := device.power()):
        notes.append(
            f"under a large multiplication: {power['power_w']:.0f} W, SM clock {power['sm_clock_mhz']:.0f} MHz"
        )
    notes += [
        f"{key[:-2].replace('_', ' ')}: {value} s" for key, value in device.info.items() if key.startswith("flex_")
    ]
    sound = [one for one in measured if not one.rejected]
    if not any(one.case.kind == "linear" for one in sound):
        raise InputError(
            f"{raw}: no measurement of a linear layer is usable ({_reasons(measured)}); nothing is fitted and"
            f" {out} is not written; measure again when the machine is less busy (--force starts over)"
        )
    hardware = calibrate(measured, device.info, base, notes)
    document = describe(hardware, measured)
    replace_text(page_path(out), calibration_page(document), "--out")
    write_profile(hardware, out)
    return document | {"files": [str(out), str(raw), str(page_path(out))]}


def _reasons(measured: list[Measurement]) -> str:
    reasons = [one.rejected for one in measured if one.case.kind == "linear"]
    return max(set(reasons), key=reasons.count) if reasons else "none was tried"


def describe(hardware: Hardware, measured: list[Measurement]) -> dict[str, Any]:
    """What the reports show of a calibration."""
    assert hardware.calibration is not None
    sound = [one for one in measured if not one.rejected]
    steps = [
        {"name": one.case.name, "kind": one.case.name.split(".")[1], "measured": one.seconds,
         "predicted": predict(one.case, hardware), "spread": one.spread}
        for one in sound if one.case.group == "step"
    ]  # fmt: skip
    points = []
    for one in sound:
        moved, flops = amounts(one.case)
        if one.case.group and moved and flops and one.case.dtype == "bf16":
            points.append({"group": one.case.group, "intensity": flops / moved, "rate": flops / one.seconds})
    failures = step_errors(measured, hardware)
    return {
        "name": hardware.name,
        "calibration": hardware.calibration.model_dump(mode="json"),
        "memory_bandwidth": hardware.memory_bandwidth,
        "peak": hardware.flops.get("bf16") or max(hardware.flops.values()),
        "efficiency": {key: row.model_dump(mode="json") for key, row in hardware.efficiency.items()},
        "launch": hardware.launch.model_dump(mode="json") if hardware.launch else None,
        "steps": steps,
        "step_error": str(failures["all"]),
        "step_error_median": float(np.median(failures["all"].values)) if len(failures["all"].values) else math.nan,
        "error_bound": max(0.15, 2 * hardware.calibration.repeat_spread),
        "points": points,
        "measured": len(sound),
        "rejected": [{"name": one.case.name, "why": one.rejected} for one in measured if one.rejected],
    }


def plan_of(device: Any, is_quick: bool) -> Plan:
    """How often this device is measured."""
    plan = GPU_PLAN if getattr(device, "is_cuda", False) else CPU_PLAN
    return QUICK[plan.statistic] if is_quick else plan


def base_of(device: Any) -> Hardware | None:
    """The datasheet's profile of what torch sees."""
    return datasheet(device.info)
