"""`infersim studio`: the planner as a page."""

import sys
from typing import Annotated

from typer import Argument, Option

from .guard import INTERRUPTED, guarded


@guarded
def studio(
    scenario: Annotated[
        str, Argument(help="Name or path of a scenario file; see `infersim show scenarios`.")
    ] = "llama-8b-h100",
    host: Annotated[str, Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free.")] = 8080,
) -> int:
    """Open the planner as a page: every slider is simulated anew.

    It runs until interrupted (Ctrl-C). Exit code 130. 2: wrong input.
    """
    from infersim.config.errors import InputError
    from infersim.config.resources import find
    from infersim.config.scenario import load_scenario

    load_scenario(scenario)
    path = find("scenarios", scenario)
    try:
        from infersim.serve.studio.server import open_studio
    except ImportError as error:
        raise InputError(f"studio: needs the package {error.name}: pip install 'infersim[serve]'") from None
    text = path.read_text(encoding="utf-8")
    open_studio(text, path, host, port, lambda line: print(line, file=sys.stderr, flush=True))
    return INTERRUPTED
