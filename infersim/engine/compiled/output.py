"""What a step brings when it ends: tokens, finished requests, gaps between tokens. Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.update_from_output).
"""

import numpy as np

from .allocation import free, set_slots
from .arrays import core_of
from .blocks import cache_full_blocks, has_windows
from .entries import num_drafts_of, num_tokens_of
from .groups import go_on
from .histogram import HISTOGRAM_BINS, HISTOGRAM_FIRST, HISTOGRAM_SHIFT
from .interface import FINISHED, PREFILL_DONE
from .njit import apart, compiled, inlined
from .queue import remove
from .radix import insert, release_path
from .replica import count_outstanding, log_event, observe, rest, send
from .speculation import num_accepted, uniform
from .state import COMPLETED, RUNNING, WAITING


@inlined
def update_from_output(a, r):
    """Process the outputs of the oldest step in flight, whose tokens are known when it ends."""
    replica, knobs = a.replicas[r], a.knobs[r]
    observe(a, r, replica.now)
    slot = replica.oldest_step
    end = a.step_end[r, slot]
    replica.oldest_step = slot + 1 if slot + 1 < knobs.steps_in_flight else 0
    replica.in_flight -= 1
    replica.blocked = 0
    if a.counts[r * a.call.ranks, slot] < 0:  # nothing was in it (batch_queue)
        replica.num_empty -= 1
        return
    if knobs.max_concurrency > 0 or knobs.host_token_time > 0.0:
        send(a, r, end, 0.0)
    if knobs.host_token_time > 0.0:
        end = deliver(a, r, slot, end)
        if knobs.max_concurrency > 0:  # in a place that was free, so at its arrival and not at `end`
            send(a, r, end, 0.0)
    if knobs.radix:
        enter_prefills(a, r, slot)
    last_end = replica.last_end
    regular_gaps = 0  # of sequences that also had a token in the step before: all the same
    for rank in range(r * a.call.ranks, (r + 1) * a.call.ranks):
        core = core_of(a, r, rank, slot)
        count = a.counts[rank, slot]
        if knobs.num_sequences > 1:
            go_on(a.requests, core.scheduler, knobs, core.blocks, a.sequences, core.step, count, end)
        if has_windows(knobs):
            land(core, count)
        regular_gaps += update_requests(a, core, r, rank, count, end)
    if regular_gaps > 0:
        a.histogram[gap_bin(end - last_end)] += regular_gaps
    replica.last_end = end
    if knobs.clip_max_new_tokens > 0:
        rest(a, r)


@inlined
def update_requests(a, core, r, rank, count, end):
    """Give the requests of one rank's part of the step their tokens, which clients have at `end`; how many of them had
    their last one in the step before."""
    replica, knobs = core.replica, core.knobs
    speculates = a.call.depth > 0
    one_by_one = not speculates and knobs.jump_tokens == 0  # every step brings a sequence one token
    placeholder = 1 if knobs.async_scheduling else 0
    last_end = replica.last_end
    regular_gaps, any_finished, num_full = 0, False, 0
    caches = knobs.async_scheduling and core.scheduler.identified
    retracts = knobs.retracts and knobs.async_scheduling
    requests, step = a.requests, core.step
    for i in range(count):
        q = step[i]
        if q < 0:
            continue
        request = requests[q]
        drafts = num_drafts_of(core, i) if speculates else 0
        if request.status >= COMPLETED or (retracts and is_thrown_away(request, drafts)):
            replica.num_wasted_tokens += 1 + drafts
            continue
        more = 0
        if one_by_one:
            request.num_tokens += 1 - placeholder
        else:
            more = more_tokens(a, core, request, drafts)
        tokens = request.num_output_tokens + 1 + more
        request.num_output_tokens = tokens
        if caches and request.prompt_tokens + tokens > request.slots + 1:
            step[num_full] = q  # of an entry that has been read
            num_full += 1
        last_token = request.last_token
        request.last_token = end
        if last_token == last_end:
            regular_gaps += 1
        elif tokens > 1 + more:
            a.histogram[gap_bin(end - last_token)] += 1
        else:
            request.first_token = end
            log_event(a, r, q, PREFILL_DONE)
        if a.call.num_gaps > 0 and tokens > 1 + more:
            a.gaps[a.gap_offset[q] + tokens - request.num_accepted_tokens - 2] = end - last_token
        if tokens >= request.stop_tokens:
            any_finished |= finish(a, r, rank, q, end)
    for i in range(num_full):  # the others have a block to fill: the next step was scheduled before this one ended
        cache_blocks(core, requests[step[i]])
    if any_finished:
        drop_finished(requests, core.scheduler, core.running)
    return regular_gaps


@compiled
def is_thrown_away(request, drafts):
    """SGLang computes the token in flight of a retracted request again."""
    retracted = request.status == WAITING and request.num_swapped == 0
    if retracted:
        request.num_tokens -= 1 + drafts
    return retracted


@compiled
def land(core, count):
    """The tokens of a step are no longer in flight."""
    for i in range(count):
        q = core.step[i]
        core.requests[q if q >= 0 else ~q].num_in_flight_tokens -= num_tokens_of(core, i)


@compiled
def cache_blocks(core, request):
    """Cache what is full of computed tokens that are known now (AsyncScheduler._update_request_with_output)."""
    full = (request.prompt_tokens + request.num_output_tokens - 1) // core.knobs.block_size
    if full > request.num_hashed_blocks and request.status == RUNNING:
        step, core.scheduler.step = core.scheduler.step, -1  # text that is there, not text that a step computes
        table = core.tables[request.table]
        cache_full_blocks(request, core.knobs, core.scheduler, core.blocks, table, core.segments, full)
        core.scheduler.step = step
        set_slots(request, core.knobs)


@inlined
def more_tokens(a, core, request, drafts):
    """Tokens that come beside the step's own one: drafts that are accepted, or what a grammar leaves no choice about,
    which is computed in the next step beside the token after it."""
    replica, knobs = core.replica, core.knobs
    most = request.stop_tokens - request.num_output_tokens - 1
    if drafts > 0:
        accepted = num_accepted(request, a.accepted, a.call.depth, drafts)
        if request.status == RUNNING:  # else preempted, and nothing of it is computed
            request.num_computed_tokens -= drafts - accepted
            core.scheduler.held_tokens -= drafts - accepted
        request.num_tokens += 1 + accepted - (1 + drafts if knobs.async_scheduling else 0)
        replica.num_drafts += drafts
        replica.num_accepted += accepted
        more = min(accepted, most)
    elif knobs.jump_tokens > 0 and uniform(request.key, request.num_output_tokens) < knobs.jump_chance:
        more = min(knobs.jump_tokens, most)
        request.num_tokens += 1 + more
    else:
        more = 0
        request.num_tokens += 0 if knobs.async_scheduling else 1
    request.num_accepted_tokens += more
    return more


@apart
def finish(a, r, rank, q, end):
    """Request q has all its tokens: free its blocks; the client may send another. True if it was running."""
    request, replica, core = a.requests[q], a.replicas[r], core_of(a, r, rank, 0)
    was_waiting = request.status == WAITING
    if core.knobs.async_scheduling and core.scheduler.identified:
        cache_blocks(core, request)
    if was_waiting:  # preempted while its last token was in flight
        remove(a.requests, core.scheduler, q)
    request.status = COMPLETED
    if core.knobs.radix:
        end_text(q, core.scheduler, core.knobs, a.requests, core.nodes, a.segments)
    if request.hold:
        replica.num_reserved += 1
    else:
        free(core, request)
    replica.num_finished += 1
    count_outstanding(replica, -1, end)
    log_event(a, r, q, FINISHED)
    if core.knobs.max_concurrency > 0:
        send(a, r, end, end)
    return not was_waiting


@compiled
def end_text(q, scheduler, knobs, requests, nodes, segments):
    """What the completed request q has computed since its prefill enters the radix tree; it holds that no longer, but
    for somebody who is still to read it."""
    request = requests[q]
    computed = min(request.num_computed_tokens, request.prompt_tokens + request.num_output_tokens)
    if computed > request.prefill_end:  # else it was preempted, or ends with its prefill
        insert(q, computed, scheduler, knobs, requests, nodes, segments)
    if not request.hold:
        release_path(request, scheduler, nodes)


@compiled
def enter_prefills(a, r, slot):
    """What prefills that end with a step have computed enters the radix trees, before its tokens are looked at."""
    knobs = a.knobs[r]
    for rank in range(r * a.call.ranks, (r + 1) * a.call.ranks):
        scheduler = a.schedulers[rank]
        for i in range(a.counts[rank, slot]):
            q = a.steps[rank, slot, i]
            if q < 0:
                continue
            request = a.requests[q]
            computed = request.num_computed_tokens >= request.prefill_end  # else a step of before its preemption
            if request.entered == 0 and request.status == RUNNING and computed:
                insert(q, request.prefill_end, scheduler, knobs, a.requests, a.nodes[rank], a.segments)
                request.entered = 1


@compiled
def drop_finished(requests, scheduler, running):
    """Close the gaps that finished requests leave in the running list."""
    kept = 0
    for i in range(scheduler.num_running):
        q = running[i]
        if requests[q].status == RUNNING:
            running[kept] = q
            kept += 1
    scheduler.num_running = kept
    scheduler.batch_is_full = 0


@compiled
def deliver(a, r, slot, end):
    """When clients have the tokens of the step that ended, on the mean of all: the API server sends one after another,
    in turn with the requests that it takes. A sequence's tokens of one step go together, and wasted ones nowhere."""
    knobs, replica = a.knobs[r], a.replicas[r]
    tokens = 0
    for rank in range(r * a.call.ranks, (r + 1) * a.call.ranks):
        for i in range(a.counts[rank, slot]):
            q = a.steps[rank, slot, i]
            if q >= 0 and a.requests[q].status < COMPLETED:
                tokens += 1
    begin = max(replica.front_end, end)
    replica.front_end = begin + tokens * knobs.host_token_time
    return begin + (tokens + 1) * 0.5 * knobs.host_token_time if tokens > 0 else end


@compiled
def gap_bin(gap):
    """Histogram bin of an inter-token gap in seconds."""
    b = (np.float64(gap).view(np.int64) >> HISTOGRAM_SHIFT) - HISTOGRAM_FIRST
    return min(max(b, 0), HISTOGRAM_BINS - 1)
