"""The memory of one GPU as its engine divides it, and hence the number of KV blocks. In vLLM's way:

    KV cache = total x gpu_memory_utilization - weights - non-torch - peak activation [- CUDA graphs, since 0.21]

The CUDA context is taken before vLLM looks, so it comes out of what gpu_memory_utilization leaves free. Bytes.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from infersim.config.engine import ResolvedEngine
from infersim.config.errors import InputError
from infersim.config.parallelism import Parallelism
from infersim.models.architecture import Attention, Layer, Linear, Model, MoE, counted

from .activations import activation_terms
from .collectives import joined
from .formats import Kernels, matrix_bytes
from .partition import Partition, partition
from .placement import Placement
from .sharding import check_modelled, pipeline_stages, problems, rank_layer
from .steptime import capture_sizes

GIB = 2.0**30
MAX_BLOCKS = 2**31 - 1  # the compiled engine's integers
VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE

# Memory that is not PyTorch's and appears while vLLM starts: libraries, and NCCL's buffers under tensor parallelism.
# Start-up logs: "0.07 GiB for non-torch memory" (0.10.2 on H100, 0.26 on 16 GB), "0.21 GiB" (0.10.2, 4 x L40S, PCIe),
# "0.95 GiB" (0.2x, 4 x GB200) and "non_torch_memory takes 0.93GiB" (0.8, 8 x A100, NVLink).
NON_TORCH, NON_TORCH_PCIE, NON_TORCH_LINK = 0.07 * GIB, 0.21 * GIB, 0.94 * GIB

# A captured graph's own memory. Start-up log of 0.26: 51 piecewise and 35 full graphs took 0.40 GiB.
COMPRESSED_BLOCK = 256  # tokens of a block of DeepSeek-V4 (vLLM)
CUDA_GRAPH = 0.40 * GIB / (51 + 35)


@dataclass(frozen=True)
class KVGroup:
    """Layers that share block tables: `tables` tables of one kind, each for Memory.layers_per_table layers."""

    window: int
    """keys that a layer keeps, 0: all, 1: a state in their stead"""
    tables: int


@dataclass(frozen=True)
class Memory:
    """The waterfall of one GPU, in bytes: usable = weights + adapter + overhead + activation + cuda_graph + kv, up to a
    rest smaller than a block (or what num_gpu_blocks_override leaves)."""

    total_bytes: float
    usable_bytes: float
    weights_bytes: float
    activation_bytes: float
    activation_terms: dict[str, float]
    """what is alive at the peak of vLLM's profile run"""
    cuda_graph_bytes: float
    overhead_bytes: float
    kv_bytes: float
    """of all blocks"""
    block_size: int
    """tokens"""
    block_bytes: float
    num_gpu_blocks: int
    """vLLM's count, the null block included"""
    kv_bytes_per_token: float
    """on this GPU, windows not applied"""
    state_bytes: float
    """of one sequence on this GPU, however long it is (linear attention)"""
    kv_groups: tuple[KVGroup, ...]
    layers_per_table: int
    max_concurrency: float
    """sequences of max_model_len that fit"""
    adapter_bytes: float = 0.0
    """slots for LoRA adapters"""


def memory_waterfall(placement: Placement, engine: ResolvedEngine) -> Memory:
    """What each part of one GPU's memory holds. InputError if the model does not fit, with what would make it fit."""
    check_modelled(placement)
    memory = _waterfall(placement, engine)
    if problem := _does_not_fit(placement, engine, memory):
        raise InputError(problem + _remedy(placement, engine))
    return memory


def longest_sequence(placement: Placement, engine: ResolvedEngine) -> int:
    """The largest max_model_len, in tokens and up to engine.max_model_len, whose one sequence fits the KV cache.

    What vLLM's `--max-model-len auto` finds. InputError if none does.
    """
    check_modelled(placement)
    longest = _longest(placement, engine)
    if longest == 0:
        memory_waterfall(placement, replace(engine, max_model_len=1))
    return longest


def _longest(placement: Placement, engine: ResolvedEngine) -> int:
    """`longest_sequence`, or 0 if not even one token fits."""
    memory = _waterfall(placement, engine)  # the same for every max_model_len

    def too_long(length: int) -> bool:
        return bool(_does_not_fit(placement, replace(engine, max_model_len=length), memory))

    if not too_long(engine.max_model_len):
        return engine.max_model_len
    return bisect_left(range(1, engine.max_model_len), True, key=too_long)


def _waterfall(placement: Placement, engine: ResolvedEngine) -> Memory:
    """Of the pipeline stage that has the fewest blocks: vLLM gives all stages as many."""
    stages = [
        _stage(placement, engine, first, last)
        for first, last in pipeline_stages(placement.model.num_layers, placement.parallelism.pipeline)
    ]
    return min(stages, key=lambda memory: (memory.num_gpu_blocks, -memory.weights_bytes))


def _stage(placement: Placement, engine: ResolvedEngine, first: int, last: int) -> Memory:
    """The waterfall of a GPU that holds layers first .. last - 1."""
    hardware, parallelism, tensor = placement.hardware, placement.parallelism, placement.parallelism.tensor
    weights = weight_bytes(placement, first, last)
    captures = engine.count_cuda_graph_memory and not engine.enforce_eager
    graphs = _num_graphs(engine) * CUDA_GRAPH if captures else 0.0
    overhead = NON_TORCH
    if tensor > 1 or parallelism.token_ranks > 1:
        overhead = NON_TORCH_LINK if joined(hardware, tensor) else NON_TORCH_PCIE
    given = engine.kv_cache_memory_bytes
    usable = math.ceil(hardware.memory_usable * (1.0 if given else engine.gpu_memory_utilization))
    as_vllm = Partition(usable, activation_terms(placement, engine), graphs, overhead)
    parts = partition(hardware.memory_usable, weights, as_vllm, parallelism, engine)
    left = given or parts.usable - weights - parts.overhead - sum(parts.activations.values()) - parts.graphs

    layers: Counter[Attention] = Counter()
    for layer, count in counted(placement.model.layers[first:last]).items():
        if not layer.attention.kv_shared:  # another layer keeps its keys
            layers[rank_layer(layer, parallelism).attention] += count
    width = placement.kv_bytes
    kinds: Counter[int] = Counter()
    for attention, count in layers.items():
        kinds[_kept(attention)] += count
    layers_per_table = min(kinds.values())  # kv_cache_utils: one size for all, the smallest kind decides
    groups = tuple(KVGroup(window, -(-count // layers_per_table)) for window, count in kinds.items())
    bytes_of = {a: placement.key_bytes(a) / parallelism.context + a.index_bytes_per_token for a in layers}
    state = max(attention.state_bytes(placement.activation_bytes) for attention in layers)
    token_bytes = max(bytes_of.values())
    # a state takes one block of its layer: attention's blocks are made large enough (vLLM, HybridAttentionMambaModel)
    block_size = engine.block_size
    if state and token_bytes:
        block_size *= max(1, math.ceil(state / (token_bytes * block_size)))
    block_bytes = max(token_bytes * block_size, state) * layers_per_table
    if any(attention.kind == "compressed" for attention in layers):
        block_size = max(block_size, COMPRESSED_BLOCK)
        groups, block_bytes, bytes_of = _compressed_groups(layers, block_size, width)
        layers_per_table = 1
    blocks = engine.num_gpu_blocks_override or min(max(0, math.floor(left / block_bytes)), MAX_BLOCKS)
    return Memory(
        total_bytes=hardware.memory_usable,
        usable_bytes=parts.usable,
        weights_bytes=weights,
        activation_bytes=sum(parts.activations.values()),
        activation_terms=parts.activations,
        cuda_graph_bytes=parts.graphs,
        overhead_bytes=parts.overhead,
        kv_bytes=blocks * block_bytes,
        block_size=block_size,
        block_bytes=block_bytes,
        num_gpu_blocks=blocks,
        kv_bytes_per_token=sum(bytes_of[attention] * count for attention, count in layers.items()),
        state_bytes=sum(a.state_bytes(placement.activation_bytes) * count for a, count in layers.items()),
        kv_groups=groups,
        layers_per_table=layers_per_table,
        max_concurrency=blocks / _blocks_of_longest(groups, block_size, parallelism, engine),
    )


def _compressed_groups(
    layers: Counter[Attention], block_size: int, width: float
) -> tuple[tuple[KVGroup, ...], float, dict[Attention, float]]:
    """DeepSeek-V4's caches: one table of all layers' entries, and as many for the newest keys of all layers as those
    are larger; a block of either has the same bytes. Also the bytes per token of each layer's entries."""
    bytes_of = {
        a: a.entry_bytes(width) / a.compress_ratio + a.index_bytes_per_token if a.compress_ratio else 0.0
        for a in layers
    }
    entries = sum(bytes_of[a] * count for a, count in layers.items())
    newest = sum(a.entry_bytes(width) * count for a, count in layers.items())
    window = next(iter(layers)).window
    if not entries:
        return (KVGroup(window, 1),), newest * block_size, bytes_of
    return (KVGroup(0, 1), KVGroup(window, math.ceil(newest / entries))), entries * block_size, bytes_of


def _kept(attention: Attention) -> int:
    """Keys that a layer keeps: 0 all, 1 a state in their stead; those of a chunk are held like those of a window."""
    return 1 if attention.kind == "linear" else attention.window


def weight_bytes(placement: Placement, first: int = 0, last: int | None = None) -> float:
    """Bytes of the parameters of layers first .. last - 1 on one rank, with what stands before the first and behind
    the last, and of the rotary table beside them (vLLM's 14.99 GiB for Llama-3.1-8B).

    Embedding and LM head are cut by rows of the vocabulary, padded to a multiple of 64; everything that tensor
    parallelism does not cut is whole on every rank. Quantised matrices count with their scales, all else in 16 bits.
    """
    model, parallelism, tensor = placement.model, placement.parallelism, placement.parallelism.tensor
    last = model.num_layers if last is None else last
    chosen, plain = Kernels(placement), placement.activation_bytes
    width = model.embedding_size or model.hidden_size
    rows = math.ceil(model.vocab_size / math.lcm(VOCAB_PADDING, tensor)) * math.lcm(VOCAB_PADDING, tensor) // tensor
    positions = model.embedding_params - model.vocab_size * width
    head = model.lm_head_params - model.vocab_size * width if model.lm_head_params else 0  # its bias, if any
    has_first, has_last = first == 0, last == model.num_layers
    params: float = (rows * width + positions) * has_first if model.embedding_params else 0
    params += model.vision.num_params / tensor if model.vision and has_first else 0  # vLLM cuts it like the rest
    if has_last:
        tied_elsewhere = not model.lm_head_params and not has_first  # a tied table is on the first and the last stage
        params += rows * width * (bool(model.lm_head_params) or tied_elsewhere) + head // tensor + model.other_params
    stack = model.layers[first:last] + (model.encoder_layers if has_first else ())
    layers = counted(stack).items()
    # cos and sin per position, half a head each, one table for all layers with rotary positions
    rotary = {a.qk_rope_head_dim or a.head_dim for a in (layer.attention for layer, _ in layers) if a.rope}
    params += model.max_position_embeddings * sum(rotary)
    matrices = sum(_layer_bytes(rank_layer(layer, parallelism), layer, model, chosen, plain) * n for layer, n in layers)
    return params * plain + matrices


def _layer_bytes(layer: Layer, whole: Layer, model: Model, chosen: Kernels, plain: float) -> float:
    """Bytes of one rank's part of a layer."""
    h, attention = model.hidden_size, layer.attention
    size = (layer.norm_params + attention.vector_params) * plain

    def stored(group: str, linears: Iterable[Linear]) -> float:
        pieces = (piece for linear in linears for piece in chosen.split(layer, group, linear))
        return sum(matrix_bytes(linear, kernel, plain) for linear, kernel in pieces)

    size += sum(linear.num_params for linear in layer.beside) * plain
    for part in (attention, layer.cross_attention):
        size += stored("attention", part.linears(h)) if part else 0
    if not isinstance(layer.mlp, MoE):
        return size + stored("mlp", layer.mlp.linears(h))
    assert isinstance(whole.mlp, MoE)
    moe, kernel = layer.mlp, chosen.of(layer, "experts")
    size += whole.mlp.router(h).num_params * plain + h * moe.shared_gate * plain
    size += moe.num_experts * sum(matrix_bytes(linear, kernel, plain) for linear in moe.expert_linears(h))
    size += sum(linear.num_params for linear in moe.projections(h)) * plain
    return size + stored("shared", moe.shared.linears(h) if moe.shared else ())


def _num_graphs(engine: ResolvedEngine) -> int:
    """Piecewise graphs for every capture size, full graphs for those that decodes alone can reach."""
    sizes = capture_sizes(engine)
    return len(sizes) + int((sizes <= engine.max_num_seqs).sum())


def _blocks_of_longest(
    groups: tuple[KVGroup, ...], block_size: int, parallelism: Parallelism, engine: ResolvedEngine
) -> int:
    """Blocks that one sequence of max_model_len needs; a window holds its keys, a step's tokens, or those of all steps
    in flight, and a block more; a state that is cached a second one, the newest kept (vLLM's
    MambaSpec.max_memory_usage_bytes, mode align).

    A buddy allocator gives powers of two.
    """
    blocks, steps = 0, (2 if engine.async_scheduling else parallelism.pipeline) if engine.windows_by_processed else 1
    for group in groups:
        tokens = engine.max_model_len if group.window != 1 else 1
        if group.window > 1:
            tokens = min(tokens, group.window - 1 + steps * engine.max_num_batched_tokens)
        more = 1 if group.window > 1 and tokens < engine.max_model_len else 0
        more += group.window == 1 and engine.enable_prefix_caching
        blocks += group.tables * (math.ceil(tokens / block_size) + more)
    return 1 << (blocks - 1).bit_length() if engine.allocator == "buddy" else blocks


def _does_not_fit(placement: Placement, engine: ResolvedEngine, memory: Memory) -> str:
    """Why vLLM would refuse to start, with the numbers; empty if it would start."""
    model, hardware = placement.model.name, placement.hardware.name
    fixed = memory.weights_bytes + memory.overhead_bytes + memory.activation_bytes + memory.cuda_graph_bytes
    given = engine.kv_cache_memory_bytes or 0.0
    if fixed + given > memory.usable_bytes:
        share = "" if given else f" ({engine.gpu_memory_utilization:g} of {_gib(memory.total_bytes)})"
        return (
            f"model: {model} does not fit {hardware}: it needs {_gib(fixed + given)} per GPU (weights"
            f" {_gib(memory.weights_bytes)}, activations {_gib(memory.activation_bytes)}, other"
            f" {_gib(memory.overhead_bytes + memory.cuda_graph_bytes)}"
            f"{f', kv_cache_memory_bytes {_gib(given)}' if given else ''})"
            f" and there are {_gib(memory.usable_bytes)}{share}"
        )
    need = _blocks_of_longest(memory.kv_groups, memory.block_size, placement.parallelism, engine) + 1  # the null block
    if need > memory.num_gpu_blocks and engine.num_gpu_blocks_override:
        return (
            f"engine.max_model_len: one sequence of {engine.max_model_len} tokens needs {need} KV blocks, vLLM's null"
            f" block included, and num_gpu_blocks_override is {engine.num_gpu_blocks_override}"
        )
    if need > memory.num_gpu_blocks and given:
        return (
            f"engine.kv_cache_memory_bytes: one sequence of {engine.max_model_len} tokens needs"
            f" {need * memory.block_bytes:,.0f} bytes per GPU (got {given:,.0f})"
        )
    if need > memory.num_gpu_blocks:
        return (
            f"engine.max_model_len: one sequence of {engine.max_model_len} tokens needs"
            f" {_gib(need * memory.block_bytes)} of KV cache per GPU and {_gib(memory.kv_bytes)} are left on"
            f" {hardware}"
        )
    return ""


def _remedy(placement: Placement, engine: ResolvedEngine) -> str:
    """The mildest single change with which it fits, as the end of an error line."""

    def fits(placement: Placement = placement, **knobs) -> bool:
        changed = replace(engine, **knobs)
        return not _does_not_fit(placement, changed, _waterfall(placement, changed))

    if longest := _longest(placement, engine):
        return f"; must be at most {longest}"
    if engine.max_num_seqs > 64 and fits(max_num_seqs=64):
        return "; engine.max_num_seqs 64 would fit"
    if engine.gpu_memory_utilization < 0.95 and fits(gpu_memory_utilization=0.95):
        return "; engine.gpu_memory_utilization 0.95 would fit"
    for tensor in (2, 4, 8, 16, 32, 64):
        parallelism = placement.parallelism.model_copy(update={"tensor": tensor, "moe_tensor": tensor})
        wider = replace(placement, parallelism=parallelism)
        if tensor > placement.parallelism.tensor and not problems(wider) and fits(wider):
            return f"; parallelism.tensor {tensor} would fit"
    return "; it needs more or larger GPUs, or a smaller model"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
