"""What Kwon et al. 2023 (PagedAttention, arXiv 2309.06180, section 6) served, and how: models, lengths, systems.

What the paper leaves open is taken from the scripts that they published with it, "the artifact" here: SOSP 2023's
artifact evaluation, github.com/sosp-ae-39/sosp-ae-astra.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from infersim.config.hardware import load_hardware
from infersim.config.scenario import Scenario, build_scenario
from infersim.metrics.result import Result
from infersim.models.catalog import load_model
from infersim.run import simulate
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests

from .lengths import most_even

GIB = 2.0**30
LONGEST, BLOCK = 2048, 16
SERVERS = {  # table 1: model, device, how many, GiB of KV cache (printed as GB)
    "13b": ("OPT-13B", "a100-sxm-40gb", 1, 12),
    "66b": ("OPT-66B", "a100-sxm-40gb", 4, 21),
    "175b": ("OPT-175B", "a100-sxm-80gb", 8, 264),
}

# Lengths with the printed means (figure 11), prompt and output independent of one another. What has 2,048 tokens or
# more in all is left out (artifact, trace.py).
# ShareGPT: what is most even. Alpaca: log-normal, since its outputs vary more than that. How much lengths vary was
# fitted: rows that it was fitted on are no evidence.
LENGTHS: dict[str, Any] = {
    "sharegpt": {"input_tokens": most_even(161.31, LONGEST - 1), "output_tokens": most_even(337.99, LONGEST - 1, 0.84)},
    "alpaca": {
        "input_tokens": {"lognormal": {"mean": 19.31, "sigma": math.sqrt(math.log(1 + 0.6**2))}},
        "output_tokens": {"lognormal": {"mean": 58.45, "sigma": math.sqrt(math.log(1 + 1.05**2))}},
    },
}
LENGTHS_FITTED: dict[str, Any] = {
    "sharegpt": {
        "variation of ShareGPT's outputs, 0.84": (
            "vllm.fig2.orca_max", "vllm.fig2.orca_pow2", "vllm.fig2.orca_oracle", "vllm.fig13a.orca_max",
            "vllm.fig13a.orca_pow2", "vllm.fig13a.orca_oracle", "vllm.derived.max", "vllm.derived.pow2",
            "vllm.derived.oracle",
        )
    },
    "alpaca": {
        "variation of Alpaca's outputs, 1.05": ("vllm.fig13b.orca_oracle",),
        "variation of Alpaca's prompts, 0.6": ("vllm.fig15.parallel2",),
    },
}  # fmt: skip
ASSUMED = {"sharegpt": "assumed: lengths of most entropy", "alpaca": "assumed: log-normal lengths"}
HOUR = 3600.0  # s of most traces (section 6.1)
SATURATED = 4.0  # requests a second of figure 2, on ShareGPT (artifact, experiments/fig2.sh)

# vLLM before 0.2.6 had no CUDA graphs, and did Python work for each request of a step, such as sampling, one request
# after another (cacheflow/models/sample.py): as much as makes the step of `vllm.derived.step`, 45 ms with 30.42
# conversations at once (mean of eight traces). Orca was rebuilt by the authors on the same, with the same limits.
HOST_REQUEST = 0.24e-3
HOST: dict[str, Any] = {"time per request of a step, 0.24 ms": ("vllm.fig13a.vllm", "vllm.derived.step")}
LIMITS: dict[str, Any] = {"max_num_seqs": 2048, "max_num_batched_tokens": 2560}  # artifact, cacheflow/master/server.py
PYTHON: dict[str, Any] = {"preset": "orca", "enforce_eager": True, **LIMITS}
SYSTEMS: dict[str, Any] = {
    "vllm": {**PYTHON, "allocator": "paged", "reserve": "whole-prompt", "watermark": 0.01},
    "orca_oracle": {**PYTHON, "reserve": "output-length"},
    "orca_pow2": {**PYTHON, "reserve": "power-of-two"},
    "orca_max": {**PYTHON, "reserve": "max-model-len"},
    "ft": {"preset": "static", "block_size": 1},
}
FT_BATCH = {"13b": 5, "66b": 2, "175b": 24}  # ShareGPT: "as large as possible" (artifact, ft/run_13b.py and so on)


def slots(server: str) -> float:
    """Tokens whose keys and values fit."""
    model, _, _, gib = SERVERS[server]
    return gib * GIB / load_model(model).kv_bytes_per_token(2)


def kv_time(server: str) -> float:
    """Seconds in which a device's memory passes its part of a token's keys and values."""
    model, hardware, tensor, _ = SERVERS[server]
    return load_model(model).kv_bytes_per_token(2) / tensor / load_hardware(hardware).memory_bandwidth


def scenario(
    system: str,
    data: str,
    rate: float,
    server: str = "13b",
    *,
    seconds: float = HOUR,
    block_size: int = BLOCK,
    width: int = 1,
    copy_time: float = 0.0,
    seed: int = 0,
) -> Scenario:
    """One trace through one system. rate in requests per second over so many seconds; width: sequences of a request,
    which share its time on the host; copy_time: seconds per sequence and
    step."""
    model, hardware, tensor, _ = SERVERS[server]
    engine = dict(SYSTEMS[system])
    if system == "ft":
        engine["max_num_seqs"] = FT_BATCH[server]
    else:
        engine["host_sequence_time"] = HOST_REQUEST / width
        # the attention kernel reads a sequence's last block whole, half of it for nothing (vLLM's attention_kernels.cu)
        engine["worker_sequence_time"] = (block_size - 1) / 2 * kv_time(server) + copy_time
    if system == "vllm":
        engine["block_size"] = block_size
    blocks = int(slots(server)) // engine.get("block_size", 1)
    engine |= {"max_model_len": LONGEST, "num_gpu_blocks_override": blocks + 1, "gpu_memory_utilization": 0.95}
    description = {
        "model": model,
        "hardware": hardware,
        "precision": {"weights": "fp16", "kv_cache": "fp16"},
        "parallelism": {"tensor": tensor},
        "engine": engine,
        "workload": {"num_requests": round(rate * seconds), "request_rate": rate, **LENGTHS[data]},
        "simulation": {"seed": seed},
    }
    return build_scenario(description, "reproduce")


def requests_of(setting: Scenario) -> Requests:
    """What arrives of a trace, less what its model has no room for."""
    requests = build_requests(setting.workload, setting.simulation.seed, Path())
    return requests.keep(requests.prompt_tokens + requests.output_tokens < LONGEST)


@cache
def served(system: str, data: str = "sharegpt", rate: float = SATURATED) -> Result:
    """One trace through one system in front of OPT-13B."""
    setting = scenario(system, data, rate)
    return simulate(setting, requests_of(setting))


def throughput(result: Result) -> float:
    """Tokens per second."""
    return float(result.requests["num_output_tokens"].sum() / result.end_time)


def running(result: Result) -> float:
    """Sequences at once while more come, once those that began together have gone their ways."""
    r = result.requests
    end = r["scheduled"].max()
    start = end / 3
    inside = np.minimum(r["last_token"], end) - np.maximum(r["scheduled"], start)
    return float(np.maximum(inside, 0).sum() / (end - start))


def normalised_latency(result: Result) -> float:
    """Seconds per output token, end to end, queueing included; mean over requests. FasterTransformer returns a batch
    when its last request has ended (artifact, ft/ft_server.py)."""
    r = result.requests
    end = r["last_token"]
    if result.engine.admit_when_idle:
        _, batch = np.unique(r["scheduled"], return_inverse=True)
        ends = np.zeros(batch.max() + 1)
        np.maximum.at(ends, batch, end)
        end = ends[batch]
    return float(((end - r["arrival"]) / r["num_output_tokens"]).mean())


@cache
def latency(
    system: str,
    data: str,
    rate: float,
    server: str = "13b",
    seconds: float = HOUR,
    block_size: int = BLOCK,
    seed: int = 0,
) -> float:
    """The normalised latency of one trace through one system."""
    setting = scenario(system, data, rate, server, seconds=seconds, block_size=block_size, seed=seed)
    return normalised_latency(simulate(setting, requests_of(setting)))
