"""Arrival times by a rule, as `vllm bench serve` makes them (vllm/benchmarks/serve.py, 0.33)."""

import math

import numpy as np

from ..config.workload import RampUp, Workload
from .draws import generator


def draw_arrivals(workload: Workload, n: int, seed: int) -> np.ndarray:
    """f8[n], seconds: sums of gamma distributed gaps with shape `burstiness` and mean 1/rate (CV = 1/sqrt(burstiness)).

    With a constant rate the sums are scaled so that the last request arrives at n/rate exactly: the rate of a run does
    not depend on its seed. With a ramp each gap has its own rate and nothing is scaled. The first gap is before the
    first request. An infinite rate is all at time 0.
    """
    rate = workload.request_rate
    if not workload.ramp_up and rate == math.inf:
        return np.zeros(n)
    if math.isinf(workload.burstiness):
        gaps = np.ones(n)
    else:
        gaps = generator(seed, "arrivals").standard_gamma(workload.burstiness, n) / workload.burstiness
    if workload.ramp_up:
        return np.cumsum(gaps / ramp_rates(workload.ramp_up, n))
    assert rate is not None
    times = np.cumsum(gaps)
    times = times / times[-1] * (n / rate) if times[-1] > 0 else times
    return warped(times, workload) if workload.curve or workload.spikes else times


def warped(times: np.ndarray, workload: Workload) -> np.ndarray:
    """Arrivals of a constant rate, moved so that at time t there are `curve` and `spikes` times as many of them.

    A process of rate r f(t) is one of rate r at the times F(t), the integral of f (exact for a Poisson process).
    """
    curve = workload.curve or [(0.0, 1.0), (1.0, 1.0)]
    period = curve[-1][0]
    edges = {0.0} | {time for spike in workload.spikes for time in (spike.at, spike.at + spike.duration)}
    mean = np.trapezoid([f for _, f in curve], [t for t, _ in curve]) / period
    end = times[-1] / min(mean, 1.0) + max(edges) + period
    steps = max(int(min(256 * max(end / period, 1), 2e6)), 4096)  # straight pieces: 1/256 of a period
    grid = np.unique(np.concatenate((np.linspace(0.0, end * 2, steps), np.array(sorted(edges)))))
    middle = (grid[1:] + grid[:-1]) / 2
    factor = np.interp(middle % period, *np.array(curve).T)
    for spike in workload.spikes:
        factor = np.where((middle >= spike.at) & (middle < spike.at + spike.duration), factor * spike.factor, factor)
    integral = np.concatenate(([0.0], np.cumsum(factor * np.diff(grid))))
    return np.interp(times, integral, grid)


def ramp_rates(ramp_up: RampUp, n: int) -> np.ndarray:
    """f8[n], 1/s: the rate at each request, by its share i/(n - 1) of the way."""
    progress = np.arange(n) / max(n - 1, 1)
    start, end = ramp_up.start_rps, ramp_up.end_rps
    if ramp_up.strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
