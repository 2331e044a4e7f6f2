"""Files that are written whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .spec.errors import InputError


def replace_file(path: Path, write: Callable[[IO[bytes]], object], asked: str) -> None:
    """`write` to a binary file beside `path`, then put it in its place. InputError, naming the option `asked`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"{asked} {path}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
