"""`infersim compare`: what does a change buy, and why?"""

from typing import Annotated

from typer import Argument, Option

from .guard import guarded


@guarded
def compare(
    scenarios: Annotated[list[str], Argument(metavar="SCENARIO...", help="Names or paths of scenario files.")],
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE[,KEY=VALUE]", help="Of one scenario: a variant of it. Of several: in all."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, and nothing else, to stdout.")] = False,
) -> None:
    """Compare scenarios under the same draws, and divide the difference among its causes.

    Several files are compared with the first. One file is compared with a variant of itself for each --set.
    """
    from infersim.planning.compare import compare as compare_scenarios
    from infersim.planning.compare import load_compared
    from infersim.report.compare import print_comparison
    from infersim.report.files import to_json

    document = compare_scenarios(load_compared(scenarios, settings or []))
    if as_json:
        print(to_json(document))
    else:
        print_comparison(document)
