"""Tiers below the GPU for text that is evicted from it: the CPU's memory, and a disk below that. Compiled.

What the GPU evicts becomes the most recently used of the CPU tier, the least recently used of a full CPU tier goes to
the disk, that of a full disk is forgotten. A copy stays where it is when it is brought back, and counts as used. After
vLLM's SimpleCPUOffloadConnector with lazy_offload (blocks are copied as they come near the head of the free queue,
unless a copy is there) and SGLang's HiCache with write_back; what a disk has passes through the CPU's memory, as in
vLLM's tiered offloading (v1/kv_offload/tiering/manager.py). With write-through text is copied as soon as it is
computed (OffloadingConnector; HiCache's write_through), and a GPU's eviction copies nothing. Copying out is
asynchronous in all of them and costs nothing here. A load makes the step that admits its request longer (LMCache), goes
on layer by layer beside it (HiCache, LMCache's layerwise mode), or the request waits for it while others run
(OffloadingConnector).
What a store of all replicas has of a prompt the cluster says (Request.stored_tokens).

A tier is a row of Arrays.blocks that closes its ring, least recently used first, and the slots behind it; a slot is
found under the hash of its text, salted with the tier.
"""

from .hashes import enter, evict, find, hash_block, key_of
from .njit import compiled
from .state import CPU, DISK, NUM_TIERS

SALT_CPU, SALT_DISK = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85


@compiled
def salted(key, tier):
    """What a tier's slot with the text of this key is known by, and back."""
    return key ^ (SALT_CPU if tier == CPU else SALT_DISK)


@compiled
def ring_of(knobs, tier):
    """The row that closes a tier's ring; its `references` is the number of slots used so far."""
    return knobs.num_gpu_blocks if tier == CPU else knobs.num_gpu_blocks + 1 + knobs.tier_blocks[CPU]


@compiled
def clear_tiers(blocks, knobs):
    """Empty rings."""
    if knobs.tier_blocks[CPU] > 0:
        for tier in range(NUM_TIERS):
            ring = ring_of(knobs, tier)
            blocks[ring].prev = ring
            blocks[ring].next = ring


@compiled
def link(blocks, ring, b):
    """Slot b becomes the most recently used."""
    last = blocks[ring].prev
    blocks[last].next = b
    blocks[b].prev = last
    blocks[b].next = ring
    blocks[ring].prev = b


@compiled
def unlink(blocks, b):
    blocks[blocks[b].prev].next = blocks[b].next
    blocks[blocks[b].next].prev = blocks[b].prev


@compiled
def keep(blocks, scheduler, knobs, key):
    """Text that the GPU evicts becomes the most recently used of the CPU tier; what has to leave goes further down."""
    for tier in range(NUM_TIERS):
        if knobs.tier_blocks[tier] == 0:
            return
        ring = ring_of(knobs, tier)
        b = find(blocks, salted(key, tier))
        if b > 0:
            unlink(blocks, b)
            link(blocks, ring, b)
            return
        fallen = 0
        if blocks[ring].references < knobs.tier_blocks[tier]:
            blocks[ring].references += 1
            b = ring + blocks[ring].references
        else:
            b = blocks[ring].next
            fallen = salted(blocks[b].hash, tier)
            evict(blocks, b)
            unlink(blocks, b)
        enter(blocks, scheduler, b, salted(key, tier))
        link(blocks, ring, b)
        if fallen == 0:
            return
        key = fallen


@compiled
def is_below(blocks, key):
    """Whether a tier has the text of this key."""
    return find(blocks, salted(key, CPU)) > 0 or find(blocks, salted(key, DISK)) > 0


@compiled
def look_below(request, knobs, scheduler, blocks, segments, table):
    """Number of blocks behind those just found on the GPU that the tiers hold: their slots to `table`, how many of them
    each tier has to the scheduler's tier_hits."""
    limit = (request.prompt_tokens + request.num_output_tokens - 1) // knobs.block_size
    chain, segment, offset = request.chain, request.segment, request.segment_offset
    scheduler.tier_hits[CPU] = scheduler.tier_hits[DISK] = 0
    for length in range(request.num_hashed_blocks, limit):
        chain, segment, offset = hash_block(request, segments, knobs.block_size, chain, segment, offset)
        key = key_of(chain, 0)
        tier = CPU
        table[length] = find(blocks, salted(key, CPU))
        if table[length] == 0:
            tier = DISK
            table[length] = find(blocks, salted(key, DISK))
            if table[length] == 0:
                break
        scheduler.tier_hits[tier] += 1
    return scheduler.tier_hits[CPU] + scheduler.tier_hits[DISK]


@compiled
def load(request, knobs, scheduler, blocks, table, first, end):
    """Bring back the blocks first..end - 1 of a request: those that `look_below` found, which counts as use, then those
    that the store has. Returns the seconds."""
    below, seconds = scheduler.tier_hits[CPU] + scheduler.tier_hits[DISK], 0.0
    for i in range(first + below - 1, first - 1, -1):  # as freed blocks: the beginning is the most recently used
        unlink(blocks, table[i])
        link(blocks, ring_of(knobs, CPU if table[i] < ring_of(knobs, DISK) else DISK), table[i])
    if below > 0:
        seconds += knobs.tier_latency[CPU] + below * knobs.tier_block_time[CPU]
    if scheduler.tier_hits[DISK] > 0:
        seconds += knobs.tier_latency[DISK] + scheduler.tier_hits[DISK] * knobs.tier_block_time[DISK]
    stored = end - first - below
    if stored > 0:
        seconds += knobs.store_latency + stored * knobs.store_block_time
    if request.scheduled < 0.0:
        request.num_stored_cached_tokens = stored * knobs.block_size
        request.num_cpu_cached_tokens = scheduler.tier_hits[CPU] * knobs.block_size
        request.num_disk_cached_tokens = scheduler.tier_hits[DISK] * knobs.block_size
    return seconds
