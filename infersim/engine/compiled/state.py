"""The engine's state and tables as numpy structured dtypes: a handful of arrays that compiled code walks.

Times are seconds, memory is in KV blocks, lengths in tokens. Names are vLLM's.
"""

import numpy as np

from .. import knobs

# --- what a step's time is spent on -----------------------------------------------------------------------------------
RESOURCES = ("weights", "kv", "activations", "compute", "launch", "collectives", "host", "draft", "offload")
WEIGHTS, KV, ACTIVATIONS, COMPUTE, LAUNCH, COLLECTIVES, HOST, DRAFT, OFFLOAD = range(len(RESOURCES))

# --- request status ---------------------------------------------------------------------------------------------------
PENDING, WAITING, RUNNING, COMPLETED, REJECTED, ABORTED = range(6)
TIMED_OUT, LOST = 6, 7  # of a record only: a request whose every attempt was aborted, by its client or by a failure
# why a request was rejected
PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN, QUEUE_FULL, GROUP_TOO_LARGE, SWAP_SPACE_FULL = 1, 2, 3, 4, 5
REJECTION_REASONS = {
    PROMPT_TOO_LONG: "prompt does not fit max_model_len",
    OVER_MAX_MODEL_LEN: "prompt + max_tokens exceeds max_model_len",
    QUEUE_FULL: "the front door's queue was full",
    GROUP_TOO_LARGE: "its sequences outgrew all KV memory",
    SWAP_SPACE_FULL: "its sequences had to be swapped and swap_space was full, where vLLM 0 stops",
}

QUERY_TILE = 128  # queries per tile of a prefill attention kernel (FlashAttention 2/3 block sizes 64-192)
MAX_ATTENTION_KINDS = 4
RESERVED_PER_SEQUENCE = 1  # times max_num_seqs: requests that may hold block tables without running

# What a step is made of, one octal digit per phase, the first one last.
EVERYTHING, DECODES, PREFILLS, ADMIT, DECODES_IF_NO_PREFILL = range(1, 6)
PREFILLS_BESIDE_DECODES = PREFILLS | ADMIT << 3 | DECODES << 6
ORDERS = {
    "running-first": EVERYTHING | ADMIT << 3,  # running requests in order of admission, then waiting ones
    "decodes-first": DECODES | PREFILLS << 3 | ADMIT << 6,
    "prefills-first": PREFILLS_BESIDE_DECODES,  # of a budget of which each that decodes has a token
    "prefills-only": PREFILLS | ADMIT << 3 | DECODES_IF_NO_PREFILL << 6,  # a step with a prefill has no decodes
}
CODES = knobs.codes() | {"order": ORDERS}
"""of each choice in KNOBS: its words as numbers"""
# What a request is given at admission: the blocks of its first chunk, of its whole prompt, of max_model_len; or those
# of its first chunk, if there is room for prompt + max_tokens of all that run.
# Or, since Orca's evaluation had it so, of what the model will generate, which no engine knows, and of the power of two
# that is no less.
RESERVE_FIRST_CHUNK, RESERVE_WHOLE_PROMPT, RESERVE_MAX_MODEL_LEN, RESERVE_TO_COMPLETION = range(4)
RESERVE_OUTPUT_LENGTH, RESERVE_POWER_OF_TWO = 4, 5
# Blocks from anywhere, or one piece of the address space, of the size asked for or of a power of two.
PAGED, CONTIGUOUS, BUDDY = range(3)
# Who of those that wait is first.
FCFS, PRIORITY, SHORTEST_FIRST, LONGEST_PREFIX = range(4)
# Cached text that is computed in the very step: found, not found, or waited for.
MISS_LATE_HITS, WAIT_FOR_LATE_HITS = 1, 2
# What a pipeline has in flight beside steps with something to do: see knobs.
UNTIL_DONE, UNTIL_FULL = 1, 2
BESIDE_OR_CACHED = 2
EACH, ONE_OR_LAST = 0, 2
LAST_TOKEN = 2
# When a step whose requests have text loaded goes on: after it, beside it layer by layer; or they wait for it alone.
LAYERS, BACKGROUND = 1, 2
# Where text goes that the GPU evicts.
TIERS = ("cpu", "disk")
CPU, DISK = range(len(TIERS))
NUM_TIERS = len(TIERS)
RETRACT_STEPS = 20  # decode steps that SGLang's new_token_ratio allows for after a retraction

# One row per request of the whole fleet: running state first (what every step touches shares a cache line), then the
# input columns and the record that remains.
_FIELDS = np.dtype(
    [
        ("num_computed_tokens", "i4"),
        ("num_tokens", "i4"),  # prompt, outputs so far, and placeholders in flight under async scheduling
        ("max_num_tokens", "i4"),  # prompt + max_tokens: the end that the scheduler knows
        ("num_output_tokens", "i4"),
        ("stop_tokens", "i4"),  # min(output_tokens, max_tokens): the end that only the model knows
        ("slots", "i4"),  # the step may bring num_computed_tokens up to here with the blocks held
        ("last_token", "f8"),
        ("prefill_end", "i4"),  # tokens that it had to compute at its last admission
        ("last_step", "i4"),  # the last step it was in, -1 before
        ("prompt_tokens", "i4"),
        ("num_drafts", "i2"),  # drafts that it brings to its next step
        ("all_accepted", "i1"),  # those of its last step were all accepted
        ("status", "i1"),
        ("num_in_flight_tokens", "i4"),  # of its steps that are to come back, if it has windows
        ("acceptance", "i4"),  # its row in `accepted`
        ("key", "u8"),  # of its draws
        (
            "num_accepted_tokens",
            "i4",
        ),  # output tokens that were drafts or a grammar's, so came with another in one chunk
        ("table_length", "i4"),  # blocks in each of its block tables, freed ones outside a window included
        ("num_blocks", "i4"),  # KV blocks held
        ("num_hashed_blocks", "i4"),  # full blocks per block table that have, or could have, their hash
        ("reason", "i1"),
        ("skipped", "i1"),  # preempted, and passed over since: a step with it was in flight
        ("hold", "i1"),  # keep its blocks when it completes, until they are released
        ("replica", "i2"),
        ("rank", "i2"),  # the data-parallel rank of the replica that serves it
        ("num_sequences", "i2"),  # that it has, or will have when its prompt is computed, and that have not ended
        ("entered", "i1"),  # all that its last prefill computed is in the radix tree
        ("next", "i4"),  # links of its queue, -1 ends it
        ("prev", "i4"),
        ("num_preemptions", "i4"),
        ("num_chunks", "i4"),  # that its client got; 0: as many as steps gave it tokens
        ("output_tokens", "i4"),  # what the model would generate
        ("max_tokens", "i4"),
        ("first_block", "i4"),  # of its piece of memory, where there are pieces
        ("priority", "i4"),  # lower is more urgent
        ("num_swapped", "i4"),  # KV blocks of it in the CPU's memory
        ("arrival", "f8"),
        ("sent", "f8"),  # when the client sent it: at its arrival, or later under max_concurrency
        ("visible", "f8"),  # when the API server is done with it: it takes one after another
        ("scheduled", "f8"),  # first time it entered a step
        ("first_token", "f8"),
        ("loaded", "f8"),  # when what is loaded for it in the background has come
        ("num_cached_tokens", "i4"),  # found in the prefix cache when it was first scheduled ...
        ("num_cpu_cached_tokens", "i4"),  # ... and of those in the CPU's memory ...
        ("num_disk_cached_tokens", "i4"),  # ... on the disk ...
        ("num_stored_cached_tokens", "i4"),  # ... and in a store of all replicas
        # what only prefix caching touches
        ("stored_tokens", "i4"),  # of its prompt that such a store has when it comes to a replica
        ("table", "i4"),  # its row of block tables while its blocks have an identity, else -1
        ("name", "i8"),  # of its own text: what follows the segments, and what it generates
        ("first_segment", "i8"),  # in `segments`
        ("num_segments", "i4"),
        ("segment", "i4"),  # where the text that is not yet hashed, or not in the radix tree, begins
        ("segment_offset", "i4"),
        ("shared_boundary", "i4"),  # where text ends that other groups have cached and a window not, 0: nowhere
        ("last_state", "i4"),  # place, in the table of a state, of the one before the newest
        ("retired_states", "i4"),  # places before this one are empty, but for what was forgotten
        ("chain", "i8"),  # hash of all text before
        ("node", "i4"),  # of the radix tree, with which the text ends that it holds there, 0: it holds none
        ("tree_tokens", "i4"),  # so many tokens; of a waiting request: those that longest-prefix order has found
    ],
    align=True,
)
CACHE_LINE = 64
# Rows of whole cache lines: a row that begins anywhere costs every token of a run two lines instead of one.
REQUEST = np.dtype(
    {
        "names": _FIELDS.names,
        "formats": [_FIELDS.fields[name][0] for name in _FIELDS.names],
        "offsets": [_FIELDS.fields[name][1] for name in _FIELDS.names],
        "itemsize": -(-_FIELDS.itemsize // CACHE_LINE) * CACHE_LINE,
    },
    align=True,
)

# One row per piece of text that a prompt begins with: equal names are equal text from the start of the piece on.
SEGMENT = np.dtype([("name", "i8"), ("length", "i4")], align=True)

# One row per sequence of a request that has several.
SEQUENCE = np.dtype(
    [
        ("last_block", "i4"),  # 0: the prompt's last full one, -1: it has ended
        ("next_block", "i4"),  # its parent's, on the way to being its own
        ("stop_tokens", "i4"),
        ("last_token", "f8"),  # when it ended
    ],
    align=True,
)

# One row per KV block. Block 0 is vLLM's null block: the ends of the free queue are its neighbours. Behind the GPU's
# blocks come the slots of the tiers, if there are any. Where requests have several sequences a row is a block of the
# tree of their texts instead (groups.py): prev is the one before it, references counts the sequences and blocks behind
# it, and next is a link of rows that are free.
BLOCK = np.dtype(
    [
        ("hash", "i8"),  # of this text and all before, 0 if none
        ("prev", "i4"),  # neighbours in the free queue, least recently used first
        ("next", "i4"),
        ("step", "i4"),  # in which it became full
        ("references", "i4"),  # requests that hold it
        ("chain", "i4"),  # the next block of the same bucket, 0 if none
        ("bucket", "i4"),  # not of this block: the first one whose hash ends in this row's number
    ],
    align=True,
)

NUM_BUCKETS = 1 << 14  # of the hash table of nodes, at most: few enough to stay in a processor's cache

# One row per node of the radix tree (radix.py). Row 0 is the root; the ends of the ring are its neighbours.
NODE = np.dtype(
    [
        ("key", "i8"),  # of its parent and its first block of text
        ("used", "i8"),  # when it was last: a count of uses
        ("parent", "i4"),
        ("num_blocks", "i4"),
        ("locks", "i4"),  # requests that hold it, or a node below it
        ("request", "i4"),  # whose text this is, from this segment and offset on
        ("segment", "i4"),
        ("offset", "i4"),
        ("prev", "i4"),  # neighbours among those that nobody holds, least recently used first
        ("next", "i4"),
        ("chain", "i4"),  # the next node of the same bucket, 0 if none
        ("bucket", "i4"),  # not of this node: the first one whose key ends in this row's number
    ],
    align=True,
)

CORRECTION = (7, 7)
"""knots of an attention price's correction: log2 of sequences or tokens, log2 of keys or pairs per one of them"""

# One row per attention kind of the model (full, window, ...): seconds per unit of each sum, all layers of the kind.
# law.py makes times of them.
ATTENTION_PRICE = np.dtype(
    [
        ("window", "i8"),  # 0 = full attention, else keys visible to a query; < 0: those of its chunk of so many
        ("decode_kv", "f8"),  # s per visible decode key (KV bytes at achieved bandwidth)
        ("decode_activations", "f8"),  # s per decoding sequence
        ("decode_compute", "f8"),  # s per visible decode key (FLOPs at achieved rate)
        ("decode_ranks", "f8"),  # among which decodes are dealt out, each whole on one; below 2: they are not
        ("decode_fixed", "f8"),  # s per step that has a decode
        ("decode_softness", "f8"),
        ("decode_axes", "f8", (4,)),  # first knot over work, knots per unit of it, and the same over keys
        ("decode_grid", "f8", CORRECTION),  # ln of what the time is multiplied with
        ("prefill_kv", "f8"),  # s per prefill key
        ("prefill_activations", "f8"),  # s per prefill token
        ("prefill_compute", "f8"),  # s per query-key pair
        ("prefill_query", "f8"),  # s per prefill token (FLOPs beyond those of its pairs)
        ("prefill_tile", "f8"),  # s per query tile
        ("prefill_fixed", "f8"),
        ("prefill_softness", "f8"),
        ("prefill_axes", "f8", (4,)),
        ("prefill_grid", "f8", CORRECTION),
        ("mixed_kv", "f8"),  # s per visible decode key more if the step also prefills ...
        ("mixed_growth", "f8"),  # and further s per key for each key that the decodes see ...
        ("mixed_limit", "f8"),  # up to so many s per key
        ("mixed_sequence", "f8"),  # s per decode more ...
        ("mixed_tile", "f8"),  # ... and further s for each query tile of a prefill beside it
    ],
    align=True,
)

# One row per replica: how its scheduler behaves, as ..knobs declares it. Runtime values, never types.
KNOBS = np.dtype(knobs.record(group=MAX_ATTENTION_KINDS, tier=len(TIERS)), align=True)

# One row per replica: its clock, its queue of requests to come, its sums over time.
REPLICA = np.dtype(
    [
        ("now", "f8"),
        ("device_free", "f8"),  # when the device can start the next step
        ("latest_end", "f8"),  # end of the step started last: a pipeline does not overtake itself
        ("last_end", "f8"),  # end of the step processed last
        ("in_flight", "i4"),
        ("num_empty", "i4"),  # steps among them in which nothing is (batch_queue)
        ("oldest_step", "i4"),  # ring index of the oldest step in flight
        ("blocked", "i4"),  # the schedule at `now` came out empty: wait for a completion, or for something to change
        ("num_reserved", "i4"),  # requests that hold blocks and do not run: before they are admitted, or held
        ("front_end", "f8"),  # when the API server is done with the request that it took last
        ("pending_head", "i4"),  # requests in order of arrival: visible later ...
        ("unsent_head", "i4"),  # ... and from here on not yet sent by the client
        ("pending_tail", "i4"),
        ("outstanding", "i4"),  # sent and not finished
        ("num_finished", "i4"),  # completed, rejected or aborted
        ("num_matched", "i4"),  # tokens of the request asked about last that its prefix cache has ...
        ("num_matched_below", "i4"),  # ... and with its tiers
        ("num_steps", "i8"),
        ("next_loaded", "f8"),  # when the next load in the background ends, while nothing else can go on
        ("wave", "i8"),  # num_steps when it last had nothing to do
        ("coasts", "i8"),  # the step from which on it may coast again
        ("looked", "i8"),  # num_steps when the scheduler looked for new requests last
        ("num_preemptions", "i8"),
        ("num_copied", "i8"),  # blocks swapped out or in
        ("num_block_copies", "i8"),  # blocks copied since another sequence wrote to them too
        ("given_up_time", "f8"),  # request-seconds of groups that were rejected after they were sent
        ("load_time", "f8"),  # of blocks brought back from the tiers
        ("num_scheduled_tokens", "i8"),
        ("num_drafts", "i8"),  # verified, and ...
        ("num_accepted", "i8"),  # ... accepted
        ("num_wasted_tokens", "i8"),  # scheduled for a request that had already ended (async scheduling)
        ("busy_time", "f8"),
        ("last_change", "f8"),  # of `outstanding`
        ("outstanding_time", "f8"),  # integral of `outstanding` over time: Little's law
        ("last_observed", "f8"),
        ("running_time", "f8"),  # integrals up to last_observed
        ("waiting_time", "f8"),
        ("block_time", "f8"),
        ("shared_time", "f8"),  # of blocks saved
        ("occupied_time", "f8"),  # while anything ran
        (
            "token_time",
            "f8",
        ),  # of tokens that blocks hold, of those that pieces will hold, of blocks asked for in pieces
        ("final_time", "f8"),
        ("asked_time", "f8"),
        ("stranded_time", "f8"),  # of blocks free while a request waited that only lacked one piece
        ("peak_running", "i4"),
        ("peak_blocks", "i4"),
        ("time_by_resource", "f8", (len(RESOURCES),)),
    ],
    align=True,
)

NUM_FINGERS = 4096  # into a queue that is ordered by urgency: 32 bits of it

# One row per rank of a replica: vLLM's scheduler and its KV pool.
SCHEDULER = np.dtype(
    [
        ("num_running", "i4"),
        ("num_waiting", "i4"),
        ("waiting_head", "i4"),
        ("waiting_tail", "i4"),
        ("free_blocks", "i4"),
        ("identified", "i4"),  # blocks have an identity, since something may be found again; -1: before the first step
        ("unshared", "i4"),  # requests share no text, so that only who was preempted can find a block again
        ("num_tables", "i4"),  # block tables of a request
        ("table_stride", "i4"),  # most blocks in each
        ("free_table", "i4"),  # first free row of block tables that was used before, or -1
        ("num_used_tables", "i4"),  # rows that were ever used
        ("evictable_blocks", "i4"),  # of the free ones: those that the radix tree fills with text
        ("num_nodes", "i4"),  # rows of nodes that were ever used
        ("free_node", "i4"),  # first free row that was used before, or 0
        ("num_uses", "i8"),  # of the tree
        ("hit_node", "i4"),  # the node with which the text looked up last ends
        ("hit_blocks", "i4"),  # of the request looked up last
        ("idle_hit_blocks", "i4"),  # those among them that nobody holds
        ("awaited", "i8"),  # the first hash that was missing
        ("fresh_block", "i4"),  # the first that was never taken, from which on all are free
        ("num_first", "i4"),  # free blocks at the head of the queue that are given out before fresh ones
        ("blocked_request", "i4"),  # the request that the admission gate turned away and nothing helped since, or -1
        ("blocked_need", "i4"),  # blocks that it needs
        ("new_token_ratio", "f8"),
        ("batch_is_full", "i4"),  # somebody did not fit, and nobody has left since
        ("num_refreshes", "i4"),  # steps that looked for prompts in order of arrival
        # the step being made
        ("step", "i4"),  # its number
        ("token_budget", "i4"),  # tokens that it can still take
        ("prefill_threshold", "i4"),  # most tokens of one request, 0 for no limit
        ("num_entries", "i4"),  # requests in it
        ("preempted", "i4"),  # somebody was
        ("begun", "i4"),  # a load in the background has begun in this schedule
        ("recount", "i4"),  # ... who was in it
        ("num_unscheduled", "i4"),  # how many were, for the request that lacked memory last
        ("num_running_entries", "i4"),  # of them: those that ran before
        ("prefill_running", "i4"),  # one of those is still a prompt
        ("prefilled", "i4"),  # a prompt, or a piece of one, is in it
        ("swapped_in", "i4"),  # somebody was
        ("promised_blocks", "i4"),  # that running requests are still to get, where the engine reserves to completion
        ("num_decoding", "i4"),  # that ran before it and whose prompt is computed
        ("expected_tokens", "f8"),  # that those are expected to generate, and what its prompts reserve
        ("step_tokens", "i4"),  # of the blocks that its prompts took
        ("set_aside", "i4"),  # of its budget, not used: for who decodes, and to fill blocks up
        ("admits", "i4"),  # it looks for prompts
        ("num_scheduled", "i4"),  # sequences in it
        ("num_verified", "i4"),  # drafts in it
        ("num_drafting", "i4"),  # sequences that sample in it and so draft
        ("draft_passes", "i4"),  # of the drafter after its first
        ("num_tokens", "i4"),
        ("free_cpu_blocks", "i4"),
        ("num_block_copies", "i4"),  # blocks copied within the device since the last step
        ("num_forks", "i4"),  # sequences beyond one of each running request
        ("num_forked", "i4"),  # and of each entry of the step being made
        ("num_given_up", "i4"),  # waiting requests that are to be rejected
        ("free_tree_block", "i4"),  # of the trees of groups: the first free row that was used before, or 0
        ("num_tree_blocks", "i4"),  # rows that were ever used by them
        ("defers_prefills", "i4"),  # until a later step, see knobs.prefill_schedule_interval
        ("capacity_bound", "i4"),  # the last step that did not left some waiting
        ("load_end", "f8"),  # when the link to the host has brought what was asked for in the background
        ("copy_time", "f8"),  # of blocks swapped out or in, or brought back, since the last step ...
        ("load_time", "f8"),  # ... and of those brought back
        ("tier_hits", "i4", (len(TIERS),)),  # blocks of the request looked up last that each tier has
        ("num_shared", "i4"),  # blocks saved: holders of each block beyond its first
        ("num_pieces", "i4"),  # of memory given out, where it is given out in pieces
        ("held_tokens", "i8"),  # computed, of all requests that hold blocks
        ("final_tokens", "i8"),  # of requests that hold pieces: what these will have held in the end
        ("asked_blocks", "i8"),  # for which there are pieces
    ],
    align=True,
)

# Sums of the step being made, one row per rank and attention kind.
SUMS = np.dtype(
    [
        ("num_decodes", "i8"),
        ("decode_keys", "i8"),
        ("more_queries", "i8"),  # of decodes that verify drafts, beyond one each
        ("more_pairs", "i8"),  # their query-key pairs beyond decode_keys
        ("prefill_tokens", "i8"),
        ("prefill_keys", "i8"),
        ("prefill_pairs", "i8"),
        ("query_tiles", "i8"),
        ("num_prefills", "i8"),
        ("draft_keys", "i8"),  # of those that draft, before their drafts
    ],
    align=True,
)

# Where a replica's price stands in the flat table of seconds.
PRICE = np.dtype(
    [
        ("linear", "i8"),  # offset of the seconds by number of new tokens
        ("head", "i8"),  # offset of the seconds by number of scheduled sequences
        ("shared", "i8"),  # offset of the seconds by the mean of all ranks' new tokens, -1 for none
        ("slow", "f8"),  # what every step's seconds are multiplied with: 1 unless a failure makes the replica slow
        ("issue_share", "f8"),  # of a step's latency after which the next step may start: 1 without pipeline stages
        ("num_kinds", "i8"),
        # of drafting, -1 for none: seconds by new tokens, by sequences that draft, and by these for each further pass
        ("draft_first", "i8"),
        ("draft_once", "i8"),
        ("draft_following", "i8"),
        ("num_draft_kinds", "i8"),
        ("first_attends", "i8"),
    ],
    align=True,
)
