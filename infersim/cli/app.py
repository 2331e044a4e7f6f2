"""The command line: one verb per file. Nothing heavy is imported before a verb runs, so that --help is quick."""

import contextlib
import os
import sys

import typer

from . import calibrate, compare, plan, reproduce, run, serve, show, studio, sweep, validate
from .guard import WRONG_INPUT, quiet_stdout

app = typer.Typer(
    help="How will this LLM deployment behave? A discrete-event simulator of inference serving.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("studio")(studio.studio)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("sweep")(sweep.sweep)
app.add_typer(calibrate.app, name="calibrate")
app.command("validate")(validate.validate)
app.add_typer(show.app, name="show")
app.command("reproduce")(reproduce.reproduce)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from infersim import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Exit codes: 0 done, 1 an SLO or a claim missed, 2 wrong input, 130 interrupted."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started this has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        app(prog_name="infersim")
    except OSError as error:  # a full disk behind stdout, say
        quiet_stdout()
        with contextlib.suppress(OSError):
            print(f"infersim: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
