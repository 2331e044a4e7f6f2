"""Models: parameters to the unit, KV bytes, the catalogue, and what wrong input answers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import SHARED, needs_shared

from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.precision import Precision
from infersim.config.speculation import Speculation
from infersim.cost.drafting import own_bytes
from infersim.cost.memory import weight_bytes
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.models.architecture import MLP, Attention, Layer, Model, MoE
from infersim.models.catalog import catalogue, load_model, names
from infersim.models.huggingface import FAMILIES, NOT_MODELLED, SAME_TEXT, model_from_config

FOLDER = SHARED / "data/model_configs"
EXPECTED = json.loads((FOLDER / "expected_params.json").read_text()) if FOLDER.is_dir() else {}
INLINE = json.loads((FOLDER / "expected_params_inline_configs.json").read_text()) if FOLDER.is_dir() else {}
CONFIGS = sorted(path.name for path in FOLDER.glob("*_config.json"))

# Models beyond the counted ones: total and active parameters in 1e9 that their authors state.
OFFICIAL = {
    "MiniMax-M2.5": (229, 10),
    "GLM-5": (744, 40),
    "MiMo-V2-Flash": (309, 15),
    "gemma-4-26B-A4B": (25.2, 3.8),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.6),
    "Nemotron-H-56B-Base-8K": (56.3, 56.3),
    "DeepSeek-V4-Flash": (284.3, 13),
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def problems(config, name="x"):
    with pytest.raises(InputError) as error:
        model_from_config(config, name)
    assert all("\n" not in line and len(line) < 1000 for line in error.value.problems)
    return error.value.problems


def catalogue_name(file):
    return file.split("--")[1].removesuffix("_config.json")


# --- counts ---------------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize("file", EXPECTED)
def test_counts_agree_with_published_checkpoints_to_the_unit(file):
    model, expected = load_model(FOLDER / file), EXPECTED[file]
    assert model.num_params == expected["params_total"]
    assert model.num_active_params == expected["params_active_incl_embedding"]
    assert model.kv_bytes_per_token(2) == expected["kv_bytes_per_token_bf16_all_layers_full"]


@needs_shared
@pytest.mark.parametrize("name", INLINE)
def test_counts_agree_for_small_configs(name):
    model, expected = model_from_config(INLINE[name]["config"], name), INLINE[name]
    assert (model.num_params, model.num_active_params) == (expected["params_total"], expected["params_active"])


@needs_shared
@pytest.mark.parametrize("file", CONFIGS)
def test_every_config_is_counted_exactly_or_says_what_is_not_modelled(file):
    family = json.loads((FOLDER / file).read_text())["model_type"]
    if family in NOT_MODELLED:
        with pytest.raises(InputError, match=f"{family}.* is not modelled yet: it has {NOT_MODELLED[family]}"):
            load_model(FOLDER / file)
    elif file not in EXPECTED:
        total, active = OFFICIAL[catalogue_name(file)]
        model = load_model(FOLDER / file)
        assert model.num_params == pytest.approx(total * 1e9, rel=2e-3)
        assert model.num_active_params == pytest.approx(active * 1e9, rel=0.11)  # stated without embedding, rounded


@needs_shared
@pytest.mark.parametrize("file", [*EXPECTED, *(file for file in CONFIGS if catalogue_name(file) in OFFICIAL)])
def test_the_catalogue_says_what_the_published_config_says(file):
    ours, theirs = load_model(catalogue_name(file)), load_model(FOLDER / file)
    same = {"name": "", "source": "", "vision": None}  # the catalogue has no towers
    assert replace(ours, **same) == replace(theirs, **same)


# Parameters as the authors' safetensors files count them.
PUBLISHED = {
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Large-2407": 122_610_069_504,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-4B": 4_022_468_096,
    "Phi-3-medium-4k": 13_960_238_080,
    "GPT-2-medium": 354_823_168,
    "BLOOM-176B": 176_247_271_424,
    "Falcon-7B": 6_921_720_704,
    "Falcon-40B": 41_303_293_952,
    "Falcon-180B": 179_522_565_120,
    "FLAN-T5-base": 247_577_856,
    "FLAN-T5-XXL": 11_135_332_352,
}


# Bytes of all tensors, as model.safetensors.index.json of these checkpoints says (its metadata's total_size).
CHECKPOINTS = {
    "Llama-3.1-8B": 16_060_522_496,
    "Llama-3.1-70B": 141_107_412_992,
    "Mistral-7B-v0.1": 14_483_464_192,
    "Mixtral-8x7B-v0.1": 93_405_585_408,
    "Qwen2.5-7B": 15_231_233_024,
    "Qwen3-30B-A3B": 61_064_245_248,
    "gpt-oss-20b": 13_761_264_768,  # MXFP4 experts, the rest in 16 bits
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_take_what_the_checkpoint_has(name):
    """On one GPU, by module and format, with what the server keeps beside them (rotary tables): to 1 %."""
    placement = Placement(load_model(name), load_hardware("h200-sxm"))
    assert weight_bytes(placement) == pytest.approx(CHECKPOINTS[name], rel=0.01)


def test_a_checkpoint_of_fp8_blocks_takes_what_is_published():
    """DeepSeek-V3's files, 688,586,727,753 bytes: the model, its MTP layer, and this one's copies of embedding and head
    (which a server leaves out)."""
    placement = Placement(load_model("DeepSeek-V3"), load_hardware("h200-sxm"))
    model, acceptance = placement.model, {"rate": 0.7}
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "acceptance": acceptance}
    layer, _ = own_bytes(Speculation.validate(drafts, ""), placement)
    copies = 2 * 2 * model.vocab_size * model.hidden_size
    assert weight_bytes(placement) + layer + copies == pytest.approx(688_586_727_753, rel=0.005)


# page_size_bytes of vLLM 0.32.0's FullAttentionSpec and MLAAttentionSpec, run on a CPU: 16 tokens, a layer; BF16, FP8.
SPECS = {
    "Llama-3.1-8B": (65536, 32768),
    "Gemma-3-4B": (65536, 32768),
    "gpt-oss-20b": (32768, 16384),
    "Qwen3-30B-A3B": (32768, 16384),
    "DeepSeek-V3": (18432, 9216),
}


@pytest.mark.parametrize("name", SPECS)
def test_blocks_are_as_large_as_vllms_specs_say(name):
    attention = load_model(name).layers[0].attention
    assert tuple(16 * attention.kv_elements_per_token * width for width in (2, 1)) == SPECS[name]


# the same of 64 tokens, by the format that vLLM chooses for sparse attention over latents on each device
LATENTS = [
    ("DeepSeek-V3.2", "h200-sxm", "auto", 73728),
    ("DeepSeek-V3.2", "h200-sxm", "fp8", 41984),
    ("DeepSeek-V3.2", "b200-sxm", "auto", 73728),
    ("DeepSeek-V3.2", "b200-sxm", "fp8", 36864),
    ("DeepSeek-V3.2", "rtx-pro-6000", "auto", 41984),
    ("GLM-5", "h200-sxm", "auto", 73728),
    ("GLM-5", "b200-sxm", "auto", 36864),
    ("DeepSeek-V3", "h200-sxm", "fp8", 36864),
]


@pytest.mark.parametrize(("name", "hardware", "kv_cache", "page"), LATENTS)
def test_sparse_latents_take_what_vllms_spec_says_on_each_device(name, hardware, kv_cache, page):
    model = replace(load_model(name), quantization=None)
    placement = Placement(model, load_hardware(hardware), Precision(kv_cache=kv_cache))
    attention = model.layers[-1].attention
    assert 64 * placement.key_bytes(attention) == page
    read = next(op for op in forward_pass(placement) if op.name == "attention_decode" and op.kv)
    assert 64 * read.kv["decode_keys"] == page


def test_an_indexers_keys_are_as_large_as_vllms_spec_says():
    assert load_model("DeepSeek-V3.2").layers[0].attention.index_bytes_per_token == 132


RECORDED = json.loads(Path(__file__).with_name("parameters.json").read_text())
COUNTED = RECORDED["parameters"]
OTHERWISE = {
    "LongCat-Flash": "transformers gives its idle experts half a matrix each; 560B are published",
    **{name: "its LM head is its own, as published; this version ties it" for name in COUNTED if "FLAN" in name},
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_hugging_faces_classes(name):
    """At most 1e-4 apart: score corrections of routers are no parameters there."""
    ours = load_model(name).num_params
    assert (ours == pytest.approx(COUNTED[name], rel=1e-4)) == (name not in OTHERWISE)


@pytest.mark.parametrize("family", RECORDED["classes"])
def test_counts_are_those_of_a_classs_defaults(family):
    config, count = RECORDED["classes"][family]
    assert model_from_config(config, "x").num_params == pytest.approx(count, rel=1e-4)


@pytest.mark.parametrize("key", ["thinker_config", "text_config", "llm_config", "language_config"])
def test_a_text_model_is_found_inside_a_multimodal_config(key):
    whole = {"model_type": "any", "architectures": ["Any"], key: LLAMA}
    assert model_from_config(whole, "x").num_params == model_from_config(LLAMA, "x").num_params
    assert model_from_config(whole, "x").source == "x, text part"
    assert problems({**whole, key: LLAMA | {"hidden_size": None}})[0].startswith(f"x: {key}.hidden_size: ")
    thinker = {"model_type": "any", "thinker_config": {"model_type": "any", "text_config": LLAMA}}
    assert model_from_config(thinker, "x").num_params == model_from_config(LLAMA, "x").num_params


@pytest.mark.parametrize(
    ("family", "more", "full"),
    [("cwm", {}, {0, 4}), ("ministral", {}, set()), ("ministral", {"sliding_window": None}, set(range(8))),
     ("exaone4", {"sliding_window_pattern": "LLLG"}, {3, 7}), ("vaultgemma", {}, {1, 3, 5, 7})],
)  # fmt: skip
def test_windows_that_only_the_class_says(family, more, full):
    config = {**LLAMA, "model_type": family, "num_hidden_layers": 8, "sliding_window": 16} | more
    assert {i for i, layer in enumerate(model_from_config(config, "x").layers) if not layer.attention.window} == full


def test_windows_without_a_rule_must_be_said():
    recipe = {**LLAMA, "model_type": "flint", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    assert problems(recipe | {"sliding_window": 16}) == (
        "x: layer_types: missing; must say which layers have the window",
    )


def test_nearly_all_families_that_engines_serve_are_read():
    assert len(COUNTED) - len(OTHERWISE) >= 150
    assert len(names()) >= 220


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_catalogue_counts(name, count):
    assert load_model(name).num_params == count


SIZES = st.integers(1, 64)


@given(h=SIZES, d=SIZES, k=SIZES, group=SIZES, f=SIZES, v=SIZES, layers=SIZES, tied=st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_llama_of_any_size_follows_the_closed_form(h, d, k, group, f, v, layers, tied):
    n = k * group
    config = LLAMA | {
        "hidden_size": h,
        "head_dim": d,
        "num_key_value_heads": k,
        "num_attention_heads": n,
        "intermediate_size": f,
        "vocab_size": v,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }
    model = model_from_config(config, "x")
    attention = h * n * d + 2 * h * k * d + n * d * h
    assert model.num_params == v * h * (1 if tied else 2) + layers * (attention + 3 * h * f + 2 * h) + h
    assert model.kv_bytes_per_token(2) == 2 * layers * k * d * 2
    assert len({id(layer) for layer in model.layers}) == 1
    assert model.lm_head.num_params == v * h


@pytest.mark.parametrize("name", names())
def test_every_entry_is_whole_and_its_parts_add_up(name):
    """Parameters are the tables, the matrices and the vectors; more experts per token are more active parameters."""
    model = load_model(name)
    h, total = model.hidden_size, model.embedding_params + model.lm_head_params + model.other_params
    for layer in model.layers + model.encoder_layers:
        attentions = [a for a in (layer.attention, layer.cross_attention) if a]
        linears = [linear for part in (*attentions, layer.mlp) for linear in part.linears(h)] + list(layer.beside)
        if isinstance(layer.mlp, MoE):
            linears += layer.mlp.expert_linears(h) * layer.mlp.num_experts
        vectors = sum(attention.vector_params for attention in attentions) + layer.norm_params
        total += sum(linear.inputs * linear.outputs + linear.outputs * linear.bias for linear in linears) + vectors
    assert model.num_params == total
    sparse = any(isinstance(layer.mlp, MoE) for layer in model.layers)
    assert model.num_active_params < model.num_params if sparse else model.num_active_params == model.num_params
    assert model.kv_bytes_per_token(2) == 2 * model.kv_bytes_per_token(1)
    assert model.kv_bytes_per_token(2) > 0 or model.state_bytes(2) > 0
    assert (model.lm_head_params == 0) == model.tie_word_embeddings
    assert (model.name, model.source) == (name, f"catalogue: {name}")


# --- kinds of attention ---------------------------------------------------------------------------------------------


def kinds_of(model):
    return "".join(layer.attention.kind[0] for layer in model.layers)


def test_interleaved_windows():
    assert kinds_of(load_model("gemma-2-9b")) == "wf" * 21
    assert kinds_of(load_model("gemma-3-27b")) == ("wwwwwf" * 11)[:62]
    assert kinds_of(load_model("gpt-oss-20b")) == "wf" * 12
    assert kinds_of(load_model("llama-4-scout")) == "cccf" * 12
    assert kinds_of(load_model("qwen3-next-80b-a3b")) == "lllf" * 12
    assert {layer.attention.window for layer in load_model("gemma-3-1b").layers} == {512, 0}


def test_a_window_counts_only_where_it_is_used_and_binds():
    assert {layer.attention.window for layer in load_model("mistral-7b-v0.1").layers} == {4096}
    assert kinds_of(load_model("mistral-7b-v0.3")) == "f" * 32
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 128, "max_window_layers": 1}
    assert kinds_of(model_from_config(qwen, "x")) == "fff"
    assert kinds_of(model_from_config(qwen | {"use_sliding_window": True}, "x")) == "fww"
    phi = LLAMA | {"model_type": "phi3", "sliding_window": 4096}
    assert kinds_of(model_from_config(phi, "x")) == "fff"  # no sequence is longer than 2048
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert kinds_of(model_from_config(phi | {"sliding_window": 8, "layer_types": layer_types}, "x")) == "wfw"


def test_latent_attention_keeps_one_latent_and_one_rotary_key_per_token():
    attention = load_model("DeepSeek-V3").layers[0].attention
    assert attention.kv_elements_per_token == 512 + 64
    indexed = load_model("DeepSeek-V3.2")
    assert indexed.kv_bytes_per_token(2) == load_model("DeepSeek-V3").kv_bytes_per_token(2)
    assert indexed.index_bytes_per_token == 61 * (128 + 4)  # FP8 with one FP32 scale


def test_compressed_attention_keeps_an_entry_for_so_many_tokens():
    """DeepSeek-V4-Flash in FP8: 584 bytes for 4 tokens (and an indexer's key) in 21 layers, for 128 in 20; two keep a
    window alone."""
    model = load_model("DeepSeek-V4-Flash")
    ratios = [layer.attention.compress_ratio for layer in model.layers]
    assert [ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    entries = sum(a.entry_bytes(1) / a.compress_ratio + a.index_bytes_per_token
                  for a in (layer.attention for layer in model.layers) if a.compress_ratio)  # fmt: skip
    assert entries == 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert model.quantization.kv_cache == "fp8"


def test_linear_attention_keeps_a_state_per_sequence_and_nothing_per_token():
    model = load_model("Qwen3-Next-80B-A3B")
    matrix, conv = 32 * 128 * 128 * 2, (2 * 16 * 128 + 32 * 128) * 3 * 2  # as wide as the model (vLLM's auto)
    assert model.state_bytes(2) == 36 * (matrix + conv)
    assert model.kv_bytes_per_token(2) == 2 * 12 * 2 * 256 * 2
    with_floats = load_model("Qwen3.5-35B-A3B")  # its config says mamba_ssm_dtype float32
    assert with_floats.state_bytes(2) == 30 * (2 * matrix + conv)
    assert load_model("Llama-3.1-8B").state_bytes(2) == 0


def test_encoder_decoder_keeps_the_encoders_keys_once():
    model = load_model("t5-large")
    assert len(model.encoder_layers) == len(model.layers) == 24
    assert model.cross_kv_bytes_per_token(2) == model.kv_bytes_per_token(2) == 2 * 24 * 16 * 64 * 2
    assert load_model("gpt2").cross_kv_bytes_per_token(2) == 0


def test_a_reference_model_needs_no_config():
    """A model as papers state it: 70e9 parameters, 80 layers, 8 KV heads, head dimension 128."""
    layer = Layer(Attention("full", 64, 8, 128), MLP(28672), norm_params=2 * 8192)
    rest = 70_000_000_000 - 80 * layer.num_params(8192)
    model = Model("70B", "reference", 8192, 0, (layer,) * 80, False, 8192, 0, 0, rest)
    assert model.num_params == model.num_active_params == 70e9
    assert 8192 * model.kv_bytes_per_token(2) == 2_684_354_560
    per_head = Attention("full", 64, 64, 128).kv_elements_per_token
    assert per_head == 8 * layer.attention.kv_elements_per_token  # what grouped queries save


# --- names and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("LLAMA-3.1-8b", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct@main", "Llama-3.1-8B"),
        ("zai-org/GLM-4.5-Air", "GLM-4.5-Air"),
        ("CohereForAI/c4ai-command-r-v01", "Command-R"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-3-Nano-30B-A3B"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "Ministral-3-8B-2512"),
        ("ibm-granite/granite-4.0-h-small", "Granite-4.0-H-Small"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", "ERNIE-4.5-21B-A3B"),
        ("llama2-70b", "Llama-2-70B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "Mistral-Nemo-2407"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "Mixtral-8x22B-Instruct-v0.1"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B-2507"),
        ("google/gemma-2-9b-it", "Gemma-2-9B"),
        ("microsoft/Phi-3-mini-4k-instruct", "Phi-3-mini-4k"),
        ("openai-community/gpt2-xl", "GPT-2-XL"),
        ("google-t5/t5-base", "T5-base"),
        ("google/flan-t5-xxl", "FLAN-T5-XXL"),
        ("moonshotai/Kimi-K2-Instruct", "Kimi-K2"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-R1"),
    ],
)
def test_names_as_people_write_them(given, name):
    assert load_model(given).name == name


def test_no_two_models_answer_to_one_name():
    spelled = []
    for name, (_, _, aliases) in catalogue().lines.items():
        spelled += [known.lower().replace("-", "").replace("_", "") for known in (name, *aliases)]
    assert sorted(spelled) == sorted(set(spelled))
    assert set(catalogue().columns) == {family for family, _, _ in catalogue().lines.values()}
    assert set(catalogue().columns) <= {*FAMILIES, *SAME_TEXT}


def test_an_unknown_name_answers_with_near_ones():
    with pytest.raises(InputError, match=r"model 'llama-3.1-9b': not in the catalogue; did you mean Llama-3.1-8B, "):
        load_model("llama-3.1-9b")
    with pytest.raises(InputError, match=r"did you mean Mistral-7B-v0\.1"):
        load_model("mistrel-7b-v0.1")
    for name in ("%%%", "Zamba2-7B", "xgen-7b"):  # what is only spelt alike is no suggestion
        with pytest.raises(InputError, match="not in the catalogue; `infersim show models` lists what is"):
            load_model(name)


@pytest.mark.parametrize("given", ["", "a\0b", "x" * 5000, "./no/such/config.json", "/", ".", "\n"])
def test_what_is_no_name_and_no_path_is_one_line(given):
    with pytest.raises(InputError) as error:
        load_model(given)
    assert "\n" not in str(error.value)


def test_a_config_is_found_by_file_and_by_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json", str(folder)):
        model = load_model(path)
        assert (model.name, model.family, model.source) == ("my-model", "llama", str(folder / "config.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1, column 1"),
        (json.dumps(LLAMA).encode()[:-20], "must be a complete JSON object"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "too long"),
        (b"[1, 2]", "must be a JSON object of model fields (got a list of 2)"),
        (b"null", "must be a JSON object"),
        (b" " * 10_000_001, "larger than 10 MB"),
    ],
)
def test_a_file_that_is_no_config_is_one_line_with_its_path(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_model(path)
    (line,) = error.value.problems
    assert line.startswith(f"{path}: ")
    assert message in line


# --- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, float("nan"), float("inf"), True, "64", [], {}, 10**40])
def test_a_wrong_field_is_named_and_nothing_else_is(field, value):
    (line,) = problems(LLAMA | {field: value}, "my.json")
    assert line.startswith(f"my.json: {field}: ")
    assert "must be a whole number >= 1" in line or "must be at most" in line


def test_all_problems_come_at_once():
    config = {"model_type": "llama", "hidden_size": -1, "attention_bias": "yes", "vocab_size": 100}
    assert problems(config) == (
        "x: hidden_size: must be a whole number >= 1 (got -1)",
        "x: num_hidden_layers: missing; must be a whole number >= 1",
        "x: attention_bias: must be true or false (got 'yes')",
        "x: num_attention_heads: missing; must be a whole number >= 1",
        "x: intermediate_size: missing; must be a whole number >= 1",
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_type": None}, "x: model_type: missing; must be one of "),
        ({"model_type": "lama"}, "x: model_type: unknown family 'lama'; did you mean llama?"),
        ({"model_type": ["llama"]}, "x: model_type: must be a text (got a list of 1); must be one of "),
        ({"model_type": "zamba2"}, "x: model_type: zamba2 is not modelled yet: it has attention whose matrices"),
        ({"num_key_value_heads": 3}, "x: num_key_value_heads: must divide num_attention_heads 8 (got 3)"),
        (
            {"num_attention_heads": 6},
            "x: num_attention_heads: must divide the hidden size 64 where there is no head_dim (got 6)",
        ),
        ({"num_hidden_layers": 10**8}, "x: num_hidden_layers: must be at most 10,000 (got 100000000)"),
        (
            {"layer_types": ["full_attention"]},
            "x: layer_types: must be a list with one entry for each of 3 layers (got a list of 1)",
        ),
        (
            {"layer_types": ["full_attention", "mamba", "full_attention"]},
            "x: layer_types[1]: must be one of full_attention, sliding_attention (got 'mamba')",
        ),
        ({"text_config": 5}, "x: text_config: must be a JSON object (got 5)"),
        ({"text_config": {"hidden_size": "b"}}, "x: text_config.hidden_size: must be a whole number >= 1 (got 'b')"),
        ({"quantization_config": {"quant_method": "x"}}, "x: quantization_config.quant_method: unknown 'x'; known"),
        ({"quantization_config": {"quant_method": "gptq"}}, "x: quantization_config.bits or w_bit: missing"),
    ],
)
def test_what_a_wrong_config_answers(change, line):
    assert problems(LLAMA | change)[0].startswith(line)


def test_a_dense_layer_among_sparse_ones_needs_its_width():
    moe = LLAMA | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert not isinstance(model_from_config(moe | {"mlp_only_layers": [1]}, "x").layers[1].mlp, MoE)
    del moe["intermediate_size"]
    assert isinstance(model_from_config(moe, "x").layers[1].mlp, MoE)
    assert problems(moe | {"mlp_only_layers": [1]})[0].startswith("x: intermediate_size: missing")


def test_experts_per_token_are_at_most_the_experts():
    mixtral = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}
    assert problems(mixtral) == ("x: num_experts_per_tok: must be at most num_local_experts 8 (got 9)",)
    everyone = model_from_config(mixtral | {"num_experts_per_tok": 8}, "x")
    assert everyone.num_active_params == everyone.num_params


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=9),
    st.lists(st.one_of(st.integers(-1, 3), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
FIELD_NAMES = sorted(
    {column for columns in catalogue().columns.values() for column in columns}
    | {"layer_types", "text_config", "quantization_config", "mlp_only_layers", "moe_layer_freq", "hybrid_layer_pattern"}
    | {"qk_norm_type", "topk_method", "decoder_sparse_step", "full_attention_interval", "interleave_moe_layer_step"}
)


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    sizes=st.dictionaries(st.sampled_from(FIELD_NAMES), st.integers(1, 9)),
    junk=st.dictionaries(st.sampled_from(FIELD_NAMES), JUNK, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_any_config_gives_a_model_or_lines_that_say_why_not(family, sizes, junk):
    lines = ()
    try:
        model = model_from_config({"model_type": family} | sizes | junk, "x")
    except InputError as error:
        lines = error.problems
    assert all(line.startswith("x: ") and "\n" not in line for line in lines)
    assert lines or 0 < model.num_active_params <= model.num_params


def test_models_are_light_to_import():
    code = "import sys, infersim.models.catalog; print({'numpy', 'pandas', 'numba'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
