"""What measured kernels deviate from their law, as a grid over the logarithms of a few quantities.

A correction multiplies a time. Between the knots of its axes it is linear in its own logarithm; beyond them it stays
what it is at the last one.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from infersim.config.hardware import Correction


def exp2(y) -> np.ndarray:
    """The inverse of the engine's log2."""
    return np.round((np.asarray(y, dtype=float) + 1023.0) * 2.0**52).astype(np.int64).view(float)


@lru_cache(maxsize=256)
def _table(values: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.array(values.split(), dtype=float).reshape(shape) / 1000.0


def table(correction: Correction) -> np.ndarray:
    """The natural logarithm of the correction at the knots, one axis of the array per axis, in their order."""
    return _table(correction.values, tuple(count for _, _, count in correction.axes.values()))


def weights(axis: tuple[float, float, int], coordinate) -> tuple[np.ndarray, np.ndarray]:
    """Index of the knot below, and the share of the one above, for coordinates on one axis (first, last, count)."""
    first, last, count = axis
    if count == 1:
        return np.zeros(np.shape(coordinate), dtype=int), np.zeros(np.shape(coordinate))
    place = np.clip((np.asarray(coordinate, dtype=float) - first) * (count - 1) / (last - first), 0.0, count - 1.0)
    below = np.minimum(place.astype(int), count - 2)
    return below, place - below


def interpolate(values: np.ndarray, axes: list[tuple[float, float, int]], coordinates: list) -> np.ndarray:
    """The multilinear interpolation of `values` at coordinates: numbers, or arrays of one shape."""
    varying = []
    for axis, coordinate in zip(axes, coordinates, strict=True):
        if axis[2] > 1 and np.ndim(coordinate):
            varying.append(weights(axis, coordinate))
            continue
        below, share = weights(axis, coordinate if np.ndim(coordinate) == 0 else coordinate[0])  # one knot: any will do
        at = len(varying)  # the axes before are kept
        low = values.take(int(below), axis=at)
        high = values.take(min(int(below) + 1, axis[2] - 1), axis=at)
        values = low + share * (high - low)
    total: Any = 0.0
    for corner in range(2 ** len(varying)):
        index: list[Any] = []
        weight: Any = 1.0
        for i, (below, share) in enumerate(varying):
            above = corner >> i & 1
            index.append(below + above)
            weight = weight * (share if above else 1.0 - share)
        total = total + weight * values[tuple(index)]
    return total


def factor(correction: Correction | None, coordinates: Mapping[str, np.ndarray]) -> np.ndarray | float:
    """What to multiply a law's time with at these coordinates, by axis name; 1 without a correction."""
    if correction is None:
        return 1.0
    at = [coordinates[name] for name in correction.axes]
    return np.exp(interpolate(table(correction), list(correction.axes.values()), at))
