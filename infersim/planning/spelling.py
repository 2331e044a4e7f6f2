"""What two scenarios differ in, whatever their spelling: what ran decides whether a setting is another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infersim.deployment import Deployment
from infersim.metrics.result import Result
from infersim.workload.acceptance import acceptance_table

OWN_PARTS = ("model", "hardware", "parallelism", "precision", "engine", "lora")
"""what a group of replicas may have of its own"""
Seen = dict[str, list[tuple[Deployment, Any]]]
"""part -> each deployment whose part is unlike those before, and how that was written"""


def spelled_out(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The resolved scenario of each run with each setting in one place; what came to the same is written the same.

    What all groups of replicas agree on stands in the scenario, what they do not in each; kinds that are alike are one.
    """
    seen: Seen = {}
    return [_spelled_out(result, seen) for result in results]


def _spelled_out(result: Result, seen: Seen) -> dict[str, Any]:
    resolved = result.scenario.resolved()
    cluster, ranges = dict(resolved["cluster"]), result.scenario.cluster.ranges
    groups = [*(cluster.get("kinds") or ()), *(cluster[pool] for pool in ("decode", "prefill") if cluster.get(pool))]
    deployments = [result.kind_of(numbers.start).deployment for numbers in ranges]
    top = dict(resolved)
    for part in ("speculation", "early_exit"):
        top[part] = _as_first(part, top[part], deployments[0], seen)
    full = [
        {**group, **{part: _as_first(part, group.get(part) or resolved[part], d, seen) for part in OWN_PARTS}}
        for group, d in zip(groups or [{}], deployments, strict=False)
    ]
    for part in OWN_PARTS:
        alike = all(group[part] == full[0][part] for group in full)
        top[part] = full[0][part] if alike else None
        for group in full:
            if alike:
                del group[part]
    if cluster.get("kinds"):
        bare = [{key: value for key, value in group.items() if key != "replicas"} for group in full]
        if bare[0].get("autoscaler") is None and all(group == bare[0] for group in bare) and "weight" in bare[0]:
            full = []
        del cluster["kinds"]
        cluster |= {"kinds": full} if full else {}
    elif groups:
        cluster["decode"], cluster["prefill"] = full
    return {**top, "cluster": cluster}


def _as_first(part: str, value: Any, deployment: Deployment, seen: Seen) -> Any:
    """The value as it was written for the first deployment that is alike in this part."""
    if part == "engine":
        return {name: _as_first(f"engine.{name}", given, deployment, seen) for name, given in value.items()}
    own = _came_to(part, deployment)
    for other, written in seen.setdefault(part, []):
        if _came_to(part, other) == own:
            return written
    seen[part].append((deployment, value))
    return value


def _came_to(part: str, deployment: Deployment) -> Any:
    """What a part of the scenario came to in a deployment: equal where only names and spellings differ."""
    if part == "model":
        return replace(deployment.model, name="")
    if part == "engine.preset":
        return deployment.engine
    if part.startswith("engine."):
        return getattr(deployment.engine, part.removeprefix("engine."))
    if part == "lora" and (lora := deployment.lora):
        return lora.adapters, lora.max_loras, lora.slot_rank, lora.overlap_loading
    if part == "speculation" and (spec := deployment.speculation):
        table = acceptance_table(spec)
        drafting = spec.model_copy(update={"method": "", "drafting": spec.how, "acceptance": None, "classes": None})
        return drafting, table.accepted.tolist(), table.share.tolist(), table.in_turn
    return getattr(deployment, part)


def changed_parts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its two values, of the settings in which two resolved scenarios differ.

    Model and hardware are one setting each; parallelism and simulation are left whole too, since their keys depend on
    each other.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if x == y or key in ("simulation", "slo"):
            continue
        if key in ("precision", "engine", "workload") and isinstance(x, dict) and isinstance(y, dict):
            inner = {name for name in x.keys() | y.keys() if x.get(name) != y.get(name)}
            if key == "precision" and "weights" in inner:
                inner -= {"activations"}  # they follow the weights, and are exchanged with them
            if key == "workload" and len(inner) > 1:
                found[key] = (x, y)
            else:
                found |= {f"{key}.{name}": (x.get(name), y.get(name)) for name in inner}
        else:
            found[key] = (x, y)
    return dict(sorted(found.items()))
