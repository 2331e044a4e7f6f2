"""LLMServingSim's agentic traces: sessions of requests with a tool running between one and the next."""

from typing import Any

import numpy as np

from ..config.errors import InputError
from .requests import Requests
from .table import Table

KEYS = ("input_toks", "output_toks")


class _Graph:
    """The requests of a trace in the order in which they stand, and the edges between them."""

    def __init__(self, where: str):
        self.where = where
        self.cells: dict[str, list] = {name: [] for name in (*KEYS, "tool_duration_ns", "arrival_time_ns")}
        self.lines: list[int] = []
        self.session: list[int] = []
        self.edges: list[tuple[int, int]] = []
        """(who waits, for whom)"""

    def add(self, items: Any, ends: list[int], row: dict, line: int, session: int) -> list[int]:
        """Items one after another, behind the rows `ends`; returns the rows at their end."""
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            raise InputError(f"{self.where}: line {line}: sub_requests must be a list of requests, each a mapping")
        for item in items:
            if "branches" in item:
                if not isinstance(item["branches"], list) or not item["branches"] or len(item) > 1:
                    raise InputError(
                        f"{self.where}: line {line}: branches must be a list of lists of requests, and stand alone"
                    )
                ends = [end for branch in item["branches"] for end in self.add(branch, ends, row, line, session)]
                continue
            number = len(self.lines)
            self.edges += [(number, end) for end in ends]
            for name in KEYS:
                self.cells[name].append(item.get(name))
            self.cells["tool_duration_ns"].append(item.get("tool_duration_ns", 0))
            self.cells["arrival_time_ns"].append(row.get("arrival_time_ns"))
            self.lines.append(line)
            self.session.append(session)
            ends = [number]
        return ends


def agents_of(rows: list[tuple[int, dict]], where: str, own_times: bool) -> Requests:
    """Requests from lines {arrival_time_ns, sub_requests: [{input_toks, output_toks, tool_duration_ns}, ...]}.

    Each is sent when the one before has ended and its tool has run. Instead of a request {branches: [[...], ...]} may
    stand, lists of requests that run side by side (our addition to the format): what follows waits for all of them and
    their tools. What prompts have in common the trace does not say.
    """
    graph = _Graph(where)
    for number, (line, row) in enumerate(rows):
        graph.add(row.get("sub_requests"), [], row, line, number)
    lines = graph.lines
    table = Table(where, graph.cells, lines)
    problems: list[str] = []
    prompt, output = (table.tokens(name, 1, problems) for name in KEYS)
    tool = table.numbers("tool_duration_ns", problems)
    arrival = table.seconds("arrival_time_ns", 1e-9, problems) if own_times else np.zeros(len(lines))
    if problems:
        raise InputError(problems)
    if (tool < 0).any():
        raise InputError(table.error(int(np.argmax(tool < 0)), "tool_duration_ns must not be negative"))
    after, delay = np.full(len(lines), -1), np.zeros(len(lines))
    waiter, waited = np.array(graph.edges, "i8").reshape(-1, 2).T
    first = np.unique(waiter, return_index=True)[1]
    after[waiter[first]], delay[waiter[first]] = waited[first], tool[waited[first]] * 1e-9
    others = np.setdiff1d(np.arange(len(waiter)), first)
    return Requests(
        arrival,
        prompt.astype(np.int32),
        output.astype(np.int32),
        np.arange(len(lines)),
        session=np.array(graph.session),
        after=after,
        delay=delay,
        join_rows=waiter[others],
        join_after=waited[others],
        join_delay=tool[waited[others]] * 1e-9,
    )
