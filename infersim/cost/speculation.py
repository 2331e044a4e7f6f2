"""Closed forms of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

A step drafts k tokens and verifies them in one pass of the target; what it emits is the accepted prefix and one token
more. alpha is the chance that a draft is accepted; c the time of one draft pass over that of one target pass.
"""

import numpy as np

MAX_K = 64  # drafts per step beyond which nobody looks for an optimum


def acceptance_rate(target: np.ndarray, draft: np.ndarray) -> float:
    """Chance that a token drawn from `draft` is accepted: the sum of min(p, q) (Leviathan, theorem 3.5)."""
    return float(np.minimum(target, draft).sum())


def tokens_per_step(alpha: float, k: int) -> float:
    """Tokens that a step of k drafts emits on average, each accepted alike (Leviathan, equation 1)."""
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def speedup(alpha: float, k: int, c: float) -> float:
    """Wall time without speculation over that with it, verification as cheap as a step (Leviathan, theorem 3.8)."""
    return tokens_per_step(alpha, k) / (k * c + 1)


def best_k(alpha: float, c: float) -> int:
    """The number of drafts with the largest `speedup`; 0 if none gains (alpha <= c, corollary 3.9)."""
    return max(range(MAX_K + 1), key=lambda k: speedup(alpha, k, c))


def tokens_needed(draft_time: float, step_time: float, verify_time: float | None = None) -> float:
    """Tokens per step from which on speculation gains: (draft + verification) / plain step, all of one step.

    With verification as cheap as a step: 1 + C_draft / C_target.
    """
    return (draft_time + (step_time if verify_time is None else verify_time)) / step_time
