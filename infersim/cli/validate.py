"""`infersim validate`: prediction against measurement."""

from typing import Annotated

from typer import Option

from .guard import guarded
from .options import Json, Overrides, Quiet, Report, Results, Server, as_words


@guarded
def validate(
    results: Results,
    scenario: Server,
    overrides: Overrides = None,
    skip: Annotated[
        int, Option(min=0, help="Requests to leave out at the start of each run, such as those used for fitting.")
    ] = 0,
    report: Report = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """How far is the prediction from what a live server's benchmark measured?

    The measured requests are replayed at the times at which they were sent. If a FILE.csv has a column config, it holds
    several runs, and FILE.csv#NAME is one of them.
    """
    from infersim.calibration.results import read_results
    from infersim.calibration.validation import validate as compare
    from infersim.config.scenario import load_scenario
    from infersim.explain.summary import finite
    from infersim.files import check_file
    from infersim.report.calibration import validation_lines, validation_page
    from infersim.report.files import to_json

    if report is not None:
        check_file(report, "--report")
    description = load_scenario(scenario, overrides or [])
    documents = compare(description, read_results(results), skip)
    if report is not None:
        from infersim.report.html import write_page

        words = [*results, "--scenario", scenario, *as_words(overrides), *(["--skip", str(skip)] if skip else [])]
        write_page(report, validation_page(documents, ["infersim", "validate", *words]))
    if as_json:
        print(to_json(finite({"runs": documents})))
    else:
        print("\n\n".join("\n".join(validation_lines(document)) for document in documents))
        if report is not None:
            print(f"written    {report}")
