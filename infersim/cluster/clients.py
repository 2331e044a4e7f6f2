"""How clients behave."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..workload.requests import Requests, own_text


@dataclass(frozen=True)
class Clients:
    """How clients behave, and what they ask for.

    max_tokens: i4[n]; max_concurrency: requests that they have open at most, 0 for any number; timeout: s, 0 for never;
    backoff: s before the first of `retries`, doubled each time; priority: i8[n], lower first; stop_tokens: i4[n, k],
    tokens of each of the k sequences of a request that has several.
    """

    max_tokens: np.ndarray
    max_concurrency: int = 0
    timeout: float = 0.0
    retries: int = 0
    backoff: float = 1.0
    priority: np.ndarray | None = None
    stop_tokens: np.ndarray | None = None


def columns_beside(requests: Requests, clients: Clients) -> dict[str, Any]:
    """What a fleet is told of requests besides their lengths."""
    priority = 0 if clients.priority is None else clients.priority
    names = own_text(requests.request_id)
    return {"names": names, "segments": requests.segments, "priority": priority, "stop_tokens": clients.stop_tokens}
