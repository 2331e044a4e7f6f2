"""A radix tree of cached text, as SGLang keeps it: what is found again, held, forgotten. Compiled.

Written after SGLang 0.5 (python/sglang/srt/mem_cache/radix_cache.py, and what managers/schedule_batch.py and
mem_cache/common.py ask of it): text enters the tree when a prefill, or a chunk of one, has run, and when a request
ends; a look-up splits the node in which the common text ends; a request locks the path to the node it holds; memory is
taken back from the least recently used leaves, whole nodes at a time.

No token exists: a node is a run of the text of some request, which names it (state.SEGMENT). Two texts are compared by
their segments, so a look-up costs a few operations per segment, however long. Which slot of memory a token has is of no
consequence: blocks (SGLang's pages, of one token by default) are counted. `free_blocks` counts those that nobody holds,
`evictable_blocks` those of them that the tree still fills with text.

nodes: this rank's of interface.ARRAYS; row 0 is the root, and closes the ring of nodes that nobody holds, least
recently used first. In it a node stands before its parent, since who uses it uses the parent: the first one is always a
leaf.
"""

from .hashes import hash_block
from .njit import compiled
from .queue import insert as insert_waiting
from .queue import remove as remove_waiting
from .state import LONGEST_PREFIX, NUM_BUCKETS

NODE_SALT = 0x632BE59BD9B4E019  # odd, without structure
REFRESH_INTERVAL, REFRESH_LIMIT = 32, 128  # WAITING_PREFIX_REFRESH_INTERVAL, WAITING_QUEUE_PREFIX_MATCH_MAX
LPM_LIMIT = 128  # requests waiting, above which they are no longer sorted (SchedulePolicy._determine_active_policy)
SHARED_LIMIT = 32  # IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD and _DEPRIORITIZE_THRESHOLD, in tokens
DEFERRED, FIRST = -1, 2**31 - 1  # in place of the tokens by which waiting requests are sorted


@compiled
def skip(request, segments, segment, offset, tokens):
    """Segment and offset `tokens` further on in the request's text, never at the end of a segment."""
    while segment < request.num_segments:
        left = segments[request.first_segment + segment].length - offset
        if tokens < left:
            break
        tokens -= left
        segment += 1
        offset = 0
    return segment, offset + tokens


@compiled
def same_tokens(request, segment, offset, other, other_segment, other_offset, segments, most):
    """How many of the next tokens of two texts, at most `most`, are the same."""
    same = 0
    while same < most:
        name, other_name, run = request.name, other.name, most - same
        if segment < request.num_segments:
            row = segments[request.first_segment + segment]
            name = row.name
            run = min(run, row.length - offset)
        if other_segment < other.num_segments:
            row = segments[other.first_segment + other_segment]
            other_name = row.name
            run = min(run, row.length - other_offset)
        if name != other_name or offset != other_offset:
            break
        same += run
        segment, offset = skip(request, segments, segment, offset, run)
        other_segment, other_offset = skip(other, segments, other_segment, other_offset, run)
    return same


@compiled
def bucket_of(nodes, key):
    """The row that knows the first node of those whose keys end alike."""
    return nodes[key & (min(len(nodes), NUM_BUCKETS) - 1)]


@compiled
def child_key(request, segments, block_size, parent, segment, offset):
    """What the child of a node is known by whose text begins with the request's next block."""
    key, _, _ = hash_block(request, segments, block_size, parent * NODE_SALT, segment, offset)
    return key


@compiled
def next_node(request, requests, segments, nodes, block_size, node, segment, offset, most):
    """The child of `node` where the request's text goes on, 0 if there is none, and how many of its tokens that has."""
    if most < block_size:
        return 0, 0
    key = child_key(request, segments, block_size, node, segment, offset)
    child = bucket_of(nodes, key).bucket
    while child > 0 and (nodes[child].key != key or nodes[child].parent != node):
        child = nodes[child].chain
    if child == 0:
        return 0, 0
    row = nodes[child]
    most = min(most, row.num_blocks * block_size)
    same = same_tokens(request, segment, offset, requests[row.request], row.segment, row.offset, segments, most)
    return child, same - same % block_size


@compiled
def enter(nodes, node, key):
    """A node is found by this key from now on."""
    bucket = bucket_of(nodes, key)
    nodes[node].key = key
    nodes[node].chain = bucket.bucket
    bucket.bucket = node


@compiled
def leave(nodes, node):
    """A node is no longer found."""
    bucket = bucket_of(nodes, nodes[node].key)
    if bucket.bucket == node:
        bucket.bucket = nodes[node].chain
        return
    before = bucket.bucket
    while nodes[before].chain != node:
        before = nodes[before].chain
    nodes[before].chain = nodes[node].chain


@compiled
def unlink(nodes, node):
    """Take a node out of the ring of those that nobody holds."""
    nodes[nodes[node].prev].next = nodes[node].next
    nodes[nodes[node].next].prev = nodes[node].prev


@compiled
def link(nodes, node):
    """Put a node that nobody holds behind all that were used no later."""
    before = nodes[0].prev
    while before > 0 and nodes[before].used > nodes[node].used:
        before = nodes[before].prev
    after = nodes[before].next
    nodes[node].prev, nodes[node].next = before, after
    nodes[before].next = node
    nodes[after].prev = node


@compiled
def new_node(scheduler, nodes):
    """A row that is free; those used before are linked through `next`."""
    node = scheduler.free_node
    if node > 0:
        scheduler.free_node = nodes[node].next
    else:
        scheduler.num_nodes += 1
        node = scheduler.num_nodes
    return node


@compiled
def split(nodes, scheduler, requests, segments, block_size, node, num_blocks):
    """The first blocks of a node become a node of their own: its parent, held by all that hold it. Returns that."""
    upper = new_node(scheduler, nodes)
    row = nodes[node]
    owner = requests[row.request]
    leave(nodes, node)
    nodes[upper].parent = row.parent
    nodes[upper].locks = row.locks
    nodes[upper].request, nodes[upper].segment, nodes[upper].offset = row.request, row.segment, row.offset
    nodes[upper].num_blocks = num_blocks
    nodes[upper].used = scheduler.num_uses
    enter(nodes, upper, row.key)
    row.parent = upper
    row.num_blocks -= num_blocks
    row.segment, row.offset = skip(owner, segments, row.segment, row.offset, num_blocks * block_size)
    enter(nodes, node, child_key(owner, segments, block_size, upper, row.segment, row.offset))
    if row.locks == 0:
        link(nodes, upper)
    return upper


@compiled
def use(nodes, scheduler, node):
    """A node is used now."""
    nodes[node].used = scheduler.num_uses
    if nodes[node].locks == 0:
        unlink(nodes, node)
        link(nodes, node)


@compiled
def descend(request, until, scheduler, block_size, requests, nodes, segments):
    """The node with which the first `until` tokens of the request's text leave the tree, and how many tokens that is.

    Begins at the node that the request holds. What is passed counts as used now. Leaves the place in the text to the
    request.
    """
    node, tokens, segment, offset = request.node, request.tree_tokens, request.segment, request.segment_offset
    if node == 0:
        tokens = 0
        segment, offset = skip(request, segments, 0, 0, 0)
    scheduler.num_uses += 1
    while True:
        child, same = next_node(request, requests, segments, nodes, block_size, node, segment, offset, until - tokens)
        if same == 0:
            break
        length = nodes[child].num_blocks * block_size
        node = child
        if same < length:
            node = split(nodes, scheduler, requests, segments, block_size, child, same // block_size)
            use(nodes, scheduler, child)
            scheduler.num_uses += 1  # who cuts a node off uses its beginning after its end
        tokens += same
        segment, offset = skip(request, segments, segment, offset, same)
        if same < length:
            break
    request.segment, request.segment_offset = segment, offset
    passed = node
    while passed > 0:
        use(nodes, scheduler, passed)
        passed = nodes[passed].parent
    return node, tokens


@compiled
def match_prefix(request, until, scheduler, knobs, requests, nodes, segments):
    """How many of the first `until` tokens of a request that holds nothing are in the tree (RadixCache.match_prefix).

    Leaves where they end, their blocks, and those of them that nobody holds to the scheduler's hit_node, hit_blocks and
    idle_hit_blocks.
    """
    node, tokens = descend(request, until, scheduler, knobs.block_size, requests, nodes, segments)
    scheduler.hit_node, scheduler.hit_blocks, scheduler.idle_hit_blocks = node, tokens // knobs.block_size, 0
    while node > 0 and nodes[node].locks == 0:
        scheduler.idle_hit_blocks += nodes[node].num_blocks
        node = nodes[node].parent
    return tokens


@compiled
def peek(request, until, knobs, requests, nodes, segments):
    """`match_prefix` for somebody who only asks: nothing is split, nothing counts as used."""
    node, tokens = 0, 0
    segment, offset = skip(request, segments, 0, 0, 0)
    while True:
        child, same = next_node(
            request, requests, segments, nodes, knobs.block_size, node, segment, offset, until - tokens
        )
        tokens += same
        if same == 0 or same < nodes[child].num_blocks * knobs.block_size:
            return tokens
        node = child
        segment, offset = skip(request, segments, segment, offset, same)


@compiled
def lock(nodes, scheduler, node, above):
    """One more request holds the nodes from `node` up to below `above` (inc_lock_ref)."""
    while node != above:
        row = nodes[node]
        if row.locks == 0:
            unlink(nodes, node)
            scheduler.evictable_blocks -= row.num_blocks
            scheduler.free_blocks -= row.num_blocks
        else:
            scheduler.num_shared += row.num_blocks
        row.locks += 1
        node = row.parent


@compiled
def unlock(nodes, scheduler, node):
    """One request less holds a node and all above (dec_lock_ref). Returns their blocks."""
    held = 0
    while node > 0:
        row = nodes[node]
        row.locks -= 1
        held += row.num_blocks
        if row.locks == 0:
            link(nodes, node)
            scheduler.evictable_blocks += row.num_blocks
            scheduler.free_blocks += row.num_blocks
        else:
            scheduler.num_shared -= row.num_blocks
        node = row.parent
    return held


@compiled
def share_match(request, tokens, scheduler, nodes):
    """A request holds what `match_prefix` has just found."""
    lock(nodes, scheduler, scheduler.hit_node, 0)
    request.node, request.tree_tokens = scheduler.hit_node, tokens
    request.num_blocks = request.table_length = scheduler.hit_blocks


@compiled
def insert(q, until, scheduler, knobs, requests, nodes, segments):
    """The first `until` tokens of request q are computed: it holds them in the tree (cache_unfinished_req).

    Blocks of its own for text that others have brought into the tree meanwhile are free. A block that is not full
    stays its own.
    """
    request = requests[q]
    until -= until % knobs.block_size
    node, tokens = descend(request, until, scheduler, knobs.block_size, requests, nodes, segments)
    scheduler.free_blocks += (tokens - request.tree_tokens) // knobs.block_size
    lock(nodes, scheduler, node, request.node)
    if tokens < until:
        leaf = new_node(scheduler, nodes)
        row = nodes[leaf]
        row.parent = node
        row.locks = 1
        row.request, row.segment, row.offset = q, request.segment, request.segment_offset
        row.num_blocks = (until - tokens) // knobs.block_size
        row.used = scheduler.num_uses
        enter(nodes, leaf, child_key(request, segments, knobs.block_size, node, row.segment, row.offset))
        request.segment, request.segment_offset = skip(request, segments, row.segment, row.offset, until - tokens)
        node = leaf
    request.node, request.tree_tokens = node, until
    part_answer(request, scheduler, knobs.block_size, requests, nodes, segments)


@compiled
def part_answer(request, scheduler, block_size, requests, nodes, segments):
    """A node ends where the request's prompt does, so that its answer can be forgotten alone."""
    node, begin = request.node, request.tree_tokens
    prompt = request.prompt_tokens - request.prompt_tokens % block_size
    while node > 0 and begin > prompt:
        begin -= nodes[node].num_blocks * block_size
        if begin < prompt and begin + nodes[node].num_blocks * block_size > prompt > 0:
            split(nodes, scheduler, requests, segments, block_size, node, (prompt - begin) // block_size)
            return
        node = nodes[node].parent


@compiled
def release_path(request, scheduler, nodes):
    """A request that gives up all its blocks no longer holds its path; what others hold of it is not free."""
    held = unlock(nodes, scheduler, request.node)
    scheduler.free_blocks -= held
    request.node = 0


@compiled
def evict(nodes, scheduler, wanted):
    """Forget least recently used leaves until `wanted` blocks are empty, or nothing is left to forget (evict)."""
    while scheduler.free_blocks - scheduler.evictable_blocks < wanted and scheduler.evictable_blocks > 0:
        leaf = nodes[0].next
        scheduler.evictable_blocks -= nodes[leaf].num_blocks
        unlink(nodes, leaf)
        leave(nodes, leaf)
        nodes[leaf].next = scheduler.free_node
        scheduler.free_node = leaf


@compiled
def sort_key(request):
    """Waiting requests with more come first; who holds blocks already, whose KV came from elsewhere, before all."""
    return FIRST if request.num_blocks > 0 else request.tree_tokens


@compiled
def sort_by_prefix(requests, scheduler, knobs, nodes, segments):
    """Those of whose text the tree has most come first, stably (SchedulePolicy.calc_priority).

    Of several that begin alike and are not in the tree, all but the first come last: they can share its text when it
    has run.
    """
    q = scheduler.waiting_head
    while q >= 0:
        request = requests[q]
        request.chain = 0  # of its first tokens, if others may wait for it
        if request.num_blocks > 0:
            q = request.next
            continue
        num_tokens = request.prompt_tokens + request.num_output_tokens
        tokens = match_prefix(request, num_tokens, scheduler, knobs, requests, nodes, segments)
        request.tree_tokens = min(tokens, num_tokens - 1)
        if tokens <= SHARED_LIMIT <= num_tokens:
            begin, _, _ = hash_block(request, segments, SHARED_LIMIT, 0, 0, 0)
            earlier = request.prev
            while earlier >= 0 and requests[earlier].chain != begin:
                earlier = requests[earlier].prev
            if earlier >= 0:
                request.tree_tokens = DEFERRED
            else:
                request.chain = begin
        q = request.next
    q = scheduler.waiting_head
    while q >= 0:
        after, before, own = requests[q].next, requests[q].prev, sort_key(requests[q])
        if before >= 0 and sort_key(requests[before]) < own:
            while before >= 0 and sort_key(requests[before]) < own:
                before = requests[before].prev
            remove_waiting(requests, scheduler, q)
            behind = requests[before].next if before >= 0 else scheduler.waiting_head
            insert_waiting(requests, scheduler, q, before, behind)
        q = after


@compiled
def refresh(requests, scheduler, knobs, nodes, segments):
    """Text that the first who wait share counts as used now and then, that of the head last (SchedulePolicy's
    _touch_waiting_prefixes)."""
    scheduler.num_refreshes += 1
    if (scheduler.num_refreshes - 1) % REFRESH_INTERVAL > 0:
        return
    q = scheduler.waiting_head
    for _ in range(min(scheduler.num_waiting, REFRESH_LIMIT) - 1):
        q = requests[q].next
    while q >= 0:
        request = requests[q]
        if request.num_blocks == 0:
            known = request.prompt_tokens + request.num_output_tokens
            match_prefix(request, known, scheduler, knobs, requests, nodes, segments)
        q = request.prev


@compiled
def before_step(requests, scheduler, knobs, running, nodes, segments):
    """Chunks of prompts that have run enter the tree (stash_chunked_request), and who waits is sorted."""
    for i in range(scheduler.num_running):
        q = running[i]
        if requests[q].num_computed_tokens < requests[q].prefill_end:
            insert(q, requests[q].num_computed_tokens, scheduler, knobs, requests, nodes, segments)
    looks = scheduler.admits if knobs.clip_max_new_tokens > 0 else scheduler.num_running < knobs.max_num_seqs
    if scheduler.num_waiting == 0 or not looks:
        return
    if knobs.policy == LONGEST_PREFIX and scheduler.num_waiting <= LPM_LIMIT:
        sort_by_prefix(requests, scheduler, knobs, nodes, segments)
    else:
        refresh(requests, scheduler, knobs, nodes, segments)
