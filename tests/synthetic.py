"""Results without a run: records that a test computed by itself."""

import numpy as np

from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.engine.compiled import histogram, state
from infersim.metrics.replicas import Replicas
from infersim.metrics.result import Ran, Result


def scenario_of(**keys):
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": {"input_tokens": 1, "output_tokens": 1}}
    return build_scenario({**data, **keys}, "test")


def histogram_of(gaps) -> np.ndarray:
    bins = (np.asarray(gaps, "f8").view("i8") >> histogram.HISTOGRAM_SHIFT) - histogram.HISTOGRAM_FIRST
    return np.bincount(bins, minlength=histogram.HISTOGRAM_BINS)


def result_of(
    arrival,
    scheduled,
    first,
    last,
    prompts=1,
    outputs=1,
    gaps=None,
    scenario=None,
    **fields,
) -> Result:
    """A Result of completed requests; `gaps` (a list of arrays) default to equal ones; `peaks` are those of running
    requests and of blocks; `fields` replace fields."""
    n = len(arrival)
    requests = np.zeros(n, state.REQUEST)
    for name, value in (("arrival", arrival), ("sent", arrival), ("scheduled", scheduled)):
        requests[name] = value
    requests["first_token"], requests["last_token"], requests["prompt_tokens"] = first, last, prompts
    requests["output_tokens"] = requests["max_tokens"] = requests["num_output_tokens"] = outputs
    requests["status"] = state.COMPLETED
    counts = requests["num_output_tokens"] - 1
    if gaps is None:
        generation = requests["last_token"] - requests["first_token"]
        gaps = [np.full(k, time / max(k, 1)) for k, time in zip(counts, generation, strict=True)]
    scenario = scenario or scenario_of()
    deployment = deployment_of(scenario)
    memory, split = deployment.memory, np.array([4.0, 1.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    rows = np.zeros(1, state.REPLICA)
    rows["peak_running"], rows["peak_blocks"] = fields.pop("peaks", (1, 1))
    sojourn = float((requests["last_token"] - requests["sent"]).sum())
    values = {
        "scenario": scenario,
        "seed": 0,
        "requests": requests,
        "request_ids": np.arange(n),
        "itl_histogram": histogram_of(np.concatenate(gaps)),
        "time_by_resource": split,
        "busy_time": 8.0,
        "end_time": float(np.max(last)),
        "outstanding_time": sojourn,
        "running_time": sojourn,
        "waiting_time": 0.0,
        "block_time": sojourn,
        "num_steps": 10,
        "num_scheduled_tokens": int((requests["prompt_tokens"] + counts).sum()),
        "num_wasted_tokens": 0,
        "blocks_held": 0,
        "floors": {"itl": 0.004, "ttft": 0.01},
        "route": {"policy": None},
        "replicas": Replicas(
            names=("h100-sxm",),
            gpus=np.ones(1, "i8"),
            usd_per_hour=np.array([[2.0, 3.0]]),
            rows=rows,
            usable_blocks=np.array([memory.num_gpu_blocks - 1]),
            available=np.array([float(np.max(last))]),
            visits=requests,
            aborted_time=0.0,
        ),
        "provenance": [{"operator": "gemm", "dtype": "bf16", "provenance": "published", "source": "a paper"}],
    }
    values |= fields
    for name in ("num_steps", "busy_time", "num_scheduled_tokens"):
        rows[name] = values[name]
    if "ran" not in fields:
        ran = Ran(deployment, deployment.replica(), "serve", slice(0, 1), values["time_by_resource"])
        values["ran"] = (ran,)
    return Result(**values)


def single_server(arrival, service) -> np.ndarray:
    """f8[n]: when each customer of a first-come first-served server leaves (Lindley's recursion)."""
    steps = np.concatenate(([0.0], service[:-1] - np.diff(arrival)))
    walk = np.cumsum(steps)
    return arrival + service + walk - np.minimum.accumulate(np.minimum(walk, 0.0))


def queue(rho: float, n: int, seed: int, deterministic: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals, departures and service times (mean 1) of an M/M/1 queue, or M/D/1."""
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1 / rho, n))
    service = np.ones(n) if deterministic else random.exponential(1.0, n)
    return arrival, single_server(arrival, service), service


def result_of_queue(rho: float, n: int, seed: int = 1, deterministic: bool = False, **fields) -> Result:
    """The queue as requests of one token: the prefill is the service."""
    arrival, departure, service = queue(rho, n, seed, deterministic)
    return result_of(arrival, np.maximum(departure - service, arrival), departure, departure, **fields)
