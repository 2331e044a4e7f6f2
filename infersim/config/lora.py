"""LoRA adapters that a replica serves beside its model."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from .base import Description
from .units import Count

Rank = Annotated[Count, Field(le=512)]
SlotRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""vLLM's MaxLoRARanks"""


class Lora(Description):
    """Adapters (vLLM's --enable-lora). Requests ask for one as they ask for a model: by name, in workload.models."""

    adapters: Annotated[dict[str, Rank], Field(min_length=1)]
    """{name: rank}, of the attention's and the MLP's matrices; all lie in the host's memory"""
    max_loras: Annotated[Count, Field(le=10_000)] = 1
    """slots on the GPU, each as large as an adapter of max_lora_rank: requests of so many adapters run at one time"""
    max_lora_rank: SlotRank | None = None
    """default: the smallest that is large enough for every adapter"""

    overlap_loading: bool = False
    """whether steps go on while an adapter is copied to the GPU (SGLang's --enable-lora-overlap-loading; S-LoRA); else
    the next step waits for it, as vLLM's (set_active_loras in _prepare_inputs) and SGLang's do"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_lora_rank and self.max_lora_rank < max(self.adapters.values()):
            raise ValueError(f"max_lora_rank: must be at least the largest rank of adapters (got {self.max_lora_rank})")
        return self

    @property
    def slot_rank(self) -> int:
        """The rank that every slot has room for."""
        largest = max(self.adapters.values())
        return self.max_lora_rank or next(rank for rank in get_args(SlotRank) if rank >= largest)
