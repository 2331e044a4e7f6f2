"""What is done to one request from outside, between two advances: abort it, reserve or release its blocks. Compiled."""

from .blocks import free_table, identify, look_up, take_until
from .njit import compiled
from .replica import count_outstanding, drop_finished, send
from .scheduler import allocate, free, remove, share_hits
from .state import ABORTED, COMPLETED, RESERVED_PER_SEQUENCE, RUNNING, WAITING


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
    rank = r * a.call[0].ranks + request.rank
    scheduler = a.schedulers[rank]
    send(a.requests, replica, a.knobs[r], a.call[0], a.events, r, time, 0.0)
    if request.status >= COMPLETED:
        return False
    before = request.status
    if before == WAITING:
        remove(a.requests, scheduler, q)
    if before != RUNNING and request.num_blocks > 0:
        replica.num_reserved -= 1
    request.status = ABORTED
    if before == RUNNING:
        drop_finished(a.requests, scheduler, a.running[rank])
    free(request, scheduler, a.blocks[rank], a.tables[rank])
    wake(replica, time)
    replica.num_finished += 1
    if request.sent >= 0.0:
        count_outstanding(replica, -1, time)
    return True


@compiled
def reserve(a, q):
    """Take the blocks of request q's whole prompt before it is sent: its KV comes from elsewhere. 0 without room, else
    one more than the blocks that are not in the prefix cache.

    As vLLM's KV connectors do (WAITING_FOR_REMOTE_KVS): of the prompt only the last token is then computed here.
    """
    request = a.requests[q]
    r = request.replica
    knobs, replica = a.knobs[r], a.replicas[r]
    rank = r * a.call[0].ranks + request.rank
    scheduler, blocks, tables = a.schedulers[rank], a.blocks[rank], a.tables[rank]
    hit = 0
    watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
    if scheduler.identified < 0:
        identify(a.requests, knobs, scheduler, blocks, tables, a.segments, -1, -1)
    if knobs.enable_prefix_caching and replica.num_reserved >= RESERVED_PER_SEQUENCE * knobs.max_num_seqs:
        return 0
    request.num_computed_tokens = request.prompt_tokens - 1
    if scheduler.identified:
        hit = look_up(request, knobs, scheduler, blocks, a.segments, tables[free_table(scheduler)])
        length = (request.prompt_tokens + knobs.block_size - 1) // knobs.block_size
        needed = scheduler.num_tables * (length - hit) + scheduler.idle_hit_blocks
        fits = needed + watermark <= scheduler.free_blocks
        if fits:
            share_hits(request, scheduler, blocks, tables, hit)
            take_until(request, scheduler, blocks, tables[request.table], length)
    else:
        fits = allocate(request, scheduler, knobs, request.prompt_tokens, watermark)
    if not fits:
        request.num_computed_tokens = 0
        return 0
    replica.num_reserved += 1
    return 1 + request.num_blocks - scheduler.num_tables * hit


@compiled
def release(a, q, time):
    """Free the blocks that the completed request q held on to."""
    request = a.requests[q]
    replica = a.replicas[request.replica]
    rank = request.replica * a.call[0].ranks + request.rank
    free(request, a.schedulers[rank], a.blocks[rank], a.tables[rank])
    replica.num_reserved -= 1
    wake(replica, time)
    return True
