"""However a deployment is spelt, it is the same: `compare` of two random spellings finds no difference in any row."""

import copy
import random
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.presets import load_preset, packaged_presets
from infersim.config.resources import packaged
from infersim.config.scenario import build_scenario
from infersim.config.units import UNITS
from infersim.deployment import deployment_of
from infersim.engine.knobs import KNOBS
from infersim.planning.compare import compare

LOADS = {"request_rate": 20, "num_requests": 30, "input_tokens": {"mean": 300, "range_ratio": 0.5}, "output_tokens": 12}
PHASES = [Phase.explicit, Phase.generate]  # to shrink a whole scenario takes minutes and says no more
NOTHING = 1e-9  # ms: sums over replicas in another order may round in another way
LINK = {"transfer": {"bandwidth": "50 GB/s", "latency": "1.1 ms"}}
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
QUANTITIES = {
    "host_step_time": (0.0011, "s"), "host_token_time": (3.3e-6, "s"), "worker_step_time": (0.0007, "s"),
    "swap_space": (2.5 * 2**30, "B"), "kv_offloading_size": (6.5e9, "B"),
}  # fmt: skip


@st.composite
def deployments(draw) -> dict:
    """The parts that one deployment has, as little as says it."""
    engine = {"preset": draw(st.sampled_from(sorted(packaged_presets()))), "max_model_len": 2048}
    for name in draw(st.sets(st.sampled_from(sorted(QUANTITIES)), max_size=2)):
        engine[name] = QUANTITIES[name][0]
    engine |= draw(st.sampled_from([{}, {"max_num_seqs": 64}, {"enable_chunked_prefill": False}]))
    parts = {
        "model": draw(st.sampled_from(["Llama-3.1-8B", "Qwen3-30B-A3B", "Mistral-7B-v0.1"])),
        "hardware": draw(st.sampled_from(["h100-sxm", "a100-sxm-80gb", "l40s"])),
        "parallelism": draw(st.sampled_from([{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "attention_data": 2}])),
        "precision": draw(st.sampled_from([{}, {"weights": "fp8"}, {"kv_cache": "fp8"}])),
        "engine": engine,
    }
    if draw(st.booleans()):
        parts["lora"] = {"adapters": {"one": 16}, "max_loras": 2}
    more = [{}, {}, {"early_exit": {"exit_layers": [8, 16], "shares": [0.2, 0.3]}}]
    eagle = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"conditional": [0.7, 0.7, 0.7]}}
    return {"parts": parts, "more": draw(st.sampled_from([*more, {"speculation": eagle}]))}


def quantity(value: float, unit: str, chance: random.Random):
    """The same number, in one of its units."""
    exact, factors = Decimal(repr(value)), {name: Decimal(repr(factor)) for name, factor in UNITS[unit][2].items()}
    spelling = chance.choice(["", *(name for name, factor in factors.items() if exact / factor * factor == exact)])
    if not spelling:
        return chance.choice([value, repr(value)])
    return f"{exact / factors[spelling]:f}{chance.choice(['', ' '])}{spelling}"


def respelt(part: str, value, chance: random.Random, folder: Path, parts: dict):
    """A part said in other words."""
    if part == "model" and chance.random() < 0.5:
        return f"some-company/{value.lower()}"
    if part == "hardware" and chance.random() < 0.5:
        return load_hardware(value).model_dump(mode="json")
    if part == "parallelism" and chance.random() < 0.5:
        return {"tensor": 1, "pipeline": 1, "attention_data": 1, "expert": 1, "context": 1} | value
    if part == "precision" and chance.random() < 0.5:
        return {"weights": "auto", "kv_cache": "auto", "activations": "bf16"} | value
    if part == "lora" and chance.random() < 0.5:
        return value | {"max_lora_rank": 16}
    if part != "engine":
        return copy.deepcopy(value)
    engine = dict(value)
    for name in engine.keys() & QUANTITIES:
        engine[name] = quantity(engine[name], QUANTITIES[name][1], chance)
    how = chance.choice(["as it is", "a file of deltas", "a file of everything", "flags"])
    preset = load_preset(value["preset"])
    if how == "a file of deltas":
        data = {"base": value["preset"], "source": "this test"}
    if how == "a file of everything":
        data = {"source": "this test"} | {name: v for name, v in preset.values.items() if v is not None}
        data["batch_defaults"] = [row.model_dump(exclude_none=True) for row in preset.batch_defaults]
    if "file" in how:
        path = folder / f"{chance.getrandbits(32)}.yaml"
        path.write_text(yaml.safe_dump(data))
        engine["preset"] = str(path)
    if how == "flags":
        scenario = build_scenario({**parts, "workload": LOADS}, "test")
        resolved = deployment_of(scenario).engine
        names = [knob.name for knob in KNOBS if knob.user and getattr(resolved, knob.name) is not None]
        some = chance.sample(names, chance.randint(1, 6))
        engine = {name: getattr(resolved, name) for name in some} | engine
    return engine


def spelt(deployment: dict, cluster: str, seed: int, folder: Path) -> dict:
    """The scenario of a deployment: its parts above all replicas, or in each group of them."""
    chance, parts = random.Random(seed), deployment["parts"]
    groups = {"pools": 2, "kinds": chance.choice([0, 1, 2])}[cluster]
    own = [{} for _ in range(groups)]
    data = {"workload": copy.deepcopy(LOADS)}

    def again(part: str):
        return respelt(part, parts[part], chance, folder, parts)

    for part in parts:
        inside = groups and chance.random() < 0.5
        if not inside or part in ("model", "hardware"):
            data[part] = again(part)
        if inside:
            for group in own:
                group[part] = again(part)
    if cluster == "pools":
        data["cluster"] = {"prefill": {"replicas": 1} | own[0], "decode": {"replicas": 1} | own[1]} | LINK
    elif groups:
        data["cluster"] = {"kinds": [{"replicas": 2 // groups} | kind for kind in own]}
    else:
        data["cluster"] = {"replicas": 2}
    data |= copy.deepcopy(deployment["more"])
    if "speculation" in data:
        acceptance = [{"rate": 0.7}, {"conditional": [0.7]}, {"conditional": [0.7, 0.7, 0.7]}]
        data["speculation"]["acceptance"] = chance.choice(acceptance)
        method = packaged("drafters") / "eagle3.yaml"
        data["speculation"]["method"] = chance.choice(["eagle3", str(method)])
    if chance.random() < 0.3:
        data["workload"] |= {"turns": 1, "burstiness": 1.0, "request_rate": "20 req/s"}
    return data


@SLOW
@given(deployments(), st.sampled_from(["pools", "kinds"]), st.integers(0, 2**32), st.integers(0, 2**32))
def test_two_spellings_of_one_deployment_do_not_differ(tmp_path_factory, deployment, cluster, one, other):
    folder = tmp_path_factory.mktemp("spelt")
    try:
        data = [spelt(deployment, cluster, seed, folder) for seed in (one, other)]
    except InputError:  # no such deployment, however it is spelt
        assume(False)
    scenarios = [(name, build_scenario(each, name)) for name, each in zip("ab", data, strict=True)]
    try:
        answer = compare(scenarios)
    except InputError:
        assume(False)
    (difference,) = answer["differences"]
    said = [str(each)[:2000] for each in data]
    assert difference["changes"] == {}, said
    assert difference["techniques"] == []
    assert difference["one_by_one"] is None
    for term in difference["latency"]["terms"]:
        assert all(abs(part) < NOTHING for part in (term["difference"], *term["factors"].values())), (term, said)
    assert abs(difference["latency"]["difference"]) < NOTHING
    for factor in (difference["throughput"]["ratio"], *difference["throughput"]["factors"].values()):
        assert factor == pytest.approx(1, rel=1e-12)
    assert difference["gpus"][0] == difference["gpus"][1]
    rows = [row for name, row in difference["metrics"].items() if name != "level"]
    assert not any(row["difference"] for row in rows), said
    assert difference["why"].startswith("no difference")
    a, b = ({key: variant[key] for key in ("work", "cost")} for variant in answer["variants"])
    assert_alike(a, b)


def assert_alike(a, b) -> None:
    """Two documents of the same numbers and texts."""
    if isinstance(a, dict | list):
        assert len(a) == len(b)
        for key in a if isinstance(a, dict) else range(len(a)):
            assert_alike(a[key], b[key])
    else:
        assert a == (pytest.approx(b, rel=1e-12) if isinstance(b, float) else b)
