"""KV memory in one piece per request, as engines before PagedAttention had it. Compiled.

The reservations are those of Kwon et al. 2023, section 6.1 (Orca's Max, Pow2 and Oracle); lengths and places in blocks.
Contiguous: first fit. A buddy allocator gives out powers of two at multiples of themselves, from the smallest free
buddy that holds one (Knowlton 1965), of several the lowest; free buddies always merge. `pieces` are the rows (first
block, block after the last) of what is given out, in order of address.
"""

from .njit import compiled
from .state import BUDDY


@compiled
def piece_size(length, allocator):
    """Blocks that a piece for `length` of them takes."""
    size = length
    if allocator == BUDDY:
        size = 1
        while size < length:
            size *= 2
    return size


@compiled
def take_piece(request, scheduler, knobs, pieces, length):
    """Give the request one piece for `length` blocks; False if no hole holds it."""
    size = piece_size(length, knobs.allocator)
    first, place, smallest = -1, 0, knobs.num_gpu_blocks
    start = 0
    for i in range(scheduler.num_pieces + 1):
        end = pieces[i, 0] if i < scheduler.num_pieces else knobs.num_gpu_blocks - 1
        while end - start >= size:
            hole = end - start
            if knobs.allocator == BUDDY:  # the free buddy that begins here
                hole = 1
                while start % (2 * hole) == 0 and start + 2 * hole <= end:
                    hole *= 2
            if size <= hole < smallest:
                first, place, smallest = start, i, hole
            start += hole
        if first >= 0 and (knobs.allocator != BUDDY or smallest == size):
            break
        if i < scheduler.num_pieces:
            start = pieces[i, 1]
    if first < 0:
        return False
    for i in range(scheduler.num_pieces, place, -1):
        pieces[i, 0], pieces[i, 1] = pieces[i - 1, 0], pieces[i - 1, 1]
    pieces[place, 0], pieces[place, 1] = first, first + size
    scheduler.num_pieces += 1
    scheduler.free_blocks -= size
    scheduler.asked_blocks += length
    scheduler.final_tokens += request.prompt_tokens + request.stop_tokens
    request.first_block = first
    request.num_blocks = size
    request.table_length = length
    return True


@compiled
def give_back(request, scheduler, pieces):
    """The request's piece is free again."""
    place = 0
    while pieces[place, 0] != request.first_block:
        place += 1
    scheduler.num_pieces -= 1
    for i in range(place, scheduler.num_pieces):
        pieces[i, 0], pieces[i, 1] = pieces[i + 1, 0], pieces[i + 1, 1]
    scheduler.free_blocks += request.num_blocks
    scheduler.asked_blocks -= request.table_length
    scheduler.final_tokens -= request.prompt_tokens + request.stop_tokens
    request.first_block = -1
