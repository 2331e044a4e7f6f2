"""What Python and the compiled loop hand to one another: a CALL, the arrays that it knows, and events."""

import numpy as np

from .histogram import HISTOGRAM_BINS
from .state import (
    ATTENTION_PRICE,
    BLOCK,
    KNOBS,
    MAX_ATTENTION_KINDS,
    NODE,
    NUM_FINGERS,
    PRICE,
    REPLICA,
    REQUEST,
    RESOURCES,
    SCHEDULER,
    SEGMENT,
    SEQUENCE,
    SUMS,
)

# Events that `advance` can stop at (a bit mask), and the row it leaves for each.
PREFILL_DONE, FINISHED, TURNED_AWAY = 1, 2, 4
EVENT = np.dtype([("time", "f8"), ("request", "i4"), ("replica", "i4"), ("kind", "i4")], align=True)

# What the compiled loop is asked to do: go on, one thing to one request at the moment `until`, or fill `due`.
ADVANCE, ABORT, RESERVE, RELEASE, MATCH, LOOK_AHEAD = range(6)

HORIZON = 64  # steps that are made at most without a look at each request
# All that the compiled loop reads and writes: name, type of an element, and shape, whose names are fields of CALL.
ARRAYS = {
    "replicas": (REPLICA, ("num_replicas",)),
    "schedulers": (SCHEDULER, ("num_schedulers",)),
    "knobs": (KNOBS, ("num_replicas",)),
    "prices": (PRICE, ("num_replicas",)),
    "table": ("f8", ("table_size",)),  # seconds
    "steps_priced": ("f8", ("table_size",)),  # how often each second was used, times how slow its replica was
    "attention": (ATTENTION_PRICE, ("num_replicas", MAX_ATTENTION_KINDS)),
    # of the drafters; window: the target's kind that sees the same
    "draft_attention": (ATTENTION_PRICE, ("num_replicas", MAX_ATTENTION_KINDS)),
    "plan": (
        "i4",
        ("num_replicas", "num_plans", 2),
    ),  # drafts of a sequence and further passes, by sequences in the step
    "accepted": ("f8", ("num_accepted",)),  # chances that at least 1, 2, ... drafts are accepted, row after row
    "sums": (SUMS, ("num_schedulers", MAX_ATTENTION_KINDS)),
    "scratch": ("f8", ("ranks", len(RESOURCES))),  # a rank's attention by resource, and its copies
    "due": ("f8", ("num_nodes_due",)),  # tournament tree of the replicas' next times: the earliest at 1, leaves last
    "requests": (REQUEST, ("num_requests",)),
    "segments": (SEGMENT, ("num_segments",)),  # what prompts begin with
    "sequences": (SEQUENCE, ("num_groups", "num_sequences")),  # of each request; one row if each is one
    "blocks": (BLOCK, ("num_schedulers", "num_blocks")),  # a power of two of at least the GPU's and the tiers'
    "nodes": (NODE, ("num_schedulers", "num_nodes")),  # a power of two of at least num_gpu_blocks
    # block tables of one request a row, and a link; or pieces
    "tables": ("i4", ("num_schedulers", "num_table_rows", "num_table_columns")),
    "hashes": ("i8", ("num_table_columns",)),  # of the blocks of a prompt that is matched against all replicas
    "fingers": ("i4", ("num_schedulers", NUM_FINGERS)),  # into the waiting queue, see queue.py
    "running": ("i4", ("num_schedulers", "max_num_seqs")),  # request rows in order of admission
    "steps": ("i4", ("num_schedulers", "steps_in_flight", "max_num_seqs")),  # entries of the steps in flight
    "tokens": ("i8", ("num_schedulers", "steps_in_flight", "max_num_seqs")),  # of each entry, see entries.py
    "counts": ("i4", ("num_schedulers", "steps_in_flight")),  # entries in each
    "step_end": ("f8", ("num_replicas", "steps_in_flight")),  # when each ends
    "histogram": ("i8", (HISTOGRAM_BINS,)),  # inter-token gaps
    "gaps": ("f4", ("num_gaps",)),  # every inter-token gap, if asked for
    "gap_offset": ("i8", ("num_gap_offsets",)),  # where a request's gaps start
    "growth": ("i4", (HORIZON,)),  # blocks that each of the next steps takes, see coasting.py
    "events": (EVENT, ("max_events",)),
}

# What the caller asks for, and where the arrays are and how large.
CALL = np.dtype(
    [
        ("command", "i8"),
        ("subject", "i8"),  # the request that the command is about
        ("done", "i8"),  # 0 if the command could not be carried out
        ("until", "f8"),
        ("num_replicas", "i8"),
        ("num_leaves", "i8"),  # the power of two that is no less
        ("num_nodes_due", "i8"),  # twice as many
        ("ranks", "i8"),
        ("num_schedulers", "i8"),  # of all replicas
        ("num_requests", "i8"),
        ("max_num_seqs", "i8"),  # the largest of all replicas: the stride of `running` and of the steps in flight
        ("num_plans", "i8"),  # one more
        ("steps_in_flight", "i8"),
        ("table_size", "i8"),
        ("num_segments", "i8"),
        ("num_groups", "i8"),  # rows of `sequences`
        ("num_sequences", "i8"),  # of each request
        ("num_blocks", "i8"),  # rows of `blocks`, 1 without prefix caching and groups
        ("num_nodes", "i8"),  # rows of `nodes`, 1 without radix trees
        ("num_table_rows", "i8"),
        ("num_table_columns", "i8"),
        ("num_gaps", "i8"),  # 0 = keep the histogram only
        ("num_gap_offsets", "i8"),
        ("event_mask", "i8"),
        ("depth", "i8"),  # most drafts that a step can accept, 0 without speculation
        ("num_accepted", "i8"),  # size of `accepted`
        ("max_events", "i8"),
        ("num_events", "i8"),
        ("stuck_replica", "i8"),  # -1, or the replica that made no progress
        ("addresses", "u8", (len(ARRAYS),)),
    ],
    align=True,
)
