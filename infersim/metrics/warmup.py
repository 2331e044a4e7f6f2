"""Warm-up removal: which requests at the start belong to an empty system that fills, not to the steady state."""

import math

import numpy as np

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.engine.compiled.state import COMPLETED

BATCH = 5


def mser5(values: np.ndarray) -> int:
    """How many of the first f8[n] values to leave out: MSER-5 (White, Cobb & Spratt, Winter Simulation Conf. 2000).

    Means of 5 values each; the cut that minimises the squared standard error of what remains, at most half of them.
    """
    batches = values[: len(values) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    n = len(batches)
    if n < 2:
        return 0
    remaining = np.arange(n, 0, -1)
    centred = batches - batches.mean()  # against cancellation
    sums, squares = (np.cumsum(x[::-1])[::-1] for x in (centred, centred**2))
    error = (squares - sums**2 / remaining) / remaining.astype("f8") ** 2
    return BATCH * int(np.argmin(error[: n // 2 + 1]))


def check_warmup(scenario: Scenario) -> None:
    """InputError if the warm-up cannot be found by itself: that needs requests at one rate all the time."""
    load = scenario.workload
    stationary = load.request_rate is not None and math.isfinite(load.request_rate)
    if scenario.simulation.warmup == "auto" and not stationary:
        raise InputError(
            "simulation.warmup: auto needs a workload with a finite request_rate, which this one has not;"
            " must be a number of seconds, 0 to measure everything"
        )


def warmup_time(scenario: Scenario, requests: np.ndarray) -> float:
    """Seconds of warm-up; `auto` is MSER-5 over the e2el of the completed engine.state.REQUEST[n] in order of sending.

    InputError if nothing would be left to measure.
    """
    warmup = scenario.simulation.warmup
    if warmup == 0:
        return 0.0
    done = requests[requests["status"] == COMPLETED]
    if warmup == "auto":
        done = done[np.argsort(done["sent"], kind="stable")]
        cut = mser5(done["last_token"] - done["sent"])
        return float(done["sent"][cut]) if cut else 0.0
    if warmup > 0 and len(done) and warmup > done["sent"].max():
        last = done["sent"].max()
        raise InputError(
            f"simulation.warmup: {warmup:g} s leaves no request to measure;"
            f" must be at most {math.floor(1e3 * last) / 1e3:g} s: the last one is sent then"
        )
    return warmup
