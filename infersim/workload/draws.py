"""Random numbers by purpose, so that one kind of draw never shifts another."""

import numpy as np


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A stream of its own for each seed and purpose.

    Everything is drawn request by request from the start of a stream: the first n requests of a longer workload are the
    same draws, and arrivals stay when only lengths change.
    """
    key = tuple("/".join(map(str, purpose)).encode())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
