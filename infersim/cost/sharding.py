"""One rank's part of a model, and what the cost model does not know yet.

Names of the same thing elsewhere:

    here            vLLM                         SGLang               TensorRT-LLM                 AIConfigurator
    tensor          --tensor-parallel-size       --tp / --dp *        tensor_parallel_size *       tp_size
    pipeline        --pipeline-parallel-size     --pp                 pipeline_parallel_size       pp_size
    attention_data  --data-parallel-size         --dp **              enable_attention_dp: its tp  attention_dp_size
    expert          --enable-expert-parallel:    --ep                 moe_expert_parallel_size     moe_ep_size
                    tensor x attention_data
    moe_tensor      what is left of them         --tp / --ep          moe_tensor_parallel_size     moe_tp_size
    context         --decode-context-parallel-   -                    (cp_config)                  -
                    size
    prefill_context --prefill-context-parallel-  --attn-cp-size       -                            -
                    size

*  with data-parallel attention, whose ranks are taken from --tp: tensor is what is left of it.
** --enable-dp-attention; --dp alone makes whole copies, which are cluster.replicas here.
"""

from dataclasses import replace
from itertools import accumulate

from infersim.config.errors import InputError
from infersim.config.parallelism import Parallelism
from infersim.models.architecture import MLP, Layer, Model, MoE, counted

from . import formats
from .collectives import node_size
from .placement import Placement


def rank_layer(layer: Layer, parallelism: Parallelism) -> Layer:
    """The layer as one rank holds it (vLLM's QKVParallelLinear, Column- and RowParallelLinear, FusedMoE).

    Query heads, the MLP and shared experts are divided by `tensor`. Key heads are divided, and copied where there are
    more ranks than heads; a latent is whole on every rank. Routed experts are dealt out to `expert` ranks and each is
    cut by `moe_tensor`. Norms and the biases of row-parallel matrices are whole on every rank, which their counts on
    the smaller layer give.
    """
    tensor, moe_tensor = parallelism.tensor, parallelism.moe_tensor
    assert moe_tensor is not None  # filled while being made
    mlp: MLP | MoE
    attention = _rank_attention(layer.attention, tensor)
    if isinstance(layer.mlp, MoE):
        mlp = replace(
            layer.mlp,
            num_experts=(layer.mlp.num_experts + parallelism.num_redundant_experts) // parallelism.expert,
            intermediate_size=layer.mlp.intermediate_size // moe_tensor,
            shared_intermediate_size=layer.mlp.shared_intermediate_size // tensor,
        )
    else:
        mlp = replace(layer.mlp, intermediate_size=layer.mlp.intermediate_size // tensor)
    cross = layer.cross_attention and _rank_attention(layer.cross_attention, tensor)
    return replace(layer, attention=attention, mlp=mlp, cross_attention=cross)


def _rank_attention(attention, tensor: int):
    heads = {"num_heads": attention.num_heads // tensor}
    if attention.output_groups:
        heads["output_groups"] = max(1, attention.output_groups // tensor)
    return replace(attention, num_kv_heads=max(1, attention.num_kv_heads // tensor), **heads)


def pipeline_stages(num_layers: int, stages: int) -> list[tuple[int, int]]:
    """First and last + 1 layer of every stage: as many for each, those left over to the last but one and those before
    it (vLLM, distributed/utils.get_pp_indices)."""
    sizes = [num_layers // stages] * stages
    for i in range(num_layers % stages):
        sizes[-2 - i] += 1
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def check_modelled(placement: Placement) -> None:
    """InputError for whatever of this deployment the cost model does not know."""
    if found := problems(placement):
        raise InputError(found)


def problems(placement: Placement) -> list[str]:
    """One line for each thing that the cost model would get wrong."""
    model, precision, found = placement.model, placement.precision, []
    if model.encoder_layers and len(model.encoder_layers) != model.num_layers:
        found.append(
            f"model: {model.name}: an encoder of {len(model.encoder_layers)} layers before a decoder of"
            f" {model.num_layers} is not modelled yet; must have as many"
        )
    found += formats.problems(placement)
    if precision.kv_cache not in ("auto", "bf16", "fp16", "fp8"):
        if model.layers[0].attention.kind in ("mla", "compressed"):
            found.append(f"precision.kv_cache: a latent cache has no {precision.kv_cache}; must be bf16 or fp8")
        if precision.kv_cache == "nvfp4" and "fp4" not in placement.hardware.flops:
            found.append(f"precision.kv_cache: {placement.hardware.name} has no fp4 rate, which nvfp4 needs")
    if placement.latents_in_fp8 and placement.hardware.generation == "blackwell-gb202" and precision.kv_cache != "fp8":
        found.append(f"precision.kv_cache: {placement.hardware.name} reads sparse latents in fp8 alone; must be fp8")
    if model.layers[0].attention.kind == "mla" and precision.kv_cache == "fp8" and placement.parallelism.context > 1:
        found.append("parallelism.context: is not modelled with a latent cache in fp8; must be 1")
    return found + _indivisible(placement)


def _indivisible(placement: Placement) -> list[str]:
    model, parallelism = placement.model, placement.parallelism
    tensor, node, found = parallelism.tensor, node_size(placement.hardware), []
    if tensor > node and tensor % node:
        found.append(
            f"parallelism.tensor: a node holds {node} of {placement.hardware.name}; must be at most that, or a"
            f" multiple (got {tensor})"
        )
    layers = list(counted(model.layers))
    divided: dict[tuple[str, str, int], set[int]] = {}

    def divide(key: str, what: str, by: int, width: int) -> None:
        divided.setdefault((key, what, by), set()).add(width)

    for layer in layers:
        divide("tensor", "query heads", tensor, layer.attention.num_heads)
        if isinstance(layer.mlp, MoE):
            copies = parallelism.num_redundant_experts
            what = f"experts ({copies} of them copies)" if copies else "experts"
            divide("expert", what, parallelism.expert, layer.mlp.num_experts + copies)
            divide("moe_tensor", "channels of an expert", parallelism.moe_tensor or 1, layer.mlp.intermediate_size)
            if layer.mlp.shared_intermediate_size:
                divide("tensor", "channels of the shared experts", tensor, layer.mlp.shared_intermediate_size)
        else:
            divide("tensor", "intermediate channels", tensor, layer.mlp.intermediate_size)
    found += [
        f"parallelism.{key}: must divide the {width} {what} of {model.name} (got {by})"
        for (key, what, by), widths in divided.items()
        for width in sorted(widths)
        if width % by
    ]
    heads = {layer.attention.num_kv_heads for layer in layers if layer.attention.kind != "mla"}
    found += [
        f"parallelism.tensor: must divide the {n} key heads of {model.name}, or be a multiple of them (got {tensor})"
        for n in sorted(heads)
        if n % tensor and tensor % n
    ]
    if parallelism.expert > 1 and not any(isinstance(layer.mlp, MoE) for layer in layers):
        found.append(f"parallelism.expert: {model.name} has no experts; must be 1 (got {parallelism.expert})")
    if parallelism.pipeline > model.num_layers:
        found.append(
            f"parallelism.pipeline: must be at most the {model.num_layers} layers of {model.name}"
            f" (got {parallelism.pipeline})"
        )
    if parallelism.context > 1:
        found += _context_problems(model, parallelism)
    if parallelism.prefill_context > 1 and any(layer.attention.kind != "mla" for layer in layers):
        found.append(f"parallelism.prefill_context: vLLM has it for MLA models alone; must be 1 for {model.name}")
    return found


def _context_problems(model: Model, parallelism: Parallelism) -> list[str]:
    """Ranks can share a sequence's cache where they would otherwise hold copies of the same key heads (vLLM)."""
    if any(layer.attention.kind not in ("full", "mla") for layer in model.layers):
        return [f"parallelism.context: is modelled for full attention alone; must be 1 for {model.name}"]
    copies = min(parallelism.tensor // layer.attention.num_kv_heads for layer in model.layers)
    if parallelism.context > copies or copies % parallelism.context:
        return [
            f"parallelism.context: must divide the {max(copies, 1)} ranks that hold the same key heads of"
            f" {model.name} (got {parallelism.context})"
        ]
    return []
