"""A sweep on the terminal, as CSV and as a page: the table, and throughput per GPU against the speed for a user."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase as LETTERS
from textwrap import shorten, wrap
from typing import Any

from infersim.config.errors import InputError
from infersim.explain.change import plain
from infersim.files import make_folder, remove_leftovers, replace_text

from .html import Page
from .parts import reproduce, table
from .svg import KINDS, Series, chart
from .terminal import width

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
PARETO = "Throughput per GPU against speed for a user"
USER, GPU = "tokens_per_user", "tokens_per_gpu"
ROWS = 14  # of the picture on the terminal

Row = dict[str, Any]


def check_sweep_folder(folder: Path) -> None:
    """InputError if `folder` holds something that no sweep left there, or cannot be made. Makes it."""
    make_folder(folder, "--out")
    remove_leftovers(folder, re.escape(TABLE))
    if others := sorted({path.name for path in folder.iterdir()} - {TABLE, POINTS}):
        raise InputError(
            f"--out {folder}: holds {others[0]}, which no sweep wrote; must be a new or an empty folder, or"
            " that of an earlier sweep"
        )


def write_sweep(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Writes sweep.csv, one row per point in the order of the grid; returns the path."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(folder / TABLE, text.getvalue(), "--out")
    return [str(folder / TABLE)]


def front(rows: Sequence[Row]) -> list[Row]:
    """The points that no other beats in both throughput per GPU and speed for a user, the fastest for a user first: of
    those that keep up and meet their SLO, if there are any."""
    best: list[Row] = []
    known = _known(rows)
    good = [row for row in known if row["state"] != "saturated" and row["slo_met"] is not False]
    for row in sorted(good or known, key=lambda row: (-row[USER], -row[GPU])):
        if not best or row[GPU] > best[-1][GPU]:
            best.append(row)
    return best


def groups_of(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """The points by the value of the first key; all beyond the last colour together."""
    found: dict[str, list[Row]] = {}
    key = keys[0].rpartition(".")[2]
    for row in _known(rows):
        found.setdefault(f"{key} {_cell(row[keys[0]])}", []).append(row)
    names = list(found)
    if len(names) > KINDS:
        found = {name: found[name] for name in names[: KINDS - 1]} | {
            f"{len(names) - KINDS + 1} more": [row for name in names[KINDS - 1 :] for row in found[name]]
        }
    return found


def _known(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row[USER] and row[GPU]]


def _words(row: Row, keys: Sequence[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_cell(row[key])}" for key in keys)


def sweep_page(rows: Sequence[Row], keys: Sequence[str], command: list[str]) -> Page:
    """The report of a sweep; command: the words that reproduce it."""
    known, best = _known(rows), front(rows)
    series = [
        Series(name, [row[USER] for row in mine], [row[GPU] for row in mine], True,
               [f"{_words(row, keys)}: {row['state']}" for row in mine])
        for name, mine in groups_of(rows, keys).items()
    ]  # fmt: skip
    names = [", ".join(_cell(row[key]) for key in keys) for row in best]
    series.append(Series("best", [row[USER] for row in best], [row[GPU] for row in best], names=names))
    about = "The best points are joined: of those that keep up, none is faster for a user and makes more of each GPU."
    picture = chart(PARETO, about, series, "tokens/s of one user", "output tokens/s per GPU")
    charts = [{"title": PARETO, "note": f"up and to the right is better; named by {', '.join(keys)}", "svg": picture}]
    columns = [*keys, *COLUMNS, USER, GPU, "gpus"]
    cells = [[_text(row.get(name)) for name in columns] for row in rows]
    failed = [f"{_words(row, keys)}: {row['error']}" for row in rows if row["error"]]
    counts = ", ".join(f"{sum(row['state'] == state for row in rows)} {state}"
                       for state in dict.fromkeys(row["state"] for row in rows))  # fmt: skip
    head = f"{len(rows)} points of {', '.join(keys)}"
    answer = {"id": "answer", "title": "Points", "text": about if known else "", "charts": charts if known else [],
              "tables": [table("Every point", columns, cells)], "notes": failed}  # fmt: skip
    return Page(head, counts, True, [answer, reproduce(command)])


def _text(value: Any) -> Any:
    """A cell: numbers stay numbers, so that columns sort."""
    return ("yes" if value else "no") if isinstance(value, bool) else value


def print_sweep(rows: Sequence[Row], keys: Sequence[str], files: Sequence[str]) -> None:
    """One line per point; latencies in ms. Columns that do not fit the terminal go on below, beside the same keys."""
    head = [key.rpartition(".")[2] for key in keys]
    lines = [[_cell(row[key]) for key in keys] for row in rows]
    columns = [[title, *("" if row["error"] else _cell(row.get(name)) for row in rows)]
               for name, title in COLUMNS.items()]  # fmt: skip
    own = [[name, *(line[i] for line in lines)] for i, name in enumerate(head)]
    if all(row["slo_met"] is None for row in rows):
        columns = [column for column in columns if column[0] != "slo"]
    for part in _blocks(own, columns):
        widths = [max(map(len, column)) for column in part]
        for cells in zip(*part, strict=True):
            print("  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)).rstrip())
        print()
    for row in rows:
        if row["error"]:
            print(shorten(f"{_words(row, keys)}: cannot run: {row['error']}", 2 * width(), placeholder=" ..."))
    print("\n".join(pareto_lines(rows, keys)))
    for file in files:
        print(f"written    {file}")


def _blocks(own: list[list[str]], columns: list[list[str]]) -> list[list[list[str]]]:
    """The columns in groups as wide as the terminal, each behind the own ones."""
    blocks, room = [list(own)], 0
    for column in columns:
        size = max(map(len, column)) + 2
        if room + size > width() - sum(max(map(len, mine)) + 2 for mine in own) and len(blocks[-1]) > len(own):
            blocks.append(list(own))
            room = 0
        blocks[-1].append(column)
        room += size
    return blocks


def pareto_lines(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Throughput per GPU against the speed for a user in characters: the best points lettered and named below."""
    known, best = _known(rows), front(rows)
    if len(known) < 3 or len({row[GPU] for row in known}) < 2:
        return []
    across = min(64, width() - 14)
    (left, right), (low, high) = ((min(values), max(values)) for values in
                                  ([row[name] for row in known] for name in (USER, GPU)))  # fmt: skip
    cells = [[" "] * (across + 1) for _ in range(ROWS + 1)]
    for mark, row in [*((".", row) for row in known), *zip(LETTERS, best, strict=False)]:
        x = round((row[USER] - left) / ((right - left) or 1.0) * across)
        cells[ROWS - round((row[GPU] - low) / (high - low) * ROWS)][x] = mark
    lines = [f"{'':10}output tokens/s per GPU"]
    for i, line in enumerate(cells):
        tick = _cell(float(high if i == 0 else low)) if i in (0, ROWS) else ""
        lines.append(f"{tick:>9} |{''.join(line)}".rstrip())
    ends = _cell(float(left)), f"{_cell(float(right))} tokens/s of one user"
    lines += [f"{'':10}+{'-' * (across + 1)}", f"{'':11}{ends[0]:<{max(1, across + 1 - len(ends[1]))}}{ends[1]}"]
    named = "; ".join(f"{mark} {_words(row, keys)}" for mark, row in zip(LETTERS, best, strict=False))
    return lines + wrap(f"best: {named}", width())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return plain(value)
    return str(value)
