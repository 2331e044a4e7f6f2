"""The engine's tables price any batch as summing its operators does, and never beat physics."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infersim.config.engine import Engine
from infersim.config.hardware import OperatorEfficiency, load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.correction import exp2
from infersim.cost.floors import decode_sums, floor_itl, floor_ttft, prefill_sums
from infersim.cost.memory import memory_waterfall
from infersim.cost.operator import evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.roofline import add_time, rate, zero_split
from infersim.cost.steptime import (
    capture_sizes,
    compile_step_cost,
    padded_tokens,
    provenance,
    rising,
    sum_operators,
)
from infersim.deployment import resolve
from infersim.engine.compiled.state import COLLECTIVES, COMPUTE, DRAFT, HOST, KV, LAUNCH, QUERY_TILE, WEIGHTS
from infersim.engine.price import StepCost
from infersim.models.catalog import load_model


def deployment(model, hardware, parallelism=1, preset="vllm-0.19", precision=None, **engine):
    model, hardware = load_model(model), load_hardware(hardware)
    knobs = resolve(Engine(preset=preset, **engine), hardware, model.max_position_embeddings)
    if not isinstance(parallelism, Parallelism):
        parallelism = Parallelism(tensor=parallelism)
    return Placement(model, hardware, precision or Precision(), parallelism), knobs


def batch_sums(batch, window):
    """The sums of one step by their definition, query by query. batch: [(computed tokens, new tokens)]."""
    sums = {"step": 1, "tokens": sum(n for _, n in batch), "sequences": len(batch), "decodes": 0, "decode_keys": 0,
            "prefill_tokens": 0, "prefill_keys": 0, "prefill_pairs": 0, "query_tiles": 0}  # fmt: skip
    for start, n in batch:
        visible = np.arange(start + 1, start + n + 1)  # keys that each query sees
        first = np.arange(start, start + n) * 0
        if window < 0:
            first = np.arange(start, start + n) // -window * -window
            visible = np.arange(start + 1, start + n + 1) - first
        if window > 0:
            first = np.maximum(np.arange(start, start + n) - window + 1, 0)
            visible = np.minimum(visible, window)
        if n == 1:
            sums["decodes"] += 1
            sums["decode_keys"] += int(visible[0])
        else:
            sums["prefill_tokens"] += n
            sums["prefill_keys"] += start + n - int(first[0])
            sums["prefill_pairs"] += int(visible.sum())
            sums["query_tiles"] += math.ceil(n / QUERY_TILE)
    return sums


def random_batches(count, seed, most_tokens, most_sequences):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        batch, tokens = [], 0
        for _ in range(draw.integers(1, most_sequences)):
            start = int(draw.lognormal(6, 1.5)) if draw.random() < 0.9 else 0
            n = 1 if draw.random() < 0.8 else int(draw.integers(2, 600))
            if tokens + n > most_tokens:
                break
            batch.append((start, n))
            tokens += n
        yield batch


def summed_operators(speeds, padded, sums_by_window, ranks=1):
    """Seconds of steps, operator by operator; each kernel's launch outside a graph beside it. Sums are arrays."""
    total = 0.0
    for operator, speed, extra in speeds:
        sums = dict(sums_by_window[operator.window])
        runs = sums[operator.per] > 0
        if operator.per == "tokens":
            sums["tokens"] = padded * (ranks if operator.shared else 1)  # all ranks have as many
            extra = np.where(padded <= 512, 0.0, extra)
        split = zero_split(len(padded))
        add_time(split, operator, speed, sums)
        total = total + np.where(runs, split.sum(-1) + operator.count * extra, 0.0)
    return total


def corrected(row, phase, queries, pairs):
    """The factor of state.ATTENTION_PRICE: bilinear between knots over logarithms that are straight between powers
    of two, constant beyond them."""

    def log2(x):
        return math.floor(math.log2(x)) + x / 2 ** math.floor(math.log2(x)) - 1

    first, per_work, low, per_key = row[f"{phase}_axes"]
    grid = row[f"{phase}_grid"]
    at = [
        np.clip((log2(x) - start) * step, 0, n - 1)
        for x, start, step, n in ((queries, first, per_work, 7), (pairs / queries, low, per_key, 7))
    ]
    over_keys = [np.interp(at[1], range(7), line) for line in grid]
    return math.exp(np.interp(at[0], range(7), over_keys))


def price(cost, batch, sums_by_window):
    """The step from the tables, with the closed form of attention that state.ATTENTION_PRICE states."""

    def soft(a, b, s):
        return (a + b + math.sqrt((a - b) ** 2 + 4 * s * a * b)) / 2

    tokens = sum(n for _, n in batch)
    total = cost.linear[tokens].sum() + cost.head[len(batch)].sum()
    if cost.shared is not None:
        total += cost.shared[tokens].sum()
    for row in cost.attention:
        s = sums_by_window[int(row["window"])]
        if n := s["decodes"]:
            share = math.ceil(n / row["decode_ranks"]) / n
            memory = row["decode_kv"] * s["decode_keys"] + row["decode_activations"] * n
            compute = row["decode_compute"] * s["decode_keys"]
            time = row["decode_fixed"] + soft(share * memory, share * compute, row["decode_softness"])
            total += time * corrected(row, "decode", n, s["decode_keys"])
        if n := s["prefill_tokens"]:
            memory = row["prefill_kv"] * s["prefill_keys"] + row["prefill_activations"] * n
            compute = row["prefill_compute"] * s["prefill_pairs"] + row["prefill_tile"] * s["query_tiles"]
            compute += row["prefill_query"] * n
            time = row["prefill_fixed"] + soft(memory, compute, row["prefill_softness"])
            total += time * corrected(row, "prefill", n, s["prefill_pairs"])
    return total


MACHINES = ["a100-sxm-80gb", "h100-sxm", "h100-pcie", "h200-sxm", "b200-sxm", "l40s", "rtx-4090", "mi300x", "tpu-v6e"]
WIDE = Parallelism(tensor=2, expert=2)
RANKS = Parallelism(attention_data=4, expert=4)
DEPLOYED = [
    ("Llama-3.1-8B", "h100-sxm", 1, None, 2000),
    ("Gemma-3-4B", "l40s", 2, None, 1000),
    ("Gemma-2-9B", "a100-sxm-80gb", 1, None, 1000),
    ("Llama-3.1-8B", "a100-sxm-80gb", 1, Precision(weights="int4"), 500),
    ("Llama-3.1-8B", "b200-sxm", 1, Precision(weights="nvfp4", kv_cache="fp8"), 500),
    ("Mixtral-8x7B", "h100-sxm", WIDE, None, 1000),
    ("Qwen3-30B-A3B", "h100-sxm", RANKS, Precision(weights="fp8_block"), 1000),
    ("gpt-oss-20b", "h100-sxm", Parallelism(expert_skew=0.7), None, 500),
    ("DeepSeek-V3", "h200-sxm", 8, None, 1000),
    ("DeepSeek-V3.2", "h200-sxm", 8, None, 500),
    ("DeepSeek-V3.2", "h200-sxm", Parallelism(tensor=2, prefill_context=4, expert=8), None, 500),
    ("Qwen3-Next-80B-A3B", "h100-sxm", 4, None, 1000),
    ("Llama-4-Scout", "h200-sxm", 8, None, 500),
    ("t5-base", "h100-sxm", 1, None, 500),
]


@pytest.mark.parametrize(("model", "hardware", "parallelism", "precision", "count"), DEPLOYED)
def test_tables_agree_with_summing_the_operators(model, hardware, parallelism, precision, count):
    """10,000 random mixed batches, of all architectures, formats and kinds of parallelism, to 0.5 %."""
    knobs = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "eager_launch_time": 0}
    deployed = deployment(model, hardware, parallelism, precision=precision, **knobs)
    placement, engine = deployed
    model, hardware, parallelism = placement.model, placement.hardware, placement.parallelism
    cost = sum_operators(*deployed)
    outside = provenance(deployed[0])[-1]["fixed"]
    speeds = [
        (op, rate(hardware, op), 0.0 if op.message or op.per not in ("tokens", "sequences") else outside)
        for op in forward_pass(placement)
    ]
    padded = padded_tokens(engine)[0]
    windows = {op.window for op, _, _ in speeds} | {0}
    ranks = parallelism.attention_data
    batches = list(random_batches(count, 1, engine.max_num_batched_tokens, engine.max_num_seqs))
    each = [{window: batch_sums(batch, window) for window in windows} for batch in batches]
    sums = {w: {key: np.array([of[w][key] for of in each]) for key in each[0][w]} for w in windows}
    direct = summed_operators(speeds, padded[sums[0]["tokens"]], sums, ranks)
    priced = [price(cost, batch, of) for batch, of in zip(batches, each, strict=True)]
    assert priced == pytest.approx(direct, rel=0.005)


def test_no_step_is_dearer_than_one_of_more_tokens():
    """Measured kernels are, here and there; the tables split the difference."""
    times = np.array([0.0, 1.0, 4.0, 2.0, 3.0, 9.0])
    assert times * rising(times) == pytest.approx([0.0, 1.0, 8**0.5, 8**0.5, 12**0.5, 9.0])
    for model, hardware in (("Llama-3.1-8B", "h100-sxm"), ("Llama-3.1-70B", "b200-sxm"), ("Llama-3.1-8B", "l40s")):
        deployed = deployment(model, hardware, precision=Precision(weights="fp8"))
        raw, cost = sum_operators(*deployed).linear.sum(1)[1:], compile_step_cost(*deployed).linear.sum(1)[1:]
        assert (np.diff(cost) >= -1e-12).all()
        assert np.abs(np.log(cost / raw)).max() < 0.25
        assert np.abs(np.log(cost / raw)).mean() < 0.02


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["Llama-3.1-8B", "Llama-2-7B", "OPT-13B", "Gemma-2-9B", "gpt-oss-20b", "DeepSeek-V2-Lite"]),
    hardware=st.sampled_from(MACHINES),
    cache=st.sampled_from(["bf16", "fp8"]),
    phase=st.sampled_from(["decode", "prefill"]),
)
def test_attention_is_never_dearer_than_with_more_tokens_or_keys(model, hardware, cache, phase):
    """At the knots of the corrections exactly, and between them nearly."""
    engine = {"max_num_batched_tokens": 1024, "max_num_seqs": 64}
    deployed = deployment(model, hardware, precision=Precision(kv_cache=cache), **engine)
    for row in compile_step_cost(*deployed).attention:
        if row["window"] or not row[f"{phase}_grid"].any():
            continue
        row = row.copy()
        row["window"] = 0
        cost = StepCost(np.zeros((200_000, 1)), np.zeros((3000, 1)), np.array([row]))
        first, per_work, low, per_key = row[f"{phase}_axes"]
        works = exp2(np.clip(first + np.arange(7) / per_work, 1 - (phase == "decode"), 11)).astype(int)
        keys = exp2(np.clip(low + np.arange(7) / per_key, 4, 15)).astype(int)
        if phase == "decode":
            batches = [[[(k - 1, 1)] * n for k in keys] for n in works]
        else:
            batches = [[[(k, n)] for k in keys] for n in works]
        times = np.array([[price(cost, batch, {0: batch_sums(batch, 0)}) for batch in line] for line in batches])
        assert times[:, 1:] == pytest.approx(np.maximum.accumulate(times, 1)[:, 1:], rel=0.05)
        assert times[1:] == pytest.approx(np.maximum.accumulate(times, 0)[1:], rel=0.15)


def test_a_small_chunk_behind_a_long_context_is_no_dearer_than_a_large_one():
    """Of shapes not measured on this device (one query head per key head) 16 tokens took twice as long as 256."""
    cost = compile_step_cost(*deployment("Llama-2-7B", "rtx-4090", max_model_len=64))
    few, many = ([(3500, n)] for n in (16, 256))
    attention = replace(cost, linear=0 * cost.linear, head=0 * cost.head)
    few, many = (price(attention, batch, {0: batch_sums(batch, 0)}) for batch in (few, many))
    assert few < 1.15 * many


def test_an_operator_is_its_law():
    """Without a calibration the split of an operator adds up to fixed + soft maximum, whichever side binds."""
    placement, _ = deployment("Llama-3.1-70B", "mi300x", 4)
    hardware = placement.hardware.model_copy(update={"name": "none", "generation": "tpu", "num_sms": None})
    sums = batch_sums([(0, 700), (3000, 1), (10, 1)], 0)
    for operator in forward_pass(placement):
        shares = {"bandwidth": 0.7, "flops": 0.6, "fixed": 3e-6, "softness": 0.1}
        plain = OperatorEfficiency(**shares, provenance="assumed", source="test")
        device = hardware.model_copy(update={"efficiency": {operator.operator_class: plain}})
        speed, split = rate(device, operator), zero_split(1)
        add_time(split, operator, speed, sums)
        assert (split >= 0).all()
        assert split[0, [HOST, DRAFT]].sum() == 0
        assert (split[0, COLLECTIVES] > 0) == (operator.operator_class == "collective")
        if operator.message:
            continue
        moved = sum(evaluate(a, sums) for a in (operator.weights, operator.kv, operator.activations))
        a, b = moved * speed.per_byte, evaluate(operator.flops, sums) * speed.per_flop
        soft = (a + b + math.sqrt((a - b) ** 2 + 4 * speed.softness * a * b)) / 2
        assert split.sum() == pytest.approx(operator.count * (speed.fixed + soft))


def test_what_binds_a_step():
    """A decode step is weights, a long prefill is compute, long contexts are KV (the notes' law)."""
    cost = compile_step_cost(*deployment("Llama-3.1-70B", "h100-sxm", 8))
    assert cost.linear[1].argmax() == WEIGHTS
    assert cost.linear[8192].argmax() == COMPUTE
    (row,) = cost.attention
    assert row["decode_kv"] > 10 * row["decode_compute"]
    assert cost.linear[1, KV] < 0.01 * cost.linear[1, WEIGHTS]


@settings(max_examples=60, deadline=None)
@given(
    hardware=st.sampled_from(MACHINES),
    model=st.sampled_from(["Llama-3.1-8B", "Qwen3-0.6B", "Gemma-2-9B", "OPT-6.7B", "GPT-2"]),
    context=st.integers(0, 900),
    prompt=st.integers(2, 1000),
)
def test_no_step_is_faster_than_physics(hardware, model, context, prompt):
    """Bytes at peak bandwidth, FLOPs at peak rate: neither a decode nor a prefill step beats them."""
    deployed = deployment(model, hardware, max_num_batched_tokens=2048, max_num_seqs=64)
    cost = compile_step_cost(*deployed)
    windows = {layer.attention.window for layer in deployed[0].model.layers}
    decode = price(cost, [(context, 1)], {w: batch_sums([(context, 1)], w) for w in windows})
    prefill = price(cost, [(0, prompt)], {w: batch_sums([(0, prompt)], w) for w in windows})
    assert decode > floor_itl(deployed[0], context)
    assert prefill > floor_ttft(deployed[0], prompt)


@settings(max_examples=30, deadline=None)
@given(
    hardware=st.sampled_from(MACHINES),
    change=st.sampled_from(["memory_bandwidth", "flops"]),
    factor=st.floats(1.0, 4.0),
)
def test_a_better_device_is_never_slower(hardware, change, factor):
    placement, engine = deployment("Llama-3.1-8B", hardware, max_num_batched_tokens=1024, max_num_seqs=64)
    device = placement.hardware
    value = getattr(device, change)
    better = {key: v * factor for key, v in value.items()} if isinstance(value, dict) else value * factor
    before = compile_step_cost(placement, engine)
    after = compile_step_cost(replace(placement, hardware=device.model_copy(update={change: better})), engine)
    assert (after.linear.sum(1) <= before.linear.sum(1) * (1 + 1e-12)).all()
    assert (after.head.sum(1) <= before.head.sum(1) * (1 + 1e-12)).all()
    for name in before.attention.dtype.names:
        rises = after.attention[name] > before.attention[name] * (1 + 1e-12)
        assert name.endswith(("_axes", "_grid")) or not rises.any()


@pytest.mark.parametrize("hardware", MACHINES)
def test_more_work_takes_longer(hardware):
    cost = compile_step_cost(*deployment("Llama-3.1-8B", hardware, max_num_batched_tokens=4096, max_num_seqs=256))
    for table in (cost.linear, cost.head):
        assert not table[0].any()
        assert (np.diff(table.sum(1)) >= -1e-15).all()
        assert np.isfinite(table).all()
        assert (table >= 0).all()


def test_graphs_pad_and_launch_cheaply():
    """Up to the largest captured size a step computes the next size up, and its kernels start faster."""
    deployed = deployment("Llama-3.1-8B", "h100-sxm", max_num_batched_tokens=2048, max_num_seqs=256)
    linear = compile_step_cost(*deployed).linear
    assert (linear[9] == linear[16]).all()
    assert (linear[257] == linear[272]).all()
    assert linear[272].sum() < linear[273].sum()
    assert linear[513, LAUNCH] - linear[512, LAUNCH] > 1e-6 * sum(op.count for op in forward_pass(deployed[0])) / 1.2
    assert linear[1500].sum() < linear[1501].sum()


@pytest.mark.parametrize(
    ("preset", "most", "sizes", "last"),
    [("vllm-0.11", 256, 67, 512), ("vllm-0.33", 256, 51, 512), ("vllm-0.33", 2, 3, 4), ("vllm-0.33", 100, 28, 200)],
)
def test_capture_sizes(preset, most, sizes, last):
    """0.10.2 logs 67 sizes, later versions 51; the largest is twice max_num_seqs, 512 at most."""
    engine = deployment("Llama-3.1-8B", "h100-sxm", preset=preset, max_num_seqs=most)[-1]
    assert len(capture_sizes(engine)) == sizes
    assert capture_sizes(engine)[-1] == last


def test_tensor_parallelism_over_pcie_pays_for_its_ring():
    """Four ranks over PCIe spend more on collectives than four over NVLink, and more than two do."""

    def collectives(hardware, tensor):
        return compile_step_cost(*deployment("Llama-3.1-8B", hardware, tensor, max_num_seqs=64)).linear[1, COLLECTIVES]

    assert collectives("l40s", 4) > collectives("l40s", 2) > 0
    assert collectives("l40s", 4) > collectives("h100-sxm", 4)
    assert collectives("l40s", 1) == 0
    assert collectives("h100-nvl", 4) > 2 * collectives("h100-nvl", 2)  # a bridge joins two


def test_sums_of_floors_are_those_of_a_batch():
    for window in (0, 300):
        batch = batch_sums([(0, 1000)], window)
        assert prefill_sums(1000)(window)["prefill_pairs"] == batch["prefill_pairs"]
        assert decode_sums(1000)(window)["decode_keys"] == batch_sums([(999, 1)], window)["decode_keys"]


def test_norms_that_quantise_spare_a_kernel():
    """Of every matrix after a norm or an activation, FP8 alone; what is left is still dearer than nothing."""
    steps = {}
    for dtype in ("bf16", "fp8"):
        for fused in (True, False):
            deployed = deployment("Llama-3.1-8B", "h200-sxm", precision=Precision(weights=dtype), fuse_norm_quant=fused)
            steps[dtype, fused] = sum_operators(*deployed).linear[8].sum()
    assert steps["bf16", True] == steps["bf16", False]
    spared = steps["fp8", False] - steps["fp8", True]
    assert 3 * 32 * 1e-6 < spared < 3 * 32 * 4e-6  # one to four microseconds each


def test_an_all_reduce_that_normalises_takes_the_norms_along():
    """Of small messages, and only where there is an all-reduce."""
    saved = {}
    for tensor in (1, 4):
        fused, plain = (
            sum_operators(*deployment("Llama-3.1-8B", "h100-sxm", tensor, fuse_allreduce_rms=fuse, eager_launch_time=0))
            for fuse in (True, False)
        )
        saved[tensor] = (plain.linear - fused.linear).sum(-1)
    assert not saved[1].any()
    assert saved[4][8] == pytest.approx(64 * 2.4e-6, rel=0.2)  # two norms in each of 32 layers
    assert saved[4][1024] > 0  # 8 MiB
    assert saved[4][1025] == 0


def test_a_step_outside_the_graphs_is_not_shorter_than_its_launches():
    """The host's time is exposed where the device is faster, and only as far as that."""
    deployed = deployment("Llama-3.1-8B", "h200-sxm", 8, eager_launch_time=50e-6)
    device = sum_operators(*deployment("Llama-3.1-8B", "h200-sxm", 8, eager_launch_time=0)).linear
    linear = sum_operators(*deployed).linear
    _, captured = padded_tokens(deployed[-1])
    kernels = sum(operator.count for operator in forward_pass(deployed[0]))  # 16 bits: a kernel for each
    assert linear[captured] == pytest.approx(device[captured])
    least = np.maximum(device[~captured].sum(-1), kernels * 50e-6)
    assert linear[~captured].sum(-1) == pytest.approx(least)
    assert (linear[~captured][:100, HOST] > 0).all()
    assert linear[-1, HOST] == 0


def test_without_graphs_every_step_is_launched_kernel_by_kernel():
    """No padding either: a step of 9 tokens is not one of 16; and no memory for graphs."""
    eager = deployment("Llama-3.1-8B", "h200-sxm", 8, enforce_eager=True)
    tokens, captured = padded_tokens(eager[-1])
    assert not captured.any()
    assert tokens.tolist() == list(range(len(tokens)))
    kernels = sum(operator.count for operator in forward_pass(eager[0]))
    assert (sum_operators(*eager).linear[1:].sum(-1) >= kernels * eager[-1].eager_launch_time * (1 - 1e-9)).all()
    assert memory_waterfall(*eager).cuda_graph_bytes == 0


def test_worker_time_is_in_every_step():
    plain, slower = (
        compile_step_cost(*deployment("Llama-3.1-8B", "h100-sxm", **engine))
        for engine in ({}, {"worker_step_time": 1e-3, "worker_sequence_time": 2e-5})
    )
    sequences = np.arange(len(plain.head))
    assert (slower.linear - plain.linear)[1:, HOST] == pytest.approx(1e-3)
    assert (slower.head - plain.head)[:, HOST] == pytest.approx(2e-5 * sequences)
    assert (slower.linear - plain.linear).sum() == pytest.approx(1e-3 * (len(plain.linear) - 1))
