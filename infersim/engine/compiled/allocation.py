"""Which blocks a request takes, when, and whether there is room: vLLM's KVCacheManager.allocate_slots. Compiled.

Written after vLLM 0.11-0.33 (vllm/v1/core/kv_cache_manager.py); other engines' reservations as config/presets.py cites.
"""

from .blocks import (
    allocate_new_blocks,
    cache_full_blocks,
    find_longest_cache_hit,
    free_blocks,
    free_table,
    has_windows,
    num_settled,
    remove_skipped_blocks,
    take_table,
    touch,
)
from .contiguous import give_back, take_piece
from .njit import apart, compiled, inlined
from .queue import push_behind_holders, remove
from .radix import match_prefix, share_match
from .state import (
    BACKGROUND,
    CPU,
    LAST_TOKEN,
    RESERVE_MAX_MODEL_LEN,
    RESERVE_OUTPUT_LENGTH,
    RESERVE_POWER_OF_TWO,
    RESERVE_TO_COMPLETION,
    RESERVE_WHOLE_PROMPT,
    RESERVED_PER_SEQUENCE,
)
from .states import is_late, num_new_blocks, renew_last_state
from .tiers import load, look_below


@compiled
def keeps_tables(knobs):
    """Whether who holds memory has a row of `tables`, of which there are (1 + RESERVED_PER_SEQUENCE) max_num_seqs."""
    return knobs.enable_prefix_caching or knobs.allocator


@compiled
def blocks_needed(knobs, num_computed, per_table, first=0):
    """KV blocks held by tables of `per_table` blocks, from the block `first` of each on, once those outside the window
    of num_computed are freed."""
    block_size = knobs.block_size
    if knobs.num_kv_groups == 1 and knobs.kv_window[0] == 0:
        return per_table - first
    total = 0
    for g in range(knobs.num_kv_groups):
        skipped = 0
        if knobs.kv_window[g] == 1:  # a state
            skipped = per_table - 1
        elif knobs.kv_window[g] > 1 and num_computed >= knobs.kv_window[g]:
            skipped = (num_computed - knobs.kv_window[g] + 1) // block_size
        total += knobs.kv_multiplicity[g] * max(per_table - max(skipped, first), 0)
    return total


@compiled
def blocks_of_whole_sequence(knobs, num_tokens, hit):
    """KV blocks that the admission gate asks for beyond `hit` of each table: the whole sequence, windows capped at what
    is held at once if the engine does so."""
    block_size = knobs.block_size
    per_table = (num_tokens + block_size - 1) // block_size
    total = 0
    for g in range(knobs.num_kv_groups):
        blocks = per_table
        if knobs.kv_window[g] == 1:
            blocks = 1 + hit
        elif knobs.kv_window[g] > 1 and knobs.gate_caps_windows:
            # vLLM's SlidingWindowSpec: window - 1 keys kept, the tokens of a step, or of all that may be in flight, and
            # one block for misalignment
            steps = knobs.steps_in_flight if knobs.windows_by_processed else 1
            held = knobs.kv_window[g] - 1 + steps * knobs.max_num_batched_tokens
            blocks = min(blocks, (held + block_size - 1) // block_size + 1)
        total += knobs.kv_multiplicity[g] * max(blocks - hit, 0)
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
def table_length_for(request, knobs, num_tokens, lookahead, admitted):
    """Blocks per table that a request is to have for num_tokens and what a drafter writes behind them; at admission
    what the engine reserves."""
    num_tokens = min(num_tokens + lookahead, knobs.max_model_len)
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
def allocate_slots(core, request, num_computed, num_tokens, lookahead, admitted, reserve):
    """Take the blocks that num_tokens and what a drafter writes behind them need, if that leaves `reserve` free; False
    (and nothing taken) otherwise.

    admitted: it waits, so gets what the engine reserves, and shares the num_computed tokens that get_computed_blocks
    found.
    """
    if admitted and core.knobs.radix and request.num_blocks == 0:
        return allocate_matched(core, request, num_computed, num_tokens, lookahead, reserve)
    length = table_length_for(request, core.knobs, num_tokens, lookahead, admitted)
    if core.scheduler.identified:
        if admitted and request.table < 0:
            return allocate_cached(core, request, num_computed, num_tokens, length, reserve)
        return allocate_identified(core, request, num_tokens, length, reserve)
    return allocate_counted(request, core.scheduler, core.knobs, core.tables, num_tokens, length, reserve)


@compiled
def allocate_counted(request, scheduler, knobs, pieces, num_tokens, length, reserve):
    """`allocate_slots` where nothing is found again: how many blocks it holds is all there is."""
    if knobs.allocator:
        given = request.first_block >= 0  # before it was sent
        short = length + reserve > scheduler.free_blocks
        if not given and (short or not take_piece(request, scheduler, knobs, pieces, length)):
            return False
        set_slots(request, knobs)
        return True
    needed = blocks_needed(knobs, num_settled(request, knobs), length)
    if needed - request.num_blocks + reserve > scheduler.free_blocks:
        return False
    scheduler.free_blocks -= needed - request.num_blocks
    request.num_blocks = needed
    request.table_length = length
    request.num_hashed_blocks = min(num_tokens, request.prompt_tokens + request.num_output_tokens) // knobs.block_size
    set_slots(request, knobs)
    return True


@compiled
def extend(core, request, num_tokens, length):
    """Make the tables `length` long with blocks known to be free, and cache those that are full by num_tokens.

    Tokens in flight are not known yet: a block with one is cached at a later step.
    """
    scheduler, knobs, blocks, table = core.scheduler, core.knobs, core.blocks, core.tables[request.table]
    own = (num_tokens + knobs.block_size - 1) // knobs.block_size
    allocate_new_blocks(request, scheduler, knobs, blocks, table, length, own)
    full = min(num_tokens, request.prompt_tokens + request.num_output_tokens) // knobs.block_size
    cache_full_blocks(request, knobs, scheduler, blocks, table, core.segments, full)
    if knobs.state_cuts == LAST_TOKEN:
        renew_last_state(request, knobs, scheduler, blocks, table, full)
    set_slots(request, knobs)


@inlined
def takes_slots(knobs):
    """Whether `take_slots` is for these."""
    return not (knobs.allocator or has_windows(knobs) or knobs.num_sequences > 1)


@apart
def take_slots(core, request, num_tokens):
    """`allocate_slots` for a running request, in blocks that come from anywhere and do not leave a window, if it lacks
    one or has filled one. False without a free one."""
    scheduler, knobs = core.scheduler, core.knobs
    known, block_size = request.prompt_tokens + request.num_output_tokens, knobs.block_size
    lacking = min(num_tokens + knobs.lookahead, knobs.max_model_len) - request.table_length * block_size
    missing = 1 if lacking > 0 else 0
    if lacking > block_size:  # else without a division
        missing = (lacking + block_size - 1) // block_size
    if missing == 0 and known < (request.num_hashed_blocks + 1) * block_size:
        return True
    if scheduler.identified:
        if scheduler.num_tables * missing > scheduler.free_blocks:
            return False
        extend(core, request, num_tokens, request.table_length + missing)
        return True
    if missing > scheduler.free_blocks:
        return False
    scheduler.free_blocks -= missing
    request.num_blocks += missing
    request.table_length += missing
    request.num_hashed_blocks = min(num_tokens, known) // block_size
    set_slots(request, knobs)
    return True


@compiled
def allocate_identified(core, request, num_tokens, length, reserve):
    """`allocate_slots` for a request that holds blocks with an identity."""
    scheduler, knobs = core.scheduler, core.knobs
    remove_skipped_blocks(request, knobs, scheduler, core.blocks, core.tables[request.table])
    own = (num_tokens + knobs.block_size - 1) // knobs.block_size
    if num_new_blocks(request, knobs, scheduler.num_tables, length, own) + reserve > scheduler.free_blocks:
        return False
    extend(core, request, num_tokens, length)
    return True


@compiled
def gate(request, scheduler, knobs, looked_up, busy_hits, watermark):
    """Whether the blocks of the whole sequence that a waiting request still needs are free, if the engine asks for it.

    busy_hits: blocks of it that others hold, if it was looked up.
    """
    tokens, promised = request.prompt_tokens + request.num_output_tokens, 0
    if knobs.reserve == RESERVE_TO_COMPLETION:
        tokens, promised = request.max_num_tokens, scheduler.promised_blocks
    elif not knobs.reserve_full_isl:
        return True
    hit = request.num_hashed_blocks if looked_up and scheduler.identified else 0
    needed = blocks_of_whole_sequence(knobs, tokens, hit) + promised - request.num_blocks
    needed += scheduler.idle_hit_blocks if hit > 0 else -busy_hits
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
def get_computed_blocks(core, q, watermark):
    """Tokens of waiting request q that need not be computed: the cache holds them, or the CPU's memory if it was
    swapped, or they came from elsewhere.

    -1: it was turned away before, and nothing helped it since, or it goes on from a state of this very step; -2: it
    shares text with a prompt that is being computed in this step, for which it waits.
    """
    request, scheduler, knobs = core.requests[q], core.scheduler, core.knobs
    if scheduler.identified and request.table < 0:
        if q == scheduler.blocked_request and scheduler.blocked_need + watermark > scheduler.free_blocks:
            return -1
        table = core.tables[free_table(scheduler)]
        length = find_longest_cache_hit(request, knobs, scheduler, core.blocks, core.segments, table)
        if length < 0:
            return -2
        if knobs.state_cuts > 0 and length > 0 and is_late(knobs, scheduler, core.blocks, table, length):
            return -1
        if request.num_swapped > 0:
            return request.num_computed_tokens
        if knobs.tier_blocks[CPU] > 0:
            length += look_below(request, knobs, scheduler, core.blocks, core.segments, table)
        tokens = min(request.stored_tokens, request.prompt_tokens + request.num_output_tokens - 1)
        return max(length, tokens // knobs.block_size) * knobs.block_size
    if knobs.radix and request.num_blocks == 0:
        last = request.prompt_tokens + request.num_output_tokens - 1
        return match_prefix(request, last, scheduler, knobs, core.requests, core.nodes, core.segments)
    return request.num_computed_tokens


@compiled
def allocate_cached(core, request, num_computed, num_tokens, length, reserve):
    """`allocate_slots` for a waiting request that was just looked up: share what the GPU has, take the rest."""
    scheduler, knobs = core.scheduler, core.knobs
    hit, own = request.num_hashed_blocks, (num_tokens + knobs.block_size - 1) // knobs.block_size
    request.table_length = hit
    needed = num_new_blocks(request, knobs, scheduler.num_tables, length, own) + scheduler.idle_hit_blocks
    request.table_length = 0
    if needed + reserve > scheduler.free_blocks:
        return False
    share_hits(request, scheduler, core.blocks, core.tables, hit)
    if num_computed > hit * knobs.block_size:
        if request.num_swapped == 0:
            table, end = core.tables[request.table], num_computed // knobs.block_size
            seconds = load(request, knobs, scheduler, core.blocks, table, hit, end)
            if knobs.kv_offloading_load == BACKGROUND:
                scheduler.load_end = max(scheduler.load_end, core.replica.now) + seconds
                request.loaded = scheduler.load_end
                scheduler.begun = 1
                core.replica.load_time += seconds
            else:
                scheduler.load_time += seconds
                scheduler.copy_time += seconds
        step = scheduler.step
        scheduler.step = -1  # text that is there, not text that this step computes
        extend(core, request, num_computed, length)
        scheduler.step = step
    extend(core, request, num_tokens, length)
    return True


@compiled
def begin_load(core, q, computed, watermark):
    """Waiting request q's text comes back from below the GPU while others run. It takes the blocks of all its tokens at
    once, as if its KV came from elsewhere (commands.reserve), and waits before all that hold none. False without room,
    or if as many wait so as rows of the tables are left by what runs.
    """
    request, replica, scheduler, knobs = core.requests[q], core.replica, core.scheduler, core.knobs
    if replica.num_reserved >= RESERVED_PER_SEQUENCE * knobs.max_num_seqs:
        return False
    tokens = request.prompt_tokens + request.num_output_tokens
    if knobs.reserve == RESERVE_TO_COMPLETION:
        tokens = request.max_num_tokens
    length = table_length_for(request, knobs, tokens, knobs.lookahead, True)
    if not allocate_cached(core, request, computed, computed, length, watermark):
        return False
    if request.scheduled < 0.0:
        request.num_cached_tokens = computed
    request.num_computed_tokens = computed
    scheduler.held_tokens += computed
    replica.num_reserved += 1
    remove(core.requests, scheduler, q)
    push_behind_holders(core.requests, scheduler, q)
    return True


@compiled
def share_hits(request, scheduler, blocks, tables, length):
    """Give a request its row of block tables, in which the `length` blocks of its look-up stand, and hold those."""
    take_table(request, scheduler, tables)
    table = tables[request.table]
    for t in range(scheduler.num_tables):
        for i in range(t * scheduler.table_stride, t * scheduler.table_stride + length):
            if table[i] > 0:
                touch(blocks, scheduler, table[i])
    scheduler.blocked_request = -1
    request.table_length = length
    request.num_blocks = scheduler.hit_blocks


@compiled
def allocate_matched(core, request, num_computed, num_tokens, lookahead, reserve):
    """`allocate_slots` for a waiting request that was just matched: hold what the radix tree has, take the rest."""
    scheduler, knobs = core.scheduler, core.knobs
    length = table_length_for(request, knobs, num_tokens, lookahead, True)
    if length - scheduler.hit_blocks + scheduler.idle_hit_blocks + reserve > scheduler.free_blocks:
        return False
    share_match(request, num_computed, scheduler, core.nodes)
    request.entered = 0
    return allocate_counted(request, scheduler, knobs, core.tables, num_tokens, length, reserve)


@compiled
def free(core, request):
    """Free all blocks of a request, wherever they are."""
    scheduler = core.scheduler
    if request.num_swapped > 0:
        scheduler.free_cpu_blocks += request.num_swapped
        request.num_swapped = 0
    else:
        scheduler.held_tokens -= request.num_computed_tokens
    request.num_computed_tokens = 0
    if request.table >= 0:
        free_blocks(request, scheduler, core.knobs, core.blocks, core.tables)
    elif request.first_block >= 0:
        give_back(request, scheduler, core.tables)
    else:
        scheduler.free_blocks += request.num_blocks
    request.num_blocks = 0
    request.table_length = 0
    request.slots = 0
