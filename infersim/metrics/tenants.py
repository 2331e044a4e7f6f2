"""How the tenants and the models of one cluster fare, and how fairly the tenants."""

from typing import Any

import numpy as np

from ..config.slo import REQUEST_METRICS, Goodput
from .latency import seconds
from .result import Result


def compare_tenants(result: Result) -> dict[str, Any] | None:
    """Figures by tenant, and Jain's index of their speeds; None without tenants.

    A tenant's speed is the output tokens of its completed requests over the seconds they took, summed. Jain's index
    (Jain, Chiu & Hawe 1984) is 1 if all are equal and 1/n if one has everything.
    """
    tenants = result.scenario.workload.tenants
    if result.tenant is None or tenants is None:
        return None
    figures = _figures(result, list(tenants), result.tenant)
    for number, (name, tenant) in enumerate(tenants.items()):
        if tenant.goodput:
            figures[name]["good_share"] = _good_share(result, result.tenant == number, tenant.goodput)
    speeds = [row["output_tokens_per_request_s"] for row in figures.values()]
    return {"jain_index": jain(np.array(speeds)), "by_name": figures}


def _good_share(result: Result, mine: np.ndarray, limits: Goodput) -> float | None:
    """Share of these requests that completed within all limits; of those that never completed, none did."""
    rows = result.requests[mine & result.measured]
    good = np.ones(len(rows), bool)
    for metric in REQUEST_METRICS:
        if (limit := getattr(limits, f"{metric}_ms")) is not None:
            good &= seconds(rows, metric) * 1e3 <= limit
    return float(good.sum()) / int(mine.sum()) if mine.any() else None


def compare_models(result: Result) -> dict[str, Any] | None:
    """Figures by model that requests asked for; None where they named none."""
    return None if result.model is None else _figures(result, list(result.models), result.model)


def _figures(result: Result, names: list[str], group: np.ndarray) -> dict[str, dict[str, Any]]:
    """By name; group: i4[n], the place of each request's name."""
    figures = {}
    for number, name in enumerate(names):
        mine = group == number
        done = result.requests[mine & result.measured]
        e2el, ttft = done["last_token"] - done["sent"], done["first_token"] - done["sent"]
        seconds = float(e2el.sum())
        figures[name] = {
            "requests": int(mine.sum()),
            "completed": len(done),
            "output_tokens_per_request_s": float(done["num_output_tokens"].sum()) / seconds if seconds > 0 else 0.0,
            "mean_ttft_ms": float(ttft.mean()) * 1e3 if len(done) else None,
            "p99_ttft_ms": float(np.percentile(ttft, 99)) * 1e3 if len(done) else None,
            "mean_e2el_ms": float(e2el.mean()) * 1e3 if len(done) else None,
        }
    return figures


def jain(values: np.ndarray) -> float | None:
    """(sum x)^2 / (n sum x^2); None if everything is 0."""
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else None
