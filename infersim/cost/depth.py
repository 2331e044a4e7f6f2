"""What the parts of a pass cost that early exits cut it into."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from infersim.config.early_exit import EarlyExit
from infersim.config.engine import ResolvedEngine
from infersim.config.errors import InputError
from infersim.config.network import Network, Stage
from infersim.engine.price import Depths, StepCost
from infersim.models.architecture import Model

from .batch import attention_time, decodes
from .efficiency import efficiency
from .placement import Placement
from .steptime import compile_step_cost


def compile_depths(early_exit: EarlyExit, placement: Placement, engine: ResolvedEngine, context: int) -> Depths:
    """Seconds of each segment and exit head by sequences, after `context` tokens. InputError if a layer does not exist.

    An exit's head is the model's own LM head with its norm. What a token owes for the layers it skipped: `copy` writes
    their keys and values, `recompute` computes them (the projections' FLOPs; their weights come with a later pass).
    """
    model, exits = placement.model, early_exit.exit_layers
    if exits[-1] >= model.num_layers:
        raise InputError(
            f"early_exit.exit_layers: must be below the {model.num_layers} layers of {model.name} (got {exits[-1]})"
        )
    cuts = [0, *exits, model.num_layers]
    batch, quiet = engine.max_num_seqs, replace(engine, worker_step_time=0.0, worker_sequence_time=0.0)
    segments, head = [], np.zeros(0)
    for first, last in pairwise(cuts):
        part = replace(model, layers=model.layers[first:last], embedding_params=0 if first else model.embedding_params)
        cost = compile_step_cost(replace(placement, model=part), quiet)
        head = cost.head.sum(axis=1)
        many = [decodes(n, context) for n in range(1, batch + 1)]
        attention = np.array([0.0, *(attention_time(cost.attention, each) for each in many)])
        segments.append(cost.linear.sum(axis=1)[: batch + 1] + attention)
    segments[-1] = segments[-1] + head[: batch + 1]
    backfill = [_backfill(early_exit, placement, layer) for layer in exits]
    shares = np.array(early_exit.token_shares)
    heads = np.tile(head[: batch + 1], (len(exits), 1))
    return Depths(np.array(segments), heads, np.array(backfill), shares, early_exit.per == "request")


def _backfill(early_exit: EarlyExit, placement: Placement, layer: int) -> float:
    """Seconds per token that leaves after `layer` layers."""
    model, hardware = placement.model, placement.hardware
    dtype: Any = placement.precision.activations
    skipped = model.layers[layer:]
    keys = (
        sum(each.attention.kv_elements_per_token for each in skipped if not each.attention.kv_shared)
        / placement.parallelism.tensor
    )
    write = keys * placement.kv_bytes / hardware.memory_bandwidth
    if early_exit.missing_kv == "copy":
        return write
    share = efficiency(hardware, "gemm", dtype).flops
    return write + 2 * keys * model.hidden_size / (share * hardware.flops[dtype])


def with_early_exit(cost: StepCost, early_exit: EarlyExit, model: Model, max_num_seqs: int) -> StepCost:
    """The price of steps when a pass may end at an exit, on average over what its sequences do. Approximate.

    A step of up to max_num_seqs tokens counts as so many decodes. leave_alone: nothing is saved; wait_for_all: a pass
    ends at the first exit at which every sequence has left, which saves the layers behind it, attention's part not
    counted. Every exit that a pass reaches costs its head. InputError for what only the batch's own simulation tells.
    """
    if early_exit.policy == "rebatch":
        raise InputError(
            "early_exit.policy: rebatch is not modelled in a run; `infersim show break-even` simulates it; must be"
            " leave_alone or wait_for_all"
        )
    if early_exit.exit_layers[-1] >= model.num_layers:
        raise InputError(
            f"early_exit.exit_layers: must be below the {model.num_layers} layers of {model.name}"
            f" (got {early_exit.exit_layers[-1]})"
        )
    n = np.arange(1, min(max_num_seqs, len(cost.linear) - 1, len(cost.head) - 1) + 1)
    depth, heads = passed(early_exit, model, n)
    linear = cost.linear.copy()
    linear[n] *= (depth + heads * cost.head[n].sum(axis=1) / linear[n].sum(axis=1))[:, None]
    return replace(cost, linear=linear)


def passed(early_exit: EarlyExit, model: Model, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a pass of n sequences each: the mean share of the layers that it goes through, and exits' heads that it
    computes."""
    depths = np.array([*early_exit.exit_layers, model.num_layers]) / model.num_layers
    ends = np.zeros((len(depths), len(n)))
    ends[-1] = 1.0
    if early_exit.policy == "wait_for_all":  # where the last of n sequences leaves
        ends = np.diff(np.cumsum(early_exit.token_shares)[:, None] ** n, axis=0, prepend=0.0)
    reached = ends[::-1].cumsum(axis=0)[::-1]  # passes that get to the end of each segment
    return (ends * depths[:, None]).sum(axis=0), reached[:-1].sum(axis=0)


def needed_share(depth: float, head: float, backfill: float = 0.0) -> float:
    """Share of inputs that must leave at a single exit before it gains; above 1: it never does.

    depth: cost of the layers up to the exit; head: of its head, which every input pays; backfill: what an exited token
    costs still (keys and values of the layers it skipped); all as shares of the full cost.
    """
    saved = 1 - depth - backfill
    return head / saved if saved > 0 else float("inf")


def network_depths(network: Network) -> Depths:
    """The stages of a classifier with branches, by number of inputs."""
    inputs = np.arange(max(network.batches) + 1)
    cuts = [0, *(branch.after for branch in network.branches), len(network.layers)]

    def seconds(stages: list[Stage]) -> np.ndarray:
        return sum(stage.fixed for stage in stages) * (inputs > 0) + sum(stage.per_input for stage in stages) * inputs

    segments = np.array([seconds(network.layers[first:last]) for first, last in pairwise(cuts)])
    heads = np.array([seconds([branch]) for branch in network.branches])
    return Depths(segments, heads, np.zeros(len(heads)), np.array(network.shares))
