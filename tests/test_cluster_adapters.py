"""LoRA adapters: bytes, slots, loads, and routers that know where one is loaded."""

from dataclasses import asdict

import numpy as np
import pytest

from infersim.cluster.clients import Clients
from infersim.cluster.serve import Served, serve
from infersim.cluster.site import Site
from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.scenario import build_scenario
from infersim.cost.lora import adapter_bytes
from infersim.cost.placement import Placement
from infersim.deployment import deployment_of
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.summary import summarize
from infersim.models.catalog import load_model
from infersim.report.servers import vllm_serve
from infersim.report.terminal import render
from infersim.run import run
from infersim.workload.requests import Requests

CHAT = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "workload": {
        "request_rate": 20,
        "num_requests": 400,
        "input_tokens": 500,
        "output_tokens": 60,
        "models": {"Llama-3.1-8B": 1, "law": 2, "code": 1},
    },
    "lora": {"adapters": {"law": 16, "code": 8}, "max_loras": 2},
}


def scenario_of(**keys):
    return build_scenario(CHAT | keys, "test")


def serve_all(
    names: list[str], arrival, cluster: dict, max_loras=1, size=1.0, outputs=1, replicas=1, overlap=True
) -> Served:
    """Servers with steps of 1 s, an adapter of `size` bytes over a link of 1 B/s; names: each request's model."""
    linear, head = np.zeros((33, len(state.RESOURCES))), np.zeros((9, len(state.RESOURCES)))
    linear[1:, 0] = 1.0
    knobs = make_knobs(block_size=16, num_gpu_blocks=101, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=1000)
    spec = ReplicaSpec(knobs, StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE)))
    models = tuple(sorted(set(names)))
    n, model = len(names), np.array([models.index(name) for name in names])
    outputs = np.broadcast_to(np.asarray(outputs, "i4"), n).copy()
    requests = Requests(np.asarray(arrival, "f8"), np.ones(n, "i4"), outputs, np.arange(n), model=model, models=models)
    site = Site(1.0, 0.0, 1, 0.0, "base", dict.fromkeys("abcdefgh", size), max_loras, overlap, 1.0)
    fleet = Fleet([spec] * replicas)
    spec = Cluster.validate({"replicas": replicas} | cluster, "test")
    return serve(spec, fleet, [site] * replicas, requests, Clients(outputs), 0, None)


def test_bytes_of_an_adapter():
    """Llama-3.1-8B, rank 16, all seven matrices: 41,943,040 parameters as PEFT prints them, twice that many bytes.

    vLLM fuses q, k, v and gate, up, with an A for each: the same number. Tensor parallelism halves what it cuts.
    """
    model, h100 = load_model("Llama-3.1-8B"), load_hardware("h100-sxm")
    assert adapter_bytes(Placement(model, h100), 16) == 2 * 41_943_040
    h, kv, f = 4096, 1024, 14336
    cut = h + 2 * kv + f + f + h + f  # outputs of q, k, v, gate, up; inputs of o and down
    whole = 3 * h + 2 * h + h + h  # inputs of q, k, v, gate, up; outputs of o and down
    expected = 2 * 16 * 32 * (whole + cut / 2)
    assert adapter_bytes(Placement(model, h100, parallelism=Parallelism(tensor=2, moe_tensor=2)), 16) == expected


def test_slots_come_off_the_kv_cache():
    """As many slots as max_loras, each for max_lora_rank; the waterfall adds up."""
    plain = deployment_of(scenario_of(lora=None, workload=CHAT["workload"] | {"models": None})).memory
    lora = {"adapters": {"law": 16, "code": 8}, "max_loras": 8, "max_lora_rank": 64}
    memory = deployment_of(scenario_of(lora=lora)).memory
    assert memory.adapter_bytes == 8 * 64 * 2 * 41_943_040 / 16
    assert plain.kv_bytes - memory.kv_bytes == pytest.approx(memory.adapter_bytes, abs=memory.block_bytes)


def test_a_slot_has_one_of_vllms_ranks():
    """The next of 1, 8, 16, 32, ... that holds the largest adapter; and vLLM is started with it."""
    scenario = scenario_of(lora={"adapters": {"law": 20, "code": 8}, "max_loras": 2})
    assert scenario.lora.slot_rank == 32
    words = vllm_serve(scenario, asdict(deployment_of(scenario).engine))
    start = words.index("--enable-lora")
    assert words[start : start + 5] == ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "32"]
    assert "law=/adapters/law" in words


def test_the_first_request_waits_for_the_load_and_the_second_does_not():
    """2 bytes at 1 B/s; a request for the model itself waits for nothing; another adapter takes the place."""
    served = serve_all(["a", "base", "a", "b", "a"], [0.0, 0.0, 10.0, 20.0, 30.0], {}, size=2.0)
    assert served.requests["scheduled"].tolist() == [2, 0, 10, 22, 32]
    assert served.columns["adapter_wait_ms"][[0, 2, 3, 4]].tolist() == [2000, 0, 2000, 2000]
    assert np.isnan(served.columns["adapter_wait_ms"][1])
    assert served.route["adapter_loads"] == 3


def test_a_load_that_does_not_overlap_holds_up_everybodys_next_step():
    """Five steps of 1 s for the model itself; at 1.5 s a request asks for an adapter, whose 3 s come behind the step
    that runs. The step after it has both, and ends at 2 + 3 + 1 s; overlapped, nobody but the request waits."""
    held = serve_all(["base", "a"], [0.0, 1.5], {}, size=3.0, outputs=[5, 1], overlap=False)
    assert held.requests["last_token"].tolist() == [8, 6]
    assert held.route["adapter_stalls_s"] == 3
    free = serve_all(["base", "a"], [0.0, 1.5], {}, size=3.0, outputs=[5, 1])
    assert free.requests["last_token"].tolist() == [5, 6]
    assert free.route["adapter_stalls_s"] == 0


def test_a_second_slot_keeps_the_first_adapter():
    served = serve_all(["a", "b", "a"], [0.0, 20.0, 30.0], {}, max_loras=2, size=2.0)
    assert served.route["adapter_loads"] == 2
    assert served.requests["scheduled"].tolist() == [2, 22, 30]


def test_an_adapter_that_is_needed_stays():
    """One slot: b waits until a's last request has ended; a's next goes before b, as vLLM's scheduler lets it."""
    served = serve_all(["a", "b", "a"], [0.0, 1.0, 2.0], {}, outputs=[5, 1, 7])
    a, b, second = served.requests
    assert second["scheduled"] < b["scheduled"]
    assert b["scheduled"] == max(a["last_token"], second["last_token"]) + 1


def test_two_loads_share_the_link():
    served = serve_all(["a", "b"], [0.0, 0.0], {}, max_loras=2)
    assert served.requests["scheduled"].tolist() == [2, 2]


def test_a_router_that_knows_adapters_loads_less():
    """Six adapters, three replicas of two slots: by load alone adapters are thrown out for one another; by affinity
    (only) each finds its place."""
    random = np.random.default_rng(1)
    names = random.choice(list("abcdef"), 300).tolist()
    arrival = np.cumsum(random.exponential(2.0, 300))
    loads = {}
    for affinity in (0, 10):
        scorers = {"queue": 1, "kv_usage": 0, "outstanding": 1, "prefix": 0, "lora_affinity": affinity}
        router = {"router": {"policy": "weighted", "scorers": scorers}}
        loads[affinity] = serve_all(names, arrival, router, 2, 0.5, 2, replicas=3).route["adapter_loads"]
    assert loads[10] < 0.3 * loads[0]


def test_an_old_report_of_adapters_is_what_was_true_then():
    """Reports at 0 and 10 s: at 5 s it is not yet known that replica 0 has a; at 15 s it is."""
    scorers = {"queue": 0, "kv_usage": 0, "prefix": 0, "lora_affinity": 1}
    router = {"router": {"policy": "weighted", "scorers": scorers, "signal_age": 10}}
    served = serve_all(["a", "a", "a", "a"], [0.0, 5.0, 15.0, 16.0], router, replicas=3)
    first, second, third, fourth = served.requests["replica"]
    assert second != first
    assert {third, fourth} <= {first, second}


def test_a_crash_forgets_what_was_loaded():
    cluster = {"failures": [{"at": 5, "duration": 1}]}
    served = serve_all(["a", "a", "a"], [0.0, 10.0, 20.0], cluster)
    assert served.route["adapter_loads"] == 2
    assert served.requests["scheduled"].tolist() == [1, 11, 20]


def test_a_run_says_what_adapters_did():
    result = run(scenario_of())[0]
    assert result.completed.all()
    document = summarize([result])
    assert document["models"]["law"]["requests"] == pytest.approx(200, abs=50)
    assert document["route"]["adapter_loads"] == 2
    size = adapter_bytes(Placement(load_model("Llama-3.1-8B"), result.scenario.hardware), 16)
    bandwidth = result.scenario.hardware.pcie_bandwidth
    assert document["route"]["adapter_stalls_s"] == pytest.approx(1.5 * size / bandwidth)  # ranks 16 and 8
    overlapped = {"lora": CHAT["lora"] | {"overlap_loading": True}, "engine": {"preset": "sglang-0.5"}}
    other = run(scenario_of(**overlapped))[0]
    first = np.flatnonzero(other.model == 1)[0]
    assert other.route_columns["adapter_wait_ms"][first] == pytest.approx(1e3 * size / bandwidth)
    text = "\n".join(line for _, line in render(document, []))
    assert "adapters   2 loads for" in text
    assert "adapters 0.16" in text


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"lora": {"adapters": {"law": 16}, "max_lora_rank": 8}}, "max_lora_rank: must be at least the largest rank"),
        ({"lora": {"adapters": {"law": 16}}}, "workload: no replica serves model 'code'; served are Llama-3.1-8B, law"),
        ({"lora": {"adapters": {"Llama-3.1-8B": 16}}}, "lora.adapters: 'Llama-3.1-8B' is another model's name"),
        (
            {"lora": CHAT["lora"] | {"overlap_loading": True}},
            "vLLM copies adapters in front of the step that needs them",
        ),
        ({"lora": CHAT["lora"] | {"max_loras": 1000}}, "leave no KV cache; max_loras must be smaller"),
        ({"model": "Mixtral-8x7B-v0.1", "parallelism": {"tensor": 2}}, "lora: adapters of experts"),
        ({"hardware": "tpu-v6e"}, "hardware.pcie_bandwidth: missing"),
    ],
)
def test_what_cannot_be_is_one_line(keys, problem):
    with pytest.raises(InputError, match=problem) as error:
        run(scenario_of(**keys))
    assert len(error.value.problems) == 1


def test_a_replica_that_fails_while_an_adapter_comes_was_busy_with_its_steps_alone():
    """It fails in the load, before its first step, or later, when a step is cut short."""
    parts = {"model": "Qwen2.5-0.5B", "hardware": "a10", "lora": {"adapters": {"b": 11}}}
    load = {"num_requests": 1, "input_tokens": 1, "output_tokens": 200, "request_rate": 50, "models": {"b": 1}}
    busy = []
    for after in (1e-6, 0.5):  # s after the request comes
        alone = build_scenario(parts | {"workload": load}, "test")
        sent = float(run(alone)[0].requests["sent"][0])
        failures = [{"at": sent + after, "replica": 0, "duration": 10}]
        result = run(build_scenario(parts | {"workload": load, "cluster": {"failures": failures}}, "test"))[0]
        busy.append(result.busy_time)
        assert (result.time_by_resource >= 0).all()
        assert result.busy_time == pytest.approx(result.time_by_resource.sum(), abs=1e-12)
    assert busy[0] == pytest.approx(0.0, abs=1e-12)
    assert 0.0 < busy[1] <= 0.5
