"""KV blocks with identity, for prefix caching: block hashes, a free queue in LRU order, block tables. Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/block_pool.py, kv_cache_manager.py, single_type_kv_cache_manager.py): only
full blocks are hashed, each hash chained to the one before; a block keeps its hash when it is freed and loses it when
it is given out again; a request's blocks are freed last first, so that the ends of prompts go before their beginnings.
"""

from .hashes import enter, evict, find, hash_block, key_of
from .njit import compiled
from .state import CPU, EACH, LAST_TOKEN, ONE_OR_LAST, WAIT_FOR_LATE_HITS
from .states import first_new_state, is_reachable, window_blocks
from .tiers import clear_tiers, keep


@compiled
def get_new_blocks(blocks, scheduler, knobs, table, first, end):
    """Fill places first..end - 1 of a table with the least recently used free blocks, without their hash, of which
    there are enough: fresh ones, as long as there are any. Block 0 closes the ring of the free queue, in which the
    others stand.

    Text that the GPU then holds no more goes to the tiers below, if there are any.
    """
    head = blocks[0].next
    for i in range(first, end):
        if scheduler.num_first > 0:
            scheduler.num_first -= 1
        elif scheduler.fresh_block < knobs.num_gpu_blocks:
            table[i] = scheduler.fresh_block
            blocks[scheduler.fresh_block].references = 1
            scheduler.fresh_block += 1
            continue
        b = head
        head = blocks[b].next
        table[i] = b
        blocks[b].references = 1
        key = blocks[b].hash
        if key != 0:
            if evict(blocks, b):
                scheduler.blocked_request = -1
            elif knobs.tier_blocks[CPU] > 0 and not knobs.write_through and find(blocks, key) == 0:
                keep(blocks, scheduler, knobs, key)
    blocks[0].next = head
    blocks[head].prev = 0
    scheduler.free_blocks -= end - first


@compiled
def touch(blocks, scheduler, b):
    """One more request holds block b; if it was free it leaves the queue."""
    block = blocks[b]
    if block.references == 0:
        blocks[block.prev].next = block.next
        blocks[block.next].prev = block.prev
        scheduler.free_blocks -= 1
    else:
        scheduler.num_shared += 1
    block.references += 1


@compiled
def free_range(scheduler, knobs, blocks, table, first, last, hashed, gaps):
    """One request less holds the blocks of a table from place `last` back to `first`, up to one that has been freed if
    there are no `gaps`; returns how many. Whom nobody else holds goes into the free queue, hash and all. What is behind
    place `hashed` has no hash, if texts are not told apart.

    Newer vLLM puts those without a hash before all that are free (BlockPool.free_blocks), in this order.
    """
    front_head = front_tail = back_head = back_tail = num_front = freed = shared = 0
    for i in range(last, first - 1, -1):
        b = table[i]
        if b == 0:
            if gaps:
                continue
            break
        freed += 1
        block = blocks[b]
        block.references -= 1
        if block.references > 0:
            shared += 1
        elif not knobs.evict_unhashed_first or (i < hashed if scheduler.unshared else block.hash != 0):
            block.prev = back_tail
            if back_tail > 0:
                blocks[back_tail].next = b
            else:
                back_head = b
            back_tail = b
        else:
            num_front += 1
            block.prev = front_tail
            if front_tail > 0:
                blocks[front_tail].next = b
            else:
                front_head = b
            front_tail = b
    if front_head > 0:
        after = blocks[0].next
        blocks[0].next, blocks[front_tail].next, blocks[after].prev = front_head, after, front_tail
    if back_head > 0:
        before = blocks[0].prev
        blocks[before].next, blocks[back_head].prev = back_head, before
        blocks[back_tail].next, blocks[0].prev = 0, back_tail
    scheduler.num_first += num_front
    scheduler.num_shared -= shared
    scheduler.free_blocks += freed - shared
    return freed


@compiled
def take_table(request, scheduler, tables):
    """Give a request a free row of block tables. Rows used before are linked through their last column."""
    request.table = free_table(scheduler)
    if scheduler.free_table >= 0:
        scheduler.free_table = tables[request.table, len(tables[0]) - 1]
    else:
        scheduler.num_used_tables += 1


@compiled
def free_table(scheduler):
    """The row of block tables that is given out next."""
    return scheduler.free_table if scheduler.free_table >= 0 else scheduler.num_used_tables


@compiled
def free_blocks(request, scheduler, knobs, blocks, tables):
    """Free all blocks of a request, the last of each block table first, and its row of tables."""
    table = tables[request.table]
    for t in range(scheduler.num_tables):
        first = t * scheduler.table_stride
        last = first + request.table_length - 1
        gaps = knobs.state_cuts > 0
        free_range(scheduler, knobs, blocks, table, first, last, first + request.num_hashed_blocks, gaps)
    request.table_length = request.last_state = request.retired_states = 0
    table[len(table) - 1] = scheduler.free_table
    scheduler.free_table = request.table
    request.table = -1
    scheduler.blocked_request = -1


@compiled
def remove_skipped_blocks(request, knobs, scheduler, blocks, table):
    """Free the blocks that no later query sees (SlidingWindowManager.remove_skipped_blocks)."""
    t, computed = 0, num_settled(request, knobs)
    for g in range(knobs.num_kv_groups):
        for _ in range(knobs.kv_multiplicity[g]):
            first = t * scheduler.table_stride
            if knobs.kv_window[g] == 1:
                retire_states(request, knobs, scheduler, blocks, table, first, computed)
            elif knobs.kv_window[g] > 0 and computed >= knobs.kv_window[g]:
                last = first + (computed - knobs.kv_window[g] + 1) // knobs.block_size - 1
                freed = free_range(scheduler, knobs, blocks, table, first, last, 0, False)
                for i in range(last - freed + 1, last + 1):
                    table[i] = 0
                request.num_blocks -= freed
            t += 1
    request.retired_states = max(request.retired_states, (computed - 1) // knobs.block_size)


@compiled
def retire_states(request, knobs, scheduler, blocks, table, first, computed):
    """Free the states, in a table from place `first` on, that lie before the one of `computed` tokens. Until 0.32 those
    up to a gap, and the one before the newest: what asynchronous scheduling leaves behind a gap stays
    (MambaManager.remove_skipped_blocks)."""
    newest = first + min((computed - 1) // knobs.block_size, request.table_length)
    oldest, last, gaps = first + request.retired_states, first + request.last_state, knobs.state_cuts == LAST_TOKEN
    freed = free_range(scheduler, knobs, blocks, table, oldest, newest - 1, 0, gaps)
    for i in range(oldest if gaps else newest - freed, newest):
        table[i] = 0
    if last < newest and table[last] > 0:
        freed += free_range(scheduler, knobs, blocks, table, last, last, 0, gaps)
        table[last] = 0
    request.num_blocks -= freed


@compiled
def has_windows(knobs):
    """Whether layers forget text."""
    return knobs.num_kv_groups > 1 or knobs.kv_window[0] > 0


@compiled
def num_settled(request, knobs):
    """Tokens of a request that are computed, for what leaves its windows: without those that steps in flight still
    read, if the engine waits for them."""
    if knobs.windows_by_processed:
        return max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
    return request.num_computed_tokens


@compiled
def cache_full_blocks(request, knobs, scheduler, blocks, table, segments, full):
    """Hash the request's blocks, in all its block tables, until `full` of each are.

    Where nobody else has its text that waits until it is preempted, when it alone may find them again (remember).
    """
    if scheduler.unshared:
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)
        return
    first = request.num_hashed_blocks
    while request.num_hashed_blocks < full:
        request.chain, request.segment, request.segment_offset = hash_block(
            request, segments, knobs.block_size, request.chain, request.segment, request.segment_offset
        )
        if request.chain == scheduler.awaited:
            scheduler.blocked_request = -1
        t = 0
        for g in range(knobs.num_kv_groups):
            kept = is_reachable(request, knobs, g, request.num_hashed_blocks)
            for _ in range(knobs.kv_multiplicity[g]):
                b = table[t * scheduler.table_stride + request.num_hashed_blocks]
                if b > 0 and kept:
                    enter(blocks, scheduler, b, key_of(request.chain, t))
                t += 1
        request.num_hashed_blocks += 1
    if knobs.write_through and knobs.tier_blocks[CPU] > 0:
        for i in range(full - 1, first - 1, -1):  # the beginning becomes the most recently used
            keep(blocks, scheduler, knobs, blocks[table[i]].hash)


@compiled
def remember(request, knobs, scheduler, blocks, table, segments):
    """Hash the blocks of a request that is about to give them up, and of whose text nobody knew until now."""
    full = request.num_hashed_blocks
    request.num_hashed_blocks = request.segment_offset // knobs.block_size  # it begins no segments
    step = scheduler.step
    scheduler.unshared, scheduler.step = 0, -1  # earlier text, not text that this step computes
    cache_full_blocks(request, knobs, scheduler, blocks, table, segments, full)
    scheduler.unshared, scheduler.step = 1, step


@compiled
def allocate_new_blocks(request, scheduler, knobs, blocks, table, length, own):
    """Take blocks, which are known to be free, until each block table has `length`, `own` of it for the step's own
    tokens; more stay as they are."""
    if length <= request.table_length:
        return
    t = 0
    for g in range(knobs.num_kv_groups):
        begin = request.table_length
        if knobs.state_cuts > 0 and knobs.kv_window[g] == 1:
            begin = first_new_state(request, own)
        for _ in range(knobs.kv_multiplicity[g]):
            first = t * scheduler.table_stride
            for i in range(first + request.table_length, first + begin):
                table[i] = 0
            get_new_blocks(blocks, scheduler, knobs, table, first + begin, first + length)
            request.num_blocks += length - begin
            t += 1
    request.last_state = max(request.table_length - 1, 0)
    request.table_length = length


@compiled
def identify(requests, knobs, scheduler, blocks, tables, replica, rank):
    """Give every block held an identity; the others are fresh.

    Needed before the first step of requests that share text. Of others nobody can find a block again until the first
    preemption: until then counting them is enough, and then it does not matter which block is whose. replica: whose
    requests, which share no text, hold blocks already, -1 if none does.
    """
    scheduler.identified = 1
    scheduler.free_blocks = knobs.num_gpu_blocks - 1
    scheduler.fresh_block = 1
    blocks[0].prev = blocks[0].next = 0
    clear_tiers(blocks, knobs)
    if replica < 0:
        return
    scheduler.unshared = 1
    for q in range(len(requests)):
        request = requests[q]
        if request.num_blocks > 0 and request.replica == replica and request.rank == rank:
            take_table(request, scheduler, tables)
            request.table_length = request.num_blocks
            get_new_blocks(blocks, scheduler, knobs, tables[request.table], 0, request.table_length)


@compiled
def window_hit(table, stride, first, num_tables, length, wanted):
    """Most leading blocks, up to `length`, whose last `wanted` are all cached, or all of them if there are fewer."""
    run, hit = 0, 0
    for i in range(length):
        cached = True
        for t in range(first, first + num_tables):
            cached = cached and table[t * stride + i] > 0
        run = run + 1 if cached else 0
        if run >= wanted or run == i + 1:
            hit = i + 1
    return hit


@compiled
def find_longest_cache_hit(request, knobs, scheduler, blocks, segments, table):
    """Number of leading blocks that need not be computed: cached for every KV group, and at least one token is left.

    -1 if the first that is missing is computed in this step and the engine waits for such. Of a swapped request only
    what it had computed counts: that is in the CPU's memory, but what the GPU still has need not be taken anew.

    Writes those that a request would hold to `table` (0 outside a window), how many they are and how many of them are
    free to the scheduler's hit_blocks and idle_hit_blocks, and the hash state at their end to the request.
    """
    stride = scheduler.table_stride
    tokens = request.prompt_tokens + request.num_output_tokens
    limit = (tokens - 1) // knobs.block_size
    if request.num_swapped > 0:
        limit = request.num_computed_tokens // knobs.block_size
    elif knobs.drop_last_hit and knobs.drafter_drop == ONE_OR_LAST and has_full(knobs) and has_windows(knobs):
        limit = tokens // knobs.block_size  # the last one is dropped
    chain, segment, offset = 0, 0, 0
    length = 0
    scheduler.awaited = 0
    while length < limit and scheduler.awaited == 0:
        chain, segment, offset = hash_block(request, segments, knobs.block_size, chain, segment, offset)
        t = 0
        for g in range(knobs.num_kv_groups):
            for _ in range(knobs.kv_multiplicity[g]):
                b = find(blocks, key_of(chain, t))
                if b > 0 and knobs.late_hits and blocks[b].step == scheduler.step:
                    if knobs.late_hits == WAIT_FOR_LATE_HITS:
                        return -1
                    b = 0
                table[t * stride + length] = b
                if b == 0 and knobs.kv_window[g] == 0:
                    scheduler.awaited = chain
                t += 1
        if scheduler.awaited == 0:
            request.chain, request.segment, request.segment_offset = chain, segment, offset
            length += 1
    return settle_hit(request, knobs, scheduler, blocks, segments, table, length)


@compiled
def settle_hit(request, knobs, scheduler, blocks, segments, table, found):
    """The same, of `found` blocks that groups without a window have, or that were looked for if there are none."""
    stride, length = scheduler.table_stride, found
    full, windows = has_full(knobs), has_windows(knobs)
    if knobs.drop_last_hit and full:
        length = max(length - 1, 0)
    request.shared_boundary = length * knobs.block_size if full and windows else 0
    if windows:
        length = agree_on_windows(knobs, scheduler, table, length, found)
    if request.shared_boundary == length * knobs.block_size:
        request.shared_boundary = 0
    if length < found:
        chain, segment, offset = 0, 0, 0
        for _ in range(length):
            chain, segment, offset = hash_block(request, segments, knobs.block_size, chain, segment, offset)
        request.chain, request.segment, request.segment_offset = chain, segment, offset
    hits, idle = 0, 0
    for t in range(scheduler.num_tables):
        for i in range(t * stride, t * stride + length):
            if table[i] > 0:
                hits += 1
                idle += 1 if blocks[table[i]].references == 0 else 0
    scheduler.hit_blocks, scheduler.idle_hit_blocks = hits, idle
    if length == 0:
        request.chain, request.segment, request.segment_offset = 0, 0, 0
    request.num_hashed_blocks = length
    return length


@compiled
def has_full(knobs):
    """Whether a KV group sees all text."""
    full = False
    for g in range(knobs.num_kv_groups):
        full = full or knobs.kv_window[g] == 0
    return full


@compiled
def agree_on_windows(knobs, scheduler, table, length, found):
    """The longest hit within `length` blocks that every window accepts; forgets what lies before the windows.

    Where the last block is dropped a window must have one more, of the `found` ones, or lose one more itself: of
    several kinds each does, until nothing is left.
    """
    drop, each = knobs.drop_last_hit, knobs.drafter_drop == EACH
    once = each and knobs.num_kv_groups <= 1 + has_full(knobs)
    agreed = False
    while not agreed:
        agreed = True
        t = 0
        for g in range(knobs.num_kv_groups):
            if knobs.kv_window[g] > 0:
                more = drop if knobs.kv_window[g] > 1 else 0  # drafters have no states
                wanted = window_blocks(knobs, g) + more
                most = length if each else min(length + more, found)
                hit = window_hit(table, scheduler.table_stride, t, knobs.kv_multiplicity[g], most, wanted)
                hit = max(hit - more, 0)
                agreed = agreed and (hit == length or once)
                length = hit
            t += knobs.kv_multiplicity[g]
    t = 0
    for g in range(knobs.num_kv_groups):
        for _ in range(knobs.kv_multiplicity[g]):
            if knobs.kv_window[g] > 0:
                for i in range(length - window_blocks(knobs, g)):
                    table[t * scheduler.table_stride + i] = 0
            t += 1
    return length
