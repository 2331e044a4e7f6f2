"""Early exit in closed form: a mixture over exits, one input at a time; and what a batch leaves of it."""

from collections.abc import Sequence

import numpy as np


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy in nats over the last axis: a branch lets an input exit when it is below its threshold (BranchyNet)."""
    p = np.clip(probabilities, 1e-300, 1.0)
    return -(p * np.log(p)).sum(axis=-1)


def expected_cost(shares: Sequence[float], segments: Sequence[float], heads: Sequence[float]) -> float:
    """Mean cost of an input: the layers up to its exit, and every exit head on the way.

    shares: of inputs that leave at each exit, the last being the end; segments: cost of the layers between one exit and
    the next; heads: cost of each early exit's head, one fewer than segments (the last segment contains its own).
    """
    to_exit = np.cumsum(np.asarray(segments, float) + np.append(heads, 0.0))
    return float(np.dot(shares, to_exit))


def gain(shares: Sequence[float], segments: Sequence[float], heads: Sequence[float]) -> float:
    """Cost without early exits over cost with them, one input at a time."""
    return sum(segments) / expected_cost(shares, segments, heads)


def needed_share(depth: float, head: float, backfill: float = 0.0) -> float:
    """Share of inputs that must leave at a single exit before it gains; above 1: it never does.

    depth: cost of the layers up to the exit; head: of its head, which every input pays; backfill: what an exited token
    costs still (keys and values of the layers it skipped); all as shares of the full cost.
    """
    saved = 1 - depth - backfill
    return head / saved if saved > 0 else float("inf")


def share_of_steps_all_exit(share: float, batch: int) -> float:
    """Chance that every sequence of a batch leaves at the exit: the steps in which a batch that waits for all gains."""
    return share**batch


def wait_for_all_gain(share: float, depth: float, head: float, batch: int) -> float:
    """Time of full passes over that of a batch that stops at its exit only when all of its sequences may."""
    return 1 / (1 + head - share_of_steps_all_exit(share, batch) * (1 - depth))
