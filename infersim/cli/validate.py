"""`infersim validate`: prediction against measurement."""

from typing import Annotated

from typer import Option

from .guard import guarded
from .options import Json, Overrides, Results, Server


@guarded
def validate(
    results: Results,
    scenario: Server,
    overrides: Overrides = None,
    skip: Annotated[
        int, Option(min=0, help="Requests to leave out at the start of each run, such as those used for fitting.")
    ] = 0,
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
    from infersim.report.calibration import validation_lines
    from infersim.report.files import to_json

    description = load_scenario(scenario, overrides or [])
    documents = compare(description, read_results(results), skip)
    if as_json:
        print(to_json(finite({"runs": documents})))
    else:
        print("\n\n".join("\n".join(validation_lines(document)) for document in documents))
