"""Recurrent states and windows whose prefixes are cached: which blocks are kept, and where prompts are cut for it.
Compiled.

A state is one block, however long the text, and holds it up to where a step ended; the table's places before are empty.
So prompts end a step where their state is worth keeping: mamba_cache_mode "align" of vLLM (v1/core/sched/scheduler.py,
v1/core/single_type_kv_cache_manager.py).
"""

from .njit import compiled
from .state import LAST_TOKEN


@compiled
def end_at_state(request, knobs, start, n):
    """Tokens of a chunk of n tokens from `start` on, once it ends where a state is kept: at the end of a block, of the
    last one of the prompt, and where text that others have cached parts from it (_mamba_block_aligned_split)."""
    size, drop = knobs.block_size, knobs.drop_last_hit
    num_tokens, shared = request.prompt_tokens + request.num_output_tokens, request.shared_boundary
    prefill_end = max(request.prompt_tokens, num_tokens - 1)
    if n <= 0 or start >= prefill_end:
        return n
    end = start + n
    if end < prefill_end:
        most, threshold = knobs.max_num_batched_tokens, knobs.long_prefill_token_threshold
        whole = end // size * size
        if whole > start or size <= (min(most, threshold) if threshold > 0 else most):
            end = whole
    if start < shared < end:
        shared = start + (shared - start) // size * size
        end = shared if start < shared else end
    last = num_tokens - (1 if knobs.state_cuts == LAST_TOKEN and not drop else 0)
    last = (last // size - drop) * size
    if start < last < end:
        end = last
    if start % size > 0:
        end = min(end, (start // size + 1) * size)
    return max(end - start, 0)


@compiled
def num_new_blocks(request, knobs, num_tables, length, own):
    """Blocks that a request's tables take to be `length` long, `own` of it for the step's own tokens: of a state from
    the last of those on."""
    more = max(length - request.table_length, 0)
    if knobs.state_cuts == 0:
        return num_tables * more
    total = 0
    for g in range(knobs.num_kv_groups):
        taken = more
        if knobs.kv_window[g] == 1:
            taken = max(length - first_new_state(request, own), 0)
        total += knobs.kv_multiplicity[g] * taken
    return total


@compiled
def first_new_state(request, own):
    """The first place of a state's table that a step takes a block for."""
    return max(request.table_length, own - 1)


@compiled
def is_late(knobs, scheduler, blocks, table, length):
    """Whether the state at the end of a hit is of this very step, so not there yet."""
    t = 0
    for g in range(knobs.num_kv_groups):
        for _ in range(knobs.kv_multiplicity[g]):
            b = table[t * scheduler.table_stride + length - 1]
            key = blocks[b].hash
            while b > 0 and knobs.kv_window[g] == 1:
                if blocks[b].hash == key and blocks[b].step == scheduler.step:
                    return True
                b = blocks[b].chain
            t += 1
    return False


@compiled
def renew_last_state(request, knobs, scheduler, blocks, table, full):
    """0.32 enters the last state of a prompt anew as long as the request holds it and fills no block more, so that it
    is of this step again (MambaManager._cache_partial_tail_block)."""
    if full == 0 or full != (request.prompt_tokens - 1) // knobs.block_size:
        return
    t = 0
    for g in range(knobs.num_kv_groups):
        for _ in range(knobs.kv_multiplicity[g]):
            b = table[t * scheduler.table_stride + full - 1]
            if knobs.kv_window[g] == 1 and b > 0:
                blocks[b].step = scheduler.step
            t += 1


@compiled
def window_blocks(knobs, g):
    """Blocks of a window that a hit needs."""
    return max(1, (knobs.kv_window[g] + knobs.block_size - 2) // knobs.block_size)


@compiled
def is_reachable(request, knobs, g, i):
    """Whether block i of a KV group is cached. Of windows and states newer vLLM keeps only those that a prompt needs
    which goes on where this one ends, or where it parted from one before (reachable_block_mask of each manager)."""
    if not knobs.sparse_windows or knobs.kv_window[g] == 0:
        return True
    drop = knobs.drop_last_hit
    resend = (request.prompt_tokens - 1) // knobs.block_size
    extension = resend
    shared = request.shared_boundary // knobs.block_size if request.shared_boundary > 0 else 0
    needed = window_blocks(knobs, g)
    if drop:
        resend, extension = max(resend - 1, 0), max(request.prompt_tokens // knobs.block_size - 1, 0)
        if knobs.kv_window[g] > 1:  # which lose a block of what is found
            needed, resend, extension, shared = needed + 1, resend + 1, extension + 1, shared + (shared > 0)
    return resend - needed <= i < resend or extension - needed <= i < extension or shared - needed <= i < shared
