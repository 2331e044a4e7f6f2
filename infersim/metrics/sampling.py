"""How far chance may have moved the latencies of one run: 95 % intervals from the run itself."""

import math

import numpy as np

from .confidence import LEVEL, student_t
from .latency import P_SHARES, PERCENTILES, quantiles, samples
from .result import Result
from .verdict import STABLE, TOO_SHORT, Verdict

BATCHES = (5, 10)  # of a run's requests: their spread is that of the mean
LEAST, MOST = 20, 100_000  # requests: with more, chance hardly matters
EXCURSIONS = 10  # beyond a percentile: fewer do not tell how far they go


def intervals(result: Result, verdict: Verdict) -> dict[str, list[float | None]] | None:
    """Of the mean and each percentile of ttft, tpot and e2el (ms), [low, high] within which it would lie in 95 of 100
    runs, as far as chance goes: high None where the run does not bound it.

    None of a system that does not keep up, whose percentiles a longer run would not keep, and of a burst, which has no
    chance in time. Where a run is too short to tell whether it keeps up, or to be in balance, nothing
    bounds them above.
    """
    load = result.scenario.workload
    closed = load.users or load.max_concurrency
    if verdict.state not in (STABLE, TOO_SHORT) or (verdict.burst and not closed):
        return None
    if not LEAST <= len(done := result.done) <= MOST:
        return None
    if (done["sent"][1:] < done["sent"][:-1]).any():
        done = done[np.argsort(done["sent"], kind="stable")]
    found: dict[str, list[float | None]] = {}
    for metric, values in samples(done).items():
        ms = values * 1e3
        if pair := mean_interval(ms):
            found[f"mean_{metric}_ms"] = list(pair)
        for name, limits in zip(PERCENTILES, percentile_intervals(ms, P_SHARES), strict=False):
            found[f"{name}_{metric}_ms"] = limits
    if not verdict.in_balance:
        found = {name: [low, None] for name, (low, _) in found.items()}
    return found or None


def mean_interval(values: np.ndarray) -> list[float] | None:
    """[low, high] of the mean of f8[n] >= 0 in order of time: Student's t on batch means, the wider of BATCHES."""
    if len(values) < LEAST:
        return None
    half = max(float(_of_batches(values, b)) * student_t((1 + LEVEL) / 2, b - 1) for b in BATCHES)
    mean = float(values.mean())
    return [max(mean - half, 0.0), mean + half]


def percentile_intervals(values: np.ndarray, shares: np.ndarray) -> list[list[float | None]]:
    """[low, high] of the quantile at each of `shares` of f8[n] in order of time, whose values depend on those before;
    none of fewer than LEAST.

    Order statistics, as of n independent values, but counted as fewer: n is divided by how much the share above the
    quantile varies from batch to batch, or from one excursion above it (until half of the values are above) to the
    next, against independent values; the interval of that share is Wilson's. high is None where fewer than EXCURSIONS
    went there, or none would go as far: the run does not bound it. Coverage of M/M/1 queues: tests.
    """
    n = len(values)
    if n < LEAST:
        return []
    ordered = np.sort(values)
    *at, middle = quantiles(ordered, np.array([*shares, 0.5]))
    above, below = values > np.array(at)[:, None], values <= middle
    varied = np.max([_of_batches(above, batches) for batches in BATCHES], axis=0)
    found: list[list[float | None]] = []
    for share, over, error in zip(shares.tolist(), above, varied.tolist(), strict=True):
        sizes, spread = _excursions(over, below), share * (1 - share)
        alike = 1 + float(np.var(sizes)) / float(np.mean(sizes)) ** 2 if len(sizes) > 1 else 2.0
        fewer = max(1.0, n * (1 - share) / max(len(sizes), 1) * alike, error**2 * n / spread)
        t = student_t((1 + LEVEL) / 2, min(max(len(sizes), 2), max(BATCHES)) - 1)
        a = t * t * fewer / n
        centre, half = (share + a / 2) / (1 + a), t * math.sqrt(spread * fewer / n + a * fewer / n / 4) / (1 + a)
        low = max(math.floor((centre - half) * (n + 1)), 1)
        high = math.ceil((centre + half) * (n + 1))
        bounded = high <= n and len(sizes) >= EXCURSIONS
        found.append([float(ordered[low - 1]), float(ordered[high - 1]) if bounded else None])
    return found


def _of_batches(values: np.ndarray, batches: int) -> np.ndarray:
    """The standard error of the mean over the last axis, from means of batches of consecutive values."""
    n = values.shape[-1]
    sizes = np.full(batches, n // batches) + (np.arange(batches) < n % batches)
    means = np.add.reduceat(values, np.cumsum(sizes) - sizes, axis=-1, dtype="f8") / sizes
    return means.std(axis=-1, ddof=1) / math.sqrt(batches)


def _excursions(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """i8[m]: how many values of each excursion are above; it ends with the first that is below."""
    there = above[above | below]
    begins = np.flatnonzero(there & ~np.concatenate(([False], there[:-1])))
    return np.add.reduceat(there, begins, dtype="i8") if len(begins) else np.zeros(0, "i8")
