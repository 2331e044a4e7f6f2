"""What a deployment costs: money as a range from a price range, and energy."""

from typing import Any

from infersim.config.hardware import Hardware
from infersim.config.prices import hourly, price_of
from infersim.config.scenario import Scenario
from infersim.metrics.result import Result

from .work import RunWork

MILLION, HOUR = 1e6, 3600


def fleet(scenario: Scenario) -> list[tuple[Hardware, int]]:
    """Each kind of accelerator, and how many of it all replicas have."""
    cluster, apart = scenario.cluster, scenario.speculation and scenario.speculation.drafter
    found = []
    for kind in cluster.groups:
        hardware = kind.hardware or scenario.hardware
        found.append((hardware, (kind.parallelism or scenario.parallelism).num_gpus * kind.replicas))
        if apart and kind is not cluster.prefill and kind is not cluster.encode:
            found.append((apart.hardware or hardware, kind.replicas))
    return found


def num_gpus(scenario: Scenario) -> int:
    """Accelerators of all replicas."""
    return sum(count for _, count in fleet(scenario))


def usd_per_hour(scenario: Scenario) -> list[float] | None:
    """What all accelerators cost, as [low, high]; None if a price is not known."""
    return hourly(fleet(scenario), scenario.prices)


def cost_of(result: Result, metrics: dict[str, float | None]) -> dict[str, Any]:
    """GPUs, USD per hour and per million tokens as [low, high], and energy; None where price or power is unknown.

    GPUs are those that were there on average: an autoscaler's replicas count while they exist.

    Per million tokens: of output alone, of all tokens alike, and apart, by the busy time that is spent on each: prompt
    tokens that were computed, output tokens, and prompt tokens found in the prefix cache, which cost the reading of
    their keys. Energy per output token in J: at the GPUs' power limit while busy, and at it all the time.
    """
    accelerators = [
        (hardware, count, float(result.replicas.available[ran.replicas].sum()))
        for ran in result.ran
        for hardware, count in ran.deployment.accelerators
    ]
    output, total = metrics["output_throughput"], metrics["total_token_throughput"]
    duration = result.end_time
    there = [(hardware, count * seconds / duration) for hardware, count, seconds in accelerators] if duration else []
    gpus = round(sum(count for _, count in there), 2)
    prices = result.scenario.prices
    usd = hourly(there, prices)

    def per_million(throughput: float | None, share: float = 1.0) -> list[float] | None:
        return [x * share / HOUR / throughput * MILLION for x in usd] if usd and throughput and share else None

    joules = None
    if there and all(hardware.tdp for hardware, _ in there) and output:
        power = sum((hardware.tdp or 0.0) * count for hardware, count in there)
        busy = result.busy_time / float(result.replicas.available.sum())
        joules = [power * share / output for share in (min(busy, 1.0), 1.0)]
    work = RunWork(result)
    prompts, computed = (total or 0.0) - (output or 0.0), 1 - work.cached_share
    prompt = work.prompt_share  # 0: steps with prompts take no longer than others, as far as the run tells
    decoding = [ran for ran in result.ran if ran.role in ("serve", "decode")]
    reading = min(
        ran.deployment.memory.kv_bytes_per_token / ran.deployment.hardware.memory_bandwidth for ran in decoding
    ) / sum(ran.replicas.stop - ran.replicas.start for ran in decoding)
    return {
        "gpus": int(gpus) if gpus == int(gpus) else gpus,
        "usd_per_hour": usd,
        "usd_per_million_output_tokens": per_million(output),
        "usd_per_million_tokens": per_million(total),
        "usd_per_million_apart": {
            "prompt": per_million(prompts * computed, prompt),
            "cached_prompt": per_million(1 / reading if reading else None) if work.cached_share else None,
            "output": per_million(output, 1 - prompt) if prompt else None,
        },
        "joules_per_output_token": joules,
        "price_sources": [price.source for hardware, _ in there if (price := price_of(hardware.name, prices))],
    }
