"""The number formats of weights, KV cache and activations."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from .base import Description, near
from .units import short

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
"""bytes per element"""
LATER = ("fp8", "int8", "int4", "fp4", "nvfp4", "mxfp4", "awq", "gptq")


def _one_of(*formats: str) -> Any:
    def check(value: Any) -> str:
        if value not in formats:
            later = "; quantised formats are not modelled yet" if value in LATER else near(str(value), list(formats))
            raise ValueError(f"must be one of {', '.join(formats)} (got {short(value)}){later}")
        return value

    return Annotated[str, BeforeValidator(check), WithJsonSchema({"enum": list(formats)})]


class Precision(Description):
    """Formats; activations default to the format of the weights."""

    weights: _one_of("bf16", "fp16", "fp32") = "bf16"
    kv_cache: _one_of("bf16", "fp16", "fp8") = "bf16"
    activations: _one_of("bf16", "fp16", "fp32") | None = None

    @model_validator(mode="after")
    def _default(self) -> Self:
        if self.activations is None:
            object.__setattr__(self, "activations", self.weights)  # frozen: filled once, while being made
        return self
