"""Modified rejection sampling: what makes speculative decoding exact (Leviathan 2023, A.1; Chen 2023, theorem 1)."""

import numpy as np


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
