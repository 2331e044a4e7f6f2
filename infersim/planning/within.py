"""Does a plan's answer hold within the model's error, and does it stay the answer?"""

import math
from typing import Any

from infersim.config.plan import Plan
from infersim.explain.uncertainty import ends_of, model_error

from .candidate import Found, is_fixed
from .decide import Decision


def within(decision: Decision, load: float, largest: float) -> dict[str, Any]:
    """explain.uncertainty.model_error of a deployment, and `held`: of each limit and of the `rate` the `interval` of 4
    in 5 deployments of this kind, whether all of it `holds`, and `wrong`, the share by which the prediction must be off
    until it does not."""
    error = model_error(decision.result, decision.metrics, kept_up=True)
    factors, held = error["factors"], {}
    for x in decision.limits:
        if x["mean"] > 0 and (ends := ends_of(error, x["name"], x["mean"])):
            held[x["name"]] = {
                "interval": list(ends),
                "holds": ends[1] <= x["limit"],
                "wrong": x["limit"] / x["mean"] - 1,
            }
    if "throughput" in factors and largest > 0:
        low, high = (largest * factor for factor in factors["throughput"])
        held["rate"] = {"interval": [low, high], "holds": low >= load, "wrong": load / largest - 1}
    return error | {"held": held}


def stays(plan: Plan, best: tuple[Found, dict[str, Any]], other: tuple[Found, dict[str, Any]] | None) -> dict[str, Any]:
    """Whether the best still `wins` where it carries as little as 4 in 5 of its kind, the runner-up what is predicted.

    `carry`: the share of what is predicted that it must carry; with less it is no answer, or needs so many replicas
    that it costs as much. None: not known.
    """
    (found, answer), low = best, best[1]["model_error"]["factors"].get("throughput", (None,))[0]
    carry = found.load / answer["largest_rate"] if answer["largest_rate"] else None
    if other and (plan.maximises or other[0].key[0] == found.key[0]):
        carry = other[1]["largest_rate"] / answer["largest_rate"] if answer["largest_rate"] else None
    elif other and carry and not (found.candidate.whole or is_fixed(found.candidate.scenario)):
        most = max(math.ceil(other[0].key[0] / found.candidate.unit - 1e-9) - 1, found.replicas)
        carry *= found.replicas / most
    return {"carry": carry, "wins": None if low is None or carry is None else low >= carry}
