"""The engine's state and tables as numpy structured dtypes: a handful of arrays that compiled code walks.

Times are seconds, memory is in KV blocks, lengths in tokens. Names are vLLM's.
"""

import numpy as np

# --- what a step's time is spent on -----------------------------------------------------------------------------------
RESOURCES = ("weights", "kv", "activations", "compute", "launch", "collectives", "host", "draft")
WEIGHTS, KV, ACTIVATIONS, COMPUTE, LAUNCH, COLLECTIVES, HOST, DRAFT = range(len(RESOURCES))

# --- request status ---------------------------------------------------------------------------------------------------
PENDING, WAITING, RUNNING, COMPLETED, REJECTED = range(5)
# why a request was rejected
PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN = 1, 2
REJECTION_REASONS = {
    PROMPT_TOO_LONG: "prompt does not fit max_model_len",
    OVER_MAX_MODEL_LEN: "prompt + max_tokens exceeds max_model_len",
}

# --- ITL histogram: logarithmic bins, a factor HISTOGRAM_RATIO wide, so a bin's geometric centre is within 0.5 % of
# every value in it (sqrt(1.01) = 1.00499). 1 us to 1e5 s.
HISTOGRAM_MIN, HISTOGRAM_RATIO = 1e-6, 1.01
HISTOGRAM_BINS = int(np.ceil(np.log(1e5 / HISTOGRAM_MIN) / np.log(HISTOGRAM_RATIO)))

QUERY_TILE = 128  # queries per tile of a prefill attention kernel (FlashAttention 2/3 block sizes 64-192)
MAX_ATTENTION_KINDS = 4

# One row per request of the whole fleet: input columns, running state, and the record that remains.
REQUEST = np.dtype(
    [
        ("arrival", "f8"),
        ("sent", "f8"),  # when the client sent it (arrival, or later under max_concurrency)
        ("scheduled", "f8"),  # first time it entered a step
        ("first_token", "f8"),
        ("last_token", "f8"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),  # what the model would generate; the scheduler does not look at it
        ("max_tokens", "i4"),
        ("num_computed_tokens", "i4"),
        ("num_output_tokens", "i4"),
        ("num_placeholders", "i4"),  # tokens in flight under async scheduling
        ("num_blocks", "i4"),  # KV blocks held
        ("num_preemptions", "i4"),
        ("next", "i4"),  # links of the waiting queue, -1 ends it
        ("prev", "i4"),
        ("replica", "i2"),
        ("rank", "i2"),  # the data-parallel rank of the replica that serves it
        ("status", "i1"),
        ("reason", "i1"),
    ],
    align=True,
)

# One row per attention kind of the model (full, window, ...): seconds per unit of each sum, all layers of the kind.
# decode  = fixed + (max-norm with exponent knee of) memory: kv*keys + activations*sequences, compute: flops*keys
# prefill = fixed + (...) memory: kv*keys + activations*tokens, compute: flops*pairs + tile*query_tiles
ATTENTION_PRICE = np.dtype(
    [
        ("window", "i8"),  # 0 = full attention, else keys visible to a query
        ("decode_kv", "f8"),  # s per visible decode key (KV bytes at achieved bandwidth)
        ("decode_activations", "f8"),  # s per decoding sequence
        ("decode_compute", "f8"),  # s per visible decode key (FLOPs at achieved rate)
        ("decode_fixed", "f8"),  # s per step that has a decode
        ("decode_knee", "f8"),
        ("prefill_kv", "f8"),  # s per prefill key
        ("prefill_activations", "f8"),  # s per prefill token
        ("prefill_compute", "f8"),  # s per query-key pair
        ("prefill_tile", "f8"),  # s per query tile
        ("prefill_fixed", "f8"),
        ("prefill_knee", "f8"),
    ],
    align=True,
)

# One row per replica: how its scheduler behaves (spec.engine.ResolvedEngine as numbers). Runtime values, never types.
KNOBS = np.dtype(
    [
        ("block_size", "i4"),
        ("num_gpu_blocks", "i4"),  # vLLM's count; block 0 is its null block, so one less is usable
        ("max_num_seqs", "i4"),
        ("max_num_batched_tokens", "i4"),
        ("max_model_len", "i4"),
        ("long_prefill_token_threshold", "i4"),  # 0 = off
        ("watermark_blocks", "i4"),
        ("steps_in_flight", "i4"),
        ("max_concurrency", "i4"),  # the client's, 0 = unlimited
        ("num_kv_groups", "i4"),
        ("kv_window", "i4", (MAX_ATTENTION_KINDS,)),  # 0 = full attention
        ("kv_multiplicity", "i4", (MAX_ATTENTION_KINDS,)),  # vLLM's groups of one kind; each has its own block table
        ("chunked_prefill", "i1"),
        ("skip_unfit_prefill", "i1"),  # 0.11: an unchunked prefill above the budget lets the next ones try
        ("long_prefill_needs_contention", "i1"),  # 0.33: the threshold applies only beside another request
        ("reserve_full_isl", "i1"),  # admission gate over the whole sequence
        ("async_scheduling", "i1"),
        ("host_step_time", "f8"),
        ("host_sequence_time", "f8"),
        ("host_request_time", "f8"),
    ],
    align=True,
)

# One row per replica: its clock, its queue of requests to come, its sums over time.
REPLICA = np.dtype(
    [
        ("now", "f8"),
        ("device_free", "f8"),  # when the device can start the next step
        ("last_end", "f8"),  # end of the step processed last
        ("in_flight", "i4"),
        ("oldest_step", "i4"),  # ring index of the oldest step in flight
        ("blocked", "i4"),  # the schedule at `now` came out empty: wait for a completion
        ("pending_head", "i4"),  # requests in order of arrival: visible later ...
        ("unsent_head", "i4"),  # ... and from here on not yet sent by the client
        ("pending_tail", "i4"),
        ("outstanding", "i4"),  # sent and not finished
        ("num_steps", "i8"),
        ("num_preemptions", "i8"),
        ("num_scheduled_tokens", "i8"),
        ("num_wasted_tokens", "i8"),  # scheduled for a request that had already ended (async scheduling)
        ("busy_time", "f8"),
        ("last_change", "f8"),  # of `outstanding`
        ("outstanding_time", "f8"),  # integral of `outstanding` over time: Little's law
        ("last_schedule", "f8"),
        ("running_time", "f8"),  # integrals from schedule to schedule
        ("waiting_time", "f8"),
        ("block_time", "f8"),
        ("peak_running", "i4"),
        ("peak_blocks", "i4"),
        ("time_by_resource", "f8", (len(RESOURCES),)),
    ],
    align=True,
)

# One row per rank of a replica: vLLM's scheduler and its KV pool.
SCHEDULER = np.dtype(
    [
        ("num_running", "i4"),
        ("num_waiting", "i4"),
        ("waiting_head", "i4"),
        ("waiting_tail", "i4"),
        ("free_blocks", "i4"),
        ("num_scheduled", "i4"),  # sequences in the step being made
        ("num_tokens", "i4"),
    ],
    align=True,
)

# Sums of the step being made, one row per rank and attention kind.
SUMS = np.dtype(
    [
        ("num_decodes", "i8"),
        ("decode_keys", "i8"),
        ("prefill_tokens", "i8"),
        ("prefill_keys", "i8"),
        ("prefill_pairs", "i8"),
        ("query_tiles", "i8"),
    ],
    align=True,
)

# Where a replica's price stands in the flat table of seconds.
PRICE = np.dtype(
    [
        ("linear", "i8"),  # offset of row 0
        ("head", "i8"),
        ("issue_share", "f8"),  # of a step's latency after which the next step may start: 1 without pipeline stages
        ("num_kinds", "i8"),
    ],
    align=True,
)

# Events that `advance` can stop at (a bit mask), and the row it leaves for each.
PREFILL_DONE, FINISHED, TURNED_AWAY = 1, 2, 4
EVENT = np.dtype([("time", "f8"), ("request", "i4"), ("replica", "i4"), ("kind", "i4")], align=True)

# Sizes of the arrays, and what the caller asks for.
CALL = np.dtype(
    [
        ("until", "f8"),
        ("num_replicas", "i8"),
        ("ranks", "i8"),
        ("num_requests", "i8"),
        ("max_num_seqs", "i8"),  # the largest of all replicas: the stride of `running` and of the steps in flight
        ("steps_in_flight", "i8"),
        ("table_size", "i8"),
        ("num_gaps", "i8"),  # 0 = keep the histogram only
        ("event_mask", "i8"),
        ("max_events", "i8"),
        ("num_events", "i8"),
        ("stuck_replica", "i8"),  # -1, or the replica that made no progress
    ],
    align=True,
)
