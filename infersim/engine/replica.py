"""One replica over time: clients send, the scheduler makes steps, steps are priced, run and end. Compiled.

The loop is the engine core's of vLLM V1 (EngineCore.step and step_with_batch_queue): with room for another step in
flight it schedules; otherwise, or when nothing can be scheduled, it waits for the oldest step to end.
"""

import math

from .scheduler import blocks_needed, compiled, push_back, remove, schedule
from .state import (
    ACTIVATIONS,
    COMPLETED,
    COMPUTE,
    FINISHED,
    HISTOGRAM_BINS,
    HISTOGRAM_MIN,
    HISTOGRAM_RATIO,
    HOST,
    KV,
    LAUNCH,
    OVER_MAX_MODEL_LEN,
    PREFILL_DONE,
    PROMPT_TOO_LONG,
    REJECTED,
    RESOURCES,
    TURNED_AWAY,
    WAITING,
)

NUM_RESOURCES = len(RESOURCES)
LOG_RATIO = math.log(HISTOGRAM_RATIO)
INFINITY = math.inf


@compiled
def count_outstanding(replica, change, time):
    """Change the number of requests in the system at `time`, and add to its integral."""
    replica.outstanding_time += replica.outstanding * (time - replica.last_change)
    replica.last_change = time
    replica.outstanding += change


@compiled
def log_event(call, events, time, q, r, kind):
    """Leave an event for the caller if it asked for the kind."""
    if call.event_mask & kind and call.num_events < call.max_events:
        event = events[call.num_events]
        event.time = time
        event.request = q
        event.replica = r
        event.kind = kind
        call.num_events += 1


@compiled
def send(requests, replica, knobs, call, events, r, now, not_before):
    """The client sends what it may by `now`: at its arrival, or at `not_before` if it waited for a place until then."""
    while replica.unsent_head >= 0:
        q = replica.unsent_head
        request = requests[q]
        if request.arrival > now or 0 < knobs.max_concurrency <= replica.outstanding:
            return
        replica.unsent_head = request.next
        request.sent = max(request.arrival, not_before)
        reason = 0
        if request.prompt_tokens >= knobs.max_model_len:
            reason = PROMPT_TOO_LONG
        elif request.prompt_tokens + request.max_tokens > knobs.max_model_len:
            reason = OVER_MAX_MODEL_LEN
        if reason:
            request.status = REJECTED
            request.reason = reason
            log_event(call, events, request.sent, q, r, TURNED_AWAY)
        else:
            count_outstanding(replica, 1, request.sent)


@compiled
def join(requests, replica, schedulers, knobs):
    """Requests that have become visible by now enter the waiting queue of their rank."""
    while replica.pending_head != replica.unsent_head:
        q = replica.pending_head
        request = requests[q]
        if request.status != REJECTED:
            if request.sent + knobs.host_request_time > replica.now:
                return
            request.status = WAITING
        replica.pending_head = request.next
        if replica.pending_head < 0:
            replica.pending_tail = -1
        if request.status == WAITING:
            push_back(requests, schedulers[request.rank], q)


@compiled
def smooth_max(a, b, knee):
    """Two times that overlap: their p-norm, p = knee; infinite knee is the maximum."""
    if a <= 0.0:
        return b
    if b <= 0.0:
        return a
    if a < b:
        a, b = b, a
    return a * (1.0 + (b / a) ** knee) ** (1.0 / knee)


@compiled
def attention_time(sums, attention, num_kinds, split):
    """Seconds of attention in a step; adds their resources to split. A time goes to the side that binds it."""
    total = 0.0
    for kind in range(num_kinds):
        row = attention[kind]
        s = sums[kind]
        if s.num_decodes > 0:
            kv = row.decode_kv * s.decode_keys
            activations = row.decode_activations * s.num_decodes
            compute = row.decode_compute * s.decode_keys
            time = smooth_max(kv + activations, compute, row.decode_knee)
            if kv + activations >= compute:
                split[KV] += time * kv / (kv + activations)
                split[ACTIVATIONS] += time * activations / (kv + activations)
            else:
                split[COMPUTE] += time
            split[LAUNCH] += row.decode_fixed
            total += time + row.decode_fixed
        if s.prefill_tokens > 0:
            kv = row.prefill_kv * s.prefill_keys
            activations = row.prefill_activations * s.prefill_tokens
            compute = row.prefill_compute * s.prefill_pairs + row.prefill_tile * s.query_tiles
            time = smooth_max(kv + activations, compute, row.prefill_knee)
            if kv + activations >= compute:
                split[KV] += time * kv / (kv + activations)
                split[ACTIVATIONS] += time * activations / (kv + activations)
            else:
                split[COMPUTE] += time
            split[LAUNCH] += row.prefill_fixed
            total += time + row.prefill_fixed
        s.num_decodes = 0
        s.decode_keys = 0
        s.prefill_tokens = 0
        s.prefill_keys = 0
        s.prefill_pairs = 0
        s.query_tiles = 0
    return total


@compiled
def price_step(replica, schedulers, first, ranks, price, table, attention, sums, scratch):
    """Seconds of the step just made: the slowest rank's. Leaves its split by resource in scratch[0].

    Every rank's time is linear[its tokens] + head[its sequences] + attention; an idle rank runs a dummy step.
    """
    slowest = -1.0
    for rank in range(first, first + ranks):
        split = scratch[1]
        linear = price.linear + NUM_RESOURCES * schedulers[rank].num_tokens
        head = price.head + NUM_RESOURCES * schedulers[rank].num_scheduled
        total = 0.0
        for resource in range(NUM_RESOURCES):
            split[resource] = table[linear + resource] + table[head + resource]
            total += split[resource]
        total += attention_time(sums[rank], attention, price.num_kinds, split)
        if total > slowest:
            slowest = total
            for resource in range(NUM_RESOURCES):
                scratch[0, resource] = split[resource]
    return slowest


@compiled
def observe(replica, schedulers, first, ranks, knobs):
    """Add the time since the last schedule to the integrals of running, waiting and blocks held."""
    running, waiting, blocks = 0, 0, 0
    for rank in range(first, first + ranks):
        running += schedulers[rank].num_running
        waiting += schedulers[rank].num_waiting
        blocks += knobs.num_gpu_blocks - 1 - schedulers[rank].free_blocks
    elapsed = replica.now - replica.last_schedule
    replica.last_schedule = replica.now
    replica.running_time += elapsed * running
    replica.waiting_time += elapsed * waiting
    replica.block_time += elapsed * blocks
    replica.peak_running = max(replica.peak_running, running)
    replica.peak_blocks = max(replica.peak_blocks, blocks)


@compiled
def gap_bin(gap):
    """Histogram bin of an inter-token gap in seconds."""
    if gap <= HISTOGRAM_MIN:
        return 0
    return min(int(math.log(gap / HISTOGRAM_MIN) / LOG_RATIO), HISTOGRAM_BINS - 1)


@compiled
def finish(requests, replica, scheduler, knobs, call, events, r, q, end):
    """Request q has all its tokens: free its blocks; the client may send another. True if it was running."""
    request = requests[q]
    was_waiting = request.status == WAITING
    if was_waiting:  # preempted while its last token was in flight
        remove(requests, scheduler, q)
    request.status = COMPLETED
    scheduler.free_blocks += request.num_blocks
    request.num_blocks = 0
    count_outstanding(replica, -1, end)
    log_event(call, events, end, q, r, FINISHED)
    if knobs.max_concurrency > 0:
        send(requests, replica, knobs, call, events, r, end, end)
    return not was_waiting


@compiled
def end_step(
    requests, replica, schedulers, first, ranks, knobs, call, events, r, running, steps, counts, slot, end, histogram, gaps, gap_offset
):  # fmt: skip
    """Process the outputs of the step in `slot`, whose tokens became known at `end`."""
    if knobs.max_concurrency > 0:
        send(requests, replica, knobs, call, events, r, end, 0.0)
    regular_gaps = 0  # of sequences that also had a token in the step before: all the same
    for rank in range(first, first + ranks):
        scheduler = schedulers[rank]
        finished = False
        for i in range(counts[rank, slot]):
            q = steps[rank, slot, i]
            if q < 0:
                continue
            request = requests[q]
            if request.status == COMPLETED:
                replica.num_wasted_tokens += 1
                continue
            if knobs.async_scheduling:
                request.num_placeholders -= 1
            request.num_output_tokens += 1
            if request.num_output_tokens == 1:
                request.first_token = end
                log_event(call, events, end, q, r, PREFILL_DONE)
            else:
                if request.last_token == replica.last_end:
                    regular_gaps += 1
                else:
                    histogram[gap_bin(end - request.last_token)] += 1
                if call.num_gaps > 0:
                    gaps[gap_offset[q] + request.num_output_tokens - 2] = end - request.last_token
            request.last_token = end
            if request.num_output_tokens >= request.max_tokens or request.num_output_tokens >= request.output_tokens:
                finished |= finish(requests, replica, scheduler, knobs, call, events, r, q, end)
        if finished:
            kept = 0
            for i in range(scheduler.num_running):
                q = running[rank, i]
                if requests[q].status != COMPLETED:
                    running[rank, kept] = q
                    kept += 1
            scheduler.num_running = kept
    if regular_gaps > 0:
        histogram[gap_bin(end - replica.last_end)] += regular_gaps
    replica.last_end = end


@compiled
def is_empty(schedulers, first, ranks):
    """No request is running or waiting on any rank."""
    for rank in range(first, first + ranks):
        if schedulers[rank].num_running > 0 or schedulers[rank].num_waiting > 0:
            return False
    return True


@compiled
def next_time(requests, replica, schedulers, first, ranks, knobs, step_end):
    """When this replica does something next, if nobody submits anything before: inf if never."""
    if replica.in_flight == knobs.steps_in_flight or replica.blocked:
        return max(replica.now, step_end[replica.oldest_step])
    if replica.in_flight > 0 or not is_empty(schedulers, first, ranks):
        return replica.now
    q = replica.pending_head
    if q < 0:
        return INFINITY
    sent = requests[q].arrival if q == replica.unsent_head else requests[q].sent
    return max(replica.now, sent + knobs.host_request_time)


@compiled
def tick(
    requests, replica, schedulers, first, ranks, knobs, price, table, attention, sums, scratch, call, events, r, running, steps, counts, step_end, time, histogram, gaps, gap_offset
):  # fmt: skip
    """Do what is due at `time` (from next_time): make a step, or process the oldest one. False if it got nowhere."""
    replica.now = time
    if replica.in_flight == knobs.steps_in_flight or replica.blocked:
        slot = replica.oldest_step
        replica.oldest_step = (slot + 1) % knobs.steps_in_flight
        replica.in_flight -= 1
        replica.blocked = 0
        end_step(requests, replica, schedulers, first, ranks, knobs, call, events, r, running, steps, counts, slot, step_end[slot], histogram, gaps, gap_offset)  # fmt: skip  # noqa: E501
        return True
    send(requests, replica, knobs, call, events, r, time, 0.0)
    join(requests, replica, schedulers[first : first + ranks], knobs)
    observe(replica, schedulers, first, ranks, knobs)
    slot = (replica.oldest_step + replica.in_flight) % knobs.steps_in_flight
    tokens = 0
    sequences = 0
    for rank in range(first, first + ranks):
        scheduler = schedulers[rank]
        schedule(requests, replica, scheduler, knobs, running[rank], steps[rank, slot], sums[rank], attention, price.num_kinds)  # fmt: skip  # noqa: E501
        counts[rank, slot] = scheduler.num_scheduled
        tokens += scheduler.num_tokens
        sequences = max(sequences, scheduler.num_scheduled)
    if tokens == 0:
        if replica.in_flight == 0:
            return is_empty(schedulers, first, ranks)
        replica.blocked = 1
        return True
    latency = price_step(replica, schedulers, first, ranks, price, table, attention, sums, scratch)
    ready = replica.now
    host_time = knobs.host_step_time + knobs.host_sequence_time * sequences
    replica.now += host_time
    start = max(replica.now, replica.device_free)
    exposed = start - max(ready, replica.device_free)  # the host's time that the device waits for
    issue = latency * price.issue_share
    step_end[slot] = start + latency
    replica.device_free = start + issue
    replica.in_flight += 1
    replica.num_steps += 1
    replica.num_scheduled_tokens += tokens
    replica.busy_time += exposed + issue
    for resource in range(NUM_RESOURCES):
        replica.time_by_resource[resource] += scratch[0, resource] * price.issue_share
    replica.time_by_resource[HOST] += exposed
    return True


@compiled
def advance(
    call, replicas, schedulers, knobs, prices, table, attention, sums, scratch, requests, running, steps, counts, step_end, histogram, gaps, gap_offset, events
):  # fmt: skip
    """Advance all replicas to `call.until`, or to the first event asked for; what is due at `until` is left undone.

    Without an event mask the replicas are independent and run one after another; with one they take turns in order of
    time, so that none is ahead of the event. Arrays: state.REPLICA[R], SCHEDULER[R * ranks], KNOBS[R], PRICE[R],
    f8[table], ATTENTION_PRICE[R, 4], SUMS[R * ranks, 4], f8[2, 8], REQUEST[n], i4[R * ranks, max_num_seqs],
    i4[R * ranks, F, max_num_seqs], i4[R * ranks, F], f8[R, F], i8[R, bins], f4[gaps], i8[n], EVENT[max_events].
    """
    ranks = call.ranks
    call.num_events = 0
    call.stuck_replica = -1
    if call.event_mask == 0:
        for r in range(call.num_replicas):
            first = r * ranks
            while True:
                time = next_time(requests, replicas[r], schedulers, first, ranks, knobs[r], step_end[r])
                if not time < call.until:
                    break
                if not tick(requests, replicas[r], schedulers, first, ranks, knobs[r], prices[r], table, attention[r], sums, scratch, call, events, r, running, steps, counts, step_end[r], time, histogram[r], gaps, gap_offset):  # fmt: skip  # noqa: E501
                    call.stuck_replica = r
                    return
        return
    while call.num_events == 0:
        earliest = INFINITY
        chosen = -1
        for r in range(call.num_replicas):
            time = next_time(requests, replicas[r], schedulers, r * ranks, ranks, knobs[r], step_end[r])
            if time < earliest:
                earliest = time
                chosen = r
        if not earliest < call.until:
            return
        r = chosen
        if not tick(requests, replicas[r], schedulers, r * ranks, ranks, knobs[r], prices[r], table, attention[r], sums, scratch, call, events, r, running, steps, counts, step_end[r], earliest, histogram[r], gaps, gap_offset):  # fmt: skip  # noqa: E501
            call.stuck_replica = r
            return
