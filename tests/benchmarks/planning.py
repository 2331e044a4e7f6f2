"""Speed of the answers: a plan, a sweep, a report in a browser; and how often the plan's answer holds.

    python tests/benchmarks/planning.py [--json] [--plan FILE] [--chromium PROGRAM]

plan: seconds of the clock and of CPU for scenarios/plan-llama-70b.yaml in a fresh process, and of 20 runs of its answer
with other seeds how many hold the SLO. sweep: share of the time from the first point's start to the last one's end for
which two workers run on a core, or would if nothing else did. report: bytes of the page of a 100,000-request run, and
ms until headless Chromium has laid it out.
"""

import argparse
import html
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infersim.config.scenario import build_scenario
from infersim.metrics.latency import measure
from infersim.metrics.verdict import judge
from infersim.planning import sweep
from infersim.planning.decide import deployed
from infersim.run import run

SEEDS = range(1000, 1020)
WORKERS = 2
RUNS = 3  # the best of so many
INFERSIM = [sys.executable, "-m", "infersim"]
LOADED = """<script>addEventListener("load", () => { document.body.offsetHeight; const ms = performance.now();
  document.body.innerHTML = ""; document.body.dataset.ms = ms; });</script>"""
answer = sweep._answer


def spent(command: list[str]) -> tuple[float, float, str]:
    """Seconds of the clock, CPU seconds of the process and its children, and its output."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def plan_figures(name: str) -> dict[str, float]:
    wall, cpu, output = min(spent([*INFERSIM, "plan", name, "--json"]) for _ in range(RUNS))
    answer = json.loads(output)
    best = answer["best"]
    scenario, held = build_scenario(best["scenario"], "best"), 0
    for seed in SEEDS:
        result = run(deployed(scenario, best["deployment"]["replicas"], best["rate"], seed))[0]
        metrics = measure(result)
        within = all(metrics[limit] <= most for limit, most in scenario.slo.limits.items())
        held += within and judge(result).state == "stable"
    return {
        "plan_wall_s": round(wall, 1),
        "plan_cpu_s": round(cpu, 1),
        "plan_considered": answer["considered"],
        "plan_simulated": answer["simulated"],
        "seeds_that_hold": held,
        "seeds": len(SEEDS),
    }


def wanted() -> float:
    """Seconds for which this process ran on a core or waited for one, so far (Linux)."""
    run, wait, _ = Path("/proc/self/schedstat").read_text().split()
    return (int(run) + int(wait)) / 1e9


def timed(task: tuple[int, Any]) -> tuple[int, dict[str, Any]]:
    """A point of a sweep; in place of an error: its worker, and clock and wanted seconds before and behind it."""
    before = time.monotonic(), wanted()
    i, outcome = answer(task)
    return i, outcome | {"error": [os.getpid(), *before, time.monotonic(), wanted()]}


def sweep_figures() -> dict[str, float]:
    sweep._answer = timed
    over = {"workload.request_rate": list(range(10, 34)), "engine.max_num_seqs": [64, 128, 256, 512]}
    with tempfile.TemporaryDirectory() as folder:
        outcomes = sweep.sweep("llama-8b-h100", over, ["workload.num_requests=40000"], Path(folder), WORKERS)
    points = [outcome["error"] for outcome in outcomes]
    wall = max(point[3] for point in points) - min(point[1] for point in points)
    busy = 0.0
    for worker in {point[0] for point in points}:
        mine = [point for point in points if point[0] == worker]
        busy += max(point[4] for point in mine) - min(point[2] for point in mine)
    return {
        "sweep_points": len(outcomes),
        "sweep_wall_s": round(wall, 1),
        "sweep_busy_share": round(busy / wall / WORKERS, 3),
    }


def report_figures(chromium: str | None) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        large = ["--set", "workload.num_requests=100000", "--report", str(page)]
        subprocess.run([*INFERSIM, "run", "llama-8b-h100", *large], check=True, capture_output=True)
        size, ms = page.stat().st_size, None
        if chromium:
            page.write_text(page.read_text().replace("</head>", LOADED + "</head>"))
            options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", "--dump-dom"]
            times = []
            for _ in range(RUNS):
                dom = subprocess.run([chromium, *options, page.as_uri()], check=True, capture_output=True, text=True)
                times.append(float(html.unescape(re.search(r'data-ms="([^"]*)"', dom.stdout)[1])))
            ms = round(min(times))
    return {"report_bytes": size, "report_load_ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--plan", default="plan-llama-70b", help="a plan file")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="of a browser; default: chromium")
    options = parser.parse_args()
    subprocess.run([*INFERSIM, "run", "llama-8b-h100", "--set", "workload.num_requests=1"], capture_output=True)
    result = plan_figures(options.plan) | sweep_figures() | report_figures(options.chromium)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
