"""How a front door chooses a replica for each request."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .base import Description
from .units import CountOrZero, Number, Seconds, Share

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
    "kv-aware",
    "weighted",
]


class Scorers(Description):
    """Weights of llm-d's scorers; each scores every replica from 0 to 1, and the highest weighted sum wins."""

    queue: Number = 2.0
    """few waiting requests"""
    kv_usage: Number = 2.0
    """many free KV blocks"""
    outstanding: Number = 0.0
    """few requests in the replica"""
    prefix: Number = 3.0
    """largest share of the prompt that the router believes to be cached there"""
    lora_affinity: Number = 1.0
    """of requests for an adapter: 1 where it is loaded, 0.8 where a slot is free, 0.6 where others wait for it, else 0
    (Gateway API Inference Extension's lora-affinity-scorer)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any((self.queue, self.kv_usage, self.outstanding, self.prefix, self.lora_affinity)):
            raise ValueError("at least one weight must be above 0")
        return self


class Router(Description):
    """How the front door chooses a replica, and how old its information is."""

    policy: Policy = "round-robin"
    signal_age: Seconds = 0.0
    """replicas report this often, and are seen as they last reported; 0: as they are (kv-aware's KV events always)"""
    scorers: Scorers = Scorers()
    """of policy weighted (defaults: Gateway API Inference Extension, which llm-d builds on)"""
    overlap_weight: Number = 1.0
    """of policy kv-aware: of prompt blocks to compute against blocks in use (Dynamo's kv-overlap-score-weight)"""
    host_cache_hit_weight: Annotated[Number, Field(le=1)] = 0.0
    """of policy kv-aware: what a block counts that only the replica's CPU or disk has (Dynamo's option; llm-d: 0.8)"""
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
        if 0 < self.signal_age < 1e-3:
            raise ValueError(f"signal_age must be 0 or at least 1 ms (got {self.signal_age:g} s)")
        if self.scorers != Scorers() and self.policy != "weighted":
            raise ValueError(f"scorers are for policy weighted (policy is {self.policy})")
        return self


def _named(value: Any) -> Any:
    return {"policy": value} if isinstance(value, str) else value


RouterOrPolicy = Annotated[Router, BeforeValidator(_named, json_schema_input_type=str | Router)]
