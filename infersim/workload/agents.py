"""LLMServingSim's agentic traces: sessions of requests with a tool running between one and the next."""

import numpy as np

from ..config.errors import InputError
from .requests import Requests
from .table import Table

KEYS = ("input_toks", "output_toks")


def agents_of(rows: list[tuple[int, dict]], where: str, own_times: bool) -> Requests:
    """Requests from lines {arrival_time_ns, sub_requests: [{input_toks, output_toks, tool_duration_ns}, ...]}.

    Each is sent when the one before has ended and its tool has run. What prompts have in common the trace does not say.
    """
    flat: dict[str, list] = {name: [] for name in (*KEYS, "tool_duration_ns", "arrival_time_ns")}
    lines, session = [], []
    for number, (line, row) in enumerate(rows):
        subs = row.get("sub_requests")
        if not isinstance(subs, list) or not subs or not all(isinstance(sub, dict) for sub in subs):
            raise InputError(f"{where}: line {line}: sub_requests must be a list of requests, each a mapping")
        for sub in subs:
            for name in KEYS:
                flat[name].append(sub.get(name))
            flat["tool_duration_ns"].append(sub.get("tool_duration_ns", 0))
            flat["arrival_time_ns"].append(row.get("arrival_time_ns"))
            lines.append(line)
            session.append(number)
    table = Table(where, flat, lines)
    problems: list[str] = []
    prompt, output = (table.tokens(name, 1, problems) for name in KEYS)
    tool = table.numbers("tool_duration_ns", problems)
    arrival = table.seconds("arrival_time_ns", 1e-9, problems) if own_times else np.zeros(len(lines))
    if problems:
        raise InputError(problems)
    if (tool < 0).any():
        raise InputError(table.error(int(np.argmax(tool < 0)), "tool_duration_ns must not be negative"))
    sessions = np.array(session)
    follows = np.concatenate(([False], sessions[1:] == sessions[:-1]))
    n = np.arange(len(lines))
    return Requests(
        arrival,
        prompt.astype(np.int32),
        output.astype(np.int32),
        n,
        session=sessions,
        after=np.where(follows, n - 1, -1),
        delay=np.where(follows, np.concatenate(([0.0], tool[:-1])) * 1e-9, 0.0),
    )
