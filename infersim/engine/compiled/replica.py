"""One replica over time: clients send, the scheduler makes steps, steps are priced, run and end. Compiled.

The loop is the engine core's of vLLM V1 (EngineCore.step and step_with_batch_queue): with room for another step in
flight it schedules; otherwise, or when nothing can be scheduled, it waits for the oldest step to end.
"""

import math

from .allocation import free
from .arrays import core_of
from .expectation import look_for_prompts, spare_blocks
from .groups import forget
from .interface import FINISHED, TURNED_AWAY
from .njit import compiled, inlined
from .pricing import price_step
from .queue import push_front, push_in_order, remove
from .radix import before_step, evict
from .scheduler import schedule
from .state import (
    ABORTED,
    BACKGROUND,
    HOST,
    OVER_MAX_MODEL_LEN,
    PENDING,
    PREFILLS_BESIDE_DECODES,
    PROMPT_TOO_LONG,
    REJECTED,
    UNTIL_DONE,
    WAITING,
)

INFINITY = math.inf


@compiled
def count_outstanding(replica, change, time):
    """Change the number of requests in the system at `time`, and add to its integral."""
    replica.outstanding_time += replica.outstanding * (time - replica.last_change)
    replica.last_change = time
    replica.outstanding += change


@compiled
def log_event(a, r, q, kind):
    """Leave an event, at the replica's `now`, for the caller if it asked for the kind."""
    call = a.call
    if call.event_mask & kind and call.num_events < call.max_events:
        event = a.events[call.num_events]
        event.time = a.replicas[r].now
        event.request = q
        event.replica = r
        event.kind = kind
        call.num_events += 1


@compiled
def send(a, r, now, not_before):
    """The client sends what it may by `now`: at its arrival, or at `not_before` if it waited for a place until then."""
    replica, knobs = a.replicas[r], a.knobs[r]
    while replica.unsent_head >= 0:
        q = replica.unsent_head
        request = a.requests[q]
        if request.arrival > now or 0 < knobs.max_concurrency <= replica.outstanding:
            return
        replica.unsent_head = request.next
        if request.status == ABORTED:
            continue
        request.sent = max(request.arrival, not_before)
        reason = 0
        if request.prompt_tokens >= knobs.max_model_len:
            reason = PROMPT_TOO_LONG
        elif request.max_num_tokens > knobs.max_model_len:
            reason = OVER_MAX_MODEL_LEN
        if reason:
            request.status = REJECTED
            request.reason = reason
            replica.num_finished += 1
            log_event(a, r, q, TURNED_AWAY)
        else:
            count_outstanding(replica, 1, request.sent)
            replica.front_end = max(request.sent, replica.front_end) + knobs.host_request_time
            replica.front_end += knobs.host_prompt_token_time * request.prompt_tokens
            request.visible = replica.front_end + knobs.host_request_latency


@compiled
def join(a, r):
    """Requests that the API server is done with by now enter the waiting queue of their rank."""
    replica = a.replicas[r]
    while replica.pending_head != replica.unsent_head:
        q = replica.pending_head
        request = a.requests[q]
        if request.status == PENDING:
            if request.visible > replica.now:
                return
            request.status = WAITING
            replica.waiting_time += replica.now - request.visible  # before the engine core looked
        replica.pending_head = request.next
        if replica.pending_head < 0:
            replica.pending_tail = -1
        if request.status == WAITING:
            scheduler = a.schedulers[r * a.call.ranks + request.rank]
            if request.num_blocks > 0:  # its KV has come from elsewhere: vLLM puts it first
                push_front(a.requests, scheduler, q)
            else:
                fingers = a.fingers[r * a.call.ranks + request.rank]
                push_in_order(a.requests, scheduler, a.knobs[r].policy, q, fingers)


@compiled
def looks(a, r):
    """Whether the scheduler looks for new requests before this step: while nothing runs always, else as SGLang's
    recv_skipper has it, or TensorRT-LLM's batch waiting and balance of attention ranks."""
    requests, replica, knobs = a.requests, a.replicas[r], a.knobs[r]
    most = max(knobs.batch_wait_timeout_iters, knobs.attention_dp_timeout_iters)
    if knobs.scheduler_recv_interval == 0 and most == 0:
        return True
    running, waiting = 0, 0
    for rank in range(r * a.call.ranks, (r + 1) * a.call.ranks):
        running += a.schedulers[rank].num_running
        waiting += a.schedulers[rank].num_waiting
    steps = replica.num_steps - replica.looked
    if running == 0:
        return True
    if knobs.scheduler_recv_interval > 0:
        return steps >= knobs.scheduler_recv_interval
    q, tokens, there = replica.pending_head, running, 0
    while q != replica.unsent_head and requests[q].visible <= replica.now:
        if requests[q].status == PENDING:
            tokens += requests[q].prompt_tokens
            there |= 1 << requests[q].rank
        q = requests[q].next
    if there == 0 or waiting > 0 or steps >= most:
        return True
    enough = knobs.batch_wait_max_tokens_ratio * knobs.max_num_batched_tokens
    if knobs.batch_wait_timeout_iters > 0 and 0.0 < enough <= tokens:
        return True
    return knobs.attention_dp_timeout_iters > 0 and there == (1 << knobs.ranks) - 1


@compiled
def observe(a, r, time):
    """Integrate over time up to `time` what replica r has running, waiting and held: called before any of it changes.

    Nothing is done if the clock has not moved. Peaks are those of states that lasted.
    """
    replica, knobs, ranks = a.replicas[r], a.knobs[r], a.call.ranks
    elapsed = time - replica.last_observed
    if elapsed <= 0.0:
        return
    replica.last_observed = time
    running, waiting, tokens, shared = 0, 0, 0, 0
    blocks = knobs.ranks * (knobs.num_gpu_blocks - 1)
    for rank in range(r * ranks, (r + 1) * ranks):
        scheduler = a.schedulers[rank]
        running += scheduler.num_running
        waiting += scheduler.num_waiting
        blocks -= scheduler.free_blocks
        tokens += scheduler.held_tokens
        shared += scheduler.num_shared
        if knobs.allocator:
            replica.final_time += elapsed * scheduler.final_tokens
            replica.asked_time += elapsed * scheduler.asked_blocks
            if scheduler.num_waiting > 0 and 0 < scheduler.num_running < knobs.max_num_seqs:  # it only lacks a piece
                replica.stranded_time += elapsed * scheduler.free_blocks
    replica.running_time += elapsed * running
    replica.waiting_time += elapsed * waiting
    replica.block_time += elapsed * blocks
    replica.token_time += elapsed * tokens
    replica.shared_time += elapsed * shared
    if running > 0:
        replica.occupied_time += elapsed
    replica.peak_running = max(replica.peak_running, running)
    replica.peak_blocks = max(replica.peak_blocks, blocks)


@compiled
def is_empty(schedulers, first, ranks):
    """No request is running or waiting on any rank."""
    for rank in range(first, first + ranks):
        if schedulers[rank].num_running > 0 or schedulers[rank].num_waiting > 0:
            return False
    return True


@compiled
def turn_away(a, r, rank):
    """Reject what the schedule gave up. True if there was any."""
    scheduler, replica, q = a.schedulers[rank], a.replicas[r], a.schedulers[rank].waiting_head
    found = scheduler.num_given_up > 0
    while scheduler.num_given_up > 0:
        request = a.requests[q]
        after = request.next
        if request.reason > 0:
            scheduler.num_given_up -= 1
            remove(a.requests, scheduler, q)
            forget(a.requests, q, scheduler, a.knobs[r], a.blocks[rank], a.sequences)
            free(core_of(a, r, rank, 0), request)
            request.status = REJECTED
            replica.num_finished += 1
            replica.given_up_time += replica.now - request.sent
            count_outstanding(replica, -1, replica.now)
            log_event(a, r, q, FINISHED)
            if a.knobs[r].max_concurrency > 0:
                send(a, r, replica.now, replica.now)
        q = after
    return found


@compiled
def rest(a, r):
    """With nothing to do for a while, as much is expected of requests as at first (SGLang's Scheduler.on_idle)."""
    replica, knobs, first = a.replicas[r], a.knobs[r], r * a.call.ranks
    idle = replica.in_flight == 0 and is_empty(a.schedulers, first, a.call.ranks)
    if idle and next_time(a.requests, replica, a.schedulers, first, a.call.ranks, knobs, a.step_end[r]) > replica.now:
        for rank in range(first, first + a.call.ranks):
            a.schedulers[rank].new_token_ratio = knobs.new_token_ratio


@inlined
def next_time(requests, replica, schedulers, first, ranks, knobs, step_end):
    """When this replica does something next, if nobody submits anything before: inf if never."""
    if replica.in_flight == knobs.steps_in_flight or (replica.in_flight > 0 and replica.blocked):
        return max(replica.now, step_end[replica.oldest_step])
    if replica.in_flight > 0 or not (replica.blocked or is_empty(schedulers, first, ranks)):
        return replica.now
    soonest, q = (replica.next_loaded if replica.blocked else INFINITY), replica.pending_head
    if q >= 0 and q == replica.unsent_head:
        if not 0 < knobs.max_concurrency <= replica.outstanding:  # else its client waits for an answer
            front_end = max(requests[q].arrival, replica.front_end)  # at least so long, if it is not turned away
            soonest = min(soonest, front_end + knobs.host_request_time + knobs.host_request_latency)
    elif q >= 0:
        soonest = min(soonest, requests[q].visible)
    return max(replica.now, soonest)


@compiled
def begin_wave(a, r):
    """With nothing to do, the steps between which prompts are taken are counted anew (EngineCore's step_counter)."""
    if a.replicas[r].in_flight == 0 and is_empty(a.schedulers, r * a.call.ranks, a.call.ranks):
        a.replicas[r].wave = a.replicas[r].num_steps


@compiled
def next_loaded(a, r):
    """When the next load in the background ends: inf if none goes on."""
    soonest, ranks = INFINITY, a.call.ranks if a.knobs[r].kv_offloading_load == BACKGROUND else 0
    for rank in range(r * a.call.ranks, r * a.call.ranks + ranks):
        q = a.schedulers[rank].waiting_head
        while q >= 0 and a.requests[q].num_blocks > 0:
            if a.requests[q].loaded > a.replicas[r].now:
                soonest = min(soonest, a.requests[q].loaded)
            q = a.requests[q].next
    return soonest


@compiled
def prepare(a, r, rank, slot):
    """What SGLang does before a step."""
    look_for_prompts(core_of(a, r, rank, slot))
    if a.knobs[r].radix:
        before_step(a.requests, a.schedulers[rank], a.knobs[r], a.running[rank], a.nodes[rank], a.segments)


@inlined
def start_step(a, r):
    """Schedule at the replica's `now`, and put the step in flight. False if there is work and no progress."""
    call, replica, knobs = a.call, a.replicas[r], a.knobs[r]
    first = r * call.ranks
    send(a, r, replica.now, 0.0)
    observe(a, r, replica.now)
    begin_wave(a, r)
    if looks(a, r):
        replica.looked = replica.num_steps
        join(a, r)
    slot = replica.oldest_step + replica.in_flight
    if slot >= knobs.steps_in_flight:
        slot -= knobs.steps_in_flight
    replica.blocked = 0
    num_preemptions = replica.num_preemptions
    tokens, decodes = 0, 0
    sequences = 0
    again = False  # another schedule may do what this one did not
    for rank in range(first, first + call.ranks):
        scheduler = a.schedulers[rank]
        if knobs.radix or knobs.clip_max_new_tokens > 0 or knobs.order == PREFILLS_BESIDE_DECODES:
            prepare(a, r, rank, slot)
        schedule(core_of(a, r, rank, slot))
        if knobs.radix:
            evict(a.nodes[rank], scheduler, spare_blocks(core_of(a, r, rank, slot)))
        a.counts[rank, slot] = scheduler.num_entries
        again |= (scheduler.num_given_up > 0 and turn_away(a, r, rank)) or scheduler.begun != 0  # it may take no time
        tokens += scheduler.num_tokens
        decodes += scheduler.num_scheduled + scheduler.num_verified
        sequences = max(sequences, scheduler.num_scheduled)
    if tokens == 0:
        if replica.in_flight == 0 and (
            is_empty(a.schedulers, first, call.ranks) or replica.num_preemptions > num_preemptions or again
        ):
            return True  # after a preemption nobody was admitted: the next schedule may
        replica.blocked = 1
        replica.next_loaded = next_loaded(a, r)
        if replica.in_flight > replica.num_empty and knobs.batch_queue > 0 and knobs.steps_in_flight > 2:
            a.step_end[r, slot] = replica.now
            for rank in range(first, first + call.ranks):
                a.counts[rank, slot] = -1
            replica.in_flight += 1
            replica.num_empty += 1
            replica.blocked = knobs.batch_queue == UNTIL_DONE
        return replica.in_flight > 0 or replica.num_reserved > 0
    issue_step(a, r, tokens, decodes, sequences)
    return True


@compiled
def issue_step(a, r, tokens, decodes, sequences):
    """Price the step made at the replica's `now`, and put it in flight."""
    replica, knobs, price = a.replicas[r], a.knobs[r], a.prices[r]
    slot = replica.oldest_step + replica.in_flight
    if slot >= knobs.steps_in_flight:  # a division takes as long as ten comparisons
        slot -= knobs.steps_in_flight
    latency = price_step(a, r)
    issue = latency * price.issue_share
    ready = max(replica.now, replica.device_free)
    replica.now += knobs.host_step_time + knobs.host_sequence_time * sequences
    start = max(replica.now, replica.device_free)
    replica.latest_end = max(replica.latest_end, start + latency)
    a.step_end[r, slot] = replica.latest_end
    replica.device_free = start + issue
    replica.in_flight += 1
    if knobs.batch_queue == UNTIL_DONE and a.step_end[r, replica.oldest_step] <= replica.now:
        replica.blocked = 1
    replica.num_steps += 1
    if tokens > decodes and knobs.scheduler_recv_interval > 0:
        replica.looked = replica.num_steps - knobs.scheduler_recv_interval
    replica.num_scheduled_tokens += tokens
    replica.busy_time += start - ready + issue
    replica.time_by_resource[HOST] += start - ready  # the host's time that the device waits for
