"""A plan: a workload, what it must hold, and the deployments that may serve it."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .base import Description
from .errors import InputError
from .hardware import load_hardware
from .scenario import Given, Scenario, apply_override, build_scenario, source
from .units import Count, Share, Watts, short

MAX_CANDIDATES = 100_000
PARALLEL = ("tensor", "pipeline", "attention_data")


class Plan(Description):
    """What `infersim plan` searches; every other key of the file is a scenario's, the same for all candidates."""

    candidates: Annotated[
        Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Tag("Mapping")]
        | Annotated[list[dict[str, Any]], Field(min_length=1), Tag("List")],
        Discriminator(lambda value: "List" if isinstance(value, list) else "Mapping"),
    ]
    """key of a scenario, such as hardware, engine.max_num_seqs or cluster.prefill.replicas -> the values to choose
    from, in all combinations; parallelism has all powers of two up to max_gpus if it is left out. Or a list of
    candidates, each a mapping of such keys. The number of replicas is found, unless cluster.replicas is given"""
    max_gpus: Annotated[Count, Field(le=10_000)] = 8
    """most accelerators in the whole deployment"""
    max_power: Annotated[Watts, Field(gt=0)] | None = None
    """most that all accelerators may draw at their power limits, such as 10 kW"""
    objective: Literal["cost", "gpus", "energy", "goodput", "users"] = "cost"
    """what to minimise at the workload's request_rate; goodput: the request rate to maximise instead; users: the number
    of users of a closed loop, or of its sessions where they have turns"""
    min_goodput_share: Share | None = None
    """share of the requests that must meet the limits of one request"""

    @property
    def maximises(self) -> bool:
        """Whether the load is what is looked for."""
        return self.objective in ("goodput", "users")


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
    groups = [plan.candidates] if isinstance(plan.candidates, dict) else plan.candidates
    for key in dict.fromkeys(key for group in groups for key in group):
        section, _, name = key.partition(".")
        if data.get(section) is not None and (not name or name in data[section]):
            raise InputError(f"{where}: {key}: is among the candidates too; must be given once")
    if isinstance(data.get("workload"), str):  # read once
        apply_override(data, "workload.max_concurrency=null", where, path)
    if plan.objective == "users" and isinstance(data.get("workload"), dict):
        data["workload"] = {"users": 1} | data["workload"]
    profiles: dict[str, Any] = {}
    scenarios: list[Scenario] = []
    problems: list[str] = []
    for chosen in _combinations(plan, "parallelism" in data, where):
        for key, value in chosen.items():
            if key.split(".")[-1] == "hardware" and isinstance(value, str):
                if value not in profiles:
                    profiles[value] = load_hardware(value, path, f"{where}: candidates.{key}")
                chosen[key] = profiles[value]
        try:
            scenarios.append(build_scenario(_with(data, chosen, where), where, (), path))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(dict.fromkeys(problems))
    _check(plan, scenarios, where)
    return plan, scenarios


def _combinations(plan: Plan, parallelism_given: bool, where: str) -> list[dict[str, Any]]:
    """Each candidate: key of a scenario -> value."""
    if isinstance(plan.candidates, list):
        return [dict(one) for one in plan.candidates]
    axes = plan.candidates
    if "parallelism" not in axes and not parallelism_given:
        axes = axes | {"parallelism": parallelisms(plan.max_gpus)}
    if math.prod(map(len, axes.values())) > MAX_CANDIDATES:
        raise InputError(f"{where}: candidates: more than {MAX_CANDIDATES:,} combinations; must be fewer")
    return [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*axes.values())]


def _with(data: dict[str, Any], chosen: dict[str, Any], where: str) -> dict[str, Any]:
    data = dict(data)
    for key, value in chosen.items():
        *sections, last = key.split(".")
        here = data
        for section in sections:
            inner = here.get(section)
            if not isinstance(inner, dict | None) or not section:
                raise InputError(f"{where}: candidates.{short(key)[1:-1]}: must be a key of a scenario, or section.key")
            here[section] = here = dict(inner or {})
        here[last] = value
    return data


def parallelisms(max_gpus: int) -> list[dict[str, int]]:
    """Every tensor x pipeline x attention_data of powers of two up to `max_gpus`, fewest GPUs first."""
    powers = [2**i for i in range(max_gpus.bit_length())]
    found = [sizes for sizes in itertools.product(powers, repeat=3) if math.prod(sizes) <= max_gpus]
    return [dict(zip(PARALLEL, sizes, strict=True)) for sizes in sorted(found, key=math.prod)]


def _check(plan: Plan, scenarios: list[Scenario], where: str) -> None:
    load, slo = scenarios[0].workload, scenarios[0].slo
    if plan.objective == "users":
        if load.request_rate is not None or load.ramp_up or load.trace:
            raise InputError(f"{where}: workload: objective users looks for a number of users; leave the arrivals out")
    elif load.request_rate is None or math.isinf(load.request_rate):
        raise InputError(f"{where}: workload.request_rate: must be a finite rate, that of the traffic to serve")
    if load.max_concurrency is not None:
        raise InputError(f"{where}: workload.max_concurrency: must be null; a plan is for open traffic")
    if not slo.limits and not slo.request_limits:
        raise InputError(f"{where}: slo: must have at least one limit, such as p99_ttft_ms: 1000")
    if any(group.autoscaler for scenario in scenarios for group in scenario.cluster.groups):
        raise InputError(f"{where}: cluster.autoscaler: a plan looks for a number of replicas that stays; leave it out")
