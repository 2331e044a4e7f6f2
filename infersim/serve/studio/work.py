"""What the page asks for, as plain functions: the first answer, and jobs that say what they found bit by bit."""

import dataclasses
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario, build_scenario
from infersim.explain.cost import cost_of
from infersim.explain.summary import finite, summarize
from infersim.metrics.confidence import combine
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.metrics.timeline import request_bars
from infersim.planning.briefing import brief, brief_run, glance
from infersim.planning.capacity import capacity
from infersim.planning.limits import with_limits
from infersim.planning.outlook import load_curve, what_if
from infersim.planning.steps import steps_of
from infersim.report.export import bench_command, manifests, starting_commands
from infersim.report.html import render_page, render_section
from infersim.report.latencies import latency, load
from infersim.report.sections import memory, over_time, resources, run_page
from infersim.report.sections import what_if as what_if_section
from infersim.report.studio import (
    head_of,
    lengths,
    measured_section,
    memory_log,
    plan_section,
    requests_section,
    settings_section,
    steps_section,
)
from infersim.run import run

from .controls import histogram
from .edit import WHERE, read

MOST_RUNS = 5  # for error bars
PATIENCE = 5.0  # wall s that one run may take so that there are error bars

Say = Callable[[dict[str, Any]], None]


def scenario_of(text: str, near: Path | None) -> Scenario:
    """The scenario that the page's text holds. InputError with all problems."""
    return build_scenario(read(text), WHERE, (), near)


def shorter(scenario: Scenario, most: int) -> Scenario:
    """The same with its first requests only, once; their draws are the same whatever the settings."""
    load, simulation = scenario.workload, scenario.simulation
    workload = load.model_copy(update={"num_requests": min(load.num_requests or most, most)})
    return scenario.model_copy(
        update={"workload": workload, "simulation": simulation.model_copy(update={"replications": 1, "warmup": 0.0})}
    )


def first_look(scenario: Scenario, most: int) -> tuple[dict[str, Any], Result]:
    """What the first requests say."""
    results = run(shorter(scenario, most))
    found = glance(results[0], summarize(results))
    return found | {"cost": finite(cost_of(results[0], found["answer"]["metrics"]))}, results[0]


def parts_at_a_glance(found: dict[str, Any], numbers: bool = False) -> dict[str, str]:
    """The sections that follow every move, as pieces of the page. numbers: those beneath the charts too."""
    told = memory({"": found})
    told["blocks"] = [{"title": "vLLM will print", "text": memory_log(found["answer"]), "folded": False}]
    return {"latency": piece(latency({"": found}, numbers), "latency"), "memory": piece(told, "memory")}


def parts_of(found: dict[str, Any], result: Result) -> dict[str, str]:
    """The sections of one whole run."""
    drawn = {
        "prompt": histogram(result.requests["prompt_tokens"]),
        "answer": histogram(result.requests["output_tokens"]),
    }
    return parts_at_a_glance(found, True) | {
        "spent": piece(resources({"": found}), "spent"),
        "lengths": piece(lengths(drawn), "lengths"),
        "time": piece(over_time(found), "time"),
        "requests": piece(requests_section(request_bars(result)), "requests"),
        "assumed": piece(settings_section(found["answer"]), "assumed"),
        "commands": _commands(result),
    }


def piece(section: dict[str, Any], name: str) -> str:
    """A section as a piece of the page, whose identifiers are its own."""
    return render_section(section).replace("chart-", f"{name}-chart-") if section else ""


def refine(say: Say, text: str, near: Path | None, pin: str | None, points: Sequence[dict[str, float]] = ()) -> None:
    """The whole run, then what surrounds it, the most telling first. points: metrics of measured runs."""
    scenario = scenario_of(text, near)
    started = time.perf_counter()

    def progress(now: float, last: float, finished: int, submitted: int) -> None:
        say({"progress": f"whole run: {finished:,} of {submitted:,} requests", "share": finished / submitted})

    results = run(scenario, progress)
    took = time.perf_counter() - started
    found = brief_run(results, summarize(results))
    if half := found["answer"]["confidence"]:
        found |= {"half_width": half["half_width"], "runs": len(results)}
    say({"head": head_of(found), "parts": parts_of(found, results[0]), "stage": _whole(results)})
    if pin is not None:
        found["other"] = _compared(say, scenario, scenario_of(pin, near))
        say({"head": head_of(found)})
    found["answer"] = with_limits(found["answer"], results[0])
    second = steps_of(results[0])
    say({"head": head_of(found), "parts": {"steps": piece(steps_section(second), "steps")}, "at": second["at"]})
    say({"progress": "other loads"})
    curve = load_curve(scenario)
    say({"parts": {"load": piece(load({"": found | {"curve": curve, "measured": points}}), "load")}})
    if len(results) == 1 and took < PATIENCE:
        _error_bars(say, scenario, results[0], found)
    say({"progress": "what would help"})
    found["what_if"] = what_if(scenario)
    say({"head": head_of(found), "parts": {"help": piece(what_if_section({"": found}), "help")}})

    def between(low: float, high: float) -> None:
        say({"progress": f"the largest rate, between {low:.3g} and {high:.3g} requests/s"})

    found["largest"] = capacity(scenario, between)
    say({"head": head_of(found), "done": True})


def steps(say: Say, text: str, near: Path | None, at: float) -> None:
    """One second of the run, step by step."""
    found = steps_of(run(_once(scenario_of(text, near)))[0], at)
    say({"parts": {"steps": piece(steps_section(found), "steps")}, "done": True})


def _once(scenario: Scenario) -> Scenario:
    return scenario.model_copy(update={"simulation": scenario.simulation.model_copy(update={"replications": 1})})


def _whole(results: list[Result]) -> str:
    runs = f", {len(results)} runs" if len(results) > 1 else ""
    return f"whole run of {len(results[0].requests):,} requests{runs}: as infersim run says"


def _error_bars(say: Say, scenario: Scenario, first: Result, found: dict[str, Any]) -> None:
    """The same with other draws, one by one, for the width of each number's interval."""
    measured = [measure(first)]
    for seed in range(first.seed + 1, first.seed + MOST_RUNS):
        simulation = scenario.simulation.model_copy(update={"seed": seed})
        measured.append(measure(run(scenario.model_copy(update={"simulation": simulation}))[0]))
        found |= {"half_width": combine(measured)[1], "runs": len(measured)}
        say({"head": head_of(found), "progress": f"error bars from {len(measured)} runs"})


def _commands(first: Result) -> str:
    started = [(f"Start {f'the {kind} replicas' if kind else 'it'}", text, False)
               for kind, text in starting_commands(first).items()]  # fmt: skip
    blocks = [
        *started,
        ("Measure it", bench_command(first), False),
        ("Kubernetes manifests", manifests(first)[0], True),
    ]
    told = [{"title": name, "text": text, "folded": folded} for name, text, folded in blocks]
    return piece({"id": "commands", "title": "Take it away", "blocks": told}, "commands")


def _compared(say: Say, scenario: Scenario, pinned: Scenario) -> dict[str, Any] | None:
    """Tells why B differs from A; returns what A's numbers are."""
    from infersim.planning.compare import compare
    from infersim.report.compare_page import why_sections

    say({"progress": "B against A"})
    try:
        document = compare([("A", pinned), ("B", scenario)])
    except InputError as error:
        say(
            {"parts": {"compare": piece({"id": "compare", "title": "B against A", "notes": error.problems}, "compare")}}
        )
        return None
    sections = why_sections(document)
    sections[0] |= {"id": "compare", "title": "B against A"}
    say({"parts": {"compare": "".join(piece(section, f"compare-{i}") for i, section in enumerate(sections))}})
    first = run(pinned)
    metrics = summarize(first)["metrics"]
    return {"metrics": metrics, "cost": finite(cost_of(first[0], metrics))}


def report(say: Say, text: str, near: Path | None) -> None:
    """The page that `infersim run --report` writes."""
    scenario = scenario_of(text, near)
    say({"progress": "the report"})
    results = run(scenario)
    document = with_limits(summarize(results), results[0])
    page = run_page(brief(results, document), results[0], ["infersim", "run", "scenario.yaml"])
    say({"file": render_page(page), "name": "report.html", "done": True})


def plan(say: Say, text: str, near: Path | None, asked: dict[str, Any]) -> None:
    """The cheapest of several devices and divisions for the page's traffic and limits."""
    from infersim.config.plan import load_plan
    from infersim.planning.search import search

    data = scenario_of(text, near).resolved()
    data = {key: value for key, value in data.items() if key not in ("hardware", "parallelism", "cluster")}
    data |= {key: asked[key] for key in ("max_gpus", "objective") if key in asked}
    data["candidates"] = {"hardware": asked.get("hardware") or []}
    planned, scenarios = load_plan(data)

    def progress(trials: int, left: int) -> None:
        say({"progress": f"{trials} tried, {left} to try", "share": trials / max(1, trials + left)})

    say({"plan": plan_section(search(planned, scenarios, progress)), "done": True})


def measured(say: Say, text: str, near: Path | None, name: str, content: str) -> None:
    """A benchmark's file against the scenario, and what explains the gap."""
    from infersim.calibration.results import read_results
    from infersim.calibration.validation import validate

    scenario = scenario_of(text, near)
    say({"progress": "the measured run, simulated"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("measured" + (".csv" if name.lower().endswith(".csv") else ".json"))
        path.write_text(content, encoding="utf-8")
        try:
            documents = validate(scenario, read_results([str(path)]))
        except InputError as error:
            raise InputError(problem.replace(str(path), name) for problem in error.problems) from None
    for document in documents:
        document["where"] = name
    points = [{key: error["measured"] for key, error in each["errors"].items()} for each in documents]
    say({"parts": {"measured": piece(measured_section(documents), "measured")}, "points": points, "done": True})


JOBS: dict[str, Callable[..., None]] = {"refine": refine, "report": report, "plan": plan, "measured": measured,
                                        "steps": steps}  # fmt: skip


def work(connection: Any, kind: str, arguments: dict[str, Any]) -> None:
    """A process of its own: what a job says goes through the pipe, a JSON document each."""

    def say(message: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(message, default=_plain).encode())

    try:
        JOBS[kind](say, **arguments)
    except InputError as error:
        say({"errors": error.problems, "done": True})
    except MemoryError:
        say({"errors": ["not enough memory for this run: must have fewer requests"], "done": True})
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception as error:  # a bug: the page says so, and what it had before stays
        traceback.print_exc()
        say({"errors": [f"infersim: {type(error).__name__}: {error}; please report this"], "done": True})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item()
