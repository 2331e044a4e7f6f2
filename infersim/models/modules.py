"""A layer's matrices by the names that checkpoints give them, and which of these names a list of patterns means."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from .architecture import Layer, Linear, Model, MoE, Scheme

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""What may stand before `layers.0` of a text model; a pattern may be written for any of them."""
TEXT = re.compile(r"(?:(?:model|language_model|text_model|transformer|decoder|gpt_neox)\.)*(?:layers|h|block)\.")
EVERYTHING = {"Linear"}
"""torch's class of all matrices"""

ATTENTION = ("self_attn", "linear_attn", "attn", "self_attention", "attention")
MLP = ("mlp", "feed_forward")
SHARED = ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert", "block_sparse_moe.shared_experts")
EXPERTS = ("mlp.experts", "feed_forward.experts", "block_sparse_moe.experts")
OTHERWISE = {
    "q_proj": ("qkv_proj", "query_key_value", "c_attn"),
    "k_proj": ("qkv_proj", "query_key_value", "c_attn"),
    "v_proj": ("qkv_proj", "query_key_value", "c_attn"),
    "o_proj": ("out_proj", "dense", "c_proj"),
    "in_proj_qkv": ("in_proj_qkvz",),
    "in_proj_z": ("in_proj_qkvz",),
    "in_proj_b": ("in_proj_ba",),
    "in_proj_a": ("in_proj_ba",),
    "gate_proj": ("gate_up_proj", "w1"),
    "up_proj": ("gate_up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h"),
    "down_proj": ("w2", "fc2", "c_proj", "dense_4h_to_h"),
}
"""what families call a matrix otherwise, or what it is fused in"""
KEPT = ("kv_b_proj", "index_", "compressor")
"""MLA's absorbed matrices and an indexer's, which vLLM keeps in 16 bits whatever the checkpoint says"""


class Patterns:
    """Names of modules as quantisers write them: a full name, that of a module around it, or its end; a pattern with
    * and ?; `re:` and a regular expression that fits from the beginning (compressed-tensors)."""

    def __init__(self, patterns: Iterable[str]):
        self.words = tuple(patterns)
        self.everything = not EVERYTHING.isdisjoint(self.words)
        self.literals, self.expressions = set(), []
        for word in self.words:
            if word.startswith("re:"):
                self.expressions.append(re.compile(word[3:]))
            elif any(sign in word for sign in "*?["):
                self.expressions += [re.compile(fnmatch.translate(word + end)) for end in ("", ".*")]
            else:
                word = word.removesuffix(".weight")
                self.literals.add(TEXT.sub("layers.", word, count=1) if TEXT.match(word) else word)

    def numbered(self) -> bool:
        """Whether it may mean some layers and not others."""
        return any(sign.isdigit() for word in self.words for sign in word)

    def names(self, names: Sequence[str]) -> bool:
        """Whether one of a module's names, which begin with `layers.`, is meant, by more than its class."""
        return any(self._means(name) for name in names)

    def _means(self, name: str) -> bool:
        if self.literals:
            parts = name.split(".")
            runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
            if not self.literals.isdisjoint(runs):
                return True
        return any(found.match(prefix + name) for found in self.expressions for prefix in PREFIXES)


class Rules:
    """Which scheme a module has: none where `ignored` names it, else that of the first group that names it, else that
    of the first group for everything."""

    def __init__(self, ignored: Iterable[str], groups: Iterable[tuple[Iterable[str], Scheme | None]]):
        self.ignored = Patterns(ignored)
        self.groups = [(Patterns(targets), scheme) for targets, scheme in groups]

    def numbered(self) -> bool:
        return self.ignored.numbered() or any(targets.numbered() for targets, _ in self.groups)

    def scheme(self, names: Sequence[str]) -> Scheme | None:
        if self.ignored.everything or self.ignored.names(names):
            return None
        named = (scheme for targets, scheme in self.groups if targets.names(names))
        rest = (scheme for targets, scheme in self.groups if targets.everything)
        return next(named, next(rest, None))

    def experts(self) -> set[str]:
        """Numbers of experts that are named one by one."""
        given = (self.ignored, *(targets for targets, _ in self.groups))
        words = [word for patterns in given for word in patterns.words]
        return {number for word in words for number in re.findall(r"experts\\?\.(\d+)", word)} | {"0"}


def with_schemes(model: Model, rules: Rules, problems: list[str]) -> Model:
    """The model whose layers know the schemes of their matrices; what cannot be told is added to `problems`."""
    made: dict[tuple[int, tuple], Layer] = {}
    found: dict[int, tuple] = {}
    experts, numbered = sorted(rules.experts()), rules.numbered()

    def quantised(i: int, layer: Layer) -> Layer:
        if numbered or id(layer) not in found:
            found[id(layer)] = tuple(_schemes(i, layer, model.hidden_size, rules, experts, problems))
        schemes = found[id(layer)]
        return made.setdefault((id(layer), schemes), replace(layer, schemes=schemes))

    layers = tuple(quantised(i, layer) for i, layer in enumerate(model.layers))
    encoder = tuple(quantised(i, layer) for i, layer in enumerate(model.encoder_layers))
    if not problems and not any(layer.schemes for layer in (*layers, *encoder)):
        problems.append("names no matrix of the text model's layers")
    return replace(model, layers=layers, encoder_layers=encoder)


def _schemes(
    i: int, layer: Layer, hidden_size: int, rules: Rules, experts: Iterable[str], problems: list[str]
) -> Iterator[tuple[str, Scheme]]:
    for key, paths in matrices(layer, hidden_size).items():
        if scheme := rules.scheme([f"layers.{i}.{path}" for path in paths]):
            yield key, scheme
    if isinstance(layer.mlp, MoE):
        names = ("gate_proj", "up_proj", "down_proj") if layer.mlp.gated else ("up_proj", "down_proj")
        schemes = {
            rules.scheme([f"layers.{i}.{path}" for path in _expert(number, name)])
            for number in experts
            for name in names
            if int(number) < layer.mlp.num_experts
        }
        if len(schemes) > 1:
            problems.append(f"layer {i} has experts, or matrices of one, in different formats, which is not modelled")
        elif scheme := next(iter(schemes)):
            yield "experts", scheme


def _expert(number: str, name: str) -> list[str]:
    """Names of one matrix of one expert: its own, or that of all experts' stacked ones."""
    ends = (name, *OTHERWISE[name])
    return [f"{path}.{middle}{end}" for path in EXPERTS for end in ends for middle in (f"{number}.", "")]


def matrices(layer: Layer, hidden_size: int) -> Mapping[str, list[str]]:
    """The layer's matrices that may be quantised, experts apart: key of `Layer.schemes` -> names below the layer."""
    shared = layer.mlp.shared if isinstance(layer.mlp, MoE) else None
    mlp = layer.mlp if not isinstance(layer.mlp, MoE) else None
    groups = {
        "attention": (ATTENTION, layer.attention.linears(hidden_size)),
        "mlp": (MLP, mlp.linears(hidden_size) if mlp else ()),
        "shared": (SHARED, shared.linears(hidden_size) if shared else ()),
    }
    return {
        f"{group}.{part}": [f"{path}.{end}" for path in paths for end in (part, *OTHERWISE.get(part, ()))]
        for group, (paths, linears) in groups.items()
        for linear in linears
        if not linear.name.startswith(KEPT)
        for part, _ in parts(linear)
    }


def parts(linear: Linear) -> tuple[tuple[str, int], ...]:
    """The checkpoint's matrices in it and their outputs."""
    return linear.parts or ((linear.name, linear.outputs),)
