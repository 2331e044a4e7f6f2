"""Files that are written whole or not at all."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .config.errors import InputError
from .config.units import short


def check_file(path: Path, asked: str) -> None:
    """InputError, naming the option `asked`, if no file can be written at `path`."""
    folder = path.parent
    try:
        is_folder = path.is_dir() or not path.name
    except OSError as error:  # a name that is too long, say
        raise InputError(f"{asked} {short(str(path))}: {error.strerror}; must be the name of a file") from None
    if is_folder:
        raise InputError(f"{asked} {path}: is a folder; must be the name of a file")
    if not folder.is_dir():
        raise InputError(f"{asked} {path}: {folder} no such folder; must be in a folder that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{asked} {path}: {folder} cannot be written to; must be in a folder that can")


def make_folder(folder: Path, asked: str) -> None:
    """Make it, if it is not there. InputError, naming the option `asked`, if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{asked} {folder}: {error.strerror}; must be a folder that can be made") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{asked} {folder}: cannot be written to; must be a folder that can")


def remove_leftovers(folder: Path, ours: str) -> None:
    """Remove what `replace_file` left beside files of the names `ours` (a pattern) in processes that were killed."""
    for path in folder.glob(".*"):
        if re.fullmatch(rf"\.({ours})\.\d+", path.name):
            path.unlink(missing_ok=True)


def replace_text(path: Path, text: str, asked: str) -> None:
    """`replace_file` with a text."""
    replace_file(path, lambda file: file.write(text.encode()), asked)


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
