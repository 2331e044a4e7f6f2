"""What is set explicitly stands in the resolved deployment, or is refused by name: every key of `engine`, on every kind
of model, beside whatever else may want to overrule it."""

import pytest

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.lora import Lora
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.presets import FOLDER
from infersim.config.resources import names
from infersim.config.speculation import Speculation
from infersim.deployment import deploy
from infersim.engine.knobs import KNOBS, Knob

H100 = load_hardware("h100-sxm")
MODELS = {
    "full": "Llama-3.1-8B",
    "windows": "Gemma-2-2B",
    "chunks": "Llama-4-Scout-17B-16E",
    "latent": "DeepSeek-V2-Lite",
    "compressed": "DeepSeek-V4-Flash",
    "hybrid": "Qwen3-Next-80B-A3B",
    "states": "Falcon-Mamba-7B",
    "encoder": "T5-3B",
}
BESIDE = {
    "alone": {},
    "pipeline": {"parallelism": Parallelism(pipeline=2)},
    "ngram": {"speculation": Speculation(method="ngram", num_speculative_tokens=2, acceptance={"rate": 0.5})},
    "lora": {"lora": Lora(adapters={"a": 8})},
}
KEYS = [knob for knob in KNOBS if knob.user]


def values(knob: Knob):
    """Values of every kind that the key takes."""
    if knob.choices:
        return knob.choices
    if knob.type is bool:
        return True, False
    if knob.type is int:
        return (64, 2048) if knob.name == "max_model_len" else (knob.least, 7, 2048)
    return (0.3,) if knob.unit == "share" else (0.0, 2.0, 1e9)


def settings(preset: str):
    """Each key with each of its values, together with what it needs, as far as the schema takes it."""
    for knob in KEYS:
        needed, name = {}, knob.needs
        while name in NEEDED:
            needed[name], name = NEEDED[name], next(k.needs for k in KNOBS if k.name == name)
        for value in values(knob):
            try:
                yield {knob.name, *needed}, value, Engine(preset=preset, **{**needed, knob.name: value})
            except ValueError:  # out of its bounds
                continue


NEEDED = {"kv_offloading_size": 1e11, "kv_offloading_disk_size": 1e11, "preemption_mode": "swap"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", names(FOLDER))
@pytest.mark.parametrize("kind", MODELS)
def test_every_key_is_obeyed_or_refused_by_name(kind, preset):
    check(kind, preset, "alone")


@pytest.mark.parametrize(
    ("kind", "beside"),
    [("full", "alone"), ("full", "pipeline"), ("full", "ngram"), ("full", "lora"), ("hybrid", "alone"),
     ("hybrid", "ngram")],
)  # fmt: skip
def test_every_key_is_obeyed_or_refused_by_name_beside_others(kind, beside):
    check(kind, "vllm-0.33", beside)


def check(kind: str, preset: str, beside: str) -> None:
    large = {"tensor": 8} if kind in ("chunks", "compressed", "hybrid") else {}
    more = {"parallelism": Parallelism(**large), **BESIDE[beside]}
    if "pipeline" in beside:
        more["parallelism"] = Parallelism(pipeline=2, **large)
    obeyed, wrong = 0, []
    for keys, value, engine in settings(preset):
        try:
            if "max_model_len" not in keys:  # as much as the model can see fits no step of some presets
                engine = engine.model_copy(update={"max_model_len": 512})
            deployed = deploy(MODELS[kind], H100, Precision(), engine=engine, **more)
        except InputError as error:
            # a model that does not fit is refused as a whole
            if not any(key in line or "does not fit" in line for line in error.problems for key in keys):
                wrong.append((keys, value, error.problems))
            continue
        resolved, blocks = deployed.engine, engine.num_gpu_blocks_override
        assert not blocks or deployed.memory.num_gpu_blocks == blocks
        wrong += [
            (key, getattr(engine, key), getattr(resolved, key), resolved.origin[key])
            for key in keys
            if getattr(resolved, key) != getattr(engine, key)
        ]
        obeyed += 1
    assert wrong == []
    assert obeyed > len(KEYS) / 2
