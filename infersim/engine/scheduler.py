"""One scheduler step as vLLM V1 makes it: running sequences, then waiting ones; blocks; preemption from the tail.

Written after vLLM 0.11-0.33 (vllm/v1/core/sched/scheduler.py, Scheduler.schedule and KVCacheManager.allocate_slots);
the names are vLLM's. A request is a row of state.REQUEST, a queue a linked list through it.
"""

from .blocks import (
    free_table,
    hash_until,
    identify,
    look_up,
    release,
    release_outside_window,
    share,
    take_table,
    take_until,
)
from .njit import compiled, inlined
from .speculation import add_verification
from .state import QUERY_TILE, RESERVED_PER_SEQUENCE, RUNNING, WAITING


@compiled
def push_back(requests, scheduler, q):
    """Append request q to the waiting queue."""
    requests[q].next = -1
    requests[q].prev = scheduler.waiting_tail
    if scheduler.waiting_tail >= 0:
        requests[scheduler.waiting_tail].next = q
    else:
        scheduler.waiting_head = q
    scheduler.waiting_tail = q
    scheduler.num_waiting += 1


@compiled
def push_front(requests, scheduler, q):
    """Prepend request q to the waiting queue (where a preempted request goes)."""
    requests[q].prev = -1
    requests[q].next = scheduler.waiting_head
    if scheduler.waiting_head >= 0:
        requests[scheduler.waiting_head].prev = q
    else:
        scheduler.waiting_tail = q
    scheduler.waiting_head = q
    scheduler.num_waiting += 1


@compiled
def put_back(requests, scheduler, q):
    """Prepend the preempted request q, but behind those whose KV came from elsewhere.

    They hold blocks: if it went before them, it might never have enough, and they never run.
    """
    before = -1
    after = scheduler.waiting_head
    while after >= 0 and requests[after].num_blocks > 0:
        before = after
        after = requests[after].next
    if before < 0:
        push_front(requests, scheduler, q)
    elif after < 0:
        push_back(requests, scheduler, q)
    else:
        requests[q].prev = before
        requests[q].next = after
        requests[before].next = q
        requests[after].prev = q
        scheduler.num_waiting += 1


@compiled
def remove(requests, scheduler, q):
    """Take request q out of the waiting queue."""
    before, after = requests[q].prev, requests[q].next
    if before >= 0:
        requests[before].next = after
    else:
        scheduler.waiting_head = after
    if after >= 0:
        requests[after].prev = before
    else:
        scheduler.waiting_tail = before
    scheduler.num_waiting -= 1


@compiled
def blocks_needed(knobs, num_computed, num_tokens):
    """KV blocks that a sequence of num_tokens holds once its blocks outside the window of num_computed are freed."""
    block_size = knobs.block_size
    per_table = (num_tokens + block_size - 1) // block_size
    if knobs.num_kv_groups == 1 and knobs.kv_window[0] == 0:
        return per_table
    total = 0
    for g in range(knobs.num_kv_groups):
        skipped = 0
        if knobs.kv_window[g] == 1:  # a state
            skipped = per_table - 1
        elif knobs.kv_window[g] > 1 and num_computed >= knobs.kv_window[g]:
            skipped = (num_computed - knobs.kv_window[g] + 1) // block_size
        total += knobs.kv_multiplicity[g] * (per_table - skipped)
    return total


@compiled
def blocks_of_whole_sequence(knobs, num_tokens):
    """KV blocks that the admission gate asks for: the whole sequence, windows capped at what one step can hold."""
    block_size = knobs.block_size
    per_table = (num_tokens + block_size - 1) // block_size
    total = 0
    for g in range(knobs.num_kv_groups):
        blocks = per_table
        if knobs.kv_window[g] == 1:
            blocks = 1
        elif knobs.kv_window[g] > 1:
            # vLLM SlidingWindowManager: window - 1 keys kept, one step's tokens, and one block for misalignment
            held = knobs.kv_window[g] - 1 + knobs.max_num_batched_tokens
            blocks = min(blocks, (held + block_size - 1) // block_size + 1)
        total += knobs.kv_multiplicity[g] * blocks
    return total


@compiled
def windowed_pairs(start, n, window):
    """Sum over the n queries at positions start.. of the keys visible to each: min(position + 1, window)."""
    full = min(max(window - start, 0), n)  # the first `full` queries see everything before them
    return full * start + full * (full + 1) // 2 + (n - full) * window


@compiled
def chunked_pairs(end, chunk):
    """Sum over the queries at positions 0..end-1 of the keys visible to each, those of its own chunk up to itself."""
    whole = end // chunk
    rest = end - whole * chunk
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


@compiled
def add_to_sums(sums, attention, num_kinds, start, n):
    """Add n new tokens after `start` computed ones to the step's sums, for each attention kind."""
    for kind in range(num_kinds):
        window = attention[kind].window
        row = sums[kind]
        if n == 1:
            keys = start + 1
            if 0 < window < keys:
                keys = window
            elif window < 0:
                keys = start % -window + 1
            row.num_decodes += 1
            row.decode_keys += keys
        else:
            keys = start + n
            if window > 0:
                keys = min(keys, window - 1 + n)
                row.prefill_pairs += windowed_pairs(start, n, window)
            elif window < 0:
                keys = start % -window + n
                row.prefill_pairs += chunked_pairs(start + n, -window) - chunked_pairs(start, -window)
            else:
                row.prefill_pairs += n * start + n * (n + 1) // 2
            row.prefill_keys += keys
            row.prefill_tokens += n
            row.query_tiles += (n + QUERY_TILE - 1) // QUERY_TILE


@compiled
def set_slots(request, knobs):
    """How far a step may go before there is something to do: a block to take, or one to hash since it is full."""
    if knobs.num_kv_groups > 1 or knobs.kv_window[0] > 0:
        request.slots = 0  # blocks leave a window at any step
        return
    request.slots = request.num_blocks * knobs.block_size
    if knobs.enable_prefix_caching:
        request.slots = min(request.slots, (request.num_hashed_blocks + 1) * knobs.block_size - 1)


@compiled
def allocate(request, scheduler, knobs, num_tokens, reserve):
    """Take the blocks that num_tokens need, if that leaves `reserve` free; False (and nothing taken) otherwise."""
    held = max(num_tokens, request.table_length * knobs.block_size)  # what refused drafts took is kept for the next
    needed = blocks_needed(knobs, request.num_computed_tokens, held)
    if needed - request.num_blocks + reserve > scheduler.free_blocks:
        return False
    scheduler.free_blocks -= needed - request.num_blocks
    request.num_blocks = needed
    request.table_length = (held + knobs.block_size - 1) // knobs.block_size
    request.num_hashed_blocks = min(num_tokens, request.prompt_tokens + request.num_output_tokens) // knobs.block_size
    set_slots(request, knobs)
    return True


@compiled
def extend(request, scheduler, knobs, blocks, table, segments, num_tokens):
    """Take the blocks up to num_tokens, which are known to be free, and hash those that are full by then.

    Tokens in flight are not known yet: a block with one is hashed at a later step.
    """
    take_until(request, scheduler, blocks, table, (num_tokens + knobs.block_size - 1) // knobs.block_size)
    full = min(num_tokens, request.prompt_tokens + request.num_output_tokens) // knobs.block_size
    hash_until(request, knobs, scheduler, blocks, table, segments, full)
    set_slots(request, knobs)


@compiled
def allocate_identified(request, scheduler, knobs, blocks, tables, segments, num_tokens, reserve):
    """`allocate` for a request that holds blocks with an identity."""
    table = tables[request.table]
    release_outside_window(request, knobs, scheduler, blocks, table)
    length = (num_tokens + knobs.block_size - 1) // knobs.block_size
    if scheduler.num_tables * max(length - request.table_length, 0) + reserve > scheduler.free_blocks:
        return False
    extend(request, scheduler, knobs, blocks, table, segments, num_tokens)
    return True


@compiled
def cached_tokens(q, request, scheduler, knobs, blocks, tables, segments, num_tokens, watermark):
    """Tokens of a waiting request that the cache holds, or -1 if the admission gate says no.

    As long as nothing changed that could lower its need, a request that was turned away is not looked up again.
    """
    if q == scheduler.blocked_request and scheduler.blocked_need + watermark > scheduler.free_blocks:
        return -1
    length = look_up(request, knobs, scheduler, blocks, segments, tables[free_table(scheduler)])
    if knobs.reserve_full_isl:
        needed = blocks_of_whole_sequence(knobs, num_tokens) - scheduler.hit_blocks + scheduler.idle_hit_blocks
        if needed + watermark > scheduler.free_blocks:
            if scheduler.num_tables == 1 and knobs.kv_window[0] == 0:
                scheduler.blocked_request = q
                scheduler.blocked_need = needed
            return -1
    return length * knobs.block_size


@compiled
def allocate_cached(request, scheduler, knobs, blocks, tables, segments, cached, n, reserve):
    """`allocate` for a waiting request that was just looked up: share what is cached, take the rest."""
    length = (cached + n + knobs.block_size - 1) // knobs.block_size
    hit = cached // knobs.block_size
    needed = scheduler.num_tables * (length - hit) + scheduler.idle_hit_blocks
    if needed + reserve > scheduler.free_blocks:
        return False
    share_hits(request, scheduler, blocks, tables, hit)
    extend(request, scheduler, knobs, blocks, tables[request.table], segments, cached + n)
    return True


@compiled
def share_hits(request, scheduler, blocks, tables, length):
    """Give a request its row of block tables, in which the `length` blocks of its look-up stand, and hold those."""
    take_table(request, scheduler, tables)
    table = tables[request.table]
    for t in range(scheduler.num_tables):
        for i in range(t * scheduler.table_stride, t * scheduler.table_stride + length):
            if table[i] > 0:
                share(blocks, scheduler, table[i])
    scheduler.blocked_request = -1
    request.table_length = length
    request.num_blocks = scheduler.hit_blocks


@compiled
def free(request, scheduler, blocks, tables):
    """Free all blocks of a request."""
    if request.table >= 0:
        release(request, scheduler, blocks, tables)
    else:
        scheduler.free_blocks += request.num_blocks
    request.num_blocks = 0
    request.table_length = 0
    request.slots = 0


@compiled
def preempt_last(requests, replica, scheduler, knobs, running, blocks, tables, segments):
    """Preempt the last running request for recomputation (vLLM V1's FCFS victim); returns it."""
    if knobs.enable_prefix_caching and not scheduler.identified:
        first = requests[running[0]]
        identify(requests, knobs, scheduler, blocks, tables, segments, first.replica, first.rank)
    scheduler.num_running -= 1
    victim = running[scheduler.num_running]
    request = requests[victim]
    request.status = WAITING
    request.num_computed_tokens = 0
    request.num_drafts = 0
    request.num_preemptions += 1
    replica.num_preemptions += 1
    free(request, scheduler, blocks, tables)
    put_back(requests, scheduler, victim)
    return victim


@inlined
def schedule(
    requests, replica, scheduler, knobs, running, step, drafts, plan, sums, attention, num_kinds, blocks, tables,
    segments,
):  # fmt: skip
    """Make one step: fills step[:] with entries and the scheduler's num_scheduled and num_tokens, adds to sums.

    running: i4[max_num_seqs], the request rows in order of admission; step: i4[max_num_seqs], a request row if it
    samples a token, else its bitwise complement; drafts: i2[max_num_seqs], how many it verifies; plan: this replica's,
    sums, blocks and tables this rank's of state.Arrays.
    """
    if scheduler.identified < 0:
        identify(requests, knobs, scheduler, blocks, tables, segments, -1, -1)
    budget = knobs.max_num_batched_tokens
    count = 0
    preempted = False
    threshold = knobs.long_prefill_token_threshold
    if knobs.long_prefill_needs_contention and scheduler.num_running + scheduler.num_waiting <= 1:
        threshold = 0
    only_full = num_kinds == 1 and attention[0].window == 0
    placeholder = 1 if knobs.async_scheduling else 0
    longest = knobs.max_model_len - 1
    num_decodes, decode_keys, more_queries, more_pairs = 0, 0, 0, 0
    proposed = plan[scheduler.num_running, 0]
    scheduler.draft_passes = plan[scheduler.num_running, 1]
    scheduler.num_verified = 0
    scheduler.num_drafting = 0
    scheduler.draft_keys = 0

    i = 0
    while i < scheduler.num_running and budget > 0:
        q = running[i]
        request = requests[q]
        i += 1
        computed = request.num_computed_tokens
        known = request.prompt_tokens + request.num_output_tokens
        if request.num_tokens > known and known + 1 >= request.max_num_tokens:
            continue  # its last token is in flight
        own = request.num_tokens - computed
        if own <= 0:
            continue  # its next token is not known yet
        n = own + request.num_drafts
        if 0 < threshold < n:
            n = threshold
        n = min(n, budget, longest - computed)
        if n <= 0:
            continue
        end = min(computed + n + knobs.lookahead, knobs.max_model_len)
        # without branches, since drafts make it hard to predict: a block is missing, or full, or may leave a window
        full = known >= (request.num_hashed_blocks + 1) * knobs.block_size
        missing = end > request.table_length * knobs.block_size
        if (end > request.slots) & (full | missing | (request.slots == 0)):
            victim = -1
            while True:
                if scheduler.identified:
                    if allocate_identified(request, scheduler, knobs, blocks, tables, segments, end, 0):
                        break
                elif allocate(request, scheduler, knobs, end, 0):
                    break
                victim = preempt_last(requests, replica, scheduler, knobs, running, blocks, tables, segments)
                preempted = True
                if victim == q:
                    break
            if victim == q:
                break
        if n == 1 and only_full:
            num_decodes += 1
            decode_keys += computed + 1
        elif own == 1 and only_full:
            num_decodes += 1
            decode_keys += computed + n
            more_queries += n - 1
            more_pairs += (n - 1) * computed + n * (n - 1) // 2
        elif own == 1 and n > 1:
            add_verification(sums, attention, num_kinds, computed, n)
        else:
            add_to_sums(sums, attention, num_kinds, computed, n)
        request.last_step = replica.num_steps
        request.num_computed_tokens = computed + n
        verified = max(n - own, 0)
        drafts[count] = verified
        if n >= own:
            request.num_tokens += placeholder * (1 + verified)
            request.num_drafts = proposed
            scheduler.num_verified += verified
            if proposed > 0:
                scheduler.num_drafting += 1
                scheduler.draft_keys += computed + own
            step[count] = q
        else:
            step[count] = ~q
        count += 1
        budget -= n
    sums[0].num_decodes += num_decodes
    sums[0].decode_keys += decode_keys
    sums[0].more_queries += more_queries
    sums[0].more_pairs += more_pairs

    if not preempted:
        q = scheduler.waiting_head
        while q >= 0 and budget > 0 and scheduler.num_running < knobs.max_num_seqs:
            request = requests[q]
            after = request.next
            arrived = request.num_blocks > 0  # its KV came from elsewhere
            if (
                knobs.enable_prefix_caching
                and not arrived
                and replica.num_reserved >= RESERVED_PER_SEQUENCE * knobs.max_num_seqs
            ):
                break  # rows of block tables are left for what runs
            if request.last_step >= replica.num_steps - replica.in_flight:
                q = after  # preempted, and a step with it is still to come back
                continue
            num_tokens = request.prompt_tokens + request.num_output_tokens
            watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
            computed = request.num_computed_tokens
            looked_up = scheduler.identified and request.table < 0
            if looked_up:
                computed = cached_tokens(q, request, scheduler, knobs, blocks, tables, segments, num_tokens, watermark)
                if computed < 0:
                    break
            n = num_tokens - computed
            if 0 < threshold < n:
                n = threshold
            if n > budget and not knobs.chunked_prefill:
                if knobs.skip_unfit_prefill:
                    q = after
                    continue
                break
            n = min(n, budget)
            if looked_up:
                if not allocate_cached(request, scheduler, knobs, blocks, tables, segments, computed, n, watermark):
                    break
            else:
                if (
                    knobs.reserve_full_isl
                    and blocks_of_whole_sequence(knobs, num_tokens) - request.num_blocks + watermark
                    > scheduler.free_blocks
                ):
                    break
                if scheduler.identified:
                    if not allocate_identified(
                        request, scheduler, knobs, blocks, tables, segments, computed + n, watermark
                    ):
                        break
                elif not allocate(request, scheduler, knobs, computed + n, watermark):
                    break
            remove(requests, scheduler, q)
            if arrived:
                replica.num_reserved -= 1
            request.status = RUNNING
            running[scheduler.num_running] = q
            scheduler.num_running += 1
            if request.scheduled < 0.0:
                request.scheduled = replica.now
                request.num_cached_tokens = computed if looked_up else 0
            add_to_sums(sums, attention, num_kinds, computed, n)
            request.last_step = replica.num_steps
            request.num_computed_tokens = computed + n
            drafts[count] = 0
            if computed + n == request.num_tokens:
                request.num_tokens += placeholder
                request.num_drafts = proposed
                if proposed > 0:
                    scheduler.num_drafting += 1
                    scheduler.draft_keys += computed + n
                step[count] = q
            else:
                step[count] = ~q
            count += 1
            budget -= n
            q = after

    scheduler.num_scheduled = count
    scheduler.num_tokens = knobs.max_num_batched_tokens - budget
