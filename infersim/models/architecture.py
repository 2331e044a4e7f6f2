"""What a language model is made of: layers, matrices, parameters, and the memory that a sequence needs.

Everything is a count (parameters, elements, tokens) or a width; nothing here knows a device or a precision. Bytes are
asked for with a number of bytes per element.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .attention import Attention, AttentionKind, Linear, Recurrence, fused

__all__ = [
    "MLP",
    "Attention",
    "AttentionKind",
    "Layer",
    "Linear",
    "MoE",
    "Model",
    "Quantization",
    "Recurrence",
    "Scheme",
    "Vision",
    "counted",
    "fused",
]


@dataclass(frozen=True)
class MLP:
    """A feed-forward block: two matrices, or three when `gated` (the first two fused into one multiplication). Width 0:
    the layer has none."""

    intermediate_size: int
    gated: bool = True
    bias: bool = False

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        f = self.intermediate_size
        if not f:
            return ()
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
    expert (a bias, or DeepSeek's score correction). The router may also pick one of `num_zero_experts`, which do
    nothing (LongCat-Flash); `num_experts_per_token` are those that do something, on average. Routed experts may work on
    a projection of `latent_size` channels (Nemotron 3). A token's experts are in `groups_per_token` of `num_groups`
    equal groups (DeepSeek's topk_group and n_group).
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    num_zero_experts: int = 0
    latent_size: int = 0
    num_groups: int = 1
    groups_per_token: int = 1

    @property
    def expert(self) -> MLP:
        """One routed expert."""
        return MLP(self.intermediate_size, self.gated, self.bias)

    @property
    def shared(self) -> MLP | None:
        """All shared experts as one MLP."""
        return MLP(self.shared_intermediate_size, self.gated, self.bias) if self.shared_intermediate_size else None

    def router(self, hidden_size: int) -> Linear:
        return Linear("gate", hidden_size, self.num_experts + self.num_zero_experts, self.router_bias, "replicated")

    def expert_linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The matrices of one routed expert."""
        return self.expert.linears(self.latent_size or hidden_size)

    def projections(self, hidden_size: int) -> tuple[Linear, ...]:
        """Into the latent channels that routed experts work on, and back."""
        if not self.latent_size:
            return ()
        return (
            Linear("fc1_latent_proj", hidden_size, self.latent_size, False, "replicated"),
            Linear("fc2_latent_proj", self.latent_size, hidden_size, False, "replicated"),
        )

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The matrices that every token meets: router and shared experts."""
        gate = (Linear("shared_expert_gate", hidden_size, 1, False, "replicated"),) if self.shared_gate else ()
        shared = self.shared.linears(hidden_size) if self.shared else ()
        return (self.router(hidden_size), *shared, *gate, *self.projections(hidden_size))

    def _params(self, hidden_size: int, experts: int) -> int:
        always = sum(linear.num_params for linear in self.linears(hidden_size))
        return always + experts * self.expert.num_params(self.latent_size or hidden_size)

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
    "experts" for all routed ones. `beside` are small matrices around both blocks, whole on every rank (Gemma's inputs
    per layer, AltUp and Laurel; hyper-connections).
    """

    attention: Attention
    mlp: MLP | MoE
    norm_params: int
    num_norms: int = 2
    cross_attention: Attention | None = None
    schemes: tuple[tuple[str, "Scheme"], ...] = ()
    beside: tuple[Linear, ...] = ()

    def _params(self, hidden_size: int, mlp_params: int) -> int:
        cross = self.cross_attention.num_params(hidden_size) if self.cross_attention else 0
        cross += sum(linear.num_params for linear in self.beside)
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
class Vision:
    """The vision tower beside a text model (models/vision.py): parameters, width and MLP of its blocks, and the largest
    image, in patches that it encodes and tokens that the text model gets of it. `pixels`: numbers of one patch.
    `rotary`: its queries and keys are turned. `positions`: an embedding for each patch, kept beside the blocks."""

    num_params: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    patches: int
    tokens: int
    pixels: int = 0
    rotary: bool = False
    positions: bool = False


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
    vision: Vision | None = None

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
        kept = (layer.attention for layer in self.layers if not layer.attention.kv_shared)
        return sum(attention.kv_elements_per_token for attention in kept) * element_bytes

    def cross_kv_bytes_per_token(self, element_bytes: float) -> float:
        """Bytes of KV per token of the encoder's input, kept for as long as the sequence lives."""
        crossed = (layer.cross_attention for layer in self.layers if layer.cross_attention)
        return sum(cross.kv_elements_per_token for cross in crossed) * element_bytes

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes of an indexer's keys of one token, all layers."""
        return sum(layer.attention.index_bytes_per_token for layer in self.layers)

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes per sequence that do not grow with its length (linear attention), all layers."""
        return sum(layer.attention.state_bytes(element_bytes) for layer in self.layers)
