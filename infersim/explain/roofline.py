"""The workload's operators on the device's roofline: what each asks for, and what it gets."""

from typing import Any

import numpy as np

from infersim.cost.floors import NO_PREFILL, prefill_sums
from infersim.cost.operator import Sums, evaluate
from infersim.cost.roofline import add_time, peak_flops, rate, zero_split
from infersim.engine.compiled.state import QUERY_TILE
from infersim.metrics.result import Result

from .work import KINDS, Work, works

LEAST_SHARE = 0.003  # of its step's time; smaller operators are left out


def roofline(result: Result) -> dict[str, Any]:
    """`bandwidth` (B/s), `peaks` (dtype -> FLOP/s), and `points`: the operators of two steps, a decode step of the
    run's average batch and context, and one prompt of median length alone; of several kinds of replicas on the one
    that worked most.

    A point is {name, phase, count, intensity (FLOP per byte of memory traffic), flops_per_s, share of its step's time,
    bound}. Operators without FLOPs are left out, and so are collectives, which no roofline of one device bounds.
    """
    work = max(works(result), key=lambda each: each.busy_time)
    hardware = work.placement.hardware
    points: list[dict[str, Any]] = []
    if work.decodes:
        batch = work.decode_batch

        def decode(window: int) -> dict[str, float]:
            keys = batch * work.decode_keys(window) / work.decodes
            sums = {"step": 1.0, "tokens": batch, "sequences": batch, "decodes": batch, "decode_keys": keys}
            return NO_PREFILL | sums

        points += _points(work, decode, "decode")
    prompt = int(np.median(result.requests["prompt_tokens"]))

    def prefill(window: int) -> Sums:
        keys = min(prompt, abs(window) or prompt)
        tiles = {"prefill_keys": keys, "query_tiles": -(-prompt // QUERY_TILE)}
        return {**prefill_sums(prompt)(window), **tiles}

    points += _points(work, prefill, "prefill")
    peaks = {op.rate or op.dtype: peak_flops(hardware, op) for op in work.operators if op.flops}
    return {
        "bandwidth": hardware.memory_bandwidth,
        "peaks": dict(sorted(peaks.items())),
        "points": points,
        "batch": work.decode_batch,
        "prompt": prompt,
    }


def _points(work: Work, sums_of: Any, phase: str) -> list[dict[str, Any]]:
    hardware = work.placement.hardware
    points: list[dict[str, Any]] = []
    total = 0.0
    for operator in work.operators:
        sums = sums_of(operator.window)
        if not sums[operator.per]:
            continue
        split = zero_split()
        add_time(split, operator, rate(hardware, operator), sums)
        sums = operator.routed(sums)
        seconds = float(split.sum())
        total += seconds
        flops = operator.count * float(evaluate(operator.flops, sums))
        moved = operator.count * sum(float(evaluate(getattr(operator, kind), sums)) for kind in KINDS)
        if flops and moved and seconds:
            peak = peak_flops(hardware, operator)
            memory = moved / hardware.memory_bandwidth
            points.append(
                {
                    "name": operator.name,
                    "phase": phase,
                    "count": operator.count,
                    "intensity": flops / moved,
                    "flops_per_s": flops / seconds,
                    "seconds": seconds,
                    "bound": "memory" if memory >= flops / peak else "compute",
                }
            )
    for point in points:
        point["share"] = point["seconds"] / total
    return [point for point in points if point["share"] >= LEAST_SHARE]
