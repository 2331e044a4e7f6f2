"""What every price is of: a model in a precision, cut by a parallelism, on devices of one kind."""

from dataclasses import dataclass, field

from infersim.config.hardware import Hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import BYTES, KV_FORMATS, Precision
from infersim.models.architecture import Attention, Model

PACKED_LATENTS = ("hopper", "blackwell-gb202")
"""generations whose kernels for sparse attention over latents read FP8 keys with an FP32 scale for each 128 elements
and rotary parts in 16 bits (fp8_ds_mla, 656 bytes a token: vLLM 0.32's FLASHMLA_SPARSE and FLASHINFER_MLA_SPARSE_SM120;
SGLang 0.5.23, DSATokenToKVPool); elsewhere FP8 is one byte an element (FLASHINFER_MLA_SPARSE on SM100)"""


@dataclass(frozen=True)
class Placement:
    """One replica's model on its devices; the engine that runs it is not part of it.

    In vLLM's VllmConfig: model_config, the dtypes of quantization and cache_config, parallel_config, device_config.
    """

    model: Model
    hardware: Hardware
    precision: Precision = field(default_factory=Precision)
    parallelism: Parallelism = field(default_factory=Parallelism)
    quantises_first: bool = False
    """whether the engine turns experts' inputs into their format before it sends them to the experts' ranks"""

    def __post_init__(self):
        """`auto` of the KV cache becomes what it stands for; a format that is not modelled leaves it, for an error."""
        precision, quantization = self.precision, self.model.quantization
        if precision.kv_cache == "auto":
            usual = precision.activations if precision.activations in KV_FORMATS else "bf16"
            usual = "fp8" if self.latents_in_fp8 else usual
            kv_cache = (quantization.kv_cache if quantization else "") or usual
            if kv_cache in KV_FORMATS:
                object.__setattr__(self, "precision", precision.model_copy(update={"kv_cache": kv_cache}))

    @property
    def activation_bytes(self) -> float:
        """Bytes of an activation, and of a parameter that is not quantised."""
        return BYTES[self.precision.activations]

    @property
    def latents_in_fp8(self) -> bool:
        """Whether sparse attention over latents has FP8 keys unless told otherwise: on SM12x, whose kernel has no other
        format, and GLM-5 on SM10x (vLLM 0.32, mla_attention.py and models/config.py; SGLang on SM10x too)."""
        generation = self.hardware.generation
        if not any(layer.attention.sparse_latents for layer in self.model.layers):
            return False
        return generation == "blackwell-gb202" or (generation == "blackwell" and self.model.family == "glm_moe_dsa")

    @property
    def kv_bytes(self) -> float:
        """Bytes of an element of the KV cache."""
        return BYTES[self.precision.kv_cache]

    def key_bytes(self, attention: Attention) -> float:
        """Bytes of one token's keys and values in a layer (an indexer's apart)."""
        packed = self.precision.kv_cache == "fp8" and self.hardware.generation in PACKED_LATENTS
        if packed and attention.sparse_latents:
            return attention.kv_lora_rank * (1 + 4 / 128) + attention.qk_rope_head_dim * 2
        return attention.kv_elements_per_token * self.kv_bytes
