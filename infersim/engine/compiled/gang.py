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
def add_group(core, request):
    """One token of each sequence is in the step; returns how many. Each reads all its keys, shared or not."""
    for _ in range(request.num_sequences):
        add_to_sums(core.sums, core.attention, core.price.num_kinds, request.num_computed_tokens, 1)
    core.scheduler.num_forked += request.num_sequences - 1
    request.last_step = core.replica.num_steps
    request.num_computed_tokens += 1
    return request.num_sequences


@compiled
def decode_group(core, q, budget):
    """Tokens of a running group's next step; 0: the budget does not hold it, -1: it had to be preempted itself."""
    request = core.requests[q]
    if request.num_sequences > budget:
        return 0
    while not append_slots(request, core.scheduler, core.knobs, core.blocks, core.sequences[q]):
        if preempt_last(core) == q:
            return -1
    return add_group(core, request)


@compiled
def readmit_group(core, q, budget):
    """Tokens of a swapped group, which runs again; 0: it does not fit."""
    request, scheduler = core.requests[q], core.scheduler
    watermark = core.knobs.watermark_blocks if scheduler.num_running > 0 else 0
    if request.num_sequences > budget or not swap_in(core, q, watermark):
        return 0
    remove(core.requests, scheduler, q)
    request.status = RUNNING
    core.running[scheduler.num_running] = q
    scheduler.num_running += 1
    scheduler.num_forks += request.num_sequences - 1
    request.prefill_end = request.num_tokens
    scheduler.held_tokens += request.num_computed_tokens
    return add_group(core, request)
