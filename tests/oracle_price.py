"""The oracle's price of a step, written plainly: every sequence counted, every term added up."""

from collections.abc import Callable
from math import ceil, frexp

QUERY_TILE = 128


class Sums:
    """What a step's price may depend on. scheduled: (s, n) per sequence, n new tokens after s computed ones; verified:
    how many of the n are drafts; contexts: tokens of each sequence that drafts after the step.

    A sequence with one token that is no draft decodes, one with more prefills. The new token at position p (from 0)
    sees min(p + 1, window) keys, itself included; window 0 is full attention, -c that of chunks of c keys.
    query_tiles: tiles of 128 queries,
    rounded up per prefill.
    """

    def __init__(self, scheduled: list[tuple[int, int]], verified=None, contexts=(), draft_passes: int = 0):
        verified = verified or [0] * len(scheduled)
        own = [n - v for (_, n), v in zip(scheduled, verified, strict=True)]
        self.decodes = [(s, n) for (s, n), o in zip(scheduled, own, strict=True) if o == 1]
        self.prefills = [(s, n) for (s, n), o in zip(scheduled, own, strict=True) if o > 1]
        self.num_tokens = sum(n for _, n in scheduled)
        self.num_logits = len(scheduled) + sum(verified)
        self.decode_queries = sum(n for _, n in self.decodes)
        self.contexts, self.draft_passes = contexts, draft_passes
        self.num_decodes = len(self.decodes)
        self.num_prefills = len(self.prefills)
        self.prefill_tokens = sum(n for _, n in self.prefills)
        self.query_tiles = sum(ceil(n / QUERY_TILE) for _, n in self.prefills)

    def decode_keys(self, window: int = 0) -> int:
        """Keys that any of a decode's n queries sees, summed."""
        if window < 0:
            return sum(max(visible_keys(s + i, window) for i in range(n)) for s, n in self.decodes)
        return sum(visible_keys(s + n - 1, window and window + n - 1) for s, n in self.decodes)

    def decode_pairs(self, window: int = 0) -> int:
        """Query-key pairs of the decodes."""
        return sum(visible_keys(s + i, window) for s, n in self.decodes for i in range(n))

    def prefill_pairs(self, window: int = 0) -> int:
        """Query-key pairs of the prefills: sum over i in 0..n-1 of min(s + i + 1, window)."""
        return sum(visible_keys(s + i, window) for s, n in self.prefills for i in range(n))

    def prefill_keys(self, window: int = 0) -> int:
        """Keys that any query of a chunk sees, the first query's oldest to the last: min(s + n, window + n - 1)."""
        return sum(visible_keys(s, window) + n - 1 for s, n in self.prefills)


def visible_keys(position: int, window: int) -> int:
    if window < 0:  # the keys of its chunk
        return position % -window + 1
    return min(position + 1, window) if window else position + 1


# Seconds (issue, latency) of a step: until the device can start the next one, until this one's tokens are known.
Price = Callable[[Sums], tuple[float, float]]


def price_from_step_cost(cost, draft=None) -> Price:
    """The price that an infersim.engine.price.StepCost stands for, and a DraftCost with it: everything added up."""

    def smooth_max(memory, compute, softness):
        if softness in (0, 1):  # without rounding: they overlap perfectly, or not at all
            return memory + compute if softness else max(memory, compute)
        return (memory + compute + ((memory - compute) ** 2 + 4 * softness * memory * compute) ** 0.5) / 2

    def log2(x):  # exact at powers of two, a straight line between them
        mantissa, exponent = frexp(x)
        return exponent - 1 + (2 * mantissa - 1)

    def corrected(seconds, axes, grid, work, keys):
        first, per_unit, first_keys, keys_per_unit = axes
        rows, columns = len(grid), len(grid[0])
        x = min(max((log2(work) - first) * per_unit, 0), rows - 1)
        y = min(max((log2(keys) - first_keys) * keys_per_unit, 0), columns - 1)
        total = 0.0
        for i in range(rows):  # every knot counts as far as it is nearer than 1
            for j in range(columns):
                total += max(0.0, 1 - abs(x - i)) * max(0.0, 1 - abs(y - j)) * grid[i][j]
        even, odd = 12 + (total / 2) ** 2, 3 * total
        return seconds * ((even + odd) / (even - odd)) ** 2  # e**total, as the engine has it

    def decode(c, sums, window):
        share = -(-sums.num_decodes // max(1, int(c["decode_ranks"]))) / sums.num_decodes  # of the rank with most
        memory = share * (c["decode_kv"] * sums.decode_keys(window) + c["decode_activations"] * sums.decode_queries)
        pairs, n = share * sums.decode_pairs(window), sums.num_decodes
        time = c["decode_fixed"] + smooth_max(memory, c["decode_compute"] * pairs, c["decode_softness"])
        return corrected(time, c["decode_axes"], c["decode_grid"], n, sums.decode_keys(window) / n)

    def prefill(c, sums, window):
        memory = c["prefill_kv"] * sums.prefill_keys(window) + c["prefill_activations"] * sums.prefill_tokens
        n, pairs = sums.prefill_tokens, sums.prefill_pairs(window)
        compute = c["prefill_compute"] * pairs + c["prefill_query"] * n + c["prefill_tile"] * sums.query_tiles
        time = c["prefill_fixed"] + smooth_max(memory, compute, c["prefill_softness"])
        return corrected(time, c["prefill_axes"], c["prefill_grid"], n, pairs / n)

    def drafting(sums: Sums) -> float:
        """A pass over the step's tokens, then as many as wanted over the sequences that draft: one token each."""
        drafting_now = len(sums.contexts)
        seconds = float(draft.first[sums.num_tokens] + draft.once[drafting_now])
        passes = sums.draft_passes if drafting_now else 0
        seconds += sums.draft_passes * float(draft.following[drafting_now])
        for kind in draft.attention:
            c = {name: kind[name].tolist() for name in kind.dtype.names}
            window = c["window"]
            if draft.first_attends and sums.num_decodes:
                seconds += decode(c, sums, window)
            if draft.first_attends and sums.num_prefills:
                seconds += prefill(c, sums, window)
            keys = sum(visible_keys(tokens - 1, window) for tokens in sums.contexts)
            memory = c["decode_kv"] * keys + c["decode_activations"] * drafting_now
            following = c["decode_fixed"] + smooth_max(memory, c["decode_compute"] * keys, c["decode_softness"])
            if drafting_now:
                grid = c["decode_axes"], c["decode_grid"]
                seconds += passes * corrected(following, *grid, drafting_now, keys / drafting_now)
        return seconds

    def price(sums: Sums) -> tuple[float, float]:
        seconds = float(sum(cost.linear[sums.num_tokens])) + float(sum(cost.head[sums.num_logits]))
        if draft is not None:
            seconds += drafting(sums)
        for kind in cost.attention:
            c = {name: kind[name].tolist() for name in kind.dtype.names}
            if sums.num_decodes:
                seconds += decode(c, sums, c["window"])
            if sums.num_decodes and sums.num_prefills:
                keys = sums.decode_keys(c["window"])
                seconds += min(c["mixed_kv"] + c["mixed_growth"] * keys, c["mixed_limit"]) * keys
                tiles = sums.query_tiles / sums.num_prefills
                seconds += (c["mixed_sequence"] + c["mixed_tile"] * tiles) * sums.num_decodes
            if sums.num_prefills:
                seconds += prefill(c, sums, c["window"])
        return seconds * cost.issue_share, seconds

    return price
