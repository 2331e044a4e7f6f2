"""Requests of several sequences (beams, samples), scheduled as groups."""

from dataclasses import replace

from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.workload import Workload

from .lower import Deployment


def with_groups(deployment: Deployment, workload: Workload) -> Deployment:
    """The same for requests of several sequences, if the workload has such and the engine schedules them as groups.

    InputError for beams without an engine that has them, and for what groups do not go with.
    """
    engine, beams = deployment.engine, workload.beam_width > 1
    key = "workload.beam_width" if beams else "workload.n"
    k = max(workload.beam_width, workload.n)
    shares = engine.sequence_groups and engine.allocator == "paged" and not engine.enable_prefix_caching
    if k == 1 or not (beams or shares):
        return deployment
    if not engine.sequence_groups:
        raise InputError(
            f"{key}: {engine.preset} has no beams in its scheduler (vLLM had until 0.6.2); engine.preset must be vllm-0"
        )
    paged = engine.allocator == "paged"
    plain = [group.window for group in deployment.memory.kv_groups] == [0]
    recomputes = engine.preemption_mode == "recompute" and engine.origin["preemption_mode"] == "user"
    checks = (
        (paged, "sequences share pages; engine.allocator must be paged"),
        (
            not paged or engine.reserve in ("first-chunk", "whole-prompt"),
            "sequences take pages as they grow; engine.reserve must be first-chunk or whole-prompt",
        ),
        (
            not engine.enable_prefix_caching,
            "blocks of a group are not looked up by others here; engine.enable_prefix_caching must be false",
        ),
        (
            not engine.async_scheduling,
            "which sequences go on is known with their tokens; engine.async_scheduling must be false",
        ),
        (engine.jump_forward_share == 0, "is not modelled with jumps; engine.jump_forward_share must be 0"),
        (
            deployment.speculation is None,
            "vLLM 0 verifies no drafts of several sequences; speculation must be null",
        ),
        (
            deployment.parallelism.pipeline == 1,
            "is not modelled with pipeline stages; parallelism.pipeline must be 1",
        ),
        (plain, f"is modelled for full attention only; {deployment.model.name} has windows or states"),
        (
            k <= engine.max_num_seqs,
            f"{k} sequences of one request never run at once; must be at most engine.max_num_seqs,"
            f" {engine.max_num_seqs}",
        ),
        (not recomputes, "vLLM 0 cannot recompute several sequences; engine.preemption_mode must be swap"),
        (
            deployment.hardware.pcie_bandwidth is not None,
            f"sequences are swapped over hardware.pcie_bandwidth, which {deployment.hardware.name} has not",
        ),
    )
    problems = [f"{key}: {problem}" for holds, problem in checks if not holds]
    if problems:
        raise InputError(problems)
    origin = {**engine.origin, "preemption_mode": "groups are swapped"}
    engine = replace(engine, preemption_mode="swap", origin=origin)
    turnover = workload.beam_turnover if beams else 0.0
    return replace(deployment, engine=engine, num_sequences=k, beam_turnover=turnover)


def check_groups(cluster: Cluster, workload: Workload, deployments: list[Deployment]) -> None:
    """InputError for groups of sequences in a cluster that cannot have them."""
    key = "workload.beam_width" if workload.beam_width > 1 else "workload.n"
    grouped = {deployment.num_sequences > 1 for deployment in deployments}
    if len(grouped) > 1:
        raise InputError(f"{key}: some replicas make one group of a prompt's samples, others requests; must be alike")
    if True in grouped and (cluster.prefill or cluster.encode):
        raise InputError(
            f"{key}: groups of sequences are not handed over; cluster.prefill and cluster.encode must be null"
        )
