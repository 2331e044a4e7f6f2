"""Host and engine overheads of a live server, from benchmark runs: what is left when the device's time is known.

They are fitted by least squares on relative errors of mean TTFT and mean TPOT: time per step, per sequence in a step
and per request, and by name time per prompt token, a request's latency before the scheduler, the launch of a kernel
outside CUDA graphs, and the API server's time per streamed token. With async scheduling host time is hidden behind the
device, so that what can be seen of steps and sequences is what the device waits for (worker_*); without it, what the
engine core takes (host_*).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario

from .replay import Predicted, mismatches, predict
from .results import Measured

GROUPS = 10  # of consecutive requests of a run: their means are what is fitted, free of single requests' chance
SMALLEST_GROUP = 5
ROUNDS = 6
REPEAT = 1e-3  # relative error with which a benchmark repeats itself at best
CONFIDENCE = 2.0  # standard errors


@dataclass(frozen=True)
class Overhead:
    """A parameter of the fit."""

    kind: str
    probe: float
    """s by which it is moved to see what it does"""
    resolution: float
    """s that no answer depends on"""
    remedy: str
    """which run would identify it"""


OVERHEADS = {
    "step": Overhead(
        "step", 0.5e-3, 0.1e-3,
        "runs whose batches differ, such as --max-concurrency 1 and --max-concurrency {peak}, each --num-prompts 100",
    ),
    "sequence": Overhead(
        "sequence", 10e-6, 2e-6,
        "runs whose batches differ, such as --max-concurrency 1 and --max-concurrency {peak}, each --num-prompts 100",
    ),
    "request": Overhead(
        "request", 2e-3, 1e-3,
        "a run at a low rate, where TTFT is no queueing, such as --request-rate {low:.2g} --num-prompts 100",
    ),
    "prompt": Overhead(
        "prompt", 5e-6, 1e-6,
        "runs of prompts that differ in length, such as --random-input-len 128 and --random-input-len 8192, each"
        " --request-rate {low:.2g}",
    ),
    "latency": Overhead("latency", 5e-3, 1e-3, "a run at a low rate, such as --request-rate {low:.2g}"),
    "launch": Overhead(
        "launch", 10e-6, 2e-6, "a run of prompts of 600 to 1,000 tokens, one at a time: --max-concurrency 1",
    ),
    "token": Overhead(
        "token", 20e-6, 5e-6, "a run that streams more than the server can, such as --max-concurrency {peak}",
    ),
}  # fmt: skip
USUAL = ("step", "sequence", "request")
"""fitted unless others are named"""
SETTINGS = {
    "request": "host_request_time", "prompt": "host_prompt_token_time", "latency": "host_request_latency",
    "launch": "eager_launch_time", "token": "host_token_time",
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Fitted overheads under their names in the scenario's `engine`, in s."""

    values: dict[str, float]
    uncertainty: dict[str, float]
    """two standard errors, s"""
    before: list[dict[str, float]]
    after: list[dict[str, float]]
    held_out: list[dict[str, float]]
    """relative errors of mean ttft and tpot, one row per run: before, after, and after on requests not fitted"""
    fitted: list[int]
    """how many requests of each run were fitted"""
    warnings: list[str]
    """what files and scenario say otherwise"""


def setting(kind: str, is_async: bool) -> str:
    """The engine setting that holds an overhead."""
    return SETTINGS.get(kind) or f"{'worker' if is_async else 'host'}_{kind}_time"


def fit_overheads(
    scenario: Scenario,
    runs: list[Measured],
    kinds: list[str],
    fit_requests: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Fit:
    """Fit `kinds` of OVERHEADS on the first `fit_requests` requests of each run (default: half of them).

    InputError if the runs leave one of them open, with the run that would close it.
    """
    if any(getattr(group, "engine", None) for group in scenario.cluster.groups):
        raise InputError(
            "cluster: replicas have engines of their own; must be one, the scenario's, to fit overheads of"
        )
    start = [predict(scenario, one) for one in runs]
    is_async = start[0].result.engine.async_scheduling
    names = [setting(kind, is_async) for kind in kinds]
    fitted = [_fitted_rows(one, fit_requests) for one in runs]
    count = itertools.count(1)

    def residuals(values: np.ndarray) -> np.ndarray:
        engine = scenario.engine.model_copy(update=dict(zip(names, values.tolist(), strict=True)))
        changed = scenario.model_copy(update={"engine": engine})
        predicted = [predict(changed, one) for one in runs]
        progress(next(count))
        errors = [_errors(p, m, rows) for p, m, rows in zip(predicted, runs, fitted, strict=True)]
        return np.concatenate([found.get(metric, []) for metric in ("ttft", "tpot") for found in errors])

    found = [_errors(p, m, rows) for p, m, rows in zip(start, runs, fitted, strict=True)]
    is_tpot = np.repeat([0, 1], [sum(len(one.get(metric, [])) for one in found) for metric in ("ttft", "tpot")])
    probes = np.array([OVERHEADS[kind].probe for kind in kinds])
    values, errors, slopes, weights = _least_squares(residuals, probes, is_tpot)
    uncertainty = _uncertainty(weights * errors, weights[:, None] * slopes)
    _check_identified(kinds, names, values, uncertainty, slopes * probes, start, runs)
    engine = scenario.engine.model_copy(update=dict(zip(names, values.tolist(), strict=True)))
    after = [predict(scenario.model_copy(update={"engine": engine}), one) for one in runs]
    rest = [slice(rows.stop, None) for rows in fitted]
    return Fit(
        dict(zip(names, values.tolist(), strict=True)),
        dict(zip(names, (CONFIDENCE * uncertainty).tolist(), strict=True)),
        [mean_errors(p, m, rows) for p, m, rows in zip(start, runs, fitted, strict=True)],
        [mean_errors(p, m, rows) for p, m, rows in zip(after, runs, fitted, strict=True)],
        [mean_errors(p, m, rows) for p, m, rows in zip(after, runs, rest, strict=True)],
        [rows.stop or run.num_requests for rows, run in zip(fitted, runs, strict=True)],
        [text for run, one in zip(runs, start, strict=True) for text in mismatches(scenario, run, one.result)],
    )


def _fitted_rows(run: Measured, fit_requests: int | None) -> slice:
    """Rows to fit on; a run without rows is fitted whole."""
    if run.requests is None:
        return slice(0, 0)
    n = len(run.requests)
    return slice(0, min(fit_requests or -(-n // 2), n))


def mean_errors(predicted: Predicted, measured: Measured, rows: slice) -> dict[str, float]:
    """Relative errors of mean ttft and tpot over these rows; empty where there are none."""
    if measured.requests is not None and not len(measured.ttft[rows]):
        return {}
    ours, theirs = predicted.metrics(rows if measured.requests is not None else slice(None)), measured.metrics(rows)
    names = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms"}
    return {key: ours[name] / theirs[name] - 1 for key, name in names.items() if theirs.get(name) and ours.get(name)}


def _errors(predicted: Predicted, measured: Measured, rows: slice) -> dict[str, list[float]]:
    """Logarithms of predicted over measured, of every group's mean TTFT and TPOT."""
    if measured.requests is None:
        return {name: [math.log1p(error)] for name, error in mean_errors(predicted, measured, rows).items()}
    n = rows.stop
    edges = np.linspace(0, n, max(1, min(GROUPS, n // SMALLEST_GROUP)) + 1).astype(int)
    found: dict[str, list[float]] = {}
    for name, ours, theirs in (("ttft", predicted.ttft, measured.ttft), ("tpot", predicted.tpot, measured.tpot)):
        for low, high in itertools.pairwise(edges):
            known = ~np.isnan(theirs[low:high])
            if known.any():
                ratio = ours[low:high][known].mean() / theirs[low:high][known].mean()
                found.setdefault(name, []).append(math.log(ratio))
    return found


def _least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], probes: np.ndarray, kind: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Values >= 0 by Gauss-Newton with forward differences; residuals f8[m], slopes f8[m, k], weights f8[m].

    Each `kind` i8[m] of residual counts by its own spread (queues make TTFT noisier than TPOT), and those far off the
    rest of their kind less (a server that warms up).
    """
    values = np.zeros(len(probes))
    errors = residuals(values)
    slopes, weights = np.zeros((len(errors), len(probes))), np.ones(len(errors))
    for _ in range(ROUNDS):
        for i, probe in enumerate(probes):
            slopes[:, i] = (residuals(values + probe * (np.arange(len(probes)) == i)) - errors) / probe
        target = slopes @ values - errors
        for _ in range(5):
            aim = bounded_solution(weights[:, None] * slopes, weights * target)
            weights = _weights(slopes @ aim - target, kind)
        step, before = aim - values, np.sum((weights * errors) ** 2)
        for _ in range(4):
            tried = residuals(values + step)
            after = np.sum((weights * tried) ** 2)
            if after < before:
                break
            step = step / 2
        else:
            break
        values, errors = values + step, tried
        if after > (1 - 1e-3) * before or np.all(np.abs(step) < 0.02 * probes):
            break
    values, errors = _polish(residuals, values, errors, weights, probes)
    return values, errors, slopes, weights


def _polish(
    residuals: Callable[[np.ndarray], np.ndarray],
    values: np.ndarray,
    errors: np.ndarray,
    weights: np.ndarray,
    probes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Compass search around the values: a schedule that flips makes a bumpy sum of squares, where slopes mislead."""
    size = 0.2
    while size > 0.01:
        for step in itertools.chain.from_iterable((size * row, -size * row) for row in np.diag(probes)):
            tried = np.maximum(values + step, 0.0)
            found = residuals(tried) if np.any(tried != values) else errors
            if np.sum((weights * found) ** 2) < np.sum((weights * errors) ** 2):
                values, errors = tried, found
                break
        else:
            size /= 2
    return values, errors


def _weights(errors: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """One over each kind's robust standard deviation; less beyond 1.345 of them (Huber, Robust Statistics, 1981)."""
    weights = np.zeros(len(errors))
    for one in np.unique(kind):
        size = np.abs(errors[kind == one])
        scale = max(1.4826 * float(np.median(size)), REPEAT)
        weights[kind == one] = np.sqrt(np.minimum(1.0, 1.345 * scale / np.maximum(size, 1.345 * scale))) / scale
    return weights


def bounded_solution(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |matrix x - target|: the best of all choices of which are 0 (a few columns only)."""
    k = matrix.shape[1]
    best, found = math.inf, np.zeros(k)
    for size in range(k + 1):
        for free in itertools.combinations(range(k), size):
            x = np.zeros(k)
            if free:
                x[list(free)] = np.linalg.lstsq(matrix[:, free], target, rcond=1e-10)[0]
            distance = float(np.sum((matrix @ x - target) ** 2))
            if (x >= 0).all() and distance < best * (1 - 1e-12):
                best, found = distance, x
    return found


def _uncertainty(errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Standard errors f8[k] of the values, from weighted errors and slopes; inf where the data leave one open."""
    m, k = slopes.shape
    scale = np.sqrt((slopes**2).sum(axis=0))
    unit = np.divide(slopes, scale, out=np.zeros_like(slopes), where=scale > 0)
    gram = unit.T @ unit
    if m <= k or np.linalg.cond(gram) > 1e8:
        return np.full(k, math.inf)
    noise = max(math.sqrt(errors @ errors / (m - k)), 0.5)  # in standard deviations of their kind
    return noise * np.sqrt(np.diag(np.linalg.inv(gram))) / scale


def _check_identified(
    kinds: list[str],
    names: list[str],
    values: np.ndarray,
    uncertainty: np.ndarray,
    effects: np.ndarray,
    start: list[Predicted],
    runs: list[Measured],
) -> None:
    peak = max(p.result.peak_running for p in start)
    alone = min(float(np.median(p.ttft) + np.median(p.e2el - p.ttft)) for p in start)
    problems = []
    for i, kind in enumerate(kinds):
        overhead = OVERHEADS[kind]
        if CONFIDENCE * uncertainty[i] <= max(0.5 * values[i], overhead.resolution):
            continue
        moved = float(np.abs(effects[:, i]).max(initial=0.0))
        others = " and ".join(name for j, name in enumerate(names) if j != i)
        if moved < 1e-3:
            why = f"{_time(overhead.probe)} more of it changes nothing that was measured"
        elif math.isinf(uncertainty[i]):
            why = f"it cannot be told from {others}" if others else "there is only one measurement"
        else:
            why = f"it is {_time(values[i])} +- {_time(CONFIDENCE * uncertainty[i])}"
        remedy = overhead.remedy.format(peak=max(peak, 16), low=0.3 / alone)
        slower = [mean_errors(p, m, slice(None)).get("tpot", 0.0) for p, m in zip(start, runs, strict=True)]
        if values[i] == 0 and min(slower) > 0:
            why += (
                f"; without any overhead the prediction is slower than the server already (tpot {min(slower):+.1%}):"
                " calibrate the device first"
            )
        rest = [other for other in kinds if other != kind]
        fix = f"; or fit {' and '.join('--fit ' + other for other in rest)} only" if rest else ""
        where = ", ".join(run.where for run in runs)
        problems.append(f"{where}: engine.{names[i]} is not identified: {why}; add {remedy}{fix}")
    if problems:
        raise InputError(problems)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.5e-3 or seconds == 0 else f"{seconds * 1e6:.3g} us"
