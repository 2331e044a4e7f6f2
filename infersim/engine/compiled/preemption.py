"""Who gives up memory when it runs out, and what becomes of it. Compiled."""

from .allocation import free
from .blocks import has_windows, identify, remember
from .entries import num_drafts_of, num_tokens_of
from .groups import swap_out
from .njit import compiled
from .queue import comes_later, is_ordered, put_back
from .radix import release_path
from .state import WAITING


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
    request.num_drafts = request.skipped = 0
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
