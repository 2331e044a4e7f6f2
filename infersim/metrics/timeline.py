"""A run over time, from its records."""

import heapq
from typing import Any

import numpy as np

from .result import Result

POINTS = 240


def timeline(result: Result, points: int = POINTS) -> dict[str, Any]:
    """Columns f8[points] at equal distances over the run: `time` (s, the middle of each interval), the mean of
    `waiting` and `running` requests in it (a preempted one counts as running), `arrivals`, `completions` and
    `output_tokens` per second, `kv_usage`, `replicas` that hold a request, and `preempted`, requests per second that
    were preempted later, by when they were first scheduled.

    kv_usage is the share of the KV cache that the running requests' tokens take, each growing evenly while it decodes;
    None if a window frees blocks, since the records do not know them.
    """
    r = result.requests
    sent = np.where(r["sent"] >= 0, r["sent"], np.inf)
    rejected = (r["scheduled"] < 0) & (r["reason"] > 0)
    sent = np.where(rejected, np.inf, sent)
    scheduled = np.where(r["scheduled"] >= 0, r["scheduled"], np.inf)
    last = np.where(result.completed, r["last_token"], np.inf)
    begin, end = float(r["arrival"].min()), result.end_time
    if end <= begin:  # nothing was answered
        end = max(float(r["arrival"].max()), begin + 1e-9)
    edges = np.linspace(begin, end, points + 1)
    width = edges[1] - edges[0]
    lines: dict[str, Any] = {
        "time": (edges[1:] + edges[:-1]) / 2,
        "waiting": _mean_inside(sent, scheduled, edges),
        "running": _mean_inside(scheduled, last, edges),
        "arrivals": _per_second(r["arrival"], edges),
        "completions": _per_second(last[np.isfinite(last)], edges),
        "preempted": _per_second(scheduled[(r["num_preemptions"] > 0) & np.isfinite(scheduled)], edges),
        "output_tokens": np.diff(_tokens_until(r, last, edges)) / width,
        "kv_usage": None,
        "replicas": _mean_inside(*_at_work(result.replicas.visits), edges),
    }
    if not any(group.window for group in result.memory.kv_groups):
        memory = result.memory
        room = (memory.num_gpu_blocks - 1) * memory.block_size * max(1, len(np.unique(r["replica"])))
        lines["kv_usage"] = _kv_tokens(r, scheduled, last, lines["time"]) / room
    return lines


def _at_work(visits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f8[m], f8[m]: since when, and until when, a replica held requests without a break; of all replicas."""
    visits = visits[(visits["scheduled"] >= 0) & (visits["last_token"] >= visits["scheduled"])]
    visits = visits[np.lexsort((visits["scheduled"], visits["replica"]))]
    apart = float(visits["last_token"].max(initial=0.0)) + 1.0
    shift = visits["replica"] * apart  # each replica in a stretch of its own
    start, end = visits["scheduled"] + shift, np.maximum.accumulate(visits["last_token"] + shift)
    breaks = np.flatnonzero(start[1:] > end[:-1]) + 1
    first, last = np.append(0, breaks)[: len(start)], np.append(breaks, len(start))[: len(start)] - 1
    return (start - shift)[first], (end - shift)[last]


def _mean_inside(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean number of intervals [start, end) that hold a moment, between each two edges."""
    return np.diff(_integral(start, edges) - _integral(end, edges)) / np.diff(edges)


def _integral(moments: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The sum of max(0, t - moment) over the moments, at each time."""
    moments = np.sort(moments[np.isfinite(moments)])
    before = np.searchsorted(moments, times, side="right")
    return before * times - np.concatenate([[0.0], np.cumsum(moments)])[before]


def _per_second(moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(moments, edges)[0] / (edges[1] - edges[0])


def ramps(start: np.ndarray, end: np.ndarray, amount: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The sum at each time of ramps that rise evenly from 0 at `start` to `amount` at `end`, and stay there."""
    known = np.isfinite(start) & np.isfinite(end)
    start, length = start[known], np.maximum(end[known] - start[known], 1e-9)
    slope = amount[known] / length
    return _weighted(start, slope, times) - _weighted(start + length, slope, times)


def _weighted(moments: np.ndarray, weights: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The sum of weight * max(0, t - moment), at each time."""
    order = np.argsort(moments)
    moments, weights = moments[order], weights[order]
    before = np.searchsorted(moments, times, side="right")
    slope = np.concatenate([[0.0], np.cumsum(weights)])[before]
    return slope * times - np.concatenate([[0.0], np.cumsum(weights * moments)])[before]


def _tokens_until(r: np.ndarray, last: np.ndarray, times: np.ndarray) -> np.ndarray:
    first = np.where(r["first_token"] >= 0, r["first_token"], np.inf)
    return ramps(first, last, r["num_output_tokens"].astype("f8"), times)


def _kv_tokens(r: np.ndarray, scheduled: np.ndarray, last: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Tokens held at each time: the prompt from being scheduled on, evenly until the first token, then each output
    token; all of them until the last."""
    first = np.where(r["first_token"] >= 0, r["first_token"], np.inf)
    prompt, output = r["prompt_tokens"].astype("f8"), r["num_output_tokens"].astype("f8")
    held = ramps(scheduled, first, prompt, times) + ramps(first, last, output, times)
    done = np.isfinite(last)
    order = np.argsort(last[done])
    freed = np.concatenate([[0.0], np.cumsum((prompt + output)[done][order])])
    return np.maximum(held - freed[np.searchsorted(last[done][order], times, side="right")], 0.0)


def request_bars(result: Result, most: int = 1000) -> dict[str, list]:
    """The first `most` requests as bars beside and below one another: `lane` (the lowest that is free when it is sent),
    `sent`, `scheduled`, `first_token`, `last_token` (s; None if it never came so far), `num_preemptions`,
    `prompt_tokens`, `num_output_tokens`, `id`."""
    r = result.requests
    order = np.flatnonzero(r["sent"] >= 0)
    order = order[np.argsort(r["sent"][order], kind="stable")][:most]
    r = r[order]
    ends = np.where(r["last_token"] >= 0, r["last_token"], np.maximum(r["scheduled"], r["sent"]))
    lanes: list[int] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for sent, end in zip(r["sent"].tolist(), ends.tolist(), strict=True):
        while busy and busy[0][0] <= sent:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        lanes.append(lane)
        heapq.heappush(busy, (end, lane))
    columns: dict[str, list] = {"lane": lanes, "id": result.request_ids[order].tolist()}
    for name in ("sent", "scheduled", "first_token", "last_token"):
        columns[name] = [moment if moment >= 0 else None for moment in r[name].tolist()]
    for name in ("num_preemptions", "prompt_tokens", "num_output_tokens"):
        columns[name] = r[name].tolist()
    return columns
