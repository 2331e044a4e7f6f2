"""Draws that depend on nothing but the run's seed, their purpose, the request's stable name and the output position.

Two runs that differ in a setting see the same draws, whatever the order in which requests are served. Compiled code
has the same hash (engine.speculation.uniform); this file does without the compiler.
"""

import numpy as np

GOLDEN, FIRST, SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
S30, S27, S31, S11 = (np.uint64(x) for x in (30, 27, 31, 11))
TO_UNIT = 2.0**-53


def uniforms(keys: np.ndarray, positions) -> np.ndarray:
    """f8[n]: `uniform` for u8[n] keys."""
    with np.errstate(over="ignore"):
        z = keys + (np.asarray(positions).astype("u8") + np.uint64(1)) * GOLDEN
        z = (z ^ (z >> S30)) * FIRST
        z = (z ^ (z >> S27)) * SECOND
        z = z ^ (z >> S31)
    return (z >> S11) * TO_UNIT


def make_keys(seed: int, purpose: str, names: np.ndarray) -> np.ndarray:
    """u8[n]: a key for each name (i8[n]) under this seed and purpose."""
    key = np.array([seed % 2**64], "u8")
    for byte in purpose.encode():
        key = (uniforms(key, byte) / TO_UNIT).astype("u8")
    return (uniforms(np.asarray(names, "i8").astype("u8") ^ (key << np.uint64(11)), 0) / TO_UNIT).astype("u8")
