"""What a deployment costs: money as a range from a price range, and energy."""

from typing import Any

from infersim.config.hardware import Hardware
from infersim.config.scenario import Scenario
from infersim.metrics.result import Result

from .work import Work

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
    prices = [(hardware.price, count) for hardware, count in fleet(scenario) if hardware.price]
    if len(prices) < len(fleet(scenario)):
        return None
    return [sum(price.low * n for price, n in prices), sum(price.high * n for price, n in prices)]


def cost_of(result: Result, metrics: dict[str, float | None]) -> dict[str, Any]:
    """GPUs, USD per hour and per million tokens as [low, high], and energy; None where price or power is unknown.

    Per million tokens: of output alone, of all tokens alike, and apart, by the busy time that is spent on each: prompt
    tokens that were computed, output tokens, and prompt tokens found in the prefix cache, which cost the reading of
    their keys. Energy per output token in J: at the GPUs' power limit while busy, and at it all the time.
    """
    gpus, prices = fleet(result.scenario), [hardware.price for hardware, _ in fleet(result.scenario)]
    output, total = metrics["output_throughput"], metrics["total_token_throughput"]
    hourly = usd_per_hour(result.scenario)

    def per_million(throughput: float | None, share: float = 1.0) -> list[float] | None:
        return [usd * share / HOUR / throughput * MILLION for usd in hourly] if hourly and throughput else None

    joules = None
    if all(hardware.tdp for hardware, _ in gpus) and output:
        power = sum((hardware.tdp or 0.0) * count for hardware, count in gpus)
        busy = result.busy_time / float(result.replicas.available.sum())
        joules = [power * share / output for share in (min(busy, 1.0), 1.0)]
    work = Work(result)
    prompts, computed = (total or 0.0) - (output or 0.0), 1 - work.cached_share
    replicas = result.scenario.cluster.replicas
    reading = result.memory.kv_bytes_per_token / result.scenario.hardware.memory_bandwidth / replicas
    return {
        "gpus": num_gpus(result.scenario),
        "usd_per_hour": hourly,
        "usd_per_million_output_tokens": per_million(output),
        "usd_per_million_tokens": per_million(total),
        "usd_per_million_apart": {
            "prompt": per_million(prompts * computed, work.prompt_share),
            "cached_prompt": per_million(1 / reading if reading else None) if work.cached_share else None,
            "output": per_million(output, 1 - work.prompt_share),
        },
        "joules_per_output_token": joules,
        "price_sources": [price.source for price in prices if price],
    }
