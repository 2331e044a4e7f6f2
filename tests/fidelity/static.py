"""A batch that arrives at once and is served to its end."""

from dataclasses import dataclass, field

from infersim.config.scenario import build_scenario
from infersim.metrics.latency import measure
from infersim.run import run


@dataclass(frozen=True)
class Batch:
    """`requests` equal ones in all, `concurrency` at a time (0: all)."""

    model: str
    hardware: str
    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int = 0
    tensor: int = 1
    pipeline: int = 1
    attention_data: int = 1
    weights: str = "auto"
    kv_cache: str = "bf16"
    preset: str = "vllm-0.19"
    one_prefill: bool = True
    """all prompts go through the model together, as engines without a token budget did"""
    engine: dict = field(default_factory=dict)
    """keys of the scenario's engine beside"""


@dataclass(frozen=True)
class Times:
    """Seconds, and output tokens per second of the replica."""

    ttft: float
    tpot: float
    e2e: float
    throughput: float
    request_throughput: float


def serve(batch: Batch) -> Times:
    """InputError for what cannot run."""
    ranks = batch.attention_data
    longest = batch.input_tokens + batch.output_tokens
    engine = {
        "preset": batch.preset,
        "max_model_len": longest,
        "host_request_time": 0,
        "host_request_latency": 0,
        "host_prompt_token_time": 0,
    }  # no client, or text that was read before
    if batch.one_prefill:
        engine |= {"max_num_batched_tokens": max(batch.requests * batch.input_tokens, longest),
                   "max_num_seqs": batch.requests}  # fmt: skip
    engine |= batch.engine
    workload = {"request_rate": "inf", "num_requests": batch.requests, "input_tokens": batch.input_tokens,
                "output_tokens": batch.output_tokens}  # fmt: skip
    if batch.concurrency:
        workload["max_concurrency"] = batch.concurrency
    scenario = {
        "model": batch.model,
        "hardware": batch.hardware,
        "workload": workload,
        "parallelism": {"tensor": batch.tensor, "pipeline": batch.pipeline, "attention_data": ranks,
                        "expert": ranks if ranks > 1 else 1},
        "precision": {"weights": batch.weights, "kv_cache": batch.kv_cache},
        "engine": engine,
    }  # fmt: skip
    (result,) = run(build_scenario(scenario, f"{batch.model} on {batch.hardware}"))
    found = measure(result)
    return Times(
        found["mean_ttft_ms"] / 1e3, (found["mean_tpot_ms"] or 0.0) / 1e3, found["mean_e2el_ms"] / 1e3,
        found["output_throughput"], found["request_throughput"],
    )  # fmt: skip
