"""Steps in which every running request gets one token more and nothing else happens, made without a look at each.
Compiled.

Nobody comes, ends, waits or lacks a block that is not free: then such a step is a matter of a few sums, and the
requests are brought up to date after several. Times, sums and records are those of steps made one by one, to the bit.
"""

from .arrays import core_of
from .interface import HORIZON
from .njit import apart, compiled, inlined
from .output import gap_bin
from .replica import issue_step, observe
from .state import RUNNING, UNTIL_DONE

LEAST = 4  # steps for which looking at all requests pays


@inlined
def may_coast(a, r):
    """Whether, all steps in flight, those that run may be alone for a while: what can be told without a look at each.
    Where any of it is otherwise, every step is made in full."""
    call, replica, knobs, price, scheduler = a.call, a.replicas[r], a.knobs[r], a.prices[r], a.schedulers[r]
    n, arrival = scheduler.num_running, replica.unsent_head
    if not (replica.coasts <= replica.num_steps and n > 0 and scheduler.num_waiting == 0 and scheduler.num_tokens == n):
        return False
    if not (replica.in_flight == knobs.steps_in_flight and replica.pending_head == arrival):
        return False
    soon = replica.latest_end + LEAST * (replica.latest_end - replica.last_end)
    if arrival >= 0 and not 0 < knobs.max_concurrency <= replica.outstanding and a.requests[arrival].arrival < soon:
        return False
    plain = call.ranks == 1 and call.event_mask == 0 and call.num_gaps == 0 and call.depth == 0
    plain &= price.num_kinds == 1 and price.draft_first < 0 and a.attention[r, 0].window == 0
    plain &= knobs.num_kv_groups == 1 and knobs.kv_window[0] == 0 and knobs.allocator == 0 and not knobs.radix
    plain &= knobs.num_sequences == 1 and knobs.jump_tokens == 0 and knobs.lookahead == 0 and knobs.draft_slots == 0
    plain &= knobs.padded_drafts == 0 and knobs.clip_max_new_tokens == 0 and knobs.batch_queue != UNTIL_DONE
    plain &= knobs.prefill_schedule_interval <= 1 and knobs.scheduler_recv_interval == 0
    plain &= max(knobs.batch_wait_timeout_iters, knobs.attention_dp_timeout_iters) == 0
    plain &= knobs.max_concurrency == 0 or knobs.host_token_time == 0.0
    return plain and scheduler.identified == 0


@apart
def coast(a, r):
    """Make as many such steps as there are, up to HORIZON, and say how many. All are in flight before and after."""
    replica, knobs, call, scheduler = a.replicas[r], a.knobs[r], a.call, a.schedulers[r]
    n, done = scheduler.num_running, 0
    most, keys = look(a, r)
    while done < most:
        time = max(replica.now, a.step_end[r, replica.oldest_step])
        q = replica.unsent_head
        comes = q >= 0 and a.requests[q].arrival <= time and not 0 < knobs.max_concurrency <= replica.outstanding
        if not time < call.until or comes or scheduler.free_blocks < a.growth[done]:
            break
        replica.now = time
        end_step(a, r, n)
        scheduler.free_blocks -= a.growth[done]
        scheduler.num_tokens = scheduler.num_scheduled = n
        scheduler.held_tokens += n
        a.sums[r, 0].num_decodes, a.sums[r, 0].decode_keys = n, keys
        replica.looked = replica.num_steps
        issue_step(a, r, n, n, n)
        keys += n
        done += 1
    settle(a, r, done)
    if done < LEAST:
        replica.coasts = replica.num_steps + LEAST
    return done


@inlined
def look(a, r):
    """Steps, at most HORIZON, before the first running request ends or is not like the others, and the keys that all
    see in the next; leaves in a.growth how many blocks each of those steps takes."""
    replica, knobs, core = a.replicas[r], a.knobs[r], core_of(a, r, r, 0)
    n, flying = core.scheduler.num_running, knobs.steps_in_flight
    most, keys = HORIZON, 0
    for slot in range(flying):
        if a.counts[r, slot] != n:
            return 0, 0
    for i in range(HORIZON):
        a.growth[i] = 0
    unknown = 1 if knobs.async_scheduling else 0  # a token in flight that counts already
    for i in range(n):
        request = core.requests[core.running[i]]
        computed, known = request.num_computed_tokens, request.prompt_tokens + request.num_output_tokens
        alike = request.status == RUNNING and request.last_step == replica.num_steps - 1 and request.num_drafts == 0
        alike &= request.last_token == replica.last_end and known == computed + 1 - flying
        alike &= request.num_tokens == computed + unknown
        most = min(most, request.stop_tokens - request.num_output_tokens - 1)
        most = min(most, request.max_num_tokens - unknown - request.num_tokens - 1)
        if not alike or most < LEAST:
            return 0, 0
        keys += computed + 1
        step = request.table_length * knobs.block_size - computed  # that takes its next block
        while step < HORIZON:
            a.growth[step] += 1
            step += knobs.block_size
    return most, keys


@inlined
def end_step(a, r, n):
    """`update_from_output` of the oldest step, which gave n requests that go on a token each."""
    replica, knobs = a.replicas[r], a.knobs[r]
    observe(a, r, replica.now)
    end = a.step_end[r, replica.oldest_step]
    replica.oldest_step = replica.oldest_step + 1 if replica.oldest_step + 1 < knobs.steps_in_flight else 0
    replica.in_flight -= 1
    if knobs.host_token_time > 0.0:
        begin = max(replica.front_end, end)
        replica.front_end = begin + n * knobs.host_token_time
        end = begin + (n + 1) * 0.5 * knobs.host_token_time
    a.histogram[gap_bin(end - replica.last_end)] += n
    replica.last_end = end


@compiled
def settle(a, r, steps):
    """Give every running request what so many steps brought it."""
    replica, knobs, core = a.replicas[r], a.knobs[r], core_of(a, r, r, 0)
    if steps == 0:
        return
    block_size = knobs.block_size
    for i in range(core.scheduler.num_running):
        request = core.requests[core.running[i]]
        request.num_computed_tokens += steps
        request.num_tokens += steps
        request.num_output_tokens += steps
        request.last_token = replica.last_end
        request.last_step = replica.num_steps - 1
        last = request.num_computed_tokens - 1  # where the last step began
        known = request.prompt_tokens + request.num_output_tokens
        length = last // block_size + 1
        if length > request.table_length:
            request.num_blocks += length - request.table_length
            request.table_length = length
        full = min(last + 1, known) // block_size
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)
        request.slots = request.table_length * block_size
        if knobs.enable_prefix_caching:
            request.slots = min(request.slots, (request.num_hashed_blocks + 1) * block_size - 1)
