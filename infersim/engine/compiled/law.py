"""The formulas of a step's time: the only place where they stand.

Plain functions. The engine compiles them (pricing.py); everything else calls them as they are, with records that have
the same names: a row of ATTENTION_PRICE as `row`, of SUMS as `s` (both state.py, where the units are). Times are
seconds, of all layers of a kind together. Only `smooth_max`, `log2`, `chunked_pairs` and the two demands also take
arrays.
"""

import numpy as np

from .state import ACTIVATIONS, COMPUTE, CORRECTION, KV, LAUNCH, QUERY_TILE


def smooth_max(a, b, softness):
    """Time of activities of a and b seconds: from max(a, b) at softness 0 (perfect overlap) to a + b at 1 (none)."""
    return 0.5 * (a + b + np.sqrt((a - b) * (a - b) + 4.0 * softness * a * b))


# --- what measured kernels deviate from their law ---------------------------------------------------------------------
def log2(x):
    """Exact at powers of two and linear between them (at most 0.09 below): a float's bits, read as an integer."""
    return np.float64(x).view(np.int64) * 2.0**-52 - 1023.0


def place(x, first, knots_per_unit, knots):
    """Where log2 x stands among a grid's knots."""
    return min(max((log2(x) - first) * knots_per_unit, 0.0), knots - 1.0)


def exponential(x):
    """e**x, within 0.01 % for |x| up to 1: the square of the [2/2] Pade approximant of half of it."""
    half = 0.5 * x
    even, odd = 12.0 + half * half, 6.0 * half
    root = (even + odd) / (even - odd)
    return root * root


def correction(axes, grid, work, mean):
    """What a kernel's time is multiplied with at so much work, each unit with so many keys: e to what the grid has,
    linear between its knots and constant beyond them."""
    x = place(work, axes[0], axes[1], CORRECTION[0])
    y = place(mean, axes[2], axes[3], CORRECTION[1])
    i, j = min(int(x), CORRECTION[0] - 2), min(int(y), CORRECTION[1] - 2)
    x, y = x - i, y - j
    low = grid[i, j] + (grid[i, j + 1] - grid[i, j]) * y
    high = grid[i + 1, j] + (grid[i + 1, j + 1] - grid[i + 1, j]) * y
    return exponential(low + (high - low) * x)


# --- what a sequence adds to a step's sums ----------------------------------------------------------------------------
def windowed_pairs(start, n, window):
    """Sum over the n queries at positions start.. of the keys visible to each: min(position + 1, window)."""
    full = min(max(window - start, 0), n)  # the first `full` queries see everything before them
    return full * start + full * (full + 1) // 2 + (n - full) * window


def chunked_pairs(end, chunk):
    """Sum over the queries at positions 0..end-1 of the keys visible to each, those of its own chunk up to itself."""
    whole = end // chunk
    rest = end - whole * chunk
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def add_to_sums(sums, attention, num_kinds, start, n):
    """Add n new tokens after `start` computed ones to the step's sums, for each attention kind; one is a decode."""
    for kind in range(num_kinds):
        window = attention[kind].window
        row = sums[kind]
        if n == 1:
            keys = start + 1
            if 0 < window < keys:
                keys = window
            elif window < 0:
                keys = start % -window + 1
            row.num_decodes += 1
            row.decode_keys += keys
        else:
            keys = start + n
            if window > 0:
                keys = min(keys, window - 1 + n)
                row.prefill_pairs += windowed_pairs(start, n, window)
            elif window < 0:
                keys = start % -window + n
                row.prefill_pairs += chunked_pairs(start + n, -window) - chunked_pairs(start, -window)
            else:
                row.prefill_pairs += n * start + n * (n + 1) // 2
            row.prefill_keys += keys
            row.prefill_tokens += n
            row.query_tiles += (n + QUERY_TILE - 1) // QUERY_TILE
            row.num_prefills += 1


def add_verification(sums, attention, num_kinds, start, n):
    """Add a decoding sequence that brings n - 1 drafts: its keys are read once and met by n queries."""
    for kind in range(num_kinds):
        window = attention[kind].window
        row = sums[kind]
        most, pairs = start + n, n * start + n * (n + 1) // 2
        if window != 0:
            most, pairs = 0, 0
            for position in range(start, start + n):
                keys = position % -window + 1 if window < 0 else min(position + 1, window)
                pairs += keys
                most = max(most, keys)
        if window > 0:  # the first query's oldest key to the last one's own
            most = min(start + n, window - 1 + n)
        row.num_decodes += 1
        row.decode_keys += most
        row.more_queries += n - 1
        row.more_pairs += pairs - most


def add_drafts(sums, attention, num_kinds, tokens):
    """Add a sequence that drafts after so many tokens: the keys that the last of these sees."""
    for kind in range(num_kinds):
        window = attention[kind].window
        keys = tokens
        if 0 < window < tokens:
            keys = window
        elif window < 0:
            keys = (tokens - 1) % -window + 1
        sums[kind].draft_keys += keys


# --- attention --------------------------------------------------------------------------------------------------------
def decode_demand(row, s):
    """Of decodes, verified drafts included: seconds of moving keys and values, of moving activations, of computing; of
    the rank that has most of them."""
    share = np.ceil(s.num_decodes / row.decode_ranks) / s.num_decodes if row.decode_ranks > 1.0 else 1.0
    kv = share * row.decode_kv * s.decode_keys
    activations = share * row.decode_activations * (s.num_decodes + s.more_queries)
    return kv, activations, share * row.decode_compute * (s.decode_keys + s.more_pairs)


def prefill_demand(row, s):
    """Of prefills: seconds of moving keys and values, of moving activations, of computing."""
    compute = row.prefill_compute * s.prefill_pairs + row.prefill_query * s.prefill_tokens
    compute += row.prefill_tile * s.query_tiles
    return row.prefill_kv * s.prefill_keys, row.prefill_activations * s.prefill_tokens, compute


def decode_correction(row, s):
    return correction(row.decode_axes, row.decode_grid, s.num_decodes, s.decode_keys / s.num_decodes)


def prefill_correction(row, s):
    return correction(row.prefill_axes, row.prefill_grid, s.prefill_tokens, s.prefill_pairs / s.prefill_tokens)


def kernel_time(kv, activations, compute, softness, fixed, corrected, split):
    """Seconds of one kernel; adds them to split: to the side that binds it, and the fixed time to launch."""
    memory = kv + activations
    time = corrected * smooth_max(memory, compute, softness)
    fixed *= corrected
    if memory < compute:
        split[COMPUTE] += time
    elif memory > 0.0:
        share = time / memory
        split[KV] += share * kv
        split[ACTIVATIONS] += share * activations
    split[LAUNCH] += fixed
    return time + fixed


def mixed_time(row, s):
    """What decodes cost more beside prefills (cost/mixed.py)."""
    time = min(row.mixed_kv + row.mixed_growth * s.decode_keys, row.mixed_limit) * s.decode_keys
    return time + (row.mixed_sequence + row.mixed_tile * s.query_tiles / s.num_prefills) * s.num_decodes


def attention_time(attention, num_kinds, sums, split):
    """Seconds of a step's attention, by resource added to split."""
    total = 0.0
    for kind in range(num_kinds):
        row = attention[kind]
        s = sums[kind]
        if s.num_decodes > 0 and s.prefill_tokens > 0:
            mixed = mixed_time(row, s)
            split[KV] += mixed
            total += mixed
        if s.num_decodes > 0:
            kv, activations, compute = decode_demand(row, s)
            c = decode_correction(row, s)
            total += kernel_time(kv, activations, compute, row.decode_softness, row.decode_fixed, c, split)
        if s.prefill_tokens > 0:
            kv, activations, compute = prefill_demand(row, s)
            c = prefill_correction(row, s)
            total += kernel_time(kv, activations, compute, row.prefill_softness, row.prefill_fixed, c, split)
    return total


def draft_attention_time(attention, num_kinds, sums, first_attends, passes, sequences):
    """Seconds of a drafter's own attention: over the step's tokens, and in each further pass of those that draft.

    attention: rows whose window is the number of the target's kind that sees what they see (price.rows_of_kinds).
    """
    total = 0.0
    for kind in range(num_kinds):
        row = attention[kind]
        s = sums[row.window]
        if first_attends:
            if s.num_decodes > 0:
                kv, activations, compute = decode_demand(row, s)
                time = row.decode_fixed + smooth_max(kv + activations, compute, row.decode_softness)
                total += decode_correction(row, s) * time
            if s.prefill_tokens > 0:
                kv, activations, compute = prefill_demand(row, s)
                time = row.prefill_fixed + smooth_max(kv + activations, compute, row.prefill_softness)
                total += prefill_correction(row, s) * time
        if sequences > 0 and passes > 0:
            keys = s.draft_keys
            memory = row.decode_kv * keys + row.decode_activations * sequences
            time = row.decode_fixed + smooth_max(memory, row.decode_compute * keys, row.decode_softness)
            total += passes * correction(row.decode_axes, row.decode_grid, sequences, keys / sequences) * time
    return total


# --- the passes -------------------------------------------------------------------------------------------------------
def pass_time(linear, head, first, once, passes, following):
    """Seconds of a step but for attention: the target's linear layers and head; a drafter's pass over the step's
    tokens, what else it takes once, and its further passes."""
    return linear + head + first + once + passes * following
