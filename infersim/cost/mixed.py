"""What decodes cost more in a step that also prefills.

FlashAttention 2 lets the query heads of a group read their shared keys together, and cuts long sequences up, only in
steps whose queries are all of one token; beside a longer query every head reads the keys by itself, and the L2 cache
returns a part: less, the more keys are in flight. Every head of every sequence is then also given as many thread
blocks as the longest query has tiles, all but one of which find nothing to do. FlashAttention 3 and TensorRT-LLM's
kernels (Hopper, data-centre Blackwell) pack the heads in any step.
"""

from typing import NamedTuple

import numpy as np

from .placement import Placement
from .sharding import rank_layer


class Beside(NamedTuple):
    """What a layer's decodes cost beside a prefill.

    least: keys read over those read alone, at few keys; growth: more of it per byte of keys and values that all decodes
    see; head, block: seconds per query head of a decode, and per tile of engine.state.QUERY_TILE queries of each.
    """

    least: float
    growth: float
    head: float
    block: float


# From vLLM 0.19's attention of Llama-3.1-8B (4 heads to a group; at least 8 decodes of at least 256 keys): least mean
# error over chunks of 16, 64, 256 and 1024 tokens; on the other chunks the median error is 5 and 7 %, where adding up
# prefill and decode errs by 43 and 28 % (casys-kaist/LLMServingSim).
READING = {
    "rtx-4090": Beside(1.64, 2.59e-10, 28e-9, 5.9e-9),
    "rtx-pro-6000": Beside(1.23, 2.79e-10, 5e-9, 3.6e-9),
}
LIKE = {"ampere": "rtx-4090", "ampere-ga10x": "rtx-4090", "ada": "rtx-4090", "blackwell-gb202": "rtx-pro-6000"}
"""generations whose attention is FlashAttention 2, and the device of theirs, or next to theirs, that was measured"""


def add_mixed(attention: np.ndarray, placement: Placement) -> None:
    """Fill in what the rows of an ATTENTION_PRICE cost more in mixed steps; at most one reading for each head."""
    model, hardware = placement.model, placement.hardware
    one = rank_layer(model.layers[0], placement.parallelism).attention
    device = hardware.name if hardware.name in READING else LIKE.get(hardware.generation)
    if device is None or one.kind in ("mla", "linear") or one.num_heads == one.num_kv_heads:
        return
    cost = READING[device]
    attention["mixed_kv"] = attention["decode_kv"] * (cost.least - 1.0)
    bytes_per_key = one.kv_elements_per_token * placement.kv_bytes
    attention["mixed_growth"] = attention["decode_kv"] * cost.growth * bytes_per_key
    attention["mixed_limit"] = attention["decode_kv"] * (one.num_heads / one.num_kv_heads - 1.0)
    for row in attention:
        heads = one.num_heads * sum(abs(layer.attention.window) == abs(row["window"]) for layer in model.layers)
        row["mixed_sequence"], row["mixed_tile"] = heads * cost.head, heads * cost.block
