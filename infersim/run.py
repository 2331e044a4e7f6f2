"""One run: description in, records out."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .cost.floors import floor_itl, floor_ttft
from .cost.steptime import provenance
from .deployment import Deployment, deployment_of
from .engine.fleet import Fleet, ReplicaSpec
from .engine.state import COMPLETED
from .metrics.result import Result
from .metrics.warmup import check_warmup, warmup_time
from .spec.errors import InputError
from .spec.scenario import Scenario
from .workload.build import build_requests
from .workload.requests import Requests, resolve_max_tokens

Progress = Callable[[float, float, int, int], None]
"""called now and then with the clock and the last arrival (s), requests finished, requests in all"""

SLICE = 0.1  # wall seconds between looks at the keyboard


def run(scenario: Scenario, progress: Progress | None = None, save_detailed: bool = False) -> list[Result]:
    """Simulate every replication of a scenario: one Result each, of seed, seed + 1, ...

    save_detailed keeps every inter-token gap. InputError for what cannot run. A keyboard interrupt ends the run early:
    the results so far are returned, the last one marked `interrupted`.
    """
    check_warmup(scenario)
    if scenario.cluster.replicas > 1:
        raise InputError(
            f"cluster.replicas: must be 1: several replicas are not modelled yet (got {scenario.cluster.replicas})"
        )
    deployment = deployment_of(scenario)
    results, previous = [], None
    for seed in range(scenario.simulation.seed, scenario.simulation.seed + scenario.simulation.replications):
        requests = build_requests(scenario.workload, seed, Path())
        if previous is not None and _same(requests, previous):
            raise InputError(
                "simulation.replications: nothing in this workload is drawn, so every replication would be the same;"
                f" must be 1 (got {scenario.simulation.replications})"
            )
        previous = requests
        results.append(_simulate(scenario, deployment, requests, seed, progress, save_detailed))
        if results[-1].interrupted:
            break
    return results


def _same(one: Requests, other: Requests) -> bool:
    columns = ("arrival", "prompt_tokens", "output_tokens")
    return all(np.array_equal(getattr(one, column), getattr(other, column)) for column in columns)


def _simulate(
    scenario: Scenario,
    deployment: Deployment,
    requests: Requests,
    seed: int,
    progress: Progress | None,
    save_detailed: bool,
) -> Result:
    max_tokens = resolve_max_tokens(scenario.workload, requests, deployment.engine.max_model_len)
    _check_lengths(deployment, requests, max_tokens)
    fleet = Fleet(
        [ReplicaSpec(deployment.knobs(scenario.workload.max_concurrency or 0), deployment.step_cost())],
        ranks=deployment.parallelism.attention_data,
        keep_gaps=save_detailed or scenario.simulation.warmup != 0,
    )
    # data-parallel ranks take turns
    rank = np.arange(len(requests.arrival)) % deployment.parallelism.attention_data
    fleet.submit(0, requests.arrival, requests.prompt_tokens, requests.output_tokens, max_tokens, rank)
    interrupted = _advance(fleet, float(requests.arrival[-1]), progress)
    return _result(scenario, deployment, fleet, requests, seed, interrupted)


def _check_lengths(deployment: Deployment, requests: Requests, max_tokens: np.ndarray) -> None:
    """InputError if no request fits max_model_len: single ones are rejected and counted."""
    longest = deployment.engine.max_model_len
    need = requests.prompt_tokens.astype("i8") + np.minimum(max_tokens, requests.output_tokens)
    if need.min() > longest:
        raise InputError(
            f"workload: the shortest request needs {need.min()} tokens (prompt and output) and max_model_len is"
            f" {longest} ({deployment.engine.origin['max_model_len']}); must fit, or raise engine.max_model_len"
        )


def _advance(fleet: Fleet, last_arrival: float, progress: Progress | None) -> bool:
    """Advance to the end, in slices of simulated time that take about SLICE on the wall. True if interrupted."""
    until, step = 0.0, max(last_arrival, 1.0) / 64
    try:
        while not np.isinf(fleet.next_time()):
            until = max(until, fleet.next_time()) + step
            started = time.perf_counter()
            fleet.advance(until)
            wall = max(time.perf_counter() - started, SLICE / 100)
            step *= min(max(SLICE / wall, 0.25), 4.0)
            if progress is not None:
                finished = int((fleet.requests["status"] >= COMPLETED).sum())
                progress(float(fleet.replicas["now"].max()), last_arrival, finished, fleet.num_requests)
    except KeyboardInterrupt:
        return True
    return False


def _result(
    scenario: Scenario, deployment: Deployment, fleet: Fleet, requests: Requests, seed: int, interrupted: bool
) -> Result:
    replicas = fleet.replicas
    parts = (deployment.model, deployment.hardware, deployment.precision, deployment.parallelism)
    prompt = int(np.percentile(requests.prompt_tokens, 50))
    context = prompt + int(np.percentile(requests.output_tokens, 50)) // 2
    sums = ("outstanding_time", "running_time", "waiting_time", "block_time")
    return Result(
        scenario=scenario,
        engine=deployment.engine,
        memory=deployment.memory,
        seed=seed,
        requests=fleet.requests,
        request_ids=requests.request_id,
        itl_histogram=fleet.histogram,
        time_by_resource=fleet.time_by_resource,
        busy_time=float(replicas["busy_time"].sum()),
        end_time=float(replicas["now"].max()),
        **{name: float(replicas[name].sum()) for name in sums},
        num_steps=int(replicas["num_steps"].sum()),
        num_scheduled_tokens=int(replicas["num_scheduled_tokens"].sum()),
        num_wasted_tokens=int(replicas["num_wasted_tokens"].sum()),
        peak_running=int(replicas["peak_running"].max()),
        peak_blocks=int(replicas["peak_blocks"].max()),
        blocks_held=int((fleet.knobs["num_gpu_blocks"] - 1 - fleet.schedulers["free_blocks"]).sum()),
        floors={"itl": floor_itl(*parts, context), "ttft": floor_ttft(*parts, prompt)},
        provenance=provenance(*parts),
        notes=requests.notes,
        warmup=warmup_time(scenario, fleet.requests),
        itl_gaps=fleet.gaps if fleet.keep_gaps else None,
        itl_offsets=fleet.gap_offset if fleet.keep_gaps else None,
        interrupted=interrupted,
    )
