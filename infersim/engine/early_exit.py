"""A batch that decodes with early exits, launch by launch: what is left of one sequence's gain.

Segments of layers are cut by exits. A token leaves at the first exit where it is sure; its sequence then needs the
next one. Written plainly: thousands of launches are enough for a mean.
"""

from dataclasses import dataclass

import numpy as np

from .price import Depths

POLICIES = ("leave_alone", "wait_for_all", "rebatch")


@dataclass(frozen=True)
class DepthResult:
    """tokens_per_second over all sequences; depth: mean share of the layers' time that a token went through."""

    tokens_per_second: float
    depth: float
    mean_batch: float


def full_depth(depths: Depths, batch: int) -> float:
    """Tokens per second without exits: whole passes of `batch` sequences."""
    return batch / depths.segments[:, batch].sum()


def decode(
    depths: Depths, policy: str, batch: int, tokens: int, seed: int = 0, population: int = 0, min_batch: int = 0,
    max_wait: float = np.inf,
) -> DepthResult:  # fmt: skip
    """Decode until `tokens` tokens are out. batch: sequences of a launch at most.

    leave_alone: a token that is sure rides along to the end; wait_for_all: a pass ends at an exit where all of its
    tokens are sure; rebatch: sequences that go on are held at the exit until there are min_batch of them or the first
    has waited max_wait seconds, while others of the population (default: twice the batch) start their next token.
    """
    random = np.random.default_rng(seed)
    if policy == "rebatch":
        return _rebatch(depths, batch, tokens, random, population or 2 * batch, min_batch or batch, max_wait)
    exits = len(depths.heads)
    fixed = random.choice(exits + 1, batch, p=depths.shares) if depths.per_request else None
    clock, out, deep = 0.0, 0, 0.0
    layers = depths.segments[:, batch].cumsum() / depths.segments[:, batch].sum()
    while out < tokens:
        leaves = fixed if fixed is not None else random.choice(exits + 1, batch, p=depths.shares)
        last = int(leaves.max()) if policy == "wait_for_all" else exits
        for i in range(last + 1):
            clock += depths.segments[i, batch] + (depths.heads[i, batch] if i < exits else 0.0)
        if last < exits:
            clock += depths.backfill[last] * batch
        deep += layers[last] * batch
        out += batch
    return DepthResult(out / clock, deep / out, float(batch))


def _rebatch(
    depths: Depths, batch: int, tokens: int, random: np.random.Generator, population: int, min_batch: int,
    max_wait: float,
) -> DepthResult:  # fmt: skip
    exits = len(depths.heads)
    fixed = random.choice(exits + 1, population, p=depths.shares) if depths.per_request else None
    leaves = np.zeros(population, "i8")
    held: list[list[tuple[float, int]]] = [[(0.0, q) for q in range(population)]] + [[] for _ in range(exits)]
    clock, out, deep, launches, launched = 0.0, 0, 0.0, 0, 0
    layers = depths.segments[:, batch].cumsum() / depths.segments[:, batch].sum()
    while out < tokens:
        ready = [
            i for i in range(exits, 0, -1)
            if held[i] and (len(held[i]) >= min_batch or clock - held[i][0][0] >= max_wait)
        ]  # fmt: skip
        segment = ready[0] if ready else (0 if held[0] else max(range(1, exits + 1), key=lambda i: len(held[i])))
        going, held[segment] = held[segment][:batch], held[segment][batch:]
        sequences = [q for _, q in going]
        if segment == 0:
            drawn = random.choice(exits + 1, len(sequences), p=depths.shares)
            leaves[sequences] = fixed[sequences] if fixed is not None else drawn
        n = len(sequences)
        clock += depths.segments[segment, n] + (depths.heads[segment, n] if segment < exits else 0.0)
        launches, launched = launches + 1, launched + n
        for q in sequences:
            if leaves[q] <= segment:
                out += 1
                deep += layers[segment]
                clock += depths.backfill[segment] if segment < exits else 0.0
                held[0].append((clock, q))
            else:
                held[segment + 1].append((clock, q))
    return DepthResult(out / clock, deep / out, launched / launches)
