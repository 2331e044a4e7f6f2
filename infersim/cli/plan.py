"""`infersim plan`: what should I deploy?"""

from typing import Annotated

from typer import Argument, Option

from .guard import guarded
from .options import Json, Overrides, Quiet, Report, as_words, scenarios

NO_PLAN = 1


@guarded
def plan(
    file: Annotated[
        str,
        Argument(
            help="Name or path of a plan file, such as plan-llama-70b, or -: standard input.", autocompletion=scenarios
        ),
    ],
    overrides: Overrides = None,
    price: Annotated[
        list[str] | None, Option(metavar="DEVICE=USD", help="Your own price of one for an hour, in USD.")
    ] = None,
    price_kind: Annotated[
        str | None, Option(help="Quotes that count: on-demand (default), reserved, spot or ownership.")
    ] = None,
    report: Report = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Find the cheapest deployment that meets an SLO. Exit code 1 if none can."""
    from infersim.api import Plan
    from infersim.config.errors import InputError
    from infersim.files import check_file
    from infersim.planning.search import plan as search
    from infersim.report.files import to_json
    from infersim.report.plan import print_plan

    from .progress import Bar

    if report is not None:
        check_file(report, "--report")
    for each in price or []:
        if "=" not in each:
            raise InputError(f"--price {each[:40]}: must be DEVICE=USD, such as 2.50")
    overrides = [*(overrides or []), *(f"prices.usd_per_hour.{each}" for each in price or [])]
    overrides += [f"prices.kind={price_kind}"] if price_kind else []
    bar = Bar()
    document = search(file, overrides, lambda done, left: bar(done, done + left) if left else None)
    bar(1, 1)
    if report is not None:
        Plan(document, ["infersim", "plan", file, *as_words(overrides)]).report(report)
    if as_json:
        print(to_json(document))
    else:
        print_plan(document)
        if report is not None:
            print(f"written    {report}")
    return 0 if document["feasible"] else NO_PLAN
