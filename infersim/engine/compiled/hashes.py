"""KV blocks by the hash of the text they hold: names of texts, and the buckets in which blocks are found. Compiled.

No token exists: a block's text is named by the segments that it covers (state.SEGMENT), and after them by the request.
"""

from .njit import compiled

# odd 64-bit numbers without structure (from splitmix64 and xxhash64)
SALT_NAME, SALT_OFFSET, SALT_LENGTH = 0x1E3779B185EBCA87, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9
SALT_TABLE, MIX_FIRST, MIX_LAST = 0x27D4EB2F165667C5, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
PLACE = (1 << 24) - 1
"""bits of a hash that say which bucket"""


@compiled
def hash_block(request, segments, block_size, chain, segment, offset):
    """The chained hash of the request's next block of text, and the segment and offset where the one after begins.

    Where a piece of text goes on, its next block has the next bucket: looking for them one after another in memory
    takes a fraction of the time.
    """
    left = block_size
    place = (chain + 1) & PLACE if offset > 0 else -1
    while left > 0:
        taken = left
        name = request.name
        ends = False
        if segment < request.num_segments:
            row = segments[request.first_segment + segment]
            name = row.name
            ends = row.length - offset <= left
            if ends:
                taken = row.length - offset
        chain = (chain ^ (name * SALT_NAME + offset * SALT_OFFSET + taken * SALT_LENGTH)) * MIX_FIRST
        chain = (chain ^ (chain >> 32)) * MIX_LAST
        chain = chain ^ (chain >> 29)
        if left > taken:
            place = -1
        left -= taken
        offset += taken
        if ends:
            segment += 1
            offset = 0
    if place >= 0:
        chain = (chain & ~PLACE) | place
    return chain, segment, offset


@compiled
def key_of(chain, table):
    """What a block of one block table is known by; never 0, which is no hash."""
    key = chain ^ (table * SALT_TABLE)
    return key if key != 0 else 1


@compiled
def find(blocks, key):
    """The block that has had this hash longest, or 0."""
    b = blocks[key & (len(blocks) - 1)].bucket
    while b > 0 and blocks[b].hash != key:
        b = blocks[b].chain
    return b


@compiled
def enter(blocks, scheduler, b, key):
    """Block b is full and has this hash from now on."""
    blocks[b].hash = key
    blocks[b].step = scheduler.step
    blocks[b].chain = 0
    bucket = blocks[key & (len(blocks) - 1)]
    last = bucket.bucket
    if last == 0:
        bucket.bucket = b
        return
    while blocks[last].chain > 0:
        last = blocks[last].chain
    blocks[last].chain = b


@compiled
def evict(blocks, b):
    """Block b loses its hash. True if a later block has the same."""
    key = blocks[b].hash
    bucket = blocks[key & (len(blocks) - 1)]
    if bucket.bucket == b:
        bucket.bucket = blocks[b].chain
    else:
        before = bucket.bucket
        while blocks[before].chain != b:
            before = blocks[before].chain
        blocks[before].chain = blocks[b].chain
    blocks[b].hash = 0
    left = blocks[b].chain
    while left > 0:
        if blocks[left].hash == key:
            return True
        left = blocks[left].chain
    return False
