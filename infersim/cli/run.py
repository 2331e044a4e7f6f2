"""`infersim run`: how will this deployment behave?"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from infersim.interrupt import uninterrupted

from .guard import INTERRUPTED, guarded
from .options import Json, Overrides, Quiet, Report, as_words, scenarios

if TYPE_CHECKING:
    from infersim.metrics.result import Result

SLO_MISSED = 1
STEPS_SHOWN = 2.0  # s of a Chrome trace whose steps are slices


@guarded
def run(
    scenario: Annotated[
        str, Argument(help="Name or path of a scenario file, or -: standard input.", autocompletion=scenarios)
    ],
    overrides: Overrides = None,
    seed: Annotated[int | None, Option(help="Same as --set simulation.seed=N.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    out: Annotated[Path | None, Option(metavar="DIR", help="Folder for result.json and requests.csv.")] = None,
    parquet: Annotated[bool, Option("--parquet", help="Write requests.parquet instead of requests.csv.")] = False,
    save_detailed: Annotated[
        bool, Option("--save-detailed", help="Save every inter-token gap in DIR/itls.npz.")
    ] = False,
    until_decided: Annotated[
        bool, Option("--until-decided", help="Go on with more requests until the run is long enough for a verdict.")
    ] = False,
    report: Report = None,
    plots: Annotated[Path | None, Option(metavar="DIR", help="Folder for figures, as PNG and SVG.")] = None,
    chrome_trace: Annotated[Path | None, Option(metavar="FILE", help="Write a trace for Perfetto.")] = None,
    export: Annotated[str | None, Option(help="Write vllm-bench, deployment or k8s files into --out DIR.")] = None,
) -> int:
    """Simulate a scenario: how will this deployment behave?

    Exit code 0: done. 1: an SLO is missed. 2: wrong input. 130: interrupted; what was computed is reported.
    """
    from infersim.config.errors import InputError
    from infersim.config.scenario import load_scenario
    from infersim.explain.summary import summarize
    from infersim.files import check_file, make_folder
    from infersim.planning.limits import with_limits
    from infersim.planning.steps import steps_of
    from infersim.report.chrome_trace import write_chrome_trace
    from infersim.report.export import check_kind
    from infersim.report.files import check_folder, to_json, write_result
    from infersim.report.terminal import print_report
    from infersim.run import run as simulate
    from infersim.run import run_until_decided

    seeds = [] if seed is None else [f"simulation.seed={seed}"]
    description = load_scenario(scenario, [*(overrides or []), *seeds])
    if (save_detailed or parquet) and out is None:
        raise InputError(f"{'--parquet' if parquet else '--save-detailed'}: needs --out DIR, where to save")
    for path, option in ((report, "--report"), (chrome_trace, "--chrome-trace")):
        if path is not None:
            check_file(path, option)
    if plots is not None:
        make_folder(plots, "--plots")
    if export is not None:
        check_kind(export, out)
    if out is not None:
        check_folder(out, parquet)
    go = run_until_decided if until_decided else simulate
    results = go(description, progress=_progress if sys.stderr.isatty() else None, save_detailed=save_detailed)
    with uninterrupted():
        document = with_limits(summarize(results), results[0])
        files = write_result(out, document, results, save_detailed, parquet) if out is not None else []
        if export is not None and out is not None:
            files += _export(export, out, results[0], save_detailed)
        if chrome_trace is not None:
            write_chrome_trace(chrome_trace, results[0], steps_of(results[0], seconds=STEPS_SHOWN))
            files.append(str(chrome_trace))
    if report is not None or plots is not None:
        given = as_words(overrides)
        given += [] if seed is None else ["--seed", str(seed)]
        files += _picture(results, document, report, plots, ["infersim", "run", scenario, *given])
    if as_json:
        print(to_json(document))
    else:
        print_report(document, files)
    if document["interrupted"]:
        return INTERRUPTED
    return SLO_MISSED if document["slo"] and document["slo"]["met"] is False else 0


def _export(kind: str, folder: Path, result: "Result", save_detailed: bool) -> list[str]:
    """Writes an export; what it leaves out is said on stderr."""
    from infersim.report.export import write_export
    from infersim.report.vllm_bench import vllm_bench
    from infersim.workload.build import build_requests

    requests = build_requests(result.scenario.workload, result.seed, Path())
    files, left_out = write_export(kind, folder, result, requests, vllm_bench(result, save_detailed))
    for note in left_out:
        print(f"--export {kind} leaves out {note}", file=sys.stderr)
    return files


def _picture(
    results: list[Any], document: dict[str, Any], report: Path | None, plots: Path | None, command: list[str]
) -> list[str]:
    """Writes the report and the figures, which need some more simulations; returns the paths."""
    from infersim.api import Answer

    files, answer = [], Answer(document, results, command)
    if report is not None:
        files.append(str(answer.report(report)))
    if plots is not None:
        from infersim.report.figures import write_figures

        files += write_figures(plots, answer.briefing)
    return files


def _progress(now: float, last_arrival: float, finished: int, submitted: int) -> None:
    """One line that overwrites itself on a terminal, wiped out at the end."""
    text = f"simulated {now:,.0f} s (arrivals end at {last_arrival:,.0f} s), {finished:,} of {submitted:,} requests"
    text = text if finished < submitted else ""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
