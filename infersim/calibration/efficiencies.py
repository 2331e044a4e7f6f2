"""Measured cases -> efficiencies, as the cost model has them: fitted to part of the shapes, checked on the others."""

from dataclasses import dataclass

import numpy as np

from infersim.config.hardware import Hardware, OperatorEfficiency
from infersim.cost.roofline import add_time, peak_flops, rate, zero_split

from .cases import Case, amounts
from .fit import Parameter, mean_error, search
from .measure import Measurement

LEAST = 4  # cases to fit a class on
HELD_OUT = 3  # every third shape is held out

PARAMETERS = {
    "gemm": ("bandwidth", "flops", "fixed", "softness"),
    "attention_prefill": ("flops", "fixed"),  # arithmetic binds at every length: bytes cannot be seen beside it
    "attention_decode": ("bandwidth", "fixed"),  # FLOPs and bytes both grow with the keys: one cannot tell them apart
    "elementwise": ("bandwidth", "fixed"),
    "collective": ("bandwidth", "fixed"),
}


@dataclass(frozen=True)
class Errors:
    """Relative errors |predicted / measured - 1| of some cases."""

    values: np.ndarray

    def __str__(self) -> str:
        if not len(self.values):
            return "none"
        return f"median {np.median(self.values):.1%}, p90 {np.quantile(self.values, 0.9):.1%}, {len(self.values)} cases"


def predict(case: Case, hardware: Hardware) -> float:
    """Seconds that the cost model says a case takes on this device."""
    total = 0.0
    for operator, sums in case.work:
        split = zero_split()
        add_time(split, operator, rate(hardware, operator), sums)
        total += float(split.sum())
    return total


def with_row(hardware: Hardware, key: str, row: OperatorEfficiency) -> Hardware:
    """The device with one efficiency more."""
    return hardware.model_copy(update={"efficiency": hardware.efficiency | {key: row}})


def fit_all(measurements: list[Measurement], hardware: Hardware, source: str) -> Hardware:
    """The device with a calibrated row for each class and dtype that has enough sound measurements."""
    groups: dict[str, list[Measurement]] = {}
    for one in measurements:
        group = one.case.group
        if group in PARAMETERS and not one.rejected:
            dtype = one.case.dtype
            if group == "gemm" and dtype not in hardware.flops and dtype != "int4":
                continue  # no peak to have a share of
            groups.setdefault(f"{group}.{dtype}" if group == "gemm" else group, []).append(one)
    for key, found in groups.items():
        row = fit_class(key, found, hardware, source)
        if row is not None:
            hardware = with_row(hardware, key, row)
    return hardware


def split(measurements: list[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Fitted and held out: every third shape in order of size, never the first."""
    ordered = sorted(measurements, key=lambda one: (sum(amounts(one.case)), one.case.name))
    held = ordered[HELD_OUT - 1 :: HELD_OUT] if len(ordered) > LEAST else []
    return [one for one in ordered if one not in held], held


def fit_class(key: str, measurements: list[Measurement], hardware: Hardware, source: str) -> OperatorEfficiency | None:
    """The row of one class (class or class.dtype); None if there are too few cases."""
    if len(measurements) < LEAST:
        return None
    fitted, held = split(measurements)
    names = PARAMETERS[key.partition(".")[0]]
    least = min(one.seconds / sum(op.count for op, _ in one.case.work) for one in measurements)
    reached = {"bandwidth": 0.0, "flops": 0.0}  # no share is smaller than what some case reaches
    for one in fitted:
        moved, flops = amounts(one.case)
        reached["bandwidth"] = max(reached["bandwidth"], moved / one.seconds / hardware.memory_bandwidth)
        reached["flops"] = max(reached["flops"], flops / one.seconds / peak_flops(hardware, one.case.work[0][0]))
    choices = {
        name: Parameter(name, min(1.0, 1.1 * max(share, 1e-4)), 1e-4, 1.0) for name, share in reached.items()
    } | {
        "fixed": Parameter("fixed", 0.5 * least, 1e-10, 10 * least),
        "softness": Parameter("softness", 0.07, 5e-4, 1.0),
    }

    def row(values: dict[str, float], **more) -> OperatorEfficiency:
        numbers = {"bandwidth": 1.0, "flops": 1.0, "fixed": 0.0, "softness": 0.036} | values
        rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
        return OperatorEfficiency(**rounded, provenance="calibrated", source=source, **more)

    def errors(candidate: OperatorEfficiency, chosen: list[Measurement]) -> np.ndarray:
        device = with_row(hardware, key, candidate)
        return np.array([np.log(predict(one.case, device) / one.seconds) for one in chosen])

    rough = search(lambda v: float(np.abs(errors(row(v), fitted)).mean()), [choices[name] for name in names])
    nearby = [choices[name]._replace(start=rough[name]) for name in names]
    values = search(lambda v: mean_error(errors(row(v), fitted)), nearby)
    found = row(values)
    described = {"fitted": str(Errors(np.abs(np.expm1(errors(found, fitted)))))}
    if held:
        described["held out"] = str(Errors(np.abs(np.expm1(errors(found, held)))))
    return row(values, errors=described)


def step_errors(measurements: list[Measurement], hardware: Hardware, group: str = "step") -> dict[str, Errors]:
    """Errors of what was measured and not fitted: by kind of step (decode, prefill, mixed), and all together."""
    by_kind: dict[str, list[float]] = {}
    for one in measurements:
        if one.case.group == group and not one.rejected:
            error = abs(predict(one.case, hardware) / one.seconds - 1)
            by_kind.setdefault(one.case.name.split(".")[1], []).append(error)
    found = {kind: Errors(np.array(values)) for kind, values in by_kind.items()}
    return found | {"all": Errors(np.array([value for values in by_kind.values() for value in values]))}
