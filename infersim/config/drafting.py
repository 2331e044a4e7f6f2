"""What a method of speculative decoding drafts with, and hence what it costs: a file of drafters/."""

from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from .base import Description
from .resources import find, load_yaml
from .units import Count, Seconds


class Drafting(Description):
    """How a method drafts. Its kind is the formula of its price (cost/drafting.py); the rest is what that asks for.

    model: a model of its own, pass by pass. exit: the target's first layers. layer: one layer like the target's last,
    behind a projection of its joined inputs, with the target's embedding. heads: a residual block and an LM head for
    each position ahead, in one go. look_up: no model; a search in text.
    """

    kind: Literal["model", "exit", "layer", "heads", "look_up"]
    inputs: Count | None = None
    """of a layer: hidden states and embedding that are joined, and projected to the hidden size"""
    vocabulary: Count | None = None
    """of a layer: an LM head of its own, over so many of the most frequent tokens; default: the target's"""
    sequence_time: Seconds | None = None
    """of a look-up: seconds of CPU time per sequence that the device waits for"""
    trees: bool = False
    """whether it can draft a tree"""
    source: str

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for key, kind in (("inputs", "layer"), ("sequence_time", "look_up")):
            if (getattr(self, key) is None) == (self.kind == kind):
                raise ValueError(f"{key} must be given for kind {kind} and for no other (kind {self.kind})")
        if self.vocabulary and self.kind != "layer":
            raise ValueError(f"vocabulary is for kind layer (kind {self.kind})")
        if self.trees and self.kind not in ("layer", "heads"):
            raise ValueError(f"trees are drafted by layer and heads (kind {self.kind})")
        return self


def load_drafting(path: Path) -> Drafting:
    """The drafter that a YAML file describes. InputError says what is wrong with it."""
    return Drafting.validate(load_yaml(path), str(path))


@cache
def packaged_drafting(method: str) -> Drafting:
    """The drafter of a method by vLLM's name."""
    return load_drafting(find("drafters", method))
