"""Speed beside another version of infersim, both measured in turn, as reports/performance.md:

    python tests/benchmarks/performance.py --against CHECKOUT [--trace mooncake_conversation.jsonl.gz] [--only WORD ...]

CHECKOUT is a folder with the other version's sources (git worktree add CHECKOUT COMMIT). Every figure is taken REPEATS
times in each version, one after the other, in processes of its own; the ratio is the median of the pairs' ratios, and
its spread the smallest and the largest of them. CPU seconds are those of the process: a busy machine tells less.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[2]
REPORT = HERE / "reports" / "performance.md"
REPEATS = 3
RUN = "-m infersim run llama-8b-h100 --set workload.num_requests={n}"
WARM = """
import time; from infersim.api import run
def call(): run({name!r}, {given!r})
for _ in range(5): call()
spent = []
for _ in range(15):
    began = time.process_time(); call(); spent.append(time.process_time() - began)
print(1e3 * sorted(spent)[7])"""
BENCH = """
import sys; sys.path.insert(0, "tests/benchmarks")
import {module}
print({expression})"""
ONE = {"workload.num_requests": 2000}
EIGHT = ONE | {"cluster.router": "round-robin", "workload.request_rate": 80}
DRAFTS = ONE | {
    "workload.request_rate": 20,
    "speculation": {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"rate": 0.7}},
}
KV_AWARE = "cluster.requests_per_second(spec := cluster.scenario(8, 'kv-aware', 50_000){more})"
TURNS = ", turns=4, think_time=1"
ENGINE = "engine.requests_per_second(engine.load({rate}, 100_000{more}))"
ANSWERS = """1e6 / engine.requests_per_second(engine.scenario(
    {{"request_rate": 2000 / {n}, "num_requests": 300, "input_tokens": 500, "output_tokens": {n}}}, False))"""


class Row(NamedTuple):
    """What is measured. kind: `cpu` and `wall` of a command (s), its `memory` (MB), or the number that it `prints`."""

    name: str
    unit: str
    words: list[str]
    kind: str = "prints"
    repeats: int = REPEATS
    aim: str = ""
    more: bool = False
    """whether more is better"""


def python(code: str) -> list[str]:
    return ["-c", code]


def bench(module: str, expression: str) -> list[str]:
    return python(BENCH.format(module=module, expression=expression))


def rows(trace: str | None, large: int) -> list[Row]:
    """All figures, the quick ones first."""
    short = RUN.format(n=200).split()
    out = [*RUN.format(n=large).split(), "--set", "workload.request_rate=25", "--out", "{out}"]
    found = [
        Row("whole process, 200 requests", "s of CPU", short, "cpu", 11, "0.5"),
        Row("whole process, 220,000 requests", "s", RUN.format(n=220_000).split(), "wall"),
        Row("warm call, one replica, 2,000 requests", "ms", python(WARM.format(name="llama-8b-h100", given=ONE)),
            aim="0.26"),
        Row("warm call, eight replicas, round robin", "ms",
            python(WARM.format(name="llama-8b-8xh100-router", given=EIGHT)), aim="0.26"),
        Row("one replica with EAGLE-3, 20 requests/s", "ms", python(WARM.format(name="llama-8b-h100", given=DRAFTS))),
        *(Row(f"engine at {rate} requests/s", "requests/s", bench("engine", ENGINE.format(rate=rate, more="")),
              aim="1.8", more=True) for rate in (10, 30, 100)),
        *(Row(f"the same with prefix caching, {rate}", "requests/s",
              bench("engine", ENGINE.format(rate=rate, more=", True")), more=True) for rate in (10, 30, 100)),
        *(Row(f"answers of {n:,} tokens", "us per request", bench("engine", ANSWERS.format(n=n)), repeats=3)
          for n in (100, 1_000, 10_000)),
        Row("8 replicas, precise KV-aware", "requests/s",
            bench("cluster", KV_AWARE.format(more=", cluster.with_prefixes(spec)")), repeats=3, aim="3", more=True),
        Row("8 replicas, KV-aware conversations", "requests/s",
            bench("cluster", f"cluster.requests_per_second(cluster.scenario(8, 'kv-aware', 20_000{TURNS}))"), repeats=3,
            aim="3", more=True),
        Row("plan-llama-70b", "s", ["-m", "infersim", "plan", "plan-llama-70b"], "wall", 2, "0.36"),
        Row("first run, which compiles", "s", short, "first", 1, "0.4"),
        Row(f"run of {large:,} requests with --out, memory", "MB", out, "memory", 1, "0.29"),
        Row(f"run of {large:,} requests with --out", "s", out, "wall", 1),
    ]  # fmt: skip
    if trace:
        tree = ", preset='sglang-0.5'"
        of_trace = "engine.requests_per_second(engine.scenario({{'trace': {trace!r}}}, True{more}))"
        found[-6:-6] = [
            Row(f"Mooncake's conversations, {name}", "requests/s",
                bench("engine", of_trace.format(trace=str(Path(trace).resolve()), more=more)), "prints", 3, aim, True)
            for name, more, aim in (("block hash", "", "3"), ("radix tree", tree, "1.5"))
        ]  # fmt: skip
    return found


def measured(row: Row, tree: Path) -> float:
    """One figure of one version."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.format(out=f"{folder}/out") if word == "{out}" else word for word in row.words]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "infersim-bytecode")}
        env |= {"INFERSIM_CACHE_DIR": f"{folder}/cache"} if row.kind == "first" else {}
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], cwd=tree, env=env, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        assert process.stdout
        told = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{row.name}: {tree} ended with {process.returncode}")
    if row.kind == "memory":
        return used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10) * 1.048576
    return float(told) if row.kind == "prints" else used.ru_utime + used.ru_stime if row.kind == "cpu" else wall


def told(row: Row, ours: list[float], theirs: list[float]) -> str:
    """A line of the table."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    spread = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
    aim = f"{'at least' if row.more else 'at most'} {row.aim}" if row.aim else ""
    a, b = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in map(statistics.median, (ours, theirs)))
    return f"| {row.name}, {row.unit} | {a} | {b} | {statistics.median(ratios):.2f}{spread} | {aim} | {len(ratios)} |"


def overhead() -> str:
    """What a sweep adds to the runs of its points."""
    points, given = 400, ["workload.num_requests=200"]
    code = f"""
import time, importlib, joblib
from infersim.planning.sweep import sweep
from infersim.config.scenario import load_variants
from infersim.explain.summary import summarize
run = importlib.import_module("infersim.run").run
rates = [5 + i / 20 for i in range({points})]
all = load_variants("llama-8b-h100", [[*{given}, f"workload.request_rate={{r}}"] for r in rates])
for scenario in all[:20]: summarize(run(scenario))
began = time.perf_counter()
for scenario in all: summarize(run(scenario))
alone = time.perf_counter() - began
def swept(workers):
    began = time.perf_counter()
    sweep("llama-8b-h100", {{"workload.request_rate": rates}}, {given}, workers=workers)
    return time.perf_counter() - began
swept(2)
print([1e3 * (swept(n) * n - alone) / {points} for n in (1, 2)])"""
    found = [json.loads(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=HERE, env=os.environ | {
        "PYTHONPATH": str(HERE)})) for _ in range(3)]  # fmt: skip
    one, two = (sorted(each[i] for each in found) for i in (0, 1))
    return (
        f"A sweep of {points} points of 200 requests takes {one[1]:.2f} ms a point more than its runs alone in one"
        f" process, and {two[1]:.2f} ms of a core's time with two joblib workers ({two[0]:.2f} to {two[2]:.2f}; at most"
        " 3 are asked)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="a checkout of the other version")
    parser.add_argument("--trace", help="the Mooncake conversation trace")
    parser.add_argument("--large", type=int, default=2_000_000, help="requests of the largest run")
    parser.add_argument("--only", nargs="*", help="words of the figures to take; prints them, and writes nothing")
    options = parser.parse_args()
    theirs = options.against.resolve()
    commit = subprocess.run(
        ["git", "-C", theirs, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout
    lines = []
    chosen = [row for row in rows(options.trace, options.large)
              if not options.only or any(word in row.name for word in options.only)]  # fmt: skip
    for row in chosen:
        pairs = []
        for turn in range(row.repeats + (row.repeats > 3)):  # the first of many warms the machine up
            pair = [measured(row, tree) for tree in (HERE, theirs)]
            pairs += [pair] if turn or row.repeats <= 3 else []
        lines.append(told(row, [a for a, _ in pairs], [b for _, b in pairs]))
        print(lines[-1], flush=True)
    if options.only:
        return
    numpy = Row("", "", ["-c", "import numpy"], "cpu")
    start = Row("", "", RUN.format(n=200).split(), "cpu")
    times = sorted(measured(start, HERE) / measured(numpy, HERE) for _ in range(11))
    known = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(": ")[2] for line in known if line.startswith("model name")), platform.machine())
    text = f"""# Performance

Made by `{Path(sys.argv[0]).as_posix().removeprefix(str(HERE) + "/")}`, this version and {commit.strip()} in turn on one
machine: {os.cpu_count()} cores of {cpu}, {platform.system()}, Python {platform.python_version()}, load average
{os.getloadavg()[0]:.1f} at the end. A ratio is this version's figure over the other's, the median of the pairs, with
the smallest and the largest. Seconds and requests per second are of one core.

| figure | this version | {commit.strip()} | ratio | asked | pairs |
|---|---|---|---|---|---|
{chr(10).join(lines)}

A start with 200 requests takes {times[5]:.2f} times the CPU time of `python -c "import numpy"` ({times[0]:.2f} to
{times[-1]:.2f}; at most 2.5 are asked). {overhead()}
"""
    REPORT.write_text(text)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)


if __name__ == "__main__":
    main()
