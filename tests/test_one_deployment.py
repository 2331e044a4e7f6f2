"""What is explained is what ran: explanation reads the result's deployments, whatever the scenario and its spelling."""

import copy
import math
from importlib import import_module
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from infersim.config.errors import InputError
from infersim.config.presets import packaged_presets
from infersim.config.scenario import build_scenario
from infersim.cost.operator import evaluate
from infersim.engine.compiled.state import DRAFT, HOST, RESOURCES
from infersim.explain.attribution import latency_terms, throughput_terms, total
from infersim.explain.cost import cost_of
from infersim.explain.summary import summarize
from infersim.explain.work import KINDS, RunWork
from infersim.metrics.latency import measure
from infersim.planning.compare import compare
from infersim.run import run

RUN = import_module("infersim.run")  # the package has a function of that name
LOADS = {"request_rate": 20, "num_requests": 60, "input_tokens": 300, "output_tokens": 20}
EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"conditional": [0.7, 0.6, 0.5]}}
PHASES = [Phase.explicit, Phase.generate]  # to shrink a scenario takes minutes
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)


OWN = {
    "hardware": ["h200-sxm", "l40s"],
    "parallelism": [{"tensor": 4}, {"pipeline": 2}],
    "precision": [{"weights": "fp8"}, {"kv_cache": "fp8"}],
    "engine": [{"preset": name, "max_model_len": 2048} for name in sorted(packaged_presets())],
}


@st.composite
def descriptions(draw) -> dict:
    """Scenarios over presets, devices, ranks, pipelines, pools and kinds with everything of their own, speculation,
    early exit, LoRA, failures."""
    data = {
        "model": draw(st.sampled_from(["Llama-3.1-8B", "Qwen3-30B-A3B", "Mistral-7B-v0.1"])),
        "hardware": draw(st.sampled_from(["h100-sxm", "a100-sxm-80gb", "l40s"])),
        "parallelism": draw(st.sampled_from([{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "attention_data": 2}])),
        "engine": {"preset": draw(st.sampled_from(sorted(packaged_presets()))), "max_model_len": 2048},
        "workload": LOADS | {"request_rate": draw(st.sampled_from([5, 50]))},
    }
    steps = draw(st.sampled_from(["", "", "speculation", "early_exit"]))
    if steps == "speculation":
        data["speculation"] = EAGLE
    if steps == "early_exit":
        data["early_exit"] = {"exit_layers": [8, 16], "shares": [0.2, 0.3]}
    if draw(st.integers(0, 3)) == 0:
        data["lora"] = {"adapters": {"one": 16}, "max_loras": 1}
    ranks = data["parallelism"].get("attention_data", 1)
    groups = [
        {"replicas": draw(st.integers(1, 2))}
        | {part: draw(st.sampled_from(OWN[part])) for part in draw(st.sets(st.sampled_from(sorted(OWN))))}
        for _ in range(2)
    ]
    for group in groups:
        if "parallelism" in group:
            group["parallelism"] = group["parallelism"] | {"attention_data": ranks}
    cluster = draw(st.sampled_from(["one", "pools", "kinds"]))
    data["cluster"] = {
        "one": {"replicas": 2},
        "kinds": {"kinds": groups},
        "pools": {"prefill": groups[0], "decode": groups[1], "transfer": {"bandwidth": "50 GB/s"}},
    }[cluster]
    failures = [{"kind": "slow", "at": "0.3 s", "duration": "1 s", "factor": 1.7}, {"kind": "crash", "at": "0.5 s"}]
    if draw(st.booleans()):
        data["cluster"]["failures"] = draw(st.lists(st.sampled_from(failures), min_size=1, max_size=2, unique_by=id))
    return data


def fleet_and_result(data):
    """What the engine has in the end, and the result; None where the scenario cannot run."""
    scenario, fleets, result_of = build_scenario(copy.deepcopy(data), "test"), [], RUN.result_of
    with mock.patch.object(RUN, "result_of", lambda *args: fleets.append(args[3]) or result_of(*args)):
        try:
            return run(scenario)[0], fleets[0]
        except InputError:
            return None, None


def results_of(data):
    return fleet_and_result(data)[0]


def spent(fleet, ran) -> np.ndarray:
    """f8[9]: seconds by resource of a kind of replicas, added up from the steps that the engine counted and the tables
    that the deployment says it had."""
    seconds = fleet.replicas["time_by_resource"][ran.replicas].sum(axis=0)
    cost, draft, share = ran.spec.cost, ran.spec.draft, ran.spec.cost.issue_share
    assert (fleet.prices["issue_share"][ran.replicas] == share).all()
    for name, table in (("linear", cost.linear), ("head", cost.head), ("shared", cost.shared)):
        for first in np.unique(fleet.prices[name][ran.replicas]) if table is not None else ():
            seconds += share * fleet.steps_priced[first : first + len(table)] @ table
    for name, table in (("first", draft.first), ("once", draft.once), ("following", draft.following)) if draft else ():
        for first in np.unique(fleet.prices[f"draft_{name}"][ran.replicas]):
            seconds[DRAFT] += share * fleet.steps_priced[first : first + len(table)] @ table
    return seconds


@SLOW
@given(descriptions())
def test_explained_seconds_are_those_that_the_engine_spent(data):
    """By kind of replica and by resource; and the terms of latency and throughput add up to what was measured."""
    result, fleet = fleet_and_result(data)
    assume(result is not None and result.measured.any())
    rows, every = result.replicas.rows, np.zeros(len(RESOURCES))
    for ran in result.ran:
        seconds, busy = spent(fleet, ran), rows["busy_time"][ran.replicas].sum()
        assert ran.time_by_resource == pytest.approx(seconds, rel=1e-9, abs=1e-9 * busy)
        assert seconds.sum() == pytest.approx(busy, rel=1e-9)
        assert (ran.time_by_resource >= 0).all()
        every += seconds
    close = {"rel": 1e-9, "abs": 1e-9 * every.sum()}
    assert result.time_by_resource == pytest.approx(every, **close)
    said = summarize([result])["explain"]["time_by_resource"]
    assert [said[name] for name in RESOURCES] == pytest.approx(every, **close)
    for work in RunWork(result).kinds:
        stages = 1 / work.cost.issue_share
        by_step = [t * work.num_steps / (1 if name == "host" else stages) for name, t in work.mean_step().items()]
        assert by_step == pytest.approx(work.ran.time_by_resource, **close)
    terms, metrics = throughput_terms(result), measure(result)
    outputs = metrics["output_throughput"] * float(result.replicas.available.sum())
    of_resources = [math.prod(terms[name].values()) * outputs for name in RESOURCES]
    assert of_resources == pytest.approx(every, **close)
    assert total(terms) == pytest.approx(1 / metrics["output_throughput"], rel=1e-9)
    done = result.requests[result.measured]
    if result.scenario.cluster.prefill is None:  # else what is on the way between pools is in no term
        sojourn = float((done["last_token"] - done["sent"]).mean())
        assert total(latency_terms(result)) == pytest.approx(sojourn, rel=1e-9)


@SLOW
@given(descriptions())
def test_a_decode_step_is_priced_as_the_engine_prices_it(data):
    """No less than its bytes at peak bandwidth, and by the tables that the engine had: those of the run, whole."""
    result = results_of(data)
    assume(result is not None and result.measured.any())
    for work in RunWork(result).kinds:
        spec = work.ran.spec
        assert work.cost is spec.cost
        if not work.visits:
            continue
        seconds, moved = work.decode_step()
        device = sum(seconds[name] for name in RESOURCES if name not in ("host", "draft"))
        stages = work.placement.parallelism.pipeline
        bytes_moved = sum(moved[kind] for kind in KINDS)
        assert device * stages >= bytes_moved / work.placement.hardware.memory_bandwidth * 0.999 / stages


PARTS = {"parallelism": {"tensor": 2}, "precision": {"weights": "fp8"}, "engine": {"max_num_seqs": 64}}


def spellings(part, value):
    """One deployment in two ways: a part in the scenario, or in each group of replicas."""
    base = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOADS}
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}
    link = {"transfer": {"bandwidth": "50 GB/s"}}
    above = base | {part: value, "cluster": pools | link}
    own = {name: pool | {part: value} for name, pool in pools.items()}
    yield above, base | {"cluster": own | link}
    yield (
        base | {part: value, "cluster": {"replicas": 2}},
        base | {"cluster": {"kinds": [{"replicas": 2, part: value}]}},
    )
    two = [{"replicas": 1, part: value}, {"replicas": 1, part: value}]
    yield base | {part: value, "cluster": {"replicas": 2}}, base | {"cluster": {"kinds": two}}


@pytest.mark.parametrize(("part", "value"), PARTS.items())
def test_two_spellings_of_one_deployment_do_not_differ(part, value):
    for one, other in spellings(part, value):
        scenarios = [(name, build_scenario(copy.deepcopy(data), name)) for name, data in (("a", one), ("b", other))]
        (difference,) = compare(scenarios)["differences"]
        assert difference["changes"] == {}
        assert difference["techniques"] == []
        assert all(abs(term["difference"]) < 1e-9 for term in difference["latency"]["terms"])
        assert abs(difference["latency"]["difference"]) < 1e-9
        assert difference["throughput"]["ratio"] == pytest.approx(1, rel=1e-12)
        assert difference["gpus"][0] == difference["gpus"][1]
        rows = [row for name, row in difference["metrics"].items() if name != "level"]
        assert all(not row["difference"] for row in rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"engine": {"max_num_seqs": 1024}}, {}),
        ({"workload": LOADS | {"think_time": "0 ms"}}, {}),
        ({"model": "meta-llama/Llama-3.1-8B"}, {}),
    ],
)
def test_what_is_said_twice_is_no_change(one, other):
    base = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOADS}
    scenarios = [(name, build_scenario(base | data, name)) for name, data in (("a", one), ("b", other))]
    assert compare(scenarios)["differences"][0]["changes"] == {}


def test_tensorrt_is_explained_with_its_own_attention_kernels():
    """A preset's kernels and a head table for every draft are those of the run, not of the scenario compiled again."""
    data = {"model": "Llama-3.1-70B", "hardware": "h100-sxm", "parallelism": {"tensor": 8},
            "engine": {"preset": "trtllm-1.0-no-evict"},
            "workload": LOADS | {"max_concurrency": 1, "input_tokens": 8}}  # fmt: skip
    result = results_of(data)
    (work,) = RunWork(result).kinds
    decode = sum(work.decode_step()[0].values())
    assert decode == pytest.approx(measure(result)["median_itl_ms"] / 1e3, rel=0.01)


def test_drafts_are_explained_with_every_row_of_the_head():
    result = results_of({"model": "Llama-3.1-8B", "hardware": "h100-sxm", "speculation": EAGLE, "workload": LOADS})
    (work,) = RunWork(result).kinds
    engine = result.engine
    assert len(work.cost.head) > min(4 * engine.max_num_seqs, engine.max_num_batched_tokens)


def test_host_time_is_counted_once():
    """5 ms more of the worker's time per step: the row of the host has nearly all of the difference."""
    base = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOADS | {"num_requests": 300}}
    slow = base | {"engine": {"worker_step_time": 0.005}}
    scenarios = [(name, build_scenario(data, name)) for name, data in (("a", base), ("b", slow))]
    (difference,) = compare(scenarios)["differences"]
    by_row = {}
    for term in difference["latency"]["terms"]:
        by_row[term["term"]] = by_row.get(term["term"], 0.0) + term["difference"]
    whole = difference["latency"]["difference"]
    assert by_row["host"] == pytest.approx(whole, rel=0.15)
    assert all(abs(part) < 0.15 * whole for name, part in by_row.items() if name != "host")
    (work,) = RunWork(results_of(slow)).kinds
    assert work.decode_step()[0]["host"] == pytest.approx(work.mean_step()["host"], rel=0.05)
    assert work.ran.time_by_resource[HOST] >= 0.005 * work.num_steps


def test_money_and_gpus_are_those_that_were_there():
    """An autoscaler's replicas cost while they exist: what is shown per hour is what was paid."""
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm",
            "workload": LOADS | {"request_rate": 30, "num_requests": 4000},
            "cluster": {"replicas": 1, "autoscaler": {"target": 8, "max": 4, "interval": "2 s",
                                                      "startup": {"node": "5 s"}}}}  # fmt: skip
    result = results_of(data)
    cost, paid = cost_of(result, measure(result)), result.replicas.paid(result.end_time)
    hours = result.end_time / 3600
    assert cost["gpus"] == pytest.approx(paid["gpu_seconds"] / result.end_time, rel=0.01)
    assert np.array(cost["usd_per_hour"]) * hours == pytest.approx(paid["usd"], rel=1e-6)


def test_bytes_are_those_of_each_kind():
    """Two kinds of unlike weights: what a run moved lies between what either alone would have."""
    base = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOADS}
    kinds = {"cluster": {"kinds": [{"replicas": 1}, {"replicas": 1, "precision": {"weights": "fp8"}}]}}
    works = RunWork(results_of(base | kinds)).kinds
    weights = [
        sum(op.count * float(evaluate(op.weights, {"step": 1.0})) for op in work.operators if op.weights.get("step"))
        for work in works
    ]
    assert weights[1] < 0.7 * weights[0]
