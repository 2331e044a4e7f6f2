"""The verbs as functions: what `infersim.run`, `compare`, `plan` and `sweep` are, and the answers they give."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from .config.scenario import Given
    from .metrics.result import Result

Settings = Mapping[str, Any]
"""dotted key of a scenario -> value, such as {"engine.max_num_seqs": 512}"""


@dataclass(frozen=True, repr=False)
class Answer:
    """What a run says: `summary`, the document that `infersim run --json` prints, and the replications' records."""

    summary: dict[str, Any]
    results: "list[Result]"
    command: Sequence[str] = ("infersim", "run", "scenario.json")
    """the words that reproduce it"""

    @property
    def metrics(self) -> dict[str, float | None]:
        """vLLM's metrics, means over the replications."""
        return self.summary["metrics"]

    @functools.cached_property
    def requests(self) -> "pandas.DataFrame":
        """One row per request and replication, as in requests.csv."""
        import pandas

        frames = [result.to_pandas().assign(replication=i) for i, result in enumerate(self.results)]
        return pandas.concat(frames, ignore_index=True)

    @functools.cached_property
    def briefing(self) -> dict[str, Any]:
        """What a report shows beyond the answer (planning.briefing): some more simulations."""
        from .planning.briefing import brief

        return brief(self.results, self.summary)

    def plot(self) -> "Figure":
        """Latency, requests over time, memory and where the time goes, as one matplotlib figure."""
        from .planning.briefing import outline
        from .report.figures import overview

        return overview(outline(self.results[0], self.summary))

    def report(self, path: str | Path) -> Path:
        """Writes the page of `infersim run --report`, which takes some more simulations."""
        from .report.html import write_page
        from .report.sections import run_page

        write_page(Path(path), run_page(self.briefing, self.results[0], list(self.command)))
        return Path(path)

    def __repr__(self) -> str:
        from .report.notebook import answer_text

        return f"<infersim answer: {answer_text(self.summary)}>"

    def _repr_html_(self) -> str:
        from .report.notebook import answer_html

        return answer_html(self.summary)


class _Document(dict):
    """A verb's document, as `--json` prints it, that shows itself as the terminal would."""

    def _lines(self) -> list[str]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<infersim {type(self).__name__.lower()}: {self._lines()[0]}>"

    def _repr_html_(self) -> str:
        from .report.notebook import text_html

        return text_html(self._lines())


class Comparison(_Document):
    """What `infersim compare --json` prints."""

    def __init__(self, document: Mapping[str, Any], runs: "list[list[Result]]", command: list[str]) -> None:
        super().__init__(document)
        self.runs, self.command = runs, command

    def report(self, path: str | Path) -> Path:
        """Writes the page of `infersim compare --report`, which takes some more simulations."""
        from .planning.briefing import brief
        from .report.compare_page import compare_page
        from .report.html import write_page

        answers = [variant["answer"] for variant in self["variants"]]
        briefings = [brief(results, answer) for results, answer in zip(self.runs, answers, strict=True)]
        write_page(Path(path), compare_page(self, briefings, [results[0] for results in self.runs], self.command))
        return Path(path)

    def _lines(self) -> list[str]:
        from .report.compare import print_comparison
        from .report.notebook import printed

        return printed(print_comparison, self)


class Plan(_Document):
    """What `infersim plan --json` prints."""

    def __init__(self, document: Mapping[str, Any], command: list[str]) -> None:
        super().__init__(document)
        self.command = command

    def report(self, path: str | Path) -> Path:
        """Writes the page of `infersim plan --report`, which takes some more simulations."""
        from .planning.briefing import brief_plan
        from .report.html import write_page
        from .report.plan_page import plan_page

        write_page(Path(path), plan_page(self, brief_plan(self), self.command))
        return Path(path)

    def _lines(self) -> list[str]:
        from .report.notebook import printed
        from .report.plan import print_plan

        return printed(print_plan, self)


class Sweep(list):
    """One flat row per point of a grid, ready for pandas.DataFrame."""

    def __init__(self, rows: Iterable[dict[str, Any]], keys: Sequence[str], command: list[str]) -> None:
        super().__init__(rows)
        self.keys, self.command = list(keys), command

    def plot(self) -> "Figure":
        """Throughput per GPU against the speed for a user, the best of them joined, as a matplotlib figure."""
        from .report.figures import sweep_figure

        return sweep_figure(self, self.keys)

    def report(self, path: str | Path) -> Path:
        """Writes the page of `infersim sweep --report`."""
        from .report.html import write_page
        from .report.sweep import sweep_page

        write_page(Path(path), sweep_page(self, self.keys, self.command))
        return Path(path)

    def __repr__(self) -> str:
        return f"<infersim sweep: {len(self)} points of {', '.join(self.keys)}>"

    def _repr_html_(self) -> str:
        from .report.notebook import printed, text_html
        from .report.sweep import print_sweep

        return text_html(printed(print_sweep, self, self.keys, []))


def _command(verb: str, given: "Sequence[Given]", words: Iterable[str] = ()) -> list[str]:
    """The command line of the same; what is no file is the one that a report shows as resolved."""
    names = [str(one) if isinstance(one, str | Path) and str(one) != "-" else "scenario.json" for one in given]
    return ["infersim", verb, *names, *words]


def _set(settings: Iterable[str]) -> list[str]:
    return [word for text in settings for word in ("--set", text)]


def run(scenario: "Given", settings: Settings | None = None, save_detailed: bool = False) -> Answer:
    """Simulate a scenario: a file, a packaged name, its keys or a Scenario. InputError for wrong input."""
    from .config.scenario import load_scenario
    from .explain.summary import summarize
    from .planning.grid import as_overrides
    from .planning.limits import with_limits
    from .run import run as simulate

    overrides = as_overrides(settings or {})
    results = simulate(load_scenario(scenario, overrides), save_detailed=save_detailed)
    document = with_limits(summarize(results), results[0])
    return Answer(document, results, _command("run", [scenario], _set(overrides)))


def compare(*scenarios: "Given", variants: Iterable[Settings] = ()) -> Comparison:
    """Several scenarios against the first, or one against variants of it: what `infersim compare --json` prints."""
    from .planning.compare import compare_runs, load_compared, run_all
    from .planning.grid import as_overrides

    settings = [",".join(as_overrides(variant)) for variant in variants]
    compared = load_compared(scenarios, settings)
    runs = run_all(compared)
    command = _command("compare", scenarios, _set(settings))
    return Comparison(compare_runs(compared, runs), runs, command)


def plan(file: "Given", settings: Settings | None = None) -> Plan:
    """The cheapest deployment that holds an SLO: what `infersim plan --json` prints."""
    from .planning.grid import as_overrides
    from .planning.search import plan as search

    overrides = as_overrides(settings or {})
    return Plan(search(file, overrides), _command("plan", [file], _set(overrides)))


def sweep(
    scenario: "Given",
    over: Mapping[str, Sequence[Any]],
    settings: Settings | None = None,
    out: str | Path | None = None,
    workers: int = -1,
    executor: str = "local",
    address: str | None = None,
) -> Sweep:
    """One flat row per point of the grid `over`, ready for pandas.DataFrame; with `out` it can be interrupted.

    executor: local, or ray for the cluster at `address`.
    """
    import json

    from .planning.grid import as_overrides
    from .planning.sweep import rows
    from .planning.sweep import sweep as run_sweep

    folder, overrides = None if out is None else Path(out), as_overrides(settings or {})
    found = run_sweep(scenario, over, overrides, folder, workers, executor, address)
    axes = [word for key, values in over.items() for word in ("--over", f"{key}={','.join(map(json.dumps, values))}")]
    return Sweep(rows(found), list(over), _command("sweep", [scenario], [*axes, *_set(overrides)]))
