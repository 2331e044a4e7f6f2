"""What every price is of: a model in a precision, cut by a parallelism, on devices of one kind."""

from dataclasses import dataclass, field

from infersim.config.hardware import Hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import BYTES, Precision
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

    @property
    def activation_bytes(self) -> float:
        """Bytes of an activation, and of a parameter that is not quantised."""
        return BYTES[self.precision.activations]

    @property
    def kv_bytes(self) -> float:
        """Bytes of an element of the KV cache."""
        return BYTES[self.precision.kv_cache]
