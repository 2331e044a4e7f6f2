"""Closed forms of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

A step drafts k tokens and verifies them in one pass of the target; what it emits is the accepted prefix and one token
more. alpha is the chance that a draft is accepted; c the time of one draft pass over that of one target pass.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

MAX_K = 64  # drafts per step beyond which nobody looks for an optimum


def acceptance_rate(target: np.ndarray, draft: np.ndarray) -> float:
    """Chance that a token drawn from `draft` is accepted: the sum of min(p, q) (Leviathan, theorem 3.5)."""
    return float(np.minimum(target, draft).sum())


def tokens_per_step(alpha: float, k: int) -> float:
    """Tokens that a step of k drafts emits on average, each accepted alike (Leviathan, equation 1)."""
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def tokens_per_step_by_position(conditional: Sequence[float]) -> float:
    """The same where position i is accepted with conditional[i] once all before it are."""
    return 1.0 + float(np.cumprod(conditional).sum())


def speedup(alpha: float, k: int, c: float) -> float:
    """Wall time without speculation over that with it, verification as cheap as a step (Leviathan, theorem 3.8)."""
    return tokens_per_step(alpha, k) / (k * c + 1)


def operations_ratio(alpha: float, k: int, c_flops: float) -> float:
    """Arithmetic with speculation over that without; c_flops: draft FLOPs over target FLOPs (theorem 3.11)."""
    return (k * c_flops + k + 1) / tokens_per_step(alpha, k)


def best_k(alpha: float, c: float) -> int:
    """The number of drafts with the largest `speedup`; 0 if none gains (alpha <= c, corollary 3.9)."""
    return max(range(MAX_K + 1), key=lambda k: speedup(alpha, k, c))


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


def tokens_needed(draft_time: float, step_time: float, verify_time: float | None = None) -> float:
    """Tokens per step from which on speculation gains: (draft + verification) / plain step, all of one step.

    With verification as cheap as a step: 1 + C_draft / C_target.
    """
    return (draft_time + (step_time if verify_time is None else verify_time)) / step_time
