"""A sweep: one scenario at every point of a grid, in parallel, each finished point a file, so that it can go on."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError
from infersim.config.resources import exists
from infersim.config.scenario import Given, Scenario, load_variants
from infersim.explain.summary import summarize
from infersim.files import replace_text
from infersim.run import run

from .executor import map_unordered
from .grid import as_overrides, grid
from .outlook import PER_GPU_AND_USER, per_gpu_and_user

POINTS = "points"
WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}  # of a model's folder: nothing reads them
Progress = Callable[[int, int, int], None]
"""called with points done, points in all, and how many of those done were found on disk"""


def sweep(
    scenario: Given,
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
            text = json.dumps({"set": points[i], **outcome, "sha256": _digest(outcome)}, allow_nan=False)
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


def _digest(outcome: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(outcome, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> dict[str, Any] | None:
    """What was computed; None if it is not there, or not as it was written."""
    try:
        found = json.loads(file.read_bytes())
        outcome = {key: found[key] for key in ("answer", "error") if key in found}
        return outcome if found.get("sha256") == _digest(outcome) else None
    except (OSError, ValueError, RecursionError, TypeError, AttributeError):
        return None


def name_of(scenario: Scenario) -> str:
    """The name of a point's file: a hash of the scenario in full, of what the files that it names hold, and of our
    sources and data."""
    resolved = scenario.resolved()
    files = {text: _content(text) for text in _texts(resolved) if exists(Path(text))}
    text = json.dumps([resolved, files, _sources()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _texts(value: Any) -> Iterator[str]:
    """Every text in the values of a document: whichever is a path, for whichever key, names a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _content(path: str) -> list[list[Any]]:
    """What a file holds, or each file of a folder (a model, clients of a trace): its name and its hash."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]
    return [[file.name, _hash(str(file), *_stamp(file))] for file in files if file.is_file()]


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


@functools.lru_cache(maxsize=4096)
def _hash(file: str, size: int, *_: int) -> str:
    """Of a file's bytes; of one that is no description and no trace (weights, say), its size."""
    if Path(file).suffix in WEIGHTS:
        return str(size)
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sources(cache: list[str] = []) -> str:  # noqa: B006 (computed once per process)
    if not cache:
        package = Path(__file__).parents[1]
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
        cache.append(digest.hexdigest())
    return cache[0]


def _per_gpu_and_user(answer: dict[str, Any] | None) -> dict[str, float | None]:
    gpus = answer["route"]["mean_gpus"] if answer else None
    rates = per_gpu_and_user(answer["metrics"], gpus) if answer and gpus else dict.fromkeys(PER_GPU_AND_USER)
    return {"gpus": gpus, **rates}


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
            **_per_gpu_and_user(answer),
            "error": None if answer else "; ".join(outcome["error"]),
        }
