"""The waiting queue: a linked list through the requests, in order of urgency, then of arrival. Compiled."""

from .njit import compiled
from .state import PRIORITY, SHORTEST_FIRST, WAITING


@compiled
def urgency(request, policy):
    """Requests with less come first."""
    if policy == PRIORITY:
        return request.priority
    if policy == SHORTEST_FIRST:
        return request.prompt_tokens
    return 0


@compiled
def is_ordered(policy):
    """Whether some are more urgent than others."""
    return policy in (PRIORITY, SHORTEST_FIRST)


@compiled
def goes_before(requests, q, other, policy):
    """Whether request q is more urgent than another, or as urgent and here before it, of equals by its number."""
    later = comes_later(requests[other], requests[q], policy)
    return later or (q < other and not comes_later(requests[q], requests[other], policy))


@compiled
def comes_later(request, other, policy):
    """Whether a request is less urgent than another, or as urgent and here after it."""
    own, its = urgency(request, policy), urgency(other, policy)
    return own > its or (own == its and request.sent > other.sent)


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
    """Queue request q behind all that are no less urgent, and those that hold blocks."""
    before, after = scheduler.waiting_tail, -1
    own = urgency(requests[q], policy)
    while before >= 0 and requests[before].num_blocks == 0 and urgency(requests[before], policy) > own:
        after = before
        before = requests[before].prev
    insert(requests, scheduler, q, before, after)


@compiled
def finger_of(least):
    """Where to look for requests of an urgency: 256 places for the smallest numbers, 128 for each octave above."""
    octave = 0
    while least >> octave >= 256:
        octave += 1
    return (octave << 7) + (least >> octave)


@compiled
def push_in_order(requests, scheduler, policy, q, fingers):
    """`push_back` for a queue that may be long. Walking alone would take time that grows with its square.

    fingers: i4[NUM_FINGERS], of the requests pushed, the last of about each urgency (a row, plus 1). One that still
    waits is a place to walk from. Who holds blocks stands in front, out of order.
    """
    own = max(urgency(requests[q], policy), 0)
    finger = finger_of(own)
    if scheduler.num_waiting > 8 and urgency(requests[scheduler.waiting_tail], policy) > own:
        for f in range(finger, -1, -1):
            other = fingers[f] - 1
            if other < 0:
                continue
            request = requests[other]
            if request.status != WAITING or request.num_blocks > 0 or other == q:
                fingers[f] = 0
            elif urgency(request, policy) <= own:
                after = request.next
                while urgency(requests[after], policy) <= own:
                    other = after
                    after = requests[other].next
                insert(requests, scheduler, q, other, after)
                fingers[finger] = q + 1
                return
        before, after = -1, scheduler.waiting_head  # few are as urgent, and none of them has a finger
        while after >= 0 and (requests[after].num_blocks > 0 or urgency(requests[after], policy) <= own):
            before = after
            after = requests[after].next
        insert(requests, scheduler, q, before, after)
    else:
        push_back(requests, scheduler, policy, q)
    fingers[finger] = q + 1


@compiled
def push_front(requests, scheduler, q):
    """Prepend request q to the waiting queue."""
    insert(requests, scheduler, q, -1, scheduler.waiting_head)


@compiled
def push_behind_holders(requests, scheduler, q):
    """Queue request q, which holds blocks, behind those that do too, and before all others."""
    before, after = -1, scheduler.waiting_head
    while after >= 0 and requests[after].num_blocks > 0:
        before = after
        after = requests[after].next
    insert(requests, scheduler, q, before, after)


@compiled
def put_back(requests, scheduler, policy, q):
    """Queue the preempted request q before all that are no more urgent, or by arrival among equals if there is such an
    order, but behind those whose KV came from elsewhere, and the skipped ones.

    The first hold blocks: if it went before them, it might never have enough, and they never run.
    """
    before, after = -1, scheduler.waiting_head
    while after >= 0 and stays_first(requests, after, q, policy):
        before = after
        after = requests[after].next
    insert(requests, scheduler, q, before, after)


@compiled
def stays_first(requests, other, q, policy):
    """Whether a waiting request stays before q, which is put back."""
    if requests[other].num_blocks > 0:
        return True
    return goes_before(requests, other, q, policy) if is_ordered(policy) else requests[other].skipped > 0


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
