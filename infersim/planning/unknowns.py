"""Inputs that move the answer and that nobody gave: the interval that they cause, a line each."""

from typing import Any

from infersim.config.errors import InputError
from infersim.config.published import profile
from infersim.config.scenario import Scenario
from infersim.engine.compiled.state import HOST
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.run import run

MOST_REQUESTS = 500
BOX = 0.375
"""share of PCIe's rate that a box may reach: 24 of 64 GB/s were found between two devices of one; assumed for all"""
HOST_RANGE = (0.5, 2.0)
"""times the assumed host times that a host may take: assumed"""
BEFORE = ("host_request_time", "host_request_latency")
NOTABLE = 0.05
METRICS = {"mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT"}


def unknowns(result: Result, metrics: dict[str, float | None]) -> list[dict[str, Any]]:
    """`input`, `range` (times what was assumed), `intervals` (metric -> two ends) and `text`, of each that matters."""
    rows = []
    for row in filter(None, (_host(result, metrics), _link(result, metrics))):
        row["intervals"] = {name: ends for name, ends in row["intervals"].items() if ends[1] > (1 + NOTABLE) * ends[0]}
        rows += [row | {"text": _words(row)}] if row["intervals"] else []
    return rows


def _words(row: dict[str, Any]) -> str:
    low, high = row["range"]
    ends = {name: [f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in pair] for name, pair in row["intervals"].items()}
    parts = (f"{METRICS[name]} {' to '.join(pair)} ms" for name, pair in ends.items())
    return f"{row['input']} is assumed; between {low:g} and {high:g} times it: {', '.join(parts)}"


def _host(result: Result, metrics: dict[str, float | None]) -> dict[str, Any] | None:
    """First order: what of the host's time nothing hides, and what a request waits before the scheduler has it."""
    engine, done = result.engine, result.done
    ttft, tpot = (metrics[name] for name in METRICS)
    if ttft is None or tpot is None or not result.busy_time or result.scenario.cluster.prefill:
        return None
    share = float(result.time_by_resource[HOST]) / result.busy_time
    own = [getattr(engine, name) for name in BEFORE if engine.origin.get(name) != "user"]
    if engine.origin.get("host_prompt_token_time") != "user":
        own.append(engine.host_prompt_token_time * float(done["prompt_tokens"].mean()))
    before = min(sum(own) * 1e3, ttft)
    parts = ((ttft, before + share * (ttft - before)), (tpot, share * tpot))
    ends = ([value + (times - 1) * part for times in HOST_RANGE] for value, part in parts)
    intervals = dict(zip(METRICS, ends, strict=True))
    return {"input": f"the host's time ({engine.preset})", "range": HOST_RANGE, "intervals": intervals}


def _link(result: Result, metrics: dict[str, float | None]) -> dict[str, Any] | None:
    """Where devices meet over PCIe at the datasheet's rate: simulated again with what a box may reach."""
    scenario = result.scenario
    hardware, known = scenario.hardware, profile(scenario.hardware.name)
    alone = scenario.parallelism.num_gpus == 1 or hardware.link.domain_size > 1
    if alone or known is None or known.link != hardware.link:
        return None
    link = hardware.link.model_copy(update={"bandwidth": BOX * hardware.link.bandwidth})
    slow = hardware.model_copy(update={"link": link})
    fast, slower = (_times(scenario.model_copy(update={"hardware": device}), result) for device in (hardware, slow))
    rate = f"{hardware.link.bandwidth / 1e9:g} GB/s by the datasheet"
    intervals = {
        name: [value, value * y / x]
        for name, x, y in zip(METRICS, fast, slower, strict=True)
        if (value := metrics[name]) and x and y
    }
    what = f"the link of this box ({hardware.link.name}, {rate})"
    return {"input": what, "range": (BOX, 1.0), "intervals": intervals}


def _times(scenario: Scenario, result: Result) -> list[float | None]:
    """The METRICS of the first MOST_REQUESTS requests; None of what cannot run."""
    count = min(len(result.requests), MOST_REQUESTS)
    update = {
        "workload": scenario.workload.model_copy(update={"num_requests": count}),
        "simulation": scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0, "seed": result.seed}),
    }
    try:
        found = measure(run(scenario.model_copy(update=update))[0])
    except InputError:
        return [None for _ in METRICS]
    return [found[name] for name in METRICS]
