"""`infersim reproduce`: the literature's numbers, recomputed."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from .guard import guarded
from .options import Json

FAILED = 1


@guarded
def reproduce(
    ids: Annotated[
        list[str] | None, Argument(metavar="[ID]...", help="Claims or groups, e.g. bw.step sd lev.tab4.")
    ] = None,
    as_json: Json = False,
    out: Annotated[Path | None, Option(metavar="DIR", help="Folder for reproduction.md and its figures.")] = None,
) -> int:
    """Recompute published numbers and compare. Exit code 1 if one is missed."""
    from infersim.files import make_folder
    from infersim.report.files import to_json
    from infersim.reproduce.claims import check, select
    from infersim.reproduce.table import all_claims

    claims = select(all_claims(), ids or [])
    if out is not None:
        make_folder(out, "--out")
    outcome = check(claims)
    if out is not None:
        from infersim.report.reproduction import write_reproduction
        from infersim.reproduce.figures import all_figures

        write_reproduction(out, outcome, [] if ids else all_figures())
    if as_json:
        print(to_json(outcome))
    else:
        print(outcome["tally"])
        for row in outcome["results"]:
            print(_line(row))
    return FAILED if outcome["failed"] else 0


def _line(row: dict[str, Any]) -> str:
    from infersim.report.reproduction import number

    word = {"failed": "FAILED", "not applicable": "n/a"}.get(row["verdict"], row["verdict"])
    start = f"{word:8}{row['evidence']:13}{row['id']:29}"
    if row["verdict"] == "not applicable":
        return start + row["note"]
    text = f"{number(row['expected'])} expected, {number(row['got'])} got; {row['unit']}"
    return start + "; ".join(filter(None, (text, row["note"])))
