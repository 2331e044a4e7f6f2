"""What the model families share: how fields become attention layers and a model."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from .architecture import MLP, Attention, AttentionKind, Layer, Model, MoE
from .fields import Fields

KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
}
"""Hugging Face's `layer_types`."""


def kinds(
    fields: Fields,
    num_layers: int,
    default: Callable[[int], AttentionKind],
    known: Collection[AttentionKind] = ("full", "window"),
) -> list[AttentionKind]:
    """Each layer's kind, of those the family has: `layer_types` decides; without it, the family's rule for layer i."""
    words = {word: kind for word, kind in KINDS.items() if kind in known}
    return fields.per_layer("layer_types", num_layers, words) or [default(i) for i in range(num_layers)]


def windowed(full: Attention, kind: AttentionKind, window: int, max_position_embeddings: int) -> Attention:
    """`full` with a window; one that no sequence can outgrow is full attention."""
    if kind == "full" or window >= max_position_embeddings:
        return full
    return replace(full, kind=kind, window=window)


def grouped_attention(fields: Fields, hidden_size: int, **traits) -> Attention:
    """Multi-head, multi-query or grouped-query attention under the usual field names."""
    n, k = fields.heads()
    return Attention("full", n, k, fields.head_dim(hidden_size, n), **traits)


@dataclass(frozen=True)
class Trunk:
    """The fields around the layers that nearly all decoders have under the same names."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @classmethod
    def read(
        cls,
        fields: Fields,
        max_position_embeddings: int,
        tied: bool = False,
        vocab_size: int | None = None,
        layers: tuple[str, ...] = (),
    ):
        """The arguments are the family's defaults, since Hugging Face omits a field that has its class's default."""
        return cls(
            fields.integer("hidden_size"),
            fields.integer("vocab_size", default=vocab_size),
            fields.num_layers(*layers),
            fields.integer("max_position_embeddings", default=max_position_embeddings),
            fields.flag("tie_word_embeddings", tied),
        )

    def rms_layers(self, attentions: Sequence[Attention], mlps: Sequence[MLP | MoE], num_norms: int = 2) -> list[Layer]:
        """Layers whose norms have a weight and no bias."""
        norm_params = num_norms * self.hidden_size
        return [Layer(attention, mlp, norm_params, num_norms) for attention, mlp in zip(attentions, mlps, strict=True)]

    def model(
        self,
        layers: Sequence[Layer],
        final_norm_params: int | None = None,
        positions: int = 0,
        lm_head_bias: bool = False,
        other_params: int = 0,
        embedding_size: int = 0,
        embedding_more: int = 0,
        encoder_layers: Sequence[Layer] = (),
    ) -> Model:
        """The model; name, family and source are put in by whoever read the file.

        final_norm_params: default, one weight per channel. positions: rows of a learned position table.
        embedding_more: parameters of further tables.
        """
        width = embedding_size or self.hidden_size
        same: dict[Layer, Layer] = {}
        head = 0 if self.tie_word_embeddings else self.vocab_size * (width + lm_head_bias)
        return Model(
            name="",
            family="",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layers=tuple(same.setdefault(layer, layer) for layer in layers),
            tie_word_embeddings=self.tie_word_embeddings,
            max_position_embeddings=self.max_position_embeddings,
            embedding_params=self.vocab_size * width + positions * self.hidden_size + embedding_more,
            lm_head_params=head,
            other_params=other_params + (self.hidden_size if final_norm_params is None else final_norm_params),
            embedding_size=embedding_size,
            encoder_layers=tuple(same.setdefault(layer, layer) for layer in encoder_layers),
        )
