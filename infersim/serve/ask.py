"""What clients ask of the engine, and what has become of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from infersim.config.scenario import Scenario
from infersim.workload.draws import generator
from infersim.workload.lengths import draw_lengths

CHUNK = 4096  # draws made at a time

Push = Callable[[int, float, str | None], None]
"""n new tokens, due at a simulated time (s); "length" or "stop" with the last ones, "abort" if lost, else None"""
Text = tuple[Sequence[int], Sequence[int]]
"""names and lengths of the segments that a prompt is made of"""
Ids = Callable[[int, int], list[int]]
"""token ids from one position to before another, prompt and output"""


NOTE = np.dtype(
    [
        ("last", "f8"),  # when the tokens before were due
        ("asked", "f8"),  # when it came to its replica
        ("came", "f8"),  # when its request came, if the front door held it back, else NaN
        ("seen", "i4"),  # output tokens that have been posted
        ("source", "i4"),  # the row that computed its prompt elsewhere, else -1
        ("told", "i4"),  # its first blocks that KV events told of
    ],
    align=True,
)
"""what stands beside the fleet's record of a row; simulated s"""
UNSEEN = (0.0, 0.0, math.nan, 0, -1, 0)


@dataclass
class Row:
    """One sequence that is being generated: a row of the fleet. `push(n, due, finished)` is told what became of it."""

    row: int
    replica: int
    push: Push
    last: str
    """why it will have finished"""
    ids: Ids
    model: str = ""
    """what it asked for: a model or an adapter"""
    salt: str = ""
    """of its prefix cache"""
    asked: float = 0.0
    """when it came (simulated s)"""
    at_once: bool = False
    """it is told in the middle of an advance, not when the wall's clock is there"""
    text: Text | None = None
    """its prompt, where a store of all replicas wants it when it has ended"""


@dataclass
class Ask:
    """What a client asks of the engine."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    names: Sequence[int] = ()
    lengths: Sequence[int] = ()
    """of the segments that its prompt is made of"""
    priority: int = 0
    session: str = ""
    model: str = ""
    base: str = ""
    """the model itself, or that of an adapter"""
    salt: str = ""
    rank: int | None = None
    """the data-parallel rank that is to serve it; None: ranks take turns"""
    hold: bool = False
    """its blocks are kept when it has ended"""
    pull: str | None = None
    """the request that has computed its prompt"""
    came: float | None = None
    """when it came to the front door, if that held it back (simulated s)"""
    row: int = -1
    """its row of the fleet, if it has one already"""
    draws: tuple[float, ...] = ()
    """what routers draw for it"""


class Outputs:
    """How many tokens the model generates: as the scenario's workload draws them."""

    def __init__(self, scenario: Scenario):
        self._lengths = scenario.workload.output_tokens
        self._random = generator(scenario.simulation.seed, "output_tokens")
        self._drawn: list[int] = []

    def draw(self, most: int, least: int) -> int:
        """At most so many, at least so many; `most` where the workload does not say."""
        if self._lengths is None:
            return most
        if not self._drawn:
            self._drawn = draw_lengths(self._lengths, CHUNK, self._random).tolist()[::-1]
        return min(max(self._drawn.pop(), least, 1), most)


class Watcher(Protocol):
    """Is told when the fleet has gone on, and tells others what its caches hold (kv_events)."""

    def look(self) -> None: ...

    def cleared(self, r: int) -> None: ...

    def sources(self, replicas: list[int]) -> dict[str, dict[str, Any]]: ...

    async def close(self) -> None: ...
