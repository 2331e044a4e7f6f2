"""Fitting: a law's few numbers by a pattern search, and the grid of what it leaves by penalised medians."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from infersim.cost.correction import weights

OUTLIER = 0.5
"""beyond this logarithm an error counts no more: a kernel that went wrong must not bend the others"""
ROUNDS = 60
SHRINKAGE = 0.1
"""penalty on the distance from no correction, as a part of that on the difference of neighbouring knots"""
MEDIAN_WIDTH = 0.02


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


def fit_grid(
    axes: list[tuple[float, float, int]], coordinates: list[np.ndarray], residual: np.ndarray, smoothness: float
) -> np.ndarray:
    """The grid whose interpolation is nearest to `residual` in the mean absolute difference, smooth between knots:
    `smoothness` is the penalty on the square of neighbours' differences, against that of a typical row's.

    Iteratively reweighted least squares; knots without rows near them take after their neighbours.
    """
    shape = tuple(count for _, _, count in axes)
    knots = np.arange(np.prod(shape)).reshape(shape)
    index = np.zeros((len(residual), 1), dtype=int)
    share = np.ones((len(residual), 1))
    for axis, coordinate in zip(axes, coordinates, strict=True):
        below, above_share = (part[:, None] for part in weights(axis, coordinate))
        above = np.minimum(below + 1, axis[2] - 1)
        index = np.concatenate([index * axis[2] + below, index * axis[2] + above], axis=1)
        share = np.concatenate([share * (1.0 - above_share), share * above_share], axis=1)
    penalty = np.eye(knots.size) * SHRINKAGE * smoothness
    for which in range(len(shape)):
        rows = np.moveaxis(knots, which, 0)
        low, high = rows[:-1].ravel(), rows[1:].ravel()
        np.add.at(penalty, (low, low), smoothness)
        np.add.at(penalty, (high, high), smoothness)
        np.add.at(penalty, (low, high), -smoothness)
        np.add.at(penalty, (high, low), -smoothness)
    grid: np.ndarray = np.zeros(knots.size)
    for _ in range(8):
        weight = 1.0 / np.maximum(np.abs(residual - (share * grid[index]).sum(1)), MEDIAN_WIDTH)
        weight /= weight.mean()
        matrix, vector = penalty.copy(), np.zeros(knots.size)
        for a in range(index.shape[1]):
            np.add.at(vector, index[:, a], weight * share[:, a] * residual)
            for b in range(index.shape[1]):
                np.add.at(matrix, (index[:, a], index[:, b]), weight * share[:, a] * share[:, b])
        grid = np.linalg.solve(matrix, vector)
    return grid.reshape(shape)
