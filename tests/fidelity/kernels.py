"""Kernels: the shipped profiles' laws against tables of measured kernels, on the shapes that they were not fitted to.

What is predicted here is what the engine's tables are made of: tests/test_calibration_kernels.py holds the two
together.
"""

from pathlib import Path

import numpy as np

from infersim.calibration.classes import CLASSES, known
from infersim.calibration.kernels import choose, errors, joined, soundness
from infersim.calibration.tables import Rows, held_out, read_all
from infersim.config.hardware import Hardware, OperatorEfficiency, load_hardware
from infersim.config.resources import names


def evaluate(data: Path) -> list[dict]:
    """One entry per class, device, dtype and part of the shapes: errors in percent of rows that no cache has touched.

    cached and impossible: rows left out, since their working set is below 1.2 times the L2 cache, or they beat the
    memory's bandwidth. without_grid_*: the law alone. Tables of other software than the profile was fitted to follow,
    named in op: they show what a kernel library changes.
    """
    entries, others = [], []
    for name in names("hardware_profiles"):
        hardware = load_hardware(name)
        if not hardware.efficiency:
            continue
        tables = joined(filter(known, read_all(data / "kernels", hardware)))
        chosen = {(rows.operator_class, rows.dtype, rows.software) for rows in choose(tables, hardware)}
        for rows in tables:
            shares = hardware.efficiency.get(f"{rows.operator_class}.{rows.dtype}")
            if shares is None:
                continue
            if (rows.operator_class, rows.dtype, rows.software) in chosen:
                entries += _parts(rows, hardware, shares)
            else:
                others += _parts(rows, hardware, shares, f" of {rows.software}")[:1]
    return entries + others


def _parts(rows: Rows, hardware: Hardware, shares: OperatorEfficiency, software: str = "") -> list[dict]:
    sound = soundness(rows, hardware)
    test = held_out(rows, CLASSES[rows.operator_class].shape)
    law = shares.model_copy(update={"correction": None})
    entries = []
    for split, part in (("held_out", sound.cold & test), ("in_sample", sound.cold & ~test)):
        if not part.any():
            continue
        rows_of = rows.where(part)
        entries.append(
            {
                "op": rows.operator_class + software,
                "system": hardware.name,
                "dtype": rows.dtype,
                "n": len(rows_of),
                **_summary("", errors(shares, hardware, rows_of)),
                "split": split,
                **_summary("without_grid_", errors(law, hardware, rows_of)),
                "cached": sound.cached,
                "impossible": sound.impossible,
            }
        )
    return entries


def _summary(label: str, off: np.ndarray) -> dict[str, float]:
    return {f"{label}median_pct": round(100 * float(np.median(off)), 2),
            f"{label}p90_pct": round(100 * float(np.quantile(off, 0.9)), 2)}  # fmt: skip


def draw(path: Path, entries: list[dict]) -> None:
    """Held-out errors with and without the correction grid, by class, device and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [e for e in entries if e["split"] == "held_out" and " of " not in e["op"]]
    shown.sort(key=lambda e: (list(CLASSES).index(e["op"]), e["dtype"], e["system"]))
    labels = [f"{e['op']}.{e['dtype']} {e['system']}" for e in shown]
    places = np.arange(len(shown))[::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.19 * len(shown) + 1.2))
    axes.barh(places, [e["p90_pct"] for e in shown], color="#c6d8ea", label="90th percentile")
    axes.barh(places, [e["median_pct"] for e in shown], color="#2f6690", label="median")
    axes.plot([e["without_grid_median_pct"] for e in shown], places, "k|", label="median without the grid")
    axes.set_yticks(places, labels, fontsize=6)
    axes.set_ylim(-1, len(shown))
    axes.set_xlim(0, 60)
    axes.set_xlabel("error on held-out shapes, % of the measured time")
    axes.legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
