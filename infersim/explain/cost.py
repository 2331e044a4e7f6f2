"""What a deployment costs: money as a range from a price range, and energy."""

from typing import Any

from infersim.spec.scenario import Scenario

MILLION = 1e6


def num_gpus(scenario: Scenario) -> int:
    """Accelerators of all replicas."""
    return scenario.parallelism.num_gpus * scenario.cluster.replicas


def cost_of(scenario: Scenario, metrics: dict[str, float | None], busy_share: float | None) -> dict[str, Any]:
    """GPUs, USD per hour and per million tokens as [low, high], and energy; None where price or power is unknown.

    A prompt token that a prefix cache holds costs no prefill: priced apart once the engine caches prefixes. Energy per
    output token in J: at the GPUs' power limit while busy and nothing while idle, and at it all the time.
    """
    hardware, gpus = scenario.hardware, num_gpus(scenario)
    output, total = metrics["output_throughput"], metrics["total_token_throughput"]
    hourly = [gpus * hardware.price.low, gpus * hardware.price.high] if hardware.price else None

    def per_million(throughput: float | None) -> list[float] | None:
        return [usd / 3600 / throughput * MILLION for usd in hourly] if hourly and throughput else None

    joules = None
    if hardware.tdp and output and busy_share is not None:
        joules = [gpus * hardware.tdp * share / output for share in (min(busy_share, 1.0), 1.0)]
    return {
        "gpus": gpus,
        "usd_per_hour": hourly,
        "usd_per_million_output_tokens": per_million(output),
        "usd_per_million_tokens": per_million(total),
        "joules_per_output_token": joules,
        "price_source": hardware.price.source if hardware.price else None,
    }
