"""What is done to one request from outside, between two advances: abort it, reserve or release its blocks. Compiled."""

from .replica import count_outstanding, drop_finished, send
from .scheduler import allocate, compiled, remove
from .state import ABORTED, COMPLETED, PENDING, RUNNING, WAITING


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
    scheduler = a.schedulers[r * a.call[0].ranks + request.rank]
    send(a.requests, replica, a.knobs[r], a.call[0], a.events, r, time, 0.0)
    if request.status >= COMPLETED:
        return False
    before = request.status
    if before == WAITING:
        remove(a.requests, scheduler, q)
    elif before == PENDING and request.num_blocks > 0:
        replica.num_reserved -= 1
    request.status = ABORTED
    if before == RUNNING:
        drop_finished(a.requests, scheduler, a.running[r * a.call[0].ranks + request.rank])
    scheduler.free_blocks += request.num_blocks
    request.num_blocks = 0
    wake(replica, time)
    replica.num_finished += 1
    if request.sent >= 0.0:
        count_outstanding(replica, -1, time)
    return True


@compiled
def reserve(a, q):
    """Take the blocks of request q's whole prompt before it is sent: its KV comes from elsewhere. False without room.

    As vLLM's KV connectors do (WAITING_FOR_REMOTE_KVS): of the prompt only the last token is then computed here.
    """
    request = a.requests[q]
    r = request.replica
    scheduler = a.schedulers[r * a.call[0].ranks + request.rank]
    watermark = a.knobs[r].watermark_blocks if scheduler.num_running > 0 else 0
    request.num_computed_tokens = request.prompt_tokens - 1
    if not allocate(request, scheduler, a.knobs[r], request.prompt_tokens, watermark):
        request.num_computed_tokens = 0
        return False
    a.replicas[r].num_reserved += 1
    return True


@compiled
def release(a, q, time):
    """Free the blocks that the completed request q held on to."""
    request = a.requests[q]
    replica = a.replicas[request.replica]
    a.schedulers[request.replica * a.call[0].ranks + request.rank].free_blocks += request.num_blocks
    request.num_blocks = 0
    replica.num_reserved -= 1
    wake(replica, time)
    return True
