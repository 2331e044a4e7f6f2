"""What a step's attention is priced by: sums over its sequences. Compiled."""

from .njit import compiled
from .state import QUERY_TILE


@compiled
def windowed_pairs(start, n, window):
    """Sum over the n queries at positions start.. of the keys visible to each: min(position + 1, window)."""
    full = min(max(window - start, 0), n)  # the first `full` queries see everything before them
    return full * start + full * (full + 1) // 2 + (n - full) * window


@compiled
def chunked_pairs(end, chunk):
    """Sum over the queries at positions 0..end-1 of the keys visible to each, those of its own chunk up to itself."""
    whole = end // chunk
    rest = end - whole * chunk
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


@compiled
def add_to_sums(sums, attention, num_kinds, start, n):
    """Add n new tokens after `start` computed ones to the step's sums, for each attention kind."""
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
