"""`infersim reproduce`: the literature's numbers, recomputed."""

from typing import Annotated, Any

from typer import Argument, Option

from .guard import guarded

FAILED = 1


@guarded
def reproduce(
    ids: Annotated[list[str] | None, Argument(metavar="[ID]...", help="Claims or groups, e.g. bw.step sd.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> int:
    """Recompute published numbers and compare. Exit code 1 if one is missed."""
    from infersim.report.files import to_json
    from infersim.reproduce.claims import check, select
    from infersim.reproduce.notes import NOTES

    outcome = check(select(NOTES, ids or []))
    if as_json:
        print(to_json(outcome))
    else:
        for row in outcome["results"]:
            print(_line(row))
        print(f"{outcome['ok']} ok, {outcome['failed']} failed, {outcome['not_applicable']} not applicable")
    return FAILED if outcome["failed"] else 0


def _line(row: dict[str, Any]) -> str:
    word = {True: "ok", False: "FAILED", None: "n/a"}[row["ok"]]
    got = "-" if row["got"] is None else f"{row['got']:.5g}"
    return f"{word:8}{row['id']:21}{row['expected']:<12.5g}got {got:<12}{row['unit']}; {row['note']}"
