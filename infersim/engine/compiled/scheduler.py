"""One scheduler step as vLLM V1 makes it: running sequences, then waiting ones; blocks; preemption from the tail.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule); the names are vLLM's. A request is a
row of state.REQUEST, a queue a linked list through it. What the step has so far, such as its token_budget, is in the
scheduler's row.
"""

from .allocation import allocate_slots, gate, get_computed_blocks, keeps_tables, promised_blocks
from .blocks import identify
from .gang import decode_group, readmit_group
from .njit import compiled, inlined
from .preemption import preempt_last, retract
from .pricing import add_drafts, add_to_sums, add_verification
from .queue import remove
from .state import (
    ADMIT,
    DECODES,
    DECODES_IF_NO_PREFILL,
    EVERYTHING,
    PREFILLS,
    RESERVE_TO_COMPLETION,
    RESERVED_PER_SEQUENCE,
    RUNNING,
)

ADMITTED, PASSED_OVER, STOP = range(3)
"""what became of a waiting request; STOP: nobody behind it is asked either"""


@inlined
def schedule(core):
    """Make one step: fills core.step and core.drafts with entries, and the scheduler's num_scheduled and num_tokens;
    adds to core.sums.

    An entry is a request; of one with several sequences (groups.py) all count, num_forked of them beyond the first.
    """
    scheduler, knobs = core.scheduler, core.knobs
    begin_step(core)
    was_running = scheduler.num_running
    phases = knobs.order
    while phases > 0:
        phase = phases & 7
        phases >>= 3
        if phase == ADMIT:
            if not (scheduler.preempted or (knobs.admit_when_idle and was_running > 0)):
                schedule_waiting(core)
            continue
        if phase == DECODES_IF_NO_PREFILL:
            if scheduler.prefilled:
                continue
            phase = DECODES
        schedule_running(core, phase)
    scheduler.num_scheduled = scheduler.num_entries + scheduler.num_forked
    scheduler.num_tokens = knobs.max_num_batched_tokens - scheduler.token_budget
    scheduler.held_tokens += scheduler.num_tokens - scheduler.num_forked


@inlined
def begin_step(core):
    """An empty step."""
    scheduler, knobs = core.scheduler, core.knobs
    scheduler.step = core.replica.num_steps
    if scheduler.identified < 0:
        identify(core.requests, knobs, scheduler, core.blocks, core.tables, -1, -1)
    scheduler.token_budget = knobs.max_num_batched_tokens
    scheduler.prefill_threshold = knobs.long_prefill_token_threshold
    if knobs.long_prefill_needs_contention and scheduler.num_running + scheduler.num_waiting <= 1:
        scheduler.prefill_threshold = 0
    scheduler.num_spec_tokens = core.plan[scheduler.num_running, 0]
    scheduler.draft_passes = core.plan[scheduler.num_running, 1]
    scheduler.num_entries = scheduler.num_forked = 0
    scheduler.num_verified = scheduler.num_drafting = 0
    scheduler.preempted = scheduler.prefilled = 0
    scheduler.wished_tokens = 0
    if knobs.clip_max_new_tokens > 0 and scheduler.waiting_head >= 0:
        scheduler.wished_tokens = wished_tokens(core)


@compiled
def wished_tokens(core):
    """Tokens that running requests may still generate, as SGLang counts them: it expects new_token_ratio of them."""
    wished = 0
    for i in range(core.scheduler.num_running):
        request = core.requests[core.running[i]]
        wished += min(request.max_num_tokens - request.num_tokens, core.knobs.clip_max_new_tokens)
    return wished


@inlined
def write_entry(core, entry, q, num_drafts, samples):
    """Request q is in the step, with so many drafts to verify."""
    core.drafts[entry] = num_drafts
    core.step[entry] = q if samples else ~q


# --- running requests -------------------------------------------------------------------------------------------------
@inlined
def schedule_running(core, phase):
    """The running requests of this phase, in order of admission, as far as the token budget goes."""
    requests, scheduler, knobs, running = core.requests, core.scheduler, core.knobs, core.running
    if phase == DECODES and knobs.retracts:
        retract(core)
    only_full = core.price.num_kinds == 1 and core.attention[0].window == 0
    placeholder = 1 if knobs.async_scheduling else 0
    this_step = core.replica.num_steps
    # here rather than in the rows, from where a loop with calls reads again each time what changes with each request
    budget, entries, keys = scheduler.token_budget, scheduler.num_entries, 0
    num_decodes = 0
    i = 0
    while i < scheduler.num_running and budget > 0:
        q = running[i]
        request = requests[q]
        i += 1
        computed = request.num_computed_tokens
        if phase != EVERYTHING and (
            (phase == DECODES) != (computed >= request.prefill_end) or request.last_step == this_step
        ):
            continue  # not of this phase, or scheduled in this step already
        if (
            only_full
            and computed + 1 == request.num_tokens
            and computed < request.slots
            and request.num_tokens < request.max_num_tokens - placeholder
            and scheduler.num_spec_tokens == 0
            and request.num_drafts == 0
        ):  # most requests of most steps: one token more, and a slot for it
            num_decodes += 1
            keys += computed + 1
            compute(core, q, 1, 1, entries)
            entries += 1
            budget -= 1
            continue
        if knobs.num_sequences > 1 and request.num_output_tokens > 0:
            n = decode_group(core, q, budget)
            if n < 0:
                break
            if n > 0:
                write_entry(core, entries, q, 0, True)
                entries += 1
                budget -= n
            continue
        n = num_new_tokens(core, request, budget)
        if n <= 0:
            continue
        end = min(computed + n + knobs.lookahead, knobs.max_model_len)
        if end > request.slots and not extend_slots(core, q, end):
            break
        own = request.num_tokens - computed
        if own == 1 and n > 1:
            add_verification(core.sums, core.attention, core.price.num_kinds, computed, n)
        else:
            add_to_sums(core.sums, core.attention, core.price.num_kinds, computed, n)
        compute(core, q, n, own, entries)
        entries += 1
        budget -= n
    scheduler.token_budget, scheduler.num_entries = budget, entries
    scheduler.prefilled |= phase == PREFILLS and entries > 0
    core.sums[0].num_decodes += num_decodes
    core.sums[0].decode_keys += keys


@inlined
def compute(core, q, n, own, entry):
    """n tokens of running request q, own of which are not drafts, are in this step."""
    request, scheduler = core.requests[q], core.scheduler
    request.last_step = core.replica.num_steps
    request.num_computed_tokens += n
    samples = n >= own
    verified = max(n - own, 0)
    if samples:
        request.num_tokens += (1 + verified) if core.knobs.async_scheduling else 0
        scheduler.num_verified += verified
        draft_next(core, request, request.num_computed_tokens - verified)
    write_entry(core, entry, q, verified, samples)


@inlined
def num_new_tokens(core, request, budget):
    """Tokens of a running request's next step, drafts included; 0: nothing is to be done before its last one ends."""
    threshold, computed = core.scheduler.prefill_threshold, request.num_computed_tokens
    own = request.num_tokens - computed
    known = request.prompt_tokens + request.num_output_tokens
    if own <= 0 or (known + 1 >= request.max_num_tokens and request.num_tokens > known):
        return 0  # its next token is not known yet, or its last one is in flight
    n = own + request.num_drafts
    if 0 < threshold < n:
        n = threshold
    return min(min(n, budget), core.knobs.max_model_len - 1 - computed)


@inlined
def draft_next(core, request, num_tokens):
    """A request of so many tokens samples in this step, and drafts what its next step verifies."""
    scheduler = core.scheduler
    request.num_drafts = scheduler.num_spec_tokens
    if scheduler.num_spec_tokens > 0:
        scheduler.num_drafting += 1
        add_drafts(core.sums, core.attention, core.price.num_kinds, num_tokens)


@compiled
def extend_slots(core, q, end):
    """Blocks of running request q up to token `end`, from those that are preempted if there are none left; False if it
    had to be preempted itself."""
    request, block_size = core.requests[q], core.knobs.block_size
    full = request.prompt_tokens + request.num_output_tokens >= (request.num_hashed_blocks + 1) * block_size
    missing = end > request.table_length * block_size
    if not (full | missing | (request.slots == 0)):  # a block is full, or missing, or may leave a window
        return True
    while not allocate_slots(core, request, 0, end, False, 0):
        if preempt_last(core) == q:
            return False
    return True


# --- waiting requests -------------------------------------------------------------------------------------------------
@inlined
def schedule_waiting(core):
    """Waiting requests, in the queue's order, until one must wait."""
    scheduler, knobs = core.scheduler, core.knobs
    scheduler.expected_tokens = scheduler.wished_tokens * scheduler.new_token_ratio
    scheduler.promised_blocks = 0
    if knobs.reserve == RESERVE_TO_COMPLETION and scheduler.waiting_head >= 0:
        scheduler.promised_blocks = promised_blocks(core.requests, scheduler, knobs, core.running)
    scheduler.swapped_in = 0
    q = scheduler.waiting_head
    while q >= 0 and scheduler.token_budget > 0 and scheduler.num_running < knobs.max_num_seqs:
        after = core.requests[q].next
        if admit(core, q) == STOP:
            break
        q = after


@compiled
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
            add_entry(core, q, n, True)
            return ADMITTED
    arrived = request.num_blocks > 0  # its KV came from elsewhere
    reserved = core.replica.num_reserved >= RESERVED_PER_SEQUENCE * knobs.max_num_seqs
    if keeps_tables(knobs) and not arrived and reserved:
        return STOP  # rows of the tables are left for what runs
    if request.last_step >= core.replica.num_steps - core.replica.in_flight:
        return PASSED_OVER  # preempted, and a step with it is still to come back
    if scheduler.swapped_in and request.num_swapped == 0:
        return STOP  # prompts wait until nobody is swapped
    watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
    computed = get_computed_blocks(core, q, watermark)
    if computed < 0:
        return STOP if computed == -1 else PASSED_OVER
    looked_up = (scheduler.identified and request.table < 0) or (knobs.radix and not arrived)
    idle_hits = scheduler.idle_hit_blocks if looked_up else 0
    busy_hits = scheduler.hit_blocks - idle_hits if looked_up else 0
    n = request.prompt_tokens + request.num_output_tokens - computed
    if knobs.clip_max_new_tokens > 0 and not room_for_all(core, request, n, idle_hits):
        return STOP
    if 0 < scheduler.prefill_threshold < n:
        n = scheduler.prefill_threshold
    if n > scheduler.token_budget and not knobs.chunked_prefill:
        return PASSED_OVER if knobs.skip_unfit_prefill else STOP
    n = min(n, scheduler.token_budget)
    if not gate(request, scheduler, knobs, busy_hits, watermark, scheduler.promised_blocks):
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
    if not allocate_slots(core, request, computed, computed + n, True, watermark):
        return STOP
    start_running(core, q, computed, n, arrived)
    return ADMITTED


@compiled
def room_for_all(core, request, num_tokens, idle_hits):
    """Whether there is memory for the request's tokens and for what all that run are expected to generate (SGLang's
    PrefillAdder.add_one_req)."""
    scheduler, knobs = core.scheduler, core.knobs
    new = min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
    available = (scheduler.free_blocks - idle_hits) // scheduler.num_tables * knobs.block_size
    return scheduler.num_running == 0 or num_tokens + new + knobs.block_size < available - scheduler.expected_tokens


@inlined
def start_running(core, q, computed, n, arrived):
    """Request q, which has its blocks, runs from token `computed` on, n tokens in this step."""
    request, replica, scheduler, knobs = core.requests[q], core.replica, core.scheduler, core.knobs
    num_tokens = request.prompt_tokens + request.num_output_tokens
    remove(core.requests, scheduler, q)
    core.running[scheduler.num_running] = q
    scheduler.num_running += 1
    if knobs.num_sequences > 1:
        scheduler.num_forks += request.num_sequences - 1
    if request.scheduled < 0.0:
        request.scheduled = replica.now
        request.num_cached_tokens = 0 if arrived else computed
    if arrived:
        replica.num_reserved -= 1
    request.status = RUNNING
    request.last_step = replica.num_steps
    request.prefill_end = num_tokens
    if knobs.reserve == RESERVE_TO_COMPLETION:
        length = (request.max_num_tokens + knobs.block_size - 1) // knobs.block_size
        scheduler.promised_blocks += scheduler.num_tables * (length - request.table_length)
    if computed + n == num_tokens:
        scheduler.expected_tokens += min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
    add_to_sums(core.sums, core.attention, core.price.num_kinds, computed, n)
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
    samples = computed + n == request.num_tokens
    if samples:
        request.num_tokens += 1 if knobs.async_scheduling else 0
        draft_next(core, request, computed + n)
    add_entry(core, q, n, samples)


@inlined
def add_entry(core, q, num_tokens, samples):
    """Request q, which waited, is in the step with so many tokens."""
    scheduler = core.scheduler
    write_entry(core, scheduler.num_entries, q, 0, samples)
    scheduler.num_entries += 1
    scheduler.token_budget -= num_tokens
