"""The matrices of a model, and one layer's attention: its projections, its keys and values or its state."""

from dataclasses import dataclass
from typing import Any, Literal

AttentionKind = Literal["full", "window", "chunk", "mla", "compressed", "linear"]
Recurrence = Literal["delta", "kda", "lightning", "mamba", "mamba2", "conv"]
"""Recurrent layers, as Hugging Face's classes have them: all keep a matrix per value head, and the last inputs of a
short convolution.

    kind       num_heads x v_head_dim      num_kv_heads x head_dim    source
    delta      value heads                 keys and queries           gated delta rule (Qwen3-Next, OLMo Hybrid)
    kda        value heads                 keys and queries           delta rule with a decay per channel (Kimi Linear)
    lightning  value heads                 keys and queries           decay per head, no convolution (MiniMax-01)
    mamba2     heads of channels           groups x state size        Mamba-2 (arXiv:2405.21060)
    mamba      channels x 1                1 x state size             Mamba (arXiv:2312.00752)
    conv       channels x 1                nothing                    gated short convolution (LFM2)
"""
STATE_PASSES = {"delta": 4, "kda": 4, "lightning": 3, "mamba2": 3, "mamba": 3, "conv": 0}
"""multiplications with the state per token: decay, (prediction,) update, output"""


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
    compressed: DeepSeek-V4: one vector of `head_dim` per token is key and value of all heads; the last `window` of them
        are seen as they are, and further back one for each `compress_ratio` tokens (0: none), of which an indexer picks
        `index_topk` where there is one. Outputs go through `output_groups` matrices of `output_lora_rank`.
    linear: a recurrent layer (`recurrence`): `num_heads` value heads of
        `v_head_dim`, `num_kv_heads` key and query heads of `head_dim`, a causal convolution of `conv_kernel` tokens; a
        fixed state per sequence, nothing per token. `low_rank`: width between two matrices of its gates.
        `state_element_bytes` is an element's of the state (0: as wide as activations).

    `qk_norm`: "head" has one weight vector of head_dim for queries and one for keys, "heads" one for each head,
    "layer" norms all heads together with one weight for each channel, "unweighted" has no weights. `output_gate` is a
    gate for each channel of the output (it doubles the query projection, or has one of its own), `head_gate` one for
    each head. `sinks` is one learned logit per head.
    `kv_shared`: keys and values are an earlier layer's. `values_are_keys`: values have no projection (Gemma 4), and
    are cached all the same.
    """

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    window: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "heads", "layer", "unweighted"] = ""
    rope: bool = True
    output_gate: bool = False
    head_gate: bool = False
    sinks: bool = False
    kv_shared: bool = False
    values_are_keys: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_shared: bool = False
    compress_ratio: int = 0
    output_groups: int = 0
    output_lora_rank: int = 0
    conv_kernel: int = 0
    recurrence: Recurrence = "delta"
    low_rank: int = 0
    state_norm: bool = True
    state_element_bytes: float = 0.0

    def __post_init__(self):
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @property
    def has_indexer(self) -> bool:
        return self.index_topk > 0 and not self.index_shared

    @property
    def sparse_latents(self) -> bool:
        """Whether its queries see some of the latents (DeepSeek-V3.2, GLM-5)."""
        return self.kind == "mla" and self.index_topk > 0

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
        """Channels of the convolution of a linear layer."""
        return _conv_width(self) if self.kind == "linear" else 0

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The projections around the attention itself, in the order in which they run."""
        h, n = hidden_size, self.num_heads
        output = Linear("o_proj", n * self.v_head_dim, h, self.output_bias, "row")
        if self.kind == "linear":
            return (*_recurrent_linears(self, h), output)
        if self.kind == "compressed":
            return self._compressed_linears(h)
        if self.kind != "mla":
            queries = n * self.head_dim * (2 if self.output_gate else 1)
            gate = (Linear("g_proj", h, n),) if self.head_gate else ()
            if self.kv_shared:
                return (Linear("q_proj", h, queries, self.qkv_bias), *gate, output)
            values = () if self.values_are_keys else (("v_proj", self.value_width),)
            qkv = (("q_proj", queries), ("k_proj", self.key_width), *values)
            return (fused("qkv_proj", h, qkv, self.qkv_bias), *gate, *self._indexer(h, h), output)
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        if self.q_lora_rank:
            both = (("q_a_proj", self.q_lora_rank), ("kv_a_proj_with_mqa", latent))
            down = (fused("fused_qkv_a_proj", h, both, self.qkv_bias, "replicated"),)
            query = Linear("q_b_proj", self.q_lora_rank, n * self.head_dim)
        else:
            down = (Linear("kv_a_proj_with_mqa", h, latent, self.qkv_bias, "replicated"),)
            query = Linear("q_proj", h, n * self.head_dim)
        query_gate: tuple[Linear, ...] = ()
        if self.output_gate or self.head_gate:
            query_gate = (Linear("g_proj", h, n * (self.v_head_dim if self.output_gate else 1)),)
        up = Linear("kv_b_proj", self.kv_lora_rank, n * (self.qk_nope_head_dim + self.v_head_dim))
        return (*down, query, *self._indexer(h, self.q_lora_rank), *query_gate, up, output)

    @property
    def _compressors(self) -> tuple[int, int]:
        """Widths of the keys' compressor and of the indexer's: twice where neighbouring entries overlap (ratio 4)."""
        wide = (2 if self.has_indexer else 1) * self.head_dim if self.compress_ratio else 0
        return wide, 2 * self.index_head_dim * self.has_indexer

    def _compressed_linears(self, h: int) -> tuple[Linear, ...]:
        n, d = self.num_heads, self.head_dim
        both = (("q_a_proj", self.q_lora_rank), ("kv_proj", d))
        compressors = [
            fused(f"{name}compressor", h, ((f"{name}compressor.kv_proj", w), (f"{name}compressor.gate_proj", w)),
                  parallel="replicated")
            for name, w in zip(("", "index_"), self._compressors, strict=True) if w
        ]  # fmt: skip
        indexer: tuple[Linear, ...] = ()
        if self.has_indexer:
            width = self.index_num_heads * self.index_head_dim
            indexer = (Linear("index_wq_b", self.q_lora_rank, width, False, "replicated"),
                       Linear("index_weights_proj", h, self.index_num_heads, False, "replicated"))  # fmt: skip
        inner = self.output_groups * self.output_lora_rank
        return (
            fused("fused_qkv_a_proj", h, both, parallel="replicated"),
            Linear("q_b_proj", self.q_lora_rank, n * d),
            *compressors,
            *indexer,
            Linear("o_a_proj", n * d // self.output_groups, inner),
            Linear("o_proj", inner, h, False, "row"),
        )

    def _indexer(self, h: int, query_inputs: int) -> tuple[Linear, ...]:
        """The matrices of an indexer; one over grouped queries weighs its heads alike (MiniMax-M3)."""
        if not self.has_indexer:
            return ()
        weights = Linear("index_weights_proj", h, self.index_num_heads, False, "replicated")
        return (
            Linear("index_wq_b", query_inputs, self.index_num_heads * self.index_head_dim, False, "replicated"),
            Linear("index_wk", h, self.index_head_dim, False, "replicated"),
            *((weights,) if self.kind == "mla" else ()),
        )

    @property
    def vector_params(self) -> int:
        """Parameters that are no matrix: norms of queries, keys and latents, sinks, convolution, decay."""
        norms = {
            "": 0,
            "head": (1 if self.kv_shared else 2) * self.head_dim,
            "heads": self.num_heads * self.head_dim + self.key_width,
            "layer": self.num_heads * self.head_dim + self.key_width,
            "unweighted": 0,
        }[self.qk_norm]
        if self.kind == "mla":
            norms += self.q_lora_rank + self.kv_lora_rank
        if self.kind == "compressed":  # norms, and positions inside an entry, of the compressors too
            norms += self.q_lora_rank + self.head_dim * (2 if self.compress_ratio else 1)
            norms += self.compress_ratio * sum(self._compressors) + self.index_head_dim * self.has_indexer
        else:
            norms += 2 * self.index_head_dim * self.has_indexer
        if self.kind == "linear":
            norms += _recurrent_vectors(self)
        return norms + self.num_heads * self.sinks

    def num_params(self, hidden_size: int) -> int:
        return sum(linear.num_params for linear in self.linears(hidden_size)) + self.vector_params

    @property
    def kv_elements_per_token(self) -> float:
        """Elements of one token's keys and values (an indexer's apart); a kv_shared layer's are another one's."""
        if self.kind == "linear":
            return 0
        if self.kind == "mla":
            return self.kv_lora_rank + self.qk_rope_head_dim
        if self.kind == "compressed":
            return self.head_dim / (self.compress_ratio or 1)
        return self.key_width + self.value_width

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes of an indexer's key: FP8 with an FP32 scale for each 128 elements (vLLM, DeepSeek-V3.2)."""
        whole = self.index_head_dim + 4 * -(-self.index_head_dim // 128) if self.has_indexer else 0
        return whole / self.compress_ratio if self.compress_ratio else whole

    def entry_bytes(self, element_bytes: float) -> float:
        """Bytes of one entry of a compressed layer's cache: in FP8 the rotary part stays in 16 bits, beside 8 scales
        (vLLM's fp8_ds_mla: 448 + 128 + 8)."""
        extra = self.qk_rope_head_dim + 8 if element_bytes == 1 else 0
        return self.head_dim * element_bytes + extra

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes of one sequence's state, whatever its length: a matrix per value head, last inputs of the conv."""
        if self.kind != "linear":
            return 0
        matrix = self.num_heads * self.head_dim * self.v_head_dim
        return (self.state_element_bytes or element_bytes) * matrix + self.conv_width * max(self.conv_kernel - 1, 0) * (
            element_bytes
        )


def _conv_width(a: Attention) -> int:
    """Channels of the convolution: queries, keys and values, or values alone."""
    if a.recurrence == "lightning":
        return 0
    return a.value_width if a.recurrence in ("mamba", "conv") else 2 * a.key_width + a.value_width


def _recurrent_linears(a: Attention, h: int) -> tuple[Linear, ...]:
    """The matrices before the state, in the order in which they run; the one behind it is o_proj."""
    n, values = a.num_heads, a.value_width
    if a.recurrence == "delta":
        inputs = (("in_proj_qkv", _conv_width(a)), ("in_proj_z", values))
        return (fused("in_proj_qkvz", h, inputs), fused("in_proj_ba", h, (("in_proj_b", n), ("in_proj_a", n))))
    if a.recurrence == "kda":
        qkv = (("q_proj", a.key_width), ("k_proj", a.key_width), ("v_proj", values))
        gates: list[Linear] = []
        for gate, narrow in (("f", a.low_rank > 0), ("g", a.low_rank > 0 and not a.output_gate)):
            if narrow:
                gates.append(Linear(f"{gate}_a_proj", h, a.low_rank, False, "replicated"))
            gates.append(Linear(f"{gate}_b_proj", a.low_rank, values) if narrow else Linear(f"{gate}_proj", h, values))
        return (fused("qkv_proj", h, qkv), *gates, Linear("b_proj", h, n))
    if a.recurrence == "lightning":
        return (Linear("qkv_proj", h, 2 * a.key_width + values), Linear("output_gate", h, values))
    if a.recurrence == "mamba2":
        return (Linear("in_proj", h, values + _conv_width(a) + n, a.qkv_bias),)
    if a.recurrence == "mamba":
        small = Linear("x_proj", values, a.low_rank + 2 * a.head_dim, False, "row")
        return (Linear("in_proj", h, 2 * values, a.qkv_bias), small, Linear("dt_proj", a.low_rank, values, True))
    return (Linear("in_proj", h, 3 * values, a.qkv_bias),)


def _recurrent_vectors(a: Attention) -> int:
    """Convolution, decays, biases and norms. `state_norm` is that of the gated output (Mamba-2), or of what x_proj
    gives (Jamba)."""
    n, values, conv = a.num_heads, a.value_width, _conv_width(a) * a.conv_kernel
    return {
        "delta": conv + 2 * n + a.v_head_dim,
        "kda": conv + n + values + a.v_head_dim,
        "lightning": values,
        "mamba2": conv + _conv_width(a) + 3 * n + values * a.state_norm,
        "mamba": conv + values * (2 + a.head_dim) + (a.low_rank + 2 * a.head_dim) * a.state_norm,
        "conv": conv,
    }[a.recurrence]
