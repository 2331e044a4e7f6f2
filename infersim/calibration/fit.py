"""Fitting: a law's few numbers by a pattern search."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

OUTLIER = 0.5
"""beyond this logarithm an error counts no more: a kernel that went wrong must not bend the others"""
ROUNDS = 60


class Parameter(NamedTuple):
    """One number to fit: where to start, how far to go first, and its bounds. Logarithmic if `ratio`."""

    name: str
    start: float
    low: float
    high: float
    ratio: bool = True


def search(loss: Callable[[dict[str, float]], float], parameters: list[Parameter]) -> dict[str, float]:
    """The parameters of least loss nearby: each is moved up or down as long as that helps, in ever smaller steps."""
    x = np.array([np.log(p.start) if p.ratio else p.start for p in parameters])
    low = np.array([np.log(p.low) if p.ratio else p.low for p in parameters])
    high = np.array([np.log(p.high) if p.ratio else p.high for p in parameters])
    step = np.array([0.3 if p.ratio else max(p.start, 0.25 * p.high, 1e-12) / 2 for p in parameters])
    x = np.clip(x, low, high)

    def value(x: np.ndarray) -> float:
        return loss({p.name: float(np.exp(v) if p.ratio else v) for p, v in zip(parameters, x, strict=True)})

    best = value(x)
    for _ in range(ROUNDS):
        improved = False
        for i in range(len(x)):
            for sign in (1.0, -1.0):
                trial = x.copy()
                trial[i] = np.clip(x[i] + sign * step[i], low[i], high[i])
                if trial[i] != x[i] and (there := value(trial)) < best - 1e-7:
                    best, x, improved = there, trial, True
                    break
        if not improved:
            step /= 2
            if step.max() < 1e-4 * np.maximum(1.0, np.abs(x)).max():
                break
    return {p.name: float(np.exp(v) if p.ratio else v) for p, v in zip(parameters, x, strict=True)}


def mean_error(log_ratio: np.ndarray) -> float:
    """The loss: mean absolute logarithm of predicted over measured, outliers cut."""
    return float(np.minimum(np.abs(log_ratio), OUTLIER).mean())
