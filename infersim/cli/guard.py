"""What every verb does with errors: wrong input, interruption, a reader of its output that has gone."""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

import typer

WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def guarded(verb: Callable[..., int | None]) -> Callable[..., None]:
    """A typer command from a function that returns its exit code (None: 0) and raises InputError. One with an option
    `quiet` prints nothing but errors, and what --json asks for."""

    @functools.wraps(verb)
    def command(*args, **kwargs) -> None:
        with contextlib.ExitStack() as silenced:
            if kwargs.get("quiet"):
                silenced.enter_context(contextlib.redirect_stderr(_NoTerminal(sys.stderr)))
                if not kwargs.get("as_json"):
                    silenced.enter_context(contextlib.redirect_stdout(io.StringIO()))
            code = _code_of(functools.partial(verb, *args, **kwargs))
        raise typer.Exit(code)

    return command


class _NoTerminal(io.TextIOBase):
    """A stream on which no progress is shown."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def _code_of(verb: Callable[[], int | None]) -> int:
    from infersim.config.errors import InputError

    try:
        code = verb() or 0
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
    return code


def quiet_stdout() -> None:
    """Nothing can be written there: send what is still buffered nowhere, so that Python's own flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
