"""Speculative decoding in the loop: which drafts are accepted, what verifying them attends to, what drafting takes."""

import numpy as np

from .correction import correction
from .draws import FIRST, GOLDEN, S11, S27, S30, S31, SECOND, TO_UNIT
from .njit import compiled, inlined


@inlined
def uniform(key, position):
    """In [0, 1): the draw of a key at a position (draws.uniforms)."""
    z = np.uint64(key) + np.uint64(position + 1) * GOLDEN
    z = (z ^ (z >> S30)) * FIRST
    z = (z ^ (z >> S27)) * SECOND
    z = z ^ (z >> S31)
    return np.float64(z >> S11) * TO_UNIT


@inlined
def num_accepted(request, accepted, depth, drafts):
    """How many of its drafts the target accepts; remembers whether it was all of them."""
    most = min(drafts, depth)
    row = (2 * request.acceptance + request.all_accepted) * depth
    u = uniform(request.key, request.num_output_tokens)
    n = 0
    for i in range(most):  # the chances fall; a sum has no branch to mispredict
        n += np.int64(u < accepted[row + i])
    request.all_accepted = np.int8(n == most)
    return n


@compiled
def add_verification(sums, attention, num_kinds, start, n):
    """Add a decoding sequence that brings n - 1 drafts: its keys are read once and met by n queries."""
    for kind in range(num_kinds):
        window = attention[kind].window
        row = sums[kind]
        most, pairs = 0, 0
        for position in range(start, start + n):
            keys = position + 1
            if 0 < window < keys:
                keys = window
            elif window < 0:
                keys = position % -window + 1
            pairs += keys
            most = max(most, keys)
        if window > 0:  # the first query's oldest key to the last one's own
            most = min(start + n, window - 1 + n)
        row.num_decodes += 1
        row.decode_keys += most
        row.more_queries += n - 1
        row.more_pairs += pairs - most


@compiled
def row_time(row, keys, queries, pairs):
    """Seconds of one kind's decode attention."""
    memory = row.decode_kv * keys + row.decode_activations * queries
    compute = row.decode_compute * pairs
    overlap = (memory - compute) * (memory - compute) + 4.0 * row.decode_softness * memory * compute
    return row.decode_fixed + 0.5 * (memory + compute + np.sqrt(overlap))


@compiled
def draft_attention_time(sums, scheduler, attention, num_kinds, first_attends):
    """Seconds of the drafter's own attention in a step: over the step's tokens, and again in each further pass.

    attention: rows whose window is the number of the target's kind that sees what they see.
    """
    total = 0.0
    for kind in range(num_kinds):
        row = attention[kind]
        s = sums[row.window]
        if first_attends:
            if s.num_decodes > 0:
                queries = s.num_decodes + s.more_queries
                c = correction(row.decode_axes, row.decode_grid, s.num_decodes, s.decode_keys / s.num_decodes)
                total += c * row_time(row, s.decode_keys, queries, s.decode_keys + s.more_pairs)
            if s.prefill_tokens > 0:
                memory = row.prefill_kv * s.prefill_keys + row.prefill_activations * s.prefill_tokens
                compute = row.prefill_compute * s.prefill_pairs + row.prefill_query * s.prefill_tokens
                compute += row.prefill_tile * s.query_tiles
                overlap = (memory - compute) * (memory - compute) + 4.0 * row.prefill_softness * memory * compute
                mean = s.prefill_pairs / s.prefill_tokens
                c = correction(row.prefill_axes, row.prefill_grid, s.prefill_tokens, mean)
                total += c * (row.prefill_fixed + 0.5 * (memory + compute + np.sqrt(overlap)))
        if scheduler.num_drafting > 0 and scheduler.draft_passes > 0:
            keys, queries = scheduler.draft_keys, scheduler.num_drafting
            c = correction(row.decode_axes, row.decode_grid, queries, keys / queries)
            total += scheduler.draft_passes * c * row_time(row, keys, queries, keys)
    return total
