"""One scheduler step as vLLM V1 makes it: running sequences, then waiting ones; blocks; preemption from the tail.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule); the names are vLLM's. A request is a
row of state.REQUEST, a queue a linked list through it. What the step has so far, such as its token_budget, is in the
scheduler's row.
"""

from .allocation import allocate_slots, begin_load, gate, get_computed_blocks, keeps_tables, promised_blocks
from .blocks import has_windows, identify
from .entries import num_drafts_of, num_tokens_of, write_entry
from .expectation import (
    end_admission,
    expect,
    fits,
    piece_of_prompt,
    reserve,
    retract,
    room,
    see_that_it_is_full,
    whole_blocks,
)
from .gang import decode_group, readmit_group
from .njit import apart, compiled, inlined
from .preemption import preempt_last
from .pricing import add_drafts, add_to_sums, add_verification, clear
from .queue import is_ordered, put_back, remove
from .state import (
    ADMIT,
    BACKGROUND,
    BESIDE_OR_CACHED,
    DECODES,
    DECODES_IF_NO_PREFILL,
    EVERYTHING,
    PREFILLS,
    PREFILLS_BESIDE_DECODES,
    RESERVE_TO_COMPLETION,
    RESERVED_PER_SEQUENCE,
    RUNNING,
)

ADMITTED, PASSED_OVER, STOP = range(3)
"""what became of a waiting request; STOP: nobody behind it is asked either"""


@inlined
def schedule(core):
    """Make one step: fills core.step and core.tokens with entries, and the scheduler's num_scheduled and num_tokens;
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
            scheduler.num_running_entries = scheduler.num_entries
            shut = knobs.clip_max_new_tokens > 0 and scheduler.admits == 0
            if not (scheduler.preempted or shut or (knobs.admit_when_idle and was_running > 0)):
                schedule_waiting(core)
                if not scheduler.defers_prefills:
                    scheduler.capacity_bound = scheduler.num_waiting > 0
            continue
        if phase == DECODES_IF_NO_PREFILL:
            if scheduler.prefilled:
                continue
            phase = DECODES
        if phase == DECODES and knobs.order == PREFILLS_BESIDE_DECODES:
            scheduler.set_aside += scheduler.token_budget - scheduler.num_decoding
            scheduler.token_budget = scheduler.num_decoding
        if phase == DECODES and knobs.retracts and not retract(core):
            continue
        if phase == DECODES and knobs.order == PREFILLS_BESIDE_DECODES:
            put_first(core)
        schedule_running(core, phase)
    if scheduler.recount:
        recount(core)
    draft(core)
    scheduler.num_scheduled = scheduler.num_entries + scheduler.num_forked
    scheduler.num_tokens = knobs.max_num_batched_tokens - scheduler.token_budget - scheduler.set_aside
    scheduler.num_tokens -= knobs.draft_slots * (1 + scheduler.num_entries)
    scheduler.held_tokens += scheduler.num_tokens - scheduler.num_forked


@inlined
def begin_step(core):
    """An empty step."""
    scheduler, knobs = core.scheduler, core.knobs
    scheduler.step = core.replica.num_steps
    if scheduler.identified < 0:
        identify(core.requests, knobs, scheduler, core.blocks, core.tables, -1, -1)
    scheduler.token_budget = knobs.max_num_batched_tokens - knobs.draft_slots
    scheduler.prefill_threshold = knobs.long_prefill_token_threshold
    if knobs.long_prefill_needs_contention and scheduler.num_running + scheduler.num_waiting <= 1:
        scheduler.prefill_threshold = 0
    scheduler.num_entries = scheduler.num_forked = 0
    scheduler.prefill_running = scheduler.recount = 0
    scheduler.num_verified = scheduler.num_drafting = 0
    scheduler.preempted = scheduler.prefilled = scheduler.begun = 0
    scheduler.defers_prefills = scheduler.set_aside = 0
    if knobs.prefill_schedule_interval > 1:
        scheduler.defers_prefills = defers_prefills(core)
    if knobs.order == PREFILLS_BESIDE_DECODES:
        scheduler.token_budget -= scheduler.num_decoding
        scheduler.set_aside = scheduler.num_decoding


@compiled
def defers_prefills(core):
    """Whether prompts wait for a later step, since others decode and the last step that took prompts took all of them
    (EngineCore._should_throttle_prefills, Scheduler.schedule)."""
    replica, scheduler, decoding = core.replica, core.scheduler, False
    for i in range(scheduler.num_running):
        request = core.requests[core.running[i]]
        decoding = decoding or request.num_computed_tokens >= request.prefill_end
    aligned = (replica.num_steps - replica.wave) % core.knobs.prefill_schedule_interval == 0
    return decoding and not aligned and not scheduler.capacity_bound


@compiled
def put_first(core):
    """Prompts of this step go before who decodes beside them (ScheduleBatch.mix_with_running)."""
    running, n = core.running, core.scheduler.num_running
    place = n
    for i in range(n - 1, -1, -1):
        if core.requests[running[i]].last_step != core.replica.num_steps:
            place -= 1
            running[place] = running[i]
    for entry in range(place):
        running[entry] = core.step[entry] if core.step[entry] >= 0 else ~core.step[entry]


@inlined
def draft(core):
    """Who samples in the step drafts what its next step verifies: as many as there are for so many in the step."""
    scheduler = core.scheduler
    k = core.plan[scheduler.num_entries, 0]
    scheduler.draft_passes = core.plan[scheduler.num_entries, 1]
    if k == 0:
        return
    for entry in range(scheduler.num_entries):
        if core.step[entry] >= 0:
            request = core.requests[core.step[entry]]
            request.num_drafts = k
            scheduler.num_drafting += 1
            tokens = request.num_computed_tokens - num_drafts_of(core, entry)
            add_drafts(core.sums, core.attention, core.price.num_kinds, tokens)


@apart
def recount(core):
    """Sum up the step anew: somebody who was in it has been preempted."""
    num_kinds = core.price.num_kinds
    clear(core.sums, num_kinds)
    core.scheduler.num_verified = 0
    for entry in range(core.scheduler.num_entries):
        q, n = core.step[entry], num_tokens_of(core, entry)
        count(core, core.requests[q if q >= 0 else ~q].num_computed_tokens - n, n, num_drafts_of(core, entry))


@inlined
def count(core, computed, n, drafts):
    """n tokens after `computed` ones, so many of them drafts, are in the step."""
    if drafts > 0 and drafts == n - 1:
        add_verification(core.sums, core.attention, core.price.num_kinds, computed, n)
    else:
        add_to_sums(core.sums, core.attention, core.price.num_kinds, computed, n)
    core.scheduler.num_verified += drafts


# --- running requests -------------------------------------------------------------------------------------------------
@inlined
def schedule_running(core, phase):
    """The running requests of this phase, in order of admission, as far as the token budget goes."""
    scheduler, knobs = core.scheduler, core.knobs
    only_full = core.price.num_kinds == 1 and core.attention[0].window == 0 and not scheduler.defers_prefills
    if only_full and knobs.lookahead == 0 and knobs.padded_drafts == 0:
        schedule_mostly_decodes(core, phase)
    else:
        schedule_each(core, phase)
    scheduler.prefilled |= phase == PREFILLS and scheduler.num_entries > 0


@inlined
def is_passed_by(core, request, phase):
    """Whether a running request is not of this phase, or in this step already."""
    decodes = request.num_computed_tokens >= request.prefill_end
    return phase != EVERYTHING and ((phase == DECODES) != decodes or request.last_step == core.replica.num_steps)


@inlined
def schedule_mostly_decodes(core, phase):
    """`schedule_running` where most requests need one token more, and have a slot for it."""
    requests, scheduler, knobs, running = core.requests, core.scheduler, core.knobs, core.running
    placeholder = 1 if knobs.async_scheduling else 0
    cost = 1 + knobs.draft_slots
    # here rather than in the rows, from where a loop with calls reads again each time what changes with each request
    budget, entries, keys = scheduler.token_budget, scheduler.num_entries, 0
    num_decodes = 0
    i = 0
    while i < scheduler.num_running and budget > 0:
        q = running[i]
        request = requests[q]
        i += 1
        if is_passed_by(core, request, phase):
            continue
        computed = request.num_computed_tokens
        if (
            computed + 1 == request.num_tokens
            and computed < request.slots
            and request.num_tokens < request.max_num_tokens - placeholder
            and request.num_drafts == 0
        ):
            num_decodes += 1
            keys += computed + 1
            compute(core, q, 1, 1, entries)
            entries += 1
            budget -= cost
        else:
            scheduler.token_budget, scheduler.num_entries = budget, entries
            i = schedule_other(core, q, i)
            budget, entries = scheduler.token_budget, scheduler.num_entries
            if i < 0:
                break
    scheduler.token_budget, scheduler.num_entries = budget, entries
    core.sums[0].num_decodes += num_decodes
    core.sums[0].decode_keys += keys


@apart
def schedule_each(core, phase):
    """`schedule_running` where most need more: drafters, windows."""
    i = 0
    while i < core.scheduler.num_running and core.scheduler.token_budget > 0:
        q = core.running[i]
        i += 1
        if not is_passed_by(core, core.requests[q], phase):
            i = schedule_one(core, q, i)
            if i < 0:
                break


@apart
def schedule_other(core, q, place):
    """`schedule_one` beside a loop of those that are alike."""
    return schedule_one(core, q, place)


@inlined
def schedule_one(core, q, place):
    """Running request q, which stands before `place`, whatever it needs. Returns the place of who comes next, -1 if
    nobody does."""
    request, scheduler, knobs = core.requests[q], core.scheduler, core.knobs
    if knobs.num_sequences > 1 and request.num_output_tokens > 0:
        n = decode_group(core, q, scheduler.token_budget)
        if n > 0:
            write_entry(core, scheduler.num_entries, q, n, 0, True)
            scheduler.num_entries += 1
            scheduler.token_budget -= n
        return place if n >= 0 else -1
    computed = request.num_computed_tokens
    piece = knobs.clip_max_new_tokens > 0 and computed < request.prefill_end
    n = num_new_tokens(core, request, piece_of_prompt(core) if piece else scheduler.token_budget)
    if n <= 0 or (scheduler.defers_prefills and computed < request.prefill_end):
        return place
    if min(computed + n + knobs.lookahead, knobs.max_model_len) > request.slots:
        scheduler.num_unscheduled = 0
        num_running = scheduler.num_running
        if not extend_slots(core, q, computed + n):
            return -1
        if scheduler.num_running < num_running:
            place = place_behind(core, q, place)
    scheduler.prefill_running |= computed < request.prefill_end
    own = request.num_tokens - computed
    count(core, computed, n, max(n - own, 0))
    compute(core, q, n, own, scheduler.num_entries)
    if has_windows(knobs):
        request.num_in_flight_tokens += n
    scheduler.num_entries += 1
    scheduler.token_budget -= n + knobs.draft_slots
    if piece:
        fill_blocks(core, n)
    return place


@inlined
def fill_blocks(core, n):
    """A piece of a prompt takes whole blocks of the budget."""
    more = whole_blocks(core.knobs, n) - n
    core.scheduler.token_budget -= more
    core.scheduler.set_aside += more


@inlined
def compute(core, q, n, own, entry):
    """n tokens of running request q, own of which are not drafts, are in this step."""
    request = core.requests[q]
    request.last_step = core.replica.num_steps
    request.num_computed_tokens += n
    samples = n >= own
    verified = max(n - own, 0)
    if samples:
        request.num_tokens += (1 + verified) if core.knobs.async_scheduling else 0
        if request.num_drafts > 0:
            request.num_drafts = 0
    write_entry(core, entry, q, n, verified, samples)


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
    end = core.knobs.max_model_len
    if core.knobs.drafts_within_max_tokens:
        end = min(end, request.max_num_tokens)
    return min(min(n, budget), end - 1 - computed)


@compiled
def place_behind(core, q, place):
    """Who comes next behind request q, which was before `place`: somebody was preempted for it. vLLM until 0.24 went on
    at the same place unless that one was in the step, so past one who then moved up."""
    scheduler, running = core.scheduler, core.running
    i = 0
    while running[i] != q:
        i += 1
    passed = place - 1 - i - scheduler.num_unscheduled
    return i + 1 + (passed if core.knobs.skips_behind_victim else 0)


@compiled
def extend_slots(core, q, num_tokens):
    """Blocks of running request q for num_tokens and its drafter, from those that are preempted if there are none left;
    False if it had to be preempted itself."""
    request, knobs = core.requests[q], core.knobs
    block_size, lookahead = knobs.block_size, knobs.lookahead
    end = min(num_tokens + lookahead, knobs.max_model_len)
    full = request.prompt_tokens + request.num_output_tokens >= (request.num_hashed_blocks + 1) * block_size
    missing = end > request.table_length * block_size
    if not (full | missing | (request.slots == 0)):  # a block is full, or missing, or may leave a window
        return True
    while not allocate_slots(core, request, 0, num_tokens, lookahead, False, 0):
        if preempt_last(core) == q:
            return False
    return True


# --- waiting requests -------------------------------------------------------------------------------------------------
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
        if blocks == 0 and scheduler.num_entries > 0:
            return STOP
        n = min(n, blocks * knobs.block_size if blocks > 0 else scheduler.token_budget)
    n = min(n, scheduler.token_budget)
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
    write_entry(core, scheduler.num_entries, q, num_tokens, padded, samples)
    scheduler.num_entries += 1
    scheduler.token_budget -= num_tokens + core.knobs.draft_slots
