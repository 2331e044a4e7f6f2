"""A trace file of one request per row becomes Requests."""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ..config.errors import InputError
from ..config.units import short
from .formats import TraceFormat, recognise
from .requests import Requests
from .table import Table


def requests_of(table: Table, name: str | None, own_times: bool, model_column: str | None = None) -> Requests:
    """Requests from a table whose format is recognised, or `name`; model_column says which model each asks for.

    Without `own_times` nothing is read of the times and every arrival is 0. Time 0 is the first row. InputError with a
    line for each kind of problem.
    """
    form = recognise(table.columns, name, table.where)
    if not table.lines:
        raise InputError(f"{table.where}: only a header; a trace has at least one request")
    problems: list[str] = []
    prompt = table.tokens(form.prompt, 1, problems)
    output = table.tokens(form.output, 0 if form.drops_empty else 1, problems)
    arrival = np.zeros(len(prompt))
    if own_times and form.arrival not in table.columns:
        problems.append(f"{table.where}: no arrival times (column {form.arrival}); add request_rate to the workload")
    elif own_times:
        arrival = table.seconds(form.arrival, form.seconds, problems)
    blocks = table.columns.get("hash_ids") if form.block else None
    segments = _segments(table, blocks, prompt, form.block, problems) if blocks and not problems else {}
    models = _models(table, model_column, problems) if model_column else {}
    if problems:
        raise InputError(problems)

    notes = []
    if own_times and form.tick:
        spread = spread_ticks(arrival, form.tick)
        if not np.array_equal(spread, arrival):
            notes.append(f"the trace's times stand in ticks of {form.tick:g} s: requests are spread inside each")
            arrival = spread
    requests = Requests(
        arrival,
        prompt.astype(np.int32),
        output.astype(np.int32),
        np.arange(len(prompt)),
        **segments,
        **models,
        notes=tuple(notes),
    )
    return _without_empty(requests, form, table) if not output.all() else requests


def spread_ticks(arrival: np.ndarray, tick: float) -> np.ndarray:
    """Requests with one time spread evenly until the next time, or `tick` seconds if that is sooner.

    Fired together they are bursts that nobody sent. Times that are closer than a tick are not coarse: they stay.
    """
    times, first, counts = np.unique(arrival, return_index=True, return_counts=True)
    steps = np.diff(times)
    if len(steps) and steps.min() < 0.99 * tick:  # a tick's clock jitters by milliseconds
        return arrival
    room = np.minimum(np.append(steps, tick), tick)
    share = (np.arange(len(arrival)) - np.repeat(first, counts)) / np.repeat(counts, counts)
    return arrival + np.repeat(room, counts) * share


def _models(table: Table, column: str, problems: list[str]) -> dict[str, Any]:
    """The names in a column, and which of them each request has."""
    if column not in table.columns:
        found = ", ".join(list(table.columns)[:10])
        problems.append(f"{table.where}: no column {short(column)} (workload.model_column; columns found: {found})")
        return {}
    names, which = np.unique(list(map(str, table.columns[column])), return_inverse=True)
    return {"model": which.astype("i4"), "models": tuple(names.tolist())}


def _segments(table: Table, blocks: list, prompt: np.ndarray, block: int, problems: list[str]) -> dict[str, Any]:
    """One segment of `block` tokens per id, the last as long as the prompt goes."""
    try:
        counts = np.array(list(map(len, blocks)))
        ids = np.fromiter(chain.from_iterable(blocks), np.int64, counts.sum())
    except (TypeError, ValueError, OverflowError):
        row = next(row for row, ids in enumerate(blocks) if not _is_ids(ids))
        problems.append(table.error(row, "hash_ids must be a list of whole numbers"))
        return {}
    last = prompt - (counts - 1) * block
    wrong = np.flatnonzero((last < 1) & (counts > 0))
    if len(wrong):
        row = wrong[0]
        message = f"hash_ids has {counts[row]} blocks of {block} tokens, more than {prompt[row]:.0f} tokens fill"
        problems.append(table.error(row, message, len(wrong)))
        return {}
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lengths = np.full(len(ids), block, np.int32)
    lengths[offsets[1:][counts > 0] - 1] = np.minimum(last, block)[counts > 0]
    return {"segment_offsets": offsets, "segment_ids": ids, "segment_lengths": lengths}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and abs(one) < 2**63 for one in value)


def _without_empty(requests: Requests, form: TraceFormat, table: Table) -> Requests:
    kept = requests.output_tokens > 0
    if not kept.any():
        raise InputError(f"{table.where}: every {form.output} is 0; a trace has at least one request that succeeded")
    note = f"{np.sum(~kept)} of the trace's {len(kept)} requests generated nothing (they failed) and are left out"
    left = requests.keep(kept)
    return replace(left, notes=(*left.notes, note))
