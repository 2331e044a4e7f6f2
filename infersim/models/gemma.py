"""Gemma 3n and 4: keys shared by the last layers, an input per layer, and in 3n four streams side by side."""

from dataclasses import replace

from .architecture import MLP, Attention, Layer, Linear, Model, MoE
from .families import Trunk, kinds, windowed
from .fields import Fields
from .recipes import Experts, read_experts


def _shared(attentions: list[Attention], num_shared: int) -> list[Attention]:
    """The last `num_shared` layers look at the keys of an earlier layer of their kind."""
    first = len(attentions) - num_shared
    return [replace(a, kv_shared=True) if i >= first else a for i, a in enumerate(attentions)]


def _per_layer_input(fields: Fields, trunk: Trunk) -> tuple[tuple[Linear, ...], int, int]:
    """Matrices of a layer, parameters of the table and of what stands before the layers."""
    h, width = trunk.hidden_size, fields.integer("hidden_size_per_layer_input", default=256, least=0)
    if not width:
        return (), 0, 0
    rows, wide = fields.integer("vocab_size_per_layer_input", default=262144), width * trunk.num_layers
    beside = (
        Linear("per_layer_input_gate", h, width, False, "replicated"),
        Linear("per_layer_projection", width, h, False, "replicated"),
    )
    return beside, rows * wide, wide * h + width


def gemma4(fields: Fields) -> Model:
    """Gemma 4: full layers have heads and keys of their own width; experts run beside the MLP."""
    trunk = Trunk.read(fields, 131072, tied=True, vocab_size=262144)
    h = trunk.hidden_size
    n, k = fields.heads(default_heads=8, default_kv_heads=4)
    local = Attention("full", n, k, fields.integer("head_dim", default=256), qk_norm="head")
    one = fields.flag("attention_k_eq_v", False)
    wide = replace(
        local,
        num_kv_heads=fields.integer("num_global_key_value_heads", default=k) if one else k,
        head_dim=fields.integer("global_head_dim", default=512),
        v_head_dim=0,
        values_are_keys=one,
    )
    found = kinds(fields, trunk.num_layers, lambda i: "window" if (i + 1) % 6 else "full")
    window = fields.integer("sliding_window", default=512)
    attentions = [
        windowed(local, kind, window, trunk.max_position_embeddings) if kind == "window" else wide for kind in found
    ]
    num_shared = fields.integer("num_kv_shared_layers", default=0, least=0)
    attentions = _shared(attentions, num_shared)
    width = fields.integer("intermediate_size", default=9216)
    double = 2 if fields.flag("use_double_wide_mlp", False) else 1
    beside, table, before = _per_layer_input(fields, trunk)
    mlp: MLP | MoE = MLP(width)
    norms = 4 + bool(beside)
    if fields.flag("enable_moe_block", False):
        mlp = replace(read_experts(fields, Experts(router_bias=True)), shared_intermediate_size=width)
        norms += 4  # the router's scale among them
    wider = MLP(width * double)
    layers = [
        Layer(a, wider if a.kv_shared and double > 1 else mlp, norms * h, norms, beside=beside) for a in attentions
    ]
    return trunk.model(layers, embedding_more=table, other_params=before)


def gemma3n(fields: Fields) -> Model:
    """Gemma 3n: AltUp predicts three further streams, Laurel is a low-rank path beside attention."""
    trunk = Trunk.read(fields, 32768, tied=True, vocab_size=262400)
    h = trunk.hidden_size
    n, k = fields.heads(default_heads=8, default_kv_heads=2)
    full = Attention("full", n, k, fields.integer("head_dim", default=256), qk_norm="head")
    found = kinds(fields, trunk.num_layers, lambda i: "window" if (i + 1) % 5 else "full")
    window = fields.integer("sliding_window", default=512)
    attentions = [windowed(full, kind, window, trunk.max_position_embeddings) for kind in found]
    attentions = _shared(attentions, fields.integer("num_kv_shared_layers", default=15, least=0))
    widths = fields.config.get("intermediate_size")
    if isinstance(widths, list):
        widths = fields.per_layer("intermediate_size", trunk.num_layers, {w: w for w in widths if isinstance(w, int)})
    else:
        widths = [fields.integer("intermediate_size", default=16384)] * trunk.num_layers
    rank, streams = fields.integer("laurel_rank", default=64), fields.integer("altup_num_inputs", default=4)
    beside, table, before = _per_layer_input(fields, trunk)
    beside += (
        Linear("laurel.linear_left", h, rank, False, "replicated"),
        Linear("laurel.linear_right", rank, h, False, "replicated"),
        Linear("altup.modality_router", h, streams, False, "replicated"),
    )
    norms = 4 + bool(table) + 3  # AltUp's router and output scale, Laurel's
    coefficients = streams * streams + streams * streams * streams
    layers = [
        Layer(a, MLP(width), norms * h + coefficients, norms, beside=beside)
        for a, width in zip(attentions, widths or [1] * trunk.num_layers, strict=True)
    ]
    return trunk.model(layers, embedding_more=table, other_params=before + 2 * (streams - 1) * h * h)
