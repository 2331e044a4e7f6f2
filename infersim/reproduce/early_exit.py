"""Early exit: BranchyNet's rule (Teerapittayanon, McDanel and Kung 2016, arXiv 1709.01686), and the notes on it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .claims import ARITHMETIC, SIMULATED, Claim, claim, share_holding
from .simulation import decoding

ALONE: dict[str, Any] = {"model": "Llama-2-13B", "hardware": "a100-sxm-80gb"}


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy in nats over the last axis: a branch lets an input exit when it is below its threshold (BranchyNet)."""
    p = np.clip(probabilities, 1e-300, 1.0)
    return -(p * np.log(p)).sum(axis=-1)


def expected_cost(shares: Sequence[float], segments: Sequence[float], heads: Sequence[float]) -> float:
    """Mean cost of an input: the layers up to its exit, and every exit head on the way.

    shares: of inputs that leave at each exit, the last being the end; segments: cost of the layers between one exit and
    the next; heads: cost of each early exit's head, one fewer than segments (the last segment contains its own).
    """
    to_exit = np.cumsum(np.asarray(segments, float) + np.append(heads, 0.0))
    return float(np.dot(shares, to_exit))


def _more_leave_at_a_higher_threshold() -> float:
    """Softmax outputs of many sharpnesses: what leaves at a threshold is what is surer; at ln(classes) all leave."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(4000, 10)) * random.gamma(2.0, 2.0, size=(4000, 1))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    unsure = entropy(p)
    shares = [(unsure < threshold).mean() for threshold in (0.0001, 0.025, 0.05, 0.2, 0.3, 1.0, np.log(10) + 1e-9)]
    surest = [p[unsure < t].max(axis=1).mean() for t in (0.025, 0.3, 2.0)]
    rising = [a < b for a, b in pairwise(shares)]
    return share_holding([*rising, shares[-1] == 1, 0 < shares[1] < 0.5, *(a > b for a, b in pairwise(surest))])


def _token_time(share: float | None, layer: int = 20) -> float:
    """Seconds per token of one sequence, of whose tokens this share leaves after so many of 40 layers."""
    exits: dict[str, Any] = {} if share is None else {"early_exit": {"exit_layers": [layer], "shares": [share]}}
    return decoding(tokens=2000, context=1100, **ALONE, **exits)[0]


def _mixture() -> float:
    """The engine's time per token is the mixture of what tokens take that all leave, or never; the head's time comes
    on top of what the model takes without an exit."""
    plain, never, always = (_token_time(share) for share in (None, 0.0, 1.0))
    head = never - plain
    cases = [head > 0]
    for share in (0.2, 0.5, 0.8):
        mixture = expected_cost([share, 1 - share], [always - head, never - always], [head])
        cases.append(abs(_token_time(share) / mixture - 1) < 0.005)
    return share_holding(cases)


def _easy_majority() -> float:
    """No gain without exits, and the more the more leave."""
    plain = _token_time(None)
    gains = [plain / _token_time(share) for share in np.linspace(0, 1, 6)]
    return share_holding([0.95 < gains[0] <= 1, gains[-1] > 1.5, *(a < b for a, b in pairwise(gains))])


def claims() -> tuple[Claim, ...]:
    return (
        claim("branchy.entropy", ARITHMETIC, _more_leave_at_a_higher_threshold,
              "an input leaves where the entropy of the branch's softmax is below the threshold"),
        claim("ee.mixture", SIMULATED, _mixture, "Llama-2-13B, an exit after 20 of 40 layers, one sequence"),
        claim("ee.easy_majority", SIMULATED, _easy_majority, "0 to 100 % of its tokens leave early"),
    )  # fmt: skip
