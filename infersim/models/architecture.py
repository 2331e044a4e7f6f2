"""What a language model is made of: layers, matrices, parameters, and the memory that a sequence needs.

Everything is a count (parameters, elements, tokens) or a width; nothing here knows a device or a precision. Bytes are
asked for with a number of bytes per element.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

AttentionKind = Literal["full", "window", "chunk", "mla", "linear"]


@dataclass(frozen=True)
class Linear:
    """One matrix multiplication [tokens, inputs] x [inputs, outputs], named and fused as vLLM fuses it.

    `parallel` is how tensor parallelism cuts it: column (outputs), row (inputs, followed by an all-reduce), or
    replicated. `parts` are the checkpoint's matrices that are fused in it, side by side, and their outputs; empty where
    it is one.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    parallel: Literal["column", "row", "replicated"] = "column"
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def num_params(self) -> int:
        return self.inputs * self.outputs + self.outputs * self.bias


def fused(name: str, inputs: int, parts: tuple[tuple[str, int], ...], bias: bool = False, parallel: Any = "column"):
    """Several matrices of a checkpoint as one multiplication."""
    return Linear(name, inputs, sum(outputs for _, outputs in parts), bias, parallel, parts)


@dataclass(frozen=True)
class Attention:
    """One layer's attention, of one kind.

    full, window, chunk: `num_heads` queries share `num_kv_heads` keys (width `head_dim`) and values (width
        `v_head_dim`, default head_dim). `window` is the number of keys visible to a query of a window layer (itself
        included), or the size of a chunk of a chunk layer (a query sees the keys of its own chunk only).
    mla: latent attention (DeepSeek-V2, arXiv:2405.04434): per token a vector of `kv_lora_rank` and a rotary key of
        `qk_rope_head_dim`, shared by all heads (`num_kv_heads` 1); `head_dim` = qk_nope_head_dim + qk_rope_head_dim;
        q_lora_rank 0: queries are projected directly. With `index_topk` > 0 an indexer of `index_num_heads` x
        `index_head_dim` picks the keys that a query sees (DeepSeek-V3.2); `index_shared` layers have none and see the
        keys that an earlier layer's picked (GLM-5.2).
    linear: gated delta rule (Qwen3-Next): `num_heads` value heads of `v_head_dim`, `num_kv_heads` key and query heads
        of `head_dim`, a causal convolution of `conv_kernel` tokens; a fixed state per sequence, nothing per token.

    `qk_norm`: "head" has one weight vector of head_dim for queries and one for keys, "layer" one weight for each
    channel of all heads, "unweighted" none. `output_gate` doubles the query projection. `sinks` is one learned logit
    per head.
    """

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    window: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "layer", "unweighted"] = ""
    rope: bool = True
    output_gate: bool = False
    sinks: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_shared: bool = False
    conv_kernel: int = 0

    def __post_init__(self):
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @property
    def has_indexer(self) -> bool:
        return self.index_topk > 0 and not self.index_shared

    @property
    def key_width(self) -> int:
        """Channels of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads, before they are shared by queries."""
        return (self.num_heads if self.kind == "linear" else self.num_kv_heads) * self.v_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution of a linear layer: queries, keys and values."""
        return 2 * self.key_width + self.value_width if self.kind == "linear" else 0

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The projections around the attention itself, in the order in which they run."""
        h, n = hidden_size, self.num_heads
        output = Linear("o_proj", n * self.v_head_dim, h, self.output_bias, "row")
        if self.kind == "linear":
            inputs = (("in_proj_qkv", self.conv_width), ("in_proj_z", self.value_width))
            gates = (("in_proj_b", n), ("in_proj_a", n))
            return (fused("in_proj_qkvz", h, inputs), fused("in_proj_ba", h, gates), output)
        if self.kind != "mla":
            queries = n * self.head_dim * (2 if self.output_gate else 1)
            qkv = (("q_proj", queries), ("k_proj", self.key_width), ("v_proj", self.value_width))
            return (fused("qkv_proj", h, qkv, self.qkv_bias), output)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        if self.q_lora_rank:
            both = (("q_a_proj", self.q_lora_rank), ("kv_a_proj_with_mqa", latent))
            down = (fused("fused_qkv_a_proj", h, both, self.qkv_bias, "replicated"),)
            query = Linear("q_b_proj", self.q_lora_rank, n * self.head_dim)
        else:
            down = (Linear("kv_a_proj_with_mqa", h, latent, self.qkv_bias, "replicated"),)
            query = Linear("q_proj", h, n * self.head_dim)
        up = Linear("kv_b_proj", self.kv_lora_rank, n * (self.qk_nope_head_dim + self.v_head_dim))
        indexer: tuple[Linear, ...] = ()
        if self.has_indexer:
            indexer = (
                Linear("index_wq_b", self.q_lora_rank, self.index_num_heads * self.index_head_dim, False, "replicated"),
                Linear("index_wk", h, self.index_head_dim, False, "replicated"),
                Linear("index_weights_proj", h, self.index_num_heads, False, "replicated"),
            )
        return (*down, query, *indexer, up, output)

    @property
    def vector_params(self) -> int:
        """Parameters that are no matrix: norms of queries, keys and latents, sinks, convolution, decay."""
        norms = {
            "": 0,
            "head": 2 * self.head_dim,
            "layer": self.num_heads * self.head_dim + self.key_width,
            "unweighted": 0,
        }[self.qk_norm]
        if self.kind == "mla":
            norms += self.q_lora_rank + self.kv_lora_rank + 2 * self.index_head_dim * self.has_indexer
        if self.kind == "linear":  # A_log and dt_bias per value head, gated norm of the output
            norms += self.conv_width * self.conv_kernel + 2 * self.num_heads + self.v_head_dim
        return norms + self.num_heads * self.sinks

    def num_params(self, hidden_size: int) -> int:
        return sum(linear.num_params for linear in self.linears(hidden_size)) + self.vector_params

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that the KV cache keeps of one token (an indexer's keys apart)."""
        if self.kind == "linear":
            return 0
        if self.kind == "mla":
            return self.kv_lora_rank + self.qk_rope_head_dim
        return self.key_width + self.value_width

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of an indexer's key: FP8 with an FP32 scale for each 128 elements (vLLM, DeepSeek-V3.2)."""
        return self.index_head_dim + 4 * -(-self.index_head_dim // 128) if self.has_indexer else 0

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes of one sequence's state, whatever its length: FP32 matrix per value head, last inputs of the conv."""
        if self.kind != "linear":
            return 0
        matrices = self.num_heads * self.head_dim * self.v_head_dim
        return 4 * matrices + self.conv_width * (self.conv_kernel - 1) * element_bytes


@dataclass(frozen=True)
class MLP:
    """A feed-forward block: two matrices, or three when `gated` (the first two fused into one multiplication)."""

    intermediate_size: int
    gated: bool = True
    bias: bool = False

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        f = self.intermediate_size
        both = (("gate_proj", f), ("up_proj", f))
        up = (
            fused("gate_up_proj", hidden_size, both, self.bias)
            if self.gated
            else Linear("up_proj", hidden_size, f, self.bias)
        )
        return (up, Linear("down_proj", f, hidden_size, self.bias, "row"))

    def num_params(self, hidden_size: int) -> int:
        return sum(linear.num_params for linear in self.linears(hidden_size))

    def num_active_params(self, hidden_size: int) -> int:
        return self.num_params(hidden_size)


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: a router picks `num_experts_per_token` of `num_experts`; a shared MLP sees every token.

    `intermediate_size` is one routed expert's. `shared_intermediate_size` is that of all shared experts together (0:
    none); with `shared_gate` its output is scaled by one learned logit per token. `router_bias` is one number per
    expert (a bias, or DeepSeek's score correction).
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False

    @property
    def expert(self) -> MLP:
        """One routed expert."""
        return MLP(self.intermediate_size, self.gated, self.bias)

    @property
    def shared(self) -> MLP | None:
        """All shared experts as one MLP."""
        return MLP(self.shared_intermediate_size, self.gated, self.bias) if self.shared_intermediate_size else None

    def router(self, hidden_size: int) -> Linear:
        return Linear("gate", hidden_size, self.num_experts, self.router_bias, "replicated")

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The matrices that every token meets: router and shared experts."""
        gate = (Linear("shared_expert_gate", hidden_size, 1, False, "replicated"),) if self.shared_gate else ()
        shared = self.shared.linears(hidden_size) if self.shared else ()
        return (self.router(hidden_size), *shared, *gate)

    def _params(self, hidden_size: int, experts: int) -> int:
        always = sum(linear.num_params for linear in self.linears(hidden_size))
        return always + experts * self.expert.num_params(hidden_size)

    def num_params(self, hidden_size: int) -> int:
        return self._params(hidden_size, self.num_experts)

    def num_active_params(self, hidden_size: int) -> int:
        return self._params(hidden_size, self.num_experts_per_token)


@dataclass(frozen=True)
class Layer:
    """One layer: attention, feed-forward, and `num_norms` norms over hidden_size with `norm_params` weights in all.

    `cross_attention` is that of an encoder-decoder's decoder: its keys and values are the encoder's output, computed
    once per sequence, and `linears` of it names one fused projection for both inputs. `schemes` are those of its
    matrices that the checkpoint quantises, by "attention.", "mlp." or "shared." and the matrix's name there, and
    "experts" for all routed ones.
    """

    attention: Attention
    mlp: MLP | MoE
    norm_params: int
    num_norms: int = 2
    cross_attention: Attention | None = None
    schemes: tuple[tuple[str, "Scheme"], ...] = ()

    def _params(self, hidden_size: int, mlp_params: int) -> int:
        cross = self.cross_attention.num_params(hidden_size) if self.cross_attention else 0
        return self.attention.num_params(hidden_size) + cross + mlp_params + self.norm_params

    def num_params(self, hidden_size: int) -> int:
        return self._params(hidden_size, self.mlp.num_params(hidden_size))

    def num_active_params(self, hidden_size: int) -> int:
        return self._params(hidden_size, self.mlp.num_active_params(hidden_size))


def counted(layers: Sequence[Layer]) -> Counter[Layer]:
    """How often each layer occurs. Equal layers of a model are mostly one object: each object is hashed once."""
    objects = {id(layer): layer for layer in layers}
    counts: Counter[Layer] = Counter()
    for key, count in Counter(map(id, layers)).items():
        counts[objects[key]] += count
    return counts


@dataclass(frozen=True)
class Scheme:
    """How one matrix of a checkpoint is stored and multiplied; what that costs is priced elsewhere.

    `bits` and `type` are those of one weight, `input_bits` and `input_type` those of an input as the multiplication
    takes it (16: as it is). `group_size` weights along the inputs are under one scale (0: a channel or more), or a
    block of `block_size`.
    """

    bits: int
    type: Literal["int", "float"]
    group_size: int = 0
    block_size: tuple[int, ...] = ()
    input_bits: int = 16
    input_type: Literal["int", "float"] = "float"


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of itself as a whole: Hugging Face's quant_method, and the KV cache that it is made for
    ("" where it does not say)."""

    method: str
    kv_cache: str = ""


@dataclass(frozen=True)
class Model:
    """A decoder (or encoder-decoder, where `encoder_layers` is not empty), one `layers` entry per layer in order.

    embedding_params: tables that are looked up, one row per token (tokens and learned positions).
    lm_head_params: the output matrix, 0 where it is the tied token embedding; it is read in full either way.
    other_params: everything else that a pass reads in full (final norm, projections around the embedding).
    embedding_size: width of the token embedding and of the LM head's input (0: hidden_size; OPT-350m differs).
    max_position_embeddings: longest sequence, tokens.
    source: where the numbers come from.
    """

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    embedding_params: int
    lm_head_params: int
    other_params: int
    source: str = ""
    embedding_size: int = 0
    encoder_layers: tuple[Layer, ...] = ()
    quantization: Quantization | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def lm_head(self) -> Linear:
        """The last multiplication, tied or not, with its bias if it has parameters beyond the matrix."""
        inputs = self.embedding_size or self.hidden_size
        return Linear("lm_head", inputs, self.vocab_size, self.lm_head_params > inputs * self.vocab_size)

    @cached_property
    def num_params(self) -> int:
        """All parameters of the text model."""
        return self._total(lambda layer: layer.num_params(self.hidden_size))

    @cached_property
    def num_active_params(self) -> int:
        """Parameters of one token's path: all but the experts that it is not routed to, embedding included."""
        return self._total(lambda layer: layer.num_active_params(self.hidden_size))

    def _total(self, count: Callable[[Layer], int]) -> int:
        layers = sum(count(layer) * times for layer, times in counted(self.layers + self.encoder_layers).items())
        return self.embedding_params + self.lm_head_params + self.other_params + layers

    def kv_bytes_per_token(self, element_bytes: float) -> float:
        """Bytes of KV cache of one token that every layer keeps (windows not applied; an indexer's keys apart)."""
        return sum(layer.attention.kv_elements_per_token for layer in self.layers) * element_bytes

    def cross_kv_bytes_per_token(self, element_bytes: float) -> float:
        """Bytes of KV per token of the encoder's input, kept for as long as the sequence lives."""
        crossed = (layer.cross_attention for layer in self.layers if layer.cross_attention)
        return sum(cross.kv_elements_per_token for cross in crossed) * element_bytes

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of an indexer's keys of one token, all layers."""
        return sum(layer.attention.index_bytes_per_token for layer in self.layers)

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes per sequence that do not grow with its length (linear attention), all layers."""
        return sum(layer.attention.state_bytes(element_bytes) for layer in self.layers)
