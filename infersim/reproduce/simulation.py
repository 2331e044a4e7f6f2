"""Small simulations that many claims share: a load on one deployment, and the time of what it repeats."""

from functools import cache
from typing import Any

from infersim.config.scenario import build_scenario
from infersim.engine.compiled.state import RESOURCES
from infersim.metrics.result import Result
from infersim.run import run

CHAT: dict[str, Any] = {"model": "Llama-3.1-8B", "hardware": "h100-sxm"}
PROMPT: dict[str, Any] = {"num_requests": 1, "output_tokens": 1}
NO_WAITS: dict[str, Any] = {"verification_time": 0.0, "draft_pass_time": 0.0}
"""of drafting in a paper's own code: its waits, where it has any, a claim states; those of servers are not its"""

NO_FRONT_END: dict[str, Any] = {"host_request_time": 0.0, "host_prompt_token_time": 0.0, "host_request_latency": 0.0}


def simulated(workload: dict[str, Any], *, save_detailed: bool = False, **keys: Any) -> Result:
    """One run of Llama-3.1-8B on an H100, or of what the scenario's other keys say."""
    if keys.get("speculation"):
        keys["engine"] = NO_WAITS | (keys.get("engine") or {})
    return run(build_scenario(CHAT | {"workload": workload} | keys, "reproduce"), save_detailed=save_detailed)[0]


def seconds(result: Result, *resources: str) -> float:
    """Busy seconds that went to these resources."""
    return float(sum(result.time_by_resource[RESOURCES.index(name)] for name in resources))


def tpot(result: Result) -> float:
    """Mean seconds per output token after the first."""
    r = result.requests[result.requests["num_output_tokens"] > 1]
    return float(((r["last_token"] - r["first_token"]) / (r["num_output_tokens"] - 1)).mean())


def ttft(result: Result) -> float:
    """Mean seconds to the first token."""
    return float((result.requests["first_token"] - result.requests["sent"]).mean())


def prompt_time(tokens: int, **keys: Any) -> float:
    """Busy seconds of one prompt alone."""
    return simulated({**PROMPT, "input_tokens": tokens}, **keys).busy_time


def decoding(batch: int = 1, context: int = 600, tokens: int = 256, **keys: Any) -> tuple[float, float]:
    """Busy seconds and steps per output token of each of `batch` sequences around `context` tokens: what a run that is
    `tokens` longer adds to another, which is decoding at the full batch."""
    load = {"num_requests": batch, "max_concurrency": batch, "input_tokens": max(context - tokens // 2 - 64, 1)}
    short, long = (simulated({**load, "output_tokens": 64 + added}, **keys) for added in (0, tokens))
    return (long.busy_time - short.busy_time) / tokens, (long.num_steps - short.num_steps) / tokens


@cache
def token_time(model: str, hardware: str, batch: int = 1, context: int = 600, weights: str = "auto", tensor: int = 1):
    """Seconds per token of each sequence, without speculation."""
    return decoding(
        batch, context, model=model, hardware=hardware, precision={"weights": weights}, parallelism={"tensor": tensor}
    )[0]


def speed_up(
    model: str,
    hardware: str,
    speculation: dict[str, Any],
    batch: int = 1,
    context: int = 600,
    tensor: int = 1,
    **engine: Any,
) -> float:
    """Tokens per second with speculation over those without; engine: knobs of the side with speculation."""
    deployment: dict[str, Any] = {"model": model, "hardware": hardware, "parallelism": {"tensor": tensor}}
    drafted, _ = decoding(batch, context, speculation=speculation, engine=engine, **deployment)
    return token_time(model, hardware, batch, context, tensor=tensor) / drafted
