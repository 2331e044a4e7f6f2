"""Techniques by the setting that turns them on: which side of T_decode = N_steps * T_step they are on, and whether
they change what the model says."""

from dataclasses import asdict, dataclass
from typing import Any

from infersim.engine.knobs import FEWER_BYTES, FEWER_STEPS, KNOBS, NEITHER


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
    Technique("parallelism.prefill_context", "prefill context parallelism", NEITHER, "compute", True),
    *(Technique(f"engine.{knob.name}", *knob.technique, True) for knob in KNOBS if knob.technique and knob.user),
    Technique(TILED, "tiled attention", FEWER_BYTES, "activations", True),
    Technique("engine.preset", "engine version", NEITHER, "host", True),
    Technique("speculation", "speculative decoding", FEWER_STEPS, "steps", True),
    Technique("early_exit", "early exit", FEWER_BYTES, "depth", False),
    Technique("lora", "LoRA adapters", NEITHER, "device", None),
    Technique("hardware", "another device", NEITHER, "device", True),
    Technique("cluster", "replicas and routing", NEITHER, "device", True),
    Technique("workload", "another workload", NEITHER, "workload", True),
    Technique("model", "another model", FEWER_BYTES, "weights", None),
)


def technique_of(setting: str) -> Technique | None:
    """The technique whose setting is the longest beginning of `setting`; None if there is none (simulation, slo)."""
    fits = [t for t in TECHNIQUES if setting == t.setting or setting.startswith((f"{t.setting}.", f"{t.setting}_"))]
    return max(fits, key=lambda t: len(t.setting), default=None)


def label(settings: list[str]) -> list[dict[str, Any]]:
    """The techniques behind changed settings, each once, JSON-ready."""
    found = {technique.name: technique for setting in settings if (technique := technique_of(setting))}
    return [asdict(technique) for technique in found.values()]
