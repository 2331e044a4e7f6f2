"""Qwen3-Next and Qwen3.5: three of four layers are linear attention with a state per sequence, the fourth is full."""

from .architecture import MLP, Attention, AttentionKind, Model
from .families import Trunk, grouped_attention, kinds
from .fields import Fields
from .sparse import mixed, qwen_sparse_layers, read_moe


def _attentions(fields: Fields, trunk: Trunk) -> list[Attention]:
    gate, bias = fields.flag("attn_output_gate", True), fields.flag("attention_bias", False)
    full = grouped_attention(
        fields, trunk.hidden_size, qkv_bias=bias, output_bias=bias, qk_norm="head", output_gate=gate
    )
    n, k = fields.heads("linear_num_value_heads", "linear_num_key_heads")
    linear = Attention(
        "linear",
        n,
        k,
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_value_head_dim"),
        rope=False,
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
    )
    every = fields.integer("full_attention_interval", default=4)
    by_kind: dict[AttentionKind, Attention] = {"full": full, "linear": linear}
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
