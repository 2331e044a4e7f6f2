"""The waiting queue: a linked list through the requests, in order of urgency, then of arrival. Compiled."""

from .njit import compiled
from .state import PRIORITY, SHORTEST_FIRST


@compiled
def urgency(request, policy):
    """Requests with less come first."""
    if policy == PRIORITY:
        return request.priority
    if policy == SHORTEST_FIRST:
        return request.prompt_tokens
    return 0


@compiled
def insert(requests, scheduler, q, before, after):
    """Put request q between two that are neighbours; -1 is an end of the queue."""
    requests[q].prev = before
    requests[q].next = after
    if before >= 0:
        requests[before].next = q
    else:
        scheduler.waiting_head = q
    if after >= 0:
        requests[after].prev = q
    else:
        scheduler.waiting_tail = q
    scheduler.num_waiting += 1


@compiled
def push_back(requests, scheduler, policy, q):
    """Queue request q behind all that are no less urgent."""
    before, after = scheduler.waiting_tail, -1
    own = urgency(requests[q], policy)
    while before >= 0 and urgency(requests[before], policy) > own:
        after = before
        before = requests[before].prev
    insert(requests, scheduler, q, before, after)


@compiled
def push_front(requests, scheduler, q):
    """Prepend request q to the waiting queue."""
    insert(requests, scheduler, q, -1, scheduler.waiting_head)


@compiled
def put_back(requests, scheduler, policy, q):
    """Queue the preempted request q before all that are no more urgent, but behind those whose KV came from elsewhere.

    They hold blocks: if it went before them, it might never have enough, and they never run.
    """
    before, after = -1, scheduler.waiting_head
    own = urgency(requests[q], policy)
    while after >= 0 and (requests[after].num_blocks > 0 or urgency(requests[after], policy) < own):
        before = after
        after = requests[after].next
    insert(requests, scheduler, q, before, after)


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
