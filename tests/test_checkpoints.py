"""Quantised checkpoints: which matrices, in which format, by the names that the checkpoint gives them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import SHARED, needs_shared

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.floors import floor_ttft
from infersim.cost.formats import Kernels, parameters_by_format, scheme_format
from infersim.cost.memory import memory_waterfall, weight_bytes
from infersim.cost.operator import evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.sharding import check_modelled
from infersim.deployment import deploy
from infersim.models.architecture import MoE, counted
from infersim.models.catalog import load_model
from infersim.models.huggingface import model_from_config
from infersim.models.vision import read_vision

H100, H200 = load_hardware("h100-sxm"), load_hardware("h200-sxm")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
ALL = {"attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.gate_proj", "mlp.up_proj",
       "mlp.down_proj"}  # fmt: skip


def made(quantization, base=LLAMA):
    return model_from_config(base | {"quantization_config": quantization}, "x")


def quantised(quantization, base=LLAMA):
    """Layer by layer: matrix -> format."""
    return [{key: scheme_format(scheme) for key, scheme in layer.schemes} for layer in made(quantization, base).layers]


def compressed(weights, inputs=None, targets=("Linear",), **more):
    groups = {"group_0": {"targets": list(targets), "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups} | more


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq_marlin", "bits": 8, "group_size": -1}, "int8_wo"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "mxfp8"}, "mxfp8"),
        ({"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"}, "mxfp8"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, "nvfp4_wo"),
        ({"quant_method": "auto_awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "inc", "bits": 4, "group_size": 128, "data_type": "int"}, "int4"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "data_type": "int"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "fp8"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}, "mxfp4"),
        (compressed(INT8, INT8), "int8"),
        (compressed(INT8), "int8_wo"),
        (compressed(FLOAT8, FLOAT8), "fp8"),
        (compressed(FLOAT8), "fp8_wo"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 64}), "int4"),
        (compressed({"num_bits": 4, "type": "int"}, FLOAT8), "int4_fp8"),
        (compressed({"num_bits": 4, "type": "int"}, INT8), "int4_int8"),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}), "nvfp4_wo"),
    ],
)
def test_each_quantiser_says_its_format(quantization, name):
    assert quantised(quantization) == [dict.fromkeys(ALL, name)] * 4


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["model.layers.1.self_attn.o_proj"], {1: {"attention.o_proj"}}),
        (["model.language_model.layers.1.self_attn.o_proj"], {1: {"attention.o_proj"}}),
        (["model.layers.2.mlp"], {2: {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}}),
        (["down_proj"], {i: {"mlp.down_proj"} for i in range(4)}),
        (["model.layers.*.mlp.down_proj"], {i: {"mlp.down_proj"} for i in range(4)}),
        (["model.layers.0*"], {0: ALL}),
        ([r"re:.*\.layers\.[13]\.self_attn\.q_proj$"], {1: {"attention.q_proj"}, 3: {"attention.q_proj"}}),
        # names that sound like parts of the text model and are none
        (["lm_head", "gate", "model.visual.blocks.0.attn", "vision_tower.encoder.layers.1.self_attn.o_proj"], {}),
        (["model.layers.1.self_attn.indexer.weights_proj", "model.layers.1.mlp.gate", "linear_attn.conv1d"], {}),
        (["model.layers.11.self_attn.o_proj", "re:.*visual.*", "re:self_attn"], {}),
    ],
)
def test_a_module_is_left_by_its_own_name(words, left):
    """Layer 1 is not layer 11, a router not a gate_proj, a vision tower not the text model."""
    expected = [ALL - left.get(i, set()) for i in range(4)]
    for quantization in (
        {"quant_method": "fp8", "modules_to_not_convert": words},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": words},
        compressed(FLOAT8, FLOAT8, ignore=words),
    ):
        assert [set(layer) for layer in quantised(quantization)] == expected


def test_groups_have_formats_of_their_own():
    """The first group that names a module decides, before one for every Linear."""
    groups = {
        "all": {"targets": ["Linear"], "weights": FLOAT8, "input_activations": FLOAT8},
        "few": {"targets": [r"re:.*mlp\.down_proj$"], "weights": {"num_bits": 4, "type": "int"}},
    }
    found = quantised({"quant_method": "compressed-tensors", "config_groups": groups})
    assert found == [dict.fromkeys(ALL, "fp8") | {"mlp.down_proj": "int4"}] * 4
    layers = {"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}, "model.layers.3.mlp": {"quant_algo": "NVFP4"}}
    mixed = quantised({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    mlp = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "nvfp4")
    assert mixed == [{"attention.o_proj": "fp8"}, {}, {}, mlp]
    dynamic = {r"-:.*layers\.0\..*": {}, r"+:.*\.o_proj": {"bits": 8}}
    gptq = quantised({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert gptq == [{}] + [dict.fromkeys(ALL, "int4") | {"attention.o_proj": "int8_wo"}] * 3


def test_experts_of_a_mixture_are_one():
    words = ["model.layers.1.mlp.experts.0.up_proj"]
    attention = {key for key in ALL if key.startswith("attention")}
    assert set(quantised({"quant_method": "fp8"}, MOE)[0]) == attention | {"experts"}
    assert set(quantised({"quant_method": "mxfp4"}, MOE)[0]) == {"experts"}
    left = quantised({"quant_method": "fp8", "modules_to_not_convert": ["re:.*experts.*"]}, MOE)
    assert set(left[0]) == attention
    with pytest.raises(InputError, match="layer 1 has experts, or matrices of one, in different formats"):
        made({"quant_method": "fp8", "modules_to_not_convert": words}, MOE)
    with pytest.raises(InputError, match="layer 1 has experts"):
        made({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.mlp.experts.5"]}, MOE)


WHOLE = (
    compressed(FLOAT8 | {"strategy": "channel", "group_size": None, "block_structure": None}, FLOAT8,
               ignore=["lm_head", "re:.*visual.*"], format="float-quantized", kv_cache_scheme=FLOAT8,
               sparsity_config={"format": "dense"}, transform_config={}),
    {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "NVFP4", "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}, "model.layers.0.mlp": {"quant_algo": "NVFP4"}}},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "dynamic": {
        "-:.*q_proj": {}, "+:.*mlp.*": {"bits": 8, "group_size": 32}},
     "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "modules_to_not_convert": None},
    {"quant_method": "auto-round", "bits": 4, "group_size": 128, "data_type": "int", "act_bits": 16,
     "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}}},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "group_size": None},
     "input_tensors": {"dtype": "fp8_e4m3"}}, "exclude": ["lm_head"],
     "layer_quant_config": {"*down_proj": {"weight": {"dtype": "int4", "group_size": 32}}}},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
     "llm_int8_skip_modules": ["lm_head", "model.layers.1.self_attn"]},
)  # fmt: skip
"""as checkpoints have it"""
ODD = st.sampled_from(
    (None, 0, -1, 3, 5, 10**30, float("nan"), True, "", "x", "float", "re:((", "*", "[", "fp4", "a" * 3000, "\n")
) | st.sampled_from(([], [None], ["re:(("], [[1]], {}, {"weights": None}, {"re:((": {}}, {"x": []}))


def places(config, path=()):
    """Paths of all values inside."""
    inner = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return [found for key, value in inner for found in ((*path, key), *places(value, (*path, key)))]


def changed(config, path, value):
    """The config with another value at the path."""
    key, *rest = path
    copied = dict(config) if isinstance(config, dict) else list(config)
    copied[key] = changed(config[key], rest, value) if rest else value
    return copied


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_an_odd_quantization_config_is_read_or_refused_by_its_key(data):
    """Any value anywhere in what nine quantisers write: a model whose bytes are counted, or a line for each problem."""
    config = data.draw(st.sampled_from(WHOLE))
    for _ in range(data.draw(st.integers(1, 2))):
        config = changed(config, data.draw(st.sampled_from(places(config))), data.draw(ODD))
    base = data.draw(st.sampled_from((LLAMA, MOE)))
    lines: tuple[str, ...] = ()
    try:
        model = made(config, base)
        placement = Placement(model, H100)
        check_modelled(placement)
    except InputError as error:
        lines = error.problems
    assert all("\n" not in line and len(line) < 700 for line in lines)
    assert all("quantization_config" in line or line.startswith(("model: x: ", "precision.")) for line in lines)
    plain = weight_bytes(Placement(model_from_config(base, "x"), H100))
    assert lines or model.num_params / 2 < weight_bytes(placement) < plain


def test_a_bitsandbytes_matrix_is_copied_unless_for_one_token():
    """4.5 bits of a weight read; from two tokens on 16 bits written and read besides (matmul_4bit)."""
    model = made({"quant_method": "bitsandbytes", "load_in_4bit": True})
    (up,) = (op for op in forward_pass(Placement(model, H100)) if op.name == "gate_up_proj")
    size = 128 * 2 * 384
    for tokens, read in ((1, 4.5 / 8), (2, 4.5 / 8 + 4), (9, 4.5 / 8 + 4)):
        sums = up.routed({"step": 1.0, "tokens": float(tokens)})
        assert evaluate(up.weights, sums) == size * read


def test_older_checkpoints_say_compression_config():
    model = model_from_config(LLAMA | {"compression_config": compressed(FLOAT8, FLOAT8)}, "x")
    assert model.quantization == made(compressed(FLOAT8, FLOAT8)).quantization


@pytest.mark.parametrize(
    ("quantization", "line"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quant_method: unknown 'hqq'; known: "),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit: must be true; LLM.int8() splits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "must be nf4 or fp4"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits: must be 16, "),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type: must be int, "),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
            "global_quant_config.weight.dtype: must be one of ",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "int8"}},
                "layer_type_quant_config": {"nn.Linear": {}},
            },
            "layer_type_quant_config: formats by class",
        ),
        (compressed(FLOAT8, FLOAT8, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format: "),
        (compressed(FLOAT8, FLOAT8, transform_config={"config_groups": {"u": {}}}), "transform_config: rotations"),
        (compressed(FLOAT8, FLOAT8, targets=[]), "names no matrix of the text model's layers"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": "q_proj"}, "must be a list of modules"),
        ({"quant_method": "modelopt", "quant_algo": "INT3"}, "quant_algo: must be one of FP8, "),
        (compressed(FLOAT8, FLOAT8, ["MoEGate"]), "targets: 'MoEGate' is not modelled; must be Linear, "),
        (compressed(FLOAT8, FLOAT8, ["re:(("]), "no regular expression: "),
        (compressed(FLOAT8, FLOAT8, ["model.visual.blocks.0"]), "names no matrix of the text model's layers"),
        (compressed(FLOAT8, FLOAT8, format="marlin-24"), "format: sparsity is not modelled"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head: a quantised LM head is not modelled"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers: must be a list of modules' names"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(quantization, line):
    with pytest.raises(InputError) as error:
        made(quantization)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("quantization", "line"),
    [
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "int weights of 3 bits in groups of 128"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "float weights of 8 bits in blocks of 64 x 64"),
        (compressed(FLOAT8, kv_cache_scheme={"num_bits": 2, "type": "float"}), "its KV cache in 'float' of 2 bits"),
    ],
)
def test_a_format_that_is_not_modelled_needs_another(quantization, line):
    model = made(quantization)
    with pytest.raises(InputError, match=line):
        check_modelled(Placement(model, H100))
    check_modelled(Placement(model, H100, Precision(weights="bf16", kv_cache="bf16")))


def test_bytes_are_those_of_the_modules():
    """Closed form: what is left of the 16 bits is one byte less for each quantised weight, scales apart."""
    plain = weight_bytes(Placement(model_from_config(LLAMA, "x"), H100))
    words = ["model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"]
    model = made({"quant_method": "fp8", "modules_to_not_convert": words})
    matrices = 4 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 384)
    assert plain - weight_bytes(Placement(model, H100)) == matrices - 128 * 128 - 128 * 384
    for tensor in (2,):
        placement = Placement(model, H100, Precision(), Parallelism(tensor=tensor))
        bf16 = Placement(model, H100, Precision(weights="bf16"), Parallelism(tensor=tensor))
        assert weight_bytes(bf16) - weight_bytes(placement) == (matrices - 128 * 128 - 128 * 384) / tensor


def test_a_fused_matrix_of_two_formats_is_two_multiplications():
    """FLOPs and weights stay; only the layer concerned has one kernel more."""
    whole = made({"quant_method": "fp8"})
    torn = made({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.2.self_attn.q_proj"]})
    passes = [forward_pass(Placement(model, H100)) for model in (whole, torn)]
    kernels, flops, read = (
        [sum(op.count * amount(op) for op in one if op.operator_class == "gemm") for one in passes]
        for amount in (lambda op: 1, lambda op: op.flops.get("tokens", 0), lambda op: op.weights.get("step", 0))
    )
    assert kernels[1] == kernels[0] + 1
    assert flops[1] == flops[0]
    assert read[1] == read[0] + 128 * 128


def test_parameters_by_format_add_up():
    """Every parameter is in one group and format; layer 2's query projection alone is left of attention."""
    model = made({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.2.self_attn.q_proj"]}, MOE)
    found = parameters_by_format(model)
    assert sum(sum(formats.values()) for formats in found.values()) == model.num_params
    attention = 2 * 128 * 128 + 2 * 128 * 32
    assert found["attention"] == {"fp8": 4 * attention - 128 * 128, "16 bit": 128 * 128}
    assert found["experts"] == {"fp8": 4 * 8 * 3 * 128 * 64}
    for name in ("T5-3B", "DeepSeek-V3", "Qwen3-Next-80B-A3B", "OPT-13B"):
        model = load_model(name)
        assert sum(sum(formats.values()) for formats in parameters_by_format(model).values()) == model.num_params


def test_activations_decide_the_arithmetic():
    def kernel(quantization):
        model = made(quantization)
        return Kernels(Placement(model, H100)).of(model.layers[0], "mlp.up_proj")

    for weights in (INT8, FLOAT8, {"num_bits": 4, "type": "int"}):
        assert kernel(compressed(weights)).rate == "bf16"
        assert kernel(compressed(weights)).dequantised
        assert kernel(compressed(weights, FLOAT8 if weights is FLOAT8 else INT8)).rate in ("fp8", "int8")


def test_the_checkpoint_decides_the_kv_cache():
    """auto is the checkpoint's; what the user says goes first; without either it is the activations' format."""
    fp8 = compressed(FLOAT8, FLOAT8, kv_cache_scheme=FLOAT8)
    assert Placement(made(fp8), H100).precision.kv_cache == "fp8"
    assert Placement(made(fp8), H100, Precision(kv_cache="bf16")).precision.kv_cache == "bf16"
    assert Placement(made(compressed(FLOAT8)), H100).precision.kv_cache == "bf16"
    assert Placement(made(compressed(FLOAT8)), H100, Precision(activations="fp16")).precision.kv_cache == "fp16"
    algo = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert Placement(made(algo), H100).kv_bytes == 1


def test_modelopts_file_is_read_beside_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path).quantization is None
    beside = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert Placement(load_model(tmp_path), H100).kv_bytes == 1
    assert all(len(layer.schemes) == len(ALL) for layer in load_model(tmp_path).layers)


def test_indexers_are_shared_by_layers():
    """A shared layer has an indexer's parameters, keys and kernels as little as one without, and sees as few keys."""
    config = {"model_type": "glm_moe_dsa", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64,
              "num_hidden_layers": 4, "num_attention_heads": 2,
              "num_experts_per_tok": 1, "n_routed_experts": 2, "moe_intermediate_size": 32,
              "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
              "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 2, "index_head_dim": 128,
              "index_topk": 4}  # fmt: skip
    every = model_from_config(config, "x")
    some = model_from_config(config | {"indexer_types": ["full", "shared", "shared", "full"]}, "x")
    indexer = 32 * 2 * 128 + 64 * 128 + 64 * 2 + 2 * 128
    assert every.num_params - some.num_params == 2 * indexer
    assert (every.index_bytes_per_token, some.index_bytes_per_token) == (4 * 132, 2 * 132)
    found = {op.name: op for op in forward_pass(Placement(some, H200)) if op.name == "index_decode"}
    assert found
    windows = {op.window for op in forward_pass(Placement(some, H200)) if op.name == "attention_decode"}
    assert windows == {4}
    with pytest.raises(InputError, match=r"indexer_types\[0\]: must be full"):
        model_from_config(config | {"indexer_types": ["shared"] * 4}, "x")


def test_transformers_5_writes_num_local_experts():
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert model_from_config(renamed, "x").num_params == model_from_config(MOE, "x").num_params
    assert isinstance(model_from_config(renamed, "x").layers[0].mlp, MoE)


@pytest.mark.parametrize("family", ["jamba", "mamba", "phimoe", "qwen3_vl_moe_text", "gemma", "llama5"])
def test_a_family_that_is_spelt_alike_is_no_suggestion(family):
    with pytest.raises(InputError) as error:
        model_from_config({"model_type": family}, "x")
    assert "did you mean" not in str(error.value)


def test_layers_that_are_alike_stay_one():
    words = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
    model = made({"quant_method": "fp8", "modules_to_not_convert": words})
    assert sorted(counted(model.layers).values()) == [1, 3]


@needs_shared
@pytest.mark.parametrize(
    ("folder", "hardware", "tensor", "gigabytes"),
    [
        ("ignore_list_405b", H100, 8, 60.9),  # 56.7 GiB
        ("ignore_list_8b", H100, 1, 9.31),
        ("glm5_fp8_config.json", H200, 8, 96.1),
        ("hf_quant_config", H100, 2, 36.4),
    ],
)
def test_published_checkpoints_take_their_size(folder, hardware, tensor, gigabytes):
    model = load_model(SHARED / "cases" / folder)
    placement = Placement(model, hardware, Precision(), Parallelism(tensor=tensor))
    assert weight_bytes(placement) / 1e9 == pytest.approx(gigabytes, rel=0.002)


@needs_shared
def test_published_checkpoints_have_their_parameters():
    indexers = load_model(SHARED / "cases/glm52_indexer")
    assert indexers.num_params / 1e9 == pytest.approx(743.377, abs=5e-4)
    assert Placement(indexers, H200).kv_bytes * indexers.kv_bytes_per_token(1) + indexers.index_bytes_per_token == 92628
    assert load_model(SHARED / "cases/qwen3moe_tf5").num_params / 1e9 == pytest.approx(30.53, abs=5e-3)
    w8a16 = Placement(load_model(SHARED / "cases/w8a16"), H100)
    assert floor_ttft(w8a16, 1024) == pytest.approx(14.7e-3, rel=0.01)


def test_a_vision_tower_takes_memory_and_a_profile_run():
    """Counts are those of transformers 5.24 on the meta device; biases and norms are left out."""
    qwen = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "num_position_embeddings": 2304}  # fmt: skip
    pixtral = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
               "image_size": 1540, "patch_size": 14}  # fmt: skip
    counted = {
        460_730_096: {"model_type": "qwen3_5", "vision_config": qwen | {"out_hidden_size": 5120}},
        566_949_104: {
            "model_type": "qwen3_vl",
            "vision_config": qwen | {"out_hidden_size": 3584, "deepstack_visual_indexes": [8, 16, 24]},
        },
        438_958_080: {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "vision_config": pixtral,
            "text_config": {"hidden_size": 5120},
        },
    }
    for count, config in counted.items():
        assert read_vision(config, "x: ").num_params == pytest.approx(count, rel=2e-3)
    assert read_vision({"model_type": "qwen3_5", "vision_config": None}, "x: ") is None
    with pytest.raises(InputError, match=r"x: vision_config.depth: must be a whole number >= 1 \(got 'deep'\)"):
        read_vision({"model_type": "qwen3_vl", "vision_config": {"depth": "deep"}}, "x: ")
    text = load_model("Qwen3-VL-8B")
    both = replace(text, vision=read_vision(counted[566_949_104], "x: "))
    deployed = deploy("Qwen3-VL-8B", H100, Precision(), Parallelism(), Engine(max_model_len=32768))
    placed = deployed.placement
    plain, seeing = (memory_waterfall(replace(placed, model=m), deployed.engine) for m in (text, both))
    assert seeing.weights_bytes - plain.weights_bytes == 2 * both.vision.num_params
    assert seeing.num_gpu_blocks < plain.num_gpu_blocks


@needs_shared
def test_a_served_vision_model_has_the_blocks_that_vllm_logged():
    """Two RTX 3090: "GPU KV cache size: 302,921 tokens", 2.31 requests of 131,072 and 4.99 GiB (a public deployment,
    2026-08, prefix caching on): 208 blocks, of which a request takes 84 and two states of each of three groups."""
    engine = Engine(preset="vllm-0.33", gpu_memory_utilization=0.92, max_model_len=131072, max_num_seqs=2,
                    max_num_batched_tokens=8192, enable_prefix_caching=True)  # fmt: skip
    precision, two = Precision(weights="fp8_block", kv_cache="fp8"), Parallelism(tensor=2)
    model = str(SHARED / "cases/qwen35_27b")
    memory = deploy(model, load_hardware("rtx-3090"), precision, two, engine).memory
    assert (memory.block_size, memory.num_gpu_blocks) == (1568, 208)
    assert int(memory.max_concurrency * 131072) == 302_921
    assert memory.kv_bytes / 2**30 == pytest.approx(4.99, abs=0.02)
