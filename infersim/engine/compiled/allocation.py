"""Which blocks a request takes, when, and whether there is room: vLLM's KVCacheManager.allocate_slots. Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/kv_cache_manager.py); other engines' reservations as config/presets.py cites.
"""

from .blocks import (
    free_table,
    hash_until,
    look_up,
    release,
    release_outside_window,
    share,
    take_table,
    take_until,
)
from .contiguous import give_back, take_piece
from .njit import compiled
from .radix import share_match
from .state import (
    CPU,
    RESERVE_MAX_MODEL_LEN,
    RESERVE_OUTPUT_LENGTH,
    RESERVE_POWER_OF_TWO,
    RESERVE_TO_COMPLETION,
    RESERVE_WHOLE_PROMPT,
)
from .tiers import load, look_below


@compiled
def keeps_tables(knobs):
    """Whether who holds memory has a row of `tables`, of which there are (1 + RESERVED_PER_SEQUENCE) max_num_seqs."""
    return knobs.enable_prefix_caching or knobs.allocator


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
    take_until(request, scheduler, knobs, blocks, table, length)
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
def cached_tokens(q, request, scheduler, knobs, blocks, tables, segments, watermark):
    """Tokens of a waiting request that the cache holds, or the CPU's memory if it was swapped.

    -1: it was turned away before, and nothing helped it since; -2: it shares text with a prompt that is being computed
    in this step, for which it waits.
    """
    if q == scheduler.blocked_request and scheduler.blocked_need + watermark > scheduler.free_blocks:
        return -1
    table = tables[free_table(scheduler)]
    length = look_up(request, knobs, scheduler, blocks, segments, table)
    if length < 0:
        return -2
    if request.num_swapped > 0:
        return request.num_computed_tokens
    if knobs.tier_blocks[CPU] > 0:
        length += look_below(request, knobs, scheduler, blocks, segments, table)
    return length * knobs.block_size


@compiled
def allocate_cached(request, scheduler, knobs, blocks, tables, segments, cached, n, reserve):
    """`allocate` for a waiting request that was just looked up: share what the GPU has, take the rest."""
    length = table_length_for(request, knobs, cached + n, True)
    hit = request.num_hashed_blocks
    needed = scheduler.num_tables * (length - hit) + scheduler.idle_hit_blocks
    if needed + reserve > scheduler.free_blocks:
        return False
    share_hits(request, scheduler, blocks, tables, hit)
    if cached > hit * knobs.block_size:
        if request.num_swapped == 0:
            load(request, knobs, scheduler, blocks, tables[request.table], hit, cached // knobs.block_size)
        step = scheduler.step
        scheduler.step = -1  # text that is there, not text that this step computes
        extend(request, scheduler, knobs, blocks, tables[request.table], segments, cached, length)
        scheduler.step = step
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
def allocate_matched(request, scheduler, knobs, tables, nodes, cached, n, reserve):
    """`allocate` for a waiting request that was just matched: hold what the radix tree has, take the rest."""
    length = table_length_for(request, knobs, cached + n, True)
    if length - scheduler.hit_blocks + scheduler.idle_hit_blocks + reserve > scheduler.free_blocks:
        return False
    share_match(request, cached, scheduler, nodes)
    request.entered = 0
    return allocate(request, scheduler, knobs, tables, cached + n, True, reserve)


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
