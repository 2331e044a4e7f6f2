"""`quantization_config` of a checkpoint: which format its matrices have."""

from collections.abc import Mapping
from typing import Literal

from infersim.config.units import short

from .architecture import Quantization
from .fields import Fields

# quant_method -> bits and type of a weight, weights under one scale; None: stated by the config
METHODS: dict[str, tuple[int | None, Literal["int", "float"], int | None]] = {
    "awq": (None, "int", None),
    "compressed-tensors": (None, "int", None),
    "fbgemm_fp8": (8, "float", 0),
    "fp8": (8, "float", 0),
    "gptq": (None, "int", None),
    "modelopt": (None, "float", None),
    "mxfp4": (4, "float", 32),  # OCP microscaling: blocks of 32
}
MODELOPT = {"FP8": (8, 0), "NVFP4": (4, 16)}  # quant_algo: bits, weights under one scale
KEPT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")


def read_quantization(model_fields: Fields) -> Quantization | None:
    """The description, None where the config has none; problems are noted in `model_fields`."""
    config = model_fields.config.get("quantization_config")
    if config is None:
        return None
    where = f"{model_fields.where}quantization_config"
    fields = Fields(config if isinstance(config, Mapping) else {}, f"{where}.")
    fields.problems = model_fields.problems  # one list for the whole file
    method = fields.text("quant_method", "")
    if method not in METHODS:
        known = ", ".join(METHODS)
        fields.problem("quant_method", f"{'unknown ' + repr(method[:50]) if method else 'missing'}; known: {known}")
        return None
    bits, kind, group_size = METHODS[method]
    if method == "compressed-tensors":
        fields = _weights(fields)
        given = fields.text("type", "int")
        if given not in ("int", "float"):
            fields.problem("type", f"must be int or float (got {given[:50]!r})")
        kind = "float" if given == "float" else "int"
    if method == "modelopt":
        algo = fields.text("quant_algo", "").upper()
        if algo not in MODELOPT:
            fields.problem("quant_algo", f"must be one of {', '.join(MODELOPT)} (got {algo[:50]!r})")
        bits, group_size = MODELOPT.get(algo, (8, 0))
    if bits is None:
        bits = fields.integer("bits", "num_bits", "w_bit", most=16)
    if group_size is None:
        group_size = max(fields.integer("group_size", "q_group_size", default=0, least=-1), 0)  # -1: one per channel
    block = fields.config.get("weight_block_size") or []
    if not isinstance(block, list) or any(type(side) is not int or side < 1 for side in block):
        fields.problem("weight_block_size", "must be a list of whole numbers >= 1, such as [128, 128]")
        block = []
    kept: list = next((config[key] for key in KEPT if isinstance(config.get(key), list)), [])
    return Quantization(method, bits, kind, group_size, tuple(block), tuple(map(str, kept)))


def _weights(fields: Fields) -> Fields:
    """The weights' entry of the first group of a compressed-tensors config."""
    groups = fields.config.get("config_groups")
    name, group = next(iter(groups.items()), ("", None)) if isinstance(groups, Mapping) else ("", None)
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        fields.problem("config_groups", "must hold a group with weights: {num_bits, type, group_size}")
        weights = {"num_bits": 8}
    inner = Fields(weights, f"{fields.where}config_groups.{short(name)}.weights.")
    inner.problems = fields.problems
    return inner
