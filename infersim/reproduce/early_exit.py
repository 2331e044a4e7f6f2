"""Early exit: BranchyNet's rule (Teerapittayanon, McDanel and Kung 2016, arXiv 1709.01686), and the notes on it."""

from itertools import pairwise

import numpy as np

from infersim.cost.early_exit import entropy, expected_cost

from .claims import CLOSED_FORM, SIMULATED, Claim, claim, share_holding
from .simulation import decoding

ALONE = {"model": "Llama-2-13B", "hardware": "a100-sxm-80gb"}


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
    exits = {} if share is None else {"early_exit": {"exit_layers": [layer], "shares": [share]}}
    return decoding(tokens=2000, context=1100, **ALONE, **exits)[0]


def _mixture() -> float:
    """The engine's time per token is the mixture of what tokens take that all leave, or never; the head's time comes
    on top of what the model takes without an exit."""
    plain, never, always = (_token_time(share) for share in (None, 0.0, 1.0))
    head = never - plain
    cases = [head > 0]
    for share in (0.2, 0.5, 0.8):
        mixture = expected_cost([share, 1 - share], [always - head, never - always], [head])
        cases.append(abs(_token_time(share) / mixture - 1) < 0.02)
    return share_holding(cases)


def _easy_majority() -> float:
    """No gain without exits, and the more the more leave."""
    plain = _token_time(None)
    gains = [plain / _token_time(share) for share in np.linspace(0, 1, 6)]
    return share_holding([0.95 < gains[0] <= 1, gains[-1] > 1.5, *(a < b for a, b in pairwise(gains))])


def claims() -> tuple[Claim, ...]:
    return (
        claim("branchy.entropy", CLOSED_FORM, _more_leave_at_a_higher_threshold,
              "an input leaves where the entropy of the branch's softmax is below the threshold"),
        claim("ee.mixture", SIMULATED, _mixture, "Llama-2-13B, an exit after 20 of 40 layers, one sequence"),
        claim("ee.easy_majority", SIMULATED, _easy_majority, "0 to 100 % of its tokens leave early"),
    )  # fmt: skip
