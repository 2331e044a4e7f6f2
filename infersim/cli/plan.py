"""`infersim plan`: what should I deploy?"""

from typing import Annotated

from typer import Argument, Option

from .guard import guarded

NO_PLAN = 1


@guarded
def plan(
    file: Annotated[str, Argument(help="Name or path of a plan file, such as plan-llama-70b.")],
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override, e.g. workload.request_rate=20.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, and nothing else, to stdout.")] = False,
) -> int:
    """Find the cheapest deployment that holds an SLO. Exit code 1 if nothing can."""
    from infersim.planning.search import plan as search
    from infersim.report.files import to_json
    from infersim.report.plan import print_plan

    from .progress import Bar

    bar = Bar()
    document = search(file, overrides or [], lambda done, left: bar(done, done + left) if left else None)
    bar(1, 1)
    if as_json:
        print(to_json(document))
    else:
        print_plan(document)
    return 0 if document["feasible"] else NO_PLAN
