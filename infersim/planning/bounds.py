"""What no deployment of a kind can do, whatever its software: floors on latency, and on GPU time per request.

Bytes at peak bandwidth, FLOPs at peak rate, no overhead: what these forbid need not be simulated.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infersim.cost.floors import NO_PREFILL, floor_itl, floor_ttft
from infersim.cost.operator import evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.roofline import peak_flops
from infersim.deployment import Deployment, deployments_of
from infersim.explain.work import decode_keys
from infersim.spec.scenario import Scenario
from infersim.workload.build import build_requests

PERCENT = {"p50": 50, "median": 50, "p90": 90, "p95": 95, "p99": 99}


@dataclass(frozen=True)
class Bounds:
    """latency: slo key -> ms at least; rate: requests per second that one replica can sustain at most."""

    deployment: Deployment
    latency: dict[str, float]
    rate: float

    def violated(self, limits: dict[str, float]) -> list[tuple[str, float, float]]:
        """(slo key, floor, limit) of the limits that cannot be held."""
        return [(key, self.latency[key], limit) for key, limit in limits.items() if self.latency.get(key, 0) > limit]


ANY_RATE = 1e6  # requests/s: above what anything does


def bounds_of(scenario: Scenario) -> Bounds:
    """The bounds of one replica of the scenario; of a cluster of several kinds of replicas, which share the work of a
    request in their own way, none. InputError if it would not start."""
    deployment = deployments_of(scenario)[0][0]
    if len(scenario.cluster.groups) > 1:
        return Bounds(deployment, {}, ANY_RATE)
    requests = build_requests(scenario.workload, scenario.simulation.seed, Path())
    prompts, outputs = requests.prompt_tokens.astype("f8"), requests.output_tokens.astype("f8")
    return Bounds(deployment, _latency(scenario, deployment, prompts, outputs), _rate(deployment, prompts, outputs))


def _latency(scenario: Scenario, deployment: Deployment, prompts: np.ndarray, outputs: np.ndarray) -> dict[str, float]:
    """A request's ttft is at least its prompt's floor, its tpot a lone sequence's, which rise with the prompt: their
    percentiles are at least those floors of the prompts' percentiles. e2el likewise, by its output tokens."""
    parts = (deployment.model, deployment.hardware, deployment.precision, deployment.parallelism)
    floors = {}
    for key in scenario.slo.limits:
        statistic, metric, _ = key.split("_")
        percent = PERCENT.get(statistic)
        prompt, output = (
            (float(x.min()), float(x.mean())) if percent is None else (float(np.percentile(x, percent)),) * 2
            for x in (prompts, outputs)
        )
        if metric == "ttft":
            floors[key] = floor_ttft(*parts, max(int(prompt[0]), 1)) * 1e3
        elif metric == "tpot":
            floors[key] = floor_itl(*parts, int(prompt[0])) * 1e3
        elif metric == "e2el":
            floors[key] = (output[1] - 1) * floor_itl(*parts, 1) * 1e3
        else:  # itl: pooled over tokens, of which no percentile is known
            floors[key] = floor_itl(*parts, int(prompts.min())) * 1e3
    return floors


def _rate(deployment: Deployment, prompts: np.ndarray, outputs: np.ndarray) -> float:
    """Pipeline stages times data-parallel ranks, over the time that a request takes one of them at least.

    That time is its FLOPs at peak, or its bytes at peak bandwidth: its keys once per token, and its share of the
    weights that every step reads: a step holds at most max_num_seqs sequences, and keys of at most what the KV cache
    holds. Experts count no bytes, since a step may touch few.
    """
    hardware, engine, memory, parallelism = (
        deployment.hardware,
        deployment.engine,
        deployment.memory,
        deployment.parallelism,
    )
    decodes = float((outputs - 1).mean())
    base = {"step": 0.0, "tokens": float((prompts + outputs - 1).mean()), "sequences": decodes + 1, "decodes": decodes}
    compute = key_bytes = weights = 0.0
    for op in forward_pass(deployment.model, hardware, deployment.precision, parallelism):
        keys = float(decode_keys(prompts, outputs, op.window).mean())
        sums = op.routed(base | NO_PREFILL | {"decode_keys": keys})
        weights += op.count * op.weights.get("step", 0.0)
        key_bytes += op.count * op.kv.get("decode_keys", 0.0) * keys
        if op.flops:
            compute += op.count * float(evaluate(op.flops, sums)) / peak_flops(hardware, op)
    steps = decodes / engine.max_num_seqs
    if not any(group.window for group in memory.kv_groups):
        room = memory.num_gpu_blocks * memory.block_size
        steps = max(steps, float(decode_keys(prompts, outputs).mean()) / room)
    seconds = max(compute, (key_bytes + steps * weights) / hardware.memory_bandwidth, 1e-12)
    return parallelism.pipeline * parallelism.attention_data / seconds
