"""Prompt and output lengths drawn from a description."""

import math

import numpy as np

from ..config.workload import MAX_TOKENS, Length, Lognormal

Z90 = 1.2815515655446004
"""90th percentile of the standard normal distribution"""


def draw_lengths(length: int | Length, n: int, random: np.random.Generator) -> np.ndarray:
    """i4[n] of at least 1. Request i takes the i-th draw of the stream."""
    if isinstance(length, int):
        return np.full(n, length, np.int32)
    if length.lognormal:
        mu, sigma = lognormal_parameters(length.lognormal)
        with np.errstate(over="ignore"):
            tokens = np.exp(mu + sigma * random.standard_normal(n))
        return np.clip(np.rint(tokens), 1, length.lognormal.max or MAX_TOKENS).astype(np.int32)
    if length.quantiles:
        return np.rint(np.interp(random.random(n), *length.quantile_points())).astype(np.int32)
    if length.uniform:
        shortest, longest = length.uniform
    else:
        assert length.mean is not None and length.range_ratio is not None  # of the four forms, one is given
        shortest, longest = random_range(length.mean, length.range_ratio)
    return (shortest + np.floor(random.random(n) * (longest - shortest + 1))).astype(np.int32)


def random_range(mean: int, ratio: float) -> tuple[int, int]:
    """Shortest and longest of vLLM's random dataset (0.11 and 0.33). SGLang's ratio means another thing."""
    return max(math.floor(mean * (1 - ratio)), 1), math.ceil(mean * (1 + ratio))


def lognormal_parameters(given: Lognormal) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm: median = exp(mu), mean = exp(mu + sigma^2 / 2)."""
    median, mean = given.median, given.mean
    if median is None:
        assert mean is not None and given.sigma is not None  # what is given suffices
        return math.log(mean) - given.sigma**2 / 2, given.sigma
    if given.sigma is not None:
        sigma = given.sigma
    elif given.p90 is not None:
        sigma = math.log(given.p90 / median) / Z90
    else:
        assert mean is not None
        sigma = math.sqrt(2 * math.log(mean / median))
    return math.log(median), sigma
