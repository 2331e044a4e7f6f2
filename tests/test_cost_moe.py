"""Experts that a step touches, and how their work falls on ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.collectives import collective
from infersim.cost.moe import TILE, Routing
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.sharding import check_modelled, rank_layer
from infersim.deployment.resolve import deploy
from infersim.models.architecture import MoE
from infersim.models.catalog import load_model

H100 = load_hardware("h100-sxm")


def test_touched_experts_have_a_closed_form():
    """Evenly popular: E (1 - (1 - k / E) ** tokens)."""
    tokens = np.array([0, 1, 2, 7, 64, 1000, 5000, 16384])
    expected = 256 * (1 - (1 - 8 / 256) ** tokens)
    assert Routing(256, 8).touched(tokens) == pytest.approx(expected, rel=1e-4)
    assert Routing(256, 8, ranks=8).touched(tokens) == pytest.approx(expected / 8, rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    experts=st.sampled_from([8, 60, 128, 384]),
    k=st.integers(1, 8),
    skew=st.floats(0, 1.5),
    tokens=st.integers(1, 400),
)
def test_touched_experts_are_those_that_draws_touch(experts, k, skew, tokens):
    """Each expert independently with its chance, 400 draws."""
    routing = Routing(experts, k, skew=skew)
    chances = routing.chances
    assert chances.sum() == pytest.approx(k, rel=1e-6)
    assert (np.diff(chances) <= 0).all()
    rng = np.random.default_rng(0)
    drawn = [(rng.random((tokens, experts)) < chances).any(axis=0).sum() for _ in range(400)]
    assert routing.touched(tokens) == pytest.approx(np.mean(drawn), rel=0.03, abs=0.3)


@pytest.mark.parametrize(("experts", "k", "ranks", "groups"), [
    (128, 8, 8, (1, 1)), (384, 8, 4, (1, 1)), (256, 8, 8, (8, 4)), (256, 8, 4, (8, 4)), (160, 6, 8, (8, 3)),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_the_busiest_rank_is_the_one_of_draws(experts, k, ranks, groups, tokens):
    """Its tokens and its touched experts, mean of 200 draws; a token's experts are in some of the groups."""
    routing, (count, chosen) = Routing(experts, k, ranks, groups=groups[0], groups_per_token=groups[1]), groups
    rng = np.random.default_rng(0)
    order = rng.random((200, tokens, count)).argsort(-1)[..., :chosen]
    allowed = (np.arange(count) == order[..., None]).any(-2).repeat(experts // count, axis=-1)
    picked = np.where(allowed, rng.random((200, tokens, experts)), -1.0).argsort(-1)[..., -k:]
    hits = np.zeros((200, experts), int)
    np.add.at(hits, (np.arange(200)[:, None], picked.reshape(200, -1)), 1)
    by_rank = hits.reshape(200, ranks, -1)
    assert routing.imbalance(tokens) == pytest.approx(by_rank.sum(-1).max(-1).mean() * ranks / (tokens * k), rel=0.09)
    assert routing.most_touched(tokens) == pytest.approx((by_rank > 0).sum(-1).max(-1).mean(), rel=0.06)


def test_skew_touches_fewer_experts_and_loads_ranks_unevenly():
    even, skewed = Routing(128, 8, 8), Routing(128, 8, 8, skew=1.0)
    assert skewed.touched(64) < even.touched(64)
    assert even.imbalance(10**7) == pytest.approx(1, abs=0.01)
    assert skewed.imbalance(10**7) > 1.05
    assert even.imbalance(8) > even.imbalance(800) > 1
    assert even.imbalance(1) <= 8


def test_small_batches_fill_tiles():
    """One token in each of 8 experts computes 8 tiles; thousands per expert half a tile more."""
    routing = Routing(256, 8)
    assert routing.computed(1) == pytest.approx(8 * TILE, rel=1e-6)
    assert routing.computed(16384) == pytest.approx(16384 * 8 + 256 * TILE / 2, rel=1e-3)


def experts_of(model, parallelism=None, precision=None):
    operators = forward_pass(
        Placement(load_model(model), H100, precision or Precision(weights="bf16"), parallelism or Parallelism())
    )
    return [op for op in operators if op.operator_class == "moe"]


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V3", "Llama-4-Scout"])
def test_all_experts_touched_are_all_parameters_of_the_experts(name):
    model = load_model(name)
    h = model.hidden_size
    moes = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    params = sum(moe.num_experts * moe.expert.num_params(h) for moe in moes)
    everything = {"tokens": 10**6, "step": 1}
    read = sum(op.count * op.weights["experts"] * op.routed(everything)["experts"] for op in experts_of(name))
    assert read == pytest.approx(2 * params, rel=1e-3)


def test_ranks_share_the_experts_either_way():
    """Cut or dealt out, ranks together hold and compute what one does, but for chance imbalance."""
    tokens = {"tokens": 10**6, "step": 1}

    def work(parallelism):
        (op,) = experts_of("Qwen3-30B-A3B", parallelism)
        sums = op.routed(tokens)
        return np.array([op.weights["experts"] * sums["experts"], op.flops["expert_tokens"] * sums["expert_tokens"]])

    one = work(Parallelism())
    for parallelism in (Parallelism(tensor=4), Parallelism(tensor=4, expert=4), Parallelism(tensor=4, expert=2)):
        assert work(parallelism) * 4 == pytest.approx(one, rel=0.01)


def test_data_parallel_ranks_send_tokens_to_their_experts():
    """All-to-all there and back, a token to at most as many ranks as it has experts; without expert parallelism all
    tokens go everywhere."""
    model = load_model("Qwen3-30B-A3B")

    def collectives(**parallelism):
        operators = forward_pass(Placement(model, H100, parallelism=Parallelism(**parallelism)))
        return {op.name: op for op in operators if op.message and op.shared}

    sent = collectives(attention_data=8, expert=8, all2all_backend="flashinfer_nvlink_one_sided")
    assert sent.keys() == {"all_to_all"}
    assert 0 < sent["all_to_all"].message["tokens"] <= 2048 * 2 * 8 / 8
    assert collectives(attention_data=8).keys() == {"all_gather", "reduce_scatter"}
    assert collectives(attention_data=8, expert=8).keys() == {"all_gather", "reduce_scatter"}  # vLLM's default
    assert not collectives(tensor=8, expert=8)


@pytest.mark.parametrize(
    ("preset", "hardware", "weights", "there"),
    [
        ("vllm-0.15", "b200-sxm", "nvfp4", 2),
        ("vllm-0.19", "b200-sxm", "nvfp4", 0.5 + 1 / 16),
        ("vllm-0.33", "h100-sxm", "fp8", 1),
        ("vllm-0.33", "b200-sxm", "fp8_block", 1 + 4 / 128),
        ("vllm-0.33", "h100-sxm", "fp8_block", 2),
        ("vllm-0.33", "h100-sxm", "int4", 2),
        ("sglang-0.5", "b200-sxm", "nvfp4", 2),
    ],
)
def test_tokens_travel_to_experts_in_their_format_where_vllm_quantises_first(preset, hardware, weights, there):
    """vLLM pull request 30014 counts hidden / 2 + hidden / 16 bytes of NVFP4; they come back in 16 bits."""
    parallelism = Parallelism(attention_data=8, expert=8)
    parts = load_hardware(hardware), Precision(weights=weights), parallelism, Engine(preset=preset, max_model_len=4096)
    sent = {op.name: op for op in forward_pass(deploy("Qwen3-30B-A3B", *parts).placement) if op.message and op.shared}
    assert [sent[name].message["tokens"] / 2048 for name in ("all_gather", "reduce_scatter")] == [there, 2]


@given(experts=st.integers(4, 64), k=st.integers(1, 4), ranks=st.sampled_from([2, 4]), skew=st.floats(0, 1.5))
@settings(max_examples=30, deadline=None)
def test_copies_of_experts_share_their_work(experts, k, ranks, skew):
    """The largest share falls until all copies have as much to do; what is done stays the same."""
    largest = []
    for copies in (0, ranks, 4 * ranks, 64 * ranks):
        routing = Routing(experts, k, ranks, skew, copies)
        assert len(routing.chances) == experts + copies
        assert routing.chances.sum() == pytest.approx(k, rel=1e-6)
        largest.append(routing.chances.max())
        assert routing.touched(10**7) == pytest.approx(routing.held, rel=1e-3)
    assert largest == sorted(largest, reverse=True)
    assert Routing(experts, k, ranks, skew, 64 * ranks).imbalance(10**7) < 1.12


def test_thirty_two_copies_balance_deepseeks_prefill():
    """DeepSeek-V3 (arXiv:2412.19437, 3.4.1): 32 ranks of 8 experts get one redundant expert each. Where experts are
    chosen evenly copies only take memory; under skew the busiest rank has less to do."""
    plain, copied = (Parallelism(tensor=4, attention_data=8, expert=32, expert_skew=1.0, num_redundant_experts=n)
                     for n in (0, 32))  # fmt: skip
    model = load_model("DeepSeek-V3")
    sparse = next(layer for layer in model.layers if isinstance(layer.mlp, MoE))
    assert [rank_layer(sparse, each).mlp.num_experts for each in (plain, copied)] == [8, 9]
    busiest = [float(Routing.of(sparse.mlp, each).imbalance(32 * 4096)) for each in (plain, copied)]
    assert busiest[0] > 1.5 * busiest[1]
    even = [float(Routing(256, 8, 32, 0.0, n).imbalance(32 * 4096)) for n in (0, 32)]
    assert even[1] >= even[0]
    one = next(op for op in forward_pass(Placement(model, load_hardware("h200-sxm"), parallelism=copied))
               if op.name == "experts")  # fmt: skip
    sums = one.routed({"step": 1.0, "tokens": 1e6})
    assert sums["experts"] == 9
    with pytest.raises(InputError, match=r"parallelism.expert: must divide the 257 experts \(1 of them copies\)"):
        check_modelled(Placement(model, load_hardware("h200-sxm"),
                                 parallelism=Parallelism(tensor=8, expert=8, num_redundant_experts=1)))  # fmt: skip


DISPATCH = {8: 77, 16: 118, 32: 155, 64: 173, 128: 192, 256: 194}
COMBINE = {8: 114, 16: 195, 32: 273, 64: 314, 128: 369, 256: 360}


@pytest.mark.parametrize("ranks", DISPATCH)
def test_low_latency_exchange_takes_what_deepep_measured(ranks):
    """DeepEP's README: H800, 128 tokens a rank, hidden 7168, top 8, FP8 there and BF16 back, us by number of ranks."""
    parallelism = Parallelism(attention_data=ranks, expert=ranks, all2all_backend="deepep_low_latency")
    placement = Placement(load_model("DeepSeek-V3"), load_hardware("h800"), parallelism=parallelism)
    found = [op for op in forward_pass(placement) if op.name == "low_latency_all_to_all"]
    for op, measured in zip(found, (DISPATCH[ranks], COMBINE[ranks]), strict=True):
        law = collective(placement.hardware, op.name, op.dtype, ranks)
        seconds = float(law.seconds(op.message["tokens"] * 128 * ranks))
        assert seconds * 1e6 == pytest.approx(measured, rel=0.15 if ranks > 8 else 0.35)


RDMA = {16: (43, 43), 32: (58, 57), 64: (51, 50)}


@pytest.mark.parametrize("ranks", [8, *RDMA])
def test_forwarded_exchange_takes_what_deepep_measured(ranks):
    """DeepEP's README, normal kernels: H800, 4,096 tokens a rank, 4 groups, FP8 there and BF16 back; GB/s over NVLink
    (153 and 158) or RDMA, of tokens once for each rank of a node, or each node, its own among them."""
    parallelism = Parallelism(attention_data=ranks, expert=ranks, all2all_backend="deepep_high_throughput")
    placement = Placement(load_model("DeepSeek-V3"), load_hardware("h800"), parallelism=parallelism)
    places = ranks if ranks == 8 else min(ranks // 8, 4)
    reached = places * (1 - (1 - 1 / places) ** 8)
    found = [op for op in forward_pass(placement) if op.name == "forwarded_all_to_all"]
    for op, gigabytes, width in zip(found, RDMA.get(ranks, (153, 158)), (1 + 4 / 128, 2), strict=True):
        law = collective(placement.hardware, op.name, op.dtype, ranks, crossing=op.crossing)
        seconds = float(law.seconds(op.message["tokens"] * 4096 * ranks))
        assert seconds == pytest.approx(4096 * 7168 * width * reached / (gigabytes * 1e9), rel=0.17)


def test_backends_of_the_exchange_move_what_they_say():
    """16 ranks, 8 experts a token: 6.4 ranks are reached, 8 experts, or all 16 ranks; FP8 is half as wide."""

    def sent(backend):
        parallelism = Parallelism(attention_data=16, expert=16, all2all_backend=backend)
        placement = Placement(load_model("DeepSeek-V3"), load_hardware("h200-sxm"), parallelism=parallelism)
        ops = [op for op in forward_pass(placement) if op.message and op.shared]
        return [op.message["tokens"] * 16 / 7168 for op in ops]

    reached = 16 * (1 - (1 - 1 / 16) ** 8)
    assert sent("flashinfer_nvlink_one_sided") == pytest.approx([2 * reached] * 2)
    assert sent("deepep_high_throughput") == pytest.approx([(1 + 4 / 128) * reached, 2 * reached])
    assert sent("deepep_low_latency") == pytest.approx([8 * (1 + 4 / 128), 16])
    assert sent("allgather_reducescatter") == pytest.approx([16 * 2] * 2)
