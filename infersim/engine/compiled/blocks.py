"""KV blocks with identity, for prefix caching: block hashes, a free queue in LRU order, block tables. Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/block_pool.py, kv_cache_manager.py, single_type_kv_cache_manager.py): only
full blocks are hashed, each hash chained to the one before; a block keeps its hash when it is freed and loses it when
it is given out again; a request's blocks are freed last first, so that the ends of prompts go before their beginnings.
"""

from .hashes import enter, evict, find, hash_block, key_of
from .njit import compiled
from .state import CPU, WAIT_FOR_LATE_HITS
from .tiers import clear_tiers, keep


@compiled
def get_new_block(blocks, scheduler, knobs):
    """The least recently used free block, without its hash: a fresh one, as long as there are any. Block 0 closes the
    ring of the free queue, in which the others stand.

    Text that the GPU then holds no more goes to the tiers below, if there are any.
    """
    if scheduler.fresh_block < knobs.num_gpu_blocks:
        b = scheduler.fresh_block
        scheduler.fresh_block += 1
        scheduler.free_blocks -= 1
        blocks[b].references = 1
        return b
    b = blocks[0].next
    after = blocks[b].next
    blocks[0].next = after
    blocks[after].prev = 0
    blocks[b].references = 1
    scheduler.free_blocks -= 1
    key = blocks[b].hash
    if key != 0:
        if evict(blocks, b):
            scheduler.blocked_request = -1
        elif knobs.tier_blocks[CPU] > 0 and find(blocks, key) == 0:
            keep(blocks, scheduler, knobs, key)
    return b


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
def free_block(blocks, scheduler, b):
    """One request less holds block b; the last one leaves it at the end of the free queue, hash and all."""
    block = blocks[b]
    block.references -= 1
    if block.references == 0:
        last = blocks[0].prev
        blocks[last].next = b
        block.prev = last
        block.next = 0
        blocks[0].prev = b
        scheduler.free_blocks += 1
    else:
        scheduler.num_shared -= 1


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
def free_blocks(request, scheduler, blocks, tables):
    """Free all blocks of a request, the last of each block table first, and its row of tables."""
    stride = scheduler.table_stride
    table = tables[request.table]
    for t in range(scheduler.num_tables):
        for i in range(t * stride + request.table_length - 1, t * stride - 1, -1):
            if table[i] > 0:
                free_block(blocks, scheduler, table[i])
    request.table_length = 0
    table[len(table) - 1] = scheduler.free_table
    scheduler.free_table = request.table
    request.table = -1
    scheduler.blocked_request = -1


@compiled
def remove_skipped_blocks(request, knobs, scheduler, blocks, table):
    """Free the blocks that no later query sees (SlidingWindowManager.remove_skipped_blocks)."""
    t = 0
    for g in range(knobs.num_kv_groups):
        for _ in range(knobs.kv_multiplicity[g]):
            if knobs.kv_window[g] > 0 and request.num_computed_tokens >= knobs.kv_window[g]:
                skipped = (request.num_computed_tokens - knobs.kv_window[g] + 1) // knobs.block_size
                for i in range(t * scheduler.table_stride + skipped - 1, t * scheduler.table_stride - 1, -1):
                    if table[i] == 0:
                        break
                    free_block(blocks, scheduler, table[i])
                    table[i] = 0
                    request.num_blocks -= 1
            t += 1


@compiled
def cache_full_blocks(request, knobs, scheduler, blocks, table, segments, full):
    """Hash the request's blocks, in all its block tables, until `full` of each are.

    Where nobody else has its text that waits until it is preempted, when it alone may find them again (remember).
    """
    if scheduler.unshared:
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)
        return
    while request.num_hashed_blocks < full:
        request.chain, request.segment, request.segment_offset = hash_block(
            request, segments, knobs.block_size, request.chain, request.segment, request.segment_offset
        )
        if request.chain == scheduler.awaited:
            scheduler.blocked_request = -1
        for t in range(scheduler.num_tables):
            b = table[t * scheduler.table_stride + request.num_hashed_blocks]
            if b > 0:
                enter(blocks, scheduler, b, key_of(request.chain, t))
        request.num_hashed_blocks += 1


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
def allocate_new_blocks(request, scheduler, knobs, blocks, table, length):
    """Take blocks, which are known to be free, until each block table has `length`; more stay as they are."""
    if length <= request.table_length:
        return
    for t in range(scheduler.num_tables):
        for i in range(t * scheduler.table_stride + request.table_length, t * scheduler.table_stride + length):
            table[i] = get_new_block(blocks, scheduler, knobs)
        request.num_blocks += length - request.table_length
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
            for position in range(request.table_length):
                tables[request.table, position] = get_new_block(blocks, scheduler, knobs)


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
    limit = (request.prompt_tokens + request.num_output_tokens - 1) // knobs.block_size
    if request.num_swapped > 0:
        limit = request.num_computed_tokens // knobs.block_size
    chain, segment, offset = 0, 0, 0
    windows = False
    length = 0
    scheduler.awaited = 0
    while length < limit and scheduler.awaited == 0:
        chain, segment, offset = hash_block(request, segments, knobs.block_size, chain, segment, offset)
        t = 0
        for g in range(knobs.num_kv_groups):
            windows = windows or knobs.kv_window[g] > 0
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
    if windows:
        length = agree_on_windows(request, knobs, scheduler, segments, table, length)
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
def agree_on_windows(request, knobs, scheduler, segments, table, length):
    """The longest hit within `length` blocks that every window accepts; forgets what lies before the windows."""
    agreed = False
    while not agreed:
        agreed = True
        t = 0
        for g in range(knobs.num_kv_groups):
            if knobs.kv_window[g] > 0:
                wanted = max(1, (knobs.kv_window[g] + knobs.block_size - 2) // knobs.block_size)
                hit = window_hit(table, scheduler.table_stride, t, knobs.kv_multiplicity[g], length, wanted)
                agreed = agreed and hit == length
                length = hit
            t += knobs.kv_multiplicity[g]
    t = 0
    for g in range(knobs.num_kv_groups):
        for _ in range(knobs.kv_multiplicity[g]):
            if knobs.kv_window[g] > 0:
                wanted = max(1, (knobs.kv_window[g] + knobs.block_size - 2) // knobs.block_size)
                for i in range(length - wanted):
                    table[t * scheduler.table_stride + i] = 0
            t += 1
    chain, segment, offset = 0, 0, 0
    for _ in range(length):
        chain, segment, offset = hash_block(request, segments, knobs.block_size, chain, segment, offset)
    request.chain, request.segment, request.segment_offset = chain, segment, offset
    return length
