"""Requests that wait for one another: conversations of several turns, users who think, agents whose tools take time."""

from dataclasses import replace

import numpy as np

from ..config.workload import Workload
from .arrivals import draw_arrivals
from .draws import generator
from .lengths import draw_lengths
from .requests import Requests, own_text
from .sub_agents import draw_sub_agents, with_sub_agents


def draw_sessions(workload: Workload, n: int, seed: int) -> Requests:
    """n requests in sessions of `turns`; every prompt is what the session said so far and new text of `input_tokens`.

    Sessions arrive by the arrival rule, or are held by `users` one after another. A later turn's `arrival` is its
    session's; it is sent `delay` after the turn before has ended, and the sub-agents that this one started.
    """
    assert workload.input_tokens is not None and workload.output_tokens is not None
    turns = draw_lengths(workload.turns, n, generator(seed, "turns"))
    first = np.cumsum(turns) - turns  # row of each session's first turn
    first = first[first < n]
    counts = np.diff(np.append(first, n))
    session = np.repeat(np.arange(len(first)), counts)
    turn = np.arange(n) - first[session]
    new = draw_lengths(workload.input_tokens, n, generator(seed, "input_tokens")).astype("i8")
    output = draw_lengths(workload.output_tokens, n, generator(seed, "output_tokens"))
    agents = None
    if workload.sub_agents:  # whose answers the next turn reads
        agents = draw_sub_agents(workload.sub_agents, turn + 1 < turns[session], seed)
        new[1:] += agents.answers(n)[:-1]
    said = np.cumsum(new + output)  # by all sessions up to and with this turn
    before = said - new - output
    prompt = before - before[first][session] + new
    after = np.where(turn > 0, np.arange(n) - 1, -1)
    delay = generator(seed, "think_time").exponential(1.0, n) * workload.think_time
    if workload.users:
        opening = first[workload.users :]  # a session that its user begins after another
        after[opening] = (np.append(first[1:], n) - 1)[: len(opening)]
        started = np.sort(delay[first[: workload.users]])
        arrival = np.append(started, np.full(len(opening), started[-1]))[session]
    else:
        arrival = draw_arrivals(workload, len(first), seed)[session]
    requests = Requests(
        arrival,
        np.minimum(prompt, np.iinfo(np.int32).max).astype(np.int32),
        output,
        np.arange(n),
        session=session,
        after=after,
        delay=np.where(after >= 0, delay, 0.0),
    )
    requests = replace(  # of turn t the t turns before it, each with its question and answer, are segments
        requests,
        segment_offsets=np.append(first[session], n),
        segment_ids=own_text(np.arange(n)),
        segment_lengths=(new + output).astype("i4"),
        segment_counts=turn,
    )
    if agents is None or workload.sub_agents is None:
        return requests
    return with_sub_agents(requests, agents, workload.sub_agents.inherits, n)
