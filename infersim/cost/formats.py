"""Which kernels multiply a model's matrices on a device: the format of the weights and the rate of the arithmetic."""

from collections import Counter
from dataclasses import dataclass, replace

from infersim.config.precision import BYTES, FORMATS, UNQUANTISED, Precision
from infersim.models.architecture import Layer, Linear, Model, MoE, Scheme, counted
from infersim.models.modules import KEPT, parts

from .placement import Placement

# Integer instructions that unpacking one 4-bit weight takes, per weight: Marlin's lop3 and bit tricks turn 8 weights
# into bf16 in about 12 (IST-DASLab/marlin, dequant.h). A block of 64 tokens shares it (its thread blocks are 64 high).
UNPACK, UNPACKED_FOR = 1.5, 64


@dataclass(frozen=True)
class Kernel:
    """How matrices of one part are multiplied.

    format: of the weights; rate: dtype of the arithmetic, a key of Hardware.flops; weight_bytes: of a weight with its
    scale; activation_bytes: of an input element once it is quantised, 0 where it stays as it is; dequantised: weights
    are turned back into 16 bits on the way; copied: through memory, unless the step has one token.
    """

    name: str
    format: str
    rate: str
    weight_bytes: float
    activation_bytes: float = 0.0
    dequantised: bool = False
    copied: bool = False


# format -> kernels, best first: what the device must have a rate for, its name in vLLM, bytes of a quantised input
CHOICES: dict[str, tuple[tuple[str, str, float], ...]] = {
    "fp8": (("fp8", "cutlass_scaled_mm", 1.0), ("", "marlin", 0.0)),
    "fp8_block": (("fp8", "deep_gemm", 1.0 + 4 / 128), ("", "marlin", 0.0)),
    "fp8_wo": (("", "marlin", 0.0),),
    "int8": (("int8", "cutlass_scaled_mm", 1.0),),
    "int8_wo": (("", "marlin", 0.0),),
    "int4": (("", "marlin", 0.0),),
    "int4_fp8": (("fp8", "cutlass w4a8", 1.0),),
    "int4_int8": (("int8", "marlin w4a8", 1.0),),
    "nvfp4": (("fp4", "cutlass_scaled_fp4_mm", 0.5 + 1 / 16), ("", "marlin", 0.0)),
    "nvfp4_wo": (("", "marlin", 0.0),),
    "mxfp4": (("fp4", "mxfp8 x mxfp4", 1.0 + 1 / 32), ("", "triton w4a16", 0.0)),
    "mxfp8": (("fp4", "mxfp8", 1.0 + 1 / 32), ("", "marlin", 0.0)),
    "nf4": (("", "bitsandbytes", 0.0),),
}
MIXED_RATE = {"mxfp4": "fp8", "mxfp8": "fp8"}  # 8-bit inputs meet 4-bit weights at the rate of 8 bits


# bits and type of a weight, bits and type of an input -> format, where scales are as the format has them
SCHEMES = {
    (8, "float", 8, "float"): "fp8",
    (8, "float", 16, "float"): "fp8_wo",
    (8, "int", 8, "int"): "int8",
    (8, "int", 16, "float"): "int8_wo",
    (4, "int", 16, "float"): "int4",
    (4, "int", 8, "float"): "int4_fp8",
    (4, "int", 8, "int"): "int4_int8",
    (4, "float", 4, "float"): "nvfp4",
    (4, "float", 16, "float"): "nvfp4_wo",
}
MICROSCALED = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 64): "nf4"}
BLOCK = (128, 128)


def scheme_format(scheme: Scheme) -> str | None:
    """The format of a checkpoint's matrix, None for one that is not modelled."""
    found = SCHEMES.get((scheme.bits, scheme.type, scheme.input_bits, scheme.input_type))
    if scheme.block_size:
        return "fp8_block" if found == "fp8" and scheme.block_size == BLOCK else None
    if scheme.type == "int":
        return found
    if (scheme.bits, scheme.group_size) in MICROSCALED:
        return MICROSCALED[scheme.bits, scheme.group_size]
    return found if scheme.group_size in (0, FORMATS[found].group_size if found else 0) else None


def schemes(model: Model) -> Counter[Scheme]:
    """What the checkpoint's quantised matrices are, and in how many layers' matrices."""
    found: Counter[Scheme] = Counter()
    for layer, count in counted((*model.layers, *model.encoder_layers)).items():
        for _, scheme in layer.schemes:
            found[scheme] += count
    return found


def weight_format(model: Model, precision: Precision) -> str | None:
    """The format of the matrices that are quantised (of most of them), or of all of them."""
    if precision.weights != "auto":
        return precision.weights
    return scheme_format(schemes(model).most_common(1)[0][0]) if model.quantization else precision.activations


def parameters_by_format(model: Model) -> dict[str, dict[str, int]]:
    """Group of matrices of the layers -> format as the checkpoint stores it -> parameters ("16 bit" where it does not
    quantise); the rest of the model (embedding, norms, router, LM head) is "other"."""
    found: dict[str, Counter[str]] = {}

    def add(layer: Layer, group: str, key: str, params: int) -> None:
        scheme = dict(layer.schemes).get(key)
        name = (scheme_format(scheme) or "not modelled") if scheme else "16 bit"
        found.setdefault(group, Counter())[name] += params

    h = model.hidden_size
    for layer, count in counted((*model.layers, *model.encoder_layers)).items():
        groups = {"attention": layer.attention.linears(h)}
        groups |= {"cross attention": layer.cross_attention.linears(h)} if layer.cross_attention else {}
        if isinstance(layer.mlp, MoE):
            add(
                layer,
                "experts",
                "experts",
                count * layer.mlp.num_experts * layer.mlp.expert.num_params(layer.mlp.latent_size or h),
            )
            groups |= {"shared": layer.mlp.shared.linears(h)} if layer.mlp.shared else {}
        else:
            groups["mlp"] = layer.mlp.linears(h)
        for group, linears in groups.items():
            for linear in linears:
                for part, outputs in parts(linear):
                    key = f"{group.removeprefix('cross ')}.{part}"
                    add(layer, group, key, count * outputs * (linear.inputs + linear.bias))
    known = sum(sum(formats.values()) for formats in found.values())
    return {group: dict(formats) for group, formats in found.items()} | {"other": {"16 bit": model.num_params - known}}


class Kernels:
    """How the matrices of a placement are multiplied: `plain` in 16 bits, and each layer's as the checkpoint says."""

    def __init__(self, placement: Placement):
        self.placement = placement
        precision = placement.precision
        self.plain = Kernel("cublas", precision.activations, precision.activations, placement.activation_bytes)
        self._known: dict[Scheme | None, Kernel] = {}

    def of(self, layer: Layer, key: str) -> Kernel:
        """The kernel of one of the layer's matrices, by its key in `Layer.schemes`."""
        scheme = dict(layer.schemes).get(key)
        if scheme not in self._known:
            self._known[scheme] = self._kernel(scheme)
        return self._known[scheme]

    def _kernel(self, scheme: Scheme | None) -> Kernel:
        given = self.placement.precision.weights
        if given == "auto":
            name = scheme_format(scheme) if scheme else None
        else:
            name = given if scheme or not self.placement.model.quantization or given in UNQUANTISED else None
        size = scheme.group_size if scheme and given == "auto" else 0
        return (name and _kernel(name, self.placement, size)) or self.plain

    def split(self, layer: Layer, group: str, linear: Linear) -> list[tuple[Linear, Kernel]]:
        """The multiplications that a fused one falls into where its matrices have different formats: one, mostly."""
        if linear.name.startswith(KEPT):
            return [(linear, self.plain)]
        widths: dict[Kernel, int] = {}
        for part, outputs in parts(linear):
            kernel = self.of(layer, f"{group}.{part}")
            widths[kernel] = widths.get(kernel, 0) + outputs
        if len(widths) == 1:
            return [(linear, kernel) for kernel in widths]
        return [(replace(linear, outputs=outputs, parts=()), kernel) for kernel, outputs in widths.items()]


def _kernel(name: str, placement: Placement, group_size: int = 0) -> Kernel | None:
    precision = placement.precision
    if name in UNQUANTISED:
        return Kernel("cublas", name, name, BYTES[name])
    weight_bytes = FORMATS[name].bytes_per_weight(group_size if name.startswith("int4") else 0)
    for rate, kernel, activation_bytes in CHOICES[name]:
        if not rate:
            copied = name == "nf4"  # bitsandbytes' matmul_4bit: a 16-bit copy, then cuBLAS
            return Kernel(kernel, name, precision.activations, weight_bytes, dequantised=not copied, copied=copied)
        if rate in placement.hardware.flops:
            return Kernel(kernel, name, MIXED_RATE.get(name, rate), weight_bytes, activation_bytes)
    return None


def problems(placement: Placement) -> list[str]:
    """What of these formats is not modelled, or not on this device; one line each."""
    model, hardware, precision = placement.model, placement.hardware, placement.precision
    if precision.weights != "auto":
        names: list[str | None] = [precision.weights]
    elif model.quantization:
        names = list(dict.fromkeys(scheme_format(scheme) for scheme in schemes(model)))
    else:
        names = [precision.activations]
    if model.quantization and precision.kv_cache == "auto":
        return [f"model: {model.name}: its KV cache in {model.quantization.kv_cache} is not modelled yet;"
                f" precision.kv_cache can name another format, such as fp8"]  # fmt: skip
    if None in names:
        scheme = next(scheme for scheme in schemes(model) if scheme_format(scheme) is None)
        return [f"model: {model.name}: {_described(scheme)} are not modelled yet; precision.weights can name another"
                f" format, such as bf16"]  # fmt: skip
    if len(names) == 1 and names[0] in UNQUANTISED and precision.activations != names[0]:
        return [f"precision.activations: must be that of the weights, as vLLM has one dtype for both"
                f" (got {precision.activations} and {names[0]})"]  # fmt: skip
    found = []
    if precision.activations not in hardware.flops:
        have = ", ".join(key for key in hardware.flops if key in UNQUANTISED)
        key = "weights" if names[0] in UNQUANTISED else "activations"
        found.append(f"precision.{key}: {hardware.name} has no {precision.activations} rate; must be one of {have}")
    for name in names:
        needs = [rate for rate, _, _ in CHOICES.get(str(name), (("", "", 0),))]
        if "" not in needs and not any(rate in hardware.flops for rate in needs):
            found.append(f"precision.weights: {hardware.name} has no {needs[0]} rate, which {name} needs")
    return found


def _described(scheme: Scheme) -> str:
    """A scheme in words."""
    inputs = f" with inputs of {scheme.input_bits} bits ({scheme.input_type})" if scheme.input_bits < 16 else ""
    under = f" in groups of {scheme.group_size}" if scheme.group_size else ""
    under = f" in blocks of {' x '.join(map(str, scheme.block_size))}" if scheme.block_size else under
    return f"{scheme.type} weights of {scheme.bits} bits{under}{inputs}"


def matrix_bytes(linear: Linear, kernel: Kernel, bias_bytes: float) -> float:
    """Bytes of one matrix and its bias."""
    return linear.inputs * linear.outputs * kernel.weight_bytes + linear.outputs * linear.bias * bias_bytes
