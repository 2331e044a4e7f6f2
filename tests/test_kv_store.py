"""A store of KV that all replicas share: what it has, what loading from it takes, and who may have one."""

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.run import run

SESSIONS = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "engine": {"max_num_seqs": 16, "max_num_batched_tokens": 4096, "max_model_len": 8192},
    "cluster": {"replicas": 2, "router": "round-robin"},
    "workload": {"users": 1, "num_requests": 6, "turns": 2, "input_tokens": 1000, "output_tokens": 40},
}
"""one user's conversations of two turns: with two replicas that take turns, each second turn is on the other replica"""


def columns(store: dict | None, **more) -> dict[str, np.ndarray]:
    cluster = SESSIONS["cluster"] | ({"kv_store": store} if store else {})
    (result,) = run(build_scenario(SESSIONS | {"cluster": cluster} | more, ""))
    r = result.requests
    ttft = (r["first_token"] - r["sent"]) * 1e3
    return {"ttft_ms": ttft, "cached": r["num_cached_tokens"], "stored": r["num_stored_cached_tokens"]}


def test_what_one_replica_computed_another_loads():
    """Of 1,040 tokens of the first turn all full blocks but those of tokens that were never computed; loading them at
    half the bandwidth takes so many bytes over the difference longer, and nothing else changes."""
    alone, fast, slow = (
        columns({"size": "1 TB", "bandwidth": b, "latency": "2 ms"} if b else None) for b in ("", "40 GB/s", "20 GB/s")
    )
    second = np.arange(6) % 2 == 1
    assert not alone["cached"].any()
    assert fast["stored"].tolist() == [0, 1040, 0, 1040, 0, 1040]
    size = deployment_of(build_scenario(SESSIONS, "")).memory.block_bytes * 1040 / 16
    longer = (slow["ttft_ms"] - fast["ttft_ms"])[second]
    assert longer == pytest.approx(1e3 * size * (1 / 20e9 - 1 / 40e9), rel=1e-6)
    assert (fast["ttft_ms"] < 0.8 * alone["ttft_ms"])[second].all()
    assert fast["ttft_ms"][~second] == pytest.approx(alone["ttft_ms"][~second])


def test_a_full_store_forgets_what_was_used_least_recently():
    """Room for one prompt and answer: its text is there for the turn that follows at once, and nothing older."""
    token = 131072
    found = columns({"size": 1040 * token, "bandwidth": "40 GB/s"})["stored"]
    assert found.tolist() == [0, 1040, 0, 1040, 0, 1040]
    assert not columns({"size": 900 * token, "bandwidth": "40 GB/s"})["stored"].any()


def test_loads_in_the_background_or_by_layers_are_no_longer_than_those_before_the_step():
    store = {"size": "1 TB", "bandwidth": "10 GB/s"}
    how = [
        columns(store, engine=SESSIONS["engine"] | {"kv_offloading_load": word})["ttft_ms"][1::2].mean()
        for word in ("blocking", "background", "layers")
    ]
    assert how[2] < how[0]
    assert how[1] == pytest.approx(how[0], rel=0.1)  # alone there is nobody else to run meanwhile


def test_who_may_share_one():
    store = {"size": "1 TB", "bandwidth": "40 GB/s"}
    kinds = [{}, {"precision": {"kv_cache": "fp8"}}]
    with pytest.raises(InputError, match=r"cluster\.kv_store: replicas must have one model and one format of KV"):
        run(build_scenario(SESSIONS | {"cluster": {"kinds": kinds, "kv_store": store}}, ""))
    with pytest.raises(InputError, match=r"cluster\.kv_store: is modelled for prefix caching by blocks"):
        run(build_scenario(SESSIONS | {"model": "Gemma-2-2B", "cluster": {"kv_store": store}}, ""))
    with pytest.raises(InputError, match=r"engine\.kv_offloading_load: nothing is loaded without"):
        run(build_scenario(SESSIONS | {"engine": {"kv_offloading_load": "layers"}}, ""))


def test_a_router_that_sees_tiers_sends_a_prompt_where_its_text_is():
    """Text that the GPU has given up and the CPU has: without a weight for it the idle replicas look alike."""
    data = SESSIONS | {
        "engine": SESSIONS["engine"] | {"num_gpu_blocks_override": 520, "kv_offloading_size": "40 GB"},
        "workload": {"users": 16, "num_requests": 160, "turns": 5, "input_tokens": 1500, "output_tokens": 40,
                     "think_time": 20.0},
    }  # fmt: skip
    found = []
    for weight in (0.0, 0.8):
        router = {"policy": "kv-aware", "host_cache_hit_weight": weight}
        answer = run(build_scenario(data | {"cluster": {"replicas": 3, "router": router}}, ""))[0].requests
        found.append(int(answer["num_cached_tokens"].sum()))
    assert found[1] > 1.1 * found[0]
