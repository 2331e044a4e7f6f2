"""Figures by matplotlib in the style of the reports: PNG and SVG files, and one figure for a notebook."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure

from infersim.config.errors import InputError

from .parts import COLOURS, DASHES, place

GIB = 2**30
INK, SOFT, RULE = "#16191d", "#545c66", "#d5d9de"
MARKERS = "os^Dv*"


def _style() -> Any:
    """The page's look as matplotlib's settings."""
    lines = ["-", *((0, tuple(map(float, dashes.split()))) for dashes in DASHES[1:])]
    return {
        "axes.prop_cycle": cycler(color=COLOURS, linestyle=lines),
        "axes.grid": True, "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.7,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": RULE, "axes.labelcolor": SOFT,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11, "axes.titlecolor": INK,
        "font.family": "sans-serif", "font.size": 9.5, "text.color": INK, "xtick.color": SOFT, "ytick.color": SOFT,
        "lines.linewidth": 1.8, "legend.frameon": False, "savefig.dpi": 150, "svg.hashsalt": "infersim",
    }  # fmt: skip


class Picture(Figure):
    """A figure that a notebook shows, whichever backend it has."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def write_figures(folder: Path, briefing: dict[str, Any]) -> list[str]:
    """Writes latency, load, pareto, memory, timeline, time and roofline, each as .png and .svg; returns the paths."""
    with rc_context(_style()):
        return [path for name, draw in FIGURES.items() for path in _write(folder, name, _drawn(draw, briefing))]


def overview(briefing: dict[str, Any]) -> Picture:
    """Latency, requests over time, memory and time by resource: what needs no further simulation."""
    with rc_context(_style()):
        figure = Picture(figsize=(10.5, 7), layout="constrained")
        for axes, draw in zip(figure.subplots(2, 2).flat, (_latency, _timeline, _memory, _time), strict=True):
            draw(axes, briefing)
        return figure


def sweep_figure(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Picture:
    """Throughput per GPU against speed for a user: a colour per value of the first key, the best points joined."""
    from .sweep import front, groups_of

    with rc_context(_style()):
        figure = Picture(figsize=(7.6, 4.2), layout="constrained")
        axes = figure.subplots()
        for i, (name, mine) in enumerate(groups_of(rows, keys).items()):
            xy = [[row[column] for row in mine] for column in ("tokens_per_user", "tokens_per_gpu")]
            axes.plot(*xy, linestyle="", marker=MARKERS[i], color=COLOURS[i], label=name)
        best = front(rows)
        x, y = ([row[column] for row in best] for column in ("tokens_per_user", "tokens_per_gpu"))
        axes.plot(x, y, color=SOFT, linestyle=":", linewidth=1.2, zorder=1, label="best")
        _label(axes, x, y, [", ".join(f"{row[key]}" for key in keys) for row in best])
        title = "Throughput per GPU against speed for a user"
        axes.set(xlabel="tokens/s of one user", ylabel="output tokens/s per GPU", title=title)
        _beside(axes)
        return figure


def write_sweep_figure(folder: Path, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    """Writes pareto.png and pareto.svg; returns the paths."""
    with rc_context(_style()):
        return _write(folder, "pareto", sweep_figure(rows, keys))


def _drawn(draw: Any, briefing: dict[str, Any]) -> Figure:
    figure = Picture(figsize=(7.6, 4.2), layout="constrained")
    draw(figure.subplots(), briefing)
    return figure


def _write(folder: Path, name: str, figure: Figure) -> list[str]:
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise InputError(f"--plots {path}: cannot be written: {error.strerror}") from None
    return list(map(str, paths))


def _beside(axes: Any) -> None:
    """The legend beside the axes, so that it hides no data."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)


def _label(axes: Any, x: Sequence[float], y: Sequence[float], texts: Sequence[str]) -> None:
    """Names beside points, those that find room."""
    axes.figure.draw_without_rendering()
    at = [tuple(map(float, axes.transData.transform(point))) for point in zip(x, y, strict=True)]
    box = axes.get_window_extent()
    for i, dx, dy in place(at, texts, (box.x0, box.y0, box.x1, box.y1), size=5.6, height=11.0):
        axes.annotate(texts[i], (x[i], y[i]), (dx * 72 / axes.figure.dpi, dy * 72 / axes.figure.dpi),
                      textcoords="offset points", fontsize=8, color=SOFT)  # fmt: skip


def _latency(axes: Any, briefing: dict[str, Any]) -> None:
    cdf = briefing["cdf"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        if metric in cdf:
            axes.plot(cdf[metric], [share * 100 for share in cdf["share"]], label=metric)
    axes.set(xscale="log", xlabel="ms", ylabel="% of requests (itl: of tokens)", title="Latency: share at most so late")
    _beside(axes)


def _load(axes: Any, briefing: dict[str, Any]) -> None:
    points = briefing["curve"]["points"]
    throughput = [p["metrics"]["output_throughput"] for p in points]
    for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"):
        axes.plot(throughput, [p["metrics"][name] for p in points], marker=".", label=name.removesuffix("_ms"))
    if (knee := briefing["curve"]["knee"]) is not None:
        axes.axvline(throughput[knee], linestyle=":", color=SOFT, label="knee")
    axes.set(yscale="log", xlabel="output tokens/s", ylabel="ms", title="Latency against throughput")
    _beside(axes)


def _pareto(axes: Any, briefing: dict[str, Any]) -> None:
    points = [p for p in briefing["curve"]["points"] if p["tokens_per_user"]]
    x, y = ([p[name] for p in points] for name in ("tokens_per_user", "tokens_per_gpu"))
    axes.plot(x, y, "o-", color=COLOURS[0])
    _label(axes, x, y, [f"{p[briefing['curve']['axis']]:.3g}" for p in points])
    load = {"request_rate": "requests/s", "max_concurrency": "clients", "time_scale": "times the trace's times"}
    title = f"Throughput per GPU against speed for a user, by {load[briefing['curve']['axis']]}"
    axes.set(xlabel="tokens/s of one user", ylabel="output tokens/s per GPU", title=title)


def _memory(axes: Any, briefing: dict[str, Any]) -> None:
    memory = briefing["answer"]["memory"]
    left = 0.0
    names = {"weights": "weights", "kv": "KV cache", "adapter": "adapters", "activation": "activations",
             "cuda_graph": "CUDA graphs", "overhead": "other"}  # fmt: skip
    for i, (name, word) in enumerate(names.items()):
        if size := memory[f"{name}_bytes"] / GIB:
            axes.barh([0], [size], left=left, color=COLOURS[i], label=f"{word}, {size:.3g} GiB")
            left += size
    rest = (memory["total_bytes"] - memory["usable_bytes"]) / GIB
    axes.barh([0], [rest], left=memory["usable_bytes"] / GIB, color=RULE, label=f"left to others, {rest:.3g} GiB")
    axes.set(xlabel="GiB", yticks=[], title="Memory of one GPU", xlim=(0, memory["total_bytes"] / GIB))
    axes.grid(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2, borderaxespad=0)


def _timeline(axes: Any, briefing: dict[str, Any]) -> None:
    lines = briefing["timeline"]
    axes.plot(lines["time"], lines["running"], label="running")
    axes.plot(lines["time"], lines["waiting"], label="waiting")
    axes.set(xlabel="s", ylabel="requests", title="Requests over time", ylim=(0, None))
    if lines["kv_usage"] is not None:
        other = axes.twinx()
        other.plot(lines["time"], [share * 100 for share in lines["kv_usage"]], color=SOFT, linestyle=":", linewidth=1)
        other.set(ylabel="KV cache, % (dotted)", ylim=(0, None))
        other.grid(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0.55, 1.0), ncols=2, borderaxespad=0.3)


def _time(axes: Any, briefing: dict[str, Any]) -> None:
    spent = {name: t for name, t in briefing["answer"]["explain"]["time_by_resource"].items() if t > 0}
    ranked = sorted(spent, key=lambda name: -spent[name])
    bars = axes.barh(ranked, [spent[name] for name in ranked], color=COLOURS[0])
    busy = sum(spent.values()) or 1.0
    axes.bar_label(bars, [f"{spent[name] / busy:.1%}" for name in ranked], padding=3, color=SOFT)
    axes.set(xlabel="busy seconds", title="Where the time goes")
    axes.margins(x=0.12)
    axes.grid(False, axis="y")
    axes.invert_yaxis()


def _roofline(axes: Any, briefing: dict[str, Any]) -> None:
    roof = briefing["roofline"]
    points = roof["points"]
    low = min([p["intensity"] for p in points] or [1.0]) / 2
    for dtype, peak in roof["peaks"].items():
        ridge = peak / roof["bandwidth"]
        axes.plot([low, ridge, ridge * 10], [low * roof["bandwidth"], peak, peak], label=f"{dtype} roof")
    for i, phase in enumerate(("decode", "prefill")):
        mine = [p for p in points if p["phase"] == phase]
        x, y = ([p[name] for p in mine] for name in ("intensity", "flops_per_s"))
        axes.plot(x, y, linestyle="", marker=MARKERS[i], color=COLOURS[3 + i], label=phase)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s", title="Roofline of one GPU")
    _beside(axes)
    x, y = ([p[name] for p in points] for name in ("intensity", "flops_per_s"))
    _label(axes, x, y, [p["name"] for p in points])


FIGURES = {
    "latency": _latency,
    "load": _load,
    "pareto": _pareto,
    "memory": _memory,
    "timeline": _timeline,
    "time": _time,
    "roofline": _roofline,
}
