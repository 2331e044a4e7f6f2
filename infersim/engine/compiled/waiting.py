"""Who waits enters the step, in the queue's order, while there is room. Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule).
"""

from .allocation import allocate_slots, begin_load, gate, get_computed_blocks, keeps_tables, promised_blocks
from .blocks import has_windows
from .entries import write_entry
from .expectation import end_admission, expect, fits, reserve, room, see_that_it_is_full, whole_blocks
from .gang import readmit_group
from .njit import apart, compiled, inlined
from .pricing import count
from .queue import is_ordered, put_back, remove
from .running import fill_blocks
from .state import BACKGROUND, BESIDE_OR_CACHED, RESERVE_TO_COMPLETION, RESERVED_PER_SEQUENCE, RUNNING
from .states import end_at_state

ADMITTED, PASSED_OVER, STOP = range(3)
"""what became of a waiting request; STOP: nobody behind it is asked either"""


@inlined
def schedule_waiting(core):
    """Waiting requests, in the queue's order, until one must wait."""
    scheduler, knobs = core.scheduler, core.knobs
    expects = knobs.clip_max_new_tokens > 0
    if expects:
        expect(core)
    scheduler.promised_blocks = 0
    if knobs.reserve == RESERVE_TO_COMPLETION and scheduler.waiting_head >= 0:
        scheduler.promised_blocks = promised_blocks(core.requests, scheduler, knobs, core.running)
    scheduler.swapped_in = 0
    q = scheduler.waiting_head
    if expects and q >= 0 and scheduler.token_budget <= 0 and room(core, 0) <= 0.0:
        see_that_it_is_full(core, q)
    while q >= 0 and scheduler.token_budget > 0 and scheduler.num_running < knobs.max_num_seqs:
        after = core.requests[q].next
        if admit(core, q) == STOP:
            break
        q = after
        if expects and room(core, 0) <= 0.0:
            scheduler.batch_is_full = scheduler.num_decoding > 0
            break
    if expects:
        end_admission(core, q)


@apart
def admit(core, q):
    """Put waiting request q into the step, if it may run now: ADMITTED, PASSED_OVER or STOP."""
    request, scheduler, knobs = core.requests[q], core.scheduler, core.knobs
    if knobs.num_sequences > 1:
        if scheduler.num_running + scheduler.num_forks + request.num_sequences > knobs.max_num_seqs:
            return STOP
        if request.num_output_tokens > 0:  # a group, which was swapped
            n = readmit_group(core, q, scheduler.token_budget)
            if n == 0:
                return STOP
            scheduler.swapped_in = 1
            add_entry(core, q, n, 0, True)
            return ADMITTED
    arrived = request.num_blocks > 0  # its KV came from elsewhere
    if arrived and request.loaded > core.replica.now:
        return PASSED_OVER
    if keeps_tables(knobs) and not arrived and not has_row(core, request):
        return STOP
    is_in_flight = request.last_step >= core.replica.num_steps - core.replica.in_flight + core.replica.num_empty
    if is_in_flight and (knobs.async_scheduling or not knobs.resumes_in_flight):
        request.skipped = knobs.keeps_skipped_first
        return PASSED_OVER  # preempted, and a step with it is still to come back
    if scheduler.swapped_in and request.num_swapped == 0:
        return STOP  # prompts wait until nobody is swapped
    watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
    computed = get_computed_blocks(core, q, watermark)
    if computed < 0:
        return STOP if computed == -1 else PASSED_OVER
    looked_up = (scheduler.identified and request.table < 0) or (knobs.radix and not arrived)
    below = not arrived and scheduler.identified and computed > request.num_hashed_blocks * knobs.block_size
    if below and request.num_swapped == 0 and knobs.kv_offloading_load == BACKGROUND:
        return PASSED_OVER if begin_load(core, q, computed, watermark) else STOP
    idle_hits = scheduler.idle_hit_blocks if looked_up else 0
    busy_hits = scheduler.hit_blocks - idle_hits if looked_up else 0
    n = request.prompt_tokens + request.num_output_tokens - computed
    if scheduler.defers_prefills and n > 1:
        return STOP
    expects = knobs.clip_max_new_tokens > 0
    if expects and not fits(core, request, n, idle_hits):
        return STOP
    padded = padding(core, computed, n)
    if padded > 0 and (n + padded > scheduler.token_budget or computed + n + padded > knobs.max_model_len):
        return STOP
    n += padded
    if 0 < scheduler.prefill_threshold < n:
        n = scheduler.prefill_threshold
    if n > scheduler.token_budget and not knobs.chunked_prefill:
        if not knobs.skip_unfit_prefill:
            return STOP
        if not is_ordered(knobs.policy):  # vLLM turns the order of those it skips
            remove(core.requests, scheduler, q)
            put_back(core.requests, scheduler, knobs.policy, q)
        return PASSED_OVER
    if expects and whole_blocks(knobs, n) > scheduler.token_budget and knobs.chunked_prefill:
        blocks = scheduler.token_budget // knobs.block_size
        if blocks == 0 and scheduler.num_entries + scheduler.num_decoding > 0:
            return STOP
        n = min(n, blocks * knobs.block_size if blocks > 0 else scheduler.token_budget)
    n = min(n, scheduler.token_budget)
    if knobs.state_cuts > 0:
        whole, n = n, end_at_state(request, knobs, computed, n)
        if padded > 0 and n < whole:
            n, padded = 1, 0
        if n == 0:
            return STOP
    if not gate(request, scheduler, knobs, looked_up, busy_hits, watermark):
        if (
            scheduler.identified
            and request.table < 0
            and knobs.reserve_full_isl
            and not knobs.late_hits
            and scheduler.num_tables == 1
            and knobs.kv_window[0] == 0
        ):
            scheduler.blocked_request = q
        return STOP
    lookahead = knobs.lookahead if knobs.admission_lookahead else 0
    if not allocate_slots(core, request, computed, computed + n, lookahead, True, watermark):
        return STOP
    start_running(core, q, computed, n, padded, arrived)
    return ADMITTED


@compiled
def has_row(core, request):
    """Whether a row of the tables is left for a request that is to run, afterwards too if it then holds its blocks."""
    reserved, most = core.replica.num_reserved, RESERVED_PER_SEQUENCE * core.knobs.max_num_seqs
    if request.hold:
        return reserved < most
    return reserved + core.scheduler.num_running < most + core.knobs.max_num_seqs


@compiled
def padding(core, computed, n):
    """Drafts with which a request that waits and lacks one token is filled up, so that the step's sequences are alike
    (Scheduler.schedule, pad_spec_decode)."""
    scheduler, k, always = core.scheduler, core.knobs.padded_drafts, core.knobs.pads_drafts == BESIDE_OR_CACHED
    beside = scheduler.num_running_entries > 0 or (always and computed > 0)
    fits = k < core.knobs.max_model_len - computed - 1 or not always  # else it waits until nobody runs
    fits &= not 0 < scheduler.prefill_threshold <= k
    return k if n == 1 and fits and beside and not scheduler.prefill_running else 0


@inlined
def start_running(core, q, computed, n, padded, arrived):
    """Request q, which has its blocks, runs from token `computed` on: n in this step, `padded` of them drafts."""
    request, replica, scheduler, knobs = core.requests[q], core.replica, core.scheduler, core.knobs
    num_tokens = request.prompt_tokens + request.num_output_tokens
    remove(core.requests, scheduler, q)
    core.running[scheduler.num_running] = q
    scheduler.num_running += 1
    if knobs.num_sequences > 1:
        scheduler.num_forks += request.num_sequences - 1
    if request.scheduled < 0.0:
        request.scheduled = replica.now
        if not arrived:
            request.num_cached_tokens = computed
    if arrived:
        replica.num_reserved -= 1
    request.status = RUNNING
    request.last_step = replica.num_steps
    request.prefill_end = num_tokens
    if knobs.reserve == RESERVE_TO_COMPLETION:
        length = (request.max_num_tokens + knobs.block_size - 1) // knobs.block_size
        scheduler.promised_blocks += scheduler.num_tables * (length - request.table_length)
    count(core, computed, n, padded)
    if request.num_swapped > 0:
        scheduler.free_cpu_blocks += request.num_swapped
        scheduler.copy_time += request.num_swapped * knobs.swap_block_time
        replica.num_copied += request.num_swapped
        request.num_swapped = 0
        scheduler.held_tokens += computed
        scheduler.swapped_in = 1
    else:
        scheduler.prefilled = 1
        scheduler.held_tokens += computed - request.num_computed_tokens  # what was cached
    request.num_computed_tokens = computed + n
    if has_windows(knobs):
        request.num_in_flight_tokens += n
    samples = computed + n - padded == request.num_tokens
    if samples:
        request.num_tokens += 1 + padded if knobs.async_scheduling else 0
        request.num_drafts = 0
    add_entry(core, q, n, padded, samples)
    if knobs.clip_max_new_tokens > 0:
        reserve(core, request, n)
        fill_blocks(core, n)


@inlined
def add_entry(core, q, num_tokens, padded, samples):
    """Request q, which waited, is in the step with so many tokens."""
    scheduler = core.scheduler
    write_entry(core.step, core.tokens, scheduler.num_entries, q, num_tokens, padded, samples)
    scheduler.num_entries += 1
    scheduler.token_budget -= num_tokens + core.knobs.draft_slots
