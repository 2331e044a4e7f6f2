"""The oracle against scenarios worked out by hand, and against what must hold in any scenario."""

import numpy as np
import pytest
from hypothesis import given, settings
from oracle import COMPLETED, OVER_MAX_MODEL_LEN, PROMPT_TOO_LONG, REJECTED, simulate
from oracle_price import Sums, price_from_step_cost
from strategies import scenarios

from infersim.engine.compiled.state import ATTENTION_PRICE
from infersim.engine.price import StepCost

SMALL = {"block_size": 4, "num_gpu_blocks": 5, "max_model_len": 16}  # 4 usable blocks


def request(arrival, prompt_tokens, output_tokens, max_tokens=None):
    return {
        "arrival": arrival,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "max_tokens": max_tokens or output_tokens,
    }


def a_second(sums):
    return 1.0, 1.0


def a_second_per_token(sums):
    return float(sums.num_tokens), float(sums.num_tokens)


def test_one_request():
    host = {"host_step_time": 0.25, "host_sequence_time": 0.125, "host_request_time": 0.5}
    outcome = simulate([request(2.0, 10, 3)], host, a_second_per_token)
    # visible at 2.5; every step: 0.375 s of host, then 10, 1 and 1 s of device
    assert outcome.steps == [(2.5, [(0, 10)]), (12.875, [(0, 1)]), (14.25, [(0, 1)])]
    (record,) = outcome.records
    assert (record.status, record.sent, record.scheduled) == (COMPLETED, 2.0, 2.5)
    assert record.token_times == [12.875, 14.25, 15.625]
    assert (record.first_token, record.last_token) == (12.875, 15.625)
    assert outcome.in_system_time == 13.625
    assert (outcome.num_steps, outcome.num_preemptions) == (3, 0)


def test_two_requests_share_a_step():
    outcome = simulate([request(0.0, 4, 3), request(1.0, 2, 2)], {}, a_second_per_token)
    assert outcome.steps == [(0.0, [(0, 4)]), (4.0, [(0, 1), (1, 2)]), (7.0, [(0, 1), (1, 1)])]
    assert [r.token_times for r in outcome.records] == [[4.0, 7.0, 9.0], [7.0, 9.0]]
    assert outcome.in_system_time == 9.0 + 8.0


def test_an_arrival_at_the_end_of_a_step_takes_the_place_that_the_step_frees():
    outcome = simulate([request(0.0, 4, 2), request(2.0, 4, 1)], {"max_num_seqs": 1}, a_second)
    assert outcome.steps == [(0.0, [(0, 4)]), (1.0, [(0, 1)]), (2.0, [(1, 4)])]


def test_a_prompt_over_the_budget_is_chunked():
    outcome = simulate([request(0.0, 5, 3), request(0.0, 12, 1)], {"max_num_batched_tokens": 8}, a_second)
    assert outcome.steps == [(0.0, [(0, 5), (1, 3)]), (1.0, [(0, 1), (1, 7)]), (2.0, [(0, 1), (1, 2)])]
    assert [r.token_times for r in outcome.records] == [[1.0, 2.0, 3.0], [3.0]]  # partial chunks sample nothing


def test_preemption_from_the_tail_recomputes():
    outcome = simulate([request(0.0, 8, 4), request(0.0, 7, 3)], SMALL, a_second)
    # At 1 the first needs a third block and takes it from the second. At 2 the second, now 8 tokens and 2 blocks, does
    # not fit beside the first; at 4 it is computed again, its first output included.
    assert outcome.steps == [
        (0.0, [(0, 8), (1, 7)]),
        (1.0, [(0, 1)]),
        (2.0, [(0, 1)]),
        (3.0, [(0, 1)]),
        (4.0, [(1, 8)]),
        (5.0, [(1, 1)]),
    ]
    assert [r.token_times for r in outcome.records] == [[1.0, 2.0, 3.0, 4.0], [1.0, 5.0, 6.0]]
    assert [r.num_preemptions for r in outcome.records] == [0, 1]
    assert outcome.records[1].scheduled == 0.0


def test_the_tail_preempts_itself_and_nobody_is_admitted_in_that_step():
    outcome = simulate([request(0.0, 5, 2), request(0.0, 8, 2), request(0.5, 1, 1)], SMALL, a_second)
    assert outcome.steps == [(0.0, [(0, 5), (1, 8)]), (1.0, [(0, 1)]), (2.0, [(1, 9), (2, 1)])]
    assert outcome.records[1].token_times == [1.0, 3.0]


def test_the_head_of_the_line_blocks():
    requests = [request(0.0, 8, 5), request(0.0, 12, 1), request(0.0, 2, 1)]
    outcome = simulate(requests, SMALL, a_second)
    assert outcome.steps[0] == (0.0, [(0, 8)])  # 2 blocks are free: the second needs 3, the third would fit
    assert outcome.steps[5:] == [(5.0, [(1, 12), (2, 2)])]


def test_first_chunk_check_admits_what_the_full_isl_gate_holds_back():
    requests = [request(0.0, 4, 6), request(0.0, 13, 1)]
    knobs = SMALL | {"max_num_batched_tokens": 8}
    # By the first chunk alone the second is admitted three times and three times gives way.
    outcome = simulate(requests, knobs, a_second)
    assert outcome.steps == [
        (0.0, [(0, 4), (1, 4)]),
        (1.0, [(0, 1)]),
        (2.0, [(0, 1), (1, 7)]),
        (3.0, [(0, 1)]),
        (4.0, [(0, 1), (1, 7)]),
        (5.0, [(0, 1)]),
        (6.0, [(1, 8)]),
        (7.0, [(1, 5)]),
    ]
    assert outcome.num_preemptions == 3
    gated = simulate(requests, knobs | {"reserve_full_isl": True}, a_second)
    assert [step for _, step in gated.steps] == [[(0, 4)], *[[(0, 1)]] * 5, [(1, 8)], [(1, 5)]]
    assert gated.num_preemptions == 0


@pytest.mark.parametrize(("watermark_blocks", "first"), [(0, [(0, 8), (1, 8)]), (1, [(0, 8)])])
def test_watermark_holds_back_unless_nothing_runs(watermark_blocks, first):
    knobs = SMALL | {"watermark_blocks": watermark_blocks}
    outcome = simulate([request(0.0, 8, 1), request(0.0, 8, 1)], knobs, a_second)
    assert outcome.steps[0] == (0.0, first)
    assert simulate([request(0.0, 15, 1)], knobs, a_second).num_steps == 1


ASYNC = {"steps_in_flight": 2, "async_scheduling": True, "host_step_time": 0.25}


def test_async_scheduling_hides_the_host():
    outcome = simulate([request(0.0, 3, 3)], ASYNC, a_second)
    # The first two are scheduled at once, the third when the first has ended. The last token is foreseen: no fourth.
    assert outcome.steps == [(0.0, [(0, 3)]), (0.25, [(0, 1)]), (1.25, [(0, 1)])]
    assert outcome.records[0].token_times == [1.25, 2.25, 3.25]
    synchronous = simulate([request(0.0, 3, 3)], {"host_step_time": 0.25}, a_second)
    assert synchronous.records[0].token_times == [1.25, 2.5, 3.75]


def test_async_scheduling_wastes_a_step_after_an_eos():
    outcome = simulate([request(0.0, 3, 3, max_tokens=5), request(3.5, 1, 1)], ASYNC, a_second)
    assert outcome.steps[:4] == [(0.0, [(0, 3)]), (0.25, [(0, 1)]), (1.25, [(0, 1)]), (2.25, [(0, 1)])]
    assert outcome.records[0].token_times == [1.25, 2.25, 3.25]
    assert outcome.steps[4:] == [(4.25, [(1, 1)])]  # the engine waits for the wasted step
    assert outcome.records[1].token_times == [5.5]


def test_async_token_in_flight_of_a_preempted_request_counts():
    requests = [request(0.0, 8, 2), request(0.0, 8, 1, max_tokens=4)]
    outcome = simulate(requests, SMALL | ASYNC | {"host_step_time": 0.0}, a_second)
    # The step at 0 is in flight when the first takes a block of the second, whose only token it brings.
    assert outcome.steps == [(0.0, [(0, 8), (1, 8)]), (0.0, [(0, 1)])]
    assert outcome.num_preemptions == 1
    assert outcome.records[1].token_times == [1.0]


def test_pipeline_takes_chunks_but_waits_for_tokens():
    knobs = {"steps_in_flight": 2, "max_num_batched_tokens": 2}
    outcome = simulate([request(0.0, 4, 2)], knobs, lambda sums: (1.0, 2.0))
    assert outcome.steps == [(0.0, [(0, 2)]), (0.0, [(0, 2)]), (3.0, [(0, 1)])]
    assert outcome.records[0].token_times == [3.0, 5.0]


def test_pipeline_steps_do_not_overtake():
    knobs = {"steps_in_flight": 2, "max_num_batched_tokens": 4}
    outcome = simulate([request(0.0, 5, 1)], knobs, lambda sums: (sums.num_tokens, 2 * sums.num_tokens))
    assert outcome.records[0].token_times == [8.0]  # 4 tokens take until 8, the fifth enters at 4 and could be out at 6


def test_pipeline_resumes_a_preempted_request_when_its_steps_have_come_back():
    knobs = {"block_size": 4, "num_gpu_blocks": 6, "max_model_len": 20, "long_prefill_token_threshold": 4}
    knobs |= {"steps_in_flight": 3, "host_step_time": 0.5}
    outcome = simulate([request(0.0, 16, 1), request(0.25, 8, 2)], knobs, lambda sums: (1.0, 3.0))
    # At 3.5 the first takes a block of the second, whose token is due at 5.5: not resumed at 4.5, though a chunk fits.
    assert outcome.steps == [
        (0.0, [(0, 4)]),
        (0.5, [(0, 4), (1, 4)]),
        (1.0, [(0, 4), (1, 4)]),
        (3.5, [(0, 4)]),
        (5.5, [(1, 4)]),
        (9.0, [(1, 4)]),  # at 6 it found no block for its next chunk and gave way again
        (9.5, [(1, 4)]),
        (10.0, [(1, 1)]),
    ]
    assert [r.token_times for r in outcome.records] == [[7.0], [5.5, 14.5]]


def test_max_concurrency_sends_when_a_place_is_free():
    requests = [request(0.0, 1, 2), request(0.0, 16, 1), request(0.5, 1, 2), request(10.0, 1, 1)]
    knobs = SMALL | {"max_concurrency": 1, "host_request_time": 0.5}
    outcome = simulate(requests, knobs, a_second)
    assert [r.sent for r in outcome.records] == [0.0, 2.5, 2.5, 10.0]
    assert [r.status for r in outcome.records] == [COMPLETED, REJECTED, COMPLETED, COMPLETED]
    assert [r.token_times for r in outcome.records] == [[1.5, 2.5], [], [4.0, 5.0], [11.5]]
    assert outcome.in_system_time == 2.5 + 2.5 + 1.5


def test_the_api_server_takes_tokens_and_requests_one_after_another():
    """Steps of 1 s and 0.5 s per token: two first tokens, known at 1 s, are sent at 1.5 and 2 s, on the mean at 1.75 s.
    The request that comes at 1.25 s waits for them, and its token for the two that are known when it starts."""
    outcome = simulate(
        [request(0, 1, 2), request(0, 1, 2), request(1.25, 1, 1)], SMALL | {"host_token_time": 0.5}, a_second
    )
    assert [r.token_times for r in outcome.records] == [[1.75, 2.75], [1.75, 2.75], [3.5]]


def test_rejections():
    requests = [request(0.0, 16, 1), request(0.0, 10, 2, max_tokens=7), request(0.0, 10, 6), request(0.0, 15, 1)]
    records = simulate(requests, SMALL, a_second).records
    assert [r.reason for r in records] == [PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN, "", ""]
    assert [r.outputs for r in records] == [0, 0, 6, 1]


def test_long_prefill_token_threshold():
    knobs = {"long_prefill_token_threshold": 4}
    both = simulate([request(0.0, 10, 1), request(0.0, 6, 2)], knobs, a_second)
    assert [step for _, step in both.steps] == [[(0, 4), (1, 4)], [(0, 4), (1, 2)], [(0, 2), (1, 1)]]
    alone = [request(0.0, 10, 1)]
    assert [step for _, step in simulate(alone, knobs, a_second).steps] == [[(0, 4)], [(0, 4)], [(0, 2)]]
    knobs["long_prefill_needs_contention"] = True
    assert [step for _, step in simulate(alone, knobs, a_second).steps] == [[(0, 10)]]


@pytest.mark.parametrize(
    ("skip_unfit_prefill", "steps"),
    [
        (True, [[(0, 10), (2, 3)], [(0, 1), (1, 12)]]),
        (False, [[(0, 10)], [(0, 1), (1, 12), (2, 3)]]),
    ],
)
def test_without_chunked_prefill_a_prompt_waits_for_budget(skip_unfit_prefill, steps):
    knobs = {"max_model_len": 16, "max_num_batched_tokens": 16, "chunked_prefill": False}
    knobs["skip_unfit_prefill"] = skip_unfit_prefill
    outcome = simulate([request(0.0, 10, 2), request(0.0, 12, 1), request(0.0, 3, 1)], knobs, a_second)
    assert [step for _, step in outcome.steps] == steps


def test_sums():
    sums = Sums([(5, 1), (0, 3), (4, 130)])
    assert (sums.num_tokens, sums.num_logits) == (134, 3)
    assert (sums.num_decodes, sums.num_prefills, sums.prefill_tokens, sums.query_tiles) == (1, 2, 133, 1 + 2)
    assert (sums.decode_keys(), sums.decode_keys(4)) == (6, 4)
    # 1 + 2 + 3 pairs, and 5 + 6 + ... + 134; with a window of 4 at most 4 keys a query, and 3 before the chunk
    assert (sums.prefill_pairs(), sums.prefill_pairs(4)) == (6 + 9035, 6 + 520)
    assert (sums.prefill_keys(), sums.prefill_keys(4)) == (3 + 134, 3 + 133)


def test_price_from_step_cost():
    linear = np.arange(5.0)[:, None] * [1.0, 2.0, 0, 0, 0, 0, 0, 0]
    head = np.arange(3.0)[:, None] * [0, 0, 10.0, 0, 0, 0, 0, 0]
    attention = np.zeros(2, ATTENTION_PRICE)
    attention["window"] = 0, 2
    for name, value in {"kv": 100, "activations": 1000, "compute": 400, "fixed": 10_000, "softness": 1}.items():
        attention["decode_" + name] = value
    for name, value in {"kv": 5, "activations": 6, "compute": 7, "tile": 8, "fixed": 9, "softness": 0}.items():
        attention["prefill_" + name] = value
    cost = StepCost(linear, head, attention, issue_share=0.5)
    decode = 2 * (10_000 + 1000) + 500 * (4 + 2)
    prefill = 9 + max(5 * 3 + 6 * 3, 7 * 6 + 8) + 9 + max(5 * 3 + 6 * 3, 7 * 5 + 8)
    seconds = 3 * 4 + 10 * 2 + decode + prefill
    assert price_from_step_cost(cost)(Sums([(3, 1), (0, 3)])) == (seconds / 2, seconds)
    assert price_from_step_cost(cost)(Sums([(3, 1)])) == ((3 + 10 + decode) / 2, 3 + 10 + decode)


@settings(deadline=None, max_examples=150)
@given(scenarios())
def test_what_holds_in_any_scenario(scenario):
    """Beyond what the oracle asserts on the way: tokens are computed once or cached, first come is first served."""
    price = price_from_step_cost(scenario.cost, scenario.draft)
    outcome = simulate(scenario.requests, scenario.knobs, price, scenario.accept, scenario.jumps, scenario.parent)
    completed = [r for r in outcome.records if r.status == COMPLETED]
    computed = {r.index: 0 for r in outcome.records}
    for _, step in outcome.steps:
        assert len({index for index, _ in step}) == len(step) <= scenario.knobs["max_num_seqs"]
        for index, n in step:
            computed[index] += n
    for record in completed:
        sequences = record.stop_tokens or [record.outputs] * scenario.knobs.get("num_sequences", 1)
        needed = record.prompt_tokens - record.num_cached_tokens + sum(stop - 1 for stop in sequences)
        wasted = computed[record.index] - needed
        foreseen = not scenario.knobs["async_scheduling"] or record.outputs == record.max_tokens
        cut = scenario.knobs.get("jump_tokens", 0)  # what a grammar decides at the end is not computed
        if record.num_preemptions == 0 and scenario.draft is None:  # refused drafts are wasted too
            assert -cut <= wasted <= (0 if foreseen else scenario.knobs["steps_in_flight"] - 1)
    waits = scenario.knobs["enable_prefix_caching"] and scenario.knobs.get("late_hits") == "wait"  # others overtake
    waits |= scenario.knobs.get("kv_offloading_load") == "background"  # while text is loaded
    if scenario.knobs["chunked_prefill"] and scenario.knobs["policy"] == "fcfs" and not waits:
        assert [r.scheduled for r in completed] == sorted(r.scheduled for r in completed)
