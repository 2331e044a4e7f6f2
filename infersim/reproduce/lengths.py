"""Lengths of which a paper prints moments only."""

from typing import Any

import numpy as np

SHARES = (0.0, 0.5, *(float(percent) for percent in range(1, 100)), 99.5, 99.9, 99.99, 99.999, 100.0)  # percent


def most_even(mean: float, longest: int, variation: float | None = None) -> dict[str, Any]:
    """The distribution on 1 ... longest tokens that assumes nothing but its mean and, if given, its coefficient of
    variation, as `quantiles` of a workload: that of most entropy, exp(-a x - b x^2), b = 0 without a variation
    (Jaynes 1957, Information theory and statistical mechanics).
    """
    scaled = np.arange(1, longest + 1) / mean
    powers = np.stack([scaled] if variation is None else [scaled, scaled**2])
    wanted = np.array([1.0] if variation is None else [1.0, 1 + variation**2])
    multipliers = np.zeros(len(wanted))
    for _ in range(200):  # Newton's, no step longer than 1
        exponent = -multipliers @ powers
        p = np.exp(exponent - exponent.max())
        p /= p.sum()
        moments = powers @ p
        if np.abs(moments - wanted).max() < 1e-9:
            break
        step = np.linalg.solve((powers * p) @ powers.T - np.outer(moments, moments), moments - wanted)
        multipliers += step / max(1.0, np.abs(step).max())
    ends = np.interp(np.array(SHARES) / 100, np.append(0.0, p.cumsum()), np.arange(longest + 1) + 0.5)
    return {"quantiles": {f"p{share:g}": float(x) for share, x in zip(SHARES, ends.clip(1, longest), strict=True)}}
