"""Requests of several sequences (beams, samples), scheduled as groups."""

from dataclasses import replace

from infersim.config.workload import Workload

from .compatibility import check
from .lower import Deployment


def asked_by(workload: Workload) -> str:
    """The key that asks for several sequences of a request."""
    return "workload.beam_width" if workload.beam_width > 1 else "workload.n"


def with_groups(deployment: Deployment, workload: Workload) -> Deployment:
    """The same for requests of several sequences, if the workload has such and the engine schedules them as groups.

    InputError for beams without an engine that has them, and for what groups do not go with.
    """
    engine, beams = deployment.engine, workload.beam_width > 1
    k = max(workload.beam_width, workload.n)
    shares = engine.sequence_groups and engine.allocator == "paged" and not engine.enable_prefix_caching
    if k == 1 or not (beams or shares):
        return deployment
    facts = {name: getattr(deployment, name) for name in ("model", "hardware", "parallelism", "speculation")}
    facts |= {"windows": [group.window for group in deployment.memory.kv_groups] != [0]}
    grouped = engine.sequence_groups
    check(**vars(engine), **facts, asked=asked_by(workload), beams=beams, sequences=k, grouped=grouped)
    origin = {**engine.origin, "preemption_mode": "groups are swapped"}
    engine = replace(engine, preemption_mode="swap", origin=origin)
    turnover = workload.beam_turnover if beams else 0.0
    return replace(deployment, engine=engine, num_sequences=k, beam_turnover=turnover)
