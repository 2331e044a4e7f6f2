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
from .contiguous import give_back, take_piece
from .njit import compiled, inlined
from .queue import push_back, put_back, remove, urgency
from .speculation import add_verification
from .state import (
    ADMIT,
    DECODES,
    DECODES_IF_NO_PREFILL,
    EVERYTHING,
    PREFILLS,
    QUERY_TILE,
    RESERVE_MAX_MODEL_LEN,
    RESERVE_OUTPUT_LENGTH,
    RESERVE_POWER_OF_TWO,
    RESERVE_TO_COMPLETION,
    RESERVE_WHOLE_PROMPT,
    RESERVED_PER_SEQUENCE,
    RETRACT_STEPS,
    RUNNING,
    WAITING,
)


@compiled
def blocks_needed(knobs, num_computed, per_table):
    """KV blocks held by tables of `per_table` blocks once those outside the window of num_computed are freed."""
    block_size = knobs.block_size
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
    request.slots = request.table_length * knobs.block_size
    if knobs.enable_prefix_caching:
        request.slots = min(request.slots, (request.num_hashed_blocks + 1) * knobs.block_size - 1)


@compiled
def table_length_for(request, knobs, num_tokens, admitted):
    """Blocks per table that a request is to have for num_tokens; at admission what the engine reserves."""
    if admitted:
        if knobs.reserve == RESERVE_WHOLE_PROMPT:
            num_tokens = max(num_tokens, request.prompt_tokens + request.num_output_tokens)
        elif knobs.reserve == RESERVE_MAX_MODEL_LEN:
            num_tokens = knobs.max_model_len
        elif knobs.reserve >= RESERVE_OUTPUT_LENGTH:
            output = request.stop_tokens
            if knobs.reserve == RESERVE_POWER_OF_TWO:
                output = 1
                while output < request.stop_tokens:
                    output *= 2
            num_tokens = min(request.prompt_tokens + output, knobs.max_model_len)
    return max(request.table_length, (num_tokens + knobs.block_size - 1) // knobs.block_size)


@compiled
def allocate(request, scheduler, knobs, pieces, num_tokens, admitted, reserve):
    """Take the blocks that num_tokens need, if that leaves `reserve` free; False (and nothing taken) otherwise."""
    length = table_length_for(request, knobs, num_tokens, admitted)
    if knobs.allocator:
        given = request.first_block >= 0  # before it was sent
        short = length + reserve > scheduler.free_blocks
        if not given and (short or not take_piece(request, scheduler, knobs, pieces, length)):
            return False
        set_slots(request, knobs)
        return True
    needed = blocks_needed(knobs, request.num_computed_tokens, length)
    if needed - request.num_blocks + reserve > scheduler.free_blocks:
        return False
    scheduler.free_blocks -= needed - request.num_blocks
    request.num_blocks = needed
    request.table_length = length
    request.num_hashed_blocks = min(num_tokens, request.prompt_tokens + request.num_output_tokens) // knobs.block_size
    set_slots(request, knobs)
    return True


@compiled
def extend(request, scheduler, knobs, blocks, table, segments, num_tokens, length):
    """Make the tables `length` long with blocks known to be free, and hash those that are full by num_tokens.

    Tokens in flight are not known yet: a block with one is hashed at a later step.
    """
    take_until(request, scheduler, blocks, table, length)
    full = min(num_tokens, request.prompt_tokens + request.num_output_tokens) // knobs.block_size
    hash_until(request, knobs, scheduler, blocks, table, segments, full)
    set_slots(request, knobs)


@compiled
def allocate_identified(request, scheduler, knobs, blocks, tables, segments, num_tokens, admitted, reserve):
    """`allocate` for a request that holds blocks with an identity."""
    table = tables[request.table]
    release_outside_window(request, knobs, scheduler, blocks, table)
    length = table_length_for(request, knobs, num_tokens, admitted)
    if scheduler.num_tables * (length - request.table_length) + reserve > scheduler.free_blocks:
        return False
    extend(request, scheduler, knobs, blocks, table, segments, num_tokens, length)
    return True


@compiled
def gate(request, scheduler, knobs, busy_hits, watermark, promised):
    """Whether the blocks of the whole sequence that a waiting request still needs are free, if the engine asks for it.

    busy_hits: blocks of it that others hold. promised: blocks that running requests are still to get.
    """
    if knobs.reserve == RESERVE_TO_COMPLETION:
        needed = blocks_of_whole_sequence(knobs, request.max_num_tokens)
    elif knobs.reserve_full_isl:
        needed = blocks_of_whole_sequence(knobs, request.prompt_tokens + request.num_output_tokens)
    else:
        return True
    needed += promised - busy_hits - request.num_blocks
    scheduler.blocked_need = needed
    return needed + watermark <= scheduler.free_blocks


@compiled
def promised_blocks(requests, scheduler, knobs, running):
    """Blocks that running requests are still to get, where the engine reserves to completion."""
    promised = 0
    for i in range(scheduler.num_running):
        request = requests[running[i]]
        length = (request.max_num_tokens + knobs.block_size - 1) // knobs.block_size
        promised += scheduler.num_tables * max(length - request.table_length, 0)
    return promised


@compiled
def wished_tokens(requests, scheduler, knobs, running):
    """Tokens that running requests may still generate, as SGLang counts them: it expects new_token_ratio of them."""
    wished = 0
    for i in range(scheduler.num_running):
        request = requests[running[i]]
        wished += min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
    return wished


@compiled
def cached_tokens(q, request, scheduler, knobs, blocks, tables, segments, watermark):
    """Tokens of a waiting request that the cache holds; -1: it was turned away before, and nothing helped it since;
    -2: it shares text with a prompt that is being computed in this step, for which it waits."""
    if q == scheduler.blocked_request and scheduler.blocked_need + watermark > scheduler.free_blocks:
        return -1
    length = look_up(request, knobs, scheduler, blocks, segments, tables[free_table(scheduler)])
    return -2 if length < 0 else length * knobs.block_size


@compiled
def allocate_cached(request, scheduler, knobs, blocks, tables, segments, cached, n, reserve):
    """`allocate` for a waiting request that was just looked up: share what is cached, take the rest."""
    length = table_length_for(request, knobs, cached + n, True)
    hit = cached // knobs.block_size
    needed = scheduler.num_tables * (length - hit) + scheduler.idle_hit_blocks
    if needed + reserve > scheduler.free_blocks:
        return False
    share_hits(request, scheduler, blocks, tables, hit)
    extend(request, scheduler, knobs, blocks, tables[request.table], segments, cached + n, length)
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
    """Free all blocks of a request, wherever they are."""
    if request.num_swapped > 0:
        scheduler.free_cpu_blocks += request.num_swapped
        request.num_swapped = 0
    else:
        scheduler.held_tokens -= request.num_computed_tokens
    request.num_computed_tokens = 0
    if request.table >= 0:
        release(request, scheduler, blocks, tables)
    elif request.first_block >= 0:
        give_back(request, scheduler, tables)
    else:
        scheduler.free_blocks += request.num_blocks
    request.num_blocks = 0
    request.table_length = 0
    request.slots = 0


@compiled
def preempt(requests, replica, scheduler, knobs, victim, blocks, tables, segments):
    """A request that is no longer running gives up its blocks, to be recomputed, or swapped in if the CPU has room."""
    request = requests[victim]
    if knobs.enable_prefix_caching and not scheduler.identified:
        identify(requests, knobs, scheduler, blocks, tables, segments, request.replica, request.rank)
    request.status = WAITING
    request.num_drafts = 0
    request.num_preemptions += 1
    replica.num_preemptions += 1
    swapped, computed = request.num_blocks, request.num_computed_tokens
    free(request, scheduler, blocks, tables)
    if 0 < swapped <= scheduler.free_cpu_blocks:
        scheduler.free_cpu_blocks -= swapped
        scheduler.num_copied += swapped
        request.num_swapped = swapped
        request.num_computed_tokens = computed


@compiled
def drop(scheduler, running, place):
    """Take one request out of the running list."""
    scheduler.num_running -= 1
    for i in range(place, scheduler.num_running):
        running[i] = running[i + 1]


@compiled
def preempt_last(requests, replica, scheduler, knobs, running, blocks, tables, segments):
    """Preempt the last running request that is not in this step, or the last of the least urgent of those; returns it.

    vLLM's victim. The request that lacks memory is not in this step, so there is one.
    """
    place = scheduler.num_running - 1
    while requests[running[place]].last_step == replica.num_steps:
        place -= 1
    if knobs.policy:
        for i in range(place - 1, -1, -1):
            other = requests[running[i]]
            if other.last_step != replica.num_steps and urgency(other, knobs.policy) > urgency(
                requests[running[place]], knobs.policy
            ):
                place = i
    victim = running[place]
    drop(scheduler, running, place)
    preempt(requests, replica, scheduler, knobs, victim, blocks, tables, segments)
    put_back(requests, scheduler, knobs.policy, victim)
    return victim


@compiled
def retract(requests, replica, scheduler, knobs, running, blocks, tables, segments):
    """Retract requests until every other can decode one token (SGLang's retract_decode); True if any was.

    Those with the fewest outputs go first, of equal ones those with the longest prompts; to the end of the queue.
    """
    retracted = False
    while True:
        needed, others = 0, 0
        victim = -1
        for i in range(scheduler.num_running):
            request = requests[running[i]]
            if request.last_step == replica.num_steps:
                continue  # a prefill of this step
            others += 1
            decodes = request.num_computed_tokens < request.num_tokens < request.max_num_tokens
            if decodes and request.num_computed_tokens + 1 > request.table_length * knobs.block_size:
                needed += scheduler.num_tables
            if victim < 0:
                victim = i
            fewest = requests[running[victim]]
            if request.num_output_tokens < fewest.num_output_tokens or (
                request.num_output_tokens == fewest.num_output_tokens and request.prompt_tokens >= fewest.prompt_tokens
            ):
                victim = i
        if needed <= scheduler.free_blocks or others <= 1:
            break
        q = running[victim]
        drop(scheduler, running, victim)
        preempt(requests, replica, scheduler, knobs, q, blocks, tables, segments)
        push_back(requests, scheduler, knobs.policy, q)
        retracted = True
    if retracted:
        decoded, wished = 0.0, 0.0
        for i in range(scheduler.num_running):
            decoded += requests[running[i]].num_output_tokens
            wished += requests[running[i]].max_tokens
        scheduler.new_token_ratio = min(1.0, (decoded + RETRACT_STEPS * scheduler.num_running) / (wished + 1.0))
    return retracted


@inlined
def schedule(
    requests, replica, scheduler, knobs, running, step, drafts, plan, sums, attention, num_kinds, blocks, tables,
    segments, speculates,
):  # fmt: skip
    """Make one step: fills step[:] with entries and the scheduler's num_scheduled and num_tokens, adds to sums.

    running: i4[max_num_seqs], the request rows in order of admission; step: i4[max_num_seqs], a request row if it
    samples a token, else its bitwise complement; drafts: i2[max_num_seqs], how many it verifies; plan: this replica's,
    sums, blocks and tables this rank's of state.Arrays.
    """
    scheduler.step = replica.num_steps
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
    proposed = plan[scheduler.num_running, 0]
    scheduler.draft_passes = plan[scheduler.num_running, 1]
    scheduler.num_verified = 0
    scheduler.num_drafting = 0
    scheduler.draft_keys = 0
    was_running = scheduler.num_running
    wished = 0
    if knobs.clip_max_new_tokens > 0 and scheduler.waiting_head >= 0:
        wished = wished_tokens(requests, scheduler, knobs, running)
    prefilled = False
    phases = knobs.order
    while phases > 0:
        phase = phases & 7
        phases >>= 3
        if phase == ADMIT:
            if preempted or (knobs.admit_when_idle and was_running > 0):
                continue
            expected = wished * scheduler.new_token_ratio
            promised = 0
            if knobs.reserve == RESERVE_TO_COMPLETION and scheduler.waiting_head >= 0:
                promised = promised_blocks(requests, scheduler, knobs, running)
            swapped_in = False
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
                if swapped_in and request.num_swapped == 0:
                    break  # prompts wait until nobody is swapped
                num_tokens = request.prompt_tokens + request.num_output_tokens
                watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
                computed = request.num_computed_tokens
                looked_up = scheduler.identified and request.table < 0
                busy_hits, idle_hits = 0, 0
                if looked_up:
                    computed = cached_tokens(q, request, scheduler, knobs, blocks, tables, segments, watermark)
                    if computed == -1:
                        break
                    if computed < 0:
                        q = after
                        continue
                    idle_hits = scheduler.idle_hit_blocks
                    busy_hits = scheduler.hit_blocks - idle_hits
                n = num_tokens - computed
                if knobs.clip_max_new_tokens > 0:
                    new = min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
                    available = (scheduler.free_blocks - idle_hits) // scheduler.num_tables * knobs.block_size
                    if scheduler.num_running > 0 and n + new + knobs.block_size >= available - expected:
                        break
                if 0 < threshold < n:
                    n = threshold
                if n > budget and not knobs.chunked_prefill:
                    if knobs.skip_unfit_prefill:
                        q = after
                        continue
                    break
                n = min(n, budget)
                if not gate(request, scheduler, knobs, busy_hits, watermark, promised):
                    if (
                        looked_up
                        and knobs.reserve_full_isl
                        and not knobs.late_hits
                        and scheduler.num_tables == 1
                        and knobs.kv_window[0] == 0
                    ):
                        scheduler.blocked_request = q
                    break
                if looked_up:
                    if not allocate_cached(request, scheduler, knobs, blocks, tables, segments, computed, n, watermark):
                        break
                elif scheduler.identified:
                    if not allocate_identified(
                        request, scheduler, knobs, blocks, tables, segments, computed + n, True, watermark
                    ):
                        break
                elif not allocate(request, scheduler, knobs, tables, computed + n, True, watermark):
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
                if knobs.reserve == RESERVE_TO_COMPLETION:
                    length = (request.max_num_tokens + knobs.block_size - 1) // knobs.block_size
                    promised += scheduler.num_tables * (length - request.table_length)
                if computed + n == num_tokens:
                    expected += min(request.max_num_tokens - request.num_tokens, knobs.clip_max_new_tokens)
                add_to_sums(sums, attention, num_kinds, computed, n)
                request.last_step = replica.num_steps
                request.prefill_end = num_tokens
                if request.num_swapped > 0:
                    scheduler.free_cpu_blocks += request.num_swapped
                    scheduler.num_copied += request.num_swapped
                    scheduler.held_tokens += computed
                    request.num_swapped = 0
                    swapped_in = True
                else:
                    prefilled = True
                    scheduler.held_tokens += computed - request.num_computed_tokens  # what was cached
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
            continue

        if phase == DECODES_IF_NO_PREFILL:
            if prefilled:
                continue
            phase = DECODES
        if phase == DECODES and knobs.retracts:
            if retract(requests, replica, scheduler, knobs, running, blocks, tables, segments):
                preempted = True
            elif scheduler.num_running > 0:
                scheduler.new_token_ratio = max(
                    scheduler.new_token_ratio - knobs.new_token_ratio_decay, knobs.min_new_token_ratio
                )
        plain = only_full and phase != PREFILLS
        num_decodes, decode_keys, more_queries, more_pairs = 0, 0, 0, 0
        num_verified, num_drafting, draft_keys = 0, 0, 0
        i = 0
        while i < scheduler.num_running and budget > 0:
            q = running[i]
            request = requests[q]
            i += 1
            computed = request.num_computed_tokens
            ahead = computed
            if speculates:
                ahead += request.num_drafts + knobs.lookahead
            if (
                plain
                and computed + 1 == request.num_tokens
                and ahead < request.slots
                and request.num_tokens < request.max_num_tokens - placeholder
                and (
                    phase == EVERYTHING or (computed >= request.prefill_end and request.last_step != replica.num_steps)
                )
            ):  # what comes below, for most sequences of most steps: one token, with a block to put it in
                if not speculates:
                    num_decodes += 1
                    decode_keys += computed + 1
                    request.last_step = replica.num_steps
                    request.num_computed_tokens = computed + 1
                    request.num_tokens += placeholder
                    step[count] = q
                    count += 1
                    budget -= 1
                    continue
                verified = request.num_drafts
                if verified < budget and ahead < longest and (threshold == 0 or verified < threshold):
                    n = 1 + verified
                    num_decodes += 1
                    decode_keys += computed + n
                    more_queries += verified
                    more_pairs += verified * computed + n * verified // 2
                    request.last_step = replica.num_steps
                    request.num_computed_tokens = computed + n
                    request.num_tokens += placeholder * n
                    request.num_drafts = proposed
                    num_verified += verified
                    num_drafting += 1
                    draft_keys += computed + 1
                    drafts[count] = verified
                    step[count] = q
                    count += 1
                    budget -= n
                    continue
            if phase != EVERYTHING and (
                (phase == DECODES) != (computed >= request.prefill_end) or request.last_step == replica.num_steps
            ):
                continue  # not of this phase, or scheduled in this step already
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
                        if allocate_identified(request, scheduler, knobs, blocks, tables, segments, end, False, 0):
                            break
                    elif allocate(request, scheduler, knobs, tables, end, False, 0):
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
        prefilled = prefilled or (phase == PREFILLS and count > 0)
        scheduler.num_verified += num_verified
        if proposed > 0:
            scheduler.num_drafting += num_drafting
            scheduler.draft_keys += draft_keys
        sums[0].num_decodes += num_decodes
        sums[0].decode_keys += decode_keys
        sums[0].more_queries += more_queries
        sums[0].more_pairs += more_pairs

    scheduler.num_scheduled = count
    scheduler.num_tokens = knobs.max_num_batched_tokens - budget
    scheduler.held_tokens += scheduler.num_tokens
