"""Decoders in GPT's manner (layer norms and matrices with biases, plain MLP), and T5."""

from dataclasses import replace

from .architecture import MLP, Attention, Layer, Model, MoE
from .families import Trunk, grouped_attention, windowed
from .fields import Fields


def _attention(fields: Fields, hidden_size: int, heads: str, bias: bool = True, **traits) -> Attention:
    n = fields.integer(heads)
    return Attention("full", n, n, fields.head_dim(hidden_size, n, heads), qkv_bias=bias, output_bias=bias, **traits)


def _model(trunk: Trunk, attention: Attention, mlp: MLP, num_norms: int = 2, final_norm: bool = True, **parts) -> Model:
    h = trunk.hidden_size
    layers = [Layer(attention, mlp, 2 * h * num_norms, num_norms)] * trunk.num_layers
    return trunk.model(layers, final_norm_params=2 * h * final_norm, **parts)


def _gpt_trunk(fields: Fields, tied: bool = True) -> Trunk:
    return Trunk(
        fields.integer("n_embd"),
        fields.integer("vocab_size"),
        fields.num_layers("n_layer"),
        fields.integer("n_positions", default=1024 if tied else 2048),
        fields.flag("tie_word_embeddings", tied),
    )


def gpt2(fields: Fields) -> Model:
    trunk = _gpt_trunk(fields)
    attention = _attention(fields, trunk.hidden_size, "n_head", rope=False)
    mlp = MLP(fields.integer("n_inner", default=4 * trunk.hidden_size), gated=False, bias=True)
    return _model(trunk, attention, mlp, positions=trunk.max_position_embeddings)


def openai_gpt(fields: Fields) -> Model:
    """GPT: GPT-2 without a final norm."""
    return replace(gpt2(fields), other_params=0)


def gpt_neo(fields: Fields) -> Model:
    """GPT-Neo: every second layer sees a window; only the output projection has a bias."""
    trunk = Trunk.read(fields, 2048, tied=True, layers=("num_layers",))
    h, n = trunk.hidden_size, fields.integer("num_heads")
    full = Attention("full", n, n, fields.head_dim(h, n, "num_heads"), output_bias=True, rope=False)
    narrow = windowed(full, "window", fields.integer("window_size", default=256), trunk.max_position_embeddings)
    words = {"global": full, "local": narrow}
    found = fields.per_layer("attention_layers", trunk.num_layers, words) or [
        narrow if i % 2 else full for i in range(trunk.num_layers)
    ]
    mlp = MLP(fields.integer("intermediate_size", default=4 * h), gated=False, bias=True)
    return trunk.model([Layer(a, mlp, 4 * h) for a in found], 2 * h, positions=trunk.max_position_embeddings)


def biogpt(fields: Fields) -> Model:
    """BioGPT, and XGLM, whose positions are sines."""
    renamed = {new: fields.config[old] for new, old in XGLM.items() if old in fields.config}
    known = fields.of({**renamed, **fields.config})
    trunk = Trunk.read(known, 1024, tied=True)
    mlp = MLP(known.integer("intermediate_size"), gated=False, bias=True)
    attention = _attention(known, trunk.hidden_size, "num_attention_heads", rope=False)
    learned = fields.config.get("model_type") == "biogpt"
    return _model(trunk, attention, mlp, positions=(trunk.max_position_embeddings + 2) * learned)


XGLM = {"hidden_size": "d_model", "intermediate_size": "ffn_dim", "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads"}  # fmt: skip


def opt(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 2048, tied=True)
    h, bias = trunk.hidden_size, fields.flag("enable_bias", True)
    width = fields.integer("word_embed_proj_dim", default=h)
    return _model(
        trunk,
        _attention(fields, h, "num_attention_heads", bias, rope=False),
        MLP(fields.integer("ffn_dim"), gated=False, bias=bias),
        final_norm=fields.flag("do_layer_norm_before", True),  # OPT-350m norms after and has no final norm
        positions=trunk.max_position_embeddings + 2,  # the table starts at an offset of 2
        other_params=0 if width == h else 2 * h * width,
        embedding_size=0 if width == h else width,
    )


def gpt_neox(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 2048)
    bias = fields.flag("attention_bias", True)
    attention = _attention(fields, trunk.hidden_size, "num_attention_heads", bias)
    return _model(trunk, attention, MLP(fields.integer("intermediate_size"), gated=False, bias=True))


def phi(fields: Fields) -> Model:
    """Phi-1.5 and 2: attention and MLP share one norm; the LM head has a bias."""
    trunk = Trunk.read(fields, 2048)
    if fields.flag("qk_layernorm", False):
        fields.problem("qk_layernorm", "true is not modelled; Phi-1, 1.5 and 2 have false")
    attention = grouped_attention(fields, trunk.hidden_size, qkv_bias=True, output_bias=True)
    mlp = MLP(fields.integer("intermediate_size"), gated=False, bias=True)
    return _model(trunk, attention, mlp, num_norms=1, lm_head_bias=True)


def gptj(fields: Fields) -> Model:
    """GPT-J and CodeGen: attention and MLP share one norm; rotary positions; the LM head has a bias."""
    trunk = _gpt_trunk(fields, tied=False)
    attention = _attention(fields, trunk.hidden_size, "n_head", bias=False)
    mlp = MLP(fields.integer("n_inner", default=4 * trunk.hidden_size), gated=False, bias=True)
    return _model(trunk, attention, mlp, num_norms=1, lm_head_bias=True)


def gpt_bigcode(fields: Fields) -> Model:
    """StarCoder: GPT-2 whose queries share one key head."""
    trunk = _gpt_trunk(fields)
    n = fields.integer("n_head")
    k = 1 if fields.flag("multi_query", True) else n
    head_dim = fields.head_dim(trunk.hidden_size, n, "n_head")
    attention = Attention("full", n, k, head_dim, qkv_bias=True, output_bias=True, rope=False)
    mlp = MLP(fields.integer("n_inner", default=4 * trunk.hidden_size), gated=False, bias=True)
    return _model(trunk, attention, mlp, positions=trunk.max_position_embeddings)


def mpt(fields: Fields) -> Model:
    """MPT: ALiBi instead of positions, no biases."""
    h, vocab = fields.integer("d_model"), fields.integer("vocab_size")
    trunk = Trunk(h, vocab, fields.num_layers("n_layers"), fields.integer("max_seq_len", default=2048), True)
    attention = _attention(fields, h, "n_heads", bias=False, rope=False)
    mlp = MLP(fields.integer("expansion_ratio", default=4) * h, gated=False)
    return trunk.model([Layer(attention, mlp, 2 * h)] * trunk.num_layers)


def dbrx(fields: Fields) -> Model:
    """DBRX: fused keys under attn_config, experts under ffn_config."""
    h = fields.integer("d_model")
    trunk = Trunk(h, fields.integer("vocab_size"), fields.num_layers("n_layers"),
                  fields.integer("max_seq_len", default=32768), fields.flag("tie_word_embeddings", False))  # fmt: skip
    inner = [fields.config.get(name) for name in ("attn_config", "ffn_config")]
    keys, experts = (fields.of(each if isinstance(each, dict) else {}) for each in inner)
    n = fields.integer("n_heads")
    attention = Attention("full", n, keys.integer("kv_n_heads"), fields.head_dim(h, n, "n_heads"))
    moe = MoE(experts.integer("moe_num_experts"), experts.integer("moe_top_k"), experts.integer("ffn_hidden_size"))
    return trunk.model([Layer(attention, moe, 2 * h)] * trunk.num_layers)


def chatglm(fields: Fields) -> Model:
    """ChatGLM2, ChatGLM3 and GLM-4-9B as first published."""
    h = fields.integer("hidden_size")
    trunk = Trunk(h, fields.integer("padded_vocab_size", "vocab_size"), fields.num_layers("num_layers"),
                  fields.integer("seq_length", default=8192), fields.flag("tie_word_embeddings", False))  # fmt: skip
    n = fields.integer("num_attention_heads")
    k = fields.integer("multi_query_group_num", default=2) if fields.flag("multi_query_attention", True) else n
    attention = Attention("full", n, k, fields.integer("kv_channels", default=128),
                          qkv_bias=fields.flag("add_qkv_bias", True))  # fmt: skip
    mlp = MLP(fields.integer("ffn_hidden_size"))
    return trunk.model(trunk.rms_layers([attention] * trunk.num_layers, [mlp] * trunk.num_layers))


def qwen(fields: Fields) -> Model:
    """Qwen 1: queries, keys and values have biases; the MLP is half as wide as intermediate_size says."""
    trunk = Trunk.read(fields, 8192)
    attention = grouped_attention(fields, trunk.hidden_size, qkv_bias=True)
    mlp = MLP(max(fields.integer("intermediate_size") // 2, 1))
    return trunk.model(trunk.rms_layers([attention] * trunk.num_layers, [mlp] * trunk.num_layers))


def persimmon(fields: Fields) -> Model:
    trunk = Trunk.read(fields, 16384)
    attention = _attention(fields, trunk.hidden_size, "num_attention_heads")
    mlp = MLP(fields.integer("intermediate_size"), gated=False, bias=True)
    return _model(trunk, attention, mlp)


def bloom(fields: Fields) -> Model:
    """BLOOM: ALiBi instead of positions, and a norm behind the embedding."""
    trunk = Trunk(
        fields.integer("hidden_size", "n_embed"),
        fields.integer("vocab_size"),
        fields.num_layers("n_layer", "num_hidden_layers"),
        fields.integer("seq_length", default=2048),
        fields.flag("tie_word_embeddings", True),
    )
    h = trunk.hidden_size
    heads = "n_head" if fields.has("n_head") else "num_attention_heads"
    attention = _attention(fields, h, heads, rope=False)
    return _model(trunk, attention, MLP(4 * h, gated=False, bias=True), other_params=2 * h)


def falcon(fields: Fields) -> Model:
    """Falcon 7B (one key head, one norm) and 40B/180B (new_decoder_architecture: key groups, two parallel norms)."""
    trunk = Trunk.read(fields, 2048, tied=True)
    h, bias = trunk.hidden_size, fields.flag("bias", False)
    if fields.flag("new_decoder_architecture", False):
        n, k = fields.heads(kv_heads="num_kv_heads")
        num_norms = fields.integer("num_ln_in_parallel_attn", default=2)
    else:
        n = fields.integer("num_attention_heads")
        k = 1 if fields.flag("multi_query", True) else n
        num_norms = 1 if fields.flag("parallel_attn", True) else 2
    attention = Attention("full", n, k, fields.head_dim(h, n), qkv_bias=bias, output_bias=bias)
    mlp = MLP(fields.integer("ffn_hidden_size", default=4 * h), gated=False, bias=bias)
    return _model(trunk, attention, mlp, num_norms)


def t5(fields: Fields) -> Model:
    """T5 (arXiv:1910.10683): encoder and decoder; positions are a learned bias per distance bucket and head."""
    num_encoder_layers = fields.num_layers("num_layers")
    trunk = Trunk(
        fields.integer("d_model"),
        fields.integer("vocab_size"),
        fields.num_layers("num_decoder_layers") if fields.has("num_decoder_layers") else num_encoder_layers,
        fields.integer("n_positions", default=512),
        fields.flag("tie_word_embeddings", True),
    )
    d, n = trunk.hidden_size, fields.integer("num_heads")
    attention = Attention("full", n, n, fields.integer("d_kv"), rope=False)
    mlp = MLP(fields.integer("d_ff"), gated=fields.text("feed_forward_proj", "relu").startswith("gated"))
    encoder = [Layer(attention, mlp, 2 * d)] * num_encoder_layers
    decoder = [Layer(attention, mlp, 3 * d, 3, cross_attention=attention)] * trunk.num_layers
    buckets = fields.integer("relative_attention_num_buckets", default=32)
    return trunk.model(decoder, final_norm_params=2 * d, other_params=2 * buckets * n, encoder_layers=encoder)
