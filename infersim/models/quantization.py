"""`quantization_config` of a checkpoint, or hf_quant_config.json beside it: which matrices it quantises, and how."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infersim.config.units import short

from .architecture import Quantization, Scheme
from .fields import Fields
from .modules import EVERYTHING, Rules

FP8 = Scheme(8, "float", input_bits=8)
MXFP4 = Scheme(4, "float", 32)
INT4 = Scheme(4, "int", 128)
NVFP4 = Scheme(4, "float", 16, input_bits=4)
NF4 = Scheme(4, "float", 64)
MXFP8 = Scheme(8, "float", 32, input_bits=8)
BLOCKS = Scheme(8, "float", block_size=(128, 128), input_bits=8)  # vLLM quantises inputs in groups of 128
MODELOPT = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "FP8_PB_WO": BLOCKS,
    "FP8_BLOCK_SCALES": BLOCKS,
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": Scheme(4, "float", 16),
    "NVFP4_AWQ": NVFP4,
    "W4A16_AWQ": INT4,
    "W4A8_AWQ": Scheme(4, "int", 128, input_bits=8),
}
"""quant_algo of ModelOpt"""
MIXED = "MIXED_PRECISION"
KEPT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude", "llm_int8_skip_modules")
KV_CACHES = {(8, "float"): "fp8", (4, "float"): "nvfp4"}
ALL = sorted(EVERYTHING)
Group = tuple[Iterable[str], Scheme | None]


def read_quantization(model_fields: Fields) -> tuple[Quantization, Rules] | None:
    """The description and what it says of each module, None where the config has none; problems are noted in
    `model_fields`."""
    config = model_fields.config.get("quantization_config")
    if config is None:  # older checkpoints of llm-compressor have it under this name, and vLLM too
        config = model_fields.config.get("compression_config")
    if config is None:
        return None
    config = config if isinstance(config, Mapping) else {}
    if isinstance(config.get("quantization"), Mapping):  # ModelOpt's own file
        config = {"quant_method": "modelopt", **config["quantization"]}
    config = {"expert_dtype": model_fields.config.get("expert_dtype"), **config}  # DeepSeek-V4 says it outside
    fields = _inner(model_fields, config, "quantization_config")
    method = fields.text("quant_method", "").lower().replace("_", "-")
    method = method.removesuffix("-marlin")
    method = SAME_METHOD.get(method, method)
    if method not in METHODS:
        known = ", ".join(name for name in METHODS)
        given = fields.text("quant_method", "")
        fields.problem("quant_method", f"{'unknown ' + repr(given[:50]) if given else 'missing'}; known: {known}")
        return None
    groups = METHODS[method](fields)
    kept: list[str] = []
    for key in KEPT:
        value = config.get(key)
        if value is not None and (not isinstance(value, list) or any(not isinstance(each, str) for each in value)):
            fields.problem(key, f"must be a list of modules' names (got {short(value)})")
        kept += value if isinstance(value, list) else []
    kv_cache = _kv_cache(fields) or ("fp8" if model_fields.config.get("model_type") == "deepseek_v4" else "")
    return Quantization(method, kv_cache), _rules(fields, kept, groups)


def _inner(fields: Fields, config: Any, key: str) -> Fields:
    """Fields of an object inside; one list of problems for the whole file."""
    inner = Fields(config if isinstance(config, Mapping) else {}, f"{fields.where}{key}.")
    inner.problems = fields.problems
    return inner


def _rules(fields: Fields, kept: list[str], groups: list[Group]) -> Rules:
    try:
        return Rules(map(str, kept), [(list(map(str, targets)), scheme) for targets, scheme in groups])
    except Exception as error:  # re.error, whose name differs between versions of Python
        if "regular expression" not in (type(error).__doc__ or ""):
            raise
        fields.problem("ignore or targets", f"an entry with re: is no regular expression: {error}")
        return Rules((), ())


def _objects(fields: Fields, key: str) -> dict[str, Any]:
    value = fields.config.get(key)
    if value is not None and not isinstance(value, Mapping):
        fields.problem(key, f"must be an object (got {short(value)})")
    return dict(value) if isinstance(value, Mapping) else {}


def _kv_cache(fields: Fields) -> str:
    """The format of the KV cache that it says, as vLLM's `auto` takes it (resolve_kv_cache_dtype_string)."""
    scheme = fields.config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        for known, name in KV_CACHES.items():
            if (bits, kind) == known:
                return name
        return f"{short(kind)} of {short(bits)} bits"
    algo = fields.text("kv_cache_quant_algo", "")
    return algo.lower() if algo.lower() in KV_CACHES.values() else short(algo) if algo else ""


def _fp8(fields: Fields) -> list[Group]:
    usual: Group = (ALL, Scheme(8, "float", block_size=_sides(fields, "weight_block_size"), input_bits=8))
    experts = fields.text("expert_dtype", "fp8")
    if experts not in ("fp8", "fp4"):
        fields.problem("expert_dtype", f"must be fp8 or fp4 (got {experts[:50]!r})")
    # routed experts alone: the shared one stands beside them
    return [(["experts"], MXFP4), usual] if experts == "fp4" else [usual]


def _sides(fields: Fields, key: str) -> tuple[int, ...]:
    block = fields.config.get(key) or []
    if not isinstance(block, list) or any(type(side) is not int or side < 1 for side in block):
        fields.problem(key, "must be a list of whole numbers >= 1, such as [128, 128]")
        return ()
    return tuple(block)


def _group_size(fields: Fields, *names: str) -> int:
    return max(fields.integer(*names, default=0, least=-1), 0)  # -1: one scale per channel


def _integers(fields: Fields) -> Scheme:
    bits = fields.integer("bits", "w_bit", most=16)
    return Scheme(bits, "int", _group_size(fields, "group_size", "q_group_size"))


def _awq(fields: Fields) -> list[Group]:
    return [(ALL, _integers(fields))]


def _gptq(fields: Fields) -> list[Group]:
    """GPTQ, and GPTQModel's `dynamic`: expressions with -: leave modules, others give them bits of their own."""
    usual = _integers(fields)
    if fields.flag("lm_head", False):
        fields.problem("lm_head", "a quantised LM head is not modelled; must be false")
    groups: list[Group] = []
    for pattern, own in _objects(fields, "dynamic").items():
        scheme = None if pattern.startswith("-:") else _changed(_inner(fields, own, f"dynamic.{short(pattern)}"), usual)
        groups.append(([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], scheme))
    only = fields.config.get("modules_in_block_to_quantize")
    if only is not None and not isinstance(only, list):
        fields.problem("modules_in_block_to_quantize", f"must be a list of modules' names (got {short(only)})")
    if not isinstance(only, list) or not only:
        return [*groups, (ALL, usual)]
    names = [name for each in only for name in (each if isinstance(each, list) else [each])]
    return [*groups, (map(str, names), usual)]


def _changed(fields: Fields, usual: Scheme) -> Scheme | None:
    bits = fields.integer("bits", default=usual.bits, most=32)
    group_size = _group_size(fields, "group_size") if fields.has("group_size") else usual.group_size
    return None if bits >= 16 else Scheme(bits, "int", group_size)


def _auto_round(fields: Fields) -> list[Group]:
    """auto-round: integers, with exceptions by module."""
    kind = fields.text("data_type", "int")
    if kind != "int":
        fields.problem("data_type", f"must be int, the one that is modelled (got {kind[:50]!r})")
    if (bits := fields.integer("act_bits", default=16)) < 16:
        fields.problem("act_bits", f"must be 16, the one that is modelled (got {bits})")
    usual = _integers(fields)
    groups: list[Group] = [
        ([name, f"re:{name}"] if any(sign in name for sign in "*\\[(") else [name],
         _changed(_inner(fields, own, f"extra_config.{short(name)}"), usual))
        for name, own in _objects(fields, "extra_config").items()
    ]  # fmt: skip
    return [*groups, (ALL, usual)]


def _compressed_tensors(fields: Fields) -> list[Group]:
    groups = _objects(fields, "config_groups")
    if not groups:
        fields.problem("config_groups", "must hold a group with weights: {num_bits, type, group_size}")
    sparse = _inner(fields, _objects(fields, "sparsity_config"), "sparsity_config")
    for of in (fields, sparse):
        if "24" in of.text("format", "") or (of is sparse and of.text("format", "dense") != "dense"):
            of.problem("format", f"sparsity is not modelled (got {of.text('format', '')[:50]!r})")
    if _objects(fields, "transform_config").get("config_groups"):
        fields.problem("transform_config", "rotations at run time are not modelled; must be empty")
    found: list[Group] = []
    for name, group in groups.items():
        inner = _inner(fields, group, f"config_groups.{short(name)}")
        if not isinstance(inner.config.get("weights"), Mapping):
            fields.problem("config_groups", "must hold a group with weights: {num_bits, type, group_size}")
            continue
        targets = ALL if inner.config.get("targets") is None else inner.config["targets"]
        targets = [str(target) for target in targets] if isinstance(targets, list) else [str(targets)]
        # vLLM reads a class's name where it is one of torch's or its own
        for target in targets:
            if target[:1].isupper() and "." not in target and target not in EVERYTHING:
                inner.problem("targets", f"{short(target)} is not modelled; must be Linear, modules' names, or re:")
        found.append((targets, _scheme(inner)))
    return found


def _scheme(group: Fields) -> Scheme:
    """Weights and inputs of a group of compressed-tensors."""
    weights = _inner(group, group.config["weights"], "weights")
    bits, kind = weights.integer("num_bits", most=16), _type(weights, "int")
    size, block = _group_size(weights, "group_size"), _sides(weights, "block_structure")
    given = group.config.get("input_activations")
    if not isinstance(given, Mapping):
        return Scheme(bits, kind, size, block)
    inputs = _inner(group, given, "input_activations")
    return Scheme(bits, kind, size, block, inputs.integer("num_bits", default=8, most=16), _type(inputs, kind))


def _type(fields: Fields, default: Any) -> Any:
    given = fields.text("type", default)
    if given not in ("int", "float"):
        fields.problem("type", f"must be int or float (got {given[:50]!r})")
    return "float" if given == "float" else "int"


def _modelopt(fields: Fields) -> list[Group]:
    layers = _objects(fields, "quantized_layers")
    if fields.text("quant_algo", "").upper() == MIXED or (layers and not fields.has("quant_algo")):
        if not layers:
            fields.problem("quantized_layers", f"missing; {MIXED} must say each layer's quant_algo")
        return [([name], _algorithm(_inner(fields, own, f"quantized_layers.{short(name)}")))
                for name, own in layers.items()]  # fmt: skip
    if not fields.has("quant_algo") and fields.has("config_groups"):
        return _compressed_tensors(fields)
    return [(ALL, _algorithm(fields))]


def _algorithm(fields: Fields) -> Scheme:
    algo = fields.text("quant_algo", "").upper()
    if algo not in MODELOPT:
        fields.problem("quant_algo", f"must be one of {', '.join(MODELOPT)} (got {algo[:50]!r})")
    scheme = MODELOPT.get(algo, FP8)
    if scheme.group_size and fields.has("group_size"):
        return Scheme(scheme.bits, scheme.type, _group_size(fields, "group_size"), (), scheme.input_bits)
    return scheme


def _quark(fields: Fields) -> list[Group]:
    if _objects(fields, "layer_type_quant_config"):
        fields.problem("layer_type_quant_config", "formats by class of module are not modelled; must be empty")
    groups: list[Group] = [
        ([name], _quark_scheme(_inner(fields, own, f"layer_quant_config.{short(name)}")))
        for name, own in _objects(fields, "layer_quant_config").items()
    ]
    usual = _inner(fields, _objects(fields, "global_quant_config"), "global_quant_config")
    return [*groups, (ALL, _quark_scheme(usual))]


QUARK: dict[str, tuple[int, Any]] = {
    "fp8_e4m3": (8, "float"),
    "int8": (8, "int"),
    "fp4": (4, "float"),
    "int4": (4, "int"),
    "uint4": (4, "int"),
}


def _quark_scheme(fields: Fields) -> Scheme | None:
    """Weights and inputs of one config of AMD's Quark; null weights are left alone."""
    if not fields.has("weight"):
        return None
    given = [_inner(fields, fields.config.get(key), key) for key in ("weight", "input_tensors") if fields.has(key)]
    kinds: list[tuple[int, Any]] = []
    for each in given:
        dtype = each.text("dtype", "")
        if dtype not in QUARK:
            each.problem("dtype", f"must be one of {', '.join(QUARK)} (got {dtype[:50]!r})")
        kinds.append(QUARK.get(dtype, (8, "float")))
    kinds.append((16, "float"))  # inputs as they are, where it says nothing of them
    (bits, kind), (input_bits, input_kind) = kinds[:2]
    return Scheme(bits, kind, _group_size(given[0], "group_size"), (), input_bits, input_kind)


def _bitsandbytes(fields: Fields) -> list[Group]:
    """NF4 or FP4 with an FP32 scale for 64 weights; a double-quantised scale is FP32 again once it is loaded (vLLM)."""
    if not fields.flag("load_in_4bit", False):
        fields.problem("load_in_4bit", "must be true; LLM.int8() splits its inputs, which is not modelled")
    if (kind := fields.text("bnb_4bit_quant_type", "fp4")) not in ("nf4", "fp4"):
        fields.problem("bnb_4bit_quant_type", f"must be nf4 or fp4 (got {kind[:50]!r})")
    return [(ALL, NF4)]


METHODS: dict[str, Callable[[Fields], list[Group]]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm-fp8": lambda fields: [(ALL, FP8)],
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda fields: [(["experts"], MXFP4)],  # gpt-oss: the experts alone
    "mxfp8": lambda fields: [(ALL, MXFP8)],
    "quark": _quark,
}
"""quant_method, with hyphens -> what it says of modules"""
SAME_METHOD = {"auto-awq": "awq", "auto-gptq": "gptq", "deepseek-v4-fp8": "fp8", "gpt-oss-mxfp4": "mxfp4",
               "inc": "auto-round", "intel/auto-round": "auto-round", "modelopt-fp4": "modelopt",
               "modelopt-mixed": "modelopt", "modelopt-mxfp8": "modelopt"}  # fmt: skip
"""other names of vLLM's for them"""
