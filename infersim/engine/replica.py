"""What the engine needs to know of one replica."""

from dataclasses import dataclass
from typing import cast

import numpy as np

from .compiled import state
from .price import DraftCost, StepCost


@dataclass(frozen=True)
class ReplicaSpec:
    """What the engine needs to know of one replica.

    knobs: a state.KNOBS record (np.void); cost: its StepCost; draft: what drafting adds, None without speculation;
    drafts: i4[max_num_seqs + 1], drafts of a sequence by running sequences.
    """

    knobs: np.void
    cost: StepCost
    draft: DraftCost | None = None
    drafts: np.ndarray | None = None


def make_knobs(**values) -> np.void:
    """A state.KNOBS record; what is not given is zero, but one full-attention KV group and one step in flight.

    Choices (order, reserve, late_hits, allocator, policy) are words: keys of state.CODES.
    """
    knobs = np.zeros((), state.KNOBS)
    knobs["num_kv_groups"] = knobs["steps_in_flight"] = knobs["chunked_prefill"] = knobs["num_sequences"] = 1
    knobs["num_layers"] = 1
    knobs["kv_multiplicity"][0] = 1
    knobs["order"] = state.ORDERS["running-first"]
    for name, value in values.items():
        if knobs[name].ndim:  # one per KV group, or per tier
            knobs[name][: len(value)] = value
        else:
            knobs[name] = state.CODES[name][value] if name in state.CODES else value
    if "kv_window" in values:
        knobs["num_kv_groups"] = len(values["kv_window"])
    if not knobs["enable_prefix_caching"] or 1 not in knobs["kv_window"]:
        knobs["state_cuts"] = 0
    return cast(np.void, knobs[()])
