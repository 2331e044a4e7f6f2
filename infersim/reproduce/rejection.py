"""Speculative decoding as its papers have it (Leviathan et al. 2023, Chen et al. 2023): modified rejection sampling,
which makes it exact (A.1; theorem 1), and closed forms. alpha, k and c as in cost/speculation.py."""

from collections.abc import Sequence
from math import inf

import numpy as np

from infersim.cost.speculation import tokens_per_step


def speculate(target: np.ndarray, draft: np.ndarray, steps: int, random: np.random.Generator) -> tuple:
    """Many independent steps on given distributions.

    target: f8[k + 1, V], the target's distribution at each position; draft: f8[k, V]. Returns accepted: i8[steps], and
    tokens: i8[steps, k + 1], -1 after the accepted prefix and the token that follows it.

    A draft x is accepted with min(1, p(x) / q(x)); the first refused position draws from max(0, p - q), normalised; if
    all are accepted the target gives one token more.
    """
    k = len(draft)
    tokens = np.full((steps, k + 1), -1)
    accepted = np.zeros(steps, "i8")
    alive = np.arange(steps)
    for i in range(k):
        proposal = _draw(draft[i], len(alive), random)
        keep = random.random(len(alive)) * draft[i][proposal] < target[i][proposal]
        residual = np.maximum(target[i] - draft[i], 0.0)
        tokens[alive[keep], i] = proposal[keep]
        if not keep.all():
            tokens[alive[~keep], i] = _draw(residual / residual.sum(), int((~keep).sum()), random)
        alive = alive[keep]
        accepted[alive] += 1
    tokens[alive, k] = _draw(target[k], len(alive), random)
    return accepted, tokens


def _draw(probabilities: np.ndarray, n: int, random: np.random.Generator) -> np.ndarray:
    return random.choice(len(probabilities), n, p=probabilities)


def tokens_per_step_by_position(conditional: Sequence[float]) -> float:
    """The same where position i is accepted with conditional[i] once all before it are."""
    return 1.0 + float(np.cumprod(conditional).sum())


def operations_ratio(alpha: float, k: int, c_flops: float) -> float:
    """Arithmetic with speculation over that without; c_flops: draft FLOPs over target FLOPs (theorem 3.11)."""
    return (k * c_flops + k + 1) / tokens_per_step(alpha, k)


def speedup_with_oracle(alpha: float, c: float) -> float:
    """Speed-up if a step drafted exactly what is accepted: 1 / (1 - alpha) tokens for alpha / (1 - alpha) drafts."""
    return inf if alpha == 1 and c == 0 else 1 / (1 - alpha + c * alpha)


def alpha_of(tokens: float, k: int) -> float:
    """The alpha with which k drafts emit `tokens` per step, 1 <= tokens <= k + 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, k) < tokens else (low, middle)
    return (low + high) / 2
