"""Groups of sequences in a step: all sequences of one, or none of them. Compiled.

Written after vLLM 0.6.2 (core/scheduler.py: _schedule_running, _schedule_swapped).
"""

from .groups import append_slots, swap_in
from .njit import compiled
from .preemption import preempt_last
from .pricing import add_to_sums
from .queue import remove
from .state import RUNNING


@compiled
def add_group(request, replica, scheduler, sums, attention, num_kinds):
    """One token of each sequence is in the step; returns how many. Each reads all its keys, shared or not."""
    for _ in range(request.num_sequences):
        add_to_sums(sums, attention, num_kinds, request.num_computed_tokens, 1)
    scheduler.num_forked += request.num_sequences - 1
    request.last_step = replica.num_steps
    request.num_computed_tokens += 1
    return request.num_sequences


@compiled
def decode_group(
    requests, q, replica, scheduler, knobs, running, budget, sums, attention, num_kinds, blocks, tables, nodes,
    segments, sequences,
):  # fmt: skip
    """Tokens of a running group's next step; 0: the budget does not hold it, -1: it had to be preempted itself."""
    request = requests[q]
    if request.num_sequences > budget:
        return 0
    while not append_slots(requests, q, scheduler, knobs, blocks, sequences):
        if preempt_last(requests, replica, scheduler, knobs, running, blocks, tables, nodes, segments) == q:
            return -1
    return add_group(request, replica, scheduler, sums, attention, num_kinds)


@compiled
def readmit_group(
    requests, q, replica, scheduler, knobs, running, budget, sums, attention, num_kinds, blocks, sequences
):
    """Tokens of a swapped group, which runs again; 0: it does not fit."""
    request = requests[q]
    watermark = knobs.watermark_blocks if scheduler.num_running > 0 else 0
    if request.num_sequences > budget or not swap_in(
        requests, q, replica, scheduler, knobs, blocks, sequences, watermark
    ):
        return 0
    remove(requests, scheduler, q)
    request.status = RUNNING
    running[scheduler.num_running] = q
    scheduler.num_running += 1
    scheduler.num_forks += request.num_sequences - 1
    request.prefill_end = request.num_tokens
    scheduler.held_tokens += request.num_computed_tokens
    return add_group(request, replica, scheduler, sums, attention, num_kinds)
