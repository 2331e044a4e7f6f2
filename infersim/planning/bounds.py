"""What no deployment of a kind can do, whatever its software: floors on latency, and on GPU time per request.

Bytes at peak bandwidth, FLOPs at peak rate, no overhead: what these forbid need not be simulated. A bound holds for
steps in which every sequence makes one token and every layer is computed: where something may save steps, layers or
prompts, and where nobody has proved that it saves none, there is no bound and the candidate is simulated.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infersim.config.scenario import Scenario
from infersim.config.workload import Workload
from infersim.cost.floors import NO_PREFILL, decode_sums, prefill_sums, step_floor
from infersim.cost.operator import Operator, evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.roofline import peak_flops
from infersim.deployment import Deployment, deployments_of
from infersim.explain.seen import decode_keys
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


class Lengths:
    """Prompt and output tokens of a workload's requests: the same for all candidates, so that what these ask of them
    is computed once.

    at: statistic of a limit (p50, p99, ...) -> that percentile of prompts, and of outputs; mean -> the shortest prompt,
    below which no mean floor is, and the mean output.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        requests = build_requests(workload, seed, Path())
        self.prompts, self.outputs = requests.prompt_tokens.astype("f8"), requests.output_tokens.astype("f8")
        if isinstance(workload.max_tokens, int):
            self.outputs = np.minimum(self.outputs, workload.max_tokens)
        by_room = workload.max_tokens == "max_model_len"
        self.longest = float((self.prompts + self.outputs).max()) if by_room else 0.0
        """tokens of the longest request, if clients ask for what room there is: a model that has less cuts it short"""
        self.own = self.prompts.copy()  # of each prompt, the tokens that no other need have
        if requests.segments is not None:
            begins, counts, _, lengths = requests.segments
            before = np.append(0, np.cumsum(lengths))
            self.own -= before[begins + counts] - before[begins]
        self.at = {"mean": (float(self.prompts.min()), float(self.outputs.mean()))}
        for name, percent in PERCENT.items():
            self.at[name] = float(np.percentile(self.prompts, percent)), float(np.percentile(self.outputs, percent))
        self.shared = bool((self.own < self.prompts).any())
        """whether prompts begin with what others have computed"""
        many = self.prompts[self.outputs > 1]
        self.prompts_of_many = {"mean": float(many.min())} if len(many) else {}
        """statistic -> prompt tokens of the requests that have a tpot: more than one output token"""
        for name, percent in PERCENT.items():
            if len(many):
                self.prompts_of_many[name] = float(np.percentile(many, percent))
        self._decode_keys: dict[int, float] = {}

    def decode_keys(self, window: int) -> float:
        """Keys that a request's decode tokens see, on average, in layers of this window."""
        if window not in self._decode_keys:
            self._decode_keys[window] = float(decode_keys(self.prompts, self.outputs, window).mean())
        return self._decode_keys[window]


ANY_RATE = 1e6  # requests/s: above what anything does


def bounds_of(scenario: Scenario, lengths: Lengths) -> Bounds:
    """The bounds of one replica of the scenario; of a cluster of several kinds of replicas, which share the work of a
    request in their own way, none. InputError if it would not start."""
    deployment = deployments_of(scenario)[0][0]
    if len(scenario.cluster.groups) > 1:
        return Bounds(deployment, {}, ANY_RATE)
    operators = forward_pass(deployment.placement)
    shorter = lengths.longest > deployment.engine.max_model_len
    divided = deployment.parallelism.prefill_context > 1  # whose ranks have as much to do only on average
    if scenario.speculation or scenario.early_exit or deployment.engine.jump_forward_share or shorter or divided:
        return Bounds(deployment, {}, ANY_RATE)
    latency = _latency(scenario, deployment, operators, lengths)
    return Bounds(deployment, latency, _rate(deployment, operators, lengths))


def _latency(
    scenario: Scenario, deployment: Deployment, operators: list[Operator], lengths: Lengths
) -> dict[str, float]:
    """A request's ttft is at least its prompt's floor, its tpot a lone sequence's, which rise with the prompt: their
    percentiles are at least those floors of the prompts' percentiles. e2el likewise, by its output tokens. Tokens that
    wait for the API server may come closer to one another than steps.

    Where a warm-up leaves requests out, nothing is known of percentiles. A prompt costs less where its beginning is
    cached; its chunks may be in all stages of a pipeline at once, a token in one after another.
    """
    parallelism, hardware = deployment.parallelism, deployment.hardware
    if scenario.simulation.warmup or any(op.routing for op in operators):
        return {}
    windows = any(op.window for op in operators)  # a window's keys do not rise with the prompt

    def itl(context: int) -> float:
        return step_floor(operators, hardware, decode_sums(1 if windows else context)) * 1e3

    floors, engine = {}, deployment.engine
    for key in scenario.slo.limits:
        statistic, metric, _ = key.split("_")
        prompt, output = lengths.at[statistic]
        if metric == "ttft":
            if not lengths.shared:
                seconds = step_floor(operators, hardware, prefill_sums(max(int(prompt), 1)))
                floors[key] = seconds * 1e3 / parallelism.pipeline
        elif metric == "e2el":
            floors[key] = (output - 1) * itl(1)
        elif engine.host_token_time > 0:
            continue
        elif metric == "tpot":
            alone = engine.stream_interval == 1 or engine.stream_first_token  # else some come with the first, at once
            if statistic in lengths.prompts_of_many and alone:
                floors[key] = itl(int(lengths.prompts_of_many[statistic]))
        else:  # itl: pooled over tokens, of which no percentile is known
            floors[key] = itl(int(lengths.at["mean"][0]))
    return floors


def _rate(deployment: Deployment, operators: list[Operator], lengths: Lengths) -> float:
    """Pipeline stages times data-parallel ranks, over the time that a request takes one of them at least.

    That time is its FLOPs at peak, or its bytes at peak bandwidth: its keys once per token, and its share of the
    weights that every step reads: a step holds at most max_num_seqs sequences, and keys of at most what the KV cache
    holds. Text that others may have computed counts nothing, and then keys may be held once and read often. Experts
    count no bytes, since a step may touch few.
    """
    hardware, engine, memory, parallelism = (
        deployment.hardware,
        deployment.engine,
        deployment.memory,
        deployment.parallelism,
    )
    decodes = float(lengths.outputs.mean()) - 1
    shared = engine.enable_prefix_caching or deployment.num_sequences > 1
    prompts = lengths.own if shared else lengths.prompts
    tokens = float(prompts.mean()) + decodes
    base = {"step": 0.0, "tokens": tokens, "sequences": decodes + 1, "decodes": decodes}
    compute = key_bytes = weights = 0.0
    for op in operators:
        keys = lengths.decode_keys(op.window)
        sums = op.routed(base | NO_PREFILL | {"decode_keys": keys})
        if op.routing:  # of a large batch, whose experts' tiles are full and whose ranks have the same to do
            sums = {**sums, "expert_tokens": tokens * op.routing.experts_per_token / op.routing.ranks}
        weights += op.count * op.weights.get("step", 0.0)
        key_bytes += op.count * op.kv.get("decode_keys", 0.0) * keys
        if op.flops:
            compute += op.count * float(evaluate(op.flops, sums)) / peak_flops(hardware, op)
    steps = decodes / engine.max_num_seqs
    if prompts.sum() == lengths.prompts.sum() and not any(group.window for group in memory.kv_groups):
        room = memory.num_gpu_blocks * memory.block_size
        steps = max(steps, lengths.decode_keys(0) / room)
    seconds = max(compute, (key_bytes + steps * weights) / hardware.memory_bandwidth, 1e-12)
    return parallelism.pipeline * parallelism.attention_data / seconds
