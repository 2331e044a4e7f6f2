"""Acceptance descriptions made tables: for each kind of request, the chance that the first i drafts are accepted."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ..config.errors import InputError
from ..config.speculation import Acceptance, Speculation

QUANTILES = 64  # equally likely values that stand for a continuous spread over requests


@dataclass(frozen=True)
class AcceptanceTable:
    """accepted: f8[rows, 2, depth], chance that a step accepts at least i + 1 drafts, after a step that did not accept
    all of its drafts (0) or did (1); share: f8[rows], of the requests, summing to 1; in_turn: rows go to requests by
    their id instead.
    """

    accepted: np.ndarray
    share: np.ndarray
    in_turn: bool = False

    def rows(self, request_ids: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """i4[n]: each request's row; uniform: f8[n], a draw in [0, 1) of its own."""
        if self.in_turn:
            return (request_ids % len(self.share)).astype("i4")
        return np.minimum(np.searchsorted(self.share.cumsum(), uniform, "right"), len(self.share) - 1).astype("i4")

    @property
    def tokens_per_step(self) -> np.ndarray:
        """f8[rows]: mean tokens that a step of each row emits, its own bonus token included."""
        after_other, after_full = self.accepted[:, 0], self.accepted[:, 1]
        enter, stay = after_other[:, -1], after_full[:, -1]
        full = enter / (1 - stay + enter + (stay >= 1))  # share of steps that follow a fully accepted one
        full = np.where(stay >= 1, (enter > 0) * 1.0, full)
        return 1 + (1 - full) * after_other.sum(1) + full * after_full.sum(1)

    def tokens_by_drafts(self, most: int) -> np.ndarray:
        """f8[most + 1]: the same for steps that verify only so many drafts; a tree accepts up to its depth."""
        depth = self.accepted.shape[2]
        cut = [AcceptanceTable(self.accepted[:, :, : min(k, depth)], self.share) for k in range(1, most + 1)]
        return np.array([1.0, *(table.mean_tokens_per_step for table in cut)])

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens over steps of all requests, each with the same number of tokens."""
        return float(1 / (self.share / self.tokens_per_step).sum())


def acceptance_table(speculation: Speculation, base: Path = Path()) -> AcceptanceTable:
    """The table of a description. InputError if a trace cannot be read."""
    if speculation.acceptance is not None:
        return _table(speculation.acceptance, speculation.depth, base)
    classes = (speculation.classes or {}).values()
    parts = [_table(each, speculation.depth, base) for each in classes]
    if any(part.in_turn for part in parts):
        raise InputError("speculation.classes: a trace assigns every request itself; must stand in acceptance")
    shares = np.array([each.share for each in classes])
    accepted = np.concatenate([part.accepted for part in parts])
    share = np.concatenate([part.share * each for part, each in zip(parts, shares / shares.sum(), strict=True)])
    return AcceptanceTable(accepted, share)


def _table(acceptance: Acceptance, depth: int, base: Path) -> AcceptanceTable:
    spreads = np.full(depth, acceptance.spread * acceptance.later_spread_share)
    spreads[0] = acceptance.spread
    if acceptance.trace is not None:
        rates = np.array([_stretch(row, depth) for row in _read_trace(base / acceptance.trace)])
        accepted = np.repeat(rates.cumprod(1)[:, None], 2, axis=1)
        return AcceptanceTable(accepted, np.full(len(rates), 1 / len(rates)), in_turn=True)
    if acceptance.match is not None:
        accepted = _matching(acceptance.match.enter, acceptance.match.stay, spreads, depth)
    else:
        accepted = np.repeat(spread_over_requests(conditional_rates(acceptance, depth), spreads)[:, None], 2, axis=1)
    return AcceptanceTable(accepted, np.full(len(accepted), 1 / len(accepted)))


def conditional_rates(acceptance: Acceptance, depth: int) -> np.ndarray:
    """f8[depth]: chance that each position is accepted, given that all before it were."""
    if acceptance.rate is not None:
        return np.full(depth, acceptance.rate)
    if acceptance.conditional is not None:
        return _stretch(acceptance.conditional, depth)
    if acceptance.synthetic_acceptance_rates is not None:
        marginal = np.array([1.0, *acceptance.synthetic_acceptance_rates])
    else:  # the earliest positions are spent first
        assert acceptance.synthetic_acceptance_length is not None
        marginal = np.concatenate([[1.0], np.clip(acceptance.synthetic_acceptance_length - 1 - np.arange(depth), 0, 1)])
    before = marginal[:-1]
    return _stretch(np.where(before > 0, marginal[1:] / np.where(before > 0, before, 1), 0.0), depth)


def spread_over_requests(conditional: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Chances of whole prefixes for equally likely kinds of requests whose log-odds vary, f8[rows, depth].

    conditional, spreads: f8[depth]. Requests of many tokens per step have few steps; the conditional rates over all
    steps of requests of the same length are those given.
    """
    if not spreads.any():
        return conditional.cumprod()[None]
    normal = NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
    weights = np.full(QUANTILES, 1 / QUANTILES)
    for _ in range(20):
        prefix, prefixes = np.ones(QUANTILES), []
        for rate, spread in zip(conditional, spreads, strict=True):
            prefix = prefix * _with_mean(rate, spread * z, weights * prefix)
            prefixes.append(prefix)
        accepted = np.array(prefixes).T
        weights = 1 / (1 + accepted.sum(1))
        weights /= weights.sum()
    return accepted


def _with_mean(mean: float, shift: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Probabilities whose log-odds differ by `shift` and whose weighted mean is `mean` (Newton's method)."""
    total = weights.sum()
    if not 1e-12 < mean < 1 - 1e-12 or total == 0:
        return np.full(len(shift), mean)
    middle = math.log(mean / (1 - mean))
    for _ in range(40):
        rates = 1 / (1 + np.exp(-(middle + shift)))
        error = (weights * rates).sum() / total - mean
        before = middle
        middle -= max(-2.0, min(2.0, error * total / (weights * rates * (1 - rates)).sum()))
        if middle == before:
            break
    return rates


def _matching(enter: float, stay: float, spreads: np.ndarray, depth: int) -> np.ndarray:
    """f8[rows, 2, depth] of the two-state chain: a refused draft did not match; the token after a full step may."""
    if spreads.any():
        normal = NormalDist()
        z = np.array([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
        even = np.full(QUANTILES, 1 / QUANTILES)
        enters = _with_mean(enter, spreads[0] * z, even)
        stays = _with_mean(stay, spreads[-1] * z * (depth > 1), even)
    else:
        enters, stays = np.array([enter]), np.array([stay])
    onwards = stays[:, None] ** np.arange(depth)
    after_full = stays * stays + (1 - stays) * enters
    return np.stack([enters[:, None] * onwards, after_full[:, None] * onwards], axis=1)


def _stretch(values, depth: int) -> np.ndarray:
    """The first `depth` values, the last one repeated."""
    values = np.asarray(values, float)[:depth]
    return np.concatenate([values, np.full(depth - len(values), values[-1])])


def _read_trace(path: Path) -> list[list[float]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [[float(cell) for cell in row if cell.strip()] for row in csv.reader(file) if row]
    except OSError as error:
        raise InputError(f"speculation.acceptance.trace: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"speculation.acceptance.trace: {path}: {error}; must be numbers from 0 to 1") from None
    if not rows or not all(row and all(0 <= rate <= 1 for rate in row) for row in rows):
        raise InputError(f"speculation.acceptance.trace: {path}: must be a line per request of numbers from 0 to 1")
    return rows
