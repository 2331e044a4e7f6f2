"""All replicas of a fleet over time, one after another or in turns. Compiled; the one entry to the compiled code."""

from .coasting import coast, may_coast
from .commands import abort, match, release, reserve
from .interface import ABORT, ADVANCE, LOOK_AHEAD, MATCH, RELEASE, RESERVE
from .njit import compiled, inlined
from .output import update_from_output
from .replica import INFINITY, next_time, start_step


@inlined
def next_time_of(a, r):
    """When replica r does something next."""
    ranks = a.call.ranks
    return next_time(a.requests, a.replicas[r], a.schedulers, r * ranks, ranks, a.knobs[r], a.step_end[r])


@compiled
def set_due(due, leaf, time):
    """Change one leaf of the tournament tree, and the matches on its way up."""
    due[leaf] = time
    while leaf > 1:
        leaf >>= 1
        due[leaf] = min(due[2 * leaf], due[2 * leaf + 1])


@compiled
def plant(a):
    """Build the tournament tree of all replicas' next times."""
    leaves = a.call.num_leaves
    for r in range(leaves):
        a.due[leaves + r] = next_time_of(a, r) if r < a.call.num_replicas else INFINITY
    for node in range(leaves - 1, 0, -1):
        a.due[node] = min(a.due[2 * node], a.due[2 * node + 1])


@compiled
def earliest_replica(a):
    """The replica that is first to do something; of several the first."""
    leaves = a.call.num_leaves
    node = 1
    while node < leaves:
        node = 2 * node if a.due[2 * node] == a.due[node] else 2 * node + 1
    return node - leaves


@compiled
def advance(a):
    """Advance all replicas to `call.until`, or to the first event asked for; what is due at `until` is left undone.

    Without an event mask the replicas are independent and run one after another; with one they take turns in order of
    time, so that none is ahead of the event. a: interface.ARRAYS.
    """
    call = a.call
    call.num_events = 0
    call.stuck_replica = -1
    if call.command == ABORT:
        call.done = abort(a, call.subject, call.until)
    elif call.command == RESERVE:
        call.done = reserve(a, call.subject, call.until)
    elif call.command == RELEASE:
        call.done = release(a, call.subject, call.until)
    elif call.command == MATCH:
        call.done = match(a, call.subject)
    elif call.command == LOOK_AHEAD:
        plant(a)
    if call.command != ADVANCE:
        return
    if call.event_mask:
        plant(a)
    r = 0
    while r < call.num_replicas and call.num_events == 0:
        if call.event_mask:
            r = earliest_replica(a)
        replica = a.replicas[r]
        time = a.due[call.num_leaves + r] if call.event_mask else next_time_of(a, r)
        if not time < call.until:
            if call.event_mask:
                return
            r += 1
            continue
        replica.now = time
        if replica.in_flight == a.knobs[r].steps_in_flight or (replica.in_flight > 0 and replica.blocked):
            if not (may_coast(a, r) and coast(a, r) > 0):
                update_from_output(a, r)
        elif not start_step(a, r):
            call.stuck_replica = r
            return
        if call.event_mask:
            set_due(a.due, call.num_leaves + r, next_time_of(a, r))
