"""Fan-out and join: conversations of their own that turns of a session start side by side, and for which it waits."""

from dataclasses import dataclass

import numpy as np

from ..config.workload import SubAgents
from .draws import generator
from .lengths import draw_lengths
from .requests import Requests, own_text


@dataclass(frozen=True)
class Delegated:
    """The requests of all sub-agents, one agent's after another's, agents in the order of the turns that start them."""

    turn: np.ndarray
    """i8[a]: the session's turn, a row, that starts each agent"""
    first: np.ndarray
    """i8[a]: its first request"""
    last: np.ndarray
    """i8[a]"""
    agent: np.ndarray
    """i8[r]: of each request"""
    new: np.ndarray
    """i8[r]: tokens of each prompt that were not said before"""
    output: np.ndarray
    """i4[r]"""
    delay: np.ndarray
    """f8[r], s: behind the request before"""

    def answers(self, turns: int) -> np.ndarray:
        """i8[turns]: tokens that the turn behind each reads: the last answer of every agent that it started."""
        return np.bincount(self.turn, self.output[self.last], turns).astype("i8")


def draw_sub_agents(spec: SubAgents, delegates: np.ndarray, seed: int) -> Delegated:
    """Those of a session's turns, bool[n]; no more than n requests are complete, since no more are asked for."""
    n = len(delegates)
    count = draw_lengths(spec.count, n, generator(seed, "sub_agents"))
    chosen = delegates & (generator(seed, "sub_agents", "share").random(n) < spec.share)
    count = np.where(chosen & (np.cumsum(chosen * count.astype("i8")) - count < n), np.minimum(count, n), 0)
    turn = np.repeat(np.arange(n), count)
    turns = np.minimum(draw_lengths(spec.turns, len(turn), generator(seed, "sub_agents", "turns")), n).astype("i8")
    first = np.cumsum(turns) - turns
    whole = first < n
    turn, turns, first = turn[whole], turns[whole], first[whole]
    agent = np.repeat(np.arange(len(turn)), turns)
    new, output = (draw_lengths(length, len(agent), generator(seed, "sub_agents", name)) for name, length in
                   (("input_tokens", spec.input_tokens), ("output_tokens", spec.output_tokens)))  # fmt: skip
    delay = generator(seed, "sub_agents", "think_time").exponential(1.0, len(agent)) * spec.think_time
    delay[first] = 0.0
    return Delegated(turn, first, first + turns - 1, agent, new.astype("i8"), output, delay)


def with_sub_agents(sessions: Requests, agents: Delegated, inherits: bool, n: int) -> Requests:
    """The first n requests of sessions whose turns start these agents: each turn's stand behind it.

    The turn behind waits for the last request of each. inherits: an agent's prompts begin with its session's.
    """
    mine, rows = len(sessions), len(agents.agent)
    starter = agents.turn[agents.agent]  # of each agent's request, the row of the turn
    place = np.arange(mine) + np.searchsorted(starter, np.arange(mine))
    theirs = np.arange(rows) + starter + 1
    order = np.empty(mine + rows, "i8")
    order[place], order[theirs] = np.arange(mine), np.arange(mine, mine + rows)

    def merged(own: np.ndarray, others: np.ndarray) -> np.ndarray:
        return np.concatenate((own, others.astype(own.dtype)))[order]

    assert sessions.after is not None and sessions.session is not None and sessions.delay is not None  # drawn with them
    assert sessions.segment_offsets is not None and sessions.segment_lengths is not None
    assert sessions.segment_counts is not None
    said, turn = agents.new + agents.output, np.arange(rows) - agents.first[agents.agent]
    before = np.cumsum(said) - said
    prompt = before - before[agents.first][agents.agent] + agents.new
    begins, ids, lengths = sessions.segment_offsets[:-1], own_text(place), sessions.segment_lengths
    own_ids, own_lengths = own_text(theirs), said.astype("i4")
    heads = np.zeros(rows, "i8")  # segments of the session in front of an agent's own
    chains = mine + agents.first
    if inherits:
        prompt += (sessions.prompt_tokens.astype("i8") + sessions.output_tokens)[starter]
        head = sessions.segment_counts[agents.turn] + 1
        shift = np.cumsum(head)
        copied = np.arange(shift[-1] if len(shift) else 0) + np.repeat(begins[agents.turn] - shift + head, head)
        at = np.repeat(agents.first, head)
        own_ids, own_lengths = np.insert(own_ids, at, ids[copied]), np.insert(own_lengths, at, lengths[copied])
        heads, chains = head[agents.agent], chains + shift - head
    after = np.where(sessions.after >= 0, place[sessions.after], -1)
    opening = np.unique(agents.turn, return_index=True)  # turns that start agents, and the first agent of each
    waits = opening[0] + 1 < mine
    after[opening[0][waits] + 1] = theirs[agents.last[opening[1][waits]]]
    others = np.setdiff1d(np.flatnonzero(agents.turn + 1 < mine), opening[1])
    graph = Requests(
        merged(sessions.arrival, sessions.arrival[starter]),
        merged(sessions.prompt_tokens, np.minimum(prompt, np.iinfo(np.int32).max)),
        merged(sessions.output_tokens, agents.output),
        np.arange(mine + rows),
        segment_offsets=np.append(merged(begins, chains[agents.agent]), mine + len(own_ids)),
        segment_ids=np.concatenate((ids, own_ids)),
        segment_lengths=np.concatenate((lengths, own_lengths)),
        segment_counts=merged(sessions.segment_counts, heads + turn),
        session=merged(sessions.session, sessions.session[starter]),
        after=merged(after, np.where(turn > 0, theirs - 1, place[starter])),
        delay=merged(sessions.delay, agents.delay),
        join_rows=place[agents.turn[others] + 1],
        join_after=theirs[agents.last[others]],
        join_delay=sessions.delay[agents.turn[others] + 1],
    )
    return graph.keep(np.arange(mine + rows) < n)
