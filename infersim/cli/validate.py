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
    skip: Annotated[int, Option(min=0, help="Leave out the first so many requests of each run (fitted ones).")] = 0,
    as_json: Json = False,
) -> None:
    """How far is the prediction from what a live server's benchmark measured?

    The measured requests are replayed at their times. A FILE.csv with a column config holds several runs: FILE.csv#NAME
    is one.
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
