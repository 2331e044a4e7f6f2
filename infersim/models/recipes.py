"""Families that are Llama but for a few traits: one row each, with the defaults of Hugging Face's classes.

A trait that a config decides is the name of its flag, with "!" where the flag is true by default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .architecture import MLP, Attention, Layer, Model, MoE
from .families import Trunk, kinds, windowed
from .fields import Fields

Flag = bool | str
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
STEP = ("decoder_sparse_step", "moe_layer_interval", "moe_layer_freq")
NONE = 10**9
SPARSE = {"dense": False, "sparse": True, "moe": True, "hash_moe": True, 0: False, 1: True}


@dataclass(frozen=True)
class Experts:
    """A family's mixture. `size`: field of an expert's width. `shared`: field of the number of shared experts, each as
    wide (or `shared_size` wide); `shared_width`: field of the width of all of them together. `dense_first`: layers
    without experts before the first with them, where no field says it."""

    size: str = "moe_intermediate_size"
    shared: tuple[str, ...] = ()
    shared_size: tuple[str, ...] = ()
    shared_width: tuple[str, ...] = ()
    shared_gate: bool = False
    router_bias: Flag = False
    bias: bool = False
    dense_first: int = 0


SHARED = Experts(shared=("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"))
WIDE = Experts(size="intermediate_size")


@dataclass(frozen=True)
class Recipe:
    """What sets a family apart.

    positions, tied, vocab_size, head_dim: what a config that does not say means. norm_weights: 2 where a norm has a
    bias. head_dim "": hidden size over heads. full_every: without layer_types, every so many layers one has no window,
    counted from full_first (NONE: all have one).
    """

    positions: int = 131072
    tied: bool = False
    vocab_size: int | None = None
    head_dim: int | None = None
    default_heads: tuple[int | None, int | None] = (None, None)
    layers: tuple[str, ...] = ()
    qkv_bias: Flag = "attention_bias"
    output_bias: Flag = "attention_bias"
    mlp_bias: Flag = False
    gated: bool = True
    qk_norm: Literal["", "head", "heads", "layer", "unweighted"] = ""
    qk_norm_flag: Flag = True
    output_gate: bool = False
    sinks: bool = False
    num_norms: int = 2
    norm_weights: int = 1
    parallel_flag: str = ""
    window: int = 0
    full_every: int = 0
    full_first: int = -1
    pattern: tuple[str, ...] = ("sliding_window_pattern", "_sliding_window_pattern")
    lm_head_bias: Flag = False
    experts: Experts | None = None

    def __call__(self, fields: Fields) -> Model:
        trunk = Trunk.read(fields, self.positions, self.tied, self.vocab_size, self.layers)
        attention = self.attention(fields, trunk.hidden_size)
        attentions = self.windows(fields, trunk, attention)
        norms = 1 if self.parallel_flag and fields.flag(self.parallel_flag, False) else self.num_norms
        weights = norms * self.norm_weights * trunk.hidden_size
        mlps = self.mlps(fields, trunk.num_layers)
        layers = [Layer(a, m, weights, norms * bool(self.norm_weights)) for a, m in zip(attentions, mlps, strict=True)]
        bias = flag(fields, self.lm_head_bias)
        return trunk.model(layers, self.norm_weights * trunk.hidden_size, lm_head_bias=bias)

    def attention(self, fields: Fields, hidden_size: int) -> Attention:
        qkv_bias, output_bias = flag(fields, self.qkv_bias), flag(fields, self.output_bias)
        heads, kv_heads = self.default_heads
        n, k = fields.heads(default_heads=heads, default_kv_heads=kv_heads)
        if self.head_dim:
            head_dim = fields.integer("head_dim", default=self.head_dim)
        else:
            head_dim = fields.head_dim(hidden_size, n)
        return Attention(
            "full",
            n,
            k,
            head_dim,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=self.qk_norm if flag(fields, self.qk_norm_flag) else "",
            output_gate=self.output_gate,
            sinks=self.sinks,
        )

    def windows(self, fields: Fields, trunk: Trunk, full: Attention) -> list[Attention]:
        """Each layer's attention: layer_types decides; without it every `full_every`-th layer has no window."""
        every, named = self.full_every, next((name for name in self.pattern if fields.has(name)), "")
        if every and named:  # EXAONE writes one period out: LLLG
            period = fields.config[named]
            every = len(period) if isinstance(period, str) and period else fields.integer(named)
        if fields.config.get("sliding_window", True) is None:  # said to be none
            every = 0
        elif self.window and not every and not fields.has("layer_types"):
            fields.problem("layer_types", "missing; must say which layers have the window")
        found = kinds(fields, trunk.num_layers,
                      lambda i: "window" if every and (i - self.full_first) % every else "full")  # fmt: skip
        size = fields.integer("sliding_window", default=self.window or None) if "window" in found else 0
        return [windowed(full, kind, size, trunk.max_position_embeddings) for kind in found]

    def mlps(self, fields: Fields, num_layers: int) -> list[MLP | MoE]:
        bias = flag(fields, self.mlp_bias)
        sparse = sparse_layers(fields, num_layers, self.experts.dense_first) if self.experts else set()
        experts = (
            any(fields.has(name) for name in EXPERTS) or not self.experts or self.experts.size != "intermediate_size"
        )
        moe = read_experts(fields, self.experts, self.gated) if self.experts and sparse and experts else None
        if moe and len(sparse) == num_layers:
            return [moe] * num_layers  # and the dense width may be absent
        dense = MLP(fields.integer("intermediate_size"), self.gated, bias)
        return [moe if moe and i in sparse else dense for i in range(num_layers)]


def flag(fields: Fields, value: Flag) -> bool:
    """A trait, or what the flag of its name says."""
    if isinstance(value, bool):
        return value
    return fields.flag(value.rstrip("!"), value.endswith("!"))


def sparse_layers(fields: Fields, num_layers: int, dense_first: int = 0) -> set[int]:
    """The layers that have experts, under any of the names of the fields that say it."""
    for name in ("mlp_layer_types", "moe_layer_freq"):
        if isinstance(fields.config.get(name), list):
            return {i for i, has in enumerate(fields.per_layer(name, num_layers, SPARSE) or []) if has}
    first = fields.integer(*DENSE_FIRST, default=dense_first, least=0)
    last = fields.integer("moe_layer_end_index", default=num_layers - 1, least=-1)
    last = num_layers - 1 if last < 0 else last
    step = fields.integer(*STEP, default=1)
    dense = set(fields.integers("mlp_only_layers"))
    named = "first_k_dense_replace" if fields.has("first_k_dense_replace") else ""
    return {i for i in range(first, last + 1) if (i % step == 0 if named else (i + 1) % step == 0)} - dense


def read_experts(fields: Fields, family: Experts, gated: bool = True) -> MoE:
    """The mixture of one layer."""
    num_experts = fields.integer(*EXPERTS)
    top = fields.integer(*PER_TOKEN)
    if top > num_experts:
        names = [name for name in EXPERTS if fields.has(name)] or [EXPERTS[0]]
        fields.problem("num_experts_per_tok", f"must be at most {names[0]} {num_experts} (got {top})", given=names)
    size = fields.integer(family.size)
    if family.shared_width:
        shared = fields.integer(*family.shared_width, default=0, least=0)
    else:
        number = fields.integer(*family.shared, default=0, least=0) if family.shared else 0
        shared = number * (fields.integer(*family.shared_size, default=size) if family.shared_size else size)
    bias = flag(fields, family.router_bias)
    return MoE(num_experts, min(top, num_experts), size, gated, family.bias, shared, family.shared_gate, bias)


RECIPES: dict[str, Callable[[Fields], Model]] = {
    "afmoe": Recipe(qk_norm="head", output_gate=True, num_norms=4, window=1024, full_every=4,
                    pattern=("global_attn_every_n_layers",), experts=SHARED),
    "apertus": Recipe(65536, gated=False, qk_norm="head"),
    "arcee": Recipe(4096, gated=False, mlp_bias="mlp_bias"),
    "bailing_moe": Recipe(qkv_bias="use_qkv_bias", output_bias="use_bias", qk_norm="head", qk_norm_flag="use_qk_norm",
                          experts=Experts(shared=SHARED.shared, shared_size=("moe_shared_expert_intermediate_size",))),
    "aria_text": Recipe(2048, experts=Experts("intermediate_size", shared=("moe_num_shared_experts",))),
    "baichuan": Recipe(4096),
    "bitnet": Recipe(2048),
    "cohere": Recipe(8192, tied=True, num_norms=1, qk_norm="heads", qk_norm_flag="use_qk_norm"),
    "cohere2": Recipe(8192, tied=True, num_norms=1, window=4096, full_every=4),
    "cohere2_moe": Recipe(8192, tied=True, num_norms=1, window=4096, full_every=4,
                          experts=Experts("intermediate_size", shared=("num_shared_experts",))),
    "cwm": Recipe(window=8192, full_every=4, full_first=0, pattern=()),
    "deepseek": Recipe(experts=SHARED),
    "dots1": Recipe(qk_norm="head", experts=SHARED),
    "ernie4_5": Recipe(tied=True, head_dim=128, qkv_bias="use_bias", output_bias="use_bias"),
    "ernie4_5_moe": Recipe(tied=True, qkv_bias="use_bias", output_bias="use_bias",
                           experts=Experts(shared=SHARED.shared, router_bias=True, dense_first=1)),
    "exaone": Recipe(2048, layers=("num_layers", "num_hidden_layers")),
    "exaone4": Recipe(2048, qk_norm="head", window=4096, full_every=4),
    "exaone_moe": Recipe(2048, qk_norm="head", window=4096, full_every=4,
                         experts=Experts(shared=SHARED.shared, router_bias=True, dense_first=1)),
    "flex_olmo": Recipe(4096, qk_norm="layer", experts=WIDE),
    "flint": Recipe(262144, head_dim=128, sinks=True, qk_norm="head", window=513,
                    experts=Experts(shared_width=("shared_expert_intermediate_size",), dense_first=2)),
    "gemma2": Recipe(8192, tied=True, vocab_size=256000, num_norms=4, window=4096, full_every=2, pattern=()),
    "gemma3_text": Recipe(131072, tied=True, vocab_size=262208, head_dim=256, default_heads=(8, 4), qk_norm="head",
                          num_norms=4, window=4096, full_every=6),
    "gemma": Recipe(8192, tied=True, vocab_size=256000, head_dim=256),
    "glm": Recipe(head_dim=128, qkv_bias="attention_bias!", output_bias=False),
    "glm4": Recipe(head_dim=128, qkv_bias="attention_bias!", output_bias=False, num_norms=4),
    "glm4_moe": Recipe(output_bias=False, qk_norm="head", qk_norm_flag="use_qk_norm",
                       experts=Experts(shared=SHARED.shared, router_bias=True, dense_first=1)),
    "glm_ocr_text": Recipe(qkv_bias=False, output_bias=False, num_norms=4),
    "gpt_oss": Recipe(qkv_bias="attention_bias!", output_bias="attention_bias!", sinks=True, window=128, full_every=2,
                      pattern=(), experts=Experts("intermediate_size", bias=True, router_bias=True)),
    "granite": Recipe(2048, mlp_bias="mlp_bias"),
    "granite_swa": Recipe(8192, tied=True, sinks=True, window=128, full_every=4, full_first=0, pattern=()),
    "granitemoe": Recipe(2048, experts=WIDE),
    "granitemoe_swa": Recipe(2048, sinks=True, window=128, full_every=4, full_first=0, pattern=(), experts=Experts(
        "intermediate_size", shared_width=("shared_intermediate_size",))),
    "granitemoeshared": Recipe(2048, experts=Experts("intermediate_size", shared_width=("shared_intermediate_size",))),
    "helium": Recipe(4096, head_dim=128),
    "hunyuan_v1_dense": Recipe(qk_norm="head", qk_norm_flag="use_qk_norm!"),
    "hunyuan_v1_moe": Recipe(qk_norm="head", qk_norm_flag="use_qk_norm!", experts=Experts(
        "intermediate_size", shared_width=("intermediate_size",))),
    "hy_v3": Recipe(qk_norm="head", experts=Experts(shared=SHARED.shared, router_bias=True, dense_first=1)),
    "hyperclovax": Recipe(2048, num_norms=4),
    "internlm2": Recipe(32768, qkv_bias="bias", output_bias="bias"),
    "internlm3": Recipe(32768, qkv_bias="qkv_bias", output_bias="bias", head_dim=128),
    "jais2": Recipe(8192, norm_weights=2, gated=False, qkv_bias="attention_bias!", output_bias="attention_bias!",
                    mlp_bias="mlp_bias!"),
    "kolibri1": Recipe(262144, head_dim=128, qk_norm="head", num_norms=4, window=513, full_every=5, pattern=(),
                       experts=Experts(shared_width=("shared_expert_intermediate_size",))),
    "llama": Recipe(2048, mlp_bias="mlp_bias"),
    "mellum": Recipe(head_dim=128, qk_norm="head", experts=Experts()),
    "mimo": Recipe(32768, qkv_bias="attention_bias!", output_bias=False),
    "minicpm": Recipe(2048, tied=True),
    "ministral": Recipe(window=4096, full_every=NONE, pattern=()),
    "ministral3": Recipe(262144, head_dim=128),
    "muse_glimmer_text": Recipe(qk_norm="unweighted", output_gate=True, num_norms=4, window=2048, full_every=4,
                                pattern=()),
    "nanochat": Recipe(2048, gated=False, norm_weights=0, qk_norm="unweighted"),
    "nemotron": Recipe(4096, norm_weights=2, gated=False, mlp_bias="mlp_bias"),
    "olmo": Recipe(2048, norm_weights=0),
    "olmo2": Recipe(2048, qk_norm="layer"),
    "olmo3": Recipe(2048, qk_norm="layer", window=4096, full_every=4),
    "olmoe": Recipe(4096, qk_norm="layer", experts=WIDE),
    "orion": Recipe(4096, norm_weights=2),
    "phimoe": Recipe(norm_weights=2, lm_head_bias="lm_head_bias", experts=WIDE),
    "qwen2_moe": Recipe(32768, qkv_bias="qkv_bias!", output_bias=False, experts=Experts(
        shared_width=("shared_expert_intermediate_size",), shared_gate=True)),
    "seed_oss": Recipe(524288, head_dim=128, qkv_bias="attention_bias!", output_bias="attention_out_bias"),
    "smollm3": Recipe(32768, tied=True),
    "solar": Recipe(4096),
    "solar_open": Recipe(head_dim=128, experts=Experts(shared=SHARED.shared, router_bias=True)),
    "stablelm": Recipe(4096, qkv_bias="use_qkv_bias", output_bias=False, norm_weights=2,
                       parallel_flag="use_parallel_residual"),
    "starcoder2": Recipe(4096, tied=True, qkv_bias="use_bias!", output_bias="use_bias!", mlp_bias="use_bias!",
                         gated=False, norm_weights=2),
    "vaultgemma": Recipe(8192, tied=True, vocab_size=256000, head_dim=256, window=4096, full_every=2, pattern=()),
}  # fmt: skip
"""model_type -> its row"""
