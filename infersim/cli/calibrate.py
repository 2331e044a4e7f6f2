"""`infersim calibrate`: make the answers true for a machine at hand."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from .guard import guarded
from .options import Json, Overrides, Results, Server

app = typer.Typer(help="Fit predictions to measurements of a device or a server.", no_args_is_help=True)


@app.command("device")
@guarded
def device(
    out: Annotated[
        Path,
        Option(metavar="PROFILE.yaml", help="File for the calibrated profile; the measurements are saved beside it."),
    ],
    device: Annotated[str, Option(help="cpu, cuda or cuda:N; default: the first GPU, else the CPU.")] = "",
    quick: Annotated[bool, Option("--quick", help="Measure a third of the shapes, with fewer repeats.")] = False,
    force: Annotated[bool, Option("--force", help="Replace PROFILE.yaml and its measurements.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a device with PyTorch's kernels and fit the efficiencies of its profile.

    Measurements are saved as they are made, and the same --out continues. Whole model steps are measured but not
    fitted: how well the profile predicts them is printed last.
    """
    from infersim.calibration import calibrate_device as calibration
    from infersim.explain.summary import finite
    from infersim.report.calibration import device_lines
    from infersim.report.files import to_json

    from .progress import Bar

    calibration.check_out(out, force)
    opened, sizes = calibration.open_device(device, quick)
    base, plan = calibration.base_of(opened), calibration.plan_of(opened, quick)
    document = finite(calibration.calibrate_device(opened, sizes, out, plan, base, Bar()))
    print(to_json(document) if as_json else "\n".join(device_lines(document)))


@app.command("server")
@guarded
def server(
    results: Results,
    scenario: Server,
    overrides: Overrides = None,
    fit: Annotated[
        list[str] | None, Option(metavar="KIND", help="What to fit: step, sequence, request. Default: all three.")
    ] = None,
    fit_requests: Annotated[
        int | None,
        Option(min=1, help="Requests of each run to fit on; errors are reported on the others. Default: half of them."),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="File for the overheads, as settings of a scenario.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Fit host and engine overheads of a live server from its benchmark results, best at several rates.

    Everything else stays as the scenario says. If the results cannot tell an overhead, it is not fitted, and a line
    says which benchmark could.
    """
    import sys

    from infersim.calibration.overheads import OVERHEADS, USUAL, fit_overheads
    from infersim.calibration.results import read_results
    from infersim.config.base import near
    from infersim.config.errors import InputError
    from infersim.config.scenario import load_scenario
    from infersim.explain.summary import finite
    from infersim.files import replace_text
    from infersim.report.calibration import overheads_lines
    from infersim.report.files import to_json

    kinds = list(dict.fromkeys(fit or USUAL))
    if unknown := [kind for kind in kinds if kind not in OVERHEADS]:
        raise InputError(f"--fit {kind[:40]}: no such overhead{near(kind, list(OVERHEADS))}" for kind in unknown)
    _check_file(out, force)
    description, runs = load_scenario(scenario, overrides or []), read_results(results)

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{done} simulations of {len(runs)} runs", end="", file=sys.stderr, flush=True)

    try:
        found = fit_overheads(description, runs, kinds, fit_requests, progress)
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    document = finite(
        {
            "warnings": found.warnings,
            "engine": found.values,
            "uncertainty": found.uncertainty,
            "runs": [
                {"where": run.where, "before": b, "after": a, "held_out": h, "fitted_requests": n,
                 "held_out_requests": run.num_requests - n}
                for run, b, a, h, n in zip(runs, found.before, found.after, found.held_out, found.fitted, strict=True)
            ],
        }
    )  # fmt: skip
    lines = overheads_lines(document)
    if out is not None:
        text = "\n".join(
            [f"# infersim calibrate server on {', '.join(results)} with {scenario}; put it into a scenario", *lines[:1]]
            + lines[1 : 1 + len(found.values)]
            + [f"# {line}" for line in lines[1 + len(found.values) :]]
        )
        replace_text(out, text + "\n", "--out")
    print(to_json(document) if as_json else "\n".join(lines + ([f"written {out}"] if out else [])))


def _check_file(out: Path | None, force: bool) -> None:
    from infersim.config.errors import InputError
    from infersim.files import check_file

    if out is None:
        return
    check_file(out, "--out")
    if out.exists() and not force:
        raise InputError(f"--out {out}: exists; must be a new file, or add --force")


@app.command("kernels")
@guarded
def kernels(
    tables: Annotated[
        list[Path], Argument(metavar="TABLE...", help="CSV or Parquet files of measured kernels, or folders of them.")
    ],
    hardware: Annotated[str, Option(help="Name or path of the profile of the device that was measured.")],
    out: Annotated[Path, Option(metavar="PROFILE", help="File for the calibrated profile.")],
    source: Annotated[
        str | None, Option(help="Who made the measurements, under which licence. Default: the table's name.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace PROFILE.")] = False,
) -> None:
    """Fit a device's efficiencies to measured kernels: GEMM, attention, experts, collectives.

    Tables have the columns of ai-dynamo/aiconfigurator's or casys-kaist/LLMServingSim's; half of the shapes are held
    out and give the error of each class. Other classes stay as the profile has them. Rows that a warm cache may have
    served, or that beat the memory's bandwidth, do not count.
    """
    from infersim.calibration.kernel_profile import with_efficiency
    from infersim.calibration.kernels import calibrate
    from infersim.calibration.tables import read
    from infersim.config.errors import InputError
    from infersim.config.hardware import Hardware, load_hardware
    from infersim.config.resources import find, parse_yaml
    from infersim.files import replace_text
    from infersim.report.calibration import kernel_lines

    _check_file(out, force)
    if missing := [table for table in tables if not table.exists()]:
        raise InputError(f"{table}: no such file or folder; must be a table of measured kernels" for table in missing)
    device = load_hardware(hardware)
    rows = [rows for table in tables for rows in read(table, device)]
    found = calibrate(rows, device, source or ", ".join(table.name for table in tables))
    text = find("hardware_profiles", hardware).read_text(encoding="utf-8")
    text = with_efficiency(text, {**device.efficiency, **found})
    Hardware.validate(parse_yaml(text, str(out)), str(out))
    replace_text(out, text, "--out")
    print("\n".join([*kernel_lines(found), f"written {out}"]))
