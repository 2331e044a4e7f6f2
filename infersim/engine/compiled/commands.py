"""What is done to one request from outside, between two advances: abort, reserve, release, look up. Compiled."""

from .allocation import (
    allocate_counted,
    allocate_matched,
    blocks_needed,
    free,
    keeps_tables,
    share_hits,
    table_length_for,
)
from .arrays import core_of
from .blocks import allocate_new_blocks, find_longest_cache_hit, free_table, identify
from .groups import forget
from .hashes import find, hash_block, key_of
from .njit import compiled
from .output import drop_finished
from .queue import remove
from .radix import evict, insert, match_prefix, peek, release_path
from .replica import count_outstanding, observe, send
from .state import ABORTED, COMPLETED, CPU, RESERVE_TO_COMPLETION, RESERVED_PER_SEQUENCE, RUNNING, WAITING
from .tiers import is_below


@compiled
def wake(replica, time):
    """Something has changed: a replica that could not schedule, and has no step to wait for, may try again."""
    if replica.blocked and replica.in_flight == 0:
        replica.blocked = 0
        replica.now = max(replica.now, time)


@compiled
def abort(a, q, time):
    """Request q ends here and now, wherever it is: its blocks are freed, its tokens in flight are wasted."""
    request = a.requests[q]
    r = request.replica
    replica = a.replicas[r]
    rank = r * a.call.ranks + request.rank
    scheduler = a.schedulers[rank]
    send(a, r, time, 0.0)
    if request.status >= COMPLETED:
        return False
    observe(a, r, time)
    before = request.status
    if before == WAITING:
        remove(a.requests, scheduler, q)
    if before != RUNNING and request.num_blocks > 0:
        replica.num_reserved -= 1
    request.status = ABORTED
    if before == RUNNING:
        drop_finished(a.requests, scheduler, a.running[rank])
        scheduler.num_forks -= request.num_sequences - 1
    if a.knobs[r].num_sequences > 1:
        forget(a.requests, q, scheduler, a.knobs[r], a.blocks[rank], a.sequences)
    if a.knobs[r].radix:
        if before == RUNNING:
            computed = min(request.num_computed_tokens, request.prompt_tokens + request.num_output_tokens)
            insert(q, computed, scheduler, a.knobs[r], a.requests, a.nodes[rank], a.segments)
        release_path(request, scheduler, a.nodes[rank])
    free(core_of(a, r, rank, 0), request)
    wake(replica, time)
    replica.num_finished += 1
    if request.sent >= 0.0:
        count_outstanding(replica, -1, time)
    return True


@compiled
def reserve(a, q, time):
    """Take the blocks of request q's whole prompt before it is sent: its KV comes from elsewhere. 0 without room, else
    one more than the blocks that have to come: those not in the prefix cache that a later token still sees.

    As vLLM's KV connectors do (WAITING_FOR_REMOTE_KVS): of the prompt only the last token is then computed here. Where
    nobody is evicted it gets the blocks of all that it may generate too: requests that hold a prompt's blocks and lack
    one more would wait for one another.
    """
    request = a.requests[q]
    r = request.replica
    knobs, replica = a.knobs[r], a.replicas[r]
    rank = r * a.call.ranks + request.rank
    scheduler, blocks, tables = a.schedulers[rank], a.blocks[rank], a.tables[rank]
    observe(a, r, time)
    hit = 0
    watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
    if scheduler.identified < 0:
        identify(a.requests, knobs, scheduler, blocks, tables, -1, -1)
    if keeps_tables(knobs) and replica.num_reserved >= RESERVED_PER_SEQUENCE * knobs.max_num_seqs:
        return 0
    tokens = request.max_num_tokens if knobs.reserve == RESERVE_TO_COMPLETION else request.prompt_tokens
    request.num_computed_tokens = request.prompt_tokens - 1
    if scheduler.identified:
        hit = find_longest_cache_hit(request, knobs, scheduler, blocks, a.segments, tables[free_table(scheduler)])
        if hit < 0:  # it would wait for text that is being computed: all of it comes over the link
            hit = 0
            scheduler.hit_blocks = scheduler.idle_hit_blocks = 0
            request.chain = request.segment = request.segment_offset = request.num_hashed_blocks = 0
        length = (tokens + knobs.block_size - 1) // knobs.block_size
        needed = scheduler.num_tables * (length - hit) + scheduler.idle_hit_blocks
        fits = needed + watermark <= scheduler.free_blocks
        if fits:
            share_hits(request, scheduler, blocks, tables, hit)
            allocate_new_blocks(request, scheduler, knobs, blocks, tables[request.table], length, length)
    elif knobs.radix:
        cached = match_prefix(
            request, request.prompt_tokens - 1, scheduler, knobs, a.requests, a.nodes[rank], a.segments
        )
        hit = scheduler.hit_blocks
        fits = allocate_matched(core_of(a, r, rank, 0), request, cached, tokens, 0, watermark)
        if fits:
            evict(a.nodes[rank], scheduler, 0)
    else:
        length = table_length_for(request, knobs, tokens, 0, True)
        fits = allocate_counted(request, scheduler, knobs, tables, tokens, length, watermark)
    if not fits:
        request.num_computed_tokens = 0
        return 0
    replica.num_reserved += 1
    scheduler.held_tokens += request.num_computed_tokens
    return 1 + blocks_needed(knobs, request.num_computed_tokens, request.table_length, hit)


@compiled
def release(a, q, time):
    """Free the blocks that the completed request q held on to."""
    request = a.requests[q]
    r = request.replica
    replica = a.replicas[r]
    rank = r * a.call.ranks + request.rank
    scheduler = a.schedulers[rank]
    observe(a, r, time)
    if a.knobs[r].radix:
        release_path(request, scheduler, a.nodes[rank])
    free(core_of(a, r, rank, 0), request)
    replica.num_reserved -= 1
    wake(replica, time)
    return True


@compiled
def match(a, q):
    """Tokens of request q's prompt in each replica's prefix cache (in the rank that has most), to num_matched."""
    ranks = a.call.ranks
    request = a.requests[q]
    hashed_size = 0  # of the blocks that `hashes` are about
    for r in range(a.call.num_replicas):
        knobs = a.knobs[r]
        a.replicas[r].num_matched = a.replicas[r].num_matched_below = 0
        for rank in range(r * ranks, (r + 1) * ranks):
            scheduler = a.schedulers[rank]
            if knobs.radix:
                tokens = peek(request, request.prompt_tokens - 1, knobs, a.requests, a.nodes[rank], a.segments)
                a.replicas[r].num_matched = max(a.replicas[r].num_matched, tokens)
            if scheduler.identified <= 0:
                continue
            limit, length = (request.prompt_tokens - 1) // knobs.block_size, 0
            if knobs.num_kv_groups == 1 and knobs.kv_window[0] == 0:
                if knobs.block_size != hashed_size:
                    chain, segment, offset = 0, 0, 0
                    for i in range(min(limit, len(a.hashes))):
                        chain, segment, offset = hash_block(
                            request, a.segments, knobs.block_size, chain, segment, offset
                        )
                        a.hashes[i] = chain
                    hashed_size = knobs.block_size
                length = cached_prefix(a.blocks[rank], a.hashes, min(limit, len(a.hashes)))
                below = length
                if knobs.tier_blocks[CPU] > 0:
                    while below < min(limit, len(a.hashes)) and is_below(a.blocks[rank], key_of(a.hashes[below], 0)):
                        below += 1
                tokens = below * knobs.block_size
                a.replicas[r].num_matched_below = max(a.replicas[r].num_matched_below, tokens)
            elif request.prompt_tokens <= knobs.max_model_len:  # else it is refused, and has no row that it fits in
                awaited, hits, idle = scheduler.awaited, scheduler.hit_blocks, scheduler.idle_hit_blocks
                table = a.tables[rank, free_table(scheduler)]
                length = find_longest_cache_hit(request, knobs, scheduler, a.blocks[rank], a.segments, table)
                scheduler.awaited, scheduler.hit_blocks, scheduler.idle_hit_blocks = awaited, hits, idle
            a.replicas[r].num_matched = max(a.replicas[r].num_matched, length * knobs.block_size)
    return 1


@compiled
def cached_prefix(blocks, hashes, limit):
    """How many leading hashes of `limit` are cached: ends of prompts are evicted before beginnings, so by steps that
    double, from the front since most replicas have nothing, and then by bisection."""
    low, high, step = 0, limit, 1
    while low < high:
        middle = min(low + step, high) - 1 if step > 0 else (low + high) // 2
        if find(blocks, key_of(hashes[middle], 0)) > 0:
            low = middle + 1
            step *= 2
        else:
            high = middle
            step = 0
    return low
