"""Speed of the engine: simulated requests per second on one core, start-up as ratios, memory per request.

    python tests/benchmarks/engine.py [--json] [--trace mooncake_conversation.jsonl.gz]

The load is Llama-3.1-8B on an H100 with prompts of 512 +- 128 and outputs of 192 +- 64 tokens, prefix caching off
except where a figure says on. Each figure is the best of three runs in this process, as the machine may be busy; ratios
compare commands run in turn.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.engine.fleet import Fleet, ReplicaSpec
from infersim.workload.build import build_requests
from infersim.workload.requests import resolve_max_tokens

RATES = (10, 30, 100)
REPEATS = 3


def scenario(workload: dict, prefix_caching: bool, **engine):
    engine["enable_prefix_caching"] = prefix_caching
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine}
    return build_scenario({**parts, "workload": workload}, "benchmark")


def load(rate: float, num_requests: int, prefix_caching: bool = False):
    tokens = {"input_tokens": {"uniform": [384, 640]}, "output_tokens": {"uniform": [128, 256]}}
    return scenario({"request_rate": rate, "num_requests": num_requests, **tokens}, prefix_caching)


def simulate(spec) -> tuple[Fleet, float]:
    """The fleet at the end, and the wall seconds of the simulation alone."""
    deployment = deployment_of(spec)
    requests = build_requests(spec.workload, 0, Path())
    shares_text = requests.segments is not None
    fleet = Fleet([ReplicaSpec(deployment.knobs(), deployment.step_cost())], shares_text=shares_text)
    max_tokens = resolve_max_tokens(spec.workload, requests, deployment.engine.max_model_len)
    columns = (requests.arrival, requests.prompt_tokens, requests.output_tokens, max_tokens)
    fleet.submit(0, *columns, segments=requests.segments)
    started = time.perf_counter()
    fleet.advance()
    return fleet, time.perf_counter() - started


def requests_per_second(spec) -> float:
    runs = [simulate(spec) for _ in range(REPEATS)]
    return max(fleet.num_requests / seconds for fleet, seconds in runs)


def ns_per_token(num_requests: int) -> float:
    runs = [simulate(load(30, num_requests)) for _ in range(REPEATS)]
    return min(seconds / fleet.requests["num_output_tokens"].sum(dtype="i8").item() for fleet, seconds in runs) * 1e9


def seconds(command: list[str], env: dict | None = None) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=env)
    return time.perf_counter() - started


def ratio(command: list[str], reference: list[str], pairs: int = 7) -> float:
    """Median of the pairwise ratios of wall times, run in turn after one warm-up each."""
    seconds(command), seconds(reference)
    ratios = sorted(seconds(command) / seconds(reference) for _ in range(pairs))
    return ratios[pairs // 2]


def peak_bytes(num_requests: int) -> int:
    """Peak memory of a process that builds and simulates so many requests."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import engine; engine.measure({num_requests})"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def measure(num_requests: int) -> None:
    simulate(load(30, num_requests))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak if sys.platform == "darwin" else peak * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--trace", help="the Mooncake conversation trace")
    options = parser.parse_args()
    python = [sys.executable]
    peak_bytes(1)  # so that none of the next two compiles the engine
    bytes_per_request = (peak_bytes(1_000_000) - peak_bytes(200_000)) / 800_000  # first: a child inherits our peak
    with tempfile.TemporaryDirectory() as folder:
        first = [*python, "-m", "infersim", "run", "llama-8b-h100", "--json"]
        compile_s = seconds(first, {**os.environ, "INFERSIM_CACHE_DIR": folder})
    run = ratio(first, [*python, "-c", "import numpy"])
    usage = ratio([*python, "-m", "infersim", "--help"], [*python, "-c", "import typer"])
    short, long = ns_per_token(1_000), ns_per_token(1_000_000)
    result = {
        "requests_per_second": {str(rate): round(requests_per_second(load(rate, 100_000))) for rate in RATES},
        "with_prefix_caching": {str(rate): round(requests_per_second(load(rate, 100_000, True))) for rate in RATES},
        "mooncake_requests_per_second": None,
        "mooncake_with_prefix_caching": None,
        "mooncake_with_radix_tree": None,
        "compile_s": round(compile_s, 1),
        "bytes_per_request": round(bytes_per_request),
        "ratios": {
            "run / import numpy": round(run, 2),
            "help / import typer": round(usage, 2),
            "ns per token, 1,000,000 / 1,000 requests": round(long / short, 2),
        },
    }
    if options.trace:
        for name, caching in (("mooncake_requests_per_second", False), ("mooncake_with_prefix_caching", True)):
            result[name] = round(requests_per_second(scenario({"trace": options.trace}, caching)))
        tree = scenario({"trace": options.trace}, True, preset="sglang-0.5")
        result["mooncake_with_radix_tree"] = round(requests_per_second(tree))
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
