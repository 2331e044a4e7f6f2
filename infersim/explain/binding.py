"""What binds, and what the most would be that lifting it could bring."""

from dataclasses import dataclass

import numpy as np

from infersim.engine.compiled.state import RESOURCES
from infersim.metrics.result import Result

DOING = {
    "weights": "memory bandwidth, reading weights",
    "kv": "memory bandwidth, reading the KV cache",
    "activations": "memory bandwidth, moving activations",
    "compute": "compute",
    "launch": "kernel launches and other fixed costs of operators",
    "collectives": "collectives between devices",
    "host": "the engine's CPU time",
    "draft": "drafting",
    "offload": "copying the KV cache to and from the CPU and its disk",
}
QUEUE_SHARE = 0.1  # of the time in the engine that requests wait: from here on admission binds, not the step


@dataclass(frozen=True)
class Binding:
    """name: a resource, a limit (max_num_seqs, kv_blocks, ...) or none; text and ceiling: for people.

    factor: what the same work could be done faster by at most if it were lifted (Amdahl's law on busy time; time that
    overlaps with something else is not gained, hence at most).
    """

    name: str
    text: str
    factor: float
    ceiling: str


def waiting_share(result: Result) -> float:
    """Of their time in the engine, what requests wait."""
    in_engine = result.waiting_time + result.running_time
    return result.waiting_time / in_engine if in_engine > 0 else 0.0


def find_binding(result: Result) -> Binding:
    """The resource on which most of the busy time is spent. What requests wait for is not found by looking:
    planning.limits lifts each limit."""
    if result.busy_time <= 0:
        return Binding("none", "nothing: no step was run", 1.0, "")
    seconds = dict(zip(RESOURCES, result.time_by_resource.tolist(), strict=True))
    top = max(seconds, key=lambda key: seconds[key])
    factor = _amdahl(result.busy_time, seconds[top])
    text = f"{DOING[top]}: {seconds[top] / result.busy_time:.0%} of the busy time"
    if (waiting := waiting_share(result)) > QUEUE_SHARE:
        text += f"; requests wait for {waiting:.0%} of their time in the engine"
    return Binding(top, text, factor, f"were that free, the same steps would be {_at_most(factor)}")


def _amdahl(busy: float, lifted: float) -> float:
    return busy / (busy - lifted) if lifted < busy else np.inf


def _at_most(factor: float) -> str:
    return f"at most {factor:.3g} times faster" if np.isfinite(factor) else "faster without bound"
