"""Memory by what running requests are expected to generate: whether prompts are looked for, who of those that wait is
admitted, who is retracted. Compiled.

Written after SGLang 0.5.23 (python/sglang/srt/managers: scheduler.py, schedule_policy.py's PrefillAdder, and
schedule_batch.py's retract_decode). In force where knobs.clip_max_new_tokens is; knobs.retracts is about who is
retracted. A request decodes here when all of its prompt is computed, or in a step in flight.
"""

from .entries import num_tokens_of
from .njit import apart, compiled
from .preemption import drop, preempt
from .queue import push_back
from .radix import evict, match_prefix
from .state import PREFILLS_BESIDE_DECODES, RETRACT_STEPS


@compiled
def look_for_prompts(core):
    """Whether this step looks for prompts: where somebody did not fit, not before a request leaves, or a step takes
    prompts beside which none decodes, or a piece of one (ScheduleBatch.batch_is_full)."""
    scheduler, chunk, decoding = core.scheduler, False, 0
    for i in range(scheduler.num_running):
        request = core.requests[core.running[i]]
        if request.num_computed_tokens < request.prefill_end:
            chunk = True
        else:
            decoding += 1
    if chunk or decoding == 0:
        scheduler.batch_is_full = 0
    elif scheduler.num_waiting > 0 and scheduler.num_running >= core.knobs.max_num_seqs:
        scheduler.batch_is_full = 1
    scheduler.num_decoding = decoding
    scheduler.admits = chunk or scheduler.batch_is_full == 0


@compiled
def whole_blocks(knobs, num_tokens):
    """Tokens of as many blocks as so many take."""
    return (num_tokens + knobs.block_size - 1) // knobs.block_size * knobs.block_size


@compiled
def expect(core):
    """Tokens that who decodes is expected to generate, each its share of what it may, to expected_tokens."""
    scheduler, knobs, expected = core.scheduler, core.knobs, 0.0
    for i in range(scheduler.num_running):
        request = core.requests[core.running[i]]
        if request.num_computed_tokens >= request.prefill_end and request.last_step != core.replica.num_steps:
            left = request.max_num_tokens - request.prompt_tokens - request.num_output_tokens
            expected += min(left, knobs.clip_max_new_tokens) * scheduler.new_token_ratio
    if knobs.order == PREFILLS_BESIDE_DECODES:
        expected += scheduler.num_decoding
    scheduler.expected_tokens = expected
    scheduler.step_tokens = 0
    for entry in range(scheduler.num_entries):
        q, n = core.step[entry], num_tokens_of(core, entry)
        request = core.requests[q if q >= 0 else ~q]
        if request.num_computed_tokens - n < request.prefill_end:
            reserve(core, request, n)


@compiled
def reserve(core, request, n):
    """n tokens of a prompt are in the step: they, one block more, and with its last ones all it may generate."""
    scheduler, knobs = core.scheduler, core.knobs
    tokens = whole_blocks(knobs, n)
    scheduler.step_tokens += tokens
    new = min(request.max_num_tokens - request.prompt_tokens, knobs.clip_max_new_tokens)
    ends = request.num_computed_tokens >= request.prefill_end
    scheduler.expected_tokens += tokens + knobs.block_size + (new if ends else 0)


@compiled
def room(core, idle_hits):
    """Tokens for which there is memory beside what is expected: of all blocks that this step did not find held."""
    scheduler, knobs = core.scheduler, core.knobs
    free = (scheduler.free_blocks - idle_hits) // scheduler.num_tables * knobs.block_size
    return free + scheduler.step_tokens - scheduler.expected_tokens


@compiled
def fits(core, request, num_tokens, idle_hits):
    """Whether a request that waits is admitted (PrefillAdder.add_one_req). It must be if nothing runs."""
    scheduler, knobs = core.scheduler, core.knobs
    new = min(request.max_num_tokens - request.prompt_tokens - request.num_output_tokens, knobs.clip_max_new_tokens)
    if scheduler.num_running == 0 or num_tokens + new + knobs.block_size < room(core, idle_hits):
        return True
    scheduler.batch_is_full = scheduler.num_decoding > 0
    return False


@compiled
def piece_of_prompt(core):
    """Most tokens of a prompt that has begun: no more than there is room for, if there is any (add_chunked_req)."""
    expect(core)
    tokens = int(room(core, 0))
    return min(core.scheduler.token_budget, tokens) if tokens > 0 else core.scheduler.token_budget


@compiled
def see_that_it_is_full(core, q):
    """A piece of a prompt took all of the budget and there is no room: q, which waits, is still looked up."""
    scheduler, knobs, request = core.scheduler, core.knobs, core.requests[q]
    if knobs.radix and request.num_blocks == 0 and scheduler.num_running < knobs.max_num_seqs:
        last = request.prompt_tokens + request.num_output_tokens - 1
        match_prefix(request, last, scheduler, knobs, core.requests, core.nodes, core.segments)
    scheduler.batch_is_full = scheduler.num_decoding > 0


@compiled
def end_admission(core, q):
    """After the last who was admitted, or before q, who has no place: whether the batch is full."""
    scheduler = core.scheduler
    seats = scheduler.num_running < core.knobs.max_num_seqs
    if scheduler.num_decoding > 0 and scheduler.token_budget > 0 and q >= 0 and not seats:
        scheduler.batch_is_full = 1


@compiled
def spare_blocks(core):
    """Blocks that are empty after a step: SGLang evicts for one block more of each request than it needs, if blocks
    have several tokens (alloc_paged_token_slots_extend, alloc_paged_token_slots_decode)."""
    scheduler, size = core.scheduler, core.knobs.block_size
    tokens, prompts, decoding, taken, grown = 0, 0, 0, 0, 0
    for entry in range(scheduler.num_entries):
        q, n = core.step[entry], num_tokens_of(core, entry)
        end = core.requests[q if q >= 0 else ~q].num_computed_tokens
        blocks = (end + size - 1) // size - (end - n + size - 1) // size
        if end <= core.requests[q if q >= 0 else ~q].prefill_end:
            tokens, prompts, taken = tokens + n, prompts + 1, taken + blocks
        else:
            decoding, grown = decoding + 1, grown + blocks
    return max((tokens + size - 1) // size + prompts - taken - grown, decoding - grown, 0) if size > 1 else 0


@apart
def retract(core):
    """Retract requests until every other can decode one token (retract_decode), and expect accordingly much of what the
    others may generate. False if nobody decodes in this step: beside prompts nobody is retracted, nor while somebody's
    last token is in flight.

    Those with the fewest outputs go first, of equal ones those with the longest prompts; to the end of the queue.
    """
    requests, scheduler, knobs, running = core.requests, core.scheduler, core.knobs, core.running
    needed, others, ending, victim = decoding(core)
    lacks = needed > scheduler.free_blocks
    if lacks and knobs.radix:
        evict(core.nodes, scheduler, needed)  # all
    if scheduler.num_entries > 0 or (lacks and ending):
        scheduler.batch_is_full &= lacks
        return not lacks
    retracted = False
    while needed > scheduler.free_blocks and others > 1:
        q = running[victim]
        drop(scheduler, running, victim)
        preempt(core, q)
        if knobs.radix:  # room for some steps of all that remain (ScheduleBatch.release_req)
            evict(core.nodes, scheduler, whole_blocks(knobs, RETRACT_STEPS * (others - 1)) // knobs.block_size)
        push_back(requests, scheduler, knobs.policy, q)
        retracted = True
        needed, others, ending, victim = decoding(core)
        if needed > scheduler.free_blocks and knobs.radix:
            evict(core.nodes, scheduler, needed)
    if retracted:
        scheduler.batch_is_full = 0
        decoded, wished = 0.0, 0.0
        for i in range(scheduler.num_running):
            if requests[running[i]].num_computed_tokens >= requests[running[i]].prefill_end:
                decoded += requests[running[i]].num_output_tokens
                wished += requests[running[i]].max_tokens
        if knobs.min_new_token_ratio < 1.0:  # else requests ignore_eos
            scheduler.new_token_ratio = min(1.0, (decoded + RETRACT_STEPS * others) / (wished + 1.0))
    elif others > 0:
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - knobs.new_token_ratio_decay, knobs.min_new_token_ratio
        )
    return True


@compiled
def decoding(core):
    """Blocks that those need who decode, how many they are, whether others' last token is in flight, and the place of
    who is retracted first, -1 if nobody decodes."""
    requests, scheduler, running = core.requests, core.scheduler, core.running
    needed, others, ending, victim = 0, 0, False, -1
    for i in range(scheduler.num_running):
        request = requests[running[i]]
        if request.num_computed_tokens < request.prefill_end or request.last_step == core.replica.num_steps:
            continue
        known = request.prompt_tokens + request.num_output_tokens
        if known + 1 >= request.max_num_tokens and request.num_tokens > known:
            ending = True
            continue
        others += 1
        computed = request.num_computed_tokens
        if computed < request.num_tokens and computed + 1 > request.table_length * core.knobs.block_size:
            needed += scheduler.num_tables
        fewest = requests[running[max(victim, 0)]]
        if (
            victim < 0
            or request.num_output_tokens < fewest.num_output_tokens
            or (request.num_output_tokens == fewest.num_output_tokens and request.prompt_tokens >= fewest.prompt_tokens)
        ):
            victim = i
    return needed, others, ending, victim
