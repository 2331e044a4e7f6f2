"""Speculative decoding in the loop: which drafts are accepted."""

import numpy as np

from .draws import FIRST, GOLDEN, S11, S27, S30, S31, SECOND, TO_UNIT
from .njit import inlined


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
