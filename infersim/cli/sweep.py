"""`infersim sweep`: one scenario at every point of a grid."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .guard import guarded
from .options import Json, Overrides, Quiet, Report, as_words, scenarios


@guarded
def sweep(
    scenario: Annotated[
        str, Argument(help="Name or path of a scenario file, or -: standard input.", autocompletion=scenarios)
    ],
    over: Annotated[
        list[str],
        Option(metavar="KEY=VALUES", help="Values of a setting: 1,2,4 or start:stop:step or start:stop:*factor."),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Folder for the results, point by point; the same command continues an interrupted sweep.",
        ),
    ] = None,
    workers: Annotated[int, Option(help="Processes; -1: every core.")] = -1,
    executor: Annotated[str, Option(help="local, or ray: a Ray cluster.")] = "local",
    address: Annotated[
        str | None, Option(help="Address of the Ray cluster, e.g. 10.0.0.1:6379; default: this machine's.")
    ] = None,
    report: Report = None,
    plots: Annotated[Path | None, Option(metavar="DIR", help="Folder for the picture, as PNG and SVG.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a scenario at every combination of some settings' values.

    Several --over make a grid. With the same --out, an interrupted sweep continues where it stopped.
    """
    from infersim.config.errors import InputError
    from infersim.files import check_file, make_folder
    from infersim.planning.grid import parse_axis
    from infersim.planning.sweep import rows
    from infersim.planning.sweep import sweep as run_sweep
    from infersim.report.files import to_json
    from infersim.report.sweep import check_sweep_folder, print_sweep, sweep_page, write_sweep

    if workers == 0 or workers < -1:
        raise InputError(f"--workers {workers}: must be -1 or a number of processes")
    axes = [parse_axis(text) for text in over]
    keys = [key for key, _ in axes]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise InputError(f"--over {key}: is given twice; must be one list of values" for key in sorted(repeated))
    if out is not None:
        check_sweep_folder(out)
    if report is not None:
        check_file(report, "--report")
    if plots is not None:
        make_folder(plots, "--plots")
    from .progress import Bar

    outcomes = run_sweep(scenario, dict(axes), overrides or [], out, workers, executor, address, Bar())
    table = list(rows(outcomes))
    files = write_sweep(out, table) if out is not None else []
    if report is not None:
        from infersim.report.html import write_page

        axes_words = [word for text in over for word in ("--over", text)]
        command = ["infersim", "sweep", scenario, *axes_words, *as_words(overrides)]
        write_page(report, sweep_page(table, keys, command))
        files.append(str(report))
    if plots is not None:
        from infersim.report.figures import write_sweep_figure

        files += write_sweep_figure(plots, table, keys)
    if as_json:
        print(to_json({"schema_version": 1, "over": dict(axes), "points": outcomes}))
    else:
        print_sweep(table, keys, files)
