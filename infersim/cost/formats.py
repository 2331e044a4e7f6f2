"""Which kernels multiply a model's matrices on a device: the format of the weights and the rate of the arithmetic."""

from dataclasses import dataclass

from infersim.config.precision import BYTES, FORMATS, UNQUANTISED, Precision
from infersim.models.architecture import Linear, Model, Quantization

from .placement import Placement

PARTS = {
    "attention": ("attn",),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj"),
    "shared": ("shared_expert",),
    "experts": (".experts",),
}
"""parts of a layer that checkpoints quantise or leave, and what `modules_to_not_convert` calls them"""

# Integer instructions that unpacking one 4-bit weight takes, per weight: Marlin's lop3 and bit tricks turn 8 weights
# into bf16 in about 12 (IST-DASLab/marlin, dequant.h). A block of 64 tokens shares it (its thread blocks are 64 high).
UNPACK, UNPACKED_FOR = 1.5, 64


@dataclass(frozen=True)
class Kernel:
    """How matrices of one part are multiplied.

    format: of the weights; rate: dtype of the arithmetic, a key of Hardware.flops; weight_bytes: of a weight with its
    scale; activation_bytes: of an input element once it is quantised, 0 where it stays as it is; dequantised: weights
    are turned back into 16 bits on the way.
    """

    name: str
    format: str
    rate: str
    weight_bytes: float
    activation_bytes: float = 0.0
    dequantised: bool = False


# format -> kernels, best first: what the device must have a rate for, its name in vLLM, bytes of a quantised input
CHOICES: dict[str, tuple[tuple[str, str, float], ...]] = {
    "fp8": (("fp8", "cutlass_scaled_mm", 1.0), ("", "marlin", 0.0)),
    "fp8_block": (("fp8", "deep_gemm", 1.0 + 4 / 128), ("", "marlin", 0.0)),
    "int8": (("int8", "cutlass_scaled_mm", 1.0),),
    "int8_wo": (("", "marlin", 0.0),),
    "int4": (("", "marlin", 0.0),),
    "nvfp4": (("fp4", "cutlass_scaled_fp4_mm", 0.5 + 1 / 16), ("", "marlin", 0.0)),
    "mxfp4": (("fp4", "mxfp8 x mxfp4", 1.0 + 1 / 32), ("", "triton w4a16", 0.0)),
}
MIXED_RATE = {"mxfp4": "fp8"}  # 8-bit inputs meet 4-bit weights at the rate of 8 bits


def checkpoint_format(quantization: Quantization) -> str | None:
    """The format that a `quantization_config` describes, None for one that is not modelled."""
    q = quantization
    if q.method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if q.weight_block_size else "fp8"
    if q.type == "int":
        return {4: "int4", 8: "int8" if q.method == "compressed-tensors" else "int8_wo"}.get(q.bits)
    if q.bits == 4:
        return "mxfp4" if q.method == "mxfp4" or q.group_size == 32 else "nvfp4"
    return "fp8" if q.bits == 8 else None


def weight_format(model: Model, precision: Precision) -> str | None:
    """The format of the matrices that are quantised, or of all of them."""
    if precision.weights != "auto":
        return precision.weights
    return checkpoint_format(model.quantization) if model.quantization else precision.activations


def kernels(placement: Placement) -> dict[str, Kernel]:
    """Part of a model -> how its matrices are multiplied; "other" is what is never quantised (router, LM head)."""
    model, precision = placement.model, placement.precision
    plain = Kernel("cublas", precision.activations, precision.activations, placement.activation_bytes)
    name = weight_format(model, precision)
    chosen = (name and _kernel(name, placement)) or plain
    left = model.quantization.modules_to_not_convert if model.quantization else ()
    quantised = {
        part: plain if any(word in module for module in left for word in words) else chosen
        for part, words in PARTS.items()
    }
    return {**(dict.fromkeys(PARTS, chosen) if chosen.format in UNQUANTISED else quantised), "other": plain}


def _kernel(name: str, placement: Placement) -> Kernel | None:
    precision = placement.precision
    if name in UNQUANTISED:
        return Kernel("cublas", name, name, BYTES[name])
    own = precision.weights == "auto" and placement.model.quantization
    weight_bytes = FORMATS[name].bytes_per_weight(own.group_size if own and name == "int4" else 0)
    for rate, kernel, activation_bytes in CHOICES[name]:
        if not rate:
            return Kernel(kernel, name, precision.activations, weight_bytes, dequantised=True)
        if rate in placement.hardware.flops:
            return Kernel(kernel, name, MIXED_RATE.get(name, rate), weight_bytes, activation_bytes)
    return None


def problems(placement: Placement) -> list[str]:
    """What of these formats is not modelled, or not on this device; one line each."""
    model, hardware, precision = placement.model, placement.hardware, placement.precision
    name = weight_format(model, precision)
    if name is None:
        q = model.quantization
        assert q is not None
        return [f"model: {model.name}: {q.method} weights of {q.bits} bits are not modelled yet; precision.weights"
                f" can name another format, such as bf16"]  # fmt: skip
    if name in UNQUANTISED and precision.activations != name:
        return [f"precision.activations: must be that of the weights, as vLLM has one dtype for both"
                f" (got {precision.activations} and {name})"]  # fmt: skip
    found = []
    if precision.activations not in hardware.flops:
        have = ", ".join(key for key in hardware.flops if key in UNQUANTISED)
        key = "weights" if name in UNQUANTISED else "activations"
        found.append(f"precision.{key}: {hardware.name} has no {precision.activations} rate; must be one of {have}")
    needs = [rate for rate, _, _ in CHOICES.get(name, (("", "", 0),))]
    if "" not in needs and not any(rate in hardware.flops for rate in needs):
        found.append(f"precision.weights: {hardware.name} has no {needs[0]} rate, which {name} needs")
    return found


def matrix_bytes(linear: Linear, kernel: Kernel, bias_bytes: float) -> float:
    """Bytes of one matrix and its bias."""
    return linear.inputs * linear.outputs * kernel.weight_bytes + linear.outputs * linear.bias * bias_bytes
