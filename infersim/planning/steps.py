"""One second of a run, step by step: who is in the batch, with how many tokens, and how many KV blocks are held."""

from typing import Any

import numpy as np

from infersim.engine.fleet import Fleet
from infersim.metrics.result import Result
from infersim.metrics.timeline import timeline
from infersim.run import watched

LOOK = 50e-6  # s between looks at the replica: shorter than a step


def busiest(result: Result) -> float:
    """Where a second begins in which the most requests are in the system."""
    lines = timeline(result)
    return max(float(lines["time"][np.argmax(lines["waiting"] + lines["running"])]) - 0.5, 0.0)


def steps_of(result: Result, at: float | None = None, seconds: float = 1.0) -> dict[str, Any]:
    """`at`, `seconds`, `replica` (the busiest one), and `steps`: columns by step of these seconds of the run, which is
    simulated again and looked at on its way. Default: from where the busiest second begins.

    end: s, when its tokens are known; ms: from the end of the step before, or from its own begin; tokens: that it
    computes; prompts: [id, tokens, of all its prompt] of each prompt in it; decodes: ids of the others; waiting,
    blocks: when it was scheduled. No steps where replicas interact while they run.
    """
    at = busiest(result) if at is None else at
    replica = int(np.argmax(result.replicas.rows["running_time"]))
    steps: list[dict[str, Any]] = []

    def watch(fleet: Fleet) -> None:
        fleet.advance(at)
        mine = np.flatnonzero(fleet.requests["replica"] == replica)
        ranks = int(fleet.call["ranks"][0])
        schedulers = fleet.schedulers[replica * ranks : (replica + 1) * ranks]
        row, usable = fleet.replicas[replica : replica + 1], int(result.replicas.usable_blocks[replica])
        names = ("num_steps", "num_scheduled_tokens", "latest_end")
        before, (count, tokens, end) = fleet.requests[mine], (row[name][0] for name in names)
        for moment in np.arange(at, at + seconds, LOOK)[1:].tolist():
            fleet.advance(moment)
            if row["num_steps"][0] == count:
                continue
            after, begun = fleet.requests[mine], max(float(end), moment - LOOK)
            computed = int(row["num_scheduled_tokens"][0] - tokens)
            count, tokens, end = (row[name][0] for name in names)
            steps.append({
                "end": float(end), "ms": 1e3 * (float(end) - begun), "tokens": computed,
                **_batch(before, after, result.request_ids[mine]), "waiting": int(schedulers["num_waiting"].sum()),
                "blocks": usable - int(schedulers["free_blocks"].sum()),
            })  # fmt: skip
            before = after

    watched(result.scenario, result.seed, watch)
    return {"at": at, "seconds": seconds, "replica": replica, "steps": steps}


def _batch(before: np.ndarray, after: np.ndarray, ids: np.ndarray) -> dict[str, Any]:
    """Whom a step computed, from REQUEST[n] before it was scheduled and after."""
    tokens = after["num_computed_tokens"] - before["num_computed_tokens"]
    tokens = tokens - np.where(before["scheduled"] < 0, after["num_cached_tokens"], 0)  # what a cache had
    in_prompt = before["num_computed_tokens"] < before["prompt_tokens"]
    prompts = np.flatnonzero((tokens > 0) & in_prompt)
    return {
        "prompts": [[int(ids[i]), int(tokens[i]), int(after["prompt_tokens"][i])] for i in prompts],
        "decodes": ids[(tokens > 0) & ~in_prompt].tolist(),
        "preempted": ids[after["num_preemptions"] > before["num_preemptions"]].tolist(),
    }
