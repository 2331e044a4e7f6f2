"""Arrival times by a rule, as `vllm bench serve` makes them (vllm/benchmarks/serve.py, 0.33)."""

import math

import numpy as np

from ..spec.workload import RampUp, Workload
from .draws import generator


def draw_arrivals(workload: Workload, n: int, seed: int) -> np.ndarray:
    """f8[n], seconds: sums of gamma distributed gaps with shape `burstiness` and mean 1/rate (CV = 1/sqrt(burstiness)).

    With a constant rate the sums are scaled so that the last request arrives at n/rate exactly: the rate of a run does
    not depend on its seed. With a ramp each gap has its own rate and nothing is scaled. The first gap is before the
    first request. An infinite rate is all at time 0.
    """
    rate = ramp_rates(workload.ramp_up, n) if workload.ramp_up else workload.request_rate
    if np.isscalar(rate) and math.isinf(rate):
        return np.zeros(n)
    if math.isinf(workload.burstiness):
        gaps = np.ones(n)
    else:
        gaps = generator(seed, "arrivals").standard_gamma(workload.burstiness, n) / workload.burstiness
    if workload.ramp_up:
        return np.cumsum(gaps / rate)
    times = np.cumsum(gaps)
    return times / times[-1] * (n / rate) if times[-1] > 0 else times


def ramp_rates(ramp_up: RampUp, n: int) -> np.ndarray:
    """f8[n], 1/s: the rate at each request, by its share i/(n - 1) of the way."""
    progress = np.arange(n) / max(n - 1, 1)
    start, end = ramp_up.start_rps, ramp_up.end_rps
    if ramp_up.strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
