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
PER_STEP = ("weights", "launch", "collectives", "host")
"""What a step costs however many sequences share it."""
QUEUE_SHARE = 0.1  # of the time in the engine that requests wait: from here on admission binds, not the step
NEAR_LIMIT = 0.9  # a limit whose peak use is above this share is one that requests wait for


@dataclass(frozen=True)
class Binding:
    """name: a resource, max_num_seqs, kv_blocks or none; text and ceiling: for people.

    factor: what the same work could be done faster by at most if it were lifted (Amdahl's law on busy time; time that
    overlaps with something else is not gained, hence at most).
    """

    name: str
    text: str
    factor: float
    ceiling: str


def find_binding(result: Result, admission: bool = True) -> Binding:
    """Of the resources, and of the limit of admission if requests wait for it, the one that would gain the most.

    admission: whether a limit of admission can be it; no, where lifting all of them was found to gain nothing.
    """
    if result.busy_time <= 0:
        return Binding("none", "nothing: no step was run", 1.0, "")
    seconds = dict(zip(RESOURCES, result.time_by_resource.tolist(), strict=True))
    top = max(seconds, key=lambda key: seconds[key])
    factor = _amdahl(result.busy_time, seconds[top])
    in_engine = result.waiting_time + result.running_time
    waiting = result.waiting_time / in_engine if in_engine > 0 else 0.0
    limit = _admission_limit(result) if admission and waiting > QUEUE_SHARE else None
    without_limit = _amdahl(result.busy_time, sum(seconds[name] for name in PER_STEP))
    if limit and without_limit > factor:
        text = f"{limit[1]}; requests wait for {waiting:.0%} of their time in the engine"
        ceiling = f"without that limit {_at_most(without_limit)}: a larger batch shares what a step costs anyway"
        return Binding(limit[0], text, without_limit, ceiling)
    text = f"{DOING[top]}: {seconds[top] / result.busy_time:.0%} of the busy time"
    return Binding(top, text, factor, f"were that free, the same steps would be {_at_most(factor)}")


def _admission_limit(result: Result) -> tuple[str, str] | None:
    """The limit that keeps requests waiting, if one is nearly used up in a replica."""
    rows, usable = result.replicas.rows, result.replicas.usable_blocks
    found = []
    for ran in result.ran:
        ranks = ran.deployment.parallelism.attention_data
        seqs = ran.deployment.engine.max_num_seqs * ranks
        running = int(rows["peak_running"][ran.replicas].max())
        r = ran.replicas.start + int(np.argmax(rows["peak_blocks"][ran.replicas] / usable[ran.replicas]))
        blocks = int(rows["peak_blocks"][r])
        text = f"KV memory: {blocks:,} of {usable[r]:,} blocks held at the peak"
        found += [
            (running / (seqs // result.num_sequences), "max_num_seqs", f"max_num_seqs: all {seqs} places taken"),
            (blocks / usable[r], "kv_blocks", text),
        ]
    use, name, text = max(found, key=lambda limit: limit[0])
    return (name, text) if use >= NEAR_LIMIT else None


def _amdahl(busy: float, lifted: float) -> float:
    return busy / (busy - lifted) if lifted < busy else np.inf


def _at_most(factor: float) -> str:
    return f"at most {factor:.3g} times faster" if np.isfinite(factor) else "faster without bound"
