"""What every verb does with errors: wrong input, interruption, a reader of its output that has gone."""

import functools
import os
import sys
from collections.abc import Callable

import typer

WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def guarded(verb: Callable[..., int | None]) -> Callable[..., None]:
    """A typer command from a function that returns its exit code (None: 0) and raises InputError."""

    @functools.wraps(verb)
    def command(*args, **kwargs) -> None:
        from infersim.config.errors import InputError

        try:
            code = verb(*args, **kwargs) or 0
            sys.stdout.flush()
        except InputError as error:
            for problem in error.problems:
                print(problem, file=sys.stderr)
            code = WRONG_INPUT
        except MemoryError:
            print("not enough memory for this run: must have fewer requests or smaller tables", file=sys.stderr)
            code = WRONG_INPUT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        except BrokenPipeError:
            quiet_stdout()
            code = BROKEN_PIPE
        raise typer.Exit(code)

    return command


def quiet_stdout() -> None:
    """Nothing can be written there: send what is still buffered nowhere, so that Python's own flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
