"""What infersim predicts for a benchmark run that was measured: the same requests, served by the scenario."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.config.hub import repository
from infersim.config.scenario import Scenario
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.run import run, simulate
from infersim.workload.sharing import with_prefixes

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
    Which prompts begin alike no client's file says: as the scenario's workload.prefixes has it, lengths included.
    """
    workload = scenario.workload
    limit = measured.max_concurrency
    update: dict[str, Any]
    if measured.requests is not None:
        update = {"max_tokens": "output_length", "max_concurrency": limit}
        scenario = scenario.model_copy(update={"workload": workload.model_copy(update=update)})
        requests, prefixes = measured.requests, workload.prefixes
        if prefixes:
            requests = with_prefixes(requests, prefixes, scenario.simulation.seed, inside=True)
        result = simulate(scenario, requests, save_detailed)
    else:
        update = {"num_requests": measured.num_requests, "duration": None} if measured.num_requests else {}
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


LENGTHS = 0.05  # share by which mean lengths may differ before it is said


def mismatches(scenario: Scenario, run: Measured, result: Result) -> list[str]:
    """What the file says and the scenario says otherwise, a sentence that names both. result: the prediction."""
    found = []
    names = [scenario.model, *(kind.served_model_name or kind.model for kind in scenario.cluster.kinds or [])]
    names += [adapter for ran in result.ran if ran.deployment.lora for adapter in ran.deployment.lora.adapters]
    known = [name for name in names if name] + [published for name in names if name and (published := repository(name))]
    if run.model and not any(_alike(run.model, name) for name in known):
        found.append(f"{run.where}: the file's model is {run.model}, the scenario's {', '.join(filter(None, names))}")
    r = result.requests
    if run.accepted_share is not None:
        ours = float(r["num_accepted_tokens"].sum(dtype="i8") / r["num_output_tokens"].sum(dtype="i8"))
        if abs(ours - run.accepted_share) > LENGTHS * run.accepted_share:
            both = f"{run.accepted_share:.1%} of the output tokens in the file and {ours:.1%} in the scenario"
            found.append(f"{run.where}: accepted drafts are {both} (speculation.acceptance)")
    if run.requests is not None:
        return found
    load = scenario.workload
    for key, theirs in (("request_rate", run.request_rate), ("max_concurrency", run.max_concurrency)):
        ours = getattr(load, key)
        if theirs and ours and theirs != ours:
            both = f"{key} is {theirs:g} in the file and {ours:g} in the scenario"
            found.append(f"{run.where}: {both}; the file's counts")
    for key, theirs, ours in (("input_tokens", run.mean_input, float(r["prompt_tokens"].mean())),
                              ("output_tokens", run.mean_output, float(r["num_output_tokens"].mean()))):  # fmt: skip
        if theirs and abs(ours / theirs - 1) > LENGTHS:
            found.append(f"{run.where}: {key} are {theirs:,.0f} on average in the file and {ours:,.0f} in the scenario")
    return found


def _alike(one: str, other: str) -> bool:
    """Whether two names may be the same model: organisations, signs and endings such as -Instruct left out."""
    a, b = (re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].lower()) for name in (one, other))
    return bool(a and b) and (a in b or b in a)
