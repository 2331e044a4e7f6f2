"""A trace file as columns: CSV or one JSON object per line, plain or gzipped, with errors that name the line."""

import csv
import gzip
import io
import json
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config.errors import InputError
from ..config.units import short
from ..config.workload import MAX_TOKENS


@dataclass(frozen=True)
class Table:
    """Rows of a file whose cells are still as they stand there; `lines` are their line numbers."""

    where: str
    columns: dict[str, list[Any]]
    lines: Sequence[int]

    def error(self, row: int, message: str, count: int = 1) -> str:
        """One line about a row and how many rows are like it."""
        more = f" and {count - 1} more like it" if count > 1 else ""
        return f"{self.where}: line {self.lines[row]}: {message}{more}"

    def numbers(self, name: str, problems: list[str]) -> np.ndarray:
        """f8[n] of one column; NaN where `problems` got a line."""
        values = self.columns[name]
        try:
            array = np.array(list(map(float, values)))
        except (TypeError, ValueError, OverflowError):
            array = np.array([_number(value) for value in values])
        self._find(~(np.abs(array) < 1e19), name, "must be a number", problems)  # nanoseconds since 1970 are 2e18
        return array

    def tokens(self, name: str, least: int, problems: list[str]) -> np.ndarray:
        """f8[n] of whole numbers >= `least` of one column; anything else where `problems` got a line."""
        found = len(problems)
        array = self.numbers(name, problems)
        if len(problems) == found:
            wrong = (array < least) | (array > MAX_TOKENS) | (array != np.floor(array))
            self._find(wrong, name, f"must be a whole number from {least} to {MAX_TOKENS:.0e}", problems)
        return array

    def seconds(self, name: str, unit: float, problems: list[str]) -> np.ndarray:
        """f8[n] seconds since the first row, from numbers of `unit` seconds, or dates if `unit` is 0; never falling."""
        found = len(problems)
        array = self._dates(name, problems) if unit == 0 else self.numbers(name, problems)
        if len(problems) == found:
            array = (array - array[0]) * (unit or 1)
            back = np.flatnonzero(np.diff(array) < 0)
            if len(back):
                row = back[0] + 1
                values = self.columns[name]
                message = f"{name} goes back in time ({short(values[row])} after {short(values[row - 1])})"
                problems.append(self.error(row, message, len(back)) + "; sort the file by it")
        return array

    def _dates(self, name: str, problems: list[str]) -> np.ndarray:
        values = [value if len(value) >= 10 else "NaT" for value in map(str, self.columns[name])]  # numpy takes "5"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a time zone (Azure 2024), which it reads rightly
            try:
                dates = np.array(values, "datetime64[ns]")
            except (TypeError, ValueError, OverflowError):
                dates = np.array([_date(value) for value in values], "datetime64[ns]")
        self._find(np.isnat(dates), name, "must be a date such as 2023-11-16 18:17:03.9799600", problems)
        return (dates - dates[0]).astype(np.int64) * 1e-9

    def _find(self, wrong: np.ndarray, name: str, message: str, problems: list[str]) -> None:
        rows = np.flatnonzero(wrong)
        if len(rows):
            value = self.columns[name][rows[0]]
            got = "nothing" if value is None or value == "" else short(value)
            problems.append(self.error(rows[0], f"{name} {message} (got {got})", len(rows)))


def read_text(path: Path, where: str) -> str:
    """The text of a file, gzipped or not. InputError if it cannot be had or is empty."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except EOFError:
        raise InputError(f"{where}: the gzip file is cut short; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{where}: the gzip file is damaged ({error}); fetch it again") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start} is not UTF-8 text; must be CSV or JSON lines") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a path with a null byte
        raise InputError(f"{where!r}: cannot be read: {error}") from None
    if not text.strip():
        raise InputError(f"{where}: empty; a trace has at least one request")
    return text


def read_csv(text: str, where: str) -> Table:
    """Columns by the names in the first line that is not blank."""
    if text.lstrip().startswith("["):
        raise InputError(
            f"{where}: a JSON list, no trace; must have a line per request: CSV with a header such as"
            " arrival_s,prompt_tokens,output_tokens, or a JSON object each. Of texts (ShareGPT) count the tokens first"
        )
    reader = csv.reader(io.StringIO(text, newline=""))
    lines, rows = [], []
    try:
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                lines.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num}: not CSV: {error}") from None
    names = [name.strip() for name in rows.pop(0)]
    if twice := next((name for i, name in enumerate(names) if name and name in names[:i]), None):
        raise InputError(f"{where}: line {lines[0]}: the header has {short(twice)} twice; must name each column once")
    for line, row in zip(lines[1:], rows, strict=True):
        if len(row) != len(names):
            if len(row) > len(names):
                raise InputError(
                    f"{where}: line {line}: has {len(row)} cells for the {len(names)} columns of the header"
                )
            row += [""] * (len(names) - len(row))
    return Table(where, {name: [row[i] for row in rows] for i, name in enumerate(names)}, lines[1:])


def read_json_lines(text: str, where: str) -> list[tuple[int, dict]]:
    """(line number, object) for each line that is not blank."""
    rows = []
    for line, content in enumerate(text.split("\n"), 1):
        if content and not content.isspace():
            try:
                row = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: line {line}: not JSON: {short(str(error))}") from None
            if not isinstance(row, dict):
                raise InputError(f"{where}: line {line}: must be one JSON object per line (got {short(row)})")
            rows.append((line, row))
    return rows


def json_table(rows: list[tuple[int, dict]], where: str) -> Table:
    """Columns by the keys of the first object; None where a later object lacks a key.

    A line of `requests` with one `timestamp` (AIBrix) is as many rows.
    """
    if isinstance(rows[0][1].get("requests"), list):
        rows = [(line, row | one) for line, row in rows for one in _objects(row.get("requests"))]
        if not rows:
            raise InputError(f"{where}: every list of requests is empty; a trace has at least one request")
    return Table(where, {name: [row.get(name) for _, row in rows] for name in rows[0][1]}, [line for line, _ in rows])


def _objects(value: Any) -> list[dict]:
    """The objects of a list; an empty one, whose cells will be found missing, for anything else."""
    return [one if isinstance(one, dict) else {} for one in value] if isinstance(value, list) else [{}]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _date(value: str) -> np.datetime64:
    try:
        return np.datetime64(value, "ns")
    except (TypeError, ValueError, OverflowError):
        return np.datetime64("NaT")
