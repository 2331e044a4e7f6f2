"""How far predictions were from measurements, by kind of deployment: the interval beside each headline figure.

hardware_profiles/published/errors.csv, which `tests/fidelity/run.py --errors` writes, has a line for each load under
which somebody measured a deployment that no choice of the cost model was made on: ln(measured / predicted).
"""

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from infersim.config.hardware import Hardware
from infersim.config.published import generation_of, profile
from infersim.config.resources import packaged
from infersim.metrics.result import Result
from infersim.models.architecture import MoE

LEVEL = 0.8
LEAST = 8
"""deployments of a kind; fewer tell nothing about 4 in 5"""
LOADS = {"light": 8, "medium": 64, "heavy": math.inf}
"""requests in a replica at once, up to"""
FIGURES = {"ttft": ("mean_ttft_ms", "TTFT"), "tpot": ("mean_tpot_ms", "TPOT"), "e2e": ("mean_e2el_ms", "E2E"),
           "throughput": ("output_throughput", "output tokens/s")}  # fmt: skip
"""what was measured -> our metric, its name"""
ALSO = {"itl": "tpot", "e2el": "e2e", "ttft": "ttft", "tpot": "tpot"}
"""metric of a limit -> whose errors are taken for it; of percentiles those of the mean"""
MATCH = (("model", "engine", "load"), ("model", "load"), ("model",))
"""what must be alike beside device and pools, the closest kind first"""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """A kind of deployment, in the words of errors.csv."""

    model: str
    """dense or MoE"""
    engine: str
    device: str
    """calibrated: its profile has kernels of its own; sibling: another device of its generation has; datasheet"""
    pools: str
    """aggregated, or pools for prefill and decode"""
    load: str
    """a key of LOADS"""


def load_of(requests: float) -> str:
    """The load region of so many requests in a replica at once."""
    return next(name for name, most in LOADS.items() if requests <= most)


def device_of(hardware: Hardware) -> str:
    """What the efficiencies of a device rest on."""
    if hardware.efficiency:
        return "calibrated"
    near = (profile(name) for name in (hardware.efficiencies_of, *generation_of(hardware).efficiencies_of) if name)
    alike = any(each and each.efficiency and each.generation == hardware.generation for each in near)
    return "sibling" if alike else "datasheet"


def kind_of(result: Result) -> Kind:
    """The kind of what ran; of several devices the one that least is known of."""
    deployments = [ran.deployment for ran in result.ran if ran.role != "encode"]
    devices = {device_of(deployment.hardware) for deployment in deployments}
    available = float(result.replicas.available.sum())
    return Kind(
        "MoE" if any(isinstance(layer.mlp, MoE) for d in deployments for layer in d.model.layers) else "dense",
        deployments[0].engine.engine,
        next(name for name in ("datasheet", "sibling", "calibrated") if name in devices),
        "pools" if result.scenario.cluster.prefill else "aggregated",
        load_of(result.outstanding_time / available if available > 0 else 0.0),
    )


@cache
def measured() -> dict[str, np.ndarray]:
    """The columns of errors.csv: text, or ln(measured / predicted), NaN where it was not measured."""
    path = packaged("hardware_profiles") / "published" / "errors.csv"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    head, *rows = (line.split(",") for line in lines)
    columns = dict(zip(head, map(np.array, zip(*rows, strict=True)), strict=True))
    return columns | {name: np.array([float(x or "nan") for x in columns[name]]) for name in FIGURES}


def spread(errors: np.ndarray, deployments: np.ndarray, level: float = LEVEL) -> Interval:
    """Within which one more deployment's errors lie with a chance of `level`, if it is like these n: order statistics
    (1 - level) / 2 (n + 1) from both ends. A deployment counts once, however often it was measured."""
    _, which, counts = np.unique(deployments, return_inverse=True, return_counts=True)
    order, n = np.argsort(errors), len(counts)
    weights = (1.0 / counts[which])[order]
    tail = ((1 - level) / 2 * (n + 1) - 0.5) / n
    low, high = np.interp([tail, 1 - tail], (np.cumsum(weights) - weights / 2) / n, errors[order])
    return float(low), float(high)


def error_of(
    kind: Kind, figure: str, rows: dict[str, np.ndarray] | None = None
) -> tuple[Interval, dict[str, Any]] | None:
    """The interval of ln(measured / predicted) of a figure, and `like` (what was alike), `deployments` and `loads`
    that it rests on. None: too few deployments of the kind were measured."""
    rows = measured() if rows is None else rows
    known = np.isfinite(rows[figure]) & (rows["device"] == kind.device) & (rows["pools"] == kind.pools)
    if kind.engine not in rows["engine"]:
        return None
    for alike in MATCH:
        chosen = known.copy()
        for name in alike:
            chosen &= rows[name] == getattr(kind, name)
        deployments = rows["deployment"][chosen]
        if (count := len(set(deployments.tolist()))) >= LEAST:
            basis = {"like": list(alike), "deployments": count, "loads": int(chosen.sum())}
            return spread(rows[figure][chosen], deployments), basis
    return None


@cache
def _known_error(kind: Kind, figure: str) -> tuple[Interval, dict[str, Any]] | None:
    return error_of(kind, figure)


def model_error(result: Result, metrics: dict[str, float | None], kept_up: bool = False) -> dict[str, Any]:
    """How far the figures of a run are from what deployments of its kind had, JSON-ready; it is no sampling error.

    `intervals`: metric -> the two ends within which LEVEL of them lie, in its unit; `factors`: the same of measured
    over predicted, by figure; `basis`: what each rests on; `text`: in words. With `kept_up` throughput is the load's.
    """
    kind, factors, basis = kind_of(result), {}, {}
    if not (other := _unmeasured(result)):
        for figure in FIGURES:
            if found := _known_error(kind, figure):
                factors[figure], basis[figure] = tuple(map(math.exp, found[0])), found[1]
    intervals = {
        metric: [value * factor for factor in factors[figure]]
        for figure, (metric, _) in FIGURES.items()
        if (value := metrics.get(metric)) is not None and figure in factors and not (kept_up and figure == "throughput")
    }
    text = _words(kind, metrics, intervals, basis)
    if not intervals:
        what = f"with {other}" if other else f"like this ({_kind_words(kind, ['model', 'engine'])})"
        text = [f"no interval: fewer than {LEAST} deployments {what} were measured on which nothing was chosen"]
    return {
        "level": LEVEL,
        "kind": asdict(kind),
        "intervals": intervals,
        "factors": factors,
        "basis": basis,
        "text": text,
    }


def ends_of(error: dict[str, Any], limited: str, value: float | None) -> Interval | None:
    """Within which a limited metric, such as p99_ttft_ms, lies in LEVEL of the deployments of a `model_error`'s kind,
    if its value is predicted; for a percentile stand the errors of the mean."""
    found = error["factors"].get(ALSO.get(limited.split("_")[1], ""))
    return (value * found[0], value * found[1]) if found and value is not None else None


def _unmeasured(result: Result) -> str:
    """What of a run no measured deployment had."""
    scenario, names = (
        result.scenario,
        {"speculation": "speculation", "lora": "LoRA adapters", "early_exit": "early exit"},
    )
    found = [words for name, words in names.items() if any(getattr(ran.deployment, name, None) for ran in result.ran)]
    return " and ".join(found + ["encoders of their own"] * bool(scenario.cluster.encode))


def _kind_words(kind: Kind, alike: list[str]) -> str:
    devices = {"calibrated": "calibrated devices", "sibling": "devices of a calibrated generation",
               "datasheet": "devices known by their datasheet"}[kind.device]  # fmt: skip
    engine = kind.engine if "engine" in alike else "any engine"
    load = f"{kind.load} load" if "load" in alike else "any load"
    return ", ".join([f"{kind.model} models", engine, devices, *(["pools"] if kind.pools == "pools" else []), load])


def _words(kind: Kind, metrics: dict, intervals: dict[str, list[float]], basis: dict[str, dict]) -> list[str]:
    """One sentence for the figures whose measurements were as much alike."""
    groups: dict[str, list[str]] = {}
    least: dict[str, int] = {}
    for figure, (metric, name) in FIGURES.items():
        if metric in intervals:
            like = _kind_words(kind, basis[figure]["like"])
            value, low, high = (f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in (metrics[metric], *intervals[metric]))
            words = f"{value} {name}" if figure == "throughput" else f"{name} {value} ms"
            groups.setdefault(like, []).append(f"{words} ({low} to {high})")
            least[like] = min(least.get(like, basis[figure]["deployments"]), basis[figure]["deployments"])
    return [f"{', '.join(figures)} in 4 of 5 deployments of this kind ({like}; {least[like]} or more were measured)"
            for like, figures in groups.items()]  # fmt: skip
