"""Every architecture is priced by what it is, never below physics; what is not modelled is named."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import SHARED, needs_shared
from test_cost_steptime import batch_sums, deployment, price

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.presets import packaged_presets
from infersim.config.scenario import build_scenario
from infersim.cost.floors import floor_itl, floor_ttft
from infersim.cost.memory import longest_sequence, memory_waterfall
from infersim.cost.operator import evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.steptime import compile_step_cost
from infersim.deployment import deploy, resolve
from infersim.models.catalog import load_model
from infersim.run import run

H100, H200 = load_hardware("h100-sxm"), load_hardware("h200-sxm")


def operators(model, **parallelism):
    return forward_pass(Placement(load_model(model), H200, Precision(weights="bf16"), Parallelism(**parallelism)))


def of(listing, *names):
    return [op for op in listing if op.name in names]


@pytest.mark.parametrize(("name", "heads"), [("DeepSeek-V3", 128), ("Kimi-K2", 64), ("DeepSeek-V2-Lite", 16)])
def test_latent_attention_as_published(name, heads):
    """Absorbed decode: 2 n (2 r + d) FLOPs per key, and one latent and rotary key read for all heads; DeepSeek-V3:
    70,272 bytes per token. Prefill: keys of every head."""
    listing = operators(name)
    decodes, prefills = of(listing, "attention_decode"), of(listing, "attention_prefill")
    read = sum(op.count * op.kv["decode_keys"] for op in decodes)
    assert {op.flops["decode_keys"] for op in decodes} == {2 * heads * (2 * 512 + 64)}
    assert read == load_model(name).kv_bytes_per_token(2)
    assert {op.flops["prefill_pairs"] for op in prefills} == {2 * heads * (192 + 128)}
    if name == "DeepSeek-V3":
        assert read == 70272
    # both ways through kv_b_proj cost its FLOPs, and it is read once
    expand = 2 * 512 * heads * 256
    assert all(op.flops == {"decodes": expand} for op in of(listing, "absorb"))
    assert all(op.flops == {"prefill_keys": expand} for op in of(listing, "expand"))


def test_a_latent_is_whole_on_every_rank():
    one, eight = operators("DeepSeek-V3"), operators("DeepSeek-V3", tensor=8)
    for whole, part in zip(of(one, "attention_decode"), of(eight, "attention_decode"), strict=True):
        assert part.kv == whole.kv
        assert part.flops["decode_keys"] * 8 == whole.flops["decode_keys"]


def test_an_indexer_bounds_what_attention_sees():
    """DeepSeek-V3.2: every key is met by the indexer's narrow heads, at most 2048 by the attention."""
    listing = operators("DeepSeek-V3.2")
    assert {op.window for op in of(listing, "attention_decode", "attention_prefill")} == {2048}
    indexer = of(listing, "index_decode")
    assert {(op.window, op.kv["decode_keys"]) for op in indexer} == {(0, 132)}
    cost = compile_step_cost(*deployment("DeepSeek-V3.2", "h200-sxm", 8))

    def step(context):
        return price(cost, [(context, 1)], {w: batch_sums([(context, 1)], w) for w in (0, 2048)})

    dense = compile_step_cost(*deployment("DeepSeek-V3", "h200-sxm", 8))
    whole = price(dense, [(60000, 1)], {0: batch_sums([(60000, 1)], 0)})
    assert step(60000) - step(2048) < 0.5 * (whole - price(dense, [(2048, 1)], {0: batch_sums([(2048, 1)], 0)}))


def test_compressed_attention_reads_few_bytes_of_a_long_context():
    """DeepSeek-V4-Flash at 100,000 tokens: 128 newest entries in each layer, 512 of 25,000 in 21 layers whose indexer
    reads a key of each, all 781 in 20 layers; at 4,000 tokens all of all."""

    def kv(context):
        seen = {0: context, 128: 128, 2048: min(context, 2048)}
        listing = of(operators("DeepSeek-V4-Flash"), "attention_decode_local", "attention_decode_compressed",
                     "index_decode")  # fmt: skip
        return sum(op.count * op.kv["decode_keys"] * seen[op.window] for op in listing)

    entry = 584  # FP8, as the checkpoint says
    for n in (100_000, 1000):
        expected = 43 * 128 * entry + 21 * (min(n, 2048) / 4 * entry + n / 4 * 132) + 20 * n / 128 * entry
        assert kv(n) == pytest.approx(expected)
    assert len(compile_step_cost(*deployment("DeepSeek-V4-Flash", "h200-sxm", 8)).attention) == 4


def test_compressed_caches_share_blocks():
    """A block of 256 tokens has the entries of all layers; newest keys take as many more tables as they are larger."""
    memory = memory_waterfall(*deployment("DeepSeek-V4-Flash", "h200-sxm", 8))
    (entries, newest) = memory.kv_groups
    assert memory.block_size == 256
    assert memory.block_bytes == pytest.approx(256 * memory.kv_bytes_per_token)
    assert (entries.window, entries.tables, newest.window) == (0, 1, 128)
    assert newest.tables == -(-43 * 584 // memory.kv_bytes_per_token)


def test_a_state_costs_the_same_however_long_the_sequence():
    """Qwen3-Next: 36 of 48 layers read and write 2 MiB of state per sequence, whatever the context."""
    model = load_model("Qwen3-Next-80B-A3B")
    (decode,) = of(operators("Qwen3-Next-80B-A3B"), "recurrent_decode")
    assert (decode.count, decode.window) == (36, 1)
    assert decode.count * decode.kv["decode_keys"] == 2 * model.state_bytes(2)
    deployed = deployment("Qwen3-Next-80B-A3B", "h100-sxm", 4)
    cost = compile_step_cost(*deployed)
    (full,) = [row for row in cost.attention if row["window"] == 0]
    sums = {w: [batch_sums([(n, 1)], w) for n in (1000, 101_000)] for w in (0, 1)}
    short, long = (price(cost, [(0, 1)], {w: s[i] for w, s in sums.items()}) for i in (0, 1))
    assert long - short == pytest.approx(full["decode_kv"] * 100_000, rel=0.2)  # 12 layers alone


def test_states_take_blocks():
    """One block of each of three tables per sequence, as long as a block holds a state; 8 times the state, 4 ranks."""
    placement, engine = deployed = deployment("Qwen3-Next-80B-A3B", "h100-sxm", 4)
    memory = memory_waterfall(*deployed)
    assert {(group.window, group.tables) for group in memory.kv_groups} == {(0, 1), (1, 3)}
    assert memory.state_bytes == pytest.approx(placement.model.state_bytes(2) / 4)
    assert memory.block_bytes >= memory.state_bytes / 3
    whole = -(-engine.max_model_len // memory.block_size)
    assert memory.max_concurrency == memory.num_gpu_blocks / (whole + 3 * 2)  # what is cached is kept beside it


def test_chunks_begin_anew():
    """Llama 4: a query sees the keys of its own chunk of 8192."""
    listing = operators("Llama-4-Scout")
    assert {op.window for op in of(listing, "attention_decode")} == {0, -8192}
    cost = compile_step_cost(*deployment("Llama-4-Scout", "h200-sxm", 8))

    def step(context):
        return price(cost, [(context, 1)], {w: batch_sums([(context, 1)], w) for w in (0, -8192)})

    assert step(8191) > step(8192) < step(8193)
    assert step(16383) > step(8191)  # the other layers see everything


def test_an_encoder_costs_its_flops():
    """T5: 2 FLOPs per parameter of the encoder and of the decoder's cross keys and values, per prompt token."""
    model = load_model("t5-base")
    listing = operators("t5-base")
    per_token = sum(op.count * evaluate(op.flops, {"tokens": 1}) for op in listing if op.per == "tokens" and op.flops)
    h, attention = model.hidden_size, model.encoder_layers[0].attention

    def matrices(layers):
        linears = [linear for a in layers for linear in (*a.attention.linears(h), *a.mlp.linears(h))]
        return sum(linear.inputs * linear.outputs for linear in linears)

    cross = model.num_layers * 2 * h * attention.num_heads * attention.head_dim
    assert per_token == 2 * (matrices(model.encoder_layers) + cross)
    assert per_token == 2 * (matrices(model.layers) + cross)  # cross queries and outputs
    (prefill,) = of(listing, "attention_prefill")
    assert prefill.flops["prefill_pairs"] == 2 * 4 * attention.num_heads * attention.head_dim  # both sides
    (decode,) = of(listing, "attention_decode")
    assert decode.count * decode.kv["decode_keys"] == model.kv_bytes_per_token(2) == model.cross_kv_bytes_per_token(2)


ALL = [
    ("Mixtral-8x7B", Parallelism(tensor=2)),
    ("Qwen3-30B-A3B", Parallelism(tensor=4, expert=4, expert_skew=0.8)),
    ("Qwen3-235B-A22B", Parallelism(attention_data=8, expert=8)),
    ("gpt-oss-120b", Parallelism()),
    ("DeepSeek-V3", Parallelism(tensor=8)),
    ("DeepSeek-V3.2", Parallelism(attention_data=8, expert=8)),
    ("GLM-5", Parallelism(tensor=8, pipeline=2)),
    ("MiniMax-M2.5", Parallelism(tensor=4, expert=4)),
    ("Kimi-K2.5", Parallelism(tensor=8)),
    ("Qwen3-Next-80B-A3B", Parallelism(tensor=4)),
    ("Llama-4-Maverick", Parallelism(tensor=8)),
    ("MiMo-V2-Flash", Parallelism(tensor=4)),
    ("t5-11b", Parallelism()),
    ("Llama-3.1-405B", Parallelism(tensor=8, pipeline=2)),
]


@settings(max_examples=60, deadline=None)
@given(
    deployed=st.sampled_from(ALL),
    hardware=st.sampled_from(["h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm-80gb", "mi300x"]),
    weights=st.sampled_from(["auto", "bf16", "fp8", "int4"]),
    context=st.integers(0, 8000),
    prompt=st.integers(2, 2000),
)
def test_no_step_is_faster_than_physics(deployed, hardware, weights, context, prompt):
    name, parallelism = deployed
    deployed = deployment(
        name, hardware, parallelism, precision=Precision(weights=weights), max_num_batched_tokens=2048,
        max_num_seqs=64,
    )  # fmt: skip
    cost = compile_step_cost(*deployed)
    windows = {int(row["window"]) for row in cost.attention}
    decode = price(cost, [(context, 1)], {w: batch_sums([(context, 1)], w) for w in windows})
    prefill = price(cost, [(0, prompt)], {w: batch_sums([(0, prompt)], w) for w in windows})
    assert decode > floor_itl(deployed[0], context)
    assert prefill > floor_ttft(deployed[0], prompt)
    for table in (cost.linear, cost.head, *([] if cost.shared is None else [cost.shared])):
        assert np.isfinite(table).all()
        assert (table >= 0).all()
        assert (np.diff(table.sum(1)) >= -1e-12).all()
    for column in cost.attention.dtype.names[1:]:
        assert column.endswith(("_axes", "_grid")) or (cost.attention[column] >= 0).all()


def test_pipelines_never_lower_latency():
    """Stages take turns: a step is as long, plus the sends; the next may start once the slowest stage is through."""
    one, two, four = (
        compile_step_cost(*deployment("Llama-3.1-70B", "h200-sxm", Parallelism(tensor=2, pipeline=n)))
        for n in (1, 2, 4)
    )
    assert one.linear[64].sum() < two.linear[64].sum() < four.linear[64].sum()
    assert one.issue_share == 1
    assert 0.5 <= two.issue_share < 0.6
    assert 0.25 <= four.issue_share < 0.35


@pytest.mark.parametrize("preset", packaged_presets())
def test_pipelines_never_lower_the_latency_of_a_run(preset):
    """A sequence's next token waits for the last stage, whatever the engine overlaps: no gap is below physics."""
    found = []
    for pipeline in (1, 2, 4):
        data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "parallelism": {"pipeline": pipeline}}
        data |= {"engine": {"preset": preset, "max_model_len": 4096}}
        data |= {"workload": {"num_requests": 1, "input_tokens": 100, "output_tokens": 20}}
        result = run(build_scenario(data, "test"))[0]
        found.append(float((result.requests["last_token"] - result.requests["first_token"]).mean()) / 19)
        assert found[-1] > result.floors["itl"]
    assert found == sorted(found)


def test_a_pipeline_has_no_asynchronous_scheduling():
    parts = ("Llama-3.1-8B", H100, Precision(), Parallelism(pipeline=2))
    assert not deploy(*parts, Engine()).engine.async_scheduling
    with pytest.raises(InputError, match=r"must be false with parallelism.pipeline above 1"):
        deploy(*parts, Engine(async_scheduling=True))


@pytest.mark.parametrize(
    "groups", [{"tensor": 8, "attention_data": 8, "expert": 64}, {"tensor": 2, "attention_data": 8}, {"tensor": 16}]
)
def test_pipelines_over_many_nodes_never_lower_latency(groups):
    one, two = (
        compile_step_cost(*deployment("Qwen3-235B-A22B", "h100-sxm", Parallelism(**groups, pipeline=n), **SMALL))
        for n in (1, 2)
    )
    assert (two.linear[1:].sum(1) > one.linear[1:].sum(1)).all()
    if one.shared is not None:
        assert (two.shared[1:].sum(1) >= one.shared[1:].sum(1) * (1 - 1e-12)).all()


SMALL = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 64}


def test_pipelines_divide_the_memory():
    one, two = (
        memory_waterfall(
            *deployment("Llama-3.1-70B", "h200-sxm", Parallelism(tensor=2, pipeline=n), max_model_len=8192)
        )
        for n in (1, 2)
    )
    assert two.weights_bytes < 0.53 * one.weights_bytes
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert two.num_gpu_blocks > 2 * one.num_gpu_blocks


def test_context_parallelism_divides_copied_keys():
    """Where ranks hold copies of a key head they can hold parts of the sequence instead."""
    parts = [memory_waterfall(*deployment("DeepSeek-V3", "h200-sxm", Parallelism(tensor=8, context=n))) for n in (1, 8)]
    assert parts[0].kv_bytes_per_token == 8 * parts[1].kv_bytes_per_token
    whole, part = (of(operators("DeepSeek-V3", tensor=8, context=n), "attention_decode")[0] for n in (1, 8))
    assert whole.kv["decode_keys"] == 8 * part.kv["decode_keys"]
    with pytest.raises(InputError, match="must divide the 1 ranks that hold the same key heads"):
        compile_step_cost(*deployment("Llama-3.1-8B", "h100-sxm", Parallelism(tensor=8, context=2)))


@needs_shared
def test_every_published_config_is_priced_or_named():
    """Each config.json either compiles, with blocks that hold its keys, or says what is not modelled."""
    named, priced = [], []
    for path in sorted((SHARED / "data/model_configs").glob("*_config.json")):
        try:
            model = load_model(path)
        except InputError as error:
            named += [line for line in error.problems if "not modelled yet: it has" in line]
            continue
        tensor = next(t for t in (8, 4, 2, 1) if not _problems(model, t))
        parallelism = Parallelism(tensor=tensor, pipeline=1 if model.num_layers < 2 else 2)
        engine = resolve(Engine(preset="vllm-0.19", max_num_batched_tokens=2048), H200, model.max_position_embeddings)
        cost = compile_step_cost(Placement(model, H200, parallelism=parallelism), engine)
        assert cost.linear[1].sum() > 0
        assert longest_sequence(Placement(model, H200, parallelism=parallelism), engine) > 0
        priced.append(path.name)
    assert len(priced) >= 30
    assert len(named) <= 4


def _problems(model, tensor):
    from infersim.cost.sharding import problems

    return problems(Placement(model, H200, parallelism=Parallelism(tensor=tensor)))


@needs_shared
def test_kv_bytes_of_a_token_are_the_expected():
    expected = json.loads((SHARED / "data/model_configs/expected_params.json").read_text())
    assert expected  # counted in the models' own tests; here what a rank keeps
    for name, tensor, size in [("deepseek-ai--DeepSeek-V3", 8, 70272), ("meta-llama--Meta-Llama-3.1-70B", 8, 40960)]:
        model = load_model(SHARED / f"data/model_configs/{name}_config.json")
        engine = resolve(Engine(preset="vllm-0.19"), H200, model.max_position_embeddings)
        memory = memory_waterfall(Placement(model, H200, parallelism=Parallelism(tensor=tensor)), engine)
        assert memory.kv_bytes_per_token == size


def test_ten_thousand_points_are_priced_in_five_seconds():
    """10,000 batches over devices, models and parallelism, tables included."""
    start, points = time.process_time(), 0
    rng = np.random.default_rng(0)
    for hardware in ("h100-sxm", "h200-sxm", "b200-sxm"):
        for name, parallelism in ALL:
            deployed = deployment(
                name, hardware, parallelism, precision=Precision(weights="fp8"), max_num_batched_tokens=2048,
                max_num_seqs=512,
            )  # fmt: skip
            cost = compile_step_cost(*deployed)
            tokens = rng.integers(1, 513, 240)
            total = cost.linear[tokens].sum(1) + cost.head[tokens].sum(1)
            for row in cost.attention:
                total = total + row["decode_fixed"] + row["decode_kv"] * 1000.0 * tokens
            assert (total > 0).all()
            points += len(tokens)
    assert points >= 10_000
    assert time.process_time() - start < 5
