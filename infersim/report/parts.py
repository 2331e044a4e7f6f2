"""Parts of a section of a report: tables, cards, and numbers for people."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from infersim.explain.change import plain

COLOURS = ("#0b63a5", "#b8500a", "#0b7a5c", "#8a3f86", "#7a6400", "#4a5560")
"""of series, on light ground: of the page and of the figures"""
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
WIDE = 40  # characters of a text that needs room
ROWS = 24  # of a line chart's table
Named = dict[str, dict[str, Any]]
"""name of a run -> its planning.briefing; a single run's name is empty"""


def table(caption: str, head: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """Cells with what sorts them. Kinds of columns: n, numeric, if no cell is a text; w, wide, if one is a long one."""
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(head))]
    wide = [any(isinstance(row[i], str) and len(row[i]) > WIDE for row in rows) for i in range(len(head))]
    cells = [[{"text": shown(cell), "value": "" if cell is None else cell} for cell in row] for row in rows]
    kinds = ["n" if n else "w" if w else "" for n, w in zip(numeric, wide, strict=True)]
    return {"caption": caption, "head": head, "rows": cells, "kinds": kinds}


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int | float):
        return plain(value)
    return str(value)


def span(pair: list[float] | None, unit: str) -> str:
    if pair is None:
        return "–"
    low, high = pair
    return f"{plain(low, 3)} {unit}" if high - low < 0.005 * high else f"{plain(low, 3)}–{plain(high, 3)} {unit}"


def card(name: str, value: str, note: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def reproduce(command: Sequence[str]) -> dict[str, Any]:
    """The section with the words that reproduce a page."""
    blocks = [{"title": "Reproduce", "text": shlex.join(command), "folded": False}]
    return {"id": "inputs", "title": "Inputs and commands", "blocks": blocks}


def place(
    at: Sequence[tuple[float, ...]],
    texts: Sequence[str],
    frame: tuple[float, float, float, float],
    size: float,
    height: float,
) -> Iterator[tuple[int, float, float]]:
    """Which texts find room beside their points inside the frame (left, low, right, high), the first first, and where
    each begins from its point. size: width of a letter; height: of a line."""
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at]
    for i, ((x, y), text) in enumerate(zip(at, texts, strict=True)):
        width = size * len(text)
        for dx, dy in ((7, -height / 3), (-7 - width, -height / 3), (-width / 2, 6), (-width / 2, -6 - height * 0.8)):
            box = (x + dx, y + dy, x + dx + width, y + dy + height)
            inside = box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield i, dx, dy
                break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def of_run(what: str, name: str) -> str:
    """What, of which run if there are several."""
    return f"{what}: {name}" if name else what


def thin(rows: list[list[Any]]) -> list[list[Any]]:
    """About ROWS of the rows, the last one always."""
    step = max(1, len(rows) // ROWS)
    return rows[::step] + (rows[-1:] if (len(rows) - 1) % step else [])
