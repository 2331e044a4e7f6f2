"""reproduction.md and its figures: the outcome of `infersim reproduce` for people to read."""

from functools import partial
from pathlib import Path
from typing import IO, Any

from infersim.files import replace_file, replace_text

REPORT = "reproduction.md"


def write_reproduction(folder: Path, outcome: dict[str, Any], figures: list) -> list[str]:
    """Writes the tables and one SVG for each figure (reproduce.figures.Figure); returns the paths."""
    written = []
    for figure in figures:
        path = folder / f"reproduction-{figure.name}.svg"
        replace_file(path, partial(_draw, figure), "--out")
        written.append(str(path))
    text = "\n".join([*_head(outcome), *_tables(outcome["results"]), *_figures(figures)]) + "\n"
    replace_text(folder / REPORT, text, "--out")
    return [str(folder / REPORT), *written]


def number(value: float | tuple[float, ...] | None) -> str:
    """Four digits of each number."""
    if value is None:
        return "-"
    if isinstance(value, tuple | list):
        return ", ".join(map(number, value))
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.6g}"


def _head(outcome: dict[str, Any]) -> list[str]:
    """The first line below the title counts the evidence."""
    return [
        "# Reproduction of published numbers",
        "",
        f"{outcome['tally']}.",
        "",
        "Written by `infersim reproduce --out reports`. *Simulated*: the engine ran. *Closed form*: the",
        "product's cost models were evaluated. *Arithmetic*: papers' numbers and formulas were combined without",
        "the product. *Fitted*: a constant was chosen looking at this very row, which is therefore evidence of",
        "nothing; other rows name such constants where they use them. Tolerances are the sources', relative, or in the",
        "unit where +- stands before them; where a source gives none, 5 % for closed forms and arithmetic, 20 % for",
        "simulations. [mutations.md](mutations.md) shows that claims fail when the product is wrong.",
    ]


TITLES = {"failed": "Disagreements", "ok": "Agreements", "fitted": "Fitted"}


def _tables(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for verdict, title in TITLES.items():
        chosen = [row for row in rows if row["verdict"] == verdict]
        if chosen:
            lines += [
                "",
                f"## {title}",
                "",
                "| id | evidence | expected | got | unit | tolerance | note | fitted constants: on | source |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
        for row in chosen:
            expected = number(row["expected"])
            if row["kind"] == "range":
                expected = " to ".join(map(number, row["expected"]))
            cells = (
                row["id"],
                row["evidence"],
                expected,
                number(row["got"]),
                row["unit"],
                f"{'+-' if row['absolute'] else ''}{row['tolerance']:.3g}",
                row["note"],
                "; ".join(f"{constant}: {', '.join(on)}" for constant, on in row["fitted_on"].items()),
                row["source"],
            )
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    left_out = [row for row in rows if row["verdict"] == "not applicable"]
    if left_out:
        lines += ["", "## Not applicable", "", "| id | reason | source |", "|---|---|---|"]
        lines += [f"| {row['id']} | {row['note']} | {row['source']} |" for row in left_out]
    return lines


def _figures(figures: list) -> list[str]:
    lines = ["", "## Figures"] if figures else []
    for figure in figures:
        lines += ["", f"![{figure.title}](reproduction-{figure.name}.svg)", "", f"{figure.title}: {figure.note}."]
    return lines


def _draw(figure: Any, file: IO[bytes]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": figure.name, "svg.fonttype": "none"}  # the same drawing, the same bytes
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 3.6), layout="constrained")
    axes = drawing.subplots()
    for name, points in figure.lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    if figure.level is not None:
        axes.axhline(figure.level, color="0.7", linewidth=0.8)
    for axis in figure.logarithmic:
        getattr(axes, f"set_{axis}scale")("log", base=2)
    axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
    axes.legend(fontsize="small")
    drawing.savefig(file, format="svg", metadata={"Date": None})
