"""A plan: a workload, what it must hold, and the deployments that may serve it."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Description
from .errors import InputError
from .hardware import load_hardware
from .scenario import Given, Scenario, apply_override, build_scenario, source
from .units import Count, Share, short

MAX_CANDIDATES = 100_000
PARALLEL = ("tensor", "pipeline", "attention_data")


class Plan(Description):
    """What `infersim plan` searches; every other key of the file is a scenario's, the same for all candidates."""

    candidates: dict[str, list[Any]]
    """key of a scenario, such as hardware or engine.max_num_seqs -> the values to choose from; parallelism has all
    powers of two up to max_gpus if it is left out"""
    max_gpus: Annotated[Count, Field(le=10_000)] = 8
    """most accelerators in the whole deployment"""
    objective: Literal["cost", "gpus", "energy", "goodput"] = "cost"
    """what to minimise at the workload's request_rate; goodput: the request rate to maximise instead"""
    min_goodput_share: Share | None = None
    """share of the requests that must meet the limits of one request"""


def load_plan(given: Given, overrides: Sequence[str] = ()) -> tuple[Plan, list[Scenario]]:
    """The plan with overrides, and one replica of each candidate as a scenario.

    InputError with all problems at once.
    """
    data, where, path = source(given)
    if not isinstance(data, dict) or "candidates" not in data:
        raise InputError(f"{where}: candidates: missing; must be lists to choose from, such as hardware: [h100-sxm]")
    data = dict(data)
    for override in overrides:
        apply_override(data, override, where, path)
    plan = Plan.validate({key: data.pop(key) for key in Plan.model_fields if key in data}, where)
    axes = plan.candidates
    for key, values in axes.items():
        if not values:
            raise InputError(f"{where}: candidates.{key}: must have at least one value")
        section, _, name = key.partition(".")
        if data.get(section) is not None and (not name or name in data[section]):
            raise InputError(f"{where}: {key}: is among the candidates too; must be given once")
    if "parallelism" not in axes and "parallelism" not in data:
        axes = axes | {"parallelism": parallelisms(plan.max_gpus)}
    if math.prod(map(len, axes.values())) > MAX_CANDIDATES:
        raise InputError(f"{where}: candidates: more than {MAX_CANDIDATES:,} combinations; must be fewer")
    profiles = {
        name: load_hardware(name, path, f"{where}: candidates.hardware").model_dump(mode="json")
        for name in axes.get("hardware", ())
        if isinstance(name, str)
    }
    if isinstance(data.get("workload"), str):  # read once
        apply_override(data, "workload.max_concurrency=null", where, path)
    scenarios: list[Scenario] = []
    problems: list[str] = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        if isinstance(chosen.get("hardware"), str):
            chosen["hardware"] = profiles[chosen["hardware"]]
        try:
            scenarios.append(build_scenario(_with(data, chosen, where), where, (), path))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(dict.fromkeys(problems))
    _check(scenarios[0], where)
    return plan, scenarios


def _with(data: dict[str, Any], chosen: dict[str, Any], where: str) -> dict[str, Any]:
    data = dict(data)
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        if not name:
            data[section] = value
        elif isinstance(data.get(section) or {}, dict) and "." not in name:
            data[section] = {**(data.get(section) or {}), name: value}
        else:
            raise InputError(f"{where}: candidates.{short(key)[1:-1]}: must be a key of a scenario, or section.key")
    return data


def parallelisms(max_gpus: int) -> list[dict[str, int]]:
    """Every tensor x pipeline x attention_data of powers of two up to `max_gpus`, fewest GPUs first."""
    powers = [2**i for i in range(max_gpus.bit_length())]
    found = [sizes for sizes in itertools.product(powers, repeat=3) if math.prod(sizes) <= max_gpus]
    return [dict(zip(PARALLEL, sizes, strict=True)) for sizes in sorted(found, key=math.prod)]


def _check(scenario: Scenario, where: str) -> None:
    rate = scenario.workload.request_rate
    if rate is None or math.isinf(rate):
        raise InputError(f"{where}: workload.request_rate: must be a finite rate, that of the traffic to serve")
    if scenario.workload.max_concurrency is not None:
        raise InputError(f"{where}: workload.max_concurrency: must be null; a plan is for open traffic")
    if not scenario.slo.limits and not scenario.slo.request_limits:
        raise InputError(f"{where}: slo: must have at least one limit, such as p99_ttft_ms: 1000")
