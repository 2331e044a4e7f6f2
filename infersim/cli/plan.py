"""`infersim plan`: what should I deploy?"""

from pathlib import Path
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
    report: Annotated[Path | None, Option(metavar="FILE", help="Write one self-contained HTML page.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, and nothing else, to stdout.")] = False,
) -> int:
    """Find the cheapest deployment that holds an SLO. Exit code 1 if nothing can."""
    from infersim.files import check_file
    from infersim.planning.search import plan as search
    from infersim.report.files import to_json
    from infersim.report.plan import print_plan

    from .progress import Bar

    if report is not None:
        check_file(report, "--report")
    bar = Bar()
    document = search(file, overrides or [], lambda done, left: bar(done, done + left) if left else None)
    bar(1, 1)
    if report is not None:
        from infersim.planning.briefing import brief_plan
        from infersim.report.html import write_page
        from infersim.report.plan_page import plan_page

        given = [word for text in overrides or [] for word in ("--set", text)]
        write_page(report, plan_page(document, brief_plan(document), ["infersim", "plan", file, *given]))
    if as_json:
        print(to_json(document))
    else:
        print_plan(document)
        if report is not None:
            print(f"written    {report}")
    return 0 if document["feasible"] else NO_PLAN
