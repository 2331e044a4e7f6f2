"""A sweep: one scenario at every point of a grid, in parallel, each finished point a file, so that it can go on."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario, load_variants
from infersim.explain.summary import summarize
from infersim.files import replace_text
from infersim.run import run

from .executor import map_unordered
from .grid import as_overrides, grid

POINTS = "points"
Progress = Callable[[int, int, int], None]
"""called with points done, points in all, and how many of those done were found on disk"""


def sweep(
    scenario: str | Path,
    over: Mapping[str, Iterable[Any]],
    overrides: Sequence[str] = (),
    out: Path | None = None,
    workers: int = -1,
    executor: str = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """`{"set", "answer"}` for every point of the grid `over` (key -> values), in its order, last key fastest.

    `answer` is the document of `explain.summary`; a point that cannot run (it does not fit memory, say) has `error`
    instead, its lines. With `out` every finished point is a file there and is not computed again, however the sweep
    ended. InputError if a point is no valid scenario. workers: -1 for every core; on a Ray cluster those of the
    cluster.
    """
    points = grid(over)
    scenarios = load_variants(scenario, [[*overrides, *as_overrides(point)] for point in points])
    outcomes: list[dict[str, Any] | None] = [None] * len(points)
    if out is not None:
        (out / POINTS).mkdir(parents=True, exist_ok=True)
    files = [out / POINTS / f"{name_of(one)}.json" for one in scenarios] if out is not None else []
    for i, file in enumerate(files):
        outcomes[i] = _read(file)
    found = sum(outcome is not None for outcome in outcomes)
    done = found
    if progress:
        progress(done, len(points), found)
    missing = [(i, scenarios[i]) for i, outcome in enumerate(outcomes) if outcome is None]
    for i, outcome in map_unordered(_answer, missing, workers, executor, address):
        if files:
            text = json.dumps({"set": points[i], **outcome}, indent=1, allow_nan=False)
            replace_text(files[i], text + "\n", "--out")
        outcomes[i] = outcome
        done += 1
        if progress:
            progress(done, len(points), found)
    return [{**(outcome or {}), "set": point} for point, outcome in zip(points, outcomes, strict=True)]


def _answer(task: tuple[int, Scenario]) -> tuple[int, dict[str, Any]]:
    """Runs one point; in a worker."""
    i, scenario = task
    try:
        results = run(scenario)
    except InputError as error:
        return i, {"error": list(error.problems)}
    if results[-1].interrupted:
        raise KeyboardInterrupt
    return i, {"answer": summarize(results)}


def _read(file: Path) -> dict[str, Any] | None:
    try:
        outcome = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return {key: outcome[key] for key in ("answer", "error") if key in outcome}


def name_of(scenario: Scenario) -> str:
    """The name of a point's file: a hash of the scenario in full, of its trace's size and date, and of our sources."""
    trace = scenario.workload.trace
    stamp = [Path(trace).stat().st_size, Path(trace).stat().st_mtime_ns] if trace and Path(trace).is_file() else None
    text = json.dumps([scenario.resolved(), stamp, _sources()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _sources(cache: list[str] = []) -> str:  # noqa: B006 (computed once per process)
    if not cache:
        package = Path(__file__).parents[1]
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
        cache.append(digest.hexdigest())
    return cache[0]


def rows(outcomes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One flat row per point: its settings, what came out, or why it cannot run. Ready for pandas."""
    names = next((list(o["answer"]["metrics"]) for o in outcomes if "answer" in o), [])
    for outcome in outcomes:
        answer = outcome.get("answer")
        slo = answer["slo"] if answer else None
        yield {
            **outcome["set"],
            "state": answer["verdict"]["state"] if answer else "cannot run",
            "slo_met": slo["met"] if slo else None,
            "binding": answer["explain"]["binding_constraint"] if answer else None,
            **{name: answer["metrics"][name] if answer else None for name in names},
            "error": None if answer else "; ".join(outcome["error"]),
        }
