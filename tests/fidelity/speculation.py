"""Published speed-ups of speculative decoding at 1 to 8 sequences, and what `infersim reproduce` computes for them."""

import numpy as np
from common import percent, spread

from infersim.reproduce import drafters

SMALL = {"eagle3.sglang": 3, "eagle3.sglang.eagle1": 3}
"""of rows over batch sizes, how many are of 2, 4 and 8 sequences; the others are of one"""
CLAIMS = ("eagle2.main", "eagle3.tab1.v13b", *SMALL, "medusa.tab1", "specbench.a100.v13b", "specbench.a100.v33b",
          "dsv3.mtp")  # fmt: skip
WITHIN = 15.0


def evaluate() -> list[dict]:
    """One entry per source and one of all that nothing was fitted on: errors of the speed-up in percent, and how many
    are within WITHIN."""
    errors, entries, held = {}, [], []
    for claim in drafters.claims():
        if claim.id in CLAIMS:
            got, printed = np.ravel(claim.compute()), np.ravel(claim.expected)
            errors[claim.id] = percent(got, printed)[: SMALL.get(claim.id)]
            if not claim.fitted:
                held += [*errors[claim.id]]
    for name, found in {"all, not fitted on": held, **errors}.items():
        found = np.abs(found)
        entries.append({"speed_up": name, "n": len(found), **spread(errors.get(name, held)),
                        f"within_{WITHIN:.0f}_pct": int((found <= WITHIN).sum())})  # fmt: skip
    return entries
