"""A Hugging Face config.json as a `Model`: one function per family, found by `model_type`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infersim.config.errors import InputError
from infersim.config.units import short

from . import classic, dense, hybrid, sparse
from .architecture import Model
from .fields import Fields
from .modules import with_schemes
from .quantization import read_quantization

FAMILIES: dict[str, Callable[[Fields], Model]] = {
    "bloom": classic.bloom,
    "deepseek_v2": sparse.deepseek_v2,
    "deepseek_v3": sparse.deepseek_v3,
    "deepseek_v32": sparse.deepseek_v32,
    "falcon": classic.falcon,
    "gemma2": dense.gemma2,
    "gemma3": dense.gemma3,
    "gemma3_text": dense.gemma3,
    "glm_moe_dsa": sparse.deepseek_v32,
    "gpt2": classic.gpt2,
    "gpt_neox": classic.gpt_neox,
    "gpt_oss": sparse.gpt_oss,
    "kimi_k2": sparse.deepseek_v3,
    "llama": dense.llama,
    "llama4": sparse.llama4,
    "llama4_text": sparse.llama4,
    "mimo_v2_flash": sparse.mimo_v2_flash,
    "minimax_m2": sparse.minimax_m2,
    "mistral": dense.mistral,
    "mixtral": sparse.mixtral,
    "opt": classic.opt,
    "phi": classic.phi,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen3_5": hybrid.qwen3_5,
    "qwen3_5_moe": hybrid.qwen3_next,
    "qwen3_5_moe_text": hybrid.qwen3_next,
    "qwen3_5_text": hybrid.qwen3_5,
    "qwen3_moe": sparse.qwen3_moe,
    "qwen3_next": hybrid.qwen3_next,
    "t5": classic.t5,
}

NOT_MODELLED = {
    "deepseek_v4": "compressed sparse attention and hyper-connections",
    "gemma4": "global layers with a head dimension of their own and keys used as values",
    "gemma4_text": "global layers with a head dimension of their own and keys used as values",
    "nemotron_h": "Mamba-2 layers",
}
"""Families that we know and cannot yet read, and what of them is missing."""

SHARED = ("model_type", "quantization_config", "tie_word_embeddings")
"""Fields of a multimodal config.json that hold for its text_config where that has none of its own."""


def model_from_config(config: Mapping[str, Any], name: str, where: str = "") -> Model:
    """The text model that a config.json describes (a `text_config` inside it, where there is one).

    `where` (default: name) stands in front of errors and becomes the model's source. InputError names an unknown
    family, and every missing or wrong field, all at once.
    """
    where = where or name
    if not isinstance(config, Mapping):
        raise InputError(f"{where}: must be a JSON object of model fields (got {short(config)})")
    outer, prefix = config, f"{where}: "
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        shared = {key: config[key] for key in SHARED if key in config}
        config, prefix = {**shared, **inner}, f"{where}: text_config."
    elif inner is not None:
        raise InputError(f"{where}: text_config: must be a JSON object (got {short(inner)})")
    family = config.get("model_type")
    if not isinstance(family, str):
        got = "missing" if family is None else f"must be a text (got {short(family)})"
        raise InputError(f"{prefix}model_type: {got}; must be one of {len(FAMILIES)} families, such as llama")
    if family in NOT_MODELLED:
        raise InputError(f"{prefix}model_type: {family} is not modelled yet: it has {NOT_MODELLED[family]}")
    if family not in FAMILIES:
        raise InputError(f"{prefix}model_type: unknown family {short(family)}{_relatives(family)}")
    fields = Fields(config, prefix)
    model = FAMILIES[family](fields)
    found = read_quantization(fields)
    fields.check()
    source = f"{where}, text part" if config is not outer else where
    model = replace(model, name=name, family=family, source=source)
    if found is None:
        return model
    quantization, rules = found
    unclear: list[str] = []
    model = with_schemes(model, rules, unclear)
    for problem in unclear[:1]:
        fields.problem("quantization_config", problem)
    fields.check()
    return replace(model, quantization=quantization)


def _relatives(family: str) -> str:
    """A family that is meant, misspelt: one letter more, less or other than a known one's (lama). What is only spelt
    alike is another architecture, and would give other numbers without a word."""
    close = [known for known in FAMILIES if _one_apart(family.lower(), known)]
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; {len(FAMILIES)} families are known, and no other's numbers would hold for it"


def _one_apart(a: str, b: str) -> bool:
    """Whether one edit (a separator's too) makes one word of the other, digits apart, which are versions."""
    if a.replace("-", "_") == b:
        return True
    a, b = sorted((a, b), key=len)
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if len(b) - len(a) > 1 or len(b) < 4 or b[i : i + 1].isdigit() or a[i : i + 1].isdigit():
        return False
    return a[i:] == b[i + 1 :] or (len(a) == len(b) and a[i + 1 :] == b[i + 1 :])
