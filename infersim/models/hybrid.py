"""Models with recurrent layers: linear attention, Mamba or short convolutions beside attention, or alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .architecture import MLP, Attention, AttentionKind, Layer, Linear, Model, MoE
from .families import Trunk, grouped_attention, kinds, windowed
from .fields import Fields
from .recipes import Experts, read_experts, sparse_layers
from .sparse import deepseek_moe, hyper, indexed, latent, mixed, qwen_sparse_layers, read_moe

MIXERS = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "conv": "recurrent",
    "mlp": "mlp",
    "moe": "moe",
}
"""What layers_block_type and layer_types call a layer"""
PATTERN = {"M": "recurrent", "*": "attention", "-": "mlp", "E": "moe"}
"""Nemotron-H's hybrid_override_pattern"""


def _state_bytes(fields: Fields, default: str = "") -> float:
    """Bytes of a state's element as vLLM takes them from the config (mamba_ssm_cache_dtype auto); 0: the model's."""
    name = "mamba_ssm_dtype" if fields.has("mamba_ssm_dtype") else "mamba_ssm_cache_dtype"
    return 4.0 if fields.text(name, default) == "float32" else 0.0


def _mamba2(fields: Fields, names: Sequence[str], norm: bool = True, dtype: str = "") -> Attention:
    """Mamba-2, under the family's names of heads, head dimension, groups, state size and kernel."""
    heads, head_dim, groups, state, kernel = (fields.integer(name) for name in names)
    bias = fields.flag("mamba_proj_bias", False)
    return Attention("linear", heads, groups, state, head_dim, rope=False, conv_kernel=kernel, recurrence="mamba2",
                     qkv_bias=bias, output_bias=bias, state_norm=norm,
                     state_element_bytes=_state_bytes(fields, dtype))  # fmt: skip


def _mamba1(fields: Fields, channels: int, names: Sequence[str], norm: bool) -> Attention:
    state, kernel, rank = (fields.integer(name) for name in names)
    return Attention("linear", channels, 1, state, 1, rope=False, conv_kernel=kernel, recurrence="mamba",
                     low_rank=rank, state_norm=norm, state_element_bytes=_state_bytes(fields))  # fmt: skip


MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
NO_MLP = MLP(0)


def _gated_delta(fields: Fields) -> Attention:
    n, k = fields.heads("linear_num_value_heads", "linear_num_key_heads")
    key, value = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    return Attention("linear", n, k, key, value, rope=False, conv_kernel=fields.integer("linear_conv_kernel_dim"),
                     state_element_bytes=_state_bytes(fields))  # fmt: skip


def _attentions(fields: Fields, trunk: Trunk) -> list[Attention]:
    gate, bias = fields.flag("attn_output_gate", True), fields.flag("attention_bias", False)
    full = grouped_attention(
        fields, trunk.hidden_size, qkv_bias=bias, output_bias=bias, qk_norm="head", output_gate=gate
    )
    every = fields.integer("full_attention_interval", default=4)
    by_kind: dict[AttentionKind, Attention] = {"full": full, "linear": _gated_delta(fields)}
    layer_kinds = kinds(fields, trunk.num_layers, lambda i: "linear" if (i + 1) % every else "full", by_kind)
    return [by_kind[kind] for kind in layer_kinds]


def qwen3_next(fields: Fields) -> Model:
    """Qwen3-Next and Qwen3.5 with experts: routed ones, and a shared one behind a gate."""
    trunk = Trunk.read(fields, 32768)
    shared = fields.integer("shared_expert_intermediate_size")
    moe = read_moe(fields, "num_experts", shared_intermediate_size=shared, shared_gate=True)
    mlps = mixed(fields, trunk.num_layers, moe, qwen_sparse_layers(fields, trunk.num_layers))
    return trunk.model(trunk.rms_layers(_attentions(fields, trunk), mlps))


def qwen3_5(fields: Fields) -> Model:
    """Qwen3.5, dense."""
    trunk = Trunk.read(fields, 32768)
    mlp = MLP(fields.integer("intermediate_size"))
    return trunk.model(trunk.rms_layers(_attentions(fields, trunk), [mlp] * trunk.num_layers))


def olmo_hybrid(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 65536)
    full = grouped_attention(fields, trunk.hidden_size, qk_norm="layer")
    by_kind: dict[AttentionKind, Attention] = {"full": full, "linear": _gated_delta(fields)}
    found = kinds(fields, trunk.num_layers, lambda i: "full" if i % 4 == 3 else "linear", by_kind)
    mlps = [MLP(fields.integer("intermediate_size"))] * trunk.num_layers
    return trunk.model(trunk.rms_layers([by_kind[kind] for kind in found], mlps))


def _delta_layers(fields: Fields, num_layers: int, default: Sequence[str]) -> tuple[list[str], Any]:
    """Each layer's kind and the fields of the linear ones: transformers 5 writes them flat, checkpoints beneath
    linear_attn_config, where layers are counted from 1."""
    inner = fields.config.get("linear_attn_config")
    if not isinstance(inner, dict):
        return fields.per_layer("layer_types", num_layers, MIXERS) or list(default), fields
    own = Fields(inner, f"{fields.where}linear_attn_config.")
    own.problems = fields.problems
    full = set(own.integers("full_attn_layers"))
    return ["attention" if i + 1 in full else "recurrent" for i in range(num_layers)], own


def kimi_linear(fields: Fields) -> Model:
    """Kimi Linear (arXiv:2510.26692): Kimi delta attention, and latent attention without positions in every fourth
    layer; Kimi K3: output gates, experts on fewer channels, and residuals that look back over blocks of layers."""
    trunk = Trunk.read(fields, fields.integer("model_max_length", default=1048576))
    default = ["attention" if i and i % 4 == 0 else "recurrent" for i in range(trunk.num_layers)]
    found, own = _delta_layers(fields, trunk.num_layers, default)
    return _kimi(fields, trunk, found, own, low_rank=True)


def bailing_hybrid(fields: Fields) -> Model:
    """Ling and Ring with Kimi delta attention and gated latent attention."""
    trunk = Trunk.read(fields, fields.integer("model_max_length", default=262144))
    group = fields.integer("layer_group_size", default=6)
    default = ["recurrent" if (i + 1) % group else "attention" for i in range(trunk.num_layers)]
    found, own = _delta_layers(fields, trunk.num_layers, default)
    return _kimi(fields, trunk, found, own, low_rank=False)


def _kda(fields: Fields, own: Fields, low_rank: bool = True) -> Attention:
    heads = own.integer("linear_num_heads", "num_heads", default=fields.integer("num_attention_heads"))
    head_dim = own.integer("linear_head_dim", "head_dim", default=128)
    kernel = own.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    return Attention("linear", heads, heads, head_dim, rope=False, conv_kernel=kernel, recurrence="kda",
                     low_rank=head_dim if low_rank else 0, output_gate=own.flag("use_full_rank_gate", False),
                     state_element_bytes=4)  # fmt: skip


def glm5_next(fields: Fields) -> Model:
    """GLM-5 with Kimi delta attention, an indexer over pooled keys (`index_kpool` tokens each) in every fourth layer,
    and residual streams."""
    trunk = Trunk.read(fields, 1048576)
    linear, full = _kda(fields, fields), indexed(fields, trunk, compress_ratio=fields.integer("index_kpool", default=1))
    words = {"linear_attention": False, "indexed_attention": True, "full_attention": True}
    found = fields.per_layer("layer_types", trunk.num_layers, words) or [i % 4 == 3 for i in range(trunk.num_layers)]
    attentions = [full[i] if has else linear for i, has in enumerate(found)]
    mlps = mixed(fields, trunk.num_layers, deepseek_moe(fields, ""), sparse_layers(fields, trunk.num_layers, 3))
    streams = fields.integer("hc_mult", default=4)
    layers = hyper(trunk.rms_layers(attentions, mlps), trunk.hidden_size, streams, (2 + streams) * streams, 3)
    return trunk.model(layers)


def lara_mini(fields: Fields) -> Model:
    """Gated delta rule, windows and full attention in turn, experts in every layer."""
    trunk = Trunk.read(fields, 131072, tied=True)
    full = grouped_attention(fields, trunk.hidden_size, qk_norm="head")
    narrow = windowed(full, "window", fields.integer("sliding_window", default=512), trunk.max_position_embeddings)
    words = {"linear_attention": _gated_delta(fields), "sliding_attention": narrow, "full_attention": full}
    pattern = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
    found = fields.per_layer("layer_types", trunk.num_layers, words) or [
        words[pattern[i % 5]] for i in range(trunk.num_layers)
    ]
    moe = read_experts(fields, Experts(shared_width=("shared_expert_intermediate_size",)))
    return trunk.model(trunk.rms_layers(found, [moe] * trunk.num_layers))


def _kimi(fields: Fields, trunk: Trunk, found: list[str], own: Fields, low_rank: bool) -> Model:
    linear = _kda(fields, own, low_rank)
    gate = fields.flag("mla_use_output_gate", False)
    full = latent(fields.of({"q_lora_rank": None, **fields.config}), head_gate=not low_rank, output_gate=gate)
    family = Experts(shared=("num_shared_experts",), router_bias=True, dense_first=1)
    moe = replace(
        read_experts(fields, family), latent_size=fields.integer("routed_expert_hidden_size", default=0, least=0)
    )
    mlps = mixed(fields, trunk.num_layers, moe, sparse_layers(fields, trunk.num_layers, family.dense_first))
    attentions = [full if kind == "attention" else linear for kind in found]
    if not fields.has("attn_res_block_size"):
        return trunk.model(trunk.rms_layers(attentions, mlps))
    residual = (Linear("self_attention_res_proj", h := trunk.hidden_size, 1), Linear("mlp_res_proj", h, 1))
    layers = [Layer(a, m, 4 * h, 4, beside=residual) for a, m in zip(attentions, mlps, strict=True)]
    return trunk.model(layers, other_params=2 * h)


def minimax(fields: Fields) -> Model:
    """MiniMax-Text-01 and M1: lightning attention, and softmax attention in every eighth layer."""
    trunk = Trunk.read(fields, 131072)
    full = grouped_attention(fields, trunk.hidden_size)
    n = full.num_heads
    linear = Attention("linear", n, n, full.head_dim, rope=False, recurrence="lightning")
    found = fields.per_layer("attn_type_list", trunk.num_layers, {0: linear, 1: full})
    if found is None:
        words = {"full_attention": full, "linear_attention": linear}
        found = fields.per_layer("layer_types", trunk.num_layers, words) or [
            linear if i % 2 else full for i in range(trunk.num_layers)
        ]
    moe = read_moe(fields, "num_local_experts", "intermediate_size")
    return trunk.model(trunk.rms_layers(found, [moe] * trunk.num_layers))


def nemotron_h(fields: Fields) -> Model:
    """Nemotron-H and Nemotron 3: blocks of one kind each; a block with a state or keys and the MLP or experts behind
    it are one layer here."""
    if fields.has("hybrid_override_pattern"):
        words = fields.per_letter("hybrid_override_pattern", PATTERN)
    else:
        listed = fields.config.get("layers_block_type")
        words = fields.per_layer("layers_block_type", len(listed) if isinstance(listed, list) else 1, MIXERS) or []
    trunk = Trunk.read(fields.of({"num_hidden_layers": max(len(words), 1), **fields.config}), 4096)
    attention = Attention("full", *fields.heads(), fields.integer("head_dim", default=128), rope=False)
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    mixers = {"attention": attention, "recurrent": _mamba2(fields, names, dtype="float32")}
    blocks: dict[str, Any] = {}
    if "mlp" in words:
        blocks["mlp"] = MLP(fields.integer("intermediate_size"), gated=False, bias=fields.flag("mlp_bias", False))
    if "moe" in words:
        width = fields.integer("moe_shared_expert_intermediate_size", default=0, least=0)
        shared = width * fields.integer("n_shared_experts", default=1, least=0)
        blocks["moe"] = replace(read_experts(fields, Experts(router_bias=True), gated=False),
                                shared_intermediate_size=shared,
                                latent_size=fields.integer("moe_latent_size", default=0, least=0))  # fmt: skip
    layers: list[Layer] = []
    for word in words:
        if word in mixers:
            layers.append(Layer(mixers[word], NO_MLP, trunk.hidden_size, 1))
        elif not layers or layers[-1].mlp != NO_MLP:
            fields.problem("hybrid_override_pattern", "must have an M or * before each - and E")
            break
        else:
            layers[-1] = replace(layers[-1], mlp=blocks[word], norm_params=2 * trunk.hidden_size, num_norms=2)
    return trunk.model(layers or [Layer(attention, NO_MLP, trunk.hidden_size, 1)])


def granite_hybrid(fields: Fields) -> Model:
    """Granite 4: Mamba-2 and attention without positions, experts beside a shared MLP, or that alone."""
    trunk = Trunk.read(fields, 2048)
    name = "layer_types" if fields.has("layer_types") else "layers_block_type"
    found = fields.per_layer(name, trunk.num_layers, MIXERS) or ["recurrent"] * trunk.num_layers
    full = grouped_attention(fields, trunk.hidden_size, rope=False)
    mixers = {"attention": full, "recurrent": _mamba2(fields, MAMBA2)}
    shared = fields.integer("shared_intermediate_size", default=1024)
    mlp: MLP | MoE = MLP(shared)
    if fields.integer("num_local_experts", default=8, least=0):
        mlp = read_moe(fields, "num_local_experts", "intermediate_size", shared_intermediate_size=shared)
    return trunk.model(trunk.rms_layers([mixers[kind] for kind in found], [mlp] * trunk.num_layers))


def bamba(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 262144)
    full = grouped_attention(fields, trunk.hidden_size)
    recurrent, with_keys = _mamba2(fields, MAMBA2), set(fields.integers("attn_layer_indices"))
    mlp = MLP(fields.integer("intermediate_size"))
    attentions = [full if i in with_keys else recurrent for i in range(trunk.num_layers)]
    return trunk.model(trunk.rms_layers(attentions, [mlp] * trunk.num_layers))


def falcon_h1(fields: Fields) -> Model:
    """Falcon-H1: Mamba-2 and attention side by side behind one norm; two layers here for each of its own."""
    trunk = Trunk.read(fields, 8192)
    full = grouped_attention(fields, trunk.hidden_size)
    recurrent = _mamba2(fields, MAMBA2, norm=fields.flag("mamba_rms_norm", False))
    mlp = MLP(fields.integer("intermediate_size"))
    pair = [Layer(recurrent, NO_MLP, 0, 0), Layer(full, mlp, 2 * trunk.hidden_size)]
    return trunk.model(pair * trunk.num_layers)


def jamba(fields: Fields) -> Model:
    """Jamba (arXiv:2403.19887): one layer of eight has attention, every second has experts."""
    trunk = Trunk.read(fields, 262144)
    channels = trunk.hidden_size * fields.integer("mamba_expand", default=2)
    recurrent = _mamba1(fields, channels, ("mamba_d_state", "mamba_d_conv", "mamba_dt_rank"), norm=True)
    full = grouped_attention(fields, trunk.hidden_size, rope=False)
    period, offset = (
        fields.integer("attn_layer_period", default=8),
        fields.integer("attn_layer_offset", default=4, least=0),
    )
    attentions = [full if i % period == offset else recurrent for i in range(trunk.num_layers)]
    dense = MLP(fields.integer("intermediate_size"))
    moe: MLP | MoE = dense
    if fields.integer("num_experts", default=16) > 1:
        moe = read_moe(fields, "num_experts", "intermediate_size")
    every, first = (
        fields.integer("expert_layer_period", default=2),
        fields.integer("expert_layer_offset", default=1, least=0),
    )
    return trunk.model(
        trunk.rms_layers(attentions, [moe if i % every == first else dense for i in range(trunk.num_layers)])
    )


def _states_alone(trunk: Trunk, recurrent: Attention) -> Model:
    return trunk.model([Layer(recurrent, NO_MLP, trunk.hidden_size, 1)] * trunk.num_layers)


def mamba(fields: Fields) -> Model:
    """Mamba and Falcon Mamba."""
    trunk = Trunk.read(fields, 1048576, tied=True)
    channels = fields.integer("intermediate_size", default=trunk.hidden_size * fields.integer("expand", default=2))
    names = ("state_size", "conv_kernel", "time_step_rank")
    return _states_alone(trunk, _mamba1(fields, channels, names, norm=False))


def mamba2(fields: Fields) -> Model:
    """Mamba-2, Codestral Mamba."""
    trunk = Trunk.read(fields, 1048576)
    return _states_alone(trunk, _mamba2(fields, ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")))


def _lfm(fields: Fields, h: int, kernel: int = 3, head_gate: bool = False) -> tuple[Attention, Attention]:
    """Attention and gated short convolution."""
    bias = fields.flag("conv_bias", False)
    conv = Attention("linear", h, 1, 0, 1, rope=False, conv_kernel=fields.integer("conv_L_cache", default=kernel),
                     recurrence="conv", qkv_bias=bias, output_bias=bias)  # fmt: skip
    return grouped_attention(fields, h, qk_norm="head", head_gate=head_gate), conv


def lfm3(fields: Fields) -> Model:
    """LFM3: LFM2 with windows, gated heads and a norm behind each block too."""
    trunk = Trunk.read(fields, 128000, tied=True)
    full, conv = _lfm(fields, trunk.hidden_size, 7, fields.flag("use_attention_gate", True))
    narrow = windowed(full, "window", fields.integer("sliding_window", default=256), trunk.max_position_embeddings)
    words = {"conv": conv, "sliding_attention": narrow, "full_attention": full}
    found = fields.per_layer("layer_types", trunk.num_layers, words) or [
        full if i % 4 == 2 else conv if i % 4 or not i else narrow for i in range(trunk.num_layers)
    ]
    mlps = [MLP(fields.integer("intermediate_size"))] * trunk.num_layers
    return trunk.model(trunk.rms_layers(found, mlps, 4 if fields.flag("use_sandwich_norm", True) else 2))


def lfm2(fields: Fields) -> Model:
    """LFM2: gated short convolutions, and attention in some layers; LFM2-MoE has experts behind the first layers."""
    trunk = Trunk.read(fields, 128000, tied=True)
    full, conv = _lfm(fields, trunk.hidden_size)
    indices = set(fields.integers("full_attn_idxs"))
    found = fields.per_layer("layer_types", trunk.num_layers, MIXERS) or [
        "attention" if i in indices or not fields.has("full_attn_idxs") else "recurrent"
        for i in range(trunk.num_layers)
    ]
    attentions = [full if kind == "attention" else conv for kind in found]
    width = fields.integer("intermediate_size", "block_ff_dim")
    if fields.has("num_experts"):
        moe = read_experts(fields, Experts(router_bias="use_expert_bias!"))
        sparse = sparse_layers(fields, trunk.num_layers)
        return trunk.model(trunk.rms_layers(attentions, mixed(fields, trunk.num_layers, moe, sparse)))
    if fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.integer("block_multiple_of", default=256)
        width = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    return trunk.model(trunk.rms_layers(attentions, [MLP(width)] * trunk.num_layers))
