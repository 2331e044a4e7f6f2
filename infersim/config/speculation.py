"""Speculative decoding: what drafts, how much, and how many drafts the target accepts. Names are vLLM's."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Description, near
from .drafting import LAYERS, Drafting, packaged_drafting
from .hardware import Hardware
from .resources import names
from .units import Seconds, Weight, short

Probability = Annotated[float, Field(ge=0, le=1)]
Drafts = Annotated[int, Field(ge=1, le=64)]

REQUEST_SPREAD = 0.4
MODELS = ("rate", "conditional", "synthetic_acceptance_rates", "synthetic_acceptance_length", "match", "trace")


class Match(Description):
    """Two states of a text: repeating what stood before (drafts match) or not. What n-gram drafting lives on."""

    enter: Probability
    """chance that the next token matches after one that did not"""
    stay: Probability
    """chance that the next token matches after one that did"""


class Acceptance(Description):
    """How many of a step's drafts the model accepts: one way to say it, and how requests differ in it."""

    rate: Probability | None = None
    """the same chance for every draft (alpha in the literature)"""
    conditional: Annotated[list[Probability], Field(min_length=1, max_length=64)] | None = None
    """by position, given that all before it were accepted; further positions: the last value"""
    synthetic_acceptance_rates: Annotated[list[Probability], Field(min_length=1, max_length=64)] | None = None
    """by position: chance that it and all before it are accepted, not increasing (vLLM's option)"""
    synthetic_acceptance_length: Annotated[float, Field(ge=1, le=65)] | None = None
    """mean tokens per step, including the model's own one, with the least variance (vLLM's option)"""
    match: Match | None = None
    trace: str | None = None
    """CSV without header: a line per request, its conditional acceptance by position; line = request id modulo lines"""
    request_spread: Annotated[float, Field(ge=0, le=5)] | None = None
    """standard deviation over requests of the first position's log-odds (logit-normal); the mean stays. Default: 0.4 of
    rate, conditional and match (drafts of Llama-3.1-8B within one set of prompts: EAGLE-3 0.25 to 0.3, n-gram 0.3 to
    0.55), 0 of vLLM's synthetic ones"""
    later_spread_share: Probability = 1.0
    """how much of that spread remains at later positions"""

    @property
    def spread(self) -> float:
        """Over requests, of the first position."""
        drawn = self.rate is not None or self.conditional is not None or self.match is not None
        return REQUEST_SPREAD * drawn if self.request_spread is None else self.request_spread

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        given = [name for name in MODELS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"must have exactly one of {', '.join(MODELS)} (got {', '.join(given) or 'none'})")
        rates = self.synthetic_acceptance_rates or []
        if any(a < b for a, b in pairwise(rates)):
            raise ValueError("synthetic_acceptance_rates must not increase: they are chances of whole prefixes")
        return self


class TrafficClass(Acceptance):
    """Requests of one kind (chat, code, JSON, high temperature) with acceptance of their own."""

    share: Weight
    """of the requests, relative to the other classes"""


class Tree(Description):
    """A draft tree: `depth` passes of `width` tokens each; num_speculative_tokens nodes are verified (EAGLE-2)."""

    depth: Drafts
    width: Annotated[int, Field(ge=1, le=64)]


class Drafter(Description):
    """A GPU that drafts for one replica over a link, instead of that replica's own."""

    latency: Seconds
    """one way: a step takes two more, for the tokens that were accepted and for the next drafts (ids: some bytes)"""
    hardware: Hardware | None = None
    """default: the replica's"""


class Speculation(Description):
    """A drafter and its acceptance (vLLM's --speculative-config)."""

    method: str
    """vLLM's name of it, one of drafters/*.yaml; or the path of such a file"""
    drafting: Drafting | None = None
    """how it drafts, for a method of the user's own; default: as drafters/METHOD.yaml says"""
    num_speculative_tokens: Drafts
    """drafts that a step verifies per sequence: k of a chain, nodes of a tree"""
    acceptance: Acceptance | None = None
    classes: Annotated[dict[str, TrafficClass], Field(min_length=1, max_length=64)] | None = None
    """instead of `acceptance`: kinds of requests, assigned by chance"""
    model: str | None = None
    """catalogue name or path of the draft model, for method draft_model"""
    draft_tensor_parallel_size: Literal[1] | None = None
    """1: every rank drafts on its own; default: as the target"""
    drafter: Drafter | None = None
    """a separate GPU for the draft model of each replica that generates; default: the replica's own GPUs draft"""
    exit_layer: Annotated[int, Field(ge=1)] | None = None
    """layers of the target that draft, for method self (LayerSkip)"""
    tree: Tree | None = None
    """default: a chain"""
    num_speculative_tokens_per_batch_size: (
        Annotated[list[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0, le=64)]]], Field(min_length=1)]
        | Literal["goodput"]
        | None
    ) = None
    """[sequences in a step from here on, drafts], ascending; or goodput: what the price makes best for each batch"""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.acceptance is None) == (self.classes is None):
            raise ValueError("must have acceptance or classes, and not both")
        if self.drafting is None and self.method not in (known := names("drafters")):
            listed = f"method must be one of {', '.join(known)}, or a drafter's file (got {short(self.method)})"
            raise ValueError(listed + near(self.method, known))
        for key, kind, method in (("model", "model", "draft_model"), ("exit_layer", "exit", "self")):
            if (getattr(self, key) is None) == (self.how.kind == kind):
                got = short(self.method)[1:-1]
                raise ValueError(f"{key} must be given for method {method} and for no other (method {got})")
        if self.drafter and (self.how.kind != "model" or self.draft_tensor_parallel_size):
            raise ValueError("drafter: only a draft_model, on one GPU, drafts apart from the model; must be null")
        if self.tree is not None:
            if not self.how.trees:
                raise ValueError(f"tree: only eagle, eagle3 and medusa draft trees (method {short(self.method)[1:-1]})")
            if self.num_speculative_tokens < self.tree.depth:
                raise ValueError("tree.depth must be at most num_speculative_tokens")
            if self.num_speculative_tokens_per_batch_size is not None:
                raise ValueError("num_speculative_tokens_per_batch_size is for chains; must be null with a tree")
        sizes = self.num_speculative_tokens_per_batch_size
        if isinstance(sizes, list):
            firsts = [first for first, _ in sizes]
            if firsts != sorted(set(firsts)) or max(k for _, k in sizes) > self.num_speculative_tokens:
                raise ValueError(
                    "num_speculative_tokens_per_batch_size must ascend in running sequences, with at most"
                    " num_speculative_tokens drafts each"
                )
        return self

    @property
    def how(self) -> Drafting:
        """What its price follows from."""
        return self.drafting or packaged_drafting(self.method)

    @property
    def writes_keys(self) -> bool:
        """Whether the drafter has keys and values of its own, for which a sequence takes blocks ahead."""
        return self.how.kind in ("model", *LAYERS)

    @property
    def draft_slots(self) -> int:
        """Tokens of a step's budget that drafting takes for each sequence (vLLM's max_num_new_slots_for_drafting)."""
        k = self.num_speculative_tokens
        return {"model": 1, "block": k, "layer": (k - 1) * self.how.parallel}.get(self.how.kind, 0)

    @property
    def depth(self) -> int:
        """The most drafts that can be accepted in a step."""
        return self.tree.depth if self.tree else self.num_speculative_tokens
