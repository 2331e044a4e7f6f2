"""Parts of a section of a report: tables, cards, and numbers for people."""

from typing import Any

WIDE = 40  # characters of a text that needs room


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
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value or 0:.4g}"  # no -0
    return str(value)


def span(pair: list[float] | None, unit: str) -> str:
    if pair is None:
        return "–"
    low, high = pair
    return f"{low:.3g} {unit}" if high - low < 0.005 * high else f"{low:.3g}–{high:.3g} {unit}"


def card(name: str, value: str, note: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "note": note}
