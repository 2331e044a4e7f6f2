"""Techniques by the setting that turns them on: which side of T_decode = N_steps * T_step they are on, and whether
they change what the model says."""

from dataclasses import asdict, dataclass
from typing import Any

FEWER_BYTES, FEWER_STEPS, NEITHER = "fewer bytes per accepted token", "fewer steps per accepted token", "neither"


@dataclass(frozen=True)
class Technique:
    """setting: a dotted key, or the part of it that all keys of the technique begin with.

    side: what it lowers; mechanism: weights, KV, activations, packing, steps, depth, device or host; exact: whether
    the model's output distribution stays the same, None where it is another model.
    """

    setting: str
    name: str
    side: str
    mechanism: str
    exact: bool | None


TILED = "engine.attention"
"""what every engine does, so that no key turns it off"""
TECHNIQUES = (
    Technique("precision.weights", "weight format", FEWER_BYTES, "weights", False),
    Technique("precision.kv_cache", "KV cache format", FEWER_BYTES, "KV", False),
    Technique("precision.activations", "activation format", FEWER_BYTES, "activations", False),
    Technique("parallelism.tensor", "tensor parallelism", FEWER_BYTES, "weights", True),
    Technique("parallelism.pipeline", "pipeline parallelism", FEWER_BYTES, "weights", True),
    Technique("parallelism.attention_data", "data-parallel attention", FEWER_BYTES, "KV", True),
    Technique("parallelism.expert", "expert parallelism", FEWER_BYTES, "weights", True),
    Technique("parallelism.context", "context parallelism", FEWER_BYTES, "KV", True),
    Technique("engine.enable_prefix_caching", "prefix reuse", FEWER_BYTES, "KV", True),
    Technique("engine.prefix_cache", "prefix reuse", FEWER_BYTES, "KV", True),
    Technique("engine.max_num_seqs", "batch limit", FEWER_BYTES, "packing", True),
    Technique("engine.max_num_batched_tokens", "token budget", FEWER_BYTES, "packing", True),
    Technique("engine.block_size", "paged KV block size", FEWER_BYTES, "packing", True),
    Technique("engine.gpu_memory_utilization", "KV memory", FEWER_BYTES, "packing", True),
    Technique("engine.num_gpu_blocks_override", "KV memory", FEWER_BYTES, "packing", True),
    Technique("engine.scheduler_reserve_full_isl", "whole-prompt admission", FEWER_BYTES, "packing", True),
    Technique("engine.grammar_mask_time", "constrained decoding", NEITHER, "host", True),
    Technique("engine.jump_forward", "jump-forward decoding", FEWER_STEPS, "steps", True),
    Technique("engine.allocator", "allocation of KV memory", FEWER_BYTES, "packing", True),
    Technique("engine.reserve", "reservation of KV memory", FEWER_BYTES, "packing", True),
    Technique("engine.preemption_mode", "swapping", FEWER_BYTES, "KV", True),
    Technique("engine.kv_offloading", "offloading of cached text", FEWER_BYTES, "KV", True),
    Technique("engine.scheduling_policy", "order of admission", NEITHER, "packing", True),
    Technique("engine.watermark", "KV watermark", FEWER_BYTES, "packing", True),
    Technique("engine.enable_chunked_prefill", "chunked prefill", FEWER_BYTES, "packing", True),
    Technique("engine.long_prefill_token_threshold", "prefill chunk limit", FEWER_BYTES, "packing", True),
    Technique("engine.async_scheduling", "async scheduling", NEITHER, "host", True),
    Technique("engine.enforce_eager", "CUDA graphs", NEITHER, "host", True),
    Technique("engine.host", "host overhead", NEITHER, "host", True),
    Technique(TILED, "tiled attention", FEWER_BYTES, "activations", True),
    Technique("engine.worker", "host overhead", NEITHER, "host", True),
    Technique("engine.enable_mixed_chunk", "mixed batches", FEWER_BYTES, "packing", True),
    Technique("engine.preset", "engine version", NEITHER, "host", True),
    Technique("speculation", "speculative decoding", FEWER_STEPS, "steps", True),
    Technique("early_exit", "early exit", FEWER_BYTES, "depth", False),
    Technique("hardware", "another device", NEITHER, "device", True),
    Technique("cluster", "replicas", NEITHER, "device", True),
    Technique("workload", "another workload", NEITHER, "workload", True),
    Technique("model", "another model", FEWER_BYTES, "weights", None),
)


def technique_of(setting: str) -> Technique | None:
    """The technique whose setting is the longest beginning of `setting`; None if there is none (simulation, slo)."""
    fits = [t for t in TECHNIQUES if setting == t.setting or setting.startswith((f"{t.setting}.", f"{t.setting}_"))]
    return max(fits, key=lambda t: len(t.setting), default=None)


def label(settings: list[str]) -> list[dict[str, Any]]:
    """The techniques behind changed settings, each once, JSON-ready."""
    found = [t for t in map(technique_of, settings) if t is not None]
    return [asdict(technique) for technique in dict.fromkeys(found)]
