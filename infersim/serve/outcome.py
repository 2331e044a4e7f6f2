"""What happened while the endpoint was up: the run's result, and the traffic as a trace."""

import json
from pathlib import Path
from typing import IO, Any

import numpy as np

from infersim.cluster.pool import seconds_available
from infersim.cluster.serve import Served
from infersim.engine.compiled.state import ABORTED, COMPLETED, LOST, TIMED_OUT
from infersim.files import replace_file
from infersim.metrics.result import Result
from infersim.outcome import result_of
from infersim.workload.requests import Requests

from .live import Live
from .text import SEGMENT

PIECE = 4096  # requests whose text is read at one time


def traffic(live: Live, text: bool = True) -> tuple[np.ndarray, Requests]:
    """Rows of the fleet that were sent to be answered, and the same as requests, with their text if that is asked for:
    of one whose client went away, what it had generated."""
    fleet = live.fleet
    rows = np.flatnonzero((fleet.requests["replica"] >= 0) & (fleet.requests["hold"] == 0))
    came = live.notes["came"][rows]
    arrival = np.where(np.isnan(came), fleet.requests["arrival"][rows], came)
    order = np.argsort(arrival, kind="stable")
    rows, arrival = rows[order], arrival[order]
    records = fleet.requests[rows]
    cut = (records["status"] == ABORTED) & ~np.isin(rows, live.roster.lost)
    outputs = np.where(cut, np.maximum(records["num_output_tokens"], 1), records["stop_tokens"])
    offsets, names, lengths = texts(live, rows) if text else (None, None, None)
    return rows, Requests(
        arrival,
        records["prompt_tokens"].copy(),
        outputs.astype("i4"),
        np.arange(len(rows)),
        segment_offsets=offsets,
        segment_ids=names,
        segment_lengths=lengths,
    )


def texts(live: Live, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the prompts of some rows are made of: where each begins and the last ends, names and lengths of segments."""
    counts = live.fleet.requests["num_segments"][rows].astype("i8")
    offsets = np.concatenate(([0], np.cumsum(counts)))
    first = live.fleet.requests["first_segment"][rows]
    segments = live.fleet.segments[np.repeat(first - offsets[:-1], counts) + np.arange(offsets[-1])]
    return offsets, segments["name"].copy(), segments["length"].copy()


def result(live: Live) -> Result | None:
    """The run so far, None if nothing came: as `infersim run` has it, with every client that left counted as timed
    out and every request that a crash took as lost."""
    end = live.now()
    rows, requests = traffic(live, text=False)
    if not len(rows):
        return None
    records = live.fleet.requests[rows]
    records["arrival"] = requests.arrival
    for i, row in enumerate(rows.tolist() if live.hand_over else ()):
        if (source := int(live.notes["source"][row])) >= 0:
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
    served = Served(records, rows, seconds_available(live.roster.pools, k, end), end, route, 0, unfinished)
    return result_of(live.scenario, live.kinds, live.specs, live.fleet, served, requests, live.scenario.simulation.seed)


def write_trace(live: Live, path: Path) -> int:
    """The traffic so far in Bailian's format (JSON lines), which `workload.trace` reads; returns its requests."""
    rows, requests = traffic(live, text=False)

    def write(file: IO[bytes]) -> None:
        for first in range(0, len(rows), PIECE):
            piece = slice(first, first + PIECE)
            offsets, names, _ = (column.tolist() for column in texts(live, rows[piece]))
            columns = (requests.arrival, requests.prompt_tokens, requests.output_tokens)
            for i, (arrival, prompt, output) in enumerate(zip(*(c[piece].tolist() for c in columns), strict=True)):
                row = {"chat_id": first + i, "timestamp": arrival, "input_length": prompt, "output_length": output}
                row["hash_ids"] = names[offsets[i] : offsets[i + 1]]
                file.write(json.dumps(row).encode() + b"\n")

    replace_file(path, write, "--record")
    return len(rows)


assert SEGMENT == 16  # tokens of one of Bailian's blocks
