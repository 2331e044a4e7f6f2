"""Several replicas behind one front door."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from .base import Description
from .engine import Engine
from .hardware import Hardware
from .parallelism import Parallelism
from .precision import Precision
from .units import Count, CountOrZero, Number, Seconds, Share

Replicas = Annotated[Count, Field(le=10_000)]

STATIC_POLICIES = ("round-robin", "random", "weighted-random")
"""need to know nothing of the replicas: the whole run is assigned at once"""
Policy = Literal[
    "round-robin",
    "random",
    "weighted-random",
    "least-outstanding",
    "power-of-two",
    "least-kv",
    "session",
    "prefix-aware",
    "weighted",
]


class Scorers(Description):
    """Weights of llm-d's scorers; each scores every replica from 0 to 1, and the highest weighted sum wins."""

    queue: Number = 2.0
    """fewest waiting requests"""
    kv_usage: Number = 2.0
    """most free KV blocks"""
    outstanding: Number = 0.0
    """fewest requests in the replica"""
    prefix: Number = 3.0
    """largest share of the prompt that the router believes to be cached there"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any((self.queue, self.kv_usage, self.outstanding, self.prefix)):
            raise ValueError("at least one weight must be above 0")
        return self


class Router(Description):
    """How the front door chooses a replica, and how old what it knows is."""

    policy: Policy = "round-robin"
    signal_age: Seconds = 0.0
    """replicas report this often, and are seen as they last reported; 0: as they are"""
    scorers: Scorers = Scorers()
    """of policy weighted (defaults: Gateway API Inference Extension, which llm-d builds on)"""
    balance_abs_threshold: CountOrZero = 64
    balance_rel_threshold: Annotated[Number, Field(ge=1)] = 1.5
    """of policy prefix-aware: when the busiest replica has more requests than the idlest by this many and times this,
    the idlest is chosen (defaults: SGLang's cache-aware router)"""
    cache_threshold: Share = 0.3
    """of policy prefix-aware: the share of a prompt that must be cached for it to follow its prefix"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.signal_age and self.policy in (*STATIC_POLICIES, "session"):
            raise ValueError(f"signal_age is for a policy that looks at the replicas, which {self.policy} does not")
        if self.scorers != Scorers() and self.policy != "weighted":
            raise ValueError(f"scorers are for policy weighted (policy is {self.policy})")
        return self


def _named(value: Any) -> Any:
    return {"policy": value} if isinstance(value, str) else value


RouterOrPolicy = Annotated[Router, BeforeValidator(_named, json_schema_input_type=str | Router)]


class Kind(Description):
    """Some replicas that are alike; what is left out is the scenario's own."""

    replicas: Replicas = 1
    model: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    hardware: Hardware | None = None
    parallelism: Parallelism | None = None
    precision: Precision | None = None
    engine: Engine | None = None
    weight: Annotated[Number, Field(gt=0)] = 1.0
    """of router weighted-random"""

    @model_serializer(mode="wrap")
    def _short(self, write: Any) -> dict:
        return {key: value for key, value in write(self).items() if value is not None}


class Cluster(Description):
    """Copies of the engine, of one kind (`replicas`) or several (`kinds`)."""

    replicas: Replicas = 1
    kinds: Annotated[list[Kind], Field(min_length=1, max_length=100)] | None = None
    """groups of replicas that differ, instead of `replicas`"""
    router: RouterOrPolicy = Router()

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, data: Any) -> Any:
        """`replicas` of a description with kinds is their sum; given too (as `resolved` writes it), it must be."""
        if isinstance(data, dict) and isinstance(data.get("kinds"), list) and data.get("replicas") is None:
            counts = [kind.get("replicas", 1) for kind in data["kinds"] if isinstance(kind, dict)]
            if all(isinstance(count, int) for count in counts):
                return data | {"replicas": max(sum(counts), 1)}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kinds and (total := sum(kind.replicas for kind in self.kinds)) != self.replicas:
            raise ValueError(f"kinds have {total} replicas and replicas is {self.replicas}; leave replicas out")
        return self

    @model_serializer(mode="wrap")
    def _short(self, write: Any) -> dict:
        return {key: value for key, value in write(self).items() if value is not None}
