"""How one replica spreads over GPUs."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Description
from .units import Count, CountOrZero, Number

Ranks = Annotated[Count, Field(le=10_000)]
All2All = Literal[
    "allgather_reducescatter", "flashinfer_nvlink_one_sided", "deepep_high_throughput", "deepep_low_latency"
]


class Parallelism(Description):
    """GPUs of a replica = tensor x prefill_context x pipeline x attention_data = moe_tensor x expert x pipeline.

    Whole copies are `cluster.replicas`. `context` shares the GPUs of tensor parallelism, as vLLM's does.
    """

    tensor: Ranks = 1
    """GPUs that share every layer (tensor parallelism)"""
    pipeline: Ranks = 1
    """stages: groups of GPUs that have some of the layers each"""
    attention_data: Ranks = 1
    """data-parallel attention: ranks with their own requests and KV cache, which share the experts"""
    expert: Ranks = 1
    """ranks among which the experts are divided"""
    moe_tensor: Ranks | None = None
    """default: tensor x prefill_context x attention_data / expert"""
    context: Ranks = 1
    """ranks that share the KV cache of one sequence (vLLM's decode context parallelism)"""
    prefill_context: Ranks = 1
    """vLLM's prefill context parallelism: ranks with copies of all but the experts, which divide a prompt's tokens;
    each layer gathers their latents, so that every rank has the whole KV cache; decodes are dealt out, each to one"""
    expert_skew: Annotated[Number, Field(ge=0, le=2)] = 0.0
    """how unevenly tokens choose experts: exponent of a Zipf law over the experts of a layer; 0: all alike"""
    num_redundant_experts: Annotated[CountOrZero, Field(le=10_000)] = 0
    """copies of the experts chosen most, of each layer, among the ranks of `expert` (vLLM's EPLB); moving them takes no
    time here"""
    all2all_backend: All2All = "allgather_reducescatter"
    """how tokens reach the experts of other data-parallel ranks and come back (vLLM's option and default, which SGLang
    and TensorRT-LLM outside Grace-Blackwell share): all to all ranks, in 16 bits, or to FP8 and NVFP4 experts in their
    format (presets from vllm-0.19 on, but FP8 in blocks on Hopper); flashinfer_nvlink_one_sided so, once to each rank
    that has one of a token's experts; DeepEP's kernels: high_throughput so, over the network once to each node, in FP8
    on the way there for FP8 experts, and in no CUDA graph; low_latency once for each of a token's experts, in FP8 on
    the way there, straight over the network"""
    enable_dbo: bool = False
    """two-batch overlap (vLLM's dual batch overlap, SGLang's TBO): a step of 32 tokens or more runs as two halves, of
    which one computes while the other's tokens are exchanged; weights are read twice, and 20 SMs send under DeepEP's
    high_throughput. Attention hides nothing here, and kernels share the memory at no cost: the most that it gains
    (SGLang: 27 to 35 % of prefill on 4 x 8 H100; here 31 to 50, by tokens of a step)"""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        attention = self.tensor * self.token_ranks
        name = "tensor x attention_data" + " x prefill_context" * (self.prefill_context > 1)
        if attention % self.expert:
            raise ValueError(f"expert must divide {name} = {attention} (got {self.expert})")
        moe_tensor = attention // self.expert if self.moe_tensor is None else self.moe_tensor
        if moe_tensor * self.expert != attention:
            raise ValueError(
                f"moe_tensor x expert must equal {name} = {attention}"
                f" (got {moe_tensor} x {self.expert} = {moe_tensor * self.expert})"
            )
        object.__setattr__(self, "moe_tensor", moe_tensor)  # frozen: filled once, while being made
        if self.num_redundant_experts and self.expert == 1:
            raise ValueError("num_redundant_experts: there are no ranks to balance; expert must be above 1")
        default = type(self).model_fields["all2all_backend"].default
        if self.all2all_backend != default and (self.expert == 1 or self.token_ranks == 1):
            raise ValueError(
                f"all2all_backend: nothing is dealt out unless attention_data and expert are above 1; must be {default}"
            )
        if self.prefill_context > 1:
            beside = {"pipeline": self.pipeline, "context": self.context, "enable_dbo": self.enable_dbo + 1}
            if wrong := [name for name, n in beside.items() if n > 1]:
                raise ValueError(f"prefill_context: is not modelled together with {wrong[0]}; one must be its default")
        if self.enable_dbo and not self.all2all_backend.startswith("deepep"):
            raise ValueError("enable_dbo: vLLM overlaps DeepEP's exchanges alone; all2all_backend must be one of them")
        if self.tensor % self.context:
            raise ValueError(f"context must divide tensor = {self.tensor} (got {self.context})")
        return self

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.token_ranks

    @property
    def token_ranks(self) -> int:
        """Groups of `tensor` GPUs that have tokens of their own."""
        return self.attention_data * self.prefill_context

    @property
    def kv_gpus(self) -> int:
        """GPUs that hold the KV cache of one data-parallel rank, copies under prefill context parallelism left out."""
        return self.tensor * self.pipeline
