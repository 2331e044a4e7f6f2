"""Where a law is wrong for a model that people serve: its errors by model of the catalogue and number of ranks."""

from collections import defaultdict
from functools import lru_cache

import numpy as np

from infersim.config.errors import InputError
from infersim.config.hardware import Hardware, OperatorEfficiency, load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.resources import names
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.sharding import check_modelled
from infersim.models import catalog

from .classes import CLASSES
from .tables import Rows

MOST = 0.25
"""the median error of a model's shape above which its law is not to be trusted"""
RANKS = (1, 2, 4, 8)
LEAST_ROWS = 8
"""of a shape, to tell"""
OF_SHAPE = {"gemm": ("n", "k"), "moe": ("hidden", "inter", "held")}
OF_ATTENTION = ("heads", "kv_heads", "head_dim")


@lru_cache(maxsize=1)
def catalogue_shapes() -> dict[tuple, set[tuple[str, int]]]:
    """(class, its shape on one rank) -> the models of the catalogue that have it, and at how many tensor ranks."""
    found: dict[tuple, set[tuple[str, int]]] = defaultdict(set)
    hardware = load_hardware(names("hardware_profiles")[0])  # shapes do not depend on it
    for name in catalog.names():
        for ranks in RANKS:
            placement = Placement(
                catalog.load_model(name), hardware, Precision(weights="bf16"), Parallelism(tensor=ranks)
            )
            try:
                check_modelled(placement)
            except InputError:
                continue  # so many ranks cannot share it
            for operator in forward_pass(placement):
                shape, kind = operator.shape, operator.operator_class
                key: tuple[float, ...]
                if operator.routing:
                    key = (shape["hidden"], shape["inter"], operator.routing.num_experts)
                elif kind == "gemm" and "k" in shape:
                    key = (shape["n"], shape["k"])
                elif "heads" in shape:
                    key = tuple(shape[name] for name in OF_ATTENTION)
                else:
                    continue
                found[kind, *map(float, key)].add((name, ranks))
    return found


def errors_by_shape(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> dict[str, tuple[float, list[str]]]:
    """Shape, in words -> the median of predicted / measured - 1 over its rows, and who has it ("Llama-3-8B on 2"), of
    the shapes that models of the catalogue have on so many ranks. Rows: those that no cache has touched."""
    names = OF_SHAPE.get(rows.operator_class, OF_ATTENTION)
    if not len(rows) or names[0] not in rows.columns:
        return {}
    off = CLASSES[rows.operator_class].predict(shares, hardware, rows) / rows.seconds - 1.0
    shapes, index = np.unique(np.stack([rows.columns[name] for name in names], 1), axis=0, return_inverse=True)
    found = {}
    for i, shape in enumerate(shapes):
        here = index.ravel() == i
        who = catalogue_shapes().get((rows.operator_class, *map(float, shape)))
        if who and here.sum() >= LEAST_ROWS:
            words = " ".join(f"{name} {value:g}" for name, value in zip(names, shape, strict=True))
            found[words] = float(np.median(off[here])), [f"{name} on {ranks}" for name, ranks in sorted(who)]
    return found


def beyond(shares: OperatorEfficiency, hardware: Hardware, rows: Rows) -> str:
    """The shapes that this law misses by more than `MOST`, and whose they are, as text; empty if there are none."""
    return "; ".join(
        f"{shape} {off:+.0%} ({', '.join(who[:2])}{f' and {len(who) - 2} more' if len(who) > 2 else ''})"
        for shape, (off, who) in errors_by_shape(shares, hardware, rows).items()
        if abs(off) > MOST
    )
