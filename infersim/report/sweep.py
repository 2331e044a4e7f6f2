"""The table of a sweep, on the terminal and as CSV."""

import csv
import io
from pathlib import Path
from textwrap import shorten
from typing import Any

from infersim.config.errors import InputError
from infersim.files import make_folder, remove_leftovers, replace_text

TABLE, POINTS = "sweep.csv", "points"
COLUMNS = {
    "state": "state",
    "slo_met": "slo",
    "output_throughput": "out tok/s",
    "request_throughput": "req/s",
    "median_ttft_ms": "p50 ttft",
    "p99_ttft_ms": "p99 ttft",
    "median_tpot_ms": "p50 tpot",
    "p99_tpot_ms": "p99 tpot",
    "p99_e2el_ms": "p99 e2el",
    "binding": "binding",
}


def check_sweep_folder(folder: Path) -> None:
    """InputError if `folder` holds something that no sweep left there, or cannot be made. Makes it."""
    make_folder(folder, "--out")
    remove_leftovers(folder, [TABLE])
    if others := sorted({path.name for path in folder.iterdir()} - {TABLE, POINTS}):
        raise InputError(
            f"--out {folder}: holds {others[0]}, which no sweep wrote; must be a new or an empty folder, or"
            " that of an earlier sweep"
        )


def write_sweep(folder: Path, table: list[dict[str, Any]]) -> list[str]:
    """Writes sweep.csv, one row per point in the order of the grid; returns the path."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    replace_text(folder / TABLE, text.getvalue(), "--out")
    return [str(folder / TABLE)]


def print_sweep(table: list[dict[str, Any]], keys: list[str], files: list[str]) -> None:
    """One line per point; latencies in ms."""
    head = [key.rpartition(".")[2] for key in keys] + list(COLUMNS.values())
    lines = [head]
    for row in table:
        cells = [_cell(row[key]) for key in keys]
        if row["error"]:
            lines.append([*cells, "cannot run:", shorten(row["error"], 110, placeholder=" ...")])
        else:
            lines.append([*cells, *(_cell(row.get(name)) for name in COLUMNS)])
    widths = [max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))]
    for line in lines:
        widths_here = widths if len(line) == len(head) else [*widths[: len(keys)], 0, 0]
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths_here, strict=True)).rstrip())
    for file in files:
        print(f"written    {file}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
