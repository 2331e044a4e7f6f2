"""What happened while the endpoint was up: the run's result, and the traffic as a trace."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from infersim.cluster.serve import Served
from infersim.engine.compiled.state import ABORTED, COMPLETED, LOST, TIMED_OUT
from infersim.files import replace_file
from infersim.metrics.result import Result
from infersim.run import result_of
from infersim.workload.requests import Requests

from .live import Live
from .text import SEGMENT


def traffic(live: Live) -> tuple[np.ndarray, Requests]:
    """Rows of the fleet that were sent to be answered, and the same as requests: of one whose client went away, what it
    had generated."""
    fleet = live.fleet
    rows = np.flatnonzero((fleet.requests["replica"] >= 0) & (fleet.requests["hold"] == 0))
    came = zip(rows.tolist(), fleet.requests["arrival"][rows].tolist(), strict=True)
    arrival = np.array([live.came.get(row, at) for row, at in came])
    order = np.argsort(arrival, kind="stable")
    rows, arrival = rows[order], arrival[order]
    records = fleet.requests[rows]
    counts = records["num_segments"].astype("i8")
    offsets = np.concatenate(([0], np.cumsum(counts)))
    take = np.repeat(records["first_segment"] - offsets[:-1], counts) + np.arange(offsets[-1])
    segments = fleet.segments[take]
    cut = (records["status"] == ABORTED) & ~np.isin(rows, live.roster.lost)
    outputs = np.where(cut, np.maximum(records["num_output_tokens"], 1), records["stop_tokens"])
    return rows, Requests(
        arrival,
        records["prompt_tokens"].copy(),
        outputs.astype("i4"),
        np.arange(len(rows)),
        segment_offsets=offsets,
        segment_ids=segments["name"].copy(),
        segment_lengths=segments["length"].copy(),
    )


def result(live: Live) -> Result | None:
    """The run so far, None if nothing came: as `infersim run` has it, with every client that left counted as timed
    out and every request that a crash took as lost."""
    end = live.now()
    rows, requests = traffic(live)
    if not len(rows):
        return None
    records = live.fleet.requests[rows]
    records["arrival"] = requests.arrival
    for i, row in enumerate(rows.tolist() if live.hand_over else ()):
        if (source := live.hand_over.source.get(row)) is not None:  # type: ignore[union-attr]
            for name in ("scheduled", "num_cached_tokens"):
                records[name][i] = live.fleet.requests[name][source]
            records["sent"][i] = requests.arrival[i]
    ended = records["status"] == ABORTED
    lost = np.isin(rows, live.roster.lost)
    records["status"][ended] = np.where(lost[ended], LOST, TIMED_OUT)
    k = len(live.fleet.replicas)
    route: dict[str, Any] = {"policy": live.scenario.cluster.router.policy if k > 1 else None}
    if live.roster.scalers:
        route["autoscalers"] = [scaler.figures() for scaler in live.roster.scalers]
    unfinished = bool((records["status"] < COMPLETED).any())
    served = Served(records, rows, live.roster.seconds_available(end), end, route, 0, unfinished)
    return result_of(live.scenario, live.kinds, live.specs, live.fleet, served, requests, live.scenario.simulation.seed)


def write_trace(live: Live, path: Path) -> int:
    """The traffic so far in Bailian's format (JSON lines), which `workload.trace` reads; returns its requests."""
    _, requests = traffic(live)
    offsets = requests.segment_offsets.tolist()  # type: ignore[union-attr]
    names = requests.segment_ids.tolist()  # type: ignore[union-attr]
    columns = [c.tolist() for c in (requests.arrival, requests.prompt_tokens, requests.output_tokens)]
    lines = []
    for i, (arrival, prompt, output) in enumerate(zip(*columns, strict=True)):
        row = {"chat_id": i, "timestamp": arrival, "input_length": prompt, "output_length": output}
        lines.append(json.dumps(row | {"hash_ids": names[offsets[i] : offsets[i + 1]]}))
    text = "\n".join(lines) + "\n"
    replace_file(path, lambda file: file.write(text.encode()), "--record")
    return len(lines)


assert SEGMENT == 16  # tokens of one of Bailian's blocks
