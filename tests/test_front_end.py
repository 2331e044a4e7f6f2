"""What stands between a client and the scheduler: the API server's times, chunks of a stream, hand-overs."""

import numpy as np
import pytest

from infersim.config.parallelism import Parallelism
from infersim.config.scenario import build_scenario
from infersim.cost.partition import largest_graph
from infersim.cost.steptime import capture_sizes
from infersim.deployment import deployment_of
from infersim.metrics.conservation import check_conservation
from infersim.metrics.latency import measure, measured_gaps
from infersim.run import run

LOAD = {"request_rate": 1, "num_requests": 20, "input_tokens": 1000, "output_tokens": 25}
NOTHING = {"host_request_time": 0, "host_prompt_token_time": 0, "host_request_latency": 0}


def result_of(engine=None, workload=None, **keys):
    data = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "workload": LOAD | (workload or {}),
        "engine": engine or {},
    }
    (result,) = run(build_scenario(data | keys, "test"), save_detailed=True)
    assert check_conservation(result) is None
    return result


def test_a_lone_request_waits_for_the_front_end():
    """TTFT beyond the device's is the time per request, per prompt token, and the latency."""
    alone = {"request_rate": 0.1, "num_requests": 5}
    front = {"host_request_time": "3 ms", "host_prompt_token_time": "4 us", "host_request_latency": "5 ms"}
    with_it, without = (measure(result_of(engine, alone))["mean_ttft_ms"] for engine in (front, NOTHING))
    assert with_it - without == pytest.approx(3 + 1000 * 4e-3 + 5, rel=1e-6)


def test_the_server_takes_one_prompt_after_another_but_latencies_overlap():
    """Of 20 requests at once the last waits for all prompts' time, and once for the latency."""
    burst = {"request_rate": "inf", "num_requests": 20, "output_tokens": 1, "input_tokens": 10}

    def last(**engine):
        r = result_of(NOTHING | engine, burst).requests
        return float(r["scheduled"].max())

    assert last(host_prompt_token_time="1 ms") == pytest.approx(20 * 10 * 1e-3, rel=0.02)
    assert last(host_request_latency="50 ms") == pytest.approx(last() + 50e-3, rel=0.02)


@pytest.mark.parametrize("alone", [True, False])
def test_chunks_of_a_stream(alone):
    """25 tokens in tens: 1, 10, 10, 4 or 10, 10, 5; no token is lost, ends stay, the first comes with its chunk."""
    plain = result_of()
    chunked = result_of({"stream_interval": 10, "stream_first_token": alone})
    assert (plain.requests["last_token"] == chunked.requests["last_token"]).all()
    gaps = plain.itl_gaps.reshape(20, 24).astype("f8")
    ends = np.concatenate([[0], np.cumsum(gaps[0])])
    first = 0 if alone else 9
    waits = chunked.requests["first_token"] - plain.requests["first_token"]
    assert waits[0] == pytest.approx(ends[first], rel=1e-5)
    sent = [0, 10, 20, 24] if alone else [9, 19, 24]
    assert measured_gaps(chunked)[: len(sent) - 1] == pytest.approx(np.diff(ends[sent]), rel=1e-4)
    assert measured_gaps(chunked).sum() == pytest.approx(gaps.sum() - waits.sum(), rel=1e-4)


def test_a_stream_of_single_tokens_is_the_plain_one():
    plain, same = result_of(), result_of({"stream_interval": 1})
    assert (plain.itl_gaps == same.itl_gaps).all()


def test_polling_delays_new_requests_and_no_running_one():
    """SGLang's interval of n decode steps: a new request waits up to n of them while others generate."""
    load = {"request_rate": 2, "num_requests": 40, "output_tokens": 400}
    often, seldom = (result_of({"preset": "sglang-0.5", "scheduler_recv_interval": n}, load) for n in (0, 30))
    step = measure(often)["mean_tpot_ms"]
    later = measure(seldom)["mean_ttft_ms"] - measure(often)["mean_ttft_ms"]
    assert 5 * step < later < 30 * step


def test_pools_have_their_own_ranks():
    """Prefill with data-parallel attention beside decode without, and the other way; blocks are each pool's."""
    ranks, one = {"attention_data": 4, "expert": 4}, {"tensor": 4}
    for prefill, decode in ((ranks, one), (one, ranks), ({"attention_data": 2, "expert": 2, "tensor": 2}, ranks)):
        cluster = {"prefill": {"parallelism": prefill}, "decode": {"parallelism": decode},
                   "transfer": {"bandwidth": "200 GB/s"}}  # fmt: skip
        result = result_of(model="Mixtral-8x7B", cluster=cluster, workload={"request_rate": 10, "num_requests": 60})
        assert result.completed.all()
        assert result.replicas.gpus.tolist() == [4, 4]
        usable = [(ran.spec.knobs["num_gpu_blocks"] - 1) * ran.deployment.parallelism.attention_data
                  for ran in result.ran]  # fmt: skip
        assert result.replicas.usable_blocks.tolist() == usable


def test_ranks_that_are_not_there_cost_nothing():
    """A replica of one rank is the same beside one of four as alone."""
    cluster = {"prefill": {"parallelism": {"tensor": 4}}, "decode": {}, "transfer": {"bandwidth": "200 GB/s"}}
    load = {"request_rate": 5, "num_requests": 60}
    alone = result_of(model="Mixtral-8x7B", parallelism={"tensor": 4}, cluster=cluster, workload=load)
    cluster["decode"] = {"parallelism": {"attention_data": 4, "expert": 4}}
    beside = result_of(model="Mixtral-8x7B", parallelism={"tensor": 4}, cluster=cluster, workload=load)
    prefilled = [result.route_columns["prefilled_s"] for result in (alone, beside)]
    assert (prefilled[0] == prefilled[1]).all()


def test_a_hand_over_takes_its_time():
    cluster = {"prefill": {}, "decode": {}, "transfer": {"bandwidth": "100 GB/s"}}
    load = {"request_rate": 0.2, "num_requests": 5}
    plain = result_of(cluster=cluster, workload=load)
    slow = result_of(cluster={**cluster, "transfer": {"bandwidth": "100 GB/s", "request_time": "30 ms"}}, workload=load)
    assert measure(slow)["mean_ttft_ms"] - measure(plain)["mean_ttft_ms"] == pytest.approx(30, rel=1e-3)


def test_drafts_beside_data_parallel_attention():
    """Accepted drafts make steps fewer; a drafting layer's experts are paid for."""
    ranks = {"attention_data": 4, "expert": 4}
    keys = {"model": "Mixtral-8x7B", "parallelism": ranks, "workload": {"request_rate": 2, "num_requests": 30}}
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    plain = measure(result_of(**keys))["mean_tpot_ms"]
    never, always = (
        measure(result_of(**keys, speculation=drafts | {"acceptance": {"rate": rate}}))["mean_tpot_ms"]
        for rate in (0.0, 1.0)
    )
    assert always < plain < never
    assert always > plain / 3


@pytest.mark.parametrize(
    ("preset", "device", "tensor", "last", "some"),
    [
        ("sglang-0.5", "h100-sxm", 1, 256, {1, 2, 4, 8, 12, 16, 256}),
        ("sglang-0.5", "h100-sxm", 4, 512, {12, 256, 272, 496, 512}),
        ("sglang-0.5", "l40s", 1, 32, {12, 16, 32}),
        ("trtllm-1.0-no-evict", "h100-sxm", 1, 128, {1, 2, 4, 8, 120, 128}),
        ("vllm-0.33", "h100-sxm", 1, 512, {1, 2, 4, 8, 256, 272, 512}),
    ],
)
def test_graphs_are_captured_as_each_engine_does(preset, device, tensor, last, some):
    """server_args.py of SGLang, llm_args.py of TensorRT-LLM, config/vllm.py."""
    data = {"model": "Llama-3.1-8B", "hardware": device, "workload": LOAD, "parallelism": {"tensor": tensor},
            "engine": {"preset": preset, "max_model_len": 4096}}  # fmt: skip
    sizes = capture_sizes(deployment_of(build_scenario(data, "test")).engine).tolist()
    assert sizes[-1] == last
    assert some <= set(sizes)


def test_largest_graph_of_sglang():
    gib = 2.0**30
    assert [largest_graph(memory * gib, Parallelism()) for memory in (16, 24, 48, 80, 141, 180)] == [
        8, 24, 32, 256, 256, 512,
    ]  # fmt: skip
    assert largest_graph(80 * gib, Parallelism(attention_data=4)) == 512
