"""Figures as PNG and SVG files, by matplotlib."""

from pathlib import Path
from typing import Any

from infersim.config.errors import InputError

GIB = 2**30


def write_figures(folder: Path, briefing: dict[str, Any]) -> list[str]:
    """Writes latency, load, pareto, memory, timeline, time and roofline, each as .png and .svg; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, draw in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
        draw(axes, briefing)
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            try:
                figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            except OSError as error:
                raise InputError(f"--plots {path}: cannot be written: {error.strerror}") from None
            written.append(str(path))
        pyplot.close(figure)
    return written


def _latency(axes: Any, briefing: dict[str, Any]) -> None:
    cdf = briefing["cdf"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        if metric in cdf:
            axes.plot(cdf[metric], [share * 100 for share in cdf["share"]], label=metric)
    axes.set(xscale="log", xlabel="ms", ylabel="%", title="Latency: share at most so late")
    axes.legend()


def _load(axes: Any, briefing: dict[str, Any]) -> None:
    points = briefing["curve"]["points"]
    throughput = [p["metrics"]["output_throughput"] for p in points]
    for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"):
        axes.plot(throughput, [p["metrics"][name] for p in points], marker=".", label=name.removesuffix("_ms"))
    if (knee := briefing["curve"]["knee"]) is not None:
        axes.axvline(throughput[knee], linestyle=":", color="grey", label="knee")
    axes.set(yscale="log", xlabel="output tokens/s", ylabel="ms", title="Latency against throughput")
    axes.legend()


def _pareto(axes: Any, briefing: dict[str, Any]) -> None:
    points = [p for p in briefing["curve"]["points"] if p["tokens_per_user"]]
    axes.plot([p["tokens_per_user"] for p in points], [p["tokens_per_gpu"] for p in points], "o-")
    title = "Throughput per GPU against speed for a user"
    axes.set(xlabel="tokens/s of one user", ylabel="output tokens/s per GPU", title=title)


def _memory(axes: Any, briefing: dict[str, Any]) -> None:
    memory = briefing["answer"]["memory"]
    left = 0.0
    for name in ("weights", "kv", "activation", "cuda_graph", "overhead"):
        size = memory[f"{name}_bytes"] / GIB
        axes.barh([0], [size], left=left, label=f"{name.replace('_', ' ')} {size:.3g}")
        left += size
    axes.set(xlabel="GiB", yticks=[], title="Memory of one GPU", xlim=(0, memory["total_bytes"] / GIB))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def _timeline(axes: Any, briefing: dict[str, Any]) -> None:
    lines = briefing["timeline"]
    axes.plot(lines["time"], lines["running"], label="running")
    axes.plot(lines["time"], lines["waiting"], label="waiting")
    axes.set(xlabel="s", ylabel="requests", title="Requests over time")
    axes.legend(loc="upper left")
    if lines["kv_usage"] is not None:
        other = axes.twinx()
        other.plot(lines["time"], [share * 100 for share in lines["kv_usage"]], color="grey", linestyle=":")
        other.set_ylabel("KV cache, %")


def _time(axes: Any, briefing: dict[str, Any]) -> None:
    spent = {name: t for name, t in briefing["answer"]["explain"]["time_by_resource"].items() if t > 0}
    axes.barh(list(spent), list(spent.values()))
    axes.set(xlabel="busy seconds", title="Where the time goes")
    axes.invert_yaxis()


def _roofline(axes: Any, briefing: dict[str, Any]) -> None:
    roof = briefing["roofline"]
    points = roof["points"]
    low = min([p["intensity"] for p in points] or [1.0]) / 2
    for dtype, peak in roof["peaks"].items():
        ridge = peak / roof["bandwidth"]
        axes.plot([low, ridge, ridge * 10], [low * roof["bandwidth"], peak, peak], label=f"{dtype} roof")
    for phase in ("decode", "prefill"):
        mine = [p for p in points if p["phase"] == phase]
        axes.plot([p["intensity"] for p in mine], [p["flops_per_s"] for p in mine], "o", label=phase)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s", title="Roofline of one GPU")
    axes.legend()


FIGURES = {
    "latency": _latency,
    "load": _load,
    "pareto": _pareto,
    "memory": _memory,
    "timeline": _timeline,
    "time": _time,
    "roofline": _roofline,
}
