"""One law: closed forms price a batch as the compiled engine does, and slowness is a factor of every step."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from infersim.config.early_exit import EarlyExit
from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.lora import Lora
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.presets import packaged_presets
from infersim.config.speculation import Acceptance, Speculation
from infersim.cost.batch import Part, batch_time, draft_time, drafting_time, step_split, step_time
from infersim.deployment import deploy
from infersim.engine.compiled.state import KNOBS, RESOURCES
from infersim.engine.fleet import Fleet
from infersim.engine.replica import ReplicaSpec
from infersim.workload.acceptance import acceptance_table

DRAFT = RESOURCES.index("draft")
HOST_TIMES = [name for name in KNOBS.names if name.startswith("host_")]


def described(method: str, **more) -> Speculation:
    return Speculation(method=method, num_speculative_tokens=3, acceptance=Acceptance(rate=0.6), **more)


EAGLE, SMALL = described("eagle"), described("draft_model", model="Llama-3.2-1B")
CASES = {  # model, device, parallelism, speculation
    "corrected": ("Llama-3.1-8B", "h100-sxm", {}, None),
    "mixed steps": ("Llama-3.1-8B", "rtx-pro-6000", {}, None),
    "windows": ("Gemma-2-9B", "h100-sxm", {}, None),
    "windows, no calibration": ("Gemma-3-4B", "l40s", {}, None),
    "eagle": ("Llama-3.1-8B", "h100-sxm", {}, EAGLE),
    "draft model": ("Llama-3.1-8B", "h100-sxm", {"tensor": 2}, SMALL),
    "windows, drafts": ("Gemma-2-9B", "h100-sxm", {}, EAGLE),
    "pipeline": ("Llama-3.1-70B", "h100-sxm", {"tensor": 4, "pipeline": 2}, None),
    "ranks": ("Mixtral-8x7B", "h200-sxm", {"attention_data": 2, "expert": 2}, None),
}


def spec_of(model: str, device: str, parallelism: dict, speculation: Speculation | None, **more) -> ReplicaSpec:
    """A replica whose host takes no time and that makes one step after the other, so that a step is what it costs."""
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 6000}
    engine = Engine(**sizes | more.pop("engine", {}))
    split = Parallelism.validate(parallelism, "test")
    replica = deploy(
        model, load_hardware(device), more.pop("precision", Precision()), split, engine, speculation, **more
    ).replica()
    knobs = replica.knobs.copy()
    for name in HOST_TIMES:
        knobs[name] = 0.0
    knobs["async_scheduling"], knobs["steps_in_flight"], knobs["num_gpu_blocks"] = 0, 1, 20_000
    return ReplicaSpec(knobs[()], replica.cost, replica.draft, replica.drafts)


def fleet_of(case: str, prompts, outputs, seed: int = 0) -> tuple[Fleet, ReplicaSpec]:
    """All requests are there at the beginning."""
    _, _, parallelism, speculation = CASES[case]
    replica = spec_of(*CASES[case])
    accepted = acceptance_table(speculation) if speculation else None
    fleet = Fleet([replica], parallelism.get("attention_data", 1), acceptance=accepted, seed=seed)
    fleet.submit(0, np.zeros(len(prompts)), prompts, outputs, outputs)
    return fleet, replica


def steps_of(fleet: Fleet, prompts):
    """(batch, seconds, busy seconds by resource) of each step of a replica of one rank."""
    computed, before, spent = np.zeros(len(prompts), int), 0.0, np.zeros(len(RESOURCES))
    fleet.advance(1e-12)  # the first step is under way
    while fleet.replicas[0]["in_flight"]:
        after, drafts = fleet.requests["num_computed_tokens"].astype(int), fleet.tokens[0, 0] & 0xFFFF
        batch = []
        for i, q in enumerate(fleet.steps[0, 0, : fleet.counts[0, 0]].tolist()):
            samples, q = q >= 0, q if q >= 0 else ~q
            decodes = computed[q] >= prompts[q]
            n = 1 + int(drafts[i]) if decodes else int(after[q] - computed[q])
            batch.append(Part(int(after[q]) - n, n, 1, n - 1 if decodes else 0, samples))
        computed, end = after, float(fleet.step_end[0, 0])
        split = fleet.time_by_resource
        yield batch, end - before, split - spent
        before, spent = end, split
        fleet.advance(np.nextafter(end, np.inf))


@pytest.mark.parametrize("case", [case for case in CASES if case != "ranks"])
def test_closed_forms_price_what_the_engine_prices(case):
    """Random batches of chunks, decodes and verified drafts, beside and without one another, step by step."""
    random = np.random.default_rng(sorted(CASES).index(case))
    prompts, outputs = random.integers(2, 5000, 24), random.integers(2, 40, 24)
    fleet, replica = fleet_of(case, prompts, outputs)
    kinds = set()
    for batch, seconds, by_resource in steps_of(fleet, prompts):
        want = step_split(replica.cost, batch)
        if replica.draft is not None:
            want[DRAFT] += drafting_time(replica.draft, replica.cost, batch, 3)
        assert seconds == pytest.approx(want.sum(), rel=1e-12)
        assert by_resource == pytest.approx(want * replica.cost.issue_share, rel=1e-9, abs=1e-15)
        kinds.add((any(p.tokens > 1 and not p.drafts for p in batch), any(p.tokens == 1 or p.drafts for p in batch)))
    assert kinds == {(True, False), (True, True), (False, True)}, "chunks alone, beside decodes, and decodes alone"


@st.composite
def deployments(draw) -> dict:
    """What spec_of wants, of one rank: every preset, precision, device, parallelism; drafts, exits or adapters."""
    preset = draw(st.sampled_from(sorted(packaged_presets())))
    case = {
        "model": draw(st.sampled_from(["Llama-3.1-8B", "Gemma-2-9B", "Qwen3-30B-A3B", "Gemma-3-4B"])),
        "device": draw(st.sampled_from(["h100-sxm", "a100-sxm-80gb", "l40s", "rtx-pro-6000"])),
        "parallelism": draw(st.sampled_from([{}, {"tensor": 2}, {"pipeline": 2}])),
        "speculation": draw(st.sampled_from([None, EAGLE])),
        "precision": Precision(kv_cache=draw(st.sampled_from(["auto", "fp8"]))),
        "engine": {
            "preset": preset,
            "enable_prefix_caching": False,
            "max_model_len": 560,
            "max_num_batched_tokens": 560,
        },
    }
    exits = EarlyExit(exit_layers=[8, 16], shares=[0.2, 0.3])
    more = [{}, {"early_exit": exits}, {"lora": Lora(adapters={"one": 16})}]
    return case | draw(st.sampled_from(more))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(deployments(), st.integers(0, 2**32), st.sampled_from([1.0, 1.7]))
def test_the_engine_spends_what_the_law_says_by_resource(case, seed, slow):
    """Every step of random deployments, whole or slow, against the plain functions on the same batch."""
    try:
        replica = spec_of(**case)
    except InputError:
        assume(False)
    random = np.random.default_rng(seed)
    prompts, outputs = random.integers(2, 500, 20), random.integers(2, 30, 20)
    accepted = acceptance_table(EAGLE) if case["speculation"] else None
    fleet = Fleet([replica], acceptance=accepted, seed=seed)
    fleet.submit(0, np.zeros(len(prompts)), prompts, outputs, outputs)
    fleet.slow_down(0, slow)
    for batch, seconds, by_resource in steps_of(fleet, prompts):
        want = step_split(replica.cost, batch) * slow
        if replica.draft is not None:
            want[DRAFT] += drafting_time(replica.draft, replica.cost, batch, 3) * slow
        assert seconds == pytest.approx(want.sum(), rel=1e-9)
        assert by_resource == pytest.approx(want * replica.cost.issue_share, rel=1e-9, abs=1e-15)
    assert (fleet.requests["num_output_tokens"] == outputs).all()


@pytest.mark.parametrize("case", ["corrected", "windows, drafts"])
def test_uniform_batches_are_the_same_law(case):
    """What break-even, goodput's drafts and early exit ask: equal sequences, one by one or by their number."""
    replica, k = spec_of(*CASES[case]), 3 if "drafts" in case else 0
    for sequences, context in ((1, 100), (7, 4096), (16, 5000)):
        batch = [Part(context, 1 + k, drafts=k)] * sequences
        assert batch_time(replica.cost, sequences, context, k) == pytest.approx(
            step_time(replica.cost, batch), rel=1e-14
        )
        if k:
            drafting = drafting_time(replica.draft, replica.cost, batch, k)
            assert draft_time(replica.draft, replica.cost, sequences, context, k) == pytest.approx(drafting, rel=1e-14)


def test_a_calibrated_correction_counts():
    """What the closed forms once left out is there to be seen: several percent of a step."""
    cost = spec_of(*CASES["corrected"]).cost
    assert cost.attention["decode_grid"].any()
    plain = cost.attention.copy()
    plain["decode_grid"] = 0.0
    alone = type(cost)(cost.linear, cost.head, plain)
    assert abs(batch_time(alone, 16, 4000) / batch_time(cost, 16, 4000) - 1) > 0.005


@pytest.mark.parametrize("case", ["corrected", "mixed steps", "windows, drafts", "pipeline", "ranks"])
@pytest.mark.parametrize("factor", [2.0, 1.7])
def test_a_slow_replica_takes_the_factor_in_every_step(case, factor):
    prompts, outputs = [700, 33, 3000, 1, 90, 4000], [20, 9, 30, 40, 5, 12]
    fleets = [fleet_of(case, prompts, outputs)[0] for _ in range(2)]
    fleets[1].slow_down(0, factor)
    for fleet in fleets:
        fleet.advance()
    plain, slow = (fleet.requests for fleet in fleets)
    for column in ("scheduled", "first_token", "last_token"):
        assert slow[column] == pytest.approx(factor * plain[column], rel=1e-12)
    assert (slow["num_output_tokens"] == outputs).all()
    plain, slow = (fleet.time_by_resource for fleet in fleets)
    assert slow == pytest.approx(factor * plain, rel=1e-12)
    assert slow.sum() == pytest.approx(fleets[1].replicas[0]["busy_time"], rel=1e-9)


def test_slowness_begins_and_ends_with_a_step():
    """Between: the steps under way are finished as they began, and afterwards the replica is what it was."""
    prompts = [200] * 4
    fleet, replica = fleet_of("corrected", prompts, [50] * 4)
    for number, (batch, seconds, _) in enumerate(steps_of(fleet, prompts)):
        factor = 3.0 if 10 < number <= 20 else 1.0
        assert seconds == pytest.approx(factor * step_time(replica.cost, batch), rel=1e-12)
        if number in (10, 20):  # this one is under way
            fleet.slow_down(0, 3.0 if number == 10 else 1.0)


def test_slowing_down_takes_no_memory():
    fleet, _ = fleet_of("windows, drafts", [100], [10])
    sizes = {name: value.nbytes for name, value in vars(fleet).items() if isinstance(value, np.ndarray)}
    for factor in np.linspace(1.0, 3.0, 10_000):
        fleet.slow_down(0, factor)
    assert {name: value.nbytes for name, value in vars(fleet).items() if isinstance(value, np.ndarray)} == sizes
