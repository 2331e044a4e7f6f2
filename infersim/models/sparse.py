"""Mixtures of experts: Mixtral, Qwen3, GPT-OSS, Llama 4, MiniMax, MiMo, and DeepSeek with latent attention."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from .architecture import MLP, Attention, Layer, Linear, Model, MoE
from .families import Trunk, grouped_attention, kinds, windowed
from .fields import Fields
from .recipes import RECIPES, Experts, read_experts, sparse_layers


def read_moe(fields: Fields, experts: str, size: str = "moe_intermediate_size", **traits) -> MoE:
    """The mixture of one layer; `experts` and `size` are the family's names of its fields. Transformers 5 writes
    num_local_experts for all."""
    num_experts = fields.integer(experts, "num_local_experts")
    top = fields.integer("num_experts_per_tok")
    if top > num_experts:
        fields.problem("num_experts_per_tok", f"must be at most {experts} {num_experts} (got {top})", given=(experts,))
    return MoE(num_experts, min(top, num_experts), fields.integer(size), **traits)


def mixed(
    fields: Fields, num_layers: int, moe: MoE, sparse: Collection[int], size: str = "intermediate_size"
) -> list[MLP | MoE]:
    """One feed-forward block per layer: `moe` in the `sparse` layers, else an MLP whose width is field `size`."""
    if all(i in sparse for i in range(num_layers)):
        return [moe] * num_layers  # and the dense width may be absent
    dense = MLP(fields.integer(size))
    return [moe if i in sparse else dense for i in range(num_layers)]


def qwen_sparse_layers(fields: Fields, num_layers: int) -> set[int]:
    step = fields.integer("decoder_sparse_step", default=1)
    return set(range(step - 1, num_layers, step)) - set(fields.integers("mlp_only_layers"))


def mixtral(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 131072)
    attention = grouped_attention(fields, trunk.hidden_size)
    window = fields.integer("sliding_window", default=trunk.max_position_embeddings)
    attention = windowed(attention, "window", window, trunk.max_position_embeddings)
    moe = read_moe(fields, "num_local_experts", "intermediate_size")
    return trunk.model(trunk.rms_layers([attention] * trunk.num_layers, [moe] * trunk.num_layers))


def qwen3_moe(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 32768)
    bias = fields.flag("attention_bias", False)
    attention = grouped_attention(fields, trunk.hidden_size, qkv_bias=bias, output_bias=bias, qk_norm="head")
    if fields.flag("use_sliding_window", False):
        fields.problem("use_sliding_window", "true is not modelled for qwen3_moe; no published model has it")
    sparse = qwen_sparse_layers(fields, trunk.num_layers)
    mlps = mixed(fields, trunk.num_layers, read_moe(fields, "num_experts"), sparse)
    return trunk.model(trunk.rms_layers([attention] * trunk.num_layers, mlps))


def llama4(fields: Fields) -> Model:
    """Llama 4's text part: three of four layers attend inside chunks, the others everywhere and without positions."""
    trunk = Trunk.read(fields, 131072)
    bias = fields.flag("attention_bias", False)
    full = grouped_attention(fields, trunk.hidden_size, qkv_bias=bias, output_bias=bias, rope=False)
    rotary = replace(full, rope=True, qk_norm="unweighted" if fields.flag("use_qk_norm", True) else "")
    chunk = fields.integer("attention_chunk_size", default=8192)
    layer_kinds = kinds(fields, trunk.num_layers, lambda i: "chunk" if (i + 1) % 4 else "full", ("full", "chunk"))
    attentions = [
        full if kind == "full" else windowed(rotary, kind, chunk, trunk.max_position_embeddings) for kind in layer_kinds
    ]
    step = fields.integer("interleave_moe_layer_step", default=1)
    sparse = fields.integers("moe_layers") or range(step - 1, trunk.num_layers, step)
    size = fields.integer("intermediate_size")
    moe = read_moe(fields, "num_local_experts", "intermediate_size", shared_intermediate_size=size)
    mlps = mixed(fields, trunk.num_layers, moe, sparse, "intermediate_size_mlp")
    return trunk.model(trunk.rms_layers(attentions, mlps))


def minimax_m2(fields: Fields) -> Model:
    """MiniMax-M2 and M2.5: queries and keys are normed over all heads together."""
    trunk = Trunk.read(fields, 196608)
    norm = fields.text("qk_norm_type", "per_layer") if fields.flag("use_qk_norm", True) else ""
    if norm not in ("", "per_layer"):
        fields.problem("qk_norm_type", f"must be per_layer, the one that is modelled (got {norm!r})")
    attention = grouped_attention(fields, trunk.hidden_size, qk_norm="layer" if norm else "")
    moe = read_moe(
        fields,
        "num_local_experts",
        "intermediate_size",
        shared_intermediate_size=fields.integer("shared_intermediate_size", default=0, least=0),
        router_bias=fields.flag("use_routing_bias", True),
    )
    return trunk.model(trunk.rms_layers([attention] * trunk.num_layers, [moe] * trunk.num_layers))


def _mimo_attention(fields: Fields, prefix: str, sinks: bool) -> Attention:
    n, k = fields.heads(f"{prefix}num_attention_heads", f"{prefix}num_key_value_heads")
    head_dim, v_head_dim = fields.integer(f"{prefix}head_dim"), fields.integer(f"{prefix}v_head_dim")
    return Attention("full", n, k, head_dim, v_head_dim, qkv_bias=fields.flag("attention_bias", False), sinks=sinks)


def mimo_v2_flash(fields: Fields) -> Model:
    """MiMo-V2-Flash: keys wider than values; window layers have KV heads of their own, and sinks."""
    trunk = Trunk.read(fields, 262144)
    full = _mimo_attention(fields, "", fields.flag("add_full_attention_sink_bias", False))
    narrow = _mimo_attention(fields, "swa_", fields.flag("add_swa_attention_sink_bias", True))
    narrow = windowed(narrow, "window", fields.integer("sliding_window"), trunk.max_position_embeddings)
    pattern = fields.per_layer("hybrid_layer_pattern", trunk.num_layers, {0: full, 1: narrow})
    freq = fields.per_layer("moe_layer_freq", trunk.num_layers, {0: False, 1: True})
    for name, given in (("hybrid_layer_pattern", pattern), ("moe_layer_freq", freq)):
        if given is None and not fields.has(name):
            fields.problem(name, "missing; must be a list of 0 and 1, one for each layer")
    moe = deepseek_moe(fields, "noaux_tc")
    sparse = {i for i, is_sparse in enumerate(freq or []) if is_sparse}
    mlps = mixed(fields, trunk.num_layers, moe, sparse)
    return trunk.model(trunk.rms_layers(pattern or [full] * trunk.num_layers, mlps))


def deepseek_moe(fields: Fields, topk_method: str) -> MoE:
    shared = fields.integer("n_shared_experts", default=0, least=0)
    groups = fields.integer("n_group", default=1)
    return read_moe(
        fields,
        "n_routed_experts",
        num_groups=groups,
        groups_per_token=min(fields.integer("topk_group", default=groups), groups),
        shared_intermediate_size=shared * fields.integer("moe_intermediate_size"),
        router_bias=fields.text("topk_method", topk_method) == "noaux_tc",  # score correction, one per expert
    )


def latent(fields: Fields, **traits: Any) -> Attention:
    """Multi-head latent attention under DeepSeek's names of fields."""
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim", least=0)
    bias = fields.flag("attention_bias", False)
    return Attention(
        "mla",
        fields.integer("num_attention_heads"),
        1,
        nope + rope,
        fields.integer("v_head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        # null projects queries directly; a config without the field is incomplete
        q_lora_rank=fields.integer("q_lora_rank", default=0 if "q_lora_rank" in fields.config else None),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        **traits,
    )


def _deepseek(
    fields: Fields,
    topk_method: str,
    max_position_embeddings: int,
    tied: bool = False,
    num_norms: int = 2,
    indexer: bool = False,
) -> Model:
    """A family without experts (topk_method "") is dense."""
    trunk = Trunk.read(fields, max_position_embeddings, tied)
    mlps: list[MLP | MoE]
    if topk_method:
        first = 0 if fields.has("mlp_layer_types") else fields.integer("first_k_dense_replace", least=0)
        sparse = sparse_layers(fields, trunk.num_layers, first)
        mlps = mixed(fields, trunk.num_layers, deepseek_moe(fields, topk_method), sparse)
    else:
        mlps = [MLP(fields.integer("intermediate_size"))] * trunk.num_layers
    attentions = indexed(fields, trunk) if indexer else [latent(fields)] * trunk.num_layers
    return trunk.model(trunk.rms_layers(attentions, mlps, num_norms))


def latent_dense(fields: Fields) -> Model:
    """Youtu-LLM and MiniCPM3: latent attention and a dense MLP."""
    return _deepseek(fields, "", 32768, tied=True)


def longcat_flash(fields: Fields) -> Model:
    """LongCat-Flash (arXiv:2509.01322): two rounds of attention and MLP per layer, and experts beside the second, of
    which some do nothing; two layers here for each of its own."""
    trunk = Trunk.read(fields, 131072, layers=("num_layers", "num_hidden_layers"))
    attention, width = latent(fields), fields.integer("ffn_hidden_size")
    num_experts, idle = fields.integer("n_routed_experts"), fields.integer("zero_expert_num", default=0, least=0)
    top = fields.integer("moe_topk")
    busy = max(1, round(top * num_experts / (num_experts + idle)))
    moe = MoE(num_experts, busy, fields.integer("expert_ffn_hidden_size"), shared_intermediate_size=width,
              num_zero_experts=idle)  # fmt: skip
    norms = 2 * trunk.hidden_size
    return trunk.model([Layer(attention, MLP(width), norms), Layer(attention, moe, norms)] * trunk.num_layers)


def minimax_m3(fields: Fields) -> Model:
    """MiniMax-M3: an indexer picks blocks of keys for grouped queries in most layers."""
    trunk = Trunk.read(fields, 524288)
    full = grouped_attention(fields, trunk.hidden_size, qk_norm="head")
    inner = fields.config.get("sparse_attention_config")
    own = fields.of({**fields.config, **(inner if isinstance(inner, dict) else {})})
    block = own.integer("index_block_size", "sparse_block_size", default=128)
    blocks = own.integer("index_topk_blocks", "sparse_topk_blocks", default=16)
    picked = replace(
        full,
        index_num_heads=own.integer("index_n_heads", "sparse_num_index_heads", default=4),
        index_head_dim=own.integer("index_head_dim", "sparse_index_dim", default=128),
        index_topk=block * blocks,
    )
    words = {"full_attention": full, "minimax_m3_sparse": picked, 0: full, 1: picked}
    name = "layer_types" if fields.has("layer_types") else "sparse_attention_freq"
    attentions = own.per_layer(name, trunk.num_layers, words) or [full] * trunk.num_layers
    shared = fields.integer("shared_intermediate_size", default=0, least=0)
    moe = read_moe(fields, "num_local_experts", "intermediate_size", shared_intermediate_size=shared, router_bias=True)
    mlps = mixed(fields, trunk.num_layers, moe, sparse_layers(fields, trunk.num_layers), "dense_intermediate_size")
    return trunk.model(trunk.rms_layers(attentions, mlps))


def laguna(fields: Fields) -> Model:
    """Laguna: query heads by layer, a gate for each."""
    trunk = Trunk.read(fields, 131072)
    full = grouped_attention(fields, trunk.hidden_size, qk_norm="head", head_gate=fields.flag("gating", True))
    counts = fields.config.get("num_attention_heads_per_layer")
    allowed = {c: c for c in counts if isinstance(c, int) and c > 0} if isinstance(counts, list) else {}
    heads = fields.per_layer("num_attention_heads_per_layer", trunk.num_layers, allowed) if counts else None
    found = kinds(fields, trunk.num_layers, lambda i: "full")
    window = fields.integer("sliding_window", default=512)
    attentions = [
        windowed(replace(full, num_heads=n), kind, window, trunk.max_position_embeddings)
        for kind, n in zip(found, heads or [full.num_heads] * trunk.num_layers, strict=True)
    ]
    family = Experts(shared_width=("shared_expert_intermediate_size",), router_bias=True, dense_first=1)
    moe = read_experts(fields, family)
    mlps = mixed(fields, trunk.num_layers, moe, sparse_layers(fields, trunk.num_layers, family.dense_first))
    return trunk.model(trunk.rms_layers(attentions, mlps))


def step3p5(fields: Fields) -> Model:
    """Step 3.5: window layers with query heads of their own, a gate for each head."""
    trunk = Trunk.read(fields, fields.integer("max_seq_len", default=262144))
    n, k = fields.heads("num_attention_heads", "num_attention_groups")
    gate = fields.flag("use_head_wise_attn_gate", False)
    full = Attention("full", n, k, fields.head_dim(trunk.hidden_size, n), qk_norm="head", head_gate=gate)
    other = fields.config.get("attention_other_setting")
    own = fields.of({**fields.config, **(other if isinstance(other, dict) else {})})
    n, k = own.heads("num_attention_heads", "num_attention_groups")
    narrow = replace(full, num_heads=n, num_kv_heads=k)
    found = kinds(fields, trunk.num_layers, lambda i: "full")
    window = fields.integer("sliding_window", default=512)
    attentions = [
        full if kind == "full" else windowed(narrow, kind, window, trunk.max_position_embeddings) for kind in found
    ]
    listed = fields.text("moe_layers_enum", "")
    sparse = {int(i) for i in listed.split(",") if i.strip().isdigit()} if listed else set(range(1, trunk.num_layers))
    shared = fields.integer("share_expert_dim", "share_expert_dims", default=0, least=0)
    moe = replace(read_experts(fields, Experts(router_bias="use_moe_router_bias!")), shared_intermediate_size=shared)
    return trunk.model(trunk.rms_layers(attentions, mixed(fields, trunk.num_layers, moe, sparse)))


def indexed(fields: Fields, trunk: Trunk, **traits: Any) -> list[Attention]:
    """Latent attention whose keys an indexer picks; `indexer_types` (GLM-5.2): a "shared" layer takes those that the
    indexer of the last "full" layer picked."""
    sizes = {name: fields.integer(field) for name, field in INDEXER.items()}
    full = latent(fields, **sizes, **traits)
    words = {"full": full, "shared": replace(full, index_shared=True)}
    found = fields.per_layer("indexer_types", trunk.num_layers, words) or [full] * trunk.num_layers
    if found[0].index_shared:
        fields.problem("indexer_types[0]", "must be full: there is no layer before it whose indexer it could share")
    return found


def hyper(layers: list[Layer], h: int, streams: int, mixing: int, scales: int) -> list[Layer]:
    """Several residual streams (hyper-connections): a matrix of `mixing` outputs before attention and MLP."""
    beside = tuple(Linear(f"{block}_hc", streams * h, mixing, False, "replicated") for block in ("attn", "ffn"))
    return [replace(a, beside=beside, norm_params=a.norm_params + 2 * (mixing + scales)) for a in layers]


def hy_v4(fields: Fields) -> Model:
    """HunYuan V4: indexed latent attention with gates and sinks, and residual streams."""
    trunk = Trunk.read(fields, 262144)
    h, streams = trunk.hidden_size, fields.integer("hc_mult", default=4)
    attentions = indexed(fields, trunk, output_gate=True, sinks=True)
    mlps = mixed(fields, trunk.num_layers, deepseek_moe(fields, ""), sparse_layers(fields, trunk.num_layers, 1))
    layers = hyper(trunk.rms_layers(attentions, mlps), h, streams, 2 * streams, 2)
    return trunk.model(layers, h + streams * streams * h + streams + 1)


def axk1(fields: Fields) -> Model:
    """A.X K1: DeepSeek-V3 with one more norm behind the experts."""
    return _deepseek(fields, "noaux_tc", 32768, num_norms=3)


INDEXER = {"index_num_heads": "index_n_heads", "index_head_dim": "index_head_dim", "index_topk": "index_topk"}
COMPRESSED = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def deepseek_v4(fields: Fields) -> Model:
    """DeepSeek-V4: compressed sparse and heavily compressed attention, four residual streams (hyper-connections)."""
    trunk = Trunk.read(fields, 1048576)
    h, streams = trunk.hidden_size, fields.integer("hc_mult", default=4)
    n, d = fields.integer("num_attention_heads"), fields.integer("head_dim", default=512)
    groups = fields.integer("o_groups", default=8)
    if n * d % groups:
        fields.problem("o_groups", f"must divide {n * d} channels of all heads (got {groups})")
    base = Attention(
        "compressed",
        n,
        1,
        d,
        window=fields.integer("sliding_window", default=128),
        sinks=True,
        q_lora_rank=fields.integer("q_lora_rank"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", default=64),
        output_groups=groups,
        output_lora_rank=fields.integer("o_lora_rank", default=1024),
    )
    indexed = replace(
        base,
        compress_ratio=4,
        index_num_heads=fields.integer("index_n_heads", default=64),
        index_head_dim=fields.integer("index_head_dim", default=128),
        index_topk=fields.integer("index_topk", default=512),
    )
    kinds_of = {0: base, 4: indexed, 128: replace(base, compress_ratio=128)}
    if isinstance(ratios := fields.config.get("compress_ratios"), list):  # and one more for the MTP layer
        fields = fields.of({**fields.config, "compress_ratios": ratios[: trunk.num_layers]})
    attentions = fields.per_layer("compress_ratios", trunk.num_layers, kinds_of)
    if attentions is None:
        words = {word: kinds_of[ratio] for word, ratio in COMPRESSED.items()}
        attentions = fields.per_layer("layer_types", trunk.num_layers, words)
    if attentions is None:
        fields.problem("compress_ratios", "missing; must be a list of 0, 4 and 128, one for each layer")
        attentions = [base] * trunk.num_layers
    moe = deepseek_moe(fields, "noaux_tc")
    layers = hyper(trunk.rms_layers(attentions, [moe] * trunk.num_layers), h, streams, (2 + streams) * streams, 3)
    return trunk.model(layers, other_params=streams * streams * h + streams + 1)


def deepseek_v2(fields: Fields) -> Model:
    """DeepSeek-V2, Mistral Small 4; DeepSeek-OCR's text model says that it has no latent attention."""
    if not fields.flag("use_mla", True):
        return RECIPES["deepseek"](fields)
    return _deepseek(fields, "greedy", 2048)


def deepseek_v3(fields: Fields) -> Model:
    """DeepSeek-V3, R1 and Kimi-K2."""
    return _deepseek(fields, "noaux_tc", 4096)


def deepseek_v32(fields: Fields) -> Model:
    """DeepSeek-V3.2 and GLM-5: V3 with an indexer that picks the keys a query sees."""
    return _deepseek(fields, "noaux_tc", 163840, indexer=True)
