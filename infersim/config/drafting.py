"""What a method of speculative decoding drafts with, and hence what it costs: a file of drafters/."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Description
from .resources import find, load_yaml
from .units import Count, Seconds

LAYERS = ("layer", "block")


class Drafting(Description):
    """How a method drafts. Its kind is the formula of its price (cost/drafting.py); the rest is what that asks for.

    model: a model of its own, pass by pass. exit: the target's first layers. layer: one layer like the target's last,
    behind a projection of its joined inputs, with the target's embedding. block: such layers, which see the target's
    hidden states as keys and values, and draft all tokens in one pass. heads: a residual block and an LM head for each
    position ahead, in one go. look_up: no model; a search in text.
    """

    kind: Literal["model", "exit", "layer", "block", "heads", "look_up"]
    inputs: Count | None = None
    """of layers: hidden states and embedding that are joined, and projected to the hidden size"""
    layers: Annotated[Count, Field(le=64)] = 1
    """how many"""
    vocabulary: Count | None = None
    """of layers: an LM head of its own, over so many of the most frequent tokens; default: the target's"""
    parallel: bool = False
    """of layers: all drafts come from the pass over the step's tokens, which has a mask token more for each further
    draft (vLLM's parallel_drafting)"""
    sequence_time: Seconds | None = None
    """of a look-up: seconds of CPU time per sequence that the device waits for"""
    trees: bool = False
    """whether it can draft a tree"""
    source: str

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for key, kinds in (("inputs", LAYERS), ("sequence_time", ("look_up",))):
            if (getattr(self, key) is None) == (self.kind in kinds):
                named = " and ".join(kinds)
                raise ValueError(f"{key} must be given for kind {named} and for no other (kind {self.kind})")
        if (self.vocabulary or self.layers > 1) and self.kind not in LAYERS:
            raise ValueError(f"vocabulary and layers are for kinds {' and '.join(LAYERS)} (kind {self.kind})")
        if self.parallel and self.kind != "layer":
            raise ValueError(f"parallel is for kind layer; a block is drafted so anyway (kind {self.kind})")
        if self.trees and (self.kind not in ("layer", "heads") or self.parallel):
            raise ValueError(f"trees are drafted by layer, pass by pass, and heads (kind {self.kind})")
        return self


def load_drafting(path: Path) -> Drafting:
    """The drafter that a YAML file describes. InputError says what is wrong with it."""
    return Drafting.validate(load_yaml(path), str(path))


@cache
def packaged_drafting(method: str) -> Drafting:
    """The drafter of a method by vLLM's name."""
    return load_drafting(find("drafters", method))
