"""Runs with one limit each: what is named is what helps most when it is lifted."""

import json

import pytest

from infersim.config.scenario import build_scenario
from infersim.explain.summary import summarize
from infersim.planning.limits import lift_limits, with_limits
from infersim.run import run

SMALL = {"model": "Llama-3.1-8B", "hardware": "h100-sxm"}
TWO_GPUS = {
    "model": "Llama-3.1-70B",
    "hardware": "h100-sxm",
    "parallelism": {"tensor": 2},
    "precision": {"weights": "fp8"},
}
MOE = {"model": "Mixtral-8x7B", "hardware": "h200-sxm"}
AMD = {"model": "Qwen3-8B", "hardware": "mi300x", "engine": {"preset": "vllm-0.15"}}
RADIX = {"model": "Qwen3-8B", "hardware": "a100-sxm-80gb", "engine": {"preset": "sglang-0.5"}}
LINK = {"bandwidth": "50 GB/s"}
ENCODER = {
    "hidden_size": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "intermediate_size": 5120,
    "patches_per_token": 4,
}


def open_load(rate, prompt, output, n=300, **more):
    return {
        "workload": {"request_rate": rate, "num_requests": n, "input_tokens": prompt, "output_tokens": output, **more}
    }


def burst(prompt, output, n=300, **more):
    return open_load("inf", prompt, output, n, **more)


def pools(prefill, decode, **more):
    return {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}, "transfer": LINK} | more


def adapters(n, slots):
    return {"lora": {"adapters": {f"a{i}": 16 for i in range(n)}, "max_loras": slots}}


def asked_for(n):
    return {"models": {f"a{i}": 1 for i in range(n)}}


def kinds(*replicas):
    each = [{"hardware": name, "replicas": n, "engine": engine} for name, n, engine in replicas]
    return {"kinds": each, "router": "least-outstanding"}


def two_models(llamas, qwens):
    return {"kinds": [{"replicas": llamas}, {"replicas": qwens, "hardware": "l40s", "model": "Qwen3-8B"}]}


def images(encoders, decoders, bandwidth="50 GB/s"):
    encode = {"replicas": encoders, "encoder": ENCODER}
    return {"cluster": {"replicas": decoders, "encode": encode, "transfer": {"bandwidth": bandwidth}}}


HOLDING = pools(2, 2)
HOLDING["prefill"]["engine"] = {"num_gpu_blocks_override": 600, "max_model_len": 4096}
PICTURES = {"images": {"per_request": 4, "tokens": 1000}}


CHATS = {"prefixes": {"count": 24, "tokens": 3000}}
# name: limit, what is served without it, and what imposes it
CASES = {
    **{
        f"few sequences, {name}": ("max_num_seqs", base | burst(200, 200), {"engine.max_num_seqs": 8})
        for name, base in {"small": SMALL, "large": TWO_GPUS, "moe": MOE, "amd": AMD, "radix": RADIX}.items()
    },
    "few sequences, steady": ("max_num_seqs", SMALL | open_load(20, 300, 150), {"engine.max_num_seqs": 6}),
    "few sequences, clients": (
        "max_num_seqs",
        SMALL | burst(200, 200, max_concurrency=100),
        {"engine.max_num_seqs": 16},
    ),
    **{
        f"few blocks, {name}": (
            "kv_blocks",
            base | burst(200, 200),
            {"engine.num_gpu_blocks_override": 400, "engine.max_model_len": 2048},
        )
        for name, base in {"small": SMALL, "large": TWO_GPUS, "moe": MOE, "amd": AMD}.items()
    },
    "few blocks, radix": (
        "kv_blocks",
        RADIX | burst(200, 200),
        {"engine.num_gpu_blocks_override": 6000, "engine.max_model_len": 2048},
    ),
    "few blocks, whole length reserved": (
        "kv_blocks",
        SMALL | {"engine": {"preset": "orca", "reserve": "max-model-len", "max_model_len": 2048}} | burst(200, 100),
        {"engine.num_gpu_blocks_override": 12000},
    ),
    "few blocks, cached text lost": (
        "kv_blocks",
        SMALL | {"engine": {"max_model_len": 8192}} | open_load(18, 60, 10, 500, **CHATS),
        {"engine.num_gpu_blocks_override": 2400},
    ),
    **{
        f"small budget, {name}": (
            "max_num_batched_tokens",
            base | open_load(rate, 1500, 4),
            {"engine.max_num_batched_tokens": 64, "engine.max_num_seqs": 64},
        )
        for name, base, rate in (("small", SMALL, 8), ("large", TWO_GPUS, 3), ("moe", MOE, 4), ("amd", AMD, 8))
    },
    "one prefill replica": (
        "prefill",
        SMALL | open_load(8, 8000, 20) | {"cluster": pools(4, 4)},
        {"cluster.prefill.replicas": 1, "cluster.replicas": 5},
    ),
    "one prefill replica, large": (
        "prefill",
        TWO_GPUS | open_load(2, 6000, 20, 200) | {"cluster": pools(4, 2)},
        {"cluster.prefill.replicas": 1, "cluster.replicas": 3},
    ),
    "one decode replica": (
        "decode",
        SMALL | open_load(30, 3000, 300, 600) | {"cluster": pools(4, 3)},
        {"cluster.decode.replicas": 1, "cluster.replicas": 5},
    ),
    "few sequences to decode": (
        "decode.max_num_seqs",
        SMALL | open_load(10, 100, 200) | {"cluster": pools(2, 2)},
        {"cluster.decode.engine": {"max_num_seqs": 4}},
    ),
    "few blocks to decode": (
        "decode.kv_blocks",
        SMALL | open_load(20, 100, 200) | {"cluster": pools(2, 2)},
        {"cluster.decode.engine": {"num_gpu_blocks_override": 120, "max_model_len": 1024}},
    ),
    "small budget to prefill": (
        "prefill.max_num_batched_tokens",
        SMALL | open_load(8, 1500, 4) | {"cluster": pools(1, 1)},
        {"cluster.prefill.engine": {"max_num_batched_tokens": 64, "max_num_seqs": 64}},
    ),
    "slow link": (
        "transfer",
        SMALL | open_load(8, 2000, 20) | {"cluster": pools(2, 2)},
        {"cluster.transfer.bandwidth": "2.5 GB/s"},
    ),
    "slow link, large": (
        "transfer",
        TWO_GPUS | open_load(2, 4000, 10, 200) | {"cluster": pools(2, 2)},
        {"cluster.transfer.bandwidth": "3 GB/s"},
    ),
    "busy link, for which prompts hold their blocks": (
        "transfer",
        SMALL | open_load(10, 3000, 20) | {"cluster": HOLDING},
        {"cluster.transfer.bandwidth": "3.5 GB/s"},
    ),
    "one slot for adapters": (
        "max_loras",
        SMALL | adapters(4, 4) | open_load(12, 200, 60, **asked_for(4)),
        {"lora.max_loras": 1},
    ),
    "two slots for adapters": (
        "max_loras",
        SMALL | adapters(8, 8) | open_load(20, 200, 60, **asked_for(8)),
        {"lora.max_loras": 2},
    ),
    "admission": ("admission", SMALL | burst(200, 100, 200), {"cluster.admission": {"max_outstanding": 6}}),
    "admission that refuses": (
        "admission",
        SMALL | open_load(20, 200, 100),
        {"cluster.admission": {"max_outstanding": 4, "max_queue": 2}},
    ),
    "admission, two replicas": (
        "admission",
        SMALL | {"cluster": {"replicas": 2}} | open_load(30, 300, 100),
        {"cluster.admission": {"max_outstanding": 5}},
    ),
    "API server, requests": ("api_server", SMALL | open_load(20, 50, 4), {"engine.host_request_time": "60 ms"}),
    "API server, tokens": ("api_server", SMALL | open_load(6, 100, 100), {"engine.host_token_time": "1.6 ms"}),
    "router, uneven": (
        "router",
        SMALL
        | {"cluster": {"replicas": 4, "router": "least-outstanding"}}
        | open_load(18, {"uniform": [1, 16000]}, 20, 600),
        {"cluster.router": "random"},
    ),
    "router, caches unseen": (
        "router",
        SMALL
        | {
            "cluster": {"replicas": 4, "router": "prefix-aware"},
            "engine": {"num_gpu_blocks_override": 2600, "max_model_len": 8192},
        }
        | open_load(60, 60, 4, 900, **CHATS),
        {"cluster.router": "round-robin"},
    ),
    "router, old news": (
        "router",
        SMALL
        | {"cluster": {"replicas": 4, "router": "least-outstanding"}, "engine": {"max_num_seqs": 4}}
        | open_load(12, 100, {"uniform": [1, 300]}, 600),
        {"cluster.router": {"policy": "least-outstanding", "signal_age": "10 s"}},
    ),
    "one encoder": (
        "encode",
        SMALL | images(4, 3) | open_load(8, 100, 4, 200, **PICTURES),
        {"cluster.encode.replicas": 1},
    ),
    "one replica that decodes": (
        "replicas",
        SMALL | images(12, 4) | open_load(14, 100, 20, 300, **PICTURES),
        {"cluster.replicas": 1},
    ),
    "slow link from the encoders": (
        "transfer",
        SMALL | images(4, 2) | open_load(3, 100, 20, 200, **PICTURES),
        {"cluster.transfer.bandwidth": "0.1 GB/s"},
    ),
    "a kind with few replicas": (
        "kinds.1",
        SMALL | {"cluster": two_models(1, 4)} | open_load(30, 2000, 20, 400, models={"Llama-3.1-8B": 1, "Qwen3-8B": 1}),
        {"cluster": two_models(1, 1)},
    ),
    "a kind with few sequences": (
        "kinds.1.max_num_seqs",
        SMALL | {"cluster": kinds(("h100-sxm", 3, {}), ("h200-sxm", 1, {}))} | open_load(60, 200, 150),
        {"cluster": kinds(("h100-sxm", 3, {}), ("h200-sxm", 1, {"max_num_seqs": 5}))},
    ),
    "a kind with few blocks": (
        "kinds.0.kv_blocks",
        SMALL | {"cluster": kinds(("h100-sxm", 1, {}), ("h200-sxm", 1, {}))} | open_load(20, 200, 150),
        {
            "cluster": kinds(
                ("h100-sxm", 1, {"num_gpu_blocks_override": 70, "max_model_len": 1024}), ("h200-sxm", 1, {})
            )
        },
    ),
    "a replica is down": (
        "failures",
        SMALL | {"cluster": {"replicas": 2, "router": "least-outstanding"}} | open_load(30, 2000, 40, 600),
        {"cluster.failures": [{"kind": "crash", "replica": 0, "at": 2}]},
    ),
    "a replica is slow": (
        "failures",
        SMALL | {"cluster": {"replicas": 2, "router": "least-outstanding"}} | open_load(20, 2000, 40, 400),
        {"cluster.failures": [{"kind": "slow", "replica": 0, "at": 0, "factor": 20}]},
    ),
    "the autoscaler": (
        "autoscaler",
        SMALL | {"cluster": {"replicas": 4, "router": "least-outstanding"}} | open_load(40, 2000, 40, 600),
        {
            "cluster": {
                "replicas": 1,
                "router": "least-outstanding",
                "autoscaler": {"policy": "outstanding", "target": 10, "min": 1, "max": 4, "startup": {"node": "60 s"}},
            }
        },
    ),
}


def answer(base, imposed=None):
    scenario = build_scenario(base, "test", [f"{key}={json.dumps(value)}" for key, value in (imposed or {}).items()])
    results = run(scenario)
    return results[0], with_limits(summarize(results), results[0])["explain"]


QUICK = {limit.rpartition(".")[2]: name for name, (limit, *_) in reversed(CASES.items())}.values()


def test_there_are_enough_cases():
    assert len(CASES) >= 40


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_limit_that_is_named_is_the_one_whose_lifting_helps_most(case):
    """And the same deployment without the limit is faster, or completes more."""
    limit, base, imposed = CASES[case]
    result, explain = answer(base, imposed)
    assert explain["binding_constraint"] == limit
    first, *others = explain["lifted"]
    assert first["limit"] == limit
    assert explain["ceiling_factor"] == first["faster"] > 1.05
    gains = [row["faster"] * row["completed"][1] / row["completed"][0] for row in (first, *others)]
    assert max(gains) <= gains[0] * (1.0 if first["hardware"] else 1.05)
    assert "simulated again" in explain["ceiling"]
    (free,) = run(build_scenario(base, "test"))
    both = result.completed & free.completed
    latency = [float((r["last_token"] - r["sent"])[both].mean()) for r in (result.requests, free.requests)]
    assert latency[0] > 1.05 * latency[1]


def test_a_limit_whose_lifting_gains_nothing_is_not_named():
    """Compute is short: all wait for it, and no room that they were given would help."""
    _, explain = answer(SMALL | open_load(60, 4000, 2, 400))
    assert explain["lifted"]
    assert explain["binding_constraint"] == "compute"


def test_who_does_not_wait_is_not_simulated_again():
    result, explain = answer(SMALL | open_load(2, 200, 20, 100))
    assert lift_limits(result) == explain["lifted"] == []


def test_requests_without_an_answer_count():
    """Clients give up: the share of requests that are completed is part of what lifting a limit brings."""
    result, explain = answer(SMALL | burst(200, 200, timeout="6 s"), {"engine.max_num_seqs": 32})
    assert not result.completed.all()
    assert explain["binding_constraint"] == "max_num_seqs"
    before, after = explain["lifted"][0]["completed"]
    assert before == result.completed.mean() < after
    assert "of requests completed instead of" in explain["ceiling"]
