"""Where an optimisation stops paying: speculation over batch and context, INT4 weights and early exit over batch,
offloaded KV and ways to divide the work over the length of a prompt.

Closed forms on the deployment's own prices: a step in which every sequence decodes after `context` tokens.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from infersim.config.early_exit import EarlyExit
from infersim.config.engine import ResolvedEngine
from infersim.config.hardware import Hardware
from infersim.config.parallelism import Parallelism
from infersim.cost.batch import Part, batch_time, decodes, draft_time, step_split, step_time
from infersim.cost.depth import compile_depths, needed_share
from infersim.cost.placement import Placement
from infersim.cost.sharding import problems
from infersim.cost.steptime import compile_step_cost
from infersim.cost.weight_only import KERNELS, crossover_rows
from infersim.engine.compiled.state import ACTIVATIONS, COMPUTE, CPU, DISK, KV, WEIGHTS
from infersim.engine.early_exit import POLICIES, decode, full_depth
from infersim.engine.fleet import Fleet
from infersim.engine.price import Depths, DraftCost, StepCost
from infersim.engine.replica import ReplicaSpec

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (256, 1024, 4096, 16384, 65536)
PROMPTS = tuple(2**n for n in range(5, 17))


def regime(cost: StepCost, sequences: int, context: int, drafts: int = 0) -> str:
    """What binds such a step: bandwidth or compute; launch where fixed costs are more than either."""
    split = step_split(cost, decodes(sequences, context, drafts))
    memory, compute = split[[WEIGHTS, KV, ACTIVATIONS]].sum(), split[COMPUTE]
    rest = split.sum() - memory - compute
    names = {"bandwidth": memory, "compute": compute, "launch and other fixed costs": rest}
    return max(names, key=lambda key: names[key])


def speculation_over_batch(
    cost: StepCost, draft: DraftCost, tokens: np.ndarray, context: int, max_num_seqs: int
) -> list[dict[str, Any]]:
    """One row for each batch. tokens: f8[most + 1], mean tokens of a step that verifies so many drafts each."""
    most = len(tokens) - 1
    rows = []
    for batch in BATCHES:
        if batch > min(max_num_seqs, _most_verified(cost, most)):
            break
        plain = batch_time(cost, batch, context)
        costs = [
            (batch_time(cost, batch, context, k) + draft_time(draft, cost, batch, context, k)) / plain if k else 1.0
            for k in range(most + 1)
        ]
        gains = tokens / costs
        best = int(gains.argmax())
        rows.append(
            {
                "batch": batch,
                "step_ms": plain * 1e3,
                "tokens_needed": costs[most],
                "tokens_expected": float(tokens[most]),
                "gain": float(gains[most]),
                "best_k": best,
                "best_gain": float(gains[best]),
                "regime": regime(cost, batch, context, most),
            }
        )
    return rows


def _most_verified(cost: StepCost, drafts: int) -> int:
    """Sequences of which a step can verify so many drafts each."""
    return (min(len(cost.linear), len(cost.head)) - 1) // (1 + drafts)


def crossing(rows: list[dict[str, Any]], key: str) -> int | None:
    """The first `key` at which the gain is gone, by straight lines between rows in the logarithm; None if never."""
    for before, after in zip([None, *rows], rows, strict=False):
        if after["gain"] <= 1:
            if before is None:
                return after[key]
            share = (before["gain"] - 1) / (before["gain"] - after["gain"])
            return round(before[key] * (after[key] / before[key]) ** share)
    return None


def speculation_over_context(
    cost: StepCost, draft: DraftCost, tokens: np.ndarray, max_num_seqs: int, longest: int
) -> list[dict[str, Any]]:
    """The gain over context at a batch of 32, or the most that the engine takes: below 1 sequence, no rows."""
    most, rows = len(tokens) - 1, []
    batch = min(32, max_num_seqs, _most_verified(cost, most))
    for context in CONTEXTS:
        if context <= longest and batch:
            plain = batch_time(cost, batch, context)
            time = batch_time(cost, batch, context, most) + draft_time(draft, cost, batch, context, most)
            rows.append({"context": context, "batch": batch, "gain": float(tokens[most] * plain / time)})
    return rows


def int4_crossovers(hardware: Hardware) -> dict[str, int | None]:
    """Rows of a linear layer from which each INT4 kernel no longer gains over 16 bits on this device."""
    if not {"fp16", "fp32"} <= set(hardware.flops):
        return {}
    return {name: crossover_rows(kernel, hardware) for name, kernel in KERNELS.items()}


def loading_over_prompt(knobs: np.void, cost: StepCost, block_bytes: float) -> list[dict[str, Any]]:
    """To compute a prompt that is alone, or to load all but its last block. needed_gb_per_s: at which a GPU's part of
    it (block_bytes a block) is loaded in the time that computing takes."""
    rows = []
    for prompt in CONTEXTS:
        if prompt >= knobs["max_model_len"]:
            break
        alone = Fleet([ReplicaSpec(knobs, cost)])
        alone.submit(0, 0.0, prompt, 1, 1)
        alone.advance()
        compute = float(alone.requests["last_token"][0] - alone.requests["scheduled"][0])
        blocks = (prompt - 1) // int(knobs["block_size"])
        cpu, disk = (float(knobs["tier_latency"][t] + blocks * knobs["tier_block_time"][t]) for t in (CPU, DISK))
        row = {"prompt": prompt, "compute_ms": compute * 1e3, "cpu_ms": cpu * 1e3}
        if knobs["tier_blocks"][DISK]:
            row["disk_ms"] = (cpu + disk) * 1e3
        rows.append(row | {"needed_gb_per_s": blocks * block_bytes / compute / 1e9})
    return rows


def prompts_over_tokens(placement: Placement, engine: ResolvedEngine, other: Parallelism) -> list[dict[str, Any]]:
    """Steps of one prompt of so many tokens, against those under another parallelism; none if that is not modelled."""
    against = replace(placement, parallelism=other)
    if problems(against):
        return []
    costs = [compile_step_cost(each, engine) for each in (placement, against)]
    rows = []
    for tokens in (n for n in PROMPTS if n <= engine.max_num_batched_tokens):
        mine, theirs = (step_time(cost, [Part(0, tokens)]) for cost in costs)
        rows.append({"tokens": tokens, "step_ms": mine * 1e3, "other_ms": theirs * 1e3, "gain": theirs / mine})
    return rows


def pays_from(rows: list[dict[str, Any]]) -> int | None:
    """The tokens from which there is a gain; None if never."""
    return crossing([{**row, "gain": 1 / row["gain"]} for row in rows], "tokens")


def early_exit_over_batch(
    early_exit: EarlyExit, placement: Placement, engine: ResolvedEngine, context: int
) -> dict[str, Any]:
    """Share of tokens that must leave at the first exit alone, and simulated gains by batch under the policy."""
    depths = compile_depths(early_exit, placement, engine, context)
    whole = depths.segments[:, 1].sum()
    needed = needed_share(depths.segments[0, 1] / whole, depths.heads[0, 1] / whole, depths.backfill[0] / whole)
    rows = []
    for batch in BATCHES:
        if batch >= depths.segments.shape[1] // (2 if early_exit.policy == "rebatch" else 1):
            break
        wait = np.inf if early_exit.max_wait is None else early_exit.max_wait
        result = decode(depths, early_exit.policy, batch, 4000, min_batch=early_exit.min_batch or 0, max_wait=wait)
        gain = float(result.tokens_per_second / full_depth(depths, batch))
        rows.append({"batch": batch, "gain": gain, "depth": float(result.depth), "mean_batch": result.mean_batch})
    return {"needed_share": needed, "share": float(depths.shares[0]), "policy": early_exit.policy, "over_batch": rows}


def network_gains(depths: Depths, batches: list[int]) -> list[dict[str, Any]]:
    """Milliseconds per input of a classifier with branches, and the gain over its whole network, by batch."""
    rows = []
    for batch in batches:
        plain = full_depth(depths, batch)
        row: dict[str, Any] = {"batch": batch, "whole_network_ms": 1e3 / plain}
        for policy in POLICIES:
            result = decode(depths, policy, batch, max(4000, 20 * batch))
            row |= {f"{policy}_ms": 1e3 / float(result.tokens_per_second)}
            row |= {f"{policy}_gain": float(result.tokens_per_second / plain)}
        rows.append(row)
    return rows
