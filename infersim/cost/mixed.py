"""What decodes cost more in a step that also prefills.

FlashAttention 2 lets the query heads of a group read their shared keys together, and cuts long sequences up, only in
steps whose queries are all of one token; beside a longer query every head reads the keys by itself, and the L2 cache
returns a part: less, the more keys are in flight. Every head of every sequence is then also given as many thread
blocks as the longest query has tiles, all but one of which find nothing to do. FlashAttention 3 and TensorRT-LLM's
kernels (Hopper, data-centre Blackwell) pack the heads in any step.
"""

import numpy as np

from infersim.config.hardware import BesidePrefill, Hardware
from infersim.config.published import generation_of, profile

from .placement import Placement
from .sharding import rank_layer


def beside_prefill(hardware: Hardware) -> BesidePrefill | None:
    """The device's own, or its generation's; None where kernels pack the heads in any step."""
    relative = generation_of(hardware).beside_prefill
    other = profile(relative) if relative else None
    return hardware.beside_prefill or (other.beside_prefill if other else None)


def add_mixed(attention: np.ndarray, placement: Placement) -> None:
    """Fill in what the rows of an ATTENTION_PRICE cost more in mixed steps; at most one reading for each head."""
    model, cost = placement.model, beside_prefill(placement.hardware)
    one = rank_layer(model.layers[0], placement.parallelism).attention
    if cost is None or one.kind in ("mla", "compressed", "linear") or one.num_heads == one.num_kv_heads:
        return
    attention["mixed_kv"] = attention["decode_kv"] * (cost.least - 1.0)
    bytes_per_key = one.kv_elements_per_token * placement.kv_bytes
    attention["mixed_growth"] = attention["decode_kv"] * cost.growth * bytes_per_key
    attention["mixed_limit"] = attention["decode_kv"] * (one.num_heads / one.num_kv_heads - 1.0)
    for row in attention:
        heads = one.num_heads * sum(abs(layer.attention.window) == abs(row["window"]) for layer in model.layers)
        row["mixed_sequence"], row["mixed_tile"] = heads * cost.head, heads * cost.block
