"""A run as Chrome trace events, which Perfetto and chrome://tracing open."""

from pathlib import Path
from typing import Any

import numpy as np

from infersim.files import replace_text
from infersim.metrics.result import Result
from infersim.metrics.timeline import timeline

SAMPLED = 200  # requests with a track of their own
REPLICAS, COUNTERS, REQUESTS, STEPS = 1, 2, 3, 4  # the trace's "processes"


def chrome_trace(result: Result, steps: dict[str, Any]) -> dict[str, Any]:
    """`traceEvents` in us: counters over time, a track per replica (busy by its requests), one per sampled request, and
    a slice for each of planning.steps' steps.

    Every n-th request is sampled, 200 at most; the names of the processes, and `otherData`, say what there is of all.
    """
    r = result.requests
    came = np.flatnonzero(r["scheduled"] >= 0)
    every = max(1, -(-len(came) // SAMPLED))
    number = steps["replica"]
    said = {
        REPLICAS: "replicas",
        COUNTERS: "counters",
        REQUESTS: f"requests: {len(came[::every]):,} of {len(came):,}" + f", one in {every}" * (every > 1),
        STEPS: f"steps: the busiest {steps['seconds']:g} s of replica {number}"
        if steps["steps"]
        else "no steps: they are not known where replicas interact while they run",
    }
    events: list[dict[str, Any]] = []
    for pid, name in said.items():
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    if steps["steps"]:
        titled = {"name": f"replica {number}"}
        events.append({"ph": "M", "pid": STEPS, "tid": number, "name": "thread_name", "args": titled})
    for step in steps["steps"]:
        args = {"tokens": step["tokens"], "prompts": [row[0] for row in step["prompts"]],
                "decodes": len(step["decodes"]),
                "preempted": step["preempted"], "waiting": step["waiting"], "KV blocks": step["blocks"]}  # fmt: skip
        kind = "mixed" if step["prompts"] and step["decodes"] else "prefill" if step["prompts"] else "decode"
        events.append(
            _span(STEPS, number, f"{kind} step", step["end"] - step["ms"] / 1e3, step["end"]) | {"args": args}
        )
    lines = timeline(result)
    for name in ("running", "waiting", "kv_usage"):
        if lines[name] is not None:
            for t, value in zip(lines["time"].tolist(), lines[name].tolist(), strict=True):
                events.append(
                    {"ph": "C", "pid": COUNTERS, "name": name, "ts": t * 1e6, "args": {name: round(value, 4)}}
                )
    for replica in np.unique(r["replica"][came]).tolist():
        mine = came[r["replica"][came] == replica]
        events.append(
            {"ph": "M", "pid": REPLICAS, "tid": replica, "name": "thread_name", "args": {"name": f"replica {replica}"}}
        )
        for start, end in _busy(r["scheduled"][mine], np.maximum(r["last_token"][mine], r["scheduled"][mine])):
            events.append(_span(REPLICAS, replica, "has running requests", start, end))
    for track, i in enumerate(came[::every].tolist()):
        row = r[i]
        name = f"request {int(result.request_ids[i])}"
        events.append({"ph": "M", "pid": REQUESTS, "tid": track, "name": "thread_name", "args": {"name": name}})
        args = {
            "prompt_tokens": int(row["prompt_tokens"]),
            "output_tokens": int(row["num_output_tokens"]),
            "replica": int(row["replica"]),
            "preemptions": int(row["num_preemptions"]),
        }
        args |= {name: column[i].item() for name, column in result.route_columns.items() if not np.isnan(column[i])}
        for phase, start, end in _phases(row, args):
            if 0 <= start < end:
                events.append(_span(REQUESTS, track, phase, start, end) | {"args": args})
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"contains": list(said.values())}}


def _phases(row: np.void, route: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What a request went through, from its being sent to its last token: (what, start, end) in s."""
    sent, scheduled, first, last = (float(row[x]) for x in ("sent", "scheduled", "first_token", "last_token"))
    encoded = sent + route.get("encode_ms", 0.0) / 1e3
    phases = [("encode", sent, encoded), ("waiting", encoded, scheduled)]
    if {"prefilled_s", "transfer_ms"} <= route.keys() and route["prefill_replica"] >= 0:
        room = route["prefilled_s"] + route["wait_for_room_ms"] / 1e3
        there = room + route["transfer_ms"] / 1e3
        phases += [("prefill", scheduled, route["prefilled_s"]), ("waiting for room", route["prefilled_s"], room)]
        phases += [("transfer", room, there), ("first token", there, first)]
    else:
        phases.append(("prefill", scheduled, first))
    return [*phases, ("decode", first, last)]


def _span(pid: int, tid: int, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}


def _busy(start: np.ndarray, end: np.ndarray) -> list[tuple[float, float]]:
    """The union of the intervals, as disjoint ones in order."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    breaks = np.flatnonzero(start[1:] > end[:-1]) + 1
    return [(float(start[i]), float(end[j - 1])) for i, j in zip([0, *breaks], [*breaks, len(start)], strict=True)]


def write_chrome_trace(path: Path, result: Result, steps: dict[str, Any]) -> None:
    """Writes the events as JSON."""
    import json

    text = json.dumps(chrome_trace(result, steps), separators=(",", ":"))
    replace_text(path, text, "--chrome-trace")
