"""Several sequences of one request, which share the KV blocks of their common text: beams, or samples of a prompt.

Written after vLLM's sequence groups, which its scheduler had until 0.6.2 (core/scheduler.py, core/block_manager_v1.py:
fork, append_slots, can_append_slots, swap_out; engine/output_processor/single_step.py). The prompt is computed once;
then all sequences of the group decode one token in each step, or none does. A block is shared as long as the text up to
its end is the same, and copied when one of several writes to it. Out of memory the whole group is swapped: V0 cannot
recompute several sequences.

Which beams survive is a matter of the text, which a simulator has not: each new beam goes on from its own predecessor,
or, with the chance `beam_turnover`, from that of a beam drawn evenly (as generations follow one another in Wright and
Fisher's model). Samples are beams that always go on from their own. All beams have the request's output length.

A request row stands for the group. Only how many blocks it holds matters, not which; so its blocks are nodes of a tree
that reaches back to the prompt's last full block (node 0), whether they are in the GPU's memory or the CPU's. Compiled.
"""

from .njit import compiled
from .speculation import uniform
from .state import COMPLETED, GROUP_TOO_LARGE, SWAP_SPACE_FULL


@compiled
def new_block(scheduler, blocks, before):
    """A block behind `before`, to which one sequence refers."""
    b = scheduler.free_tree_block
    if b > 0:
        scheduler.free_tree_block = blocks[b].next
    else:
        scheduler.num_tree_blocks += 1
        b = scheduler.num_tree_blocks
    blocks[b].prev = before
    blocks[b].references = 1
    return b


@compiled
def drop(scheduler, blocks, b):
    """One sequence less refers to block b. Returns how many blocks nobody refers to any more."""
    freed = 0
    while b > 0:
        blocks[b].references -= 1
        if blocks[b].references > 0:
            break
        blocks[b].next = scheduler.free_tree_block
        scheduler.free_tree_block = b
        freed += 1
        b = blocks[b].prev
    return freed


@compiled
def blocks_saved(request):
    """Blocks that its sequences would hold in the GPU's memory, beyond those that they do, if they shared none."""
    return request.num_sequences * request.table_length - request.num_blocks


@compiled
def give(request, scheduler, num_blocks):
    """The group has taken so many blocks, or given back if negative."""
    request.num_blocks += num_blocks
    scheduler.free_blocks -= num_blocks


@compiled
def fork(request, scheduler, knobs, blocks, sequences):
    """The prompt is computed: its sequences begin, and share all its blocks, the last one, which may have room, too."""
    last = 0
    if request.num_computed_tokens % knobs.block_size > 0:
        last = new_block(scheduler, blocks, 0)
        blocks[last].references = knobs.num_sequences
    for s in range(knobs.num_sequences):
        sequences[s].last_block = last
    request.slots = 0  # from now on every step takes blocks here


@compiled
def append_slots(request, scheduler, knobs, blocks, own):
    """Each sequence of a request takes a slot for one more token; False (and nothing taken) unless each could have a
    free block, whether it needs one or not (can_append_slots).

    Of those that share a last block with room the last one keeps it, the others write to copies.
    """
    if request.num_sequences > scheduler.free_blocks:
        return False
    scheduler.num_shared -= blocks_saved(request)
    full = request.num_computed_tokens % knobs.block_size == 0
    taken = 0
    for s in range(knobs.num_sequences):
        last = own[s].last_block
        if last < 0:
            continue
        if full:
            own[s].last_block = new_block(scheduler, blocks, last)
            taken += 1
        elif blocks[last].references > 1:
            blocks[last].references -= 1
            before = blocks[last].prev
            if before > 0:
                blocks[before].references += 1
            own[s].last_block = new_block(scheduler, blocks, before)
            taken += 1
            scheduler.num_block_copies += 1
    if full:
        request.table_length += 1
    give(request, scheduler, taken)
    scheduler.num_shared += blocks_saved(request)
    return True


@compiled
def descend(request, scheduler, knobs, blocks, sequences, position):
    """The beams go on from their parents, which the output's position and the request decide."""
    k = knobs.num_sequences
    for s in range(k):
        chance = uniform(request.key, position * k + s)
        parent = s
        if chance < knobs.beam_turnover:
            parent = min(int(chance / knobs.beam_turnover * k), k - 1)
        b = sequences[parent].last_block
        sequences[s].next_block = b
        if b > 0:
            blocks[b].references += 1
    freed = 0
    for s in range(k):
        freed += drop(scheduler, blocks, sequences[s].last_block)
        sequences[s].last_block = sequences[s].next_block
    give(request, scheduler, -freed)


@compiled
def end_sequences(request, scheduler, blocks, sequences, tokens, end):
    """Those that have all their tokens give back what is theirs alone. True if others go on."""
    others = False
    for s in range(len(sequences)):
        sequence = sequences[s]
        if sequence.last_block < 0:
            continue
        if tokens < sequence.stop_tokens:
            others = True
            continue
        give(request, scheduler, -drop(scheduler, blocks, sequence.last_block))
        sequence.last_block = -1
        sequence.last_token = end
        if request.num_sequences > 1:
            request.num_sequences -= 1
            scheduler.num_forks -= 1
    return others


@compiled
def go_on(requests, scheduler, knobs, blocks, sequences, step, count, end):
    """A step has ended: the sequences of each request in it that has one more token begin, go on or end."""
    for i in range(count):
        q = step[i]
        if q < 0 or requests[q].status >= COMPLETED:
            continue
        request, own = requests[q], sequences[q]
        tokens = request.num_output_tokens + 1
        if tokens == 1:
            fork(request, scheduler, knobs, blocks, own)
        else:
            scheduler.num_shared -= blocks_saved(request)
            if knobs.beam_turnover > 0.0 and tokens < request.stop_tokens:
                descend(request, scheduler, knobs, blocks, own, tokens)
        if end_sequences(request, scheduler, blocks, own, tokens, end):
            scheduler.num_shared += blocks_saved(request)


@compiled
def forget(requests, q, scheduler, knobs, blocks, sequences):
    """The group's tree is gone; the blocks that it counts are still to be freed."""
    request = requests[q]
    if request.num_output_tokens == 0:
        return
    if request.num_blocks > 0:
        scheduler.num_shared -= blocks_saved(request)
    own = sequences[q]
    for s in range(knobs.num_sequences):
        drop(scheduler, blocks, own[s].last_block)
        own[s].last_block = -1


@compiled
def swap_out(request, replica, scheduler, knobs):
    """A preempted group is copied to the CPU's memory as it is; without room there it is to be given up."""
    scheduler.num_shared -= blocks_saved(request)
    scheduler.held_tokens -= request.num_computed_tokens
    if request.num_blocks <= scheduler.free_cpu_blocks:
        scheduler.free_cpu_blocks -= request.num_blocks
        scheduler.copy_time += request.num_blocks * knobs.swap_block_time
        replica.num_copied += request.num_blocks
        request.num_swapped = request.num_blocks
    else:
        give_up(request, scheduler, SWAP_SPACE_FULL)
        request.num_computed_tokens = 0
    give(request, scheduler, -request.num_blocks)


@compiled
def swap_in(core, q, reserve):
    """A swapped group gets its blocks back, and a slot for each sequence's next token, if that leaves `reserve` free
    (can_swap_in); False (and nothing taken) otherwise."""
    request, replica, scheduler, knobs = core.requests[q], core.replica, core.scheduler, core.knobs
    needed = request.num_swapped + request.num_sequences
    if needed > knobs.num_gpu_blocks - 1:
        give_up(request, scheduler, GROUP_TOO_LARGE)
        return False
    if needed + reserve > scheduler.free_blocks:
        return False
    give(request, scheduler, request.num_swapped)
    scheduler.free_cpu_blocks += request.num_swapped
    scheduler.copy_time += request.num_swapped * knobs.swap_block_time
    replica.num_copied += request.num_swapped
    request.num_swapped = 0
    scheduler.num_shared += blocks_saved(request)
    return append_slots(request, scheduler, knobs, core.blocks, core.sequences[q])


@compiled
def give_up(request, scheduler, reason):
    """The waiting request is to be rejected."""
    request.reason = reason
    scheduler.num_given_up += 1
