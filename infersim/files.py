"""Files that are written whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .spec.errors import InputError


def check_file(path: Path, asked: str) -> None:
    """InputError, naming the option `asked`, if no file can be written at `path`."""
    folder = path.parent
    if path.is_dir() or not path.name:
        raise InputError(f"{asked} {path}: is a folder; must be the name of a file")
    if not folder.is_dir():
        raise InputError(f"{asked} {path}: {folder} is no folder; must be in one that is there")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{asked} {path}: {folder} may not be written to; must be in one that may")


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
