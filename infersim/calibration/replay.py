"""What infersim predicts for a benchmark run that was measured: the same requests, served by the scenario."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.run import run, simulate

from .results import Measured, statistics


@dataclass(frozen=True)
class Predicted:
    """The prediction for one Measured, row by row where it has rows."""

    result: Result
    ttft: np.ndarray
    tpot: np.ndarray
    e2el: np.ndarray
    """f8[n], s, in the measurement's order where that has requests; tpot NaN for one token"""

    def metrics(self, rows: slice = slice(None)) -> dict[str, float]:
        """vLLM's statistics in ms of these rows."""
        found = statistics({"ttft": self.ttft[rows], "tpot": self.tpot[rows], "e2el": self.e2el[rows]})
        itl_gaps, starts = self.result.itl_gaps, self.result.itl_offsets
        if itl_gaps is not None and starts is not None:
            n = np.maximum(self.result.requests["num_output_tokens"].astype("i8") - 1, 0)
            chosen = range(len(n))[rows]
            gaps = [itl_gaps[starts[i] : starts[i] + n[i]].astype("f8") for i in chosen]
            found |= statistics({"itl": np.concatenate([np.zeros(0), *gaps])})
        whole = measure(self.result)
        return found | {name: value for name, value in whole.items() if "throughput" in name and value is not None}


def predict(scenario: Scenario, measured: Measured, save_detailed: bool = False) -> Predicted:
    """Simulate the run that was measured. InputError if the scenario's server would not serve what the real one did.

    A run whose client kept no requests is drawn anew from the scenario's workload, at the run's rate and concurrency.
    """
    workload = scenario.workload
    limit = measured.max_concurrency
    update: dict[str, Any]
    if measured.requests is not None:
        update = {"max_tokens": "output_length", "max_concurrency": limit}
        scenario = scenario.model_copy(update={"workload": workload.model_copy(update=update)})
        result = simulate(scenario, measured.requests, save_detailed)
    else:
        update = {"num_requests": measured.num_requests or workload.num_requests}
        update |= {"request_rate": measured.request_rate} if measured.request_rate else {}
        update |= {"max_concurrency": limit} if limit else {}
        scenario = scenario.model_copy(update={"workload": workload.model_copy(update=update)})
        result = run(scenario, save_detailed=save_detailed)[0]
    if result.interrupted:
        raise KeyboardInterrupt
    if not result.completed.all():
        raise InputError(
            f"{measured.where}: the scenario's server rejects {int((~result.completed).sum()):,} of the"
            f" {len(result.requests):,} requests; must serve them as the real one did (engine.max_model_len is"
            f" {result.engine.max_model_len:,})"
        )
    r = result.requests
    outputs = r["num_output_tokens"].astype("f8")
    tpot = (r["last_token"] - r["first_token"]) / np.where(outputs > 1, outputs - 1, math.nan)
    return Predicted(result, r["first_token"] - r["sent"], tpot, r["last_token"] - r["sent"])
