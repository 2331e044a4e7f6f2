"""One rank's part of a model under tensor parallelism, and what the cost model does not know yet."""

from dataclasses import replace

from infersim.models.architecture import MLP, Layer, Model
from infersim.spec.errors import InputError
from infersim.spec.hardware import Hardware
from infersim.spec.parallelism import Parallelism
from infersim.spec.precision import Precision

KINDS_NOT_MODELLED = {
    "chunk": "chunked attention is",
    "mla": "multi-head latent attention is",
    "linear": "linear attention is",
}
PARALLELISM_NOT_MODELLED = {
    "pipeline": "pipeline parallelism",
    "attention_data": "data-parallel attention",
    "expert": "expert parallelism",
    "context": "context parallelism",
}


def rank_layer(layer: Layer, tensor: int) -> Layer:
    """The layer as one of `tensor` ranks holds it (vLLM's QKVParallelLinear, Column- and RowParallelLinear).

    Query heads and the MLP are divided. Key heads are divided, and copied where there are more ranks than heads. Norms
    and the biases of row-parallel matrices are whole on every rank, which their counts on the smaller layer give.
    """
    attention = replace(
        layer.attention,
        num_heads=layer.attention.num_heads // tensor,
        num_kv_heads=max(1, layer.attention.num_kv_heads // tensor),
    )
    return replace(
        layer, attention=attention, mlp=replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // tensor)
    )


def joined(hardware: Hardware, tensor: int) -> bool:
    """Whether the scale-up link joins so many devices; if not, they meet over PCIe."""
    return tensor <= hardware.link.domain_size


def widest(hardware: Hardware) -> int:
    """Devices of one node: what the link joins, and at least the 8 that a host's PCIe does."""
    return max(8, hardware.link.domain_size)


def check_modelled(model: Model, hardware: Hardware, precision: Precision, parallelism: Parallelism) -> None:
    """InputError for whatever of this deployment the cost model does not know."""
    if found := problems(model, hardware, precision, parallelism):
        raise InputError(found)


def problems(model: Model, hardware: Hardware, precision: Precision, parallelism: Parallelism) -> list[str]:
    """One line for each thing that the cost model would get wrong."""
    unknown = _unknown_parts(model)
    found = [
        f"model: {model.name}: {what} not modelled yet; must be a dense decoder in bf16, fp16 or fp32"
        for what in unknown
    ]
    found += [
        f"parallelism.{key}: {what} is not modelled yet; must be 1 (got {getattr(parallelism, key)})"
        for key, what in PARALLELISM_NOT_MODELLED.items()
        if getattr(parallelism, key) > 1
    ]
    if precision.activations != precision.weights:
        found.append(
            f"precision.activations: must be that of the weights, as vLLM has one dtype for both"
            f" (got {precision.activations} and {precision.weights})"
        )
    if precision.weights not in hardware.flops:
        found.append(
            f"precision.weights: {hardware.name} has no {precision.weights} rate; must be one of"
            f" {', '.join(key for key in hardware.flops if key in ('bf16', 'fp16', 'fp32'))}"
        )
    if not unknown:
        found += _indivisible(model, hardware, parallelism.tensor)
    return found


def _unknown_parts(model: Model) -> list[str]:
    kinds = dict.fromkeys(layer.attention.kind for layer in model.layers)
    parts = [KINDS_NOT_MODELLED[kind] for kind in kinds if kind in KINDS_NOT_MODELLED]
    if any(not isinstance(layer.mlp, MLP) for layer in model.layers):
        parts.append("a mixture of experts is")
    if model.encoder_layers:
        parts.append("an encoder is")
    if model.quantization:
        parts.append(f"{model.quantization.method} weights are")
    return parts


def _indivisible(model: Model, hardware: Hardware, tensor: int) -> list[str]:
    if tensor > widest(hardware):
        return [
            f"parallelism.tensor: a node holds {widest(hardware)} of {hardware.name}, and tensor parallelism across"
            f" nodes is not modelled yet; must be at most that (got {tensor})"
        ]
    widths = {"query heads": set(), "intermediate channels": set()}
    for layer in dict.fromkeys(model.layers):
        widths["query heads"].add(layer.attention.num_heads)
        widths["intermediate channels"].add(layer.mlp.intermediate_size)
    found = [
        f"parallelism.tensor: must divide the {width} {what} of {model.name} (got {tensor})"
        for what, values in widths.items()
        for width in sorted(values)
        if width % tensor
    ]
    heads = {layer.attention.num_kv_heads for layer in model.layers}
    found += [
        f"parallelism.tensor: must divide the {n} key heads of {model.name}, or be a multiple of them (got {tensor})"
        for n in sorted(heads)
        if n % tensor and tensor % n
    ]
    return found
