"""Measured kernels -> efficiencies: the law of each class fitted to part of the shapes, its error on the others."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from infersim.config.errors import InputError
from infersim.config.hardware import Correction, Hardware, OperatorEfficiency

from .classes import CLASSES, known, parameters
from .fit import Parameter, fit_grid, mean_error, search
from .guard import beyond
from .tables import CACHED, NEGLIGIBLE, Rows, held_out

LEAST_EXCESS = 2e-6
"""seconds below which layouts are taken to be alike"""
LEAST_SHAPES, FEW_SHAPES = 16, 3
"""with fewer shapes than this the correction follows only what varies within a shape; with fewer than that there is
none"""


@dataclass(frozen=True)
class Soundness:
    """Which rows count. cold: their time is that of memory, not of a cache; usable: cold, or no matter if cached;
    negligible: their bytes are next to nothing."""

    cold: np.ndarray
    usable: np.ndarray
    negligible: np.ndarray
    cached: int
    """rows whose working set may have been in the cache"""
    impossible: int
    """rows faster than the memory's bandwidth allows"""


def soundness(rows: Rows, hardware: Hardware) -> Soundness:
    """Sort out rows that a warm cache has touched: the engine prices cold ones.

    Rows that fit in 1.2 times the L2 cache do not count in errors, unless measured in place. Those whose bytes are a
    negligible part of their time still tell the fixed time, and of a class whose inputs the engine finds warm all do.
    """
    kind = CLASSES[rows.operator_class]
    work = kind.work(hardware, rows)
    moved = work.bytes
    impossible = np.maximum(moved / hardware.memory_bandwidth, work.other_seconds) > rows.seconds
    cache = 0.0 if rows.in_place else CACHED * (hardware.l2_cache or 0.0)
    cached = ~impossible & (moved > 0.0) & (moved < cache)
    negligible = moved < NEGLIGIBLE * hardware.memory_bandwidth * rows.seconds
    usable = ~impossible & (~cached | negligible | kind.warm)
    return Soundness(~impossible & ~cached, usable, negligible & ~impossible, int(cached.sum()), int(impossible.sum()))


def joined(tables: Iterable[Rows]) -> list[Rows]:
    """The tables of one class, dtype and software as one."""
    parts: dict[tuple[str, str, str], list[Rows]] = {}
    for rows in tables:
        parts.setdefault((rows.operator_class, rows.dtype, rows.software), []).append(rows)
    found = {
        key: Rows(*key, {name: np.concatenate([rows.columns[name] for rows in group]) for name in group[0].columns},
             np.concatenate([rows.seconds for rows in group]), all(rows.in_place for rows in group), group[0].kernels)
        for key, group in parts.items()
    }  # fmt: skip
    for (kind, dtype, software), rows in found.items():
        if (kind, dtype) == ("gemm", "fp8_block") and (plain := found.get(("gemm", "fp8", software))):
            less = np.maximum(rows.seconds - layout_change(rows, plain), rows.seconds / 4)
            found[kind, dtype, software] = replace(rows, seconds=less)
    return list(found.values())


def layout_change(blocks: Rows, plain: Rows) -> float:
    """Seconds that a small GEMM of block-scaled FP8 takes longer than one with one scale; 0 if next to none.

    DeepGEMM on Blackwell wants scales in another layout. Its tables count kernels that bring them there, of the weights
    too, some 7 us each time; engines do that once, at load (on Hopper, where it is not needed, both take as long).
    """
    times = []
    for rows in (blocks, plain):
        m, n, k = (rows.columns[name] for name in "mnk")
        small = np.flatnonzero((m <= 64) & (n * k <= 2**20))
        times.append({(m[i], n[i], k[i]): rows.seconds[i] for i in small})
    longer = [time - times[1][shape] for shape, time in times[0].items() if shape in times[1]]
    excess = float(np.median(longer)) if longer else 0.0
    return excess if excess > LEAST_EXCESS else 0.0


def choose(tables: list[Rows], hardware: Hardware) -> list[Rows]:
    """One table per class and dtype: vLLM's newest, unless another software's has over four times its sound rows.

    Never one whose format is narrower than 16 bits and yet slower (slower_than_wider).
    """
    groups: dict[tuple[str, str], list[tuple[int, Rows]]] = {}
    slow = {(key, rows.software) for key, (_, rows) in slower_than_wider(tables, hardware).items()}
    for rows in joined(filter(known, tables)):
        if (f"{rows.operator_class}.{rows.dtype}", rows.software) in slow:
            continue
        count = int(soundness(rows, hardware).cold.sum())
        groups.setdefault((rows.operator_class, rows.dtype), []).append((count, rows))
    chosen = []
    for group in groups.values():
        enough = max(count for count, _ in group) / 4
        of_vllm = [rows for count, rows in group if count >= enough and rows.software.startswith("vllm")]
        among = of_vllm or [rows for count, rows in group if count >= enough]
        chosen.append(max(among, key=lambda rows: version(rows.software)))
    return chosen


INSTEAD = {"moe.fp8": "moe.fp8_block"}
"""whose kernels stand in for one that is slower than its format allows: experts in FP8 of either scales are alike"""


def slower_than_wider(tables: list[Rows], hardware: Hardware) -> dict[str, tuple[float, Rows]]:
    """class.dtype -> how many times longer than bf16 the same software takes at the same shapes, and the rows, of GEMMs
    and experts whose narrower format is the slower one in most of the rows that no cache has touched.

    Such a kernel is a stack's defect, not the device's: half the bytes and twice the FLOP/s cannot take longer.
    """
    cold: dict[tuple[str, str], dict[str, tuple[Rows, dict[tuple[float, ...], float]]]] = {}
    for rows in joined(rows for rows in tables if known(rows) and rows.operator_class in ("gemm", "moe")):
        sound = rows.where(soundness(rows, hardware).cold)
        shapes = zip(*sound.columns.values(), strict=True)
        times = {tuple(map(float, shape)): float(t) for shape, t in zip(shapes, sound.seconds, strict=True)}
        cold.setdefault((rows.operator_class, rows.software), {})[rows.dtype] = rows, times
    slow = {}
    for (operator_class, _), formats in cold.items():
        if "bf16" not in formats:
            continue
        wide = formats["bf16"][1]
        for dtype, (rows, times) in formats.items():
            ratios = [time / wide[shape] for shape, time in times.items() if shape in wide]
            if dtype not in ("bf16", "fp16") and ratios and np.median(ratios) > 1.0:
                slow[f"{operator_class}.{dtype}"] = float(np.median(ratios)), rows
    return slow


OWN_KERNELS = (("all_reduce", "trtllm"),)
"""classes of which an engine has kernels of its own, so that its newest table counts beside the chosen one"""


def own_kernels(tables: list[Rows]) -> dict[str, Rows]:
    """Key of the efficiency (class.dtype@engine) -> the engine's newest table."""
    found: dict[str, Rows] = {}
    for rows in sorted(joined(filter(known, tables)), key=lambda rows: version(rows.software)):
        engine = rows.software.partition(" ")[0]
        if (rows.operator_class, engine) in OWN_KERNELS:
            found[f"{rows.operator_class}.{rows.dtype}@{engine}"] = rows
    return found


def calibrate(tables: list[Rows], hardware: Hardware, source: str) -> dict[str, OperatorEfficiency]:
    """Class and dtype -> efficiency, for all that the tables hold enough rows of. InputError if that is nothing."""
    chosen = {f"{rows.operator_class}.{rows.dtype}": rows for rows in choose(tables, hardware)}
    slow = slower_than_wider(tables, hardware)
    found = {}
    for key, rows in {**chosen, **own_kernels(tables)}.items():
        if shares := fit(rows, hardware, ", ".join([source, *filter(None, [rows.software]), *rows.kernels])):
            found[key] = shares
    for key, (ratio, rows) in slow.items():
        if other := found.get(INSTEAD.get(key, "")):
            what = (f"as {INSTEAD[key]}, for {', '.join(rows.kernels) or 'its kernel'} of {rows.software} takes"
                    f" {ratio:.2f} times as long as bf16 does")  # fmt: skip
            changes = {"provenance": "assumed", "source": f"{what}: {other.source}", "errors": {}}
            found[key] = other.model_copy(update=changes)
    if not found:
        counts = [(len(rows), soundness(rows, hardware)) for rows in joined(filter(known, tables))]
        raise InputError(
            "the tables hold too few rows that no cache has touched; must be a few dozen of a class"
            f" (got {sum(n for n, _ in counts)} rows of classes that are fitted, {sum(s.cached for _, s in counts)} of"
            f" them perhaps cached and {sum(s.impossible for _, s in counts)} faster than {hardware.name} can be)"
        )
    return dict(sorted(found.items(), key=lambda item: list(CLASSES).index(item[0].split(".")[0])))


def version(software: str) -> tuple[int, ...]:
    """The numbers in it, for comparison."""
    return tuple(int(number) for number in re.findall(r"\d+", software))


def fit(rows: Rows, hardware: Hardware, source: str) -> OperatorEfficiency | None:
    """The efficiency of these kernels' class and dtype; None if too few rows are sound."""
    kind, sound = CLASSES[rows.operator_class], soundness(rows, hardware)
    fastest = float(rows.seconds.min())
    rows, cold = rows.where(sound.usable), sound.cold[sound.usable]
    test = held_out(rows, kind.shape)
    if not (cold & test).any() or not (cold & ~test).any():
        test = np.zeros(len(rows), dtype=bool)
    train = rows.where(~test)
    names = parameters(rows.operator_class, rows.dtype, hardware)
    if np.unique(np.stack(list(train.columns.values())), axis=1).shape[1] < 3 * len(names):  # repeats tell nothing new
        return None
    # no kernel is faster than the fastest of those that move next to nothing
    smallest = rows.seconds[sound.negligible[sound.usable]]
    least = 0.8 * float(smallest.min()) if len(smallest) else 1e-7
    shortest = float(rows.seconds.min())
    # beyond the measured shapes nothing leads below a fixed time: that of experts is none above the fastest kernel's
    most = fastest if rows.operator_class == "moe" else max(10.0 * shortest, 10.0 * least)
    fixed = Parameter("fixed", min(max(1.2 * least, 0.1 * shortest), most), min(least, most), most)

    def law(values: dict[str, float], correction: Correction | None = None) -> OperatorEfficiency:
        own = {"bandwidth", "flops", "softness", "fixed"}
        return OperatorEfficiency(
            bandwidth=_round(values["bandwidth"]), flops=_round(values.get("flops", 1.0)),
            fixed=_round(values["fixed"]), softness=_round(values.get("softness", 0.0)), provenance="calibrated",
            source=source, terms={name: _round(value) for name, value in values.items() if name not in own},
            correction=correction,
        )  # fmt: skip

    def loss(values: dict[str, float]) -> float:
        return mean_error(np.log(kind.seconds(law(values), hardware, train) / train.seconds))

    values = search(loss, [fixed, *names])
    plain = law(values)
    correction = _correct(plain, hardware, rows, ~test)
    corrected = law(values, correction)
    what = "held-out shapes" if test.any() else "the fitted rows"
    where = cold & test if test.any() else cold
    if not where.any():  # the working set of every row is in the cache
        where = np.ones(len(rows), dtype=bool)
    errors = {
        what: describe(corrected, hardware, rows.where(where)),
        "without correction": describe(plain, hardware, rows.where(where)),
        "rows": f"{int((~test).sum())} fitted, {int(where.sum())} in the error; {sound.cached} perhaps cached and"
        f" {sound.impossible} beyond the memory's bandwidth left out",
    }
    if corrected.fixed > 1.001 * shortest:
        errors["caution"] = (
            f"fixed time {corrected.fixed * 1e6:.3g} us, but the fastest kernel took {shortest * 1e6:.3g} us"
        )
    if wrong := beyond(corrected, hardware, rows.where(cold)):
        errors["beyond 25 %"] = wrong
    return corrected.model_copy(update={"errors": errors})


def _shapes(rows: Rows) -> int:
    names = CLASSES[rows.operator_class].shape
    return np.unique(np.stack([rows.columns[name] for name in names]), axis=1).shape[1]


def _correct(plain: OperatorEfficiency, hardware: Hardware, rows: Rows, train: np.ndarray) -> Correction | None:
    kind = CLASSES[rows.operator_class]
    coordinates = kind.coordinates(hardware, rows)
    shapes = _shapes(rows.where(train))
    if shapes < FEW_SHAPES:
        return None
    axes = {}
    for name, count in kind.knots.items():
        first, last = float(np.floor(coordinates[name].min())), float(np.ceil(coordinates[name].max()))
        # expert layers of one model split over ever more ranks are few shapes, and yet tell what width does
        split = name == "inter" and len(np.unique(rows.columns[name][train])) >= count
        fine = first < last and (shapes >= LEAST_SHAPES or name not in kind.shape or split)
        axes[name] = (first, last, count if fine else 1)
    residual = np.log(rows.seconds / kind.seconds(plain, hardware, rows))[train]
    at = [coordinates[name][train] for name in axes]
    grid = fit_grid(list(axes.values()), at, residual, kind.smoothness)
    return Correction(axes=axes, values=" ".join(str(round(1000 * value)) for value in grid.ravel()))


def errors(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> np.ndarray:
    """|predicted / measured - 1| of every row."""
    return np.abs(CLASSES[rows.operator_class].predict(shares, hardware, rows) / rows.seconds - 1.0)


def describe(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> str:
    """Median and 90th percentile of the errors, as text."""
    off = errors(shares, hardware, rows)
    return f"median {np.median(off):.1%}, 90th percentile {np.quantile(off, 0.9):.1%}, {len(rows)} rows"


def _round(value: float) -> float:
    return float(f"{value:.4g}")
