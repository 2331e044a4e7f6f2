"""Options that several verbs have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def _named(folder: str) -> Callable[[str], list[str]]:
    """What the shell may complete an argument to."""

    def names(begun: str) -> list[str]:
        from infersim.config.resources import names as packaged

        return [name for name in packaged(folder) if name.startswith(begun)]

    return names


scenarios, hardware = _named("scenarios"), _named("hardware_profiles")
Json = Annotated[bool, Option("--json", help="Print only JSON.")]
Overrides = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override, e.g. engine.max_num_seqs=512.")
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print nothing but errors and what --json asks for.")]
Report = Annotated[Path | None, Option("--report", metavar="FILE", help="Write a self-contained HTML page.")]
Results = Annotated[
    list[str],
    Argument(
        metavar="RESULTS...",
        help="Results of vllm bench serve, sglang.bench_serving, aiperf, guidellm, or CSV; -: stdin.",
    ),
]
Server = Annotated[
    str, Option("--scenario", help="Name or path of the scenario that describes the server.", autocompletion=scenarios)
]


def as_words(overrides: list[str] | None) -> list[str]:
    """The overrides as words of a command line."""
    return [word for text in overrides or [] for word in ("--set", text)]
