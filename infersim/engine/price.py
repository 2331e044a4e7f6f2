"""The price of a step: tables of seconds that the compiled loop adds up."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class StepCost:
    """Seconds of one scheduler step on one rank, by resource (last axis: compiled.state.RESOURCES).

    linear: f8[max_num_batched_tokens + 1, 9], by number of new tokens in the step, exact at every integer (graph
        padding and wave steps included); row 0 is zero.
    head: f8[max_num_seqs + 1, 9], by number of scheduled sequences (vLLM V1 computes logits for the last position of
        every scheduled sequence, partial prefills included) and of the drafts that it verifies; row 0 is zero.
    attention: engine.state.ATTENTION_PRICE[k], 1 <= k <= 4, one row per attention kind.
    shared: None, or f8[max_num_batched_tokens + 1, 9], by the mean of all data-parallel ranks' new tokens, rounded up:
        what ranks do together on the tokens of all (experts and the way to them). Idle ranks take part in it.
    issue_share: share of a step's latency after which the next step may start on the device: 1 without pipeline
        stages, else the slowest stage's share of all stages.
    """

    linear: np.ndarray
    head: np.ndarray
    attention: np.ndarray
    issue_share: float = 1.0
    shared: np.ndarray | None = None


@dataclass(frozen=True)
class DraftCost:
    """Seconds that drafting adds to a step on one rank, after the target's pass.

    first: f8[max_num_batched_tokens + 1], a pass over the step's own tokens, by their number (zeros if there is none).
    once: f8[max_num_seqs + 1], what else comes once, by sequences that draft.
    following: f8[max_num_seqs + 1], each further pass.
    attention: engine.state.ATTENTION_PRICE[k], k may be 0: of the drafter's own layers.
    passes: i4[most drafts + 1], further passes, by the number of drafts of a sequence.
    first_attends: whether the pass over the step's own tokens exists.
    """

    first: np.ndarray
    once: np.ndarray
    following: np.ndarray
    attention: np.ndarray
    passes: np.ndarray
    first_attends: bool = False


def rows_of_kinds(draft: DraftCost, target: StepCost) -> np.ndarray:
    """The drafter's attention, each row with, for its window, the number of the target's kind that sees the same.

    Raises ValueError if the target has none (cost.drafting.seen_by).
    """
    rows, windows = draft.attention.copy(), target.attention["window"].tolist()
    for row in rows:
        row["window"] = windows.index(row["window"])
    return rows


@dataclass(frozen=True)
class Depths:
    """Seconds by number of sequences, and where tokens leave.

    segments: f8[exits + 1, batch + 1], layers between exits, the LM head in the last; heads: f8[exits, batch + 1], the
    exit's own head; backfill: f8[exits], per token that leaves there, for the keys and values of the layers it skips;
    shares: f8[exits + 1], of tokens by exit, the last one is full depth; per_request: each sequence keeps one exit.
    """

    segments: np.ndarray
    heads: np.ndarray
    backfill: np.ndarray
    shares: np.ndarray
    per_request: bool = False


class Acceptance(Protocol):
    """How many of a step's drafts are accepted.

    accepted: f8[rows, 2, depth], chance that at least i + 1 drafts of a step are accepted, after a step that did not
    accept all of its own (0) or did (1). A row is a kind of request.
    """

    @property
    def accepted(self) -> np.ndarray: ...

    def rows(self, request_ids: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """i4[n]: the row of each request (i8[n]); uniform: f8[n] in [0, 1), a draw of each."""
