"""Around one run: the same deployment at other loads, and slightly other deployments at the same load."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.engine.compiled.state import COLLECTIVES
from infersim.explain.cost import cost_of
from infersim.explain.summary import finite
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.metrics.verdict import judge
from infersim.workload.build import build_requests

from .limits import attempt

MOST_REQUESTS = 2000  # of each run here: it is there for its shape
RATES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.5)  # times the scenario's
WHOLE = (0.5, 1.0, 1.5)  # where each takes all the workload's time
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_SHAPED = 200_000  # of a workload that changes with time, which runs as long as it did
SATURATED = 2  # saturated points in a row end the curve
PER_SLOT = 8  # requests per place of a closed loop, so that it is full most of the time


def load_curve(scenario: Scenario) -> dict[str, Any]:
    """The deployment at other loads: `axis` (request_rate, max_concurrency or time_scale) and `points`, the lightest
    load first, each with its metrics, tokens/s per GPU, tokens/s of one user (1 / mean tpot) and verdict; `knee`, the
    index of the point with the most throughput per latency (Kleinrock's power); `span_s`, how long requests arrive in
    each, where the load changes with time or an autoscaler follows it, else None.
    """
    load, (span, arrivals) = scenario.workload, _span(scenario)
    if load.request_rate is not None and math.isfinite(load.request_rate):
        axis = "request_rate"
        loads = [(rate := load.request_rate * x, {"request_rate": rate}) for x in (WHOLE if span else RATES)]
    elif load.trace is not None and not load.has_arrival_rule and load.max_concurrency is None:
        axis = "time_scale"
        loads = [(scale := load.time_scale / x, {"time_scale": scale}) for x in RATES]
    else:
        axis = "max_concurrency"
        loads = [(x, {"max_concurrency": x}) for x in CONCURRENCIES]
    points, over = [], 0
    for value, update in loads:
        if span and (axis != "request_rate" or value * arrivals > MOST_SHAPED * (load.request_rate or math.inf)):
            continue
        if axis == "max_concurrency" and load.num_requests and value > load.num_requests:
            break
        requests = min(MOST_REQUESTS, PER_SLOT * int(value) + 32) if axis == "max_concurrency" else MOST_REQUESTS
        shaped = {"duration": span, "num_requests": None} if span else {}
        point = _run(_shorter(scenario, requests, {**update, **shaped}))
        if point is None:
            continue
        points.append({axis: value, **point})
        over = over + 1 if point["state"] == "saturated" else 0
        if over == SATURATED:
            break
    return finite({"axis": axis, "points": points, "knee": _knee(points), "span_s": span})


def _span(scenario: Scenario) -> tuple[float | None, int]:
    """Seconds for which requests arrive, and how many, where a shorter run would show another load, or other replicas:
    the valley of a day. None elsewhere."""
    load = scenario.workload
    scaled = any(group.autoscaler for group in scenario.cluster.groups)
    if load.trace is not None or not (load.curve or load.spikes or scaled) or load.users:
        return None, 0
    arrival = build_requests(load, scenario.simulation.seed, Path()).arrival
    return float(arrival[-1]) or None, len(arrival)


def _shorter(scenario: Scenario, requests: int, update: dict[str, Any]) -> Scenario:
    load = scenario.workload
    if "duration" not in update:
        update = update | {"num_requests": min(load.num_requests or MOST_REQUESTS, requests)}
    simulation = scenario.simulation.model_copy(update={"replications": 1, "warmup": 0.0})
    return scenario.model_copy(update={"workload": load.model_copy(update=update), "simulation": simulation})


def _run(scenario: Scenario) -> dict[str, Any] | None:
    """One run's metrics and rates per GPU and user; None if it cannot run or nothing is completed."""
    return _point(result) if (result := attempt(scenario)) else None


def _point(result: Result) -> dict[str, Any]:
    metrics = measure(result)
    cost = cost_of(result, metrics)
    return {"state": judge(result).state, "metrics": metrics, **per_gpu_and_user(metrics, cost["gpus"]), "cost": cost}


PER_GPU_AND_USER = ("tokens_per_gpu", "tokens_per_user")


def per_gpu_and_user(metrics: dict[str, float | None], gpus: float) -> dict[str, float | None]:
    """Output tokens/s of a GPU, and of one user while it decodes: 1 / mean tpot."""
    output, tpot = metrics["output_throughput"], metrics["mean_tpot_ms"]
    return dict(zip(PER_GPU_AND_USER, (output and output / gpus, 1e3 / tpot if tpot else None), strict=True))


def _knee(points: list[dict[str, Any]]) -> int | None:
    stable = [i for i, point in enumerate(points) if point["state"] == "stable"]
    power = {i: points[i]["metrics"]["request_throughput"] / points[i]["metrics"]["mean_e2el_ms"] for i in stable}
    return max(power, key=lambda key: power[key]) if power else None


Change = Callable[[dict[str, Any]], None]


def _scale(*path: str, by: float) -> Change:
    def change(data: dict[str, Any]) -> None:
        *sections, last = path
        for section in sections:
            data = data[section]
        data[last] *= by

    return change


def _more_flops(data: dict[str, Any]) -> None:
    data["hardware"]["flops"] = {dtype: rate * 1.1 for dtype, rate in data["hardware"]["flops"].items()}


def _fp8_kv(data: dict[str, Any]) -> None:
    data["precision"]["kv_cache"] = "fp8"


def _one_more(data: dict[str, Any]) -> None:
    if data["cluster"].get("autoscaler"):
        raise KeyError  # it starts them
    data["cluster"]["replicas"] += 1


def _twice_tensor(data: dict[str, Any]) -> None:
    data["parallelism"] |= {"tensor": 2 * data["parallelism"]["tensor"], "moe_tensor": None}


def _one_more_draft(data: dict[str, Any]) -> None:
    data["speculation"]["num_speculative_tokens"] += 1


OF_LINKS = "+10 % link bandwidth"
LADDER: tuple[tuple[str, Change], ...] = (
    ("+10 % memory bandwidth", _scale("hardware", "memory_bandwidth", by=1.1)),
    ("+10 % FLOP/s", _more_flops),
    ("+10 % memory", _scale("hardware", "memory_usable", by=1.1)),
    (OF_LINKS, _scale("hardware", "link", "bandwidth", by=1.1)),
    ("KV cache in fp8", _fp8_kv),
    ("twice the tensor parallelism", _twice_tensor),
    ("one more replica", _one_more),
    ("one more draft token", _one_more_draft),
)
"""what-ifs by name; one that changes nothing here, or cannot run, is left out"""


def what_if(scenario: Scenario, known: Result | None = None) -> list[dict[str, Any]]:
    """The scenario as it is, and with each step of LADDER alone, re-simulated with the same draws: rows of `change`,
    `metrics`, `cost`. known: a run of the scenario."""
    base = _shorter(scenario, MOST_SHAPED if _span(scenario)[0] else MOST_REQUESTS, {})
    same = known and known.scenario == base and not known.interrupted and known.completed.any()
    if (first := known if same else attempt(base)) is None:
        return []
    rows = [{"change": "as it is", **_point(first)}]
    for name, change in LADDER:
        if name == OF_LINKS and not first.time_by_resource[..., COLLECTIVES].any():
            continue
        data = base.resolved()
        try:
            change(data)
            varied = Scenario.validate(data, "what if")
        except (KeyError, TypeError, InputError):  # has no such part, or would not start
            continue
        if varied != base and (point := _run(varied)):
            rows.append({"change": name, **point})
    return finite(rows)
