"""What makes engines differ, each rule on a case small enough to count by hand. Every step takes 1 s."""

import numpy as np
import pytest

from infersim.config.engine import Engine
from infersim.config.hardware import load_hardware
from infersim.config.presets import packaged_presets
from infersim.deployment import resolve
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.knobs import lowered
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs


def serve(requests, **knobs) -> np.ndarray:
    """Records of (arrival, prompt, output, max_tokens) tuples; 8 usable blocks of 4 tokens unless told otherwise."""
    values = {"block_size": 4, "num_gpu_blocks": 9, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    values |= {"max_model_len": 32, **knobs}
    linear = np.zeros((values["max_num_batched_tokens"] + 1, len(state.RESOURCES)))
    linear[1:, 0] = 1.0
    head = np.zeros((values["max_num_seqs"] + 1, len(state.RESOURCES)))
    cost = StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE))
    fleet = Fleet([ReplicaSpec(make_knobs(**values), cost)])
    fleet.submit(0, *zip(*requests, strict=True))
    fleet.advance()
    assert (fleet.requests["status"] == state.COMPLETED).all()
    return fleet.requests


def test_static_batching_waits_for_the_last_of_a_batch():
    """Batches of two sequences of max_model_len 16; the second begins when the longer request of the first ends."""
    records = serve(
        [(0, 4, 3, 3), (0, 4, 9, 9), (0, 4, 2, 2), (0, 4, 2, 2)],
        max_model_len=16, reserve="max-model-len", admit_when_idle=1,
    )  # fmt: skip
    assert records["last_token"].tolist() == [3, 9, 11, 11]


def test_orca_refills_the_batch_but_reserves_the_longest_sequence():
    """Two places; the third request takes the first one's place at 3 s, not the fourth block that is free."""
    records = serve([(0, 4, 3, 3), (0, 4, 9, 9), (0, 4, 2, 2)], max_model_len=16, reserve="max-model-len")
    assert records["scheduled"].tolist() == [0, 0, 3]
    assert records["last_token"].tolist() == [3, 9, 5]


def test_paging_admits_all_of_them():
    records = serve([(0, 4, 3, 3), (0, 4, 9, 9), (0, 4, 2, 2)], max_model_len=16)
    assert records["scheduled"].tolist() == [0, 0, 0]


def test_no_evict_counts_what_is_still_to_come():
    """Prompt of 4 and up to 12 more are 4 blocks: two fit at once, whatever they really generate; no preemption."""
    requests = [(0, 4, 12, 12), (0, 4, 12, 12), (0, 4, 12, 12)]
    records = serve(requests, reserve="to-completion")
    assert records["scheduled"].tolist() == [0, 0, 12]
    assert records["num_preemptions"].tolist() == [0, 0, 0]
    paged = serve(requests)
    assert paged["scheduled"].tolist() == [0, 0, 0]
    assert paged["num_preemptions"].sum() > 0


def test_prefills_alone_stall_decodes():
    """A request that arrives during the decode of another takes a whole step, in which the other gets no token."""
    requests = [(0, 4, 5, 5), (1.5, 8, 1, 1)]
    assert serve(requests)["last_token"].tolist() == [5, 3]
    assert serve(requests, order="prefills-only")["last_token"].tolist() == [6, 3]


def test_the_order_within_a_step_changes_nothing_that_fits():
    """Chunks of 2 for a prompt of 12 beside a decode, in a budget of 4."""
    requests = [(0, 12, 1, 1), (0, 2, 4, 4)]
    knobs = {"max_num_batched_tokens": 4, "long_prefill_token_threshold": 2}
    for order in ("running-first", "decodes-first"):
        assert serve(requests, order=order, **knobs)["last_token"].tolist() == [6, 4]


def test_a_retracted_request_goes_to_the_end():
    """SGLang's victim has the fewest outputs; vLLM's is the last. The older of two equal ones stays."""
    requests = [(0, 12, 12, 12), (3.5, 12, 12, 12), (4.5, 4, 2, 2)]
    retracted = serve(requests, order="prefills-only", retracts=1, num_gpu_blocks=9)
    assert retracted["num_preemptions"].tolist()[0] == 0
    assert retracted["num_preemptions"].sum() > 0


def test_admission_by_expected_tokens():
    """At ratio 1 SGLang keeps room for all that two requests may generate; at ratio 0 for nothing of those that run."""
    requests = [(0, 8, 8, 8), (0.5, 8, 8, 8), (1.5, 8, 8, 8)]
    knobs = {"order": "prefills-only", "retracts": 1, "clip_max_new_tokens": 4096}
    careful = serve(requests, new_token_ratio=1.0, min_new_token_ratio=1.0, **knobs)
    bold = serve(requests, new_token_ratio=0.0, **knobs)
    assert (bold["scheduled"] <= careful["scheduled"]).all()
    assert bold["scheduled"].sum() < careful["scheduled"].sum()
    assert careful["num_preemptions"].sum() == 0


@pytest.mark.parametrize("preset", packaged_presets())
@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-sxm-40gb", "rtx-4090", "b200-sxm"])
def test_every_preset_resolves_on_every_size_of_device(preset, hardware):
    engine = resolve(Engine(preset=preset), load_hardware(hardware), 8192)
    assert engine.max_num_seqs <= engine.max_num_batched_tokens
    assert engine.order in state.CODES["order"]
    assert engine.reserve in state.CODES["reserve"]
    assert engine.late_hits in state.CODES["late_hits"]


LIVELOCK = [(0.1 * i, 1 + 7 * i % 30, 1 + 5 * i % 17, 1 + 5 * i % 17) for i in range(60)]


@pytest.mark.parametrize("preset", packaged_presets())
@pytest.mark.parametrize("num_gpu_blocks", [13, 14, 19])
def test_tiny_caches_end(preset, num_gpu_blocks):
    """A pool in which one request of max_model_len just fits: every request is served, whatever the engine."""
    row = packaged_presets()[preset].values
    knobs = {field: row[knob.name] for field, knob in lowered().items() if row[knob.name] is not None}
    del knobs["host_step_time"], knobs["host_request_time"], knobs["allocator"]  # a buddy allocator needs 16 blocks
    found = row["enable_prefix_caching"] and row["prefix_cache"]
    records = serve(
        LIVELOCK, **knobs, num_gpu_blocks=num_gpu_blocks, max_model_len=48, max_num_batched_tokens=48,
        steps_in_flight=1 + row["async_scheduling"], enable_prefix_caching=found == "blocks", radix=found == "radix",
        watermark_blocks=1 if row["watermark"] else 0,
    )  # fmt: skip
    assert (records["num_output_tokens"] == records["stop_tokens"]).all()
