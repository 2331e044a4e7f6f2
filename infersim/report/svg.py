"""Charts as SVG text: they scale, follow the page's colours, print, and say in words what they show."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .parts import DASHES, place

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 44
KINDS = 6  # of colours, dashes and markers that the page's style has
counter = itertools.count()


@dataclass(frozen=True)
class Series:
    """A line through points; with `points` only these, or with `joined` both; labels, if given, one per point, for the
    pointer."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False
    labels: Sequence[str] = ()
    joined: bool = False
    names: Sequence[str] = ()
    """of the points, written beside those where there is room, the first first"""
    kind: int | None = None
    """of its colour, if not that of its place"""
    hollow: bool = False


@dataclass(frozen=True)
class Mark:
    """A straight line across the chart at a value of x (or y), with a word."""

    at: float
    text: str
    vertical: bool = True


@dataclass(frozen=True)
class Axis:
    """One axis: what it says, and which values it spans."""

    label: str
    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """Where the value lies, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values inside, at most about six."""
        if self.log and self.high / self.low >= 10:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 3 else (1,)
            every = max(1, len(decades) // 6) if steps == (1,) else 1
            found = [step * 10.0**d for d in decades[::every] for step in steps]
        else:
            rough = (self.high - self.low) / 5
            scale = 10.0 ** math.floor(math.log10(rough))
            step = next(n * scale for n in (1, 2, 5, 10) if n * scale >= rough * 0.999)
            found = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def axis(label: str, values: Sequence[float], log: bool = False) -> Axis:
    """An axis that spans the values; a linear one begins at 0."""
    known = [value for value in values if value is not None and math.isfinite(value) and (value > 0 or not log)]
    if not known:
        return Axis(label, 0.1 if log else 0.0, 1.0, log)
    low, high = min(known), max(known)
    if log:
        return Axis(label, low / 1.15, high * 1.15, True) if high > low else Axis(label, low / 2, high * 2, True)
    low = min(low, 0.0)
    return Axis(label, low, high + 0.05 * (high - low) if high > low else low + 1.0, False)


def chart(
    title: str,
    about: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """A chart of several series. `about` says in a sentence what is to be seen, for those who cannot see it."""
    x_axis = axis(x_label, [v for s in series for v in s.x] + [m.at for m in marks if m.vertical], x_log)
    y_axis = axis(y_label, [v for s in series for v in s.y] + [m.at for m in marks if not m.vertical], y_log)
    parts = [_frame(x_axis, y_axis)]
    parts += [_mark(mark, x_axis, y_axis, row) for row, mark in enumerate(m for m in marks if m.vertical)]
    parts += [_mark(mark, x_axis, y_axis) for mark in marks if not mark.vertical]
    kinds = [(i if s.kind is None else s.kind) % KINDS for i, s in enumerate(series)]
    parts += [_series(kind, s, x_axis, y_axis) for kind, s in zip(kinds, series, strict=True)]
    parts.append(_names(series, x_axis, y_axis))
    if len(series) > 1:
        parts.append(_legend(kinds, series))
    return picture(title, about, "".join(parts), HEIGHT, 0 if len(series) > 1 else TOP - 8)


def _x(axis: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * axis.share(value)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * axis.share(value)


def _frame(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = _y(y_axis, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_axis.ticks():
        x = _x(x_axis, tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        )
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="label" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_axis.label)}</text>'
        f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 {middle_y})">'
        f"{escape(y_axis.label)}</text>"
    )
    return "".join(parts)


def _mark(mark: Mark, x_axis: Axis, y_axis: Axis, row: int = 0) -> str:
    """row: of the word beside a vertical line, so that those of near lines do not cover each other."""
    if mark.vertical:
        x = _x(x_axis, mark.at)
        anchor, shift = ("end", -4) if x > WIDTH / 2 else ("start", 4)
        low, word = HEIGHT - BOTTOM, escape(mark.text)
        return (
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{low}"/>'
            f'<text class="note" x="{x + shift:.1f}" y="{low - 6 - 13 * row}" text-anchor="{anchor}">{word}</text>'
        )
    y = _y(y_axis, mark.at)
    return (
        f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="note" x="{LEFT + 5}" y="{y - 4:.1f}">{escape(mark.text)}</text>'
    )


def _series(kind: int, series: Series, x_axis: Axis, y_axis: Axis) -> str:
    numbered = _points(series, x_axis, y_axis)
    at = [point for _, point in numbered]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    line = f'<path class="line c{kind}" stroke-dasharray="{DASHES[kind]}" d="{path}"/>' if at else ""
    if not series.points:
        return line
    dots = [line] if series.joined else []
    for i, (x, y) in numbered:
        tip = f"<title>{escape(series.labels[i])}</title>" if series.labels else ""
        hollow = " hollow" if series.hollow else ""
        dots.append(f'<path class="dot c{kind}{hollow}" d="{_symbol(kind, x, y)}">{tip}</path>')
    return "".join(dots)


def _points(series: Series, x_axis: Axis, y_axis: Axis) -> list[tuple[int, tuple[float, float]]]:
    """Number and place of the points that can be drawn."""
    return [
        (i, (_x(x_axis, x), _y(y_axis, y)))
        for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
        if x is not None and y is not None and (x > 0 or not x_axis.log) and (y > 0 or not y_axis.log)
    ]


def _names(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    found = [(at, s.names[i]) for s in series if s.names for i, at in _points(s, x_axis, y_axis)]
    others = [(at, "") for s in series if not s.names and s.points for _, at in _points(s, x_axis, y_axis)]
    at, texts = zip(*found, *others, strict=True) if found else ((), ())
    frame = (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    return "".join(
        f'<text class="note" x="{at[i][0] + dx:.1f}" y="{at[i][1] + dy + 9:.1f}">{escape(texts[i])}</text>'
        for i, dx, dy in place(at, texts, frame, size=6.0, height=12.0)
        if texts[i]
    )


def _symbol(kind: int, x: float, y: float) -> str:
    """A circle, square, triangle or diamond around a point."""
    if kind % 4 == 0:
        return f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
    if kind % 4 == 1:
        return f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z"
    if kind % 4 == 2:
        return f"M{x:.1f} {y - 5:.1f}l5 9h-10z"
    return f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"


def _legend(kinds: Sequence[int], series: Sequence[Series]) -> str:
    parts, x, y = [], float(LEFT), 14.0
    for kind, each in zip(kinds, series, strict=True):
        name, width, hollow = each.name, 38 + 6.8 * len(each.name), " hollow" if each.hollow else ""
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 14
        shape = (
            f'<path class="dot c{kind}{hollow}" d="{_symbol(kind, x + 9, y - 4)}"/>'
            if each.points
            else f'<path class="line c{kind}" stroke-dasharray="{DASHES[kind]}" d="M{x:.1f} {y - 4:.1f}h18"/>'
        )
        parts.append(f'{shape}<text class="tick" x="{x + 23:.1f}" y="{y:.1f}">{escape(name)}</text>')
        x += width
    return "".join(parts)


def bar(title: str, about: str, parts: Sequence[tuple[str, float]], unit: str) -> str:
    """One bar cut into parts, each with its name and value in `unit` below."""
    whole = sum(value for _, value in parts) or 1.0
    drawn, x, row = [], 0.0, 58.0
    for i, (name, value) in enumerate(parts):
        kind, width = i % KINDS, WIDTH * value / whole
        hatched = " hatched" if i >= KINDS else ""
        drawn.append(f'<rect class="part c{kind}{hatched}" x="{x:.1f}" y="4" width="{width:.1f}" height="34"/>')
        x += width
        column, line = (i % 2) * WIDTH / 2, row + 20 * (i // 2)
        drawn.append(
            f'<rect class="part c{kind}{hatched}" x="{column:.0f}" y="{line - 10:.0f}" width="12" height="12"/>'
        )
        text = f"{name} {short(value)} {unit} ({value / whole:.1%})"
        drawn.append(f'<text class="tick" x="{column + 18:.0f}" y="{line:.0f}">{escape(text)}</text>')
    return picture(title, about, "".join(drawn), int(row + 20 * math.ceil(len(parts) / 2)))


def bars(title: str, about: str, parts: Sequence[tuple[str, float]], unit: str) -> str:
    """A horizontal bar for each part, to the left of a common line if it is below 0, with its name and value."""
    least, most = (pick([0.0, *(value for _, value in parts)]) for pick in (min, max))
    texts = [f"{_signed(value)} {unit}" for _, value in parts]
    names, room = 168, 10 + 7 * max(map(len, texts), default=0)  # for names at the left, for values beyond their bars
    left, right = names + (room if least < 0 else 0), WIDTH - (room if most > 0 else 4)
    scale = (right - left) / ((most - least) or 1.0)
    zero, drawn = left - least * scale, []
    for i, ((name, value), text) in enumerate(zip(parts, texts, strict=True)):
        y, width = 8 + 24 * i, abs(value) * scale
        x, end, anchor = (zero - width, zero - width - 4, "end") if value < 0 else (zero, zero + width + 4, "start")
        kind = 1 if value > 0 else 2
        drawn.append(f'<text class="tick" x="{names - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        drawn.append(f'<rect class="part c{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="18"/>')
        drawn.append(f'<text class="tick" x="{end:.1f}" y="{y + 13}" text-anchor="{anchor}">{escape(text)}</text>')
    bottom = 8 + 24 * len(parts)
    drawn.append(f'<line class="axis" x1="{zero:.1f}" x2="{zero:.1f}" y1="2" y2="{bottom}"/>')
    return picture(title, about, "".join(drawn), bottom + 4)


def picture(title: str, about: str, body: str, bottom: int, top: int = 0, width: int = WIDTH) -> str:
    """An SVG of the chart's width around a body: its title and what is to be seen are for those who cannot see it."""
    name = f"chart-{next(counter)}"
    return (
        f'<svg viewBox="0 {top} {width} {bottom - top}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(about)}</desc>{body}</svg>'
    )


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.3g}"


def short(value: float) -> str:
    """A number in few characters: 0, 0.25, 12, 1.5k, 989T."""
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"
