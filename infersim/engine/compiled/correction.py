"""The correction of an attention price: a grid over a step's work, and the keys that each unit sees. Compiled."""

import numpy as np

from .njit import compiled
from .state import CORRECTION


@compiled
def place(x, first, knots_per_unit, knots):
    """Where log2 x (linear between powers of two: a float's bits) stands among a grid's knots."""
    log2 = np.float64(x).view(np.int64) * 2.0**-52 - 1023.0
    return min(max((log2 - first) * knots_per_unit, 0.0), knots - 1.0)


@compiled
def exponential(x):
    """e**x, within 0.01 % for |x| up to 1: the square of the [2/2] Pade approximant of half of it."""
    half = 0.5 * x
    even, odd = 12.0 + half * half, 6.0 * half
    root = (even + odd) / (even - odd)
    return root * root


@compiled
def correction(axes, grid, work, mean):
    """What a law's time is multiplied with at so much work, each unit with so many keys."""
    x = place(work, axes[0], axes[1], CORRECTION[0])
    y = place(mean, axes[2], axes[3], CORRECTION[1])
    i, j = min(int(x), CORRECTION[0] - 2), min(int(y), CORRECTION[1] - 2)
    x, y = x - i, y - j
    low = grid[i, j] + (grid[i, j + 1] - grid[i, j]) * y
    high = grid[i + 1, j] + (grid[i + 1, j + 1] - grid[i + 1, j]) * y
    return exponential(low + (high - low) * x)
