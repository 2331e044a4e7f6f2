"""What must hold of any scenario: it is refused with a sentence, or it runs and its answer contradicts nothing.

Beside what infersim checks of every run (metrics/conservation.py) stand here the laws that need a second computation.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from infersim.api import Answer
from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.cost.floors import floor_itl
from infersim.engine.compiled.state import REQUEST
from infersim.explain.document import Result as Document
from infersim.explain.summary import summarize
from infersim.metrics.latency import num_gaps
from infersim.metrics.result import Result
from infersim.planning.limits import with_limits
from infersim.planning.steps import steps_of
from infersim.report.chrome_trace import write_chrome_trace
from infersim.report.export import EXPORTS, write_export
from infersim.report.files import to_json
from infersim.report.terminal import print_report
from infersim.report.vllm_bench import vllm_bench
from infersim.run import run
from infersim.workload.build import build_requests

OK, REFUSED = "ok", "refused"
ROUNDING = 1e-9
RECORD = [name for name in REQUEST.names or () if name != "num_hashed_blocks"]  # nobody asks for it without a cache
SHARES = ("share", "usage", "hit_rate", "rate", "kv_blocks_saved")


def examine(data: dict[str, Any], again: bool = False) -> tuple[str, str]:
    """(ok, ""), (refused, why), or (what kind of law is broken, how); again: also whether all can
    be written that is written of a run."""
    warnings.simplefilter("error")  # a line that no user could read anything in
    try:
        try:
            scenario = build_scenario(data, "scenario")
            results = run(scenario, save_detailed=True)
        except InputError as error:
            sentences = [problem for problem in error.problems if len(problem.split()) > 3]
            return (REFUSED if sentences else "refused without a sentence"), "; ".join(error.problems)
        document = summarize(results)
        Document.model_validate_json(to_json(document))  # obeys its schema
        with redirect_stdout(io.StringIO()):
            print_report(document, [])
        broken = [*_shares(document), *(law for result in results for law in _recomputed(result, document, results))]
        first, second = (result.requests[RECORD].tolist() for result in (results[0], run(scenario)[0]))
        if first != second:  # which coasts, as it keeps no gaps
            broken.append("not the same: two runs differ")
        if again:
            _write_all(document, results)
        return (broken[0].partition(":")[0], "; ".join(broken)) if broken else (OK, "")
    except Exception as error:  # whatever it is, a user would see it
        place = error.__traceback__
        while place is not None and place.tb_next:
            place = place.tb_next
        where = (
            f"{place.tb_frame.f_code.co_filename.rpartition('/')[2]}:{place.tb_frame.f_code.co_name}" if place else ""
        )
        return f"{type(error).__name__} in {where}", str(error)


def _write_all(document: dict[str, Any], results: list[Result]) -> None:
    """What lifted limits bring, the page, the trace, and each export, which may be refused."""
    requests = build_requests(results[0].scenario.workload, results[0].scenario.simulation.seed, Path())
    with TemporaryDirectory() as name:
        folder = Path(name)
        Answer(with_limits(document, results[0]), results).report(folder / "page.html")
        write_chrome_trace(folder / "trace.json", results[0], steps_of(results[0], seconds=0.05))
        for kind in EXPORTS:
            with suppress(InputError):
                write_export(kind, folder, results[0], requests, vllm_bench(results[0], True))


def _shares(value: Any, path: str = "") -> Iterator[str]:
    """Shares lie in [0, 1], seconds and counts are not negative."""
    if path in (".scenario", ".engine", ".verdict", ".provenance", ".confidence", ".memory"):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _shares(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _shares(inner, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        key = path.rpartition(".")[2]
        share = key.endswith(SHARES) or ".kv_shares." in path or key.startswith("floor_share")
        if value < -ROUNDING or (share and value > 1 + ROUNDING):
            yield f"{path}: {value} is {'no share' if share else 'negative'}"


def _recomputed(result: Result, document: dict[str, Any], results: list[Result]) -> Iterator[str]:
    done = result.requests[result.measured]
    if result.itl_gaps is not None and result.itl_offsets is not None and len(done):
        starts, counts = result.itl_offsets[result.measured], num_gaps(done)
        ends = np.concatenate([[0.0], np.cumsum(result.itl_gaps, dtype="f8")])
        gaps, generation = ends[starts + counts] - ends[starts], done["last_token"] - done["first_token"]
        wrong = ~np.isclose(gaps, generation, rtol=1e-5, atol=1e-6)
        wrong &= (counts > 0) & (result.num_sequences == 1)  # a sample's own gaps are not kept
        if wrong.any():
            row = int(np.argmax(wrong))
            yield f"gaps: add up to {gaps[row]} s, last token - first is {generation[row]} s"
        yield from _steps(result, starts, counts)
    if len(results) == 1 and len(done):
        metrics, ttft = document["metrics"], (done["first_token"] - done["sent"]) * 1e3
        e2el = (done["last_token"] - done["sent"]) * 1e3
        for name, values in (("ttft", ttft), ("e2el", e2el)):
            for label, percent in (("median", 50), ("p90", 90), ("p99", 99)):
                if not np.isclose(
                    metrics[f"{label}_{name}_ms"], np.percentile(values, percent), rtol=1e-12, atol=1e-12
                ):
                    yield f"percentiles: {label}_{name}_ms is not that of the records"
        if (ttft > e2el + 1e-9).any():
            yield "order: a first token after the last"
    if (shares := document["explain"]["kv_shares"]) and abs(sum(shares.values()) - 1) > 1e-6:
        yield f"kv_shares: add up to {sum(shares.values())}"


def _steps(result: Result, starts: np.ndarray, counts: np.ndarray) -> Iterator[str]:
    """No step is faster than one token of one sequence can be on the fastest of the devices that answer."""
    answering = [ran.deployment for ran in result.ran if ran.role in ("serve", "decode")]
    if result.scenario.early_exit is not None or any(d.engine.host_token_time > 0 for d in answering):
        return  # fewer layers; or tokens that bunch behind the API server
    assert result.itl_gaps is not None
    inside = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    least = float(result.itl_gaps[inside].min()) if len(inside) else np.inf
    floor = min(floor_itl(deployment.placement, 1) for deployment in answering)
    if least < floor * (1 - 1e-6):
        yield f"floor: a gap of {least} s, and no step is faster than {floor} s"
