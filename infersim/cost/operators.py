"""One forward pass of one rank as a list of operators: FLOPs, and bytes by what they are (weights, KV, activations).

The list is vLLM's: matrices fused as it fuses them, the residual addition inside the norm (fused_add_rms_norm), the KV
written by a kernel of its own (reshape_and_cache), logits for the last position of every scheduled sequence. A device
does not appear here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from infersim.models.architecture import Layer, Linear, Model
from infersim.spec.precision import BYTES, Precision

from .sharding import rank_layer

Sums = Mapping[str, float | np.ndarray]
"""What a step is reduced to, one number each (or arrays, for many steps): step is 1; tokens are new tokens, sequences
scheduled sequences; decodes are sequences with one new token, decode_keys the keys that they see; prefill_tokens are
the new tokens of the others, prefill_keys the keys that these see, prefill_pairs their query-key pairs after the causal
mask, query_tiles their blocks of engine.state.QUERY_TILE queries. Keys and pairs are those of one window."""

Amount = Mapping[str, float]
"""sum -> coefficient: a linear function of the sums of a step"""


def evaluate(amount: Amount, sums: Sums) -> float | np.ndarray:
    """The value of a linear function of the sums."""
    return sum(coefficient * sums[name] for name, coefficient in amount.items())


@dataclass(frozen=True)
class Operator:
    """`count` equal kernels of one pass. Amounts are those of one kernel, on one rank.

    flops in FLOP; weights, kv and activations are bytes of memory traffic; wire is bytes that a rank sends (and
    receives) in a collective. The operator runs in a step if the sum `per` is positive.
    """

    name: str
    operator_class: str
    dtype: str
    count: int
    per: str
    flops: Amount = field(default_factory=dict)
    weights: Amount = field(default_factory=dict)
    kv: Amount = field(default_factory=dict)
    activations: Amount = field(default_factory=dict)
    wire: Amount = field(default_factory=dict)
    window: int = 0
    """keys visible to a query, 0 for all: which of a step's attention sums count"""


def forward_pass(model: Model, precision: Precision, tensor: int = 1) -> list[Operator]:
    """The operators of one pass on one of `tensor` ranks, in the order in which they run."""
    width = BYTES[precision.activations]
    h = model.hidden_size
    tables = (model.embedding_params > 0) + (model.embedding_params > model.vocab_size * (model.embedding_size or h))
    operators = [
        # one row of the token table, and of the position table where there is one
        Operator("embedding", "elementwise", precision.activations, 1, "tokens",
                 weights={"tokens": tables * h * width}, activations={"tokens": h * width}),
        *_all_reduce(precision, h, 1, tensor),
    ]  # fmt: skip
    projections = [Linear("embedding_proj", model.embedding_size, h, parallel="replicated")] * 2
    projections = projections if model.embedding_size else []
    operators += [_gemm(linear, precision, 1, "tokens") for linear in projections]
    for layer, count in Counter(model.layers).items():
        operators += _layer(rank_layer(layer, tensor), h, precision, count, tensor)
    norm_params = model.other_params - sum(linear.num_params for linear in projections)
    operators.append(_norm("final_norm", h, norm_params, precision, 1))
    return operators + _head(model, precision, tensor)


def _layer(layer: Layer, h: int, precision: Precision, count: int, tensor: int) -> list[Operator]:
    attention, width = layer.attention, BYTES[precision.activations]
    queries, keys = attention.num_heads * attention.head_dim, attention.key_width
    qkv_proj, o_proj = attention.linears(h)
    up, down = layer.mlp.linears(h)
    operators = [_norm("norm", h, layer.norm_params / layer.num_norms, precision, count * layer.num_norms)]
    operators.append(_gemm(qkv_proj, precision, count, "tokens"))
    if attention.qk_norm:
        operators.append(
            Operator("qk_norm", "elementwise", precision.activations, count, "tokens",
                     weights={"step": attention.vector_params * BYTES[precision.weights]},
                     activations={"tokens": 2 * (queries + keys) * width})
        )  # fmt: skip
    if attention.rope:
        operators.append(
            Operator("rotary_embedding", "elementwise", precision.activations, count, "tokens",
                     activations={"tokens": 2 * (queries + keys) * width})
        )  # fmt: skip
    operators += _attention(layer, precision, count)
    operators += [_gemm(o_proj, precision, count, "tokens"), *_all_reduce(precision, h, count, tensor)]
    operators += [
        _gemm(up, precision, count, "tokens"),
        Operator("activation", "elementwise", precision.activations, count, "tokens",
                 activations={"tokens": (up.outputs + down.inputs) * width}),
        _gemm(down, precision, count, "tokens"),
        *_all_reduce(precision, h, count, tensor),
    ]  # fmt: skip
    return operators


def _attention(layer: Layer, precision: Precision, count: int) -> list[Operator]:
    """Writing the new keys and values, and the attention of sequences that decode and that prefill.

    A query meets a key in 2 head_dim FLOPs for the score and 2 v_head_dim for the value. Keys and values are read once
    per sequence: further tiles of its queries find them in the cache.
    """
    attention, width, kv_width = layer.attention, BYTES[precision.activations], BYTES[precision.kv_cache]
    key_bytes = attention.kv_elements_per_token * kv_width
    pair_flops = 2 * attention.num_heads * (attention.head_dim + attention.v_head_dim)
    query_bytes = attention.num_heads * (attention.head_dim + attention.v_head_dim) * width
    common = {"dtype": precision.activations, "count": count, "window": attention.window}
    return [
        Operator("kv_cache_write", "elementwise", precision.activations, count, "tokens",
                 kv={"tokens": key_bytes}, activations={"tokens": attention.kv_elements_per_token * width}),
        Operator("attention_decode", "attention_decode", per="decodes", flops={"decode_keys": pair_flops},
                 kv={"decode_keys": key_bytes}, activations={"decodes": query_bytes}, **common),
        Operator("attention_prefill", "attention_prefill", per="prefill_tokens", flops={"prefill_pairs": pair_flops},
                 kv={"prefill_keys": key_bytes}, activations={"prefill_tokens": query_bytes}, **common),
    ]  # fmt: skip


def _head(model: Model, precision: Precision, tensor: int) -> list[Operator]:
    """LM head, gathering its parts, and a greedy sampler: logits to float32 (Sampler.forward), then the maximum."""
    width, head = BYTES[precision.activations], model.lm_head
    part = Linear(head.name, head.inputs, -(-head.outputs // tensor), head.bias)
    operators = [_gemm(part, precision, 1, "sequences")]
    if tensor > 1:
        gathered = (tensor - 1) / tensor * head.outputs * width
        operators.append(
            Operator("all_gather", "collective", precision.activations, 1, "sequences", wire={"sequences": gathered})
        )
    return [
        *operators,
        Operator("logits_to_float32", "elementwise", precision.activations, 1, "sequences",
                 activations={"sequences": head.outputs * (width + 4)}),
        Operator("sample", "elementwise", "fp32", 1, "sequences", activations={"sequences": head.outputs * 4}),
    ]  # fmt: skip


def _gemm(linear: Linear, precision: Precision, count: int, per: str) -> Operator:
    return Operator(
        linear.name, "gemm", precision.weights, count, per,
        flops={per: 2 * linear.inputs * linear.outputs},
        weights={"step": linear.num_params * BYTES[precision.weights]},
        activations={per: (linear.inputs + linear.outputs) * BYTES[precision.activations]},
    )  # fmt: skip


def _norm(name: str, h: int, params: float, precision: Precision, count: int) -> Operator:
    """A norm with the residual addition in front: both are read and written."""
    return Operator(
        name, "elementwise", precision.activations, count, "tokens",
        weights={"step": params * BYTES[precision.weights]},
        activations={"tokens": 4 * h * BYTES[precision.activations]},
    )  # fmt: skip


def _all_reduce(precision: Precision, h: int, count: int, tensor: int) -> list[Operator]:
    """Ring or two-shot all-reduce of the hidden state: each rank sends 2 (n - 1) / n of it."""
    if tensor == 1:
        return []
    wire = 2 * (tensor - 1) / tensor * h * BYTES[precision.activations]
    return [Operator("all_reduce", "collective", precision.activations, count, "tokens", wire={"tokens": wire})]
