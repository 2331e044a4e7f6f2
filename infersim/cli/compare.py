"""`infersim compare`: what does a change buy, and why?"""

from typing import Annotated

from typer import Argument, Option

from .guard import guarded
from .options import Json, Quiet, Report, as_words
from .options import scenarios as known


@guarded
def compare(
    scenarios: Annotated[
        list[str], Argument(metavar="SCENARIO...", help="Names or paths of scenario files.", autocompletion=known)
    ],
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE[,KEY=VALUE]",
            help="With one scenario: a variant of it. With several: a setting of all.",
        ),
    ] = None,
    report: Report = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare scenarios on the same requests, and attribute the difference to causes that add up to it.

    Several files are compared with the first. One file is compared with a variant of itself for each --set.
    """
    from infersim.api import Comparison
    from infersim.files import check_file
    from infersim.planning.compare import compare_runs, load_compared, run_all
    from infersim.report.compare import print_comparison
    from infersim.report.files import to_json

    if report is not None:
        check_file(report, "--report")
    compared = load_compared(scenarios, settings or [])
    runs = run_all(compared)
    document = compare_runs(compared, runs)
    if report is not None:
        Comparison(document, runs, ["infersim", "compare", *scenarios, *as_words(settings)]).report(report)
    if as_json:
        print(to_json(document))
    else:
        print_comparison(document)
        if report is not None:
            print(f"written    {report}")
