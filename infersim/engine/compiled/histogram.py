"""The histogram of inter-token gaps."""

import numpy as np

# Each power of two is cut into 128 equal bins, read off a float's bits; a bin's centre is within
# 1/256 = 0.4 % of every value in it. From 2**-20 s (1 us) to 2**18 s (3 days); beyond, the first and last bin.
HISTOGRAM_SHIFT = 52 - 7
HISTOGRAM_FIRST = (1023 - 20) << 7
HISTOGRAM_BINS = 38 << 7


def histogram_centres() -> np.ndarray:
    """Centre of every bin of the ITL histogram in seconds: f8[HISTOGRAM_BINS], relative error at most 0.4 %."""
    edges = (np.arange(HISTOGRAM_FIRST, HISTOGRAM_FIRST + HISTOGRAM_BINS + 1) << HISTOGRAM_SHIFT).view("f8")
    return (edges[:-1] + edges[1:]) / 2
