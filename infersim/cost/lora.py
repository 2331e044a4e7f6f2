"""What LoRA adapters take of a GPU's memory and of a step."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from infersim.config.engine import ResolvedEngine
from infersim.config.errors import InputError
from infersim.engine.compiled.state import ACTIVATIONS, LAUNCH
from infersim.engine.price import StepCost
from infersim.models.architecture import MoE

from .efficiency import launch
from .memory import Memory
from .placement import Placement
from .sharding import pipeline_stages, rank_layer
from .steptime import padded_tokens

FUSED = {"qkv_proj": 3, "gate_up_proj": 2}
"""matrices that vLLM fused of so many, each of which has an A of its own (QKVParallelLinearWithLoRA)"""


def adapter_bytes(placement: Placement, rank: int) -> float:
    """Bytes of one adapter on one GPU, of the stage that has most of it.

    Each matrix has A [rank, inputs] and B [outputs, rank] in the model's own precision. Tensor parallelism cuts the B
    of a column-parallel matrix and the A of a row-parallel one; the other one is whole on every rank (vLLM without
    --fully-sharded-loras). InputError for layers whose adapters are not modelled.
    """
    model, parallelism = placement.model, placement.parallelism
    if any(isinstance(layer.mlp, MoE) or layer.attention.kind in ("mla", "linear") for layer in model.layers):
        raise InputError(
            f"lora: adapters of experts, latent and linear attention are not modelled yet, which {model.name} has;"
            " must be null"
        )
    stages = pipeline_stages(model.num_layers, parallelism.pipeline)
    return max(
        rank * placement.activation_bytes * sum(
            n * _widths(rank_layer(layer, parallelism), model.hidden_size)
            for layer, n in Counter(model.layers[first:last]).items()
        )
        for first, last in stages
    )  # fmt: skip


def _widths(layer, hidden_size: int) -> int:
    """Inputs and outputs of all matrices of one rank's layer, which are the parameters of an adapter of rank 1."""
    linears = (*layer.attention.linears(hidden_size), *layer.mlp.linears(hidden_size))
    return sum(FUSED.get(linear.name, 1) * linear.inputs + linear.outputs for linear in linears)


def with_adapters(memory: Memory, size: float, engine: ResolvedEngine | None = None) -> Memory:
    """The waterfall with the adapters' slots in it, which vLLM takes when it loads the model: off the KV cache, unless
    the engine was told how large that is."""
    told = engine is not None and (engine.num_gpu_blocks_override or engine.kv_cache_memory_bytes)
    blocks = memory.num_gpu_blocks - (0 if told else math.ceil(size / memory.block_bytes))
    if blocks < 2:
        raise InputError(f"lora: slots of {size / 2**30:.2f} GiB leave no KV cache; max_loras must be smaller")
    return replace(
        memory,
        adapter_bytes=size,
        kv_bytes=blocks * memory.block_bytes,
        num_gpu_blocks=blocks,
        max_concurrency=memory.max_concurrency * blocks / memory.num_gpu_blocks,
    )


def with_adapter_kernels(cost: StepCost, placement: Placement, engine: ResolvedEngine) -> StepCost:
    """The price of steps that run the adapters: two kernels beside each matrix, into the rank and out of it, at a
    launch each; and a token's time in them (engine.lora_token_time), whatever the rank is up to some 64."""
    h = placement.model.hidden_size
    beside = [
        linear for layer in placement.model.layers for linear in (*layer.attention.linears(h), *layer.mlp.linears(h))
    ]
    matrices, kernels = sum(FUSED.get(linear.name, 1) for linear in beside), 2 * len(beside)
    tokens, captured = padded_tokens(engine)
    times, linear = launch(placement.hardware), cost.linear.copy()
    linear[:, LAUNCH] += kernels * np.where(captured, times.graph, times.eager)
    linear[:, ACTIVATIONS] += matrices * engine.lora_token_time * tokens
    linear[0] = 0.0
    return replace(cost, linear=linear)
