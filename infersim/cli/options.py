"""Options that several verbs have."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Json = Annotated[bool, Option("--json", help="Print only JSON.")]
Overrides = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override, e.g. engine.max_num_seqs=512.")
]
Report = Annotated[Path | None, Option("--report", metavar="FILE", help="Write a self-contained HTML page.")]
Results = Annotated[
    list[str],
    Argument(metavar="RESULTS...", help="Benchmark results: vllm bench serve, aiperf, guidellm JSON or CSV."),
]
Server = Annotated[str, Option("--scenario", help="Name or path of the scenario that describes the server.")]


def as_words(overrides: list[str] | None) -> list[str]:
    """The overrides as words of a command line."""
    return [word for text in overrides or [] for word in ("--set", text)]
