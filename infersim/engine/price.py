"""The price of a step: tables of seconds that the compiled loop adds up."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepCost:
    """Seconds of one scheduler step on one rank, by resource (last axis: engine.state.RESOURCES).

    linear: f8[max_num_batched_tokens + 1, 8], by number of new tokens in the step, exact at every integer (graph
        padding and wave steps included); row 0 is zero.
    head: f8[max_num_seqs + 1, 8], by number of scheduled sequences (vLLM V1 computes logits for the last position of
        every scheduled sequence, partial prefills included); row 0 is zero.
    attention: engine.state.ATTENTION_PRICE[k], 1 <= k <= 4, one row per attention kind.
    shared: None, or f8[max_num_batched_tokens + 1, 8], by the mean of all data-parallel ranks' new tokens, rounded up:
        what ranks do together on the tokens of all (experts and the way to them). Idle ranks take part in it.
    issue_share: share of a step's latency after which the next step may start on the device: 1 without pipeline
        stages, else the slowest stage's share of all stages.
    """

    linear: np.ndarray
    head: np.ndarray
    attention: np.ndarray
    issue_share: float = 1.0
    shared: np.ndarray | None = None
