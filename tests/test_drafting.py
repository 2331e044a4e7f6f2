"""What drafting costs: against bytes, between methods, and in memory."""

from dataclasses import replace

import numpy as np
import pytest

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.speculation import Acceptance, Speculation
from infersim.cost.batch import batch_time, decodes, draft_time, step_split
from infersim.cost.drafting import (
    compile_draft_cost,
    drafter,
    own_bytes,
    seen_by,
    verification_engine,
    with_drafter,
)
from infersim.cost.placement import Placement
from infersim.cost.steptime import compile_step_cost
from infersim.deployment import deploy
from infersim.models.catalog import load_model


def described(method: str, k: int = 4, **more) -> Speculation:
    return Speculation(method=method, num_speculative_tokens=k, acceptance=Acceptance(rate=0.7), **more)


@pytest.fixture(scope="module")
def deployment():
    engine = Engine(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=4096)
    return deploy("Llama-3.1-8B", load_hardware("h100-sxm"), Precision(), Parallelism(), engine)


METHODS = [
    described("draft_model", model="Llama-3.2-1B"),
    described("eagle"),
    described("eagle3"),
    described("mtp"),
    described("medusa"),
    described("ngram"),
    described("dflash"),
    described("p-eagle"),
    described("self", exit_layer=8),
    described("eagle", 16, tree={"depth": 4, "width": 4}),
]


@pytest.mark.parametrize("speculation", METHODS, ids=lambda s: s.method + ("-tree" if s.tree else ""))
def test_no_drafting_is_faster_than_its_bytes(deployment, speculation):
    """Each pass reads the drafter's weights; and more drafts never cost less."""
    cost = compile_draft_cost(speculation, deployment.placement, deployment.engine)
    k = speculation.num_speculative_tokens
    target = deployment.step_cost()
    seconds = draft_time(cost, target, 1, 1000, k)
    model = drafter(speculation, deployment.model)
    if model is not None:
        read = 2 * (
            sum(layer.num_params(model.hidden_size) for layer in model.layers) + model.vocab_size * model.hidden_size
        )
        passes = 1 if speculation.method in ("dflash", "p-eagle") else speculation.depth
        assert seconds > passes * read / deployment.hardware.memory_bandwidth
    elif speculation.method == "medusa":
        assert seconds > own_bytes(speculation, deployment.placement)[0] / deployment.hardware.memory_bandwidth
    times = [draft_time(cost, target, 8, 1000, n) for n in range(1, k + 1)]
    assert times == sorted(times)
    assert draft_time(cost, target, 32, 1000, k) >= draft_time(cost, target, 1, 1000, k)


def test_verification_is_cheap_while_bytes_bind_and_then_is_not(deployment):
    verify = compile_step_cost(deployment.placement, verification_engine(deployment.engine, 7))
    plain = deployment.step_cost()
    ratios = [batch_time(verify, b, 500, 7) / batch_time(plain, b, 500) for b in (1, 8, 32, 64)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1.03
    assert ratios[-1] > 1.4


def test_eagle3_drafts_cheaper_than_eagle_and_both_than_a_draft_model(deployment):
    seconds = [
        draft_time(compile_draft_cost(s, deployment.placement, deployment.engine), deployment.step_cost(), 1, 1000, 4)
        for s in (described("ngram"), described("eagle3"), described("eagle"), METHODS[0])
    ]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("method", ["dflash", "p-eagle"])
def test_drafts_of_one_pass_hardly_cost_more_than_one(deployment, method):
    """A block of 16 tokens takes less time than four of EAGLE-3's passes (LMSYS' figure for five layers of DFlash), and
    little more than one draft: the layers are read once. EAGLE's cost grows with each."""

    def seconds(method: str, k: int, batch: int = 1) -> float:
        cost = compile_draft_cost(described(method, k), deployment.placement, deployment.engine)
        return draft_time(cost, deployment.step_cost(), batch, 1000, k)

    assert seconds(method, 15) < seconds("eagle3", 4)
    assert seconds(method, 15) < 1.1 * seconds(method, 1)
    assert seconds("eagle3", 15) > 4 * seconds("eagle3", 1)
    own = drafter(described(method), deployment.model)
    assert own_bytes(described(method), deployment.placement)[1] == 4096 * own.num_layers  # keys and values, 16 bits


def test_slots_of_drafters():
    """vLLM's table in SpeculativeConfig.max_num_new_slots_for_drafting."""
    found = [described(name, 5, **more).draft_slots for name, more in (
        ("eagle3", {}), ("p-eagle", {}), ("dflash", {}), ("mtp", {}), ("ngram", {}),
        ("draft_model", {"model": "Llama-3.2-1B"}))]  # fmt: skip
    assert found == [0, 4, 5, 0, 0, 1]


def test_the_drafter_takes_memory(deployment):
    """Weights off the KV cache, keys and values into every block; self-speculation and look-ups take none."""
    weights, kv = own_bytes(METHODS[0], deployment.placement)
    small = load_model("Llama-3.2-1B")
    assert weights == pytest.approx(2 * small.num_params, rel=0.01)
    assert kv == small.kv_bytes_per_token(2)
    memory = with_drafter(deployment.memory, weights, kv)
    assert memory.num_gpu_blocks < deployment.memory.num_gpu_blocks
    used = memory.num_gpu_blocks * memory.block_bytes + weights
    assert used <= deployment.memory.num_gpu_blocks * deployment.memory.block_bytes < used + memory.block_bytes
    for free in (described("ngram"), described("self", exit_layer=4)):
        assert own_bytes(free, deployment.placement) == (0, 0)
    with pytest.raises(InputError, match="leave no KV cache"):
        with_drafter(deployment.memory, 1e12, 0)


def test_an_mtp_layer_is_as_large_as_published():
    """DeepSeek-V3's README_WEIGHTS: 11.5e9 parameters beside the shared embedding and head, in FP8 as the model is; its
    latent is whole on every rank. An EAGLE head, which has a checkpoint of its own, stays in 16 bits."""
    placements = [Placement(load_model("DeepSeek-V3"), load_hardware("h200-sxm"), parallelism=Parallelism(tensor=t))
                  for t in (1, 8)]  # fmt: skip
    (weights, kv), (part, kept) = (own_bytes(described("mtp"), placement) for placement in placements)
    assert weights == pytest.approx(11.5e9, rel=0.03)
    assert part == pytest.approx(weights / 8, rel=0.25)  # projections of the latent and of the inputs are whole
    assert kv == kept == (512 + 64) * 2
    assert own_bytes(described("eagle"), placements[0])[0] == pytest.approx(2 * 11.5e9, rel=0.03)


def test_what_cannot_draft_is_named(deployment):
    with pytest.raises(InputError, match="same vocabulary"):
        drafter(described("draft_model", model="Qwen3-0.6B"), deployment.model)
    with pytest.raises(InputError, match="exit_layer: must be below the 32 layers"):
        drafter(described("self", exit_layer=32), deployment.model)


def test_passes_by_number_of_drafts(deployment):
    """EAGLE's first pass is over the step's own tokens; the exit layers need one for each draft."""
    eagle = compile_draft_cost(described("eagle"), deployment.placement, deployment.engine)
    own = compile_draft_cost(described("self", exit_layer=8), deployment.placement, deployment.engine)
    assert eagle.passes.tolist() == [0, 0, 1, 2, 3]
    assert own.passes.tolist() == [0, 1, 2, 3, 4]
    assert np.all(own.first == 0)


@pytest.mark.parametrize(("target", "drafter"), [("Gemma-3-27B", "Gemma-3-4B"), ("gpt-oss-120b", "gpt-oss-20b")])
def test_a_drafter_with_windows_reads_no_more_than_they_show(target, drafter):
    """A further pass costs what the drafter's own step of one token would: its windows end the growth with context."""
    speculation = described("draft_model", model=drafter)
    deployed = deploy(target, load_hardware("h200-sxm"), Precision(), Parallelism(), Engine(), speculation)
    spec = deployed.replica()
    alone = deploy(drafter, load_hardware("h200-sxm"), Precision(), Parallelism(), Engine()).step_cost()
    for context in (200, 2_000, 30_000):
        passes = int(spec.draft.passes[4])
        once = spec.draft.first[8 * 5] + spec.draft.once[8]
        got = draft_time(spec.draft, spec.cost, 8, context, 4)
        first = step_split(replace_tables(alone), decodes(8, context, 4)).sum()
        attention = batch_time(replace_tables(alone), 8, context)
        assert got == pytest.approx(once + first + passes * (spec.draft.following[8] + attention), rel=1e-9)


def test_what_only_the_drafter_sees_is_counted(deployment):
    drafter = replace(deployment.placement, model=load_model("Gemma-3-4B"))
    cost, plain = seen_by(drafter, deployment.step_cost()), deployment.step_cost()
    assert cost.attention["window"].tolist() == [0, 1024]
    assert step_split(cost, decodes(8, 9000)) == pytest.approx(step_split(plain, decodes(8, 9000)), rel=1e-14)


def replace_tables(cost):
    """Its attention alone."""
    return replace(cost, linear=np.zeros_like(cost.linear), head=np.zeros_like(cost.head))
