"""The number formats of weights, KV cache and activations."""

from typing import Annotated, Any, NamedTuple

from pydantic import model_validator

from .base import Description
from .units import Parsed, short

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16, "int8_per_token_head": 1 + 4 / 128,
         "fp8_per_token_head": 1 + 4 / 128}  # fmt: skip
"""bytes per element of what is not a weight, scales included: NVFP4 has one byte for 16 elements, per_token_head an
FP32 for each key and value of a head, taken as 128 wide (vLLM 0.32, v1/kv_cache_interface.py)"""


class Format(NamedTuple):
    """How a matrix is stored: bits of one weight, bytes of one scale, weights under a scale (0: negligibly few)."""

    bits: float
    scale_bytes: float = 0.0
    group_size: int = 0

    def bytes_per_weight(self, group_size: int = 0) -> float:
        """Bytes of a weight and of its part of a scale; `group_size` is the checkpoint's, if it states one."""
        group = group_size or self.group_size
        return self.bits / 8 + (self.scale_bytes / group if group else 0.0)


FORMATS = {
    "fp32": Format(32),
    "bf16": Format(16),
    "fp16": Format(16),
    "fp8": Format(8),  # one scale per tensor or channel; activations in fp8 too
    "fp8_block": Format(8, 4, 128 * 128),  # DeepSeek-V3 (arXiv:2412.19437): 128 x 128, activations in groups of 128
    "fp8_wo": Format(8),  # weights alone (W8A16)
    "int8": Format(8),  # one scale per channel; activations in int8 too (SmoothQuant, arXiv:2211.10438)
    "int8_wo": Format(8),  # weights alone (GPTQ of 8 bits, TensorRT-LLM's int8 weight only)
    "int4": Format(4, 2, 128),  # AWQ and GPTQ: weights alone, a 16-bit scale per group
    "int4_fp8": Format(4, 2, 128),  # W4A8: activations in fp8
    "int4_int8": Format(4, 2, 128),  # W4A8: activations in int8 (QServe, arXiv:2405.04532)
    "nvfp4": Format(4, 1, 16),  # e2m1 with an e4m3 scale per 16
    "nvfp4_wo": Format(4, 1, 16),  # weights alone
    "mxfp4": Format(4, 1, 32),  # e2m1 with an e8m0 scale per 32 (OCP microscaling)
    "mxfp8": Format(8, 1, 32),
    "nf4": Format(4, 4, 64),  # bitsandbytes, FP4 alike: an FP32 scale per 64 (QLoRA, arXiv:2305.14314)
}
"""formats of weights"""
KV_FORMATS = ("bf16", "fp16", "fp8", "nvfp4", "int8_per_token_head", "fp8_per_token_head")
UNQUANTISED = ("bf16", "fp16", "fp32")
MEANT = {"fp4": "nvfp4 or mxfp4", "awq": "int4", "gptq": "int4"}


def _one_of(*formats: str) -> Parsed:
    def check(value: Any) -> str:
        if value not in formats:
            hint = f"; did you mean {MEANT[str(value)]}?" if str(value) in MEANT else ""
            raise ValueError(f"must be one of {', '.join(formats)} (got {short(value)}){hint}")
        return value

    return Parsed(check, {"enum": list(formats)})


class Precision(Description):
    """Formats; quantised weights are those of the layers' matrices: embedding, router and LM head stay as they are."""

    weights: Annotated[str, _one_of("auto", *FORMATS)] = "auto"
    """auto: as the checkpoint's quantization_config says, bf16 where it has none"""
    kv_cache: Annotated[str, _one_of("auto", *KV_FORMATS)] = "auto"
    """auto: as the checkpoint says (kv_cache_scheme), else the format of the activations, as in vLLM"""
    activations: Annotated[str, _one_of(*UNQUANTISED)] = "bf16"
    """default: the format of the weights, bf16 where these are quantised; also that of unquantised matrices"""

    @model_validator(mode="before")
    @classmethod
    def _default(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("activations") is None:
            weights = data.get("weights")
            return data | {"activations": weights if weights in UNQUANTISED else "bf16"}
        return data
