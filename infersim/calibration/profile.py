"""A calibrated profile: the datasheet's where there is one, with what was measured laid over it."""

import datetime
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from infersim.config.hardware import Calibration, Hardware, LaunchTime, Link, load_hardware
from infersim.config.resources import names
from infersim.files import replace_text

from .cases import amounts
from .efficiencies import fit_all, step_errors
from .measure import Measurement, repeat_spread


def datasheet(info: dict[str, Any]) -> Hardware | None:
    """The packaged profile of the device that torch describes: of those with a name (also_called) all of whose words
    torch says, the one that says most. None if there is none (a CPU)."""
    words, found, most = info["device"].replace("-", " ").split(), None, 0
    for profile in map(load_hardware, names("hardware_profiles")):
        for name in profile.also_called:
            said = name.replace("-", " ").split()
            if len(said) > most and all(word in words for word in said):
                found, most = profile, len(said)
    return found


def measured_peaks(measurements: list[Measurement], info: dict[str, Any]) -> Hardware:
    """A profile whose peaks are the fastest that was measured: efficiencies are shares of them."""
    sound = [one for one in measurements if not one.rejected]
    bandwidth = 0.0
    flops: dict[Any, float] = {}
    for one in sound:
        if one.case.kind == "copy" and info.get("copy_bytes"):
            bandwidth = max(bandwidth, info["copy_bytes"] / one.seconds)
        elif one.case.kind == "linear":
            moved, work = amounts(one.case)
            if 2 * moved > info["cache_bytes"] / 16:
                bandwidth = max(bandwidth, moved / one.seconds)
            dtype = one.case.dtype
            if dtype in ("bf16", "fp16", "fp32", "fp8", "int8"):
                flops[dtype] = max(flops.get(dtype, 0.0), work / one.seconds)
    memory = int(info["memory_bytes"])
    source = "the fastest measured, " + info["device"]
    is_cpu = "threads" in info
    return Hardware(
        name="cpu" if is_cpu else info["device"].lower().replace(" ", "-"),
        vendor="cpu" if is_cpu else "unknown",
        generation="cpu" if is_cpu else "unknown",
        memory_capacity=memory,
        memory_usable=memory,
        memory_bandwidth=bandwidth or 1e9,
        flops={dtype: float(f"{value:.4g}") for dtype, value in flops.items()} or {"bf16": 1e9},
        num_sms=info.get("num_sms"),
        l2_cache=info["cache_bytes"],
        link=Link(name="none", bandwidth=bandwidth or 1e9, domain_size=1),
        sources=[source],
    )


def calibrate(
    measurements: list[Measurement], info: dict[str, Any], base: Hardware | None, notes: list[str]
) -> Hardware:
    """The calibrated profile. `base`: the datasheet's, None where only measurements say what the device can do."""
    hardware = base or measured_peaks(measurements, info)
    stack = f"torch {info['torch']}"
    source = f"infersim calibrate device: {stack} on {info['device']}"
    others = hardware.efficiency
    hardware = fit_all(measurements, hardware.model_copy(update={"efficiency": {}}), source)
    classes = {key.partition(".")[0] for key in hardware.efficiency}
    kept = {key: row for key, row in others.items() if key.partition(".")[0] not in classes}
    hardware = hardware.model_copy(update={"efficiency": kept | hardware.efficiency})
    needed = ["gemm.bf16", "attention_prefill", "attention_decode", "elementwise"]
    if missing := [key for key in needed if key not in hardware.efficiency]:
        words = ", ".join(missing)
        notes = [*notes, f"too few sound measurements of {words}: the efficiency there stays as it was"]
    sound = {one.case.kind: one.seconds for one in measurements if not one.rejected}
    if "launch_eager" in sound and "launch_graph" in sound:
        eager, graph = (float(f"{sound[f'launch_{how}']:.4g}") for how in ("eager", "graph"))
        launch = LaunchTime(graph=min(graph, eager), eager=eager, source=source)
        hardware = hardware.model_copy(update={"launch": launch})
    spread = repeat_spread(measurements)
    errors = {f"step, {kind}": str(found) for kind, found in step_errors(measurements, hardware).items()}
    errors |= {f"layer, {kind}": str(e) for kind, e in step_errors(measurements, hardware, "layer").items()}
    calibration = Calibration(
        device=info["device"],
        driver=str(info["driver"]),
        stack=info["stack"],
        version=info["torch"],
        date=datetime.date.today().isoformat(),
        command=shlex.join(["infersim", *sys.argv[1:]]),
        repeat_spread=0.0 if math.isnan(spread) else float(f"{spread:.3g}"),
        errors=errors,
        notes=notes,
    )
    return hardware.model_copy(update={"calibration": calibration})


def write_profile(hardware: Hardware, path: Path) -> None:
    """The profile as YAML that `load_hardware` reads."""
    data = {key: value for key, value in hardware.model_dump(mode="json").items() if value not in (None, "", {}, [])}
    head = f"# {hardware.name}, calibrated: infersim show profile {path}\n"
    text = head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
    replace_text(path, text, "--out")
