"""The vision tower of a multimodal checkpoint: its parameters, and its largest image, on which vLLM profiles memory.

Encoders as Hugging Face's classes have them. A tower of another kind counts nothing, which the model's source says:
"text part".
"""

from collections.abc import Mapping
from typing import Any

from .architecture import Vision
from .fields import Fields

QWEN = {"qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_vl_moe": 32, "qwen3_5": 32, "qwen3_5_moe": 32}
"""model_type -> pixels on a side of what becomes one token (patch x merge)"""
QWEN_TOKENS = 16384
"""tokens of the largest image that their processors let through (preprocessor_config.json: longest_edge)"""


def read_vision(config: Mapping[str, Any], where: str) -> Vision | None:
    """The tower of a whole config.json, None where there is none or one of a kind that is not known."""
    inner = config.get("vision_config")
    if not isinstance(inner, Mapping):
        return None
    fields, family = Fields(inner, f"{where}vision_config."), str(config.get("model_type"))
    if family in QWEN:
        found = _qwen(fields, family)
    elif fields.text("model_type", "") in ("siglip_vision_model", "pixtral"):
        found = _vit(fields, config, fields.text("model_type", "") == "pixtral")
    else:
        return None
    fields.check()
    return found


def _encoder(h: int, f: int, depth: int, gated: bool) -> int:
    """Matrices of all blocks: four of attention, two or three of the MLP."""
    return depth * (4 * h * h + (3 if gated else 2) * h * f)


def _qwen(fields: Fields, family: str) -> Vision:
    h, f = fields.integer("hidden_size", default=1152), fields.integer("intermediate_size", default=4304)
    depth, out = fields.integer("depth", default=27), fields.integer("out_hidden_size", default=3584)
    patch, merge = fields.integer("patch_size", default=16), fields.integer("spatial_merge_size", default=2) ** 2
    gated = family == "qwen2_5_vl"
    pixels = 3 * patch * patch * fields.integer("temporal_patch_size", default=2)
    positions = fields.integer("num_position_embeddings", default=0, least=0)
    embedding = (pixels + positions) * h
    mergers = 1 + len(fields.integers("deepstack_visual_indexes"))
    params = embedding + _encoder(h, f, depth, gated) + mergers * merge * h * (merge * h + out)
    return Vision(params, h, f, gated, QWEN_TOKENS * merge, QWEN_TOKENS, pixels, True, positions > 0)


def _vit(fields: Fields, config: Mapping[str, Any], gated: bool) -> Vision:
    """SigLIP (Gemma 3) and Pixtral (Mistral), with the projector behind them."""
    h, f = fields.integer("hidden_size", default=1024), fields.integer("intermediate_size", default=4096)
    depth, patch = fields.integer("num_hidden_layers", default=24), fields.integer("patch_size", default=14)
    patches = (fields.integer("image_size", default=1540 if gated else 896) // patch) ** 2
    text = config.get("text_config")
    out = Fields(text if isinstance(text, Mapping) else {}, fields.where).integer("hidden_size", default=h)
    if gated:
        merge = int(config.get("spatial_merge_size") or 1) ** 2
        projector, tokens = (merge * h * h if merge > 1 else 0) + out * (h + out), patches // merge
    else:
        projector, tokens = h * out + patches * h, int(config.get("mm_tokens_per_image") or 256)
    pixels = 3 * patch * patch
    return Vision(pixels * h + _encoder(h, f, depth, gated) + projector, h, f, gated, patches, tokens, pixels, gated)
