"""Images in prompts: what encoding costs, how embeddings travel, and what becomes of a request whose encoder dies."""

import json

import numpy as np
import pytest

from infersim.cluster.clients import Clients
from infersim.cluster.serve import Served, serve
from infersim.cluster.site import Site
from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import encoder_of
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.summary import summarize
from infersim.report.terminal import render
from infersim.run import run
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests

QWEN2_VL = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120,
            "patches_per_token": 4}  # fmt: skip
CHAT = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "workload": {
        "request_rate": 5,
        "num_requests": 200,
        "input_tokens": 200,
        "output_tokens": 50,
        "images": {"tokens": 1024, "share": 0.5, "per_request": {"uniform": [1, 3]}},
    },
    "cluster": {
        "replicas": 2,
        "router": "least-outstanding",
        "encode": {"replicas": 1, "encoder": QWEN2_VL},
        "transfer": {"bandwidth": "50 GB/s"},
    },
}


def scenario_of(cluster: dict | None = None, **workload):
    data = CHAT | {"cluster": CHAT["cluster"] | (cluster or {}), "workload": CHAT["workload"] | workload}
    return build_scenario(data, "test")


def server(step: float, longest: int, batch: int = 8) -> ReplicaSpec:
    """Every step takes `step` seconds, whatever is in it."""
    linear, head = np.zeros((longest * batch + 1, len(state.RESOURCES))), np.zeros((batch + 1, len(state.RESOURCES)))
    linear[1:, 0] = step
    knobs = make_knobs(block_size=16, num_gpu_blocks=1001, max_num_seqs=batch, max_num_batched_tokens=longest * batch,
                       max_model_len=longest)  # fmt: skip
    return ReplicaSpec(knobs, StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE)))


def serve_all(images: list[int], cluster: dict, arrival=None, encoders=1, batch=1, **clients) -> Served:
    """Answers in steps of 0.1 s; an image of 10 tokens takes an encoder 1 s, and 10 x 2 bytes at 10 B/s another 2 s."""
    n = len(images)
    encode = {"replicas": encoders, "encoder": QWEN2_VL | {"patches_per_token": 1}}
    spec = Cluster.validate({"encode": encode, "transfer": {"bandwidth": 10}} | cluster, "test")
    specs = [server(0.1, 500)] * spec.replicas + [server(1.0, 11, batch)] * encoders
    sites = [Site(1.0, 0.0, 1, 0.0, embedding_bytes=2.0)] * spec.replicas + [Site(1.0, 0.0, 1, 0.0, None)] * encoders
    arrival = np.zeros(n) if arrival is None else np.asarray(arrival, "f8")
    prompt, output = np.array(images, "i4") * 10 + 5, np.full(n, 2, "i4")
    requests = Requests(arrival, prompt, output, np.arange(n), images=np.array(images))
    return serve(spec, Fleet(specs), sites, requests, Clients(output, **clients), 0, None)


def test_encode_then_link_then_prefill():
    """1 s in the encoder, 2 s on the link, then the first step; a text waits for neither."""
    served = serve_all([1, 0], {"replicas": 1})
    assert served.requests["scheduled"].tolist() == [3, 0]
    assert served.columns["encode_ms"][0] == 3000
    assert np.isnan(served.columns["encode_ms"][1])
    assert served.route["images"] == 1
    assert served.route["embedding_bytes"] == 20


def test_images_of_a_request_are_encoded_side_by_side():
    """Two images: one after another in one encoder (2 s), at once in two, or in one that takes both in a step; then
    twice the bytes."""
    for encoders, batch, seconds in ((1, 1, 2), (2, 1, 1), (1, 2, 1)):
        served = serve_all([2], {"replicas": 1}, encoders=encoders, batch=batch)
        assert served.requests["scheduled"].tolist() == [seconds + 4]


def test_a_dead_encoder_loses_its_images_and_a_retry_encodes_them_again():
    cluster = {"replicas": 1, "failures": [{"replica": 1, "at": 0.5, "duration": 1}]}
    assert serve_all([2, 0], cluster).requests["status"].tolist() == [state.LOST, state.COMPLETED]
    served = serve_all([2, 0], cluster, retries=1, backoff=2.0)
    assert (served.requests["status"] == state.COMPLETED).all()
    assert served.requests["scheduled"][0] == 0.5 + 2 + 2 + 4


def test_a_client_gives_up_during_encoding():
    served = serve_all([3, 0], {"replicas": 1}, timeout=1.5)
    assert served.requests["status"].tolist() == [state.TIMED_OUT, state.COMPLETED]


def test_an_encoder_has_its_published_size_and_no_step_beats_physics():
    """Qwen2-VL's 32 layers have 0.63e9 parameters of its 0.675e9 (arXiv:2409.12191); FLOPs are 2 for each of them and
    patch, and 4 x patches x width for each layer's attention, in which all patches see all."""
    deployment = encoder_of(scenario_of())
    patches = 4096
    assert deployment.engine.max_model_len == patches + 1
    params = 32 * (4 * 1280**2 + 2 * 1280 * 5120)
    assert deployment.model.num_params == pytest.approx(params, rel=0.001)
    cost = deployment.step_cost()
    row = cost.attention[0]
    attention = row["prefill_compute"] * patches * (patches + 1) / 2
    flops = 2 * params * patches, 32 * 4 * patches**2 * 1280
    peak = deployment.hardware.flops["bf16"]
    assert cost.linear[patches].sum() >= flops[0] / peak
    assert attention >= flops[1] / peak
    assert cost.linear[patches].sum() < 4 * flops[0] / peak
    assert (cost.head == 0).all()


def test_images_are_in_the_prompt():
    scenario = scenario_of()
    requests = build_requests(scenario.workload, 0, None)
    assert np.array_equal(requests.prompt_tokens, 200 + 1024 * requests.images)
    assert set(requests.images) == {0, 1, 2, 3}
    assert (requests.images > 0).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(200))


def test_a_run_with_images_is_whole():
    """The laws hold, with prefill and decode apart too; requests with images wait longer; it is shown."""
    for cluster in ({}, {"replicas": None, "router": "round-robin", "prefill": {}, "decode": {}}):
        result = run(scenario_of(cluster))[0]
        document = summarize([result])
        assert result.completed.all()
        number = result.route_columns["images"]
        assert document["route"]["images"] == number.sum()
        ttft = result.requests["first_token"] - result.requests["sent"]
        assert ttft[number == 0].mean() < ttft[number == 3].mean()
        assert "encode     " in "\n".join(line for _, line in render(document, []))
    assert result.replicas.names == ("h100-sxm",) * 3


def test_a_resolved_scenario_is_that_scenario():
    scenario = scenario_of({"failures": [{"mean_time_between": 9, "duration": 1}]})
    assert build_scenario(json.loads(json.dumps(scenario.resolved())), "again") == scenario


def test_encoders_scale():
    scaler = {"policy": "outstanding", "target": 1, "max": 4, "interval": 1, "startup": {"node": "2 s"}}
    cluster = {"encode": CHAT["cluster"]["encode"] | {"autoscaler": scaler}}
    document = summarize(run(scenario_of(cluster, request_rate=60, num_requests=600)))
    assert document["route"]["autoscalers"][0]["group"] == "encode"
    assert document["route"]["autoscalers"][0]["starts"] > 0


@pytest.mark.parametrize(
    ("cluster", "workload", "problem"),
    [
        ({"encode": None, "transfer": None}, {}, "cluster.encode and workload.images: one without the other"),
        ({}, {"images": None}, "cluster.encode and workload.images: one without the other"),
        ({"transfer": None}, {}, "transfer: missing; prefill, decode and encode need it"),
        ({}, {"turns": 3}, "images are for single requests"),
        ({"encode": {"encoder": QWEN2_VL | {"num_attention_heads": 7}}}, {}, "num_attention_heads must divide"),
        (
            {"encode": {"encoder": QWEN2_VL | {"num_hidden_layers": 4000}}},
            {},
            "cluster.encode: model: encoder does not",
        ),
        ({"encode": {"encoder": QWEN2_VL, "model": "x"}}, {}, "cluster.encode.model: unknown key"),
        ({"failures": [{"replica": 3, "at": 1}]}, {}, "failures.0.replica: must be below 3"),
    ],
)
def test_what_cannot_be_is_one_line(cluster, workload, problem):
    with pytest.raises(InputError, match=problem) as error:
        run(scenario_of(cluster, **workload))
    assert len(error.value.problems) == 1


def test_an_encoder_obeys_the_engine_keys_of_every_step():
    """The token budget decides how many images a step has, and the host's times are the user's."""
    engine = {"max_num_batched_tokens": 16384, "host_step_time": "3 ms", "max_model_len": 4096, "max_num_seqs": 8}
    plain, given = encoder_of(scenario_of()), encoder_of(build_scenario(CHAT | {"engine": engine}, "test"))
    assert given.engine.host_step_time == 0.003 != plain.engine.host_step_time
    assert given.engine.max_num_seqs == 16384 // scenario_of().workload.images.tokens != plain.engine.max_num_seqs


def test_a_replica_that_comes_back_after_the_last_answer_was_there_before():
    """The link never comes back, so all is lost when the replica dies; that is repaired later."""
    failures = [{"at": 0.234, "duration": 0.529}, {"at": 0.002, "kind": "partition"}]
    encoder = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
    cluster = {"encode": {"replicas": 1, "encoder": encoder}, "transfer": {"bandwidth": 1e8}, "failures": failures}
    load = {"num_requests": 9, "input_tokens": 1, "output_tokens": 1, "request_rate": "inf", "images": {"tokens": 134}}
    parts = {"model": "Gemma-3-1B", "hardware": "h100-sxm", "workload": load, "cluster": cluster}
    result = run(build_scenario(parts, "test"))[0]
    assert result.end_time == 0.234
    assert result.replicas.available.tolist() == [0.234, 0.234]


def test_an_attempt_that_is_lost_while_it_is_encoded_has_not_been_for_less_than_no_time():
    encoder = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
    failures = [{"mean_time_between": 0.03, "duration": 0.05},
                {"mean_time_between": 0.2, "replica": 1, "duration": 0.01}]  # fmt: skip
    cluster = {"encode": {"replicas": 1, "encoder": encoder}, "transfer": {"bandwidth": 1e9}, "failures": failures}
    load = {"num_requests": 30, "input_tokens": 30, "output_tokens": 12, "request_rate": 20, "images": {"tokens": 34}}
    parts = {"model": "Llama-3.2-1B", "hardware": "h100-sxm", "cluster": cluster}
    for seed in range(4):
        workload = load | {"retries": 3, "backoff": 0.005}
        result = run(build_scenario(parts | {"workload": workload, "simulation": {"seed": seed}}, "test"))[0]
        assert not (result.columns()["encode_ms"] < 0).any()
