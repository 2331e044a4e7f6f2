"""BranchyNet: Teerapittayanon, McDanel and Kung 2016 (arXiv 1709.01686)."""

from functools import partial
from itertools import pairwise

import numpy as np

from infersim.cost.early_exit import entropy, expected_cost

from .claims import CLOSED_FORM, Claim, relation, share_holding

SOURCE = "Teerapittayanon et al. 2016, BranchyNet, table I"

# network, device, ms of the plain network, ms with branches, gain printed, shares of inputs by exit
TABLE_1 = (
    ("LeNet", "CPU", 3.37, 0.62, 5.4, (0.943, 0.0563)),
    ("AlexNet", "CPU", 9.56, 6.32, 1.5, (0.656, 0.252, 0.092)),
    ("ResNet", "CPU", 137.2, 73.5, 1.9, (0.415, 0.138, 0.447)),
    ("LeNet", "GPU", 1.58, 0.34, 4.7, (0.943, 0.0563)),
    ("AlexNet", "GPU", 3.15, 1.30, 2.4, (0.656, 0.252, 0.092)),
    ("ResNet", "GPU", 70.9, 37.2, 1.9, (0.415, 0.138, 0.447)),
)


def first_exit_cost(plain: float, branched: float, shares: tuple[float, ...]) -> float:
    """Cost of the first exit (ms) that the mixture implies, later exits at equal distances up to the plain network."""
    low, high = 0.0, plain
    for _ in range(60):
        middle = (low + high) / 2
        steps = [middle] + [(plain - middle) / (len(shares) - 1)] * (len(shares) - 1)
        cost = expected_cost(np.array(shares) / sum(shares), steps, [0.0] * (len(shares) - 1))
        low, high = (middle, high) if cost < branched else (low, middle)
    return (low + high) / 2


def _more_leave_at_a_higher_threshold() -> float:
    """Softmax outputs of many sharpnesses: what leaves at a threshold is what is surer; at ln(classes) all leave."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(4000, 10)) * random.gamma(2.0, 2.0, size=(4000, 1))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    unsure = entropy(p / p.sum(axis=1, keepdims=True))
    shares = [(unsure < threshold).mean() for threshold in (0.0001, 0.025, 0.05, 0.2, 0.3, 1.0, np.log(10) + 1e-9)]
    surer = [p[unsure < t].max(axis=1).mean() for t in (0.025, 0.3)]
    return share_holding([*(a <= b for a, b in pairwise(shares)), shares[-1] == 1, *surer])


def claims() -> tuple[Claim, ...]:
    rows = [
        relation(
            "branchy.entropy",
            SOURCE,
            _more_leave_at_a_higher_threshold,
            "an input leaves where the entropy of the branch's softmax is below the threshold",
        )
    ]
    for network, device, plain, branched, gain, shares in TABLE_1:
        first = first_exit_cost(plain, branched, shares)
        note = f"{plain} ms over {branched} ms; the mixture then puts the first exit at {first / plain:.0%} of the cost"
        rows.append(
            Claim(
                f"branchy.tab1.B-{network}.{device}",
                SOURCE,
                gain,
                "x speed",
                CLOSED_FORM,
                partial(lambda a, b: a / b, plain, branched),
                note,
            )
        )
    return tuple(rows)
