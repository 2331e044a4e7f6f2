"""`infersim serve`: an endpoint that answers when the simulated engine would."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from infersim.interrupt import uninterrupted

from .guard import INTERRUPTED, guarded
from .options import Overrides


@guarded
def serve(
    scenario: Annotated[str, Argument(help="Name or path of a scenario file; see `infersim show scenarios`.")],
    overrides: Overrides = None,
    host: Annotated[str, Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    speed: Annotated[float, Option(min=1e-3, max=1e6, help="Simulated seconds in one of the wall's.")] = 1.0,
    ports_per_replica: Annotated[
        bool, Option("--ports-per-replica", help="Each replica on a port of its own, from --port on.")
    ] = False,
    tokenizer: Annotated[str | None, Option(metavar="FILE", help="A tokenizer.json to count tokens with.")] = None,
    kv_events: Annotated[
        str | None,
        Option(metavar="ENDPOINT", help="Tell over ZMQ what prefix caches hold, like tcp://*:5557; replay beside it."),
    ] = None,
    record: Annotated[Path | None, Option(metavar="FILE", help="Write the traffic as a trace.")] = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Folder for result.json and requests.csv.")] = None,
) -> int:
    """Serve a scenario: an OpenAI-compatible endpoint that answers when the simulated engine would.

    It runs until interrupted (Ctrl-C), and then says what happened. Exit code 130. 2: wrong input.
    """
    from infersim.config.scenario import load_scenario
    from infersim.explain.summary import summarize
    from infersim.files import check_file
    from infersim.report.files import check_folder, write_result
    from infersim.report.terminal import print_report
    from infersim.serve.outcome import result
    from infersim.serve.server import Settings
    from infersim.serve.server import serve as run_server

    description = load_scenario(scenario, overrides or [])
    if record is not None:
        check_file(record, "--record")
    if out is not None:
        check_folder(out)
    settings = Settings(host, port, speed, ports_per_replica, tokenizer, record, kv_events)
    live = run_server(description, settings, lambda text: print(text, file=sys.stderr, flush=True))
    with uninterrupted():
        found = result(live)
        if found is not None:
            document = summarize([found])
            files = write_result(out, document, [found], False) if out is not None else []
            print_report(document, files)
        late = live.clock.lateness()
        if late["chunks"]:
            print(f"chunks left {late['p50_ms']} ms (p50) and {late['p99_ms']} ms (p99) late, {late['chunks']} of them")
        if not late["keeps_up"]:
            print("the process did not keep up: more than 1 % of chunks were over 50 ms late; use a lower --speed")
    return INTERRUPTED
