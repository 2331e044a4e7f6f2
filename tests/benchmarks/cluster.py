"""Speed of the cluster: simulated requests per second of CPU time on one core.

    python tests/benchmarks/cluster.py [--json]

Replicas of Llama-3.1-8B on an H100 under a chat (prompts of 500 tokens at the median, answers of 60; 10 requests/s
each): round robin, which is one compiled call; routers that look, request by request; kv-aware is Dynamo's on precise
KV events, with prompts of which 400 tokens are one of 200 common beginnings, or with conversations of 4 turns, where
every end of a request is an event too. Each figure is the best of three runs, since the machine may be busy.
"""

import argparse
import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from infersim.config.scenario import build_scenario
from infersim.run import run, simulate
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests

REPEATS = 3
PREFIXES, PREFIX = 200, 400
CHAT = {
    "input_tokens": {"lognormal": {"median": 500, "sigma": 1}},
    "output_tokens": {"lognormal": {"median": 60, "sigma": 1}},
}


def scenario(replicas: int, router: str, num_requests: int, **workload):
    rate = 10 * replicas / workload.get("turns", 1)
    return build_scenario(
        {
            "model": "Llama-3.1-8B",
            "hardware": "h100-sxm",
            "cluster": {"replicas": replicas, "router": router},
            "workload": CHAT | {"request_rate": rate, "num_requests": num_requests} | workload,
        },
        "benchmark",
    )


def with_prefixes(spec) -> Requests:
    """The requests of a scenario, each with one of PREFIXES beginnings, the k-th 1 / k as often as the first."""
    requests = build_requests(spec.workload, 0, Path())
    n, weights = len(requests), 1 / np.arange(1, PREFIXES + 1)
    return replace(
        requests,
        prompt_tokens=requests.prompt_tokens + PREFIX,
        segment_offsets=np.arange(n + 1),
        segment_ids=np.random.default_rng(0).choice(PREFIXES, n, p=weights / weights.sum()),
        segment_lengths=np.full(n, PREFIX, "i4"),
    )


def requests_per_second(spec, requests: Requests | None = None) -> int:
    """Of CPU time, from the description to the records: step tables, draws and routing included."""
    best = 0.0
    for _ in range(REPEATS):
        started = time.process_time()
        result = run(spec)[0] if requests is None else simulate(spec, requests)
        best = max(best, len(result.requests) / (time.process_time() - started))
        if not result.completed.all():
            sys.exit(f"{(~result.completed).sum()} requests were not completed")
    return round(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    run(scenario(8, "round-robin", 8))
    kv_aware = scenario(8, "kv-aware", 200_000)
    result = {
        "round_robin_8": requests_per_second(scenario(8, "round-robin", 1_000_000)),
        "least_outstanding_8": requests_per_second(scenario(8, "least-outstanding", 200_000)),
        "kv_aware_8": requests_per_second(kv_aware, with_prefixes(kv_aware)),
        "kv_aware_8_conversations": requests_per_second(scenario(8, "kv-aware", 100_000, turns=4, think_time=1)),
        "round_robin_1000": requests_per_second(scenario(1000, "round-robin", 100_000)),
        "kv_aware_1000": requests_per_second(scenario(1000, "kv-aware", 20_000)),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result["peak_gib"] = round((peak if sys.platform == "darwin" else peak * 1024) / 2**30, 2)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
