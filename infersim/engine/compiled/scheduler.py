"""One scheduler step as vLLM V1 makes it: running sequences, then waiting ones; blocks; preemption from the tail.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule); the names are vLLM's. A request is a
row of state.REQUEST, a queue a linked list through it. What the step has so far, such as its token_budget, is in the
scheduler's row.
"""

from .blocks import identify
from .entries import num_drafts_of, num_tokens_of
from .expectation import retract
from .njit import apart, compiled, inlined
from .pricing import add_drafts, clear, count
from .running import schedule_running
from .state import ADMIT, DECODES, DECODES_IF_NO_PREFILL, PREFILLS_BESIDE_DECODES
from .waiting import schedule_waiting


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
