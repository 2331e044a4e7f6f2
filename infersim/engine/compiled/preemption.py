"""Who gives up memory when it runs out, and what becomes of it. Compiled."""

from .allocation import free
from .blocks import has_windows, identify, remember
from .entries import num_drafts_of, num_tokens_of
from .groups import swap_out
from .njit import apart, compiled
from .queue import comes_later, is_ordered, push_back, put_back
from .radix import evict, release_path
from .state import RETRACT_STEPS, WAITING


@compiled
def preempt(core, victim):
    """A request that is no longer running gives up its blocks, to be recomputed, or swapped in if the CPU has room.

    As vLLM V0 swaps beside prefix caching (core/block/prefix_caching_block.py, cpu_gpu_block_allocator.py): all blocks
    are copied, those that others hold are only let go of; on its return full blocks whose hash the GPU still has are
    shared, the others taken anew and hashed, and all are copied. V0 keeps equal blocks of two swapped requests once,
    here each has its own.
    """
    request, replica, scheduler, knobs = core.requests[victim], core.replica, core.scheduler, core.knobs
    scheduler.preempted = 1
    if knobs.enable_prefix_caching and not scheduler.identified:
        identify(core.requests, knobs, scheduler, core.blocks, core.tables, request.replica, request.rank)
    if scheduler.unshared:
        remember(request, knobs, scheduler, core.blocks, core.tables[request.table], core.segments)
    request.status = WAITING
    request.num_drafts = 0
    request.num_preemptions += 1
    replica.num_preemptions += 1
    if knobs.num_sequences > 1:
        scheduler.num_forks -= request.num_sequences - 1
        if request.num_output_tokens > 0:
            swap_out(request, replica, scheduler, knobs)
            return
    swapped, computed = request.num_blocks, request.num_computed_tokens
    if knobs.radix:
        release_path(request, scheduler, core.nodes)
    free(core, request)
    if 0 < swapped <= scheduler.free_cpu_blocks:
        scheduler.free_cpu_blocks -= swapped
        scheduler.copy_time += swapped * knobs.swap_block_time
        replica.num_copied += swapped
        request.num_swapped = swapped
        request.num_computed_tokens = computed


@compiled
def drop(scheduler, running, place):
    """Take one request out of the running list."""
    scheduler.num_running -= 1
    for i in range(place, scheduler.num_running):
        running[i] = running[i + 1]


@compiled
def unschedule(core, q):
    """Request q leaves the step being made, and its tokens are there for others. Blocks that it filled keep their hash,
    as in vLLM."""
    request, scheduler, entry = core.requests[q], core.scheduler, 0
    while core.step[entry] != q and core.step[entry] != ~q:
        entry += 1
    n = num_tokens_of(core, entry)
    if core.step[entry] == q and core.knobs.async_scheduling:
        request.num_tokens -= 1 + num_drafts_of(core, entry)
    request.num_computed_tokens -= n
    request.num_in_flight_tokens -= n if has_windows(core.knobs) else 0
    request.last_step = step_before(core, q)
    scheduler.token_budget += n + core.knobs.draft_slots
    scheduler.num_entries -= 1
    for i in range(entry, scheduler.num_entries):
        core.step[i], core.tokens[i] = core.step[i + 1], core.tokens[i + 1]
    scheduler.num_unscheduled += 1
    scheduler.recount = 1


@compiled
def step_before(core, q):
    """The newest step in flight that request q is in, -1 if it is in none."""
    replica, step = core.replica, core.replica.num_steps
    for back in range(replica.in_flight):
        slot = (replica.oldest_step + replica.in_flight - 1 - back) % core.knobs.steps_in_flight
        count = core.counts[slot]
        step -= count >= 0  # an empty one (batch_queue) is not counted
        for entry in range(count):
            if core.steps[slot, entry] == q or core.steps[slot, entry] == ~q:
                return step
    return -1


@compiled
def preempt_last(core):
    """Preempt the last running request that is not in this step; or, where some are more urgent, the least urgent of
    all, which leaves the step if it is in it, and of these the one that came last, of equals the first admitted.
    Returns it.

    vLLM's victim. The request that lacks memory is not in this step, so there is one.
    """
    requests, running, policy, this_step = core.requests, core.running, core.knobs.policy, core.replica.num_steps
    place = core.scheduler.num_running - 1
    if is_ordered(policy) and core.knobs.num_sequences == 1:
        last, place = place, 0
        for i in range(1, last + 1):
            if comes_later(requests[running[i]], requests[running[place]], policy):
                place = i
    else:
        while requests[running[place]].last_step == this_step:
            place -= 1
    victim = running[place]
    if requests[victim].last_step == this_step:
        unschedule(core, victim)
    drop(core.scheduler, running, place)
    preempt(core, victim)
    put_back(requests, core.scheduler, policy, victim)
    return victim


@apart
def retract(core):
    """Retract requests until every other can decode one token (SGLang's retract_decode), and expect accordingly much of
    what the others may generate.

    Those with the fewest outputs go first, of equal ones those with the longest prompts; to the end of the queue.
    """
    requests, scheduler, knobs, running = core.requests, core.scheduler, core.knobs, core.running
    retracted = False
    victim, others = next_retracted(core)
    while victim >= 0:
        q = running[victim]
        drop(scheduler, running, victim)
        preempt(core, q)
        if knobs.radix:  # room for some steps of all that remain (ScheduleBatch.release_req)
            tokens = RETRACT_STEPS * others
            evict(core.nodes, scheduler, (tokens + knobs.block_size - 1) // knobs.block_size)
        push_back(requests, scheduler, knobs.policy, q)
        retracted = True
        victim, others = next_retracted(core)
    if retracted:
        decoded, wished = 0.0, 0.0
        for i in range(scheduler.num_running):
            decoded += requests[running[i]].num_output_tokens
            wished += requests[running[i]].max_tokens
        scheduler.new_token_ratio = min(1.0, (decoded + RETRACT_STEPS * scheduler.num_running) / (wished + 1.0))
    elif scheduler.num_running > 0:
        scheduler.new_token_ratio = max(
            scheduler.new_token_ratio - knobs.new_token_ratio_decay, knobs.min_new_token_ratio
        )


@compiled
def next_retracted(core):
    """Place in the running list of who is retracted next, -1 if there is memory for a token of each; and how many
    others decode."""
    requests, scheduler, running = core.requests, core.scheduler, core.running
    needed, others, victim = 0, 0, -1
    for i in range(scheduler.num_running):
        request = requests[running[i]]
        if request.last_step == core.replica.num_steps:
            continue  # a prefill of this step
        others += 1
        decodes = request.num_computed_tokens < request.num_tokens < request.max_num_tokens
        if decodes and request.num_computed_tokens + 1 > request.table_length * core.knobs.block_size:
            needed += scheduler.num_tables
        if victim < 0:
            victim = i
        fewest = requests[running[victim]]
        if request.num_output_tokens < fewest.num_output_tokens or (
            request.num_output_tokens == fewest.num_output_tokens and request.prompt_tokens >= fewest.prompt_tokens
        ):
            victim = i
    if needed <= scheduler.free_blocks or others <= 1:
        victim = -1
    return victim, others - 1
