"""How much of a GPU each engine gives to weights and KV cache, and what it keeps for the rest."""

from dataclasses import dataclass, field

from infersim.config.engine import ResolvedEngine
from infersim.config.parallelism import Parallelism

MIB = 2.0**20
GIB = 2.0**30


@dataclass(frozen=True)
class Partition:
    """Bytes: usable is what weights, KV cache and the parts named here share."""

    usable: float
    activations: dict[str, float] = field(default_factory=dict)
    graphs: float = 0.0
    overhead: float = 0.0


def largest_graph(total: float, parallelism: Parallelism) -> int:
    """SGLang's cuda_graph_max_bs on a GPU of `total` bytes (server_args.py; its tp has dp-attention's ranks too)."""
    several = parallelism.tensor * parallelism.attention_data >= 4
    rows = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512))
    return next((many if several else few for below, few, many in rows if total < below * GIB), 512)


def partition(
    total: float, weights: float, vllm: Partition, parallelism: Parallelism, engine: ResolvedEngine
) -> Partition:
    """The engine's own way to divide `total`. vllm: as vLLM would, which is also what the parts take anywhere.

    vLLM (gpu_worker.determine_available_memory): a share of all memory, less what a profile run takes. SGLang
    (memory_hook.py): mem_fraction_static is for weights and KV cache; unless it is given (as gpu_memory_utilization),
    all but 512 MB, 1.5 MB per token of a chunk, 1 GB per 8 GPUs, and 2 MB per sequence of the largest graph
    (`largest_graph`), at least 10 GB on GPUs above 60 GB. TensorRT-LLM (py_executor_creator):
    free_gpu_memory_fraction (gpu_memory_utilization) of what weights, activations and libraries leave.
    """
    share = engine.gpu_memory_utilization
    if engine.memory_division == "sglang":
        if engine.origin["gpu_memory_utilization"] == "user":
            return Partition(total, overhead=(1.0 - share) * total)
        graph = engine.max_cudagraph_capture_size or min(engine.max_num_seqs, largest_graph(total, parallelism))
        ranks = parallelism.tensor * parallelism.attention_data * parallelism.pipeline
        reserved = (512 + 1.5 * max(engine.max_num_batched_tokens, 2048) + 1024 * ranks / 8 + 2 * graph) * MIB
        return Partition(total, overhead=max(reserved, 10 * 1024 * MIB if total > 60 * GIB else 0.0))
    if engine.memory_division == "trtllm":
        fixed = weights + vllm.overhead + sum(vllm.activations.values())
        return Partition(fixed + share * max(total - fixed, 0.0), vllm.activations, 0.0, vllm.overhead)
    return vllm
