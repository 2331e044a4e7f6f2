"""Service level objectives: limits on statistics of a run, and on single requests (goodput)."""

from typing import Annotated, Any

from pydantic import Field, create_model

from .base import Description
from .units import Milliseconds

STATISTICS = ("p99", "p95", "p90", "p50", "median", "mean")
METRICS = ("ttft", "tpot", "itl", "e2el")
REQUEST_METRICS = ("ttft", "tpot", "e2el")

Limit = Annotated[Milliseconds, Field(gt=0)] | None

_request_limits: dict[str, Any] = {f"{metric}_ms": (Limit, None) for metric in REQUEST_METRICS}
Goodput: Any = create_model(
    "Goodput",
    __base__=Description,
    __doc__="A request is good if it meets all of these, as `vllm bench serve --goodput` counts.",
    **_request_limits,
)
_run_limits: dict[str, Any] = {f"{s}_{metric}_ms": (Limit, None) for metric in METRICS for s in STATISTICS}
_Statistics: Any = create_model("_Statistics", __base__=Description, **_run_limits)


class Slo(_Statistics):
    """Limits in ms. Every `<statistic>_<metric>_ms` bounds that number of the whole run."""

    goodput: Goodput | None = None
    """limits of one request; default: those of the highest percentile given of each metric"""

    @property
    def limits(self) -> dict[str, float]:
        """`p99_ttft_ms` -> the most that it may be, in ms: the limits of the run that are given."""
        return {key: limit for key in _Statistics.model_fields if (limit := getattr(self, key)) is not None}

    @property
    def request_limits(self) -> dict[str, float]:
        """`ttft` -> seconds that a good request may take at most; empty without limits."""
        if self.goodput is not None:
            given = {metric: getattr(self.goodput, f"{metric}_ms") for metric in REQUEST_METRICS}
        else:
            limits = self.limits
            given = {
                metric: next((limits[key] for s in STATISTICS[:4] if (key := f"{s}_{metric}_ms") in limits), None)
                for metric in REQUEST_METRICS
            }
        return {metric: limit / 1e3 for metric, limit in given.items() if limit is not None}
