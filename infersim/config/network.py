"""A classifier with branches (BranchyNet, arXiv 1709.01686): layers with costs, exits with thresholds."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from .base import Description
from .early_exit import Confidence, Probability
from .resources import load_yaml
from .units import Count, Seconds


class Stage(Description):
    """Some layers, or a branch: seconds of a launch, and of each input in it."""

    fixed: Seconds = 0.0
    per_input: Seconds
    """of one input, beyond `fixed`"""


class Branch(Stage):
    """An exit: its own layers, and who leaves there."""

    after: Count
    """layers before it"""
    share: Probability | None = None
    """of the inputs that reach it"""
    confidence: Confidence | None = None
    """instead of share: an entropy threshold on a calibrated curve"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.share is None) == (self.confidence is None):
            raise ValueError("must have share or confidence, and not both")
        return self

    @property
    def leaving(self) -> float:
        """Share of the inputs that reach the branch and leave there."""
        return self.confidence.share if self.confidence else self.share or 0.0


class Network(Description):
    """A workload of its own kind: inputs that go through layers until a branch is sure. Approximate by design."""

    layers: Annotated[list[Stage], Field(min_length=2, max_length=1000)]
    branches: Annotated[list[Branch], Field(min_length=1, max_length=8)]
    batches: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=32)]
    """inputs of a launch"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        cuts = [branch.after for branch in self.branches]
        if cuts != sorted(set(cuts)) or cuts[-1] >= len(self.layers):
            raise ValueError(f"branches must ascend in `after`, below the {len(self.layers)} layers (got {cuts})")
        return self

    @property
    def shares(self) -> list[float]:
        """Of all inputs by exit, the end last; they sum to 1."""
        shares, left = [], 1.0
        for branch in self.branches:
            shares.append(left * branch.leaving)
            left -= shares[-1]
        return [*shares, left]


def load_network(path: Path) -> Network:
    """The network that a YAML file describes. InputError with all problems at once."""
    return Network.validate(load_yaml(path), str(path))
