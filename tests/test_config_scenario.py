"""Scenarios: three keys are enough, every error is reported at once and says where, and nothing broken gets through."""

import json
import random
import signal
from itertools import pairwise

import pytest
import yaml

from infersim.config import resources
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.scenario import Scenario, build_scenario, load_scenario
from infersim.config.schema import json_schema
from infersim.deployment import resolve

LEAST = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "workload": {"request_rate": 10, "input_tokens": 512, "output_tokens": 128},
}
FULL = LEAST | {
    "parallelism": {"tensor": 2, "pipeline": 1, "attention_data": 2, "expert": 2, "moe_tensor": 2, "context": 1},
    "precision": {"weights": "bf16", "kv_cache": "fp8", "activations": "bf16"},
    "engine": {"preset": "vllm-0.19", "max_num_seqs": 128, "gpu_memory_utilization": 0.85, "async_scheduling": False},
    "slo": {"p99_ttft_ms": 500, "p99_tpot_ms": 50, "goodput": {"ttft_ms": 300}},
    "cluster": {"replicas": 2},
    "speculation": None,
    "simulation": {"seed": 3, "replications": 4, "warmup": "10 s"},
}


def problems(data, overrides=()):
    with pytest.raises(InputError) as error:
        build_scenario(data, "x.yaml", overrides)
    return error.value.problems


def test_three_keys_are_enough_and_every_default_is_stated():
    scenario = build_scenario(LEAST, "x.yaml")
    assert scenario.engine.preset == "vllm-0.33"
    assert scenario.parallelism.num_gpus == scenario.parallelism.moe_tensor == scenario.cluster.replicas == 1
    assert scenario.precision.weights == "auto"
    assert (scenario.precision.activations, scenario.precision.kv_cache) == ("bf16", "auto")
    assert (scenario.simulation.seed, scenario.simulation.replications, scenario.simulation.warmup) == (0, 1, 0)
    assert scenario.slo.limits == {}
    assert scenario.hardware == load_hardware("h100-sxm")


@pytest.mark.parametrize("data", [LEAST, FULL])
def test_resolved_scenario_is_json_and_means_the_same(data):
    scenario = build_scenario(data, "x.yaml")
    text = json.dumps(scenario.resolved(), allow_nan=False)
    assert build_scenario(json.loads(text), "again") == scenario


@pytest.mark.parametrize("name", [name for name in resources.names("scenarios") if not name.startswith("plan-")])
def test_shipped_scenarios_load_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_scenario(name) == load_scenario(resources.packaged("scenarios") / f"{name}.yaml")


def test_empty_sections_are_their_defaults():
    empty = {"slo": None, "engine": None, "speculation": None}
    assert build_scenario(LEAST | empty, "x.yaml") == build_scenario(LEAST, "x.yaml")


def test_paths_are_seen_from_the_scenario_file(tmp_path, monkeypatch):
    """Beside the file first, then the current folder, then the packaged names."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    profile = load_hardware("h100-sxm").model_dump(mode="json") | {"name": "mine"}
    (home / "mine.yaml").write_text(json.dumps(profile))
    (elsewhere / "yours.yaml").write_text(json.dumps(profile | {"name": "yours"}))
    (home / "config.json").write_text("{}")
    (home / "trace.csv").write_text("")
    (home / "load.yaml").write_text("{trace: trace.csv}")
    data = {"model": "config.json", "hardware": "mine.yaml", "workload": {"trace": "trace.csv"}}
    file = home / "scenario.yaml"
    file.write_text(json.dumps(data))
    monkeypatch.chdir(elsewhere)
    scenario = load_scenario(file)
    assert scenario.hardware.name == "mine"
    assert scenario.model == str(home / "config.json")
    assert scenario.workload.trace == str(home / "trace.csv")
    assert load_scenario(file, ["workload=load.yaml"]).workload.trace == str(home / "trace.csv")
    assert load_scenario(file, ["hardware=yours.yaml"]).hardware.name == "yours"
    assert load_scenario(file, ["hardware=l4"]).hardware.name == "l4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": None}, "modle: unknown key; did you mean model?"),  # a key without a value is a key all the same
        ({"model": ""}, "model: must not be empty"),
        ({"model": "x" * 5000}, "model: must have at most 4096 characters (got 5000)"),
        (
            {"engine": {"preset": "vllm-0.21"}},
            "engine.preset: no such engine preset (got 'vllm-0.21'); did you mean vllm-0.",
        ),
        (
            {"workload": {"request_rate": 1e308}},
            "workload.request_rate: must be a rate per second such as 10 or 10 1/s, of",
        ),
        (
            {"cluster": {"autoscaler": {"target": 1e-320, "max": 2}}},
            "cluster.autoscaler.target: must be greater than or equal to",
        ),
        ({"engine": {"host_step_time": 1e6}}, "engine.host_step_time: must be less than or equal to 3600"),
    ],
)
def test_mistakes_of_one_key(change, message):
    (line,) = problems(LEAST | change)
    assert line.startswith(f"x.yaml: {message}")


def test_overrides():
    overrides = ["engine.max_num_seqs=512", "slo.p99_ttft_ms=500", "hardware=l4", "hardware.memory_bandwidth=4 TB/s",
                 "workload.output_tokens={lognormal: {median: 10, p90: 100}}", "simulation=null"]  # fmt: skip
    scenario = build_scenario(FULL, "x.yaml", overrides)
    assert scenario.engine.max_num_seqs == 512
    assert scenario.engine.preset == "vllm-0.19"
    assert scenario.hardware == load_hardware("l4").model_copy(update={"memory_bandwidth": 4e12})
    assert scenario.workload.output_tokens.lognormal.p90 == 100
    assert scenario.simulation.seed == 0
    assert FULL["engine"]["max_num_seqs"] == 128


def test_design_example_of_an_error():
    assert problems(LEAST | {"engine": {"max_num_seq": 3}}) == (
        "x.yaml: engine.max_num_seq: unknown key; did you mean max_num_seqs?",
    )


def test_all_errors_at_once():
    lines = problems(
        {
            "hardware": "h101",
            "workload": {"request_rate": -1, "input_tokens": 1, "output_tokens": 1},
            "engine": {"preset": "vllm-0.21", "enable_prefix_caching": 2, "block_size": 2.5, "watermark": 1},
            "precision": {"weights": "fp7"},
            "parallelism": {"expert": 3},
            "slo": {"p98_ttft_ms": 1, "p99_ttft_ms": "10 GB"},
            "speculation": {"method": "eagle"},
            "simulation": {"seed": -1, "warmup": "soon"},
            "cluster": {"replicas": 0},
        },
        ["model.x=3", "engine.", "nonsense"],
    )
    for start in (
        "x.yaml: hardware: 'h101': no such hardware profile", "x.yaml: workload.request_rate: must be",
        "x.yaml: engine.preset: no such engine preset (got 'vllm-0.21'); did you mean vllm-0.",
        "x.yaml: engine.enable_prefix_caching: must be true or false",
        "x.yaml: engine.block_size: must be a whole number",
        "x.yaml: engine.watermark: must be less than 1", "x.yaml: precision.weights: must be one of auto",
        "x.yaml: parallelism: expert must divide", "x.yaml: slo.p98_ttft_ms: unknown key; did you mean p9",
        "x.yaml: slo.p99_ttft_ms: must be a time in ms", "x.yaml: speculation.num_speculative_tokens: missing",
        "x.yaml: simulation.seed: must be a whole number >= 0", "x.yaml: simulation.warmup: must be a time",
        "x.yaml: cluster.replicas: must be a whole number >= 1", "--set engine.: must be key=value",
        "--set nonsense: must be key=value",
    ):  # fmt: skip
        assert any(line.startswith(start) for line in lines), (start, lines)


def test_missing_keys_say_what_they_are():
    assert problems({}) == (
        "x.yaml: model: missing; catalogue name, or a path to a Hugging Face config.json or its folder",
        "x.yaml: hardware: missing; name or path of a hardware profile, or the profile itself",
        "x.yaml: workload: missing; name or path of a workload, or the workload itself",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmodel: b\n", "line 2: key 'model' is given twice"),
        ("model: [a\n", "line 2: "),
        ("engine:\n  <<: {max_num_seqs: 1}\n", "engine.<<: unknown key"),
        ("? [a, b]\n: 1\n", "line 1: a key must be a word"),
        ("[" * 100_000, "nest"),
        ("x: !!python/object/apply:os.system [ls]\n", "line 1: could not determine a constructor"),
        ("x: !!int abc\n", "a value cannot be read"),
        ("workload: {request_rate: 1:30, input_tokens: 1, output_tokens: 1}\n", "(got '1:30'"),
        ("a: 1\n---\nb: 2\n", "line 2: a second YAML document; must be one"),
        ("a: \x07\n", "not YAML text"),
        ("- a\n", "must be a mapping with model, hardware and workload"),
        ("", "must be a mapping with model, hardware and workload"),
    ],
)
def test_yaml_errors_say_where(text, message, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_scenario(file)
    assert str(file) in error.value.problems[0]
    assert message in str(error.value)


def test_a_trace_given_as_a_scenario(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("0.1,512,128\n" * 200_000)
    with pytest.raises(InputError, match="a description is a short YAML file"):
        load_scenario(file)


@pytest.mark.parametrize(
    ("slo", "limits"),
    [
        ({}, {}),
        ({"p99_ttft_ms": 500, "p50_ttft_ms": 100, "p90_tpot_ms": 50, "p99_itl_ms": 5}, {"ttft": 0.5, "tpot": 0.05}),
        ({"mean_ttft_ms": 500, "median_e2el_ms": 1}, {}),
        ({"p99_ttft_ms": 500, "goodput": {"e2el_ms": "2 s"}}, {"e2el": 2.0}),
    ],
)
def test_limits_of_one_request(slo, limits):
    assert build_scenario(LEAST | {"slo": slo}, "x.yaml").slo.request_limits == limits


@pytest.mark.parametrize(
    ("parallelism", "gpus", "moe_tensor"),
    [
        ({}, 1, 1),
        ({"tensor": 4, "pipeline": 2}, 8, 4),
        ({"tensor": 2, "attention_data": 4, "expert": 8}, 8, 1),
        ({"tensor": 2, "attention_data": 4, "expert": 4, "moe_tensor": 2, "pipeline": 2}, 16, 2),
    ],
)
def test_gpus_of_a_replica(parallelism, gpus, moe_tensor):
    scenario = build_scenario(LEAST | {"parallelism": parallelism}, "x.yaml")
    assert scenario.parallelism.num_gpus == gpus
    assert scenario.parallelism.moe_tensor == moe_tensor


def test_inconsistent_parallelism():
    (line,) = problems(LEAST | {"parallelism": {"tensor": 2, "expert": 2, "moe_tensor": 2}})
    assert line == "x.yaml: parallelism: moe_tensor x expert must equal tensor x attention_data = 2 (got 2 x 2 = 4)"


def test_json_schema_describes_every_key():
    """Each key of a full scenario file is in the schema, so that an editor completes it; hardware may be a name."""
    schema = json.loads(json.dumps(json_schema()))

    def follow(data, node):
        for branch in node.get("anyOf", [node]):
            target = schema["$defs"][branch["$ref"].rsplit("/")[-1]] if "$ref" in branch else branch
            if "properties" in target:
                assert target["additionalProperties"] is False
                for key, value in data.items():
                    if isinstance(value, dict) and "anyOf" not in target["properties"][key]:
                        follow(value, target["properties"][key])
                    assert key in target["properties"]

    follow(FULL, schema)
    assert set(schema["required"]) == {"model", "hardware", "workload"}
    assert {"type": "string"} in schema["properties"]["hardware"]["anyOf"]
    assert set(schema["properties"]) == set(Scenario.model_fields)


JUNK = [
    None, True, [], {}, [[]], {"a": 1}, -1, 0, 1e400, float("nan"), "nan", "-5 ms", "80 GHz", "80 gb", "", "x" * 5000,
    10**400, 1.5, "1e999", "2023-11-16", "yes", "\x00", "../../../etc/passwd", "/", ".", "~", "vllm-0.34", [1] * 1000,
    {str(i): i for i in range(300)}, "é\u2028\n", b"\xff\xfe", {1: 2}, {None: 3},
]  # fmt: skip
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqr"))
NOISE = [
    "\x00", "\xff", "\t", "{", "}", "[", "]", ":", "- ", "&a ", "*a", "!!int ", "!!binary ", "!!set ", "%", "@", "'",
    '"', "|\n", "? ", "<<: ", "nan", ".inf", "-", "1:30", "0x", "\n---\n", "\r", "#", "  ", "\u2028", BOMB,
]  # fmt: skip


def break_data(data, rng):
    """One to three keys somewhere deleted, misspelt or given a value of another kind."""
    data = json.loads(json.dumps(data))
    for _ in range(rng.randint(1, 3)):
        here = data
        while True:
            key = rng.choice([*here]) if here else "model"
            if isinstance(here.get(key), dict) and here[key] and rng.random() < 0.7:
                here = here[key]
            else:
                break
        match rng.randrange(4):
            case 0:
                here.pop(key, None)
            case 1:
                here[key[:-1] + rng.choice("xyz_")] = here.pop(key, 1)
            case _:
                here[key] = rng.choice(JUNK)
    return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogateescape")


def break_text(text, rng):
    """The bytes of a file cut, doubled, or sprinkled with what YAML finds special."""
    lines = text.splitlines(keepends=True)
    match rng.randrange(7):
        case 0:
            return text[: rng.randrange(len(text))].encode()
        case 1:
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            return "".join(lines).encode()
        case 2:
            del lines[rng.randrange(len(lines))]
            return "".join(lines).encode()
        case 3:
            return rng.randbytes(rng.randrange(1, 3000))
        case 4:
            raw = bytearray(text.encode())
            for _ in range(rng.randint(1, 5)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            return bytes(raw)
        case 5:
            opening = rng.choice(["[", "{a: ", "- "]) * rng.choice([50, 1000, 30_000])
            return (text + rng.choice(["engine: ", "zzz: ", "\n"]) + opening).encode()
        case _:
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(text))
                text = text[:at] + rng.choice(NOISE) + text[at:]
            return text.encode("utf-8", "surrogateescape")


def load(file):
    """The problems of a scenario file; one without any can also be echoed, and its engine started or refused."""
    try:
        scenario = load_scenario(file)
        json.dumps(scenario.resolved(), allow_nan=False)
        resolve(scenario.engine, scenario.hardware, 131072)
    except InputError as error:
        return error.problems
    return ()


def test_500_broken_files_give_problems_not_tracebacks(tmp_path):
    """Whatever is in the file, loading it ends soon, with a scenario that makes sense or with one line per problem."""
    rng = random.Random(20231116)
    full_profile = FULL | {"hardware": load_hardware("h100-sxm").model_dump(mode="json")}
    file, num_refused = tmp_path / "broken.yaml", 0

    def too_long(signum, frame):
        raise TimeoutError(f"loading took more than 20 s: {content[:200]}")

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for i in range(500):
            data = full_profile if i % 5 == 0 else FULL
            text = yaml.safe_dump(data, sort_keys=False, default_flow_style=rng.choice([None, False, True]))
            content = break_data(data, rng) if rng.random() < 0.5 else break_text(text, rng)
            file.write_bytes(content)
            signal.alarm(20)
            lines = load(file)
            signal.alarm(0)
            num_refused += bool(lines)
            assert all(len(line.splitlines()) == 1 and len(line) < 2000 and ": " in line for line in lines), lines
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert num_refused > 250  # most of the damage is noticed; the rest fell on values that may differ
