"""The operators of one layer's attention, by kind: projections, the KV cache, and the kernels over keys.

A query meets a key in 2 head_dim FLOPs for the score and 2 v_head_dim for the value. Keys and values are read once per
sequence: further tiles of its queries find them in the cache.
"""

from typing import Any

from infersim.models.architecture import Attention, Layer, Linear
from infersim.models.attention import STATE_PASSES

from .operator import Operator, Pass

DELTA_CHUNK = 64
"""tokens of a chunk of the gated delta rule (flash-linear-attention, chunk_gated_delta_rule)"""


def attention_operators(layer: Layer, shape: Pass, count: int) -> list[Operator]:
    """What one rank's part of the layer runs between its norm and its all-reduce."""
    attention = layer.attention
    linears = {linear.name: linear for linear in attention.linears(shape.hidden_size)}
    output = linears.pop("o_proj")
    latent = linears.pop("kv_b_proj", None)
    operators = [
        operator
        for name, linear in linears.items()
        for operator in shape.gemms(linear, layer, "attention", count, fused=name == "qkv_proj")
    ]
    kinds = {"mla": _latent, "linear": _recurrent}
    operators += kinds[attention.kind](attention, shape, count) if attention.kind in kinds else []
    if latent is not None:
        operators += _absorbed(attention, latent, shape, count)
    elif attention.kind == "compressed":
        operators += _compressed(attention, shape, count)
    elif attention.kind != "linear":
        operators += _indexer(attention, shape, count) if attention.has_indexer else []
        operators += _keyed(layer, shape, count)
    if attention.output_gate:
        operators.append(shape.elementwise("output_gate", count, 3 * output.inputs))
    operators += shape.gemms(output, layer, "attention", count)
    if layer.cross_attention:
        operators += _cross(layer, layer.cross_attention, shape, count)
    return operators


def _keyed(layer: Layer, shape: Pass, count: int) -> list[Operator]:
    """Attention with keys and values of its own: norms, positions, writing the cache, reading it."""
    attention, context = layer.attention, shape.parallelism.context
    queries, keys = attention.num_heads * attention.head_dim, attention.key_width
    operators = []
    if attention.qk_norm == "layer" and shape.parallelism.tensor > 1:
        # the variance of all heads: each rank's sums, two FP32 numbers per token, go round in front of the norm (vLLM's
        # and SGLang's minimax_m2.py; vLLM's olmo2.py gathers the heads instead)
        operators.append(shape.elementwise("qk_variance", count, queries + keys))
        operators += shape.collective("all_reduce", count, shape.parallelism.tensor, 2, width=4)
    if attention.qk_norm:
        operators.append(shape.elementwise("qk_norm", count, 2 * (queries + keys), attention.vector_params))
    if attention.rope:
        operators.append(shape.elementwise("rotary_embedding", count, 2 * (queries + keys)))
    elements = attention.kv_elements_per_token
    key_bytes = shape.placement.key_bytes(attention)
    width = attention.head_dim + attention.v_head_dim
    # an encoder's queries see the keys on both sides: twice the causal half
    sides = 2 if layer.cross_attention else 1
    common: dict[str, Any] = {
        "dtype": shape.precision.kv_cache,
        "rate": shape.dtype,
        "count": count,
        "window": -attention.window if attention.kind == "chunk" else attention.window or attention.index_topk,
        "shape": {"heads": attention.num_heads, "kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim},
    }
    if not attention.kv_shared:
        operators.append(
            Operator(
                "kv_cache_write",
                "elementwise",
                shape.dtype,
                count,
                "tokens",
                kv={"tokens": key_bytes / context},
                activations={"tokens": elements * shape.width},
            )
        )
    operators += [
        # under context parallelism a rank has the queries of all and a part of their keys
        Operator("attention_decode", "attention_decode", per="decodes",
                 flops={"decode_keys": 2 * attention.num_heads * width}, kv={"decode_keys": key_bytes / context},
                 activations={"decodes": attention.num_heads * width * context * shape.width}, **common),
        Operator("attention_prefill", "attention_prefill", per="prefill_tokens",
                 flops={"prefill_pairs": 2 * attention.num_heads * width * sides}, kv={"prefill_keys": key_bytes},
                 activations={"prefill_tokens": attention.num_heads * width * shape.width}, **common),
    ]  # fmt: skip
    operators += shape.collective("all_gather", count, context, queries * context)
    operators += shape.collective("reduce_scatter", count, context, attention.num_heads * attention.v_head_dim)
    return operators


def _latent(attention: Attention, shape: Pass, count: int) -> list[Operator]:
    """MLA's small kernels: norms of the latents, positions of the queries and of the one rotary key."""
    n, rope = attention.num_heads, attention.qk_rope_head_dim
    norms = attention.q_lora_rank + attention.kv_lora_rank
    operators = [
        shape.elementwise("latent_norm", count, 2 * norms, attention.vector_params),
        shape.elementwise("rotary_embedding", count, 2 * (n + 1) * rope),
    ]
    if attention.has_indexer:
        operators += _indexer(attention, shape, count)
    return operators


def _absorbed(attention: Attention, up: Linear, shape: Pass, count: int) -> list[Operator]:
    """Attention over latents as vLLM runs it (v1/attention/backends/mla/common.py).

    Decode: queries are multiplied into the space of the latents (W_UK), which all heads share and read once; outputs
    come back through W_UV: together the FLOPs of kv_b_proj per query. Prefill: latents, those of earlier chunks too,
    are expanded by kv_b_proj into keys and values of every head. The matrix is read in any step.
    """
    n, r, rope = attention.num_heads, attention.kv_lora_rank, attention.qk_rope_head_dim
    context, ranks = shape.parallelism.context, shape.parallelism.prefill_context
    key_bytes = shape.placement.key_bytes(attention)
    # vLLM keeps W_UK and W_UV in 16 bits (process_weights_after_loading); prefill reads the stored kv_b_proj
    plain = shape.gemm(up, count)
    expand = 2 * up.inputs * up.outputs
    heads = n * (attention.head_dim + attention.v_head_dim)
    common: dict[str, Any] = {"dtype": shape.dtype, "count": count}
    keyed = common | {"dtype": shape.precision.kv_cache, "rate": shape.dtype, "window": attention.index_topk}
    decoding = {"heads": n, "kv_heads": 1, "head_dim": r + rope}
    prefilling = {"heads": n, "kv_heads": n, "head_dim": attention.head_dim}
    return [
        Operator("kv_b_proj", "gemm", shape.dtype, count, "tokens", weights=plain.weights),
        Operator("kv_cache_write", "elementwise", shape.dtype, count, "tokens",
                 kv={"tokens": key_bytes / context}, activations={"tokens": (r + rope) * shape.width}),
        Operator("absorb", "gemm", per="decodes", flops={"decodes": expand}, row="latent", window=0,
                 activations={"decodes": (heads + n * (2 * r + rope)) * shape.width}, **common),
        Operator("expand", "gemm", per="prefill_tokens", flops={"prefill_keys": expand}, row="latent", window=0,
                 kv={"prefill_keys": key_bytes + up.outputs * shape.width}, **common),
        Operator("attention_decode", "mla_decode", per="decodes", flops={"decode_keys": 2 * n * (2 * r + rope)},
                 kv={"decode_keys": key_bytes / context}, shape=decoding,
                 activations={"decodes": n * (2 * r + rope) * context * shape.width}, **keyed),
        Operator("attention_prefill", "mla_prefill", per="prefill_tokens", flops={"prefill_pairs": 2 * heads},
                 kv={"prefill_keys": heads * shape.width}, shape=prefilling,
                 activations={"prefill_tokens": heads * shape.width}, **keyed),
        *shape.collective("all_gather", count, context, n * (r + rope) * context),
        *shape.collective("reduce_scatter", count, context, n * r),
        # what all ranks write into their caches (vLLM's maybe_gather_mla_latent_cache_inputs, maybe_gather_indexer_k)
        *shape.collective("all_gather", count, ranks, (r + rope) * ranks, apart=shape.parallelism.tensor),
        *shape.collective("all_gather", count * attention.has_indexer, ranks, attention.index_head_dim * ranks,
                          apart=shape.parallelism.tensor),
    ]  # fmt: skip


def _compressed(attention: Attention, shape: Pass, count: int) -> list[Operator]:
    """DeepSeek-V4: the newest keys as they are, and entries of compress_ratio tokens, all or those that the indexer
    picks; a key is a value too, and is read once."""
    n, d, ratio = attention.num_heads, attention.head_dim, attention.compress_ratio
    entry, written = attention.entry_bytes(shape.placement.kv_bytes), 1 + (1 / ratio if ratio else 0)
    operators = [
        shape.elementwise("latent_norm", count, 2 * (attention.q_lora_rank + n * d + d), attention.vector_params),
        Operator("kv_cache_write", "elementwise", shape.dtype, count, "tokens",
                 kv={"tokens": entry * written}, activations={"tokens": d * shape.width * written}),
    ]  # fmt: skip
    operators += _indexer(attention, shape, count) if attention.has_indexer else []
    parts = [("local", attention.window, 1)]
    parts += [("compressed", attention.index_topk * ratio, ratio)] if ratio else []
    for part, window, each in parts:
        keyed: dict[str, Any] = {
            "dtype": shape.precision.kv_cache,
            "rate": shape.dtype,
            "count": count,
            "window": window,
            "shape": {"heads": n, "kv_heads": 1, "head_dim": d},
        }
        moved = 2 * n * d * shape.width if part == "local" else 0  # queries and outputs, once
        operators += [
            Operator(f"attention_decode_{part}", "mla_decode", per="decodes", flops={"decode_keys": 4 * n * d / each},
                     kv={"decode_keys": entry / each}, activations={"decodes": moved}, **keyed),
            Operator(f"attention_prefill_{part}", "mla_prefill", per="prefill_tokens",
                     flops={"prefill_pairs": 4 * n * d / each}, kv={"prefill_keys": entry / each},
                     activations={"prefill_tokens": moved}, **keyed),
        ]  # fmt: skip
    return operators


def _indexer(attention: Attention, shape: Pass, count: int) -> list[Operator]:
    """DeepSeek-V3.2's lightning indexer: every query's few narrow heads meet every key, in FP8 (whole on every rank).

    What it leaves, index_topk keys per query, is what the attention sees: a window's worth.
    """
    pair = 2 * attention.index_num_heads * attention.index_head_dim / (attention.compress_ratio or 1)
    keys = float(attention.index_bytes_per_token)
    queries = attention.index_num_heads * attention.index_head_dim
    common: dict[str, Any] = {"dtype": "fp8", "count": count, "row": "indexer"}
    return [
        Operator("index_cache_write", "elementwise", shape.dtype, count, "tokens",
                 kv={"tokens": keys}, activations={"tokens": attention.index_head_dim * shape.width}),
        Operator("index_decode", "attention_decode", per="decodes", flops={"decode_keys": pair},
                 kv={"decode_keys": keys}, activations={"decodes": queries}, **common),
        Operator("index_prefill", "attention_prefill", per="prefill_tokens", flops={"prefill_pairs": pair},
                 kv={"prefill_keys": keys}, activations={"prefill_tokens": queries}, **common),
    ]  # fmt: skip


def _recurrent(attention: Attention, shape: Pass, count: int) -> list[Operator]:
    """A layer with a state instead of keys: a window of one key, which stands for the state.

    A decode reads and writes the state; its multiplications with it are STATE_PASSES. Prefill works in chunks: per
    chunk the state is read and written, and tokens meet those of their own chunk.
    """
    n, k, v = attention.num_heads, attention.head_dim, attention.v_head_dim
    state = 2 * attention.state_bytes(shape.width)
    moved = (2 * attention.key_width + 2 * attention.value_width) * shape.width
    passes = STATE_PASSES[attention.recurrence]
    inside = n * DELTA_CHUNK * 2 * (2 * k + v) * bool(passes)
    whole = 2 * passes * n * k * v
    common: dict[str, Any] = {"dtype": shape.dtype, "count": count, "window": 1, "row": "state"}
    return [
        shape.elementwise("conv1d", count, 2 * attention.conv_width, attention.vector_params),
        Operator("recurrent_decode", "recurrent", per="decodes", flops={"decode_keys": whole},
                 kv={"decode_keys": state}, activations={"decodes": moved}, **common),
        Operator("recurrent_prefill", "recurrent", per="prefill_tokens",
                 flops={"prefill_pairs": inside + whole}, kv={"prefill_keys": state / DELTA_CHUNK},
                 activations={"prefill_tokens": moved}, **common),
        shape.elementwise("gated_norm", count, 3 * attention.value_width),
    ]  # fmt: skip


def _cross(layer: Layer, cross: Attention, shape: Pass, count: int) -> list[Operator]:
    """Cross attention of an encoder-decoder, whose keys and values are the encoder's output.

    With as many encoder as decoder layers a prompt token in the encoder costs what a decoded token does in the
    decoder: the two projections of its cross keys and values against cross query and output; and a decoded token sees
    prompt and output together, in one attention or the other. So one pass over one stack stands for both.
    """
    h, inner = shape.hidden_size, cross.num_heads * cross.head_dim
    return [
        shape.gemm(Linear("cross_q_proj", h, inner), count, kernel=shape.kernels.of(layer, "attention.q_proj")),
        Operator("cross_attention", "attention_decode", shape.dtype, count, "decodes",
                 activations={"decodes": 2 * inner * shape.width}, row="cross"),
        shape.gemm(Linear("cross_o_proj", inner, h), count, kernel=shape.kernels.of(layer, "attention.o_proj")),
    ]  # fmt: skip
