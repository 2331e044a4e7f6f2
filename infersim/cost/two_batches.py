"""Two-batch overlap: a step runs as two halves, one of which computes while the other's tokens are exchanged."""

from dataclasses import replace

import numpy as np

from infersim.engine.compiled.state import COLLECTIVES, COMPUTE
from infersim.engine.price import StepCost

LEAST_TOKENS = 32
"""of a step that is split (vLLM's dbo_decode_token_threshold; steps with prompts need 512 there)"""
SENDING_SMS = 20
"""that compute nothing in such steps (vLLM's VLLM_DBO_COMM_SMS, DeepEP's num_sms; its low-latency kernels need none)"""


def with_two_batches(cost: StepCost, num_layers: int, slower: float = 1.0) -> StepCost:
    """The price of steps that are split. Exchange and computation of all layers take the longer of both times, and a
    half layer's part of the shorter one, at the ends, where nothing runs beside. slower: factor on what is computed,
    for the SMs that exchange."""
    if cost.shared is None:
        return cost
    tokens = np.arange(len(cost.linear))
    split = tokens >= LEAST_TOKENS
    low, high = np.where(split, tokens // 2, 0), np.where(split, tokens - tokens // 2, tokens)
    linear, shared = (table[low] + table[high] for table in (cost.linear, cost.shared))
    for table in (linear, shared):
        table[:, COMPUTE] *= np.where(split, slower, 1.0)
    sent = shared[:, COLLECTIVES]
    computed = linear.sum(-1) + shared.sum(-1) - sent
    shared[:, COLLECTIVES] -= np.where(split, np.minimum(sent, computed) * (1 - 1 / (2 * num_layers)), 0.0)
    return replace(cost, linear=linear, shared=shared)
