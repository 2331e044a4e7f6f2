"""Does a bound throw out what would hold? Random scenarios over every key of the schema, simulated and held against it.

`python tests/bounds.py FIRST COUNT`: scenarios of tests/fuzz/draw.py, each with a limit on every statistic. No run may
reach a latency below its floor, or complete more than its bound. The same numbers are the same scenarios for ever.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.draw import scenario as draw_scenario
from fuzz.draw import write_traces

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario, build_scenario
from infersim.metrics.latency import measure
from infersim.planning.bounds import Lengths, bounds_of
from infersim.run import run

LIMITS = [f"{s}_{m}_ms" for s in ("mean", "p50", "p95", "p99") for m in ("ttft", "tpot", "e2el", "itl")]
SEED = 15


def beaten(scenario: Scenario) -> list[str]:
    """The bounds of a scenario that its run beats, in words. InputError for what cannot run. A run that does not serve
    everything holds no SLO."""
    bounds = bounds_of(scenario, Lengths(scenario.workload, scenario.simulation.seed))
    result = run(scenario)[0]
    if not result.completed.all():
        return []
    metrics = measure(result)
    reached = {key: value for key in bounds.latency if (value := metrics[key.replace("p50", "median")]) is not None}
    found = [f"{key}: floor {floor:.6g} above {value:.6g}" for key, floor, value in bounds.violated(reached)]
    rate, most = metrics["request_throughput"] or 0.0, scenario.cluster.most * bounds.rate
    return [*found, *([f"completes {rate:.6g}/s, bound {most:.6g}"] if rate > most else [])]


def check(number: int, traces: dict[str, str]) -> tuple[str, list[str]]:
    """bounded, unbounded or refused; and what is beaten."""
    keys: dict[str, Any] = draw_scenario(SEED, number, traces)
    keys["slo"] = dict.fromkeys(LIMITS, 1e6)
    try:
        scenario = build_scenario(keys, "bounds")
        lengths = Lengths(scenario.workload, scenario.simulation.seed)
        kind = "bounded" if bounds_of(scenario, lengths).latency else "unbounded"
        return kind, beaten(scenario)
    except InputError:
        return "refused", []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no scenario after so many")
    given = parser.parse_args()
    counts, end = Counter[str](), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        traces = write_traces(Path(folder))
        for number in range(given.first, given.first + given.count):
            if time.monotonic() > end:
                break
            kind, found = check(number, traces)
            counts[kind] += 1
            counts["beaten"] += bool(found)
            if found:
                print(f"{number}: {'; '.join(found)}", flush=True)
            if number % 500 == 499:
                print(f"up to {number}: {dict(counts)}", flush=True)
    print(f"{sum(counts.values()) - counts['beaten']} scenarios: {dict(counts)}")


if __name__ == "__main__":
    main()
