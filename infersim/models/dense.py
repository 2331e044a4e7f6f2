"""Decoders in Llama's manner: RMS norms, rotary positions, grouped queries, a gated MLP."""

from collections.abc import Callable

from .architecture import MLP, Attention, AttentionKind, Model
from .families import Trunk, grouped_attention, kinds, windowed
from .fields import Fields


def _decoder(
    fields: Fields,
    trunk: Trunk,
    attention: Attention,
    window: int = 0,
    kind: Callable[[int], AttentionKind] = lambda i: "full",
    num_norms: int = 2,
    mlp_bias: bool = False,
) -> Model:
    mlp = MLP(fields.integer("intermediate_size"), bias=mlp_bias)
    layer_kinds = kinds(fields, trunk.num_layers, kind)
    if "window" in layer_kinds and not window:
        window = fields.integer("sliding_window")
    attentions = [windowed(attention, k, window, trunk.max_position_embeddings) for k in layer_kinds]
    return trunk.model(trunk.rms_layers(attentions, [mlp] * trunk.num_layers, num_norms))


def mistral(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 131072)
    # The class's default window is 4096; a config without one says null.
    window = 0 if "sliding_window" in fields.config and not fields.has("sliding_window") else 4096
    window = fields.integer("sliding_window", default=window)
    attention = grouped_attention(fields, trunk.hidden_size)
    return _decoder(fields, trunk, attention, window, lambda i: "window" if window else "full")


def _qwen(fields: Fields, trunk: Trunk, attention: Attention) -> Model:
    # Qwen keeps a sliding_window in configs that do not use it.
    window = fields.integer("sliding_window", default=4096) if fields.flag("use_sliding_window", False) else 0
    first = fields.integer("max_window_layers", default=28, least=0) if window else trunk.num_layers
    return _decoder(fields, trunk, attention, window, lambda i: "window" if i >= first else "full")


def qwen2(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 32768)
    return _qwen(fields, trunk, grouped_attention(fields, trunk.hidden_size, qkv_bias=True))


def qwen3(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 32768)
    bias = fields.flag("attention_bias", False)
    attention = grouped_attention(fields, trunk.hidden_size, qkv_bias=bias, output_bias=bias, qk_norm="head")
    return _qwen(fields, trunk, attention)


def phi3(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 4096)
    window = fields.integer("sliding_window", default=0)
    attention = grouped_attention(fields, trunk.hidden_size)
    return _decoder(fields, trunk, attention, window, lambda i: "window" if window else "full")
