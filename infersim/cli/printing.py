"""What verbs print beside the report of a run: JSON, YAML, tables and lists of fields."""

import sys
from typing import Any


def print_json(value: Any) -> None:
    """JSON without NaN or infinity."""
    from infersim.explain.summary import finite
    from infersim.report.files import to_json

    print(to_json(finite(value)))


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table with a column per key, as wide as it needs to be; closer together where the terminal has no room."""
    from infersim.report.terminal import width as room

    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    between = "  " if sum(widths) + 2 * (len(widths) - 1) <= room() else " "
    for line in cells:
        print(between.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_wrapped(text: str) -> None:
    """A sentence, in lines as wide as the terminal."""
    from infersim.report.terminal import width, wrapped

    print("\n".join(wrapped(text, width())))


def print_fields(fields: dict[str, Any]) -> None:
    """A line for each field; of an object inside, for each of its keys."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():  # an object inside is a line for each of its keys
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name} {key}".rstrip(): each for key, each in inner.items()}
    width = max(map(len, flat)) + 2
    for name, value in flat.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count:,}" for key, count in value.items())
        if isinstance(value, float):
            value = round(value) if abs(value) >= 1e4 else float(f"{value:.5g}")
        print(f"{name:{width}}{value:,}" if isinstance(value, int | float) else f"{name:{width}}{value}")


def print_yaml(value: Any) -> None:
    """YAML that reads back as the same."""
    import yaml

    from infersim.explain.summary import finite

    yaml.safe_dump(finite(value), sys.stdout, sort_keys=False, width=100, allow_unicode=True)
