"""A knob is declared once, and a preset is what differs from another."""

import ast
import json
import re
import subprocess
import sys
from string import Formatter
from typing import get_args

import pytest
import yaml

from infersim.config.engine import Engine, ResolvedEngine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.presets import load_preset, packaged_presets
from infersim.config.scenario import Scenario, load_scenario
from infersim.config.schema import json_schema
from infersim.deployment import deploy, deployment_of, resolve
from infersim.deployment.compatibility import CONSTANTS, FACTS, RULES
from infersim.engine.compiled import state
from infersim.engine.knobs import COMPUTED, KNOBS, lowered
from infersim.explain.techniques import technique_of
from infersim.report.reference import reference
from infersim.run import run

H100 = load_hardware("h100-sxm")
SCENARIO = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "engine": {"max_model_len": 2048},
    "workload": {"num_requests": 20, "max_concurrency": 4, "input_tokens": 100, "output_tokens": 50},
}

NEW_KNOB = """
import json
from infersim.engine import knobs
knobs.KNOBS += (knobs.Knob("nap_time", float, "time that the engine sleeps", 0.25, unit="s", record="f8",
                           technique=("naps", knobs.NEITHER, "host")),)
from infersim.config.engine import Engine
from infersim.config.hardware import load_hardware
from infersim.config.presets import packaged_presets
from infersim.config.schema import json_schema
from infersim.deployment import resolve
from infersim.engine.compiled import build, state
from infersim.explain.techniques import technique_of
from infersim.report.reference import reference
device = load_hardware("h100-sxm")
print(json.dumps({
    "schema": json_schema()["$defs"]["Engine"]["properties"]["nap_time"]["description"],
    "reference": [line for line in reference((), {}).splitlines() if "nap_time" in line],
    "record": str(state.KNOBS["nap_time"]),
    "key": build.key(),
    "presets": [preset.values["nap_time"] for preset in packaged_presets().values()],
    "default": resolve(Engine(), device, 4096).nap_time,
    "given": resolve(Engine(nap_time="3 ms"), device, 4096).nap_time,
    "technique": technique_of("engine.nap_time").name,
}))
"""


def test_a_knob_is_declared_in_one_place():
    """One more row of the table, and it is a key with its check, a row of the reference, a field of the record, ..."""
    found = json.loads(subprocess.run([sys.executable, "-c", NEW_KNOB], check=True, capture_output=True).stdout)
    assert found["schema"] == "time that the engine sleeps"
    assert any("`nap_time` | a time such as 500 ms |" in line for line in found["reference"])
    assert found["record"] == "float64"
    assert set(found["presets"]) == {0.25}
    assert (found["default"], found["given"]) == (0.25, 0.003)
    assert found["technique"] == "naps"
    from infersim.engine.compiled.build import key

    assert found["key"] != key()


def test_what_follows_from_the_table():
    users = [knob.name for knob in KNOBS if knob.user]
    properties = json_schema()["$defs"]["Engine"]["properties"]
    assert list(properties) == list(Engine.model_fields) == ["preset", *users]
    assert all(properties[knob.name]["description"] == knob.about for knob in KNOBS if knob.user)
    assert all(f"| `{name}` |" in reference(RULES, FACTS) for name in users)
    assert set(vars(resolve(Engine(), H100, 4096))) == {knob.name for knob in KNOBS} | {"preset", "origin"}
    assert set(state.KNOBS.names) == lowered().keys() | {computed.name for computed in COMPUTED}
    for name, knob in lowered().items():
        assert len(set(state.CODES[name].values())) == len(knob.choices) if knob.choices else name not in state.CODES
    assert all(technique_of(f"engine.{knob.name}").name == knob.technique[0] for knob in KNOBS if knob.technique)


def test_names_are_used_once_and_point_to_others():
    names = [knob.name for knob in KNOBS]
    assert len(set(names)) == len(names)
    assert {knob.needs for knob in KNOBS} - {""} <= set(names)
    assert {knob.type for knob in KNOBS} == {bool, int, float, str}


def test_the_text_of_the_table_is_no_part_of_the_machine_code():
    from infersim.engine.compiled import build

    key = build.key()
    other = NEW_KNOB.replace("nap_time", "naps").partition("from infersim.config.engine")[0]
    other = other.replace('record="f8",', "") + "from infersim.engine.compiled import build; print(build.key())"
    assert subprocess.run([sys.executable, "-c", other], check=True, capture_output=True).stdout.decode().split() == [
        key
    ]


@pytest.mark.parametrize("name", packaged_presets())
def test_a_preset_says_what_differs_and_why(name):
    """No value is that of its base; each has a source."""
    preset = load_preset(name)
    base = load_preset(preset.base).values if preset.base else {knob.name: knob.default for knob in KNOBS}
    assert [key for key, value in preset.given.items() if value == base[key]] == []
    assert preset.values == base | preset.given
    assert all(len(preset.sources[key]) > 6 for key in preset.given)


def scenario_of(folder, **presets):
    """The first preset's scenario."""
    for name, preset in presets.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"source": "our own fork"} | preset))
    engine = SCENARIO["engine"] | {"preset": f"{next(iter(presets))}.yaml"}
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(SCENARIO | {"engine": engine}))
    return load_scenario(path)


def test_a_preset_of_ones_own_runs(tmp_path):
    """In a file beside the scenario, and based on another such file: the knobs that it says, and else its base's."""
    fork = {"base": "vllm-0.33", "async_scheduling": False, "host_step_time": {"value": "20 ms", "source": "measured"}}
    scenario = scenario_of(tmp_path, ours={"base": "fork.yaml", "max_num_seqs": 2}, fork=fork)
    engine = deployment_of(scenario).engine
    theirs = deployment_of(load_scenario(tmp_path / "scenario.yaml", ["engine.preset=vllm-0.33"])).engine
    assert (engine.preset, engine.host_step_time, engine.max_num_seqs) == ("ours", 0.02, 2)
    changed = {key for key, value in vars(engine).items() if value != getattr(theirs, key)}
    assert changed == {"preset", "async_scheduling", "host_step_time", "max_num_seqs", "origin"}
    assert load_preset(str(tmp_path / "ours.yaml")).sources["host_step_time"] == "measured"
    spelled = ["engine.preset=vllm-0.33", "engine.async_scheduling=false", "engine.host_step_time=0.02",
               "engine.max_num_seqs=2"]  # fmt: skip
    (ours,), (same,) = run(scenario), run(load_scenario(tmp_path / "scenario.yaml", spelled))
    assert ours.busy_time == same.busy_time
    assert (ours.requests["last_token"] == same.requests["last_token"]).all()


@pytest.mark.parametrize("preset", ["vllm-0.11", "ours.yaml"])
def test_what_a_release_lacks_is_refused_of_what_is_based_on_it_too(preset, tmp_path):
    scenario_of(tmp_path, ours={"base": "vllm-0.11", "max_num_seqs": 2})
    drafts = ["speculation.method=draft_model", "speculation.model=Llama-3.2-1B",
              "speculation.num_speculative_tokens=2", "speculation.acceptance.rate=0.5"]  # fmt: skip
    for settings, said in ((["engine.async_scheduling=true"], "async_scheduling"), (drafts, "no draft models")):
        path = tmp_path / "scenario.yaml"
        with pytest.raises(InputError, match=said):
            deployment_of(load_scenario(path, [f"engine.preset={preset}", *settings]))
        deployment_of(load_scenario(path, ["engine.preset=vllm-0.19", *settings]))


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ({"base": "vllm-0.33", "max_num_seq": 3}, "max_num_seq: unknown key; did you mean max_num_seqs"),
        ({"base": "vllm-0.33", "order": "any"}, "order: must be one of 'running-first', 'decodes-first'"),
        ({"base": "vllm-0.33", "host_step_time": {"value": "fast", "source": "us"}}, "host_step_time: must be a time"),
        ({"base": "vllm-0.34"}, "base: 'vllm-0.34': no such engine preset or file"),
        ({"base": "x.yaml"}, "base: is this preset itself"),
        ({"async_scheduling": True}, "batch_defaults: missing"),
        ({"base": "vllm-0.33", "source": None}, "source: must be a text"),
    ],
)
def test_what_is_wrong_with_a_preset_is_said(tmp_path, preset, said):
    with pytest.raises(InputError, match=rf"scenario.yaml: engine.preset: .*x.yaml: {said}"):
        scenario_of(tmp_path, x=preset)


def test_a_knob_that_only_one_engine_has(tmp_path):
    with pytest.raises(InputError, match=r"engine.enable_mixed_chunk: only sglang presets have it; remove it for vllm"):
        resolve(Engine(enable_mixed_chunk=True), H100, 4096)
    ours = scenario_of(tmp_path, ours={"base": "sglang-0.5", "enable_mixed_chunk": True})
    assert deployment_of(ours).engine.order == "prefills-first"
    assert isinstance(deployment_of(ours).engine, ResolvedEngine)


def test_rules_name_what_there_is():
    """Every name in a condition or a message is a knob or a fact, and every key one of a scenario."""
    known = {knob.name for knob in KNOBS} | FACTS.keys() | CONSTANTS.keys() | {"max", "len"}
    for rule in RULES:
        names = {node.id for node in ast.walk(ast.parse(rule.when)) if isinstance(node, ast.Name)}
        shown = Formatter().parse(rule.key + rule.message)
        fields = {re.split(r"[.\[]", name)[0] for _, name, _, _ in shown if name}
        assert names | fields <= known, rule
        users = re.findall(r"user\.(\w+)", f"{rule.when} {rule.message}")
        assert set(users) <= Engine.model_fields.keys(), rule
        if rule.key.startswith("{"):
            continue
        section, _, key = rule.key.partition(".")
        kind = Scenario.model_fields[section].annotation
        kind = next(
            (part for part in get_args(kind) if hasattr(part, "model_fields")), kind
        )  # of one that may be missing
        assert not key or section in ("speculation", "cluster") or key in kind.model_fields, rule


def test_all_that_does_not_go_together_is_said_at_once():
    wrong = Engine(enable_mixed_chunk=True, kv_offloading_latency=1, scheduling_policy="lpm", max_model_len=9000)
    with pytest.raises(InputError) as error:
        resolve(wrong, H100, 8192)
    keys = {problem.partition(":")[0] for problem in error.value.problems}
    assert keys == {f"engine.{key}" for key in ("enable_mixed_chunk", "kv_offloading_latency", "scheduling_policy",
                                                "max_model_len")}  # fmt: skip


def test_what_a_user_gives_is_obeyed_or_refused():
    """Prefix caching with recurrent state, more sequences than tokens."""
    parts = ("Qwen3-Next-80B-A3B", load_hardware("b200-sxm"), Precision(), Parallelism())
    for preset, caches in (("vllm-0.24", False), ("vllm-0.28", True), ("vllm-0.33", True)):
        assert deploy(*parts, Engine(preset=preset)).engine.enable_prefix_caching == caches
        assert not deploy(*parts, Engine(preset=preset, enable_prefix_caching=False)).engine.enable_prefix_caching
    with pytest.raises(InputError, match=r"engine.enable_prefix_caching: .* engine.preset vllm-0.28 or later"):
        deploy(*parts, Engine(preset="vllm-0.24", enable_prefix_caching=True))
    assert not deploy("Mamba-2.8B", *parts[1:], Engine()).engine.enable_prefix_caching  # no attention
    with pytest.raises(InputError, match=r"engine.max_num_seqs: a step has no tokens for 65 sequences; .* 64"):
        resolve(Engine(max_num_seqs=65, max_num_batched_tokens=64), H100, 4096)
