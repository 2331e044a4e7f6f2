"""Public trace formats: a row of column names each. A new format of one request per row is a new row."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..config.errors import InputError


@dataclass(frozen=True)
class TraceFormat:
    """Where a format keeps a request's arrival and lengths, as CSV columns or JSON keys."""

    name: str
    arrival: str
    seconds: float
    """one unit of `arrival`; 0: a date"""
    prompt: str
    output: str
    marker: str | None = None
    """a column that tells this format from another with the same names"""
    block: int = 0
    """tokens per id in `hash_ids`, the last block may be partial; 0: no such column"""
    tick: float = 0.0
    """coarseness of the times in seconds that has to be undone; 0: none"""
    drops_empty: bool = False
    """whether an output of 0 tokens is a request that failed upstream rather than a mistake"""


FORMATS = (
    TraceFormat("plain", "arrival_s", 1, "prompt_tokens", "output_tokens"),
    TraceFormat("azure", "TIMESTAMP", 0, "ContextTokens", "GeneratedTokens"),
    TraceFormat("bailian", "timestamp", 1, "input_length", "output_length", marker="chat_id", block=16),
    TraceFormat("mooncake", "timestamp", 1e-3, "input_length", "output_length", block=512, tick=3.0),
    TraceFormat("burstgpt", "Timestamp", 1, "Request tokens", "Response tokens", tick=1.0, drops_empty=True),
    TraceFormat("vidur", "arrived_at", 1, "num_prefill_tokens", "num_decode_tokens"),
    TraceFormat("llmservingsim", "arrival_time_ns", 1e-9, "input_toks", "output_toks"),
    TraceFormat("aibrix", "timestamp_ms", 1e-3, "prompt_length", "output_length", drops_empty=True),
    TraceFormat("aibrix", "timestamp", 1e-3, "Prompt Length", "Output Length", marker="requests", drops_empty=True),
    TraceFormat("splitwise", "arrival_timestamp", 1, "prompt_size", "token_size"),
)


def recognise(columns: Iterable[str], name: str | None, where: str) -> TraceFormat:
    """The format, `name` if given, whose lengths are among `columns`; times may be absent. InputError if none."""
    columns = set(columns)
    rows = [row for row in FORMATS if name in (None, row.name)]
    if not rows:  # ServeGen describes clients, not requests
        raise InputError(f"{where}: format {name} needs a folder of chunk files or a JSON object with clients")
    for row in rows:
        if {row.prompt, row.output} | {row.marker or row.prompt} <= columns:
            return row
    names = {row: {row.arrival, row.prompt, row.output, row.marker} - {None} for row in rows}
    closest = min(rows, key=lambda row: (len(names[row] - columns), -len(names[row] & columns)))
    needed = [column for column in (closest.prompt, closest.output, closest.marker) if column]
    missing = " and ".join(column for column in needed if column not in columns)
    found = ", ".join(column[:30] for column in sorted(columns)[:10])
    known = ", ".join(sorted({row.name for row in FORMATS} | {"servegen"}))
    if len(columns) == 1 and (other := next((sign for sign in ";\t|" if sign in found), None)):
        raise InputError(f"{where}: one column, {found}; cells must be separated by commas (got {other!r})")
    raise InputError(f"{where}: format {closest.name} needs {missing} (columns found: {found}; formats: {known})")
