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

    A process of rate r f(t) is one of rate r at the times F(t), the integral of f (exact for a Poisson process). f is
    the curve times one factor between two edges of spikes.
    """
    curve = Curve(workload.curve or [(0.0, 1.0), (1.0, 1.0)])
    edges = np.unique([0.0, *(time for spike in workload.spikes for time in (spike.at, spike.at + spike.duration))])
    factor = np.ones(len(edges))
    for spike in workload.spikes:
        factor[(edges >= spike.at) & (edges < spike.at + spike.duration)] *= spike.factor
    of_curve = curve.integral(edges)
    reached = np.concatenate(([0.0], np.cumsum(np.diff(of_curve) * factor[:-1])))
    piece = np.searchsorted(reached, times, side="right") - 1
    return curve.inverse(of_curve[piece] + (times - reached[piece]) / factor[piece])


class Curve:
    """Straight lines between points (s, factor), over and over."""

    def __init__(self, points: list[tuple[float, float]]):
        self.times, self.factors = np.array(points).T
        gaps = np.diff(self.times)
        self.slopes = np.diff(self.factors) / gaps
        self.reached = np.concatenate(([0.0], np.cumsum(gaps * (self.factors[1:] + self.factors[:-1]) / 2)))
        """f8[n], s: the integral up to each point"""

    def integral(self, times: np.ndarray) -> np.ndarray:
        """f8[n], s: from 0 to each time."""
        periods, rest = np.divmod(times, self.times[-1])
        piece = np.clip(np.searchsorted(self.times, rest, side="right") - 1, 0, len(self.slopes) - 1)
        more = rest - self.times[piece]
        within = self.reached[piece] + more * (self.factors[piece] + self.slopes[piece] * more / 2)
        return periods * self.reached[-1] + within

    def inverse(self, integrals: np.ndarray) -> np.ndarray:
        """f8[n], s: when the integral comes to each."""
        periods, rest = np.divmod(integrals, self.reached[-1])
        piece = np.clip(np.searchsorted(self.reached, rest, side="right") - 1, 0, len(self.slopes) - 1)
        more, factor = rest - self.reached[piece], self.factors[piece]
        root = np.sqrt(np.maximum(factor**2 + 2 * self.slopes[piece] * more, 0.0))
        return periods * self.times[-1] + self.times[piece] + 2 * more / (factor + root)


def ramp_rates(ramp_up: RampUp, n: int) -> np.ndarray:
    """f8[n], 1/s: the rate at each request, by its share i/(n - 1) of the way."""
    progress = np.arange(n) / max(n - 1, 1)
    start, end = ramp_up.start_rps, ramp_up.end_rps
    if ramp_up.strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
