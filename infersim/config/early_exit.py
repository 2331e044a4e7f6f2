"""Early exit: where tokens may leave the layers, how many do, and what a batch then does."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Description
from .units import Count, Seconds

Probability = Annotated[float, Field(ge=0, le=1)]


class Confidence(Description):
    """A calibrated curve: share of tokens that are sure enough, by threshold on their entropy."""

    threshold: Annotated[float, Field(ge=0)]
    curve: Annotated[list[tuple[Annotated[float, Field(ge=0)], Probability]], Field(min_length=2)]
    """[entropy threshold, share of tokens below it], ascending; straight lines between"""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.curve)):
            raise ValueError("curve: must ascend in threshold, and its shares must not fall")
        return self

    @property
    def share(self) -> float:
        """Share of tokens that leave at this threshold."""
        (t0, s0), *rest = self.curve
        if self.threshold <= t0:
            return s0
        for t1, s1 in rest:
            if self.threshold <= t1:
                return s0 + (s1 - s0) * (self.threshold - t0) / (t1 - t0)
            t0, s0 = t1, s1
        return s0


class EarlyExit(Description):
    """Exits after some layers (CALM, LayerSkip, EE-LLM, DREX). Approximate: the output is not the full model's."""

    exit_layers: Annotated[list[Count], Field(min_length=1, max_length=8)]
    """layers before each exit, ascending"""
    shares: list[Probability] | None = None
    """share of the tokens that leave at each exit; the others go through all layers"""
    confidence: list[Confidence] | None = None
    """instead of shares: for each exit, of the tokens that reach it"""
    per: Literal["token", "request"] = "token"
    """whether each token draws its exit, or each request keeps one"""
    policy: Literal["leave_alone", "wait_for_all", "rebatch"] = "wait_for_all"
    """tokens ride along to the end; a pass ends where all are sure; or those that go on are held and batched anew"""
    min_batch: Count | None = None
    """rebatch: sequences to hold before the next segment runs; default: a full batch"""
    max_wait: Seconds | None = None
    """rebatch: the longest that a sequence is held"""
    missing_kv: Literal["copy", "recompute"] = "copy"
    """keys and values of skipped layers: copied from the exit's state, or computed"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(a >= b for a, b in pairwise(self.exit_layers)):
            raise ValueError("exit_layers must ascend")
        if (self.shares is None) == (self.confidence is None):
            raise ValueError("must have shares or confidence, and not both")
        given = len(self.shares if self.shares is not None else self.confidence or ())
        if given != len(self.exit_layers):
            raise ValueError(f"must have one entry for each of the {len(self.exit_layers)} exits (got {given})")
        if self.shares is not None and sum(self.shares) > 1 + 1e-9:
            raise ValueError(f"shares must sum to at most 1 (got {sum(self.shares):g})")
        return self

    @property
    def token_shares(self) -> list[float]:
        """Of all tokens, by exit, full depth last; they sum to 1."""
        if self.shares is not None:
            shares, left = list(self.shares), 1 - sum(self.shares)
        else:
            shares, left = [], 1.0
            for each in self.confidence or ():
                shares.append(left * each.share)
                left -= shares[-1]
        return [*shares, max(left, 0.0)]
