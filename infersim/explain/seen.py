"""Which keys the tokens of requests see, all together."""

import numpy as np

from infersim.engine.compiled.law import chunked_pairs


def decode_keys(prompt: np.ndarray, output: np.ndarray, window: int = 0) -> np.ndarray:
    """Keys that the decode tokens of each request see, all together: the sum of min(context, window) over its tokens
    but the first; with a window below 0 the keys of its own chunk of so many; 0: all."""
    steps = output - 1
    if window < 0:
        return chunked_pairs(prompt + output, -window) - chunked_pairs(prompt + 1, -window)
    if not window:
        return steps * prompt + steps * (steps + 1) // 2
    inside = np.clip(window - prompt, 0, steps)
    return inside * prompt + inside * (inside + 1) // 2 + (steps - inside) * window


def prompt_pairs(tokens: np.ndarray, window: int) -> np.ndarray:
    """Query-key pairs of so many tokens from the start, as layers of the window see them."""
    if window < 0:
        return chunked_pairs(tokens, -window)
    inside = np.minimum(tokens, window) if window else tokens
    return inside * (inside + 1) // 2 + (tokens - inside) * inside
