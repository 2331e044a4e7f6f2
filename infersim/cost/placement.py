"""What every price is of: a model in a precision, cut by a parallelism, on devices of one kind."""

from dataclasses import dataclass, field

from infersim.config.hardware import Hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import BYTES, KV_FORMATS, Precision
from infersim.models.architecture import Model


@dataclass(frozen=True)
class Placement:
    """One replica's model on its devices; the engine that runs it is not part of it.

    In vLLM's VllmConfig: model_config, the dtypes of quantization and cache_config, parallel_config, device_config.
    """

    model: Model
    hardware: Hardware
    precision: Precision = field(default_factory=Precision)
    parallelism: Parallelism = field(default_factory=Parallelism)

    def __post_init__(self):
        """`auto` of the KV cache becomes what it stands for; a format that is not modelled leaves it, for an error."""
        precision, quantization = self.precision, self.model.quantization
        if precision.kv_cache == "auto":
            usual = precision.activations if precision.activations in KV_FORMATS else "bf16"
            kv_cache = (quantization.kv_cache if quantization else "") or usual
            if kv_cache in KV_FORMATS:
                object.__setattr__(self, "precision", precision.model_copy(update={"kv_cache": kv_cache}))

    @property
    def activation_bytes(self) -> float:
        """Bytes of an activation, and of a parameter that is not quantised."""
        return BYTES[self.precision.activations]

    @property
    def kv_bytes(self) -> float:
        """Bytes of an element of the KV cache."""
        return BYTES[self.precision.kv_cache]
