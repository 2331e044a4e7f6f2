"""Replications: means and 95 % confidence intervals."""

import math
from functools import cache
from statistics import fmean, stdev

LEVEL = 0.95


def student_t_cdf(t: float, df: int) -> float:
    """P(T <= t) for Student's t with whole degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(odd, df - 1, 2):
        total += term
        term *= cos2 * (k + 1) / (k + 2)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 + inside) / 2


@cache
def student_t(p: float, df: int) -> float:
    """The quantile p >= 0.5 of Student's t, by bisection."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, df) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_cdf(middle, df) < p else (low, middle)
    return high


def combine(runs: list[dict[str, float | None]]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Means over independent replications, and the half-widths of their 95 % confidence intervals (Student's t).

    A metric that a replication does not have is None in both; with one replication there are no intervals.
    """
    means: dict[str, float | None] = {}
    half_widths: dict[str, float | None] = {}
    for name in runs[0]:
        values = [value for run in runs if (value := run[name]) is not None]
        known = len(values) == len(runs)
        means[name] = fmean(values) if known else None
        if len(runs) > 1:
            quantile = student_t((1 + LEVEL) / 2, len(runs) - 1)
            half_widths[name] = quantile * stdev(values) / math.sqrt(len(runs)) if known else None
    return means, half_widths
