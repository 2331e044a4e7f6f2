"""How several tenants of one cluster fare, and how fairly."""

from typing import Any

import numpy as np

from .result import Result


def compare_tenants(result: Result) -> dict[str, Any] | None:
    """Figures by tenant, and Jain's index of their speeds; None without tenants.

    A tenant's speed is the output tokens of its completed requests over the seconds they took, summed. Jain's index
    (Jain, Chiu & Hawe 1984) is 1 if all are equal and 1/n if one has everything.
    """
    if result.tenant is None:
        return None
    names = list(result.scenario.workload.tenants)
    figures, speeds = {}, []
    for number, name in enumerate(names):
        mine = result.tenant == number
        done = result.requests[mine & result.measured]
        e2el, ttft = done["last_token"] - done["sent"], done["first_token"] - done["sent"]
        seconds = float(e2el.sum())
        speeds.append(float(done["num_output_tokens"].sum()) / seconds if seconds > 0 else 0.0)
        figures[name] = {
            "requests": int(mine.sum()),
            "completed": len(done),
            "output_tokens_per_request_s": speeds[-1],
            "mean_ttft_ms": float(ttft.mean()) * 1e3 if len(done) else None,
            "p99_ttft_ms": float(np.percentile(ttft, 99)) * 1e3 if len(done) else None,
            "mean_e2el_ms": float(e2el.mean()) * 1e3 if len(done) else None,
        }
    return {"jain_index": jain(np.array(speeds)), "by_name": figures}


def jain(values: np.ndarray) -> float | None:
    """(sum x)^2 / (n sum x^2); None if everything is 0."""
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else None
