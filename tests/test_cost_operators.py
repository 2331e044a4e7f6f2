"""The operators of a pass hold every parameter once, and the FLOPs of the textbook."""

from dataclasses import replace

import pytest

from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import BYTES, Precision
from infersim.cost.operator import evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.sharding import check_modelled, rank_layer
from infersim.models.catalog import load_model

DENSE = ("Llama-2-7B", "Llama-3.1-8B", "Llama-3.1-70B", "Mistral-7B-v0.1", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-0.6B",
         "phi-4", "gemma-2-9b", "gemma-3-27b", "opt-6.7b", "gpt2-xl", "gpt-neox-20b")  # fmt: skip
H100 = load_hardware("h100-sxm")
ONE_TOKEN = {"step": 1, "tokens": 1, "sequences": 1}


def weights(operators) -> float:
    """Bytes of parameters that every pass reads, whatever its tokens."""
    return sum(op.count * op.weights.get("step", 0) for op in operators)


def linear_flops(operators) -> float:
    return sum(op.count * evaluate(op.flops, ONE_TOKEN) for op in operators if op.operator_class == "gemm")


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_pass_reads_every_parameter_once(name, dtype):
    """All but the input embedding, of which it reads one row per token; a tied table is read as the LM head."""
    model = load_model(name)
    read = model.num_params - model.embedding_params + (model.vocab_size * model.hidden_size if
                                                        model.tie_word_embeddings else 0)  # fmt: skip
    assert weights(forward_pass(Placement(model, H100, Precision(weights=dtype)))) == read * BYTES[dtype]


@pytest.mark.parametrize("name", DENSE)
def test_flops_per_token_are_twice_the_matrices(name):
    """2 FLOPs per parameter that is a matrix: all but embedding, norms and biases."""
    model = load_model(name)
    matrices = model.vocab_size * model.hidden_size
    for layer in model.layers:
        for linear in (*layer.attention.linears(model.hidden_size), *layer.mlp.linears(model.hidden_size)):
            matrices += linear.inputs * linear.outputs
    assert linear_flops(forward_pass(Placement(model, H100))) == 2 * matrices
    assert 2 * matrices == pytest.approx(2 * (model.num_params - model.embedding_params * (not
                                         model.tie_word_embeddings)), rel=0.015)  # fmt: skip


def test_opt_350m_reads_the_projections_around_its_embedding():
    model = load_model("opt-350m")
    read = model.num_params - model.embedding_params + model.vocab_size * model.embedding_size
    assert weights(forward_pass(Placement(model, H100))) == 2 * read


@pytest.mark.parametrize("name", DENSE)
def test_decode_reads_each_key_once_and_a_query_meets_it_in_four_flops_per_channel(name):
    model = load_model(name)
    decode = [op for op in forward_pass(Placement(model, H100)) if op.per == "decodes"]
    assert sum(op.count * op.kv["decode_keys"] for op in decode) == model.kv_bytes_per_token(2)
    heads = sum(4 * layer.attention.num_heads * layer.attention.head_dim for layer in model.layers)
    assert sum(op.count * op.flops["decode_keys"] for op in decode) == heads
    windows = {layer.attention.window for layer in model.layers}
    assert {op.window for op in decode} == windows


def test_kv_cache_in_fp8_is_half():
    model = load_model("Llama-3.1-8B")
    full, half = (
        sum(
            op.count * op.kv.get("decode_keys", 0)
            for op in forward_pass(Placement(model, H100, Precision(kv_cache=dtype)))
        )
        for dtype in ("bf16", "fp8")
    )
    assert full == 2 * half


@pytest.mark.parametrize(("name", "tensor"), [("Llama-3.1-70B", 2), ("Llama-3.1-70B", 8), ("Qwen2.5-7B", 4)])
def test_ranks_share_the_work(name, tensor):
    """Ranks together do the FLOPs of one, and hold the matrices once; norms and row biases are on every rank."""
    model = load_model(name)
    one, rank = (
        forward_pass(Placement(model, H100)),
        forward_pass(Placement(model, H100, parallelism=Parallelism(tensor=tensor))),
    )
    assert linear_flops(rank) * tensor == pytest.approx(linear_flops(one), rel=1e-3)  # vocabulary rounded up
    copied = weights(rank) * tensor - weights(one)
    norms = 2 * (sum(layer.norm_params for layer in model.layers) + model.hidden_size)
    assert 0 <= copied <= 2 * tensor * norms + 1e6
    reduced = [op for op in rank if op.name == "all_reduce"]
    assert sum(op.count for op in reduced) == 2 * model.num_layers + 1
    assert all(op.message["tokens"] == model.hidden_size * 2 and op.ranks == tensor for op in reduced)


def test_key_heads_are_copied_where_ranks_outnumber_them():
    layer = load_model("Qwen2.5-7B").layers[0]  # 28 query heads, 4 key heads
    assert rank_layer(layer, Parallelism(tensor=4)).attention.num_kv_heads == 1
    assert rank_layer(layer, Parallelism(tensor=28)).attention.num_kv_heads == 1
    assert rank_layer(layer, Parallelism(tensor=28)).attention.num_heads == 1


def test_all_problems_come_at_once():
    model = replace(load_model("Llama-3.1-8B"), name="tiny")
    parallelism = Parallelism(tensor=3, pipeline=33, attention_data=2, expert=2)
    with pytest.raises(InputError) as error:
        check_modelled(Placement(model, load_hardware("tpu-v5e"), Precision(weights="fp16"), parallelism))
    said = "\n".join(error.value.problems)
    for part in (
        "parallelism.pipeline: must be at most the 32 layers of tiny",
        "parallelism.expert: tiny has no experts; must be 1",
        "precision.weights: tpu-v5e has no fp16 rate; must be one of bf16",
        "parallelism.tensor: must divide the 32 query heads of tiny",
        "parallelism.tensor: must divide the 8 key heads of tiny, or be a multiple",
    ):
        assert part in said


def test_tensor_parallelism_takes_whole_nodes():
    with pytest.raises(InputError, match="a node holds 8 of h100-sxm"):
        check_modelled(Placement(load_model("Llama-3.1-8B"), H100, parallelism=Parallelism(tensor=12)))
    check_modelled(Placement(load_model("Llama-3.1-8B"), H100, parallelism=Parallelism(tensor=16)))


def test_norms_over_all_heads_exchange_their_variance():
    """Two FP32 sums per token of every layer, where ranks share the heads; norms of each head need none."""

    def small(name: str, tensor: int) -> int:
        operators = forward_pass(Placement(load_model(name), load_hardware("h100-sxm"), Precision(weights="bf16"),
                                           Parallelism(tensor=tensor)))  # fmt: skip
        return sum(op.count for op in operators if op.name == "all_reduce" and op.message == {"tokens": 8.0})

    layers = {name: load_model(name).num_layers for name in ("MiniMax-M2.5", "OLMo-2-7B")}
    assert {name: small(name, 4) for name in layers} == layers
    assert not any(small(name, 1) for name in layers)
    assert not small("Command-R-Plus", 4)
    assert not small("Qwen3-8B", 4)
