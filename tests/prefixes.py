"""Prompts that share text, for a replica that keeps blocks: by hand, and a real trace whose reuse is published."""

from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import numpy as np
from shared import SHARED

from infersim.config.workload import Workload
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests, own_text

MOONCAKE = SHARED / "data" / "traces" / "mooncake_conversation.jsonl.gz"
BLOCK = 512  # tokens per hash id of the trace


def fleet(num_gpu_blocks: int, block_size: int = 4, step_time: float = 1.0, **knobs) -> Fleet:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **knobs}
    linear = np.zeros((values["max_num_batched_tokens"] + 1, len(state.RESOURCES)))
    linear[1:, 0] = step_time
    head = np.zeros((values["max_num_seqs"] + 1, len(state.RESOURCES)))
    cost = StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE))
    record = make_knobs(block_size=block_size, num_gpu_blocks=num_gpu_blocks, enable_prefix_caching=1, **values)
    return Fleet([ReplicaSpec(record, cost)], shares_text=True)


def cached(fleet: Fleet, arrival, prompts, outputs, pieces, names=None) -> list[int]:
    """Tokens that each request found; pieces: what each prompt begins with, as (name, tokens)."""
    flat = [piece for row in pieces for piece in row]
    counts = np.array([len(row) for row in pieces])
    segments = (np.cumsum(counts) - counts, counts, [name for name, _ in flat], [length for _, length in flat])
    fleet.submit(0, arrival, prompts, outputs, outputs, names=names, segments=segments)
    fleet.advance()
    assert (fleet.requests["status"] == state.COMPLETED).all()
    return fleet.requests["num_cached_tokens"].tolist()


def load_mooncake() -> Requests:
    """The trace's 12,031 requests."""
    return build_requests(Workload(trace=str(MOONCAKE)), 0, Path())


def lru_hit_rate(requests, capacity: float) -> float:
    """The published algorithm: match leading ids against a set, then touch all ids of the request, then evict."""
    kept, hits = OrderedDict(), 0
    for begin, end in pairwise(requests.segment_offsets):
        ids = requests.segment_ids[begin:end].tolist()
        matched = next((i for i, one in enumerate(ids) if one not in kept), len(ids))
        hits += matched
        for one in ids:
            kept[one] = None
            kept.move_to_end(one)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits / len(requests.segment_ids)


def serve_trace(requests, num_gpu_blocks: int, block_size: int, **knobs) -> Fleet:
    """vLLM's rules on the trace, on a device so fast that requests come one at a time."""
    engine = fleet(
        num_gpu_blocks, block_size, step_time=1e-6, max_num_seqs=256, max_num_batched_tokens=8192,
        max_model_len=131072, reserve_full_isl=1, **knobs,
    )  # fmt: skip
    outputs = requests.output_tokens
    engine.submit(
        0, requests.arrival, requests.prompt_tokens, outputs, outputs, names=own_text(requests.request_id),
        segments=requests.segments,
    )  # fmt: skip
    engine.advance()
    return engine
