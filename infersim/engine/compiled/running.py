"""Who runs gets its next tokens, in the order of admission, with blocks of those that are preempted if need be.
Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule).
"""

from .allocation import allocate_slots, take_slots, takes_slots
from .blocks import has_windows
from .entries import write_entry
from .expectation import piece_of_prompt, whole_blocks
from .gang import decode_group
from .njit import apart, compiled, inlined
from .preemption import preempt_last
from .pricing import count
from .state import DECODES, EVERYTHING, PREFILLS
from .states import end_at_state


@inlined
def schedule_running(core, phase):
    """The running requests of this phase, in order of admission, as far as the token budget goes."""
    scheduler, knobs = core.scheduler, core.knobs
    only_full = core.price.num_kinds == 1 and core.attention[0].window == 0 and not scheduler.defers_prefills
    only_full &= phase == DECODES or knobs.clip_max_new_tokens == 0  # pieces of prompts take whole blocks
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
    simple = takes_slots(knobs)
    step, tokens = core.step, core.tokens
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
            and request.num_tokens < request.max_num_tokens - placeholder
            and request.num_drafts == 0
            and (computed < request.slots or (simple and take_slots(core, request, computed + 1)))
        ):
            num_decodes += 1
            keys += computed + 1
            compute(core, step, tokens, q, 1, 1, entries)
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
            write_entry(core.step, core.tokens, scheduler.num_entries, q, n, 0, True)
            scheduler.num_entries += 1
            scheduler.token_budget -= n
        return place if n >= 0 else -1
    computed = request.num_computed_tokens
    piece = knobs.clip_max_new_tokens > 0 and computed < request.prefill_end
    n = num_new_tokens(core, request, piece_of_prompt(core) if piece else scheduler.token_budget)
    if n <= 0 or (scheduler.defers_prefills and computed < request.prefill_end):
        return place
    lacks = min(computed + n + knobs.lookahead, knobs.max_model_len) > request.slots
    if lacks and not (takes_slots(knobs) and take_slots(core, request, computed + n)):
        scheduler.num_unscheduled = 0
        num_running = scheduler.num_running
        if not extend_slots(core, q, computed + n):
            return -1
        if scheduler.num_running < num_running:
            place = place_behind(core, q, place)
    scheduler.prefill_running |= computed < request.prefill_end
    own = request.num_tokens - computed
    count(core, computed, n, max(n - own, 0))
    compute(core, core.step, core.tokens, q, n, own, scheduler.num_entries)
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
def compute(core, step, tokens, q, n, own, entry):
    """n tokens of running request q, own of which are not drafts, are in this step, which has them in `entry`."""
    request = core.requests[q]
    request.last_step = core.replica.num_steps
    request.num_computed_tokens += n
    samples = n >= own
    verified = max(n - own, 0)
    if samples:
        request.num_tokens += (1 + verified) if core.knobs.async_scheduling else 0
        if request.num_drafts > 0:
            request.num_drafts = 0
    write_entry(step, tokens, entry, q, n, verified, samples)


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
    n = min(min(n, budget), end - 1 - computed)
    return end_at_state(request, core.knobs, computed, n) if core.knobs.state_cuts > 0 else n


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
