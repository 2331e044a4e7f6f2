"""A Hugging Face config.json as a `Model`: one function per family, found by `model_type`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infersim.config.errors import InputError
from infersim.config.units import short

from . import classic, dense, gemma, hybrid, sparse
from .architecture import Model
from .fields import Fields
from .modules import with_schemes
from .quantization import read_quantization
from .recipes import RECIPES
from .vision import read_vision

FAMILIES: dict[str, Callable[[Fields], Model]] = RECIPES | {
    "axk1": sparse.axk1,
    "bailing_hybrid": hybrid.bailing_hybrid,
    "bamba": hybrid.bamba,
    "biogpt": classic.biogpt,
    "bloom": classic.bloom,
    "chatglm": classic.chatglm,
    "codegen": classic.gptj,
    "dbrx": classic.dbrx,
    "deepseek_v2": sparse.deepseek_v2,
    "deepseek_v3": sparse.deepseek_v3,
    "deepseek_v32": sparse.deepseek_v32,
    "deepseek_v4": sparse.deepseek_v4,
    "falcon": classic.falcon,
    "falcon_h1": hybrid.falcon_h1,
    "falcon_mamba": hybrid.mamba,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "glm4_moe_lite": sparse.deepseek_v3,
    "glm5_next_text": hybrid.glm5_next,
    "glm_moe_dsa": sparse.deepseek_v32,
    "gpt2": classic.gpt2,
    "gpt_bigcode": classic.gpt_bigcode,
    "gpt_neo": classic.gpt_neo,
    "gpt_neox": classic.gpt_neox,
    "gptj": classic.gptj,
    "granitemoehybrid": hybrid.granite_hybrid,
    "hy_v4": sparse.hy_v4,
    "jamba": hybrid.jamba,
    "kimi_k2": sparse.deepseek_v3,
    "kimi_linear": hybrid.kimi_linear,
    "laguna": sparse.laguna,
    "lara_mini": hybrid.lara_mini,
    "lfm2": hybrid.lfm2,
    "lfm2_moe": hybrid.lfm2,
    "lfm3": hybrid.lfm3,
    "llama4_text": sparse.llama4,
    "longcat_flash": sparse.longcat_flash,
    "mamba": hybrid.mamba,
    "mamba2": hybrid.mamba2,
    "mimo_v2_flash": sparse.mimo_v2_flash,
    "minicpm3": sparse.latent_dense,
    "minimax": hybrid.minimax,
    "minimax_m2": sparse.minimax_m2,
    "minimax_m3_vl_text": sparse.minimax_m3,
    "mistral": dense.mistral,
    "mistral4": sparse.deepseek_v2,
    "mixtral": sparse.mixtral,
    "mpt": classic.mpt,
    "nemotron_h": hybrid.nemotron_h,
    "olmo_hybrid": hybrid.olmo_hybrid,
    "openai-gpt": classic.openai_gpt,
    "opt": classic.opt,
    "persimmon": classic.persimmon,
    "phi": classic.phi,
    "phi3": dense.phi3,
    "qwen": classic.qwen,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen3_5_moe_text": hybrid.qwen3_next,
    "qwen3_5_text": hybrid.qwen3_5,
    "qwen3_moe": sparse.qwen3_moe,
    "qwen3_next": hybrid.qwen3_next,
    "sarvam_mla": sparse.deepseek_v3,
    "step3p5": sparse.step3p5,
    "t5": classic.t5,
    "xglm": classic.biogpt,
    "youtu": sparse.latent_dense,
}
"""model_type -> how its config is read"""
SAME_TEXT = {
    "apertus1p5_text": "apertus",
    "bailing_moe_v2": "bailing_moe",
    "emu3_text_model": "llama",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm5_next": "glm5_next_text",
    "gpt-sw3": "gpt2",
    "granite4_vision_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "iquestcoder": "llama",
    "llama4": "llama4_text",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "paddleocr_vl": "ernie4_5",
    "paddleocr_vl_text": "ernie4_5",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "sarvam_moe": "glm4_moe",
}
"""model_type -> the family whose text model it has (its positions on an image have two axes, which costs nothing)"""

NOT_MODELLED = {
    "mllama": "cross attention to images",
    "recurrent_gemma": "gated linear recurrences",
    "zamba2": "attention whose matrices layers share",
}
"""Families that we know and cannot yet read, and what of them is missing."""

INNER = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where a multimodal config.json has its text model: the latter two are InternVL's, DeepSeek-VL2's and others'."""
SHARED = ("model_type", "quantization_config", "tie_word_embeddings")
"""Fields of a multimodal config.json that hold for its text_config where that has none of its own."""


def model_from_config(config: Mapping[str, Any], name: str, where: str = "") -> Model:
    """The text model that a config.json describes (one of INNER inside it, where there is one).

    `where` (default: name) stands in front of errors and becomes the model's source. InputError names an unknown
    family, and every missing or wrong field, all at once.
    """
    where = where or name
    if not isinstance(config, Mapping):
        raise InputError(f"{where}: must be a JSON object of model fields (got {short(config)})")
    outer, prefix = config, f"{where}: "
    for key in INNER:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            outer = config
            shared = {name: config[name] for name in SHARED if name in config}
            config, prefix = {**shared, **inner}, f"{prefix}{key}."
        elif inner is not None:
            raise InputError(f"{where}: {key}: must be a JSON object (got {short(inner)})")
    family = config.get("model_type")
    if not isinstance(family, str):
        got = "missing" if family is None else f"must be a text (got {short(family)})"
        raise InputError(f"{prefix}model_type: {got}; must be one of {len(FAMILIES)} families, such as llama")
    if family in NOT_MODELLED:
        raise InputError(f"{prefix}model_type: {family} is not modelled yet: it has {NOT_MODELLED[family]}")
    if SAME_TEXT.get(family, family) not in FAMILIES:
        raise InputError(f"{prefix}model_type: unknown family {short(family)}{_relatives(family)}")
    fields = Fields(config, prefix)
    model = FAMILIES[SAME_TEXT.get(family, family)](fields)
    found = read_quantization(fields)
    fields.check()
    vision = read_vision(outer, f"{where}: ")
    others = config is not outer or any(fields.has(f"{part}_config") for part in ("vision", "audio"))
    source = f"{where}, text part" if others and not vision else where
    model = replace(model, name=name, family=family, source=source, vision=vision)
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
