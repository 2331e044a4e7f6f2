"""The verbs as functions: what `infersim.run`, `compare`, `plan` and `sweep` are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from .metrics.result import Result

Settings = Mapping[str, Any]
"""dotted key of a scenario -> value, such as {"engine.max_num_seqs": 512}"""


@dataclass(frozen=True)
class Answer:
    """What a run says: `summary`, the document that `infersim run --json` prints, and the replications' records."""

    summary: dict[str, Any]
    results: "list[Result]"

    @property
    def metrics(self) -> dict[str, float | None]:
        """vLLM's metrics, means over the replications."""
        return self.summary["metrics"]

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per request and replication, as in requests.csv."""
        import pandas

        frames = [result.to_pandas().assign(replication=i) for i, result in enumerate(self.results)]
        return pandas.concat(frames, ignore_index=True)


def run(scenario: str | Path, settings: Settings | None = None, save_detailed: bool = False) -> Answer:
    """Simulate a scenario, a file or a packaged name. spec.errors.InputError for wrong input."""
    from .config.scenario import load_scenario
    from .explain.summary import summarize
    from .planning.grid import as_overrides
    from .planning.limits import with_limits
    from .run import run as simulate

    results = simulate(load_scenario(scenario, as_overrides(settings or {})), save_detailed=save_detailed)
    return Answer(with_limits(summarize(results), results[0]), results)


def compare(*scenarios: str | Path, variants: Iterable[Settings] = ()) -> dict[str, Any]:
    """Several scenarios against the first, or one against variants of it: what `infersim compare --json` prints."""
    from .planning.compare import compare as compare_scenarios
    from .planning.compare import load_compared
    from .planning.grid import as_overrides

    return compare_scenarios(load_compared(scenarios, [",".join(as_overrides(variant)) for variant in variants]))


def plan(file: str | Path, settings: Settings | None = None) -> dict[str, Any]:
    """The cheapest deployment that holds an SLO: what `infersim plan --json` prints."""
    from .planning.grid import as_overrides
    from .planning.search import plan as search

    return search(file, as_overrides(settings or {}))


def sweep(
    scenario: str | Path,
    over: Mapping[str, Sequence[Any]],
    settings: Settings | None = None,
    out: str | Path | None = None,
    workers: int = -1,
    executor: str = "local",
    address: str | None = None,
) -> list[dict[str, Any]]:
    """One flat row per point of the grid `over`, ready for pandas.DataFrame; with `out` it can be interrupted.

    executor: local, or ray for the cluster at `address`.
    """
    from .planning.grid import as_overrides
    from .planning.sweep import rows
    from .planning.sweep import sweep as run_sweep

    folder = None if out is None else Path(out)
    return list(rows(run_sweep(scenario, over, as_overrides(settings or {}), folder, workers, executor, address)))
