"""One forward pass of one rank as a list of operators.

The list is vLLM's: matrices fused as it fuses them, the residual addition inside the norm (fused_add_rms_norm), the KV
written by a kernel of its own (reshape_and_cache), logits for the last position of every scheduled sequence. Of the
device only its choice of kernels for quantised matrices appears here, and how many of it share a node.
"""

from dataclasses import replace

from infersim.models.architecture import MLP, Layer, Linear, Model, MoE, counted

from .attention import attention_operators
from .collectives import node_size
from .formats import UNPACKED_FOR, Kernel, Kernels, matrix_bytes
from .moe import Routing
from .operator import Operator, Pass
from .placement import Placement
from .sharding import rank_layer


def forward_pass(placement: Placement) -> list[Operator]:
    """The operators of one pass on one rank, in the order in which they run; of all pipeline stages together."""
    model = placement.model
    shape = Pass(placement, Kernels(placement))
    h, width = model.hidden_size, shape.width
    tables = (model.embedding_params > 0) + (model.embedding_params > model.vocab_size * (model.embedding_size or h))
    operators = [
        # one row of the token table, and of the position table where there is one
        Operator("embedding", "elementwise", shape.dtype, 1, "tokens",
                 weights={"tokens": tables * h * width}, activations={"tokens": h * width}),
        *shape.all_reduce(1),
    ]  # fmt: skip
    projections = [Linear("embedding_proj", model.embedding_size, h, parallel="replicated")] * 2
    projections = projections if model.embedding_size else []
    operators += [shape.gemm(linear, 1) for linear in projections]
    for layer, count in counted(model.layers).items():
        operators += _layer(layer, shape, count)
    operators += _sends(shape, node_size(placement.hardware))
    norm_params = model.other_params - sum(linear.num_params for linear in projections)
    operators.append(shape.norm("final_norm", norm_params, 1))
    # every rank samples: the hidden states of all
    context = placement.parallelism.prefill_context
    operators += shape.collective("all_gather", 1, context, h * context, apart=placement.parallelism.tensor)
    if context > 1:
        operators = [op if op.shared else replace(op, split=context) for op in operators]
    return operators + _head(model, shape)


def _sends(shape: Pass, node: int) -> list[Operator]:
    """From stage to stage, between two ranks of the same place in them. Devices count tensor ranks first, then
    data-parallel ones, then stages (SGLang, TensorRT-LLM; vLLM too without data-parallel ranks). To another node each
    rank sends its part over its own network card (vLLM's send_tensor_dict with an all_gather_group).
    """
    h, parallelism = shape.hidden_size, shape.parallelism
    width, stages = parallelism.tensor * parallelism.attention_data, parallelism.pipeline
    across = sum((i - 1) * width // node != (i * width + width - 1) // node for i in range(1, stages))
    inside = shape.collective("send", stages - 1 - across, 2, h)
    return inside + shape.collective("send", across, 2, h / parallelism.tensor, apart=node)


def _layer(whole: Layer, shape: Pass, count: int) -> list[Operator]:
    layer = rank_layer(whole, shape.parallelism)
    norms = layer.num_norms
    operators = [shape.norm("norm", layer.norm_params / norms, count * norms)] if norms else []
    operators += [shape.gemm(linear, count) for linear in layer.beside]
    operators += attention_operators(layer, shape, count)
    operators += shape.all_reduce(count)
    if layer.cross_attention:
        operators += shape.all_reduce(count)
    if isinstance(layer.mlp, MoE):
        return operators + _moe(whole, layer, shape, count)
    mlp = _mlp(layer.mlp, layer, shape, "mlp", count)
    return operators + mlp + (shape.all_reduce(count) if mlp else [])


def _mlp(mlp: MLP, layer: Layer, shape: Pass, group: str, count: int) -> list[Operator]:
    if not mlp.intermediate_size:
        return []
    up, down = mlp.linears(shape.hidden_size)
    return [
        *shape.gemms(up, layer, group, count, fused=True),
        shape.elementwise("activation", count, up.outputs + down.inputs),
        *shape.gemms(down, layer, group, count, fused=True),
    ]


def _moe(whole_layer: Layer, layer: Layer, shape: Pass, count: int) -> list[Operator]:
    """Router, shared experts on the rank's own tokens, routed ones on those of all ranks that share them.

    Under tensor parallelism alone all ranks have all tokens and add up what their experts gave in the layer's
    all-reduce; with data-parallel attention, or prompts divided among ranks, tokens travel to their experts' ranks and
    back (all-to-all), or where experts are cut rather than dealt out all tokens to all ranks.
    """
    whole, moe = whole_layer.mlp, layer.mlp
    assert isinstance(whole, MoE) and isinstance(moe, MoE)
    h, parallelism, kernel = shape.hidden_size, shape.parallelism, shape.kernels.of(layer, "experts")
    operators = [
        shape.gemm(whole.router(h), count),
        shape.elementwise("topk", count, whole.num_experts + 4 * whole.num_experts_per_token),
    ]
    if moe.shared:
        operators += _mlp(moe.shared, layer, shape, "shared", count)
    if whole.shared_gate:
        operators += [
            shape.gemm(Linear("shared_expert_gate", h, 1), count),
            shape.elementwise("shared_expert_scale", count, 2 * h),
        ]
    operators += [shape.gemm(linear, count) for linear in whole.projections(h)]
    h = whole.latent_size or h  # of what routed experts take and give
    routing = Routing.of(whole, parallelism)
    up, down = moe.expert_linears(h)
    matrices = up.inputs * up.outputs + down.inputs * down.outputs
    moved = (h + down.inputs) * (shape.width + 2 * kernel.activation_bytes) + (up.outputs + h) * shape.width
    experts = Operator(
        "experts", "moe", kernel.format, count, "tokens",
        flops={"expert_tokens": 2 * matrices},
        weights={"experts": sum(matrix_bytes(linear, kernel, shape.width) for linear in (up, down)),
                 # bitsandbytes copies all experts, touched or not, in every step
                 "step": 2 * shape.width * moe.num_experts * matrices * kernel.copied},
        # in and out of both matrices, and the sum of a token's experts
        activations={"expert_tokens": moved + h * shape.width, "tokens": h * shape.width},
        rate=kernel.rate,
        unpack={"experts": matrices, "expert_tokens": matrices / UNPACKED_FOR} if kernel.dequantised else {},
        routing=routing,
        shape={"hidden": h, "inter": down.inputs, "quantised": kernel.activation_bytes},
        shared=parallelism.token_ranks > 1,
    )  # fmt: skip
    if parallelism.token_ranks == 1:
        return [*operators, experts, *shape.all_reduce(count)]
    there, back = _exchange(shape, whole, kernel, h, count)
    return [*operators, *there, experts, *back, *shape.all_reduce(count if moe.shared else 0)]


FP8_SENT = 1 + 4 / 128
"""bytes of an element that DeepEP sends in FP8, with an FP32 scale for 128"""


def _sent(shape: Pass, kernel: Kernel) -> float:
    """Bytes of an element on its way to the experts. vLLM 0.32 quantises first unless the experts' kernel does it by
    itself: FlashInfer's CUTLASS for block FP8, its choice for dealt-out experts on Hopper (fused_moe/oracle/fp8.py,
    expects_unquantized_inputs). Inputs of MXFP4 experts are left in 16 bits here."""
    by_itself = kernel.format == "fp8_block" and shape.placement.hardware.generation == "hopper"
    first = shape.placement.quantises_first and kernel.format in ("fp8", "fp8_block", "nvfp4") and not by_itself
    return (first and kernel.activation_bytes) or shape.width


def _exchange(shape: Pass, moe: MoE, kernel: Kernel, h: int, count: int) -> tuple[list[Operator], list[Operator]]:
    """Tokens on their way to the experts of other data-parallel ranks, and back (parallelism.all2all_backend)."""
    parallelism, k = shape.parallelism, moe.num_experts_per_token
    ranks, backend = parallelism.tensor * parallelism.token_ranks, parallelism.all2all_backend
    if parallelism.expert == 1 or backend == "allgather_reducescatter":
        return tuple(
            shape.collective(
                kind, count, parallelism.token_ranks, h, shared=True, apart=parallelism.tensor, width=width
            )
            for kind, width in (("all_gather", _sent(shape, kernel)), ("reduce_scatter", shape.width))
        )  # type: ignore[return-value]
    if backend == "deepep_low_latency":
        return tuple(
            shape.collective("low_latency_all_to_all", count, ranks, h * k / ranks, shared=True, width=width)
            for width in (FP8_SENT, shape.width)
        )  # type: ignore[return-value]
    # expected ranks among `expert` that at least one of a token's experts is on; a rank holds 1 / ranks of them
    reached = parallelism.expert * (1 - (1 - 1 / parallelism.expert) ** k)
    forwarded = backend == "deepep_high_throughput"
    fp8 = forwarded and kernel.format.startswith("fp8")
    widths = (FP8_SENT if fp8 else shape.width if forwarded else _sent(shape, kernel), shape.width)
    kind, nodes = (
        "forwarded_all_to_all" if forwarded else "all_to_all",
        -(-ranks // node_size(shape.placement.hardware)),
    )
    # nodes that it may reach: groups of experts are on one each; of those that it does 1 / nodes are its own
    most = min(nodes, moe.groups_per_token) if moe.num_groups > 1 else nodes
    crossing = most * (1 - (1 - 1 / most) ** k) * (1 - 1 / nodes) / reached
    return tuple(
        [
            replace(op, crossing=crossing)
            for op in shape.collective(kind, count, ranks, h * reached / ranks, shared=True, width=width)
        ]
        for width in widths
    )  # type: ignore[return-value]


def _head(model: Model, shape: Pass) -> list[Operator]:
    """LM head, gathering its parts, and a greedy sampler: logits to float32 (Sampler.forward), then the maximum."""
    head, tensor = model.lm_head, shape.parallelism.tensor
    part = Linear(head.name, head.inputs, -(-head.outputs // tensor), head.bias)
    return [
        shape.gemm(part, 1, "sequences"),
        *shape.collective("all_gather", 1, tensor, head.outputs, "sequences"),
        Operator("logits_to_float32", "elementwise", shape.dtype, 1, "sequences",
                 activations={"sequences": head.outputs * (shape.width + 4)}),
        Operator("sample", "elementwise", "fp32", 1, "sequences", activations={"sequences": head.outputs * 4}),
    ]  # fmt: skip
