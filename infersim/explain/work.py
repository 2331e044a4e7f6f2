"""What a run had to move and compute, whatever the time it took: bytes by kind, FLOPs, and a typical decode step."""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from infersim.cost.batch import attention_split
from infersim.cost.depth import passed, with_early_exit
from infersim.cost.operator import Operator, Sums, evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.roofline import peak_flops
from infersim.cost.steptime import compile_step_cost
from infersim.engine.compiled.law import chunked_pairs
from infersim.engine.compiled.state import COMPLETED, DRAFT, HOST, QUERY_TILE, RESOURCES
from infersim.engine.price import StepCost
from infersim.metrics.result import Result
from infersim.models.architecture import Model
from infersim.models.catalog import load_model

KINDS = ("weights", "kv", "activations")
MOVED = (*KINDS, "flops", "seconds_at_peak")


@dataclass(frozen=True)
class Work:
    """One GPU's share of a run's work.

    Recomputation after preemption counts as prompt tokens; a prompt's keys are read once, by its last chunk.
    """

    result: Result

    @cached_property
    def model(self) -> Model:
        return load_model(self.result.scenario.model)

    @cached_property
    def operators(self) -> list[Operator]:
        """One pass on one rank."""
        return forward_pass(self._placement)

    @cached_property
    def _placement(self) -> Placement:
        scenario = self.result.scenario
        return Placement(self.model, scenario.hardware, scenario.precision, scenario.parallelism)

    @cached_property
    def _cost(self) -> StepCost:
        scenario, engine = self.result.scenario, self.result.engine
        cost = compile_step_cost(self._placement, engine)
        if scenario.early_exit is not None:
            cost = with_early_exit(cost, scenario.early_exit, self.model, engine.max_num_seqs)
        return cost

    def _passes(self, operator: Operator) -> float:
        """Times that a decode step goes through one of the operator's `count`: below 1 for layers behind an early exit,
        above for the LM head, which each exit computes too."""
        early_exit = self.result.scenario.early_exit
        if early_exit is None or operator.per not in ("tokens", "sequences"):
            return 1.0
        depth, heads = passed(early_exit, self.model, np.array([self.decode_batch]))
        return float(depth[0]) if operator.per == "tokens" else 1.0 + float(heads[0])

    @cached_property
    def _served(self) -> tuple[np.ndarray, np.ndarray]:
        """i8[n], i8[n]: prompt tokens, and output tokens so far, of the requests that had a first token."""
        r = self.result.requests[self.result.requests["num_output_tokens"] > 0]
        return r["prompt_tokens"].astype("i8"), r["num_output_tokens"].astype("i8")

    @cached_property
    def _cached(self) -> np.ndarray:
        """i8[n]: prompt tokens of `_served` that were found in the prefix cache."""
        r = self.result.requests
        return r[r["num_output_tokens"] > 0]["num_cached_tokens"].astype("i8")

    @property
    def _beams(self) -> int:
        """Sequences that are decoded for one answer."""
        return self.result.scenario.workload.beam_width

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        prompts = int(self._served[0].sum())
        return int(self._cached.sum()) / prompts if prompts else 0.0

    @property
    def prompt_share(self) -> float:
        """Share of the busy time that prompts take: what steps take longer than pure decode steps."""
        if not self.result.num_steps:
            return 0.0
        whole, decode = sum(self.mean_step().values()), sum(self.decode_step()[0].values())
        return min(max(1 - decode / whole, 0.0), 1.0)

    @property
    def output_tokens(self) -> int:
        return int(self._served[1].sum())

    @property
    def decodes(self) -> int:
        """Tokens made by decode steps: all but each request's first, of every beam."""
        return (self.output_tokens - len(self._served[1])) * self._beams

    @property
    def visits(self) -> int:
        """Times that a sequence was in a decode step: each makes one token, or several with speculation."""
        return self.decodes if self.result.num_sequences > 1 else int(self.result.itl_histogram.sum())

    @property
    def tokens_per_visit(self) -> float:
        """Tokens that a sequence has in a decode step: one, and the drafts that are verified with it."""
        if self.result.scenario.speculation is None or not self.visits:
            return 1.0
        prompts = int((self._served[0] - self._cached).sum())
        return max((self.result.num_scheduled_tokens - prompts) / self.visits, 1.0)

    def decode_keys(self, window: int = 0) -> float:
        """Keys that all decode tokens saw: those of every beam, shared or not."""
        return float(decode_keys(*self._served, window).sum()) * self._beams

    def sums(self, window: int = 0) -> Sums:
        """The sums of all steps of the run as layers of this window see them."""
        prompt, cached = self._served[0], self._cached
        inside = np.minimum(prompt, abs(window)) if window else prompt
        inside = np.where(cached < prompt, inside, 0)
        pairs = _pairs(prompt, window) - _pairs(cached, window)
        tokens = self.result.num_scheduled_tokens
        return {
            "step": self.result.num_steps,
            "tokens": tokens,
            "sequences": self.output_tokens * self._beams,
            "decodes": self.visits,
            "decode_keys": self.decode_keys(window) * self.visits / max(self.decodes, 1),
            "prefill_tokens": max(tokens - self.visits * self.tokens_per_visit, 0.0),
            "prefill_keys": float(inside.sum()),
            "prefill_pairs": float(pairs.sum()),
            "query_tiles": float((-(-(prompt - cached) // QUERY_TILE)).sum()),
        }

    def routed(self, operator: Operator) -> Sums:
        """The sums of all steps as an operator sees them: every time the experts of a step of the average size."""
        sums, steps = self.sums(operator.window), self.result.num_steps
        if operator.routing is None or not steps:
            return operator.routed(sums)
        ranks = self.result.scenario.parallelism.attention_data if operator.shared else 1
        one = operator.routed({"tokens": sums["tokens"] / steps * ranks})
        return {**sums, "experts": one["experts"] * steps, "expert_tokens": one["expert_tokens"] * steps}

    def amount(self, kind: str) -> float:
        """Bytes of `weights`, `kv`, `activations`, or `flops`, of the whole run on one GPU."""
        total, with_prompt = 0.0, self.steps_with_prompt
        for operator in self.operators:
            sums = self.routed(operator)
            if sums[operator.per] > 0:
                passes = with_prompt + (1 - with_prompt) * self._passes(operator)
                total += operator.count * passes * float(evaluate(getattr(operator, kind), sums))
        return total

    @property
    def steps_with_prompt(self) -> float:
        """About the share of steps that hold a prompt."""
        return min(1.0, len(self._served[0]) / max(self.result.num_steps, 1))

    @property
    def bytes_by_kind(self) -> dict[str, float]:
        return {kind: self.amount(kind) for kind in KINDS}

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the memory bandwidth that the bytes took while the device was busy."""
        busy = self.result.busy_time
        moved = sum(self.bytes_by_kind.values())
        return moved / (busy * self.result.scenario.hardware.memory_bandwidth) if busy else None

    @property
    def seconds_at_peak(self) -> float:
        """Seconds that the FLOPs of the run take at the peak rate of each one's format."""
        hardware = self.result.scenario.hardware
        return sum(
            operator.count * float(evaluate(operator.flops, self.routed(operator))) / peak_flops(hardware, operator)
            for operator in self.operators
            if operator.flops
        )

    @property
    def compute_share(self) -> float | None:
        """Share of the peak FLOP/s that the FLOPs took while the device was busy."""
        return self.seconds_at_peak / self.result.busy_time if self.result.busy_time else None

    @property
    def mean_moved(self) -> dict[str, float]:
        """Bytes by kind, `flops` and `seconds_at_peak` of the run's mean step."""
        whole = self.bytes_by_kind | {"flops": self.amount("flops"), "seconds_at_peak": self.seconds_at_peak}
        return {kind: amount / self.result.num_steps for kind, amount in whole.items()}

    def facts(self) -> dict[str, Any]:
        """Steps, bytes and shares of the peaks, JSON-ready."""
        steps = self.result.num_steps
        return {
            "steps_per_output_token": steps / self.output_tokens if self.output_tokens else None,
            "mean_step_ms": self.result.busy_time / steps * 1e3 if steps else None,
            "decode_batch": self.decode_batch,
            "bytes_per_step": {kind: size / steps for kind, size in self.bytes_by_kind.items()} if steps else None,
            "bandwidth_share": self.bandwidth_share,
            "compute_share": self.compute_share,
        }

    @property
    def decode_batch(self) -> float:
        """Sequences that a step decodes, on average."""
        return self.visits / self.result.num_steps if self.result.num_steps else 0.0

    def decode_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by resource, and bytes by kind, `flops` and `seconds_at_peak`, of a pure decode step of the average
        batch and context.

        The host's part, and that of drafting, is what it was on average in the run.
        """
        batch = self.decode_batch
        seconds = dict.fromkeys(RESOURCES, 0.0)
        if not self.visits:
            return seconds, dict.fromkeys(MOVED, 0.0)
        cost = self._cost
        tokens = batch * self.tokens_per_visit
        split = _between(cost.linear, tokens) + _between(cost.head, tokens)
        if cost.shared is not None:
            split += _between(cost.shared, tokens)
        sums = [self._decode_sums(int(row["window"])) for row in cost.attention]
        split += attention_split(cost.attention, sums)
        for resource in (HOST, DRAFT):
            split[resource] += self.result.time_by_resource[resource] / self.result.num_steps
        return dict(zip(RESOURCES, split.tolist(), strict=True)), self._decode_moved(batch)

    def _decode_sums(self, window: int) -> SimpleNamespace:
        """state.SUMS of a pure decode step of the average batch; a draft sees as many keys as the token before it."""
        batch, more = self.decode_batch, self.tokens_per_visit - 1
        keys = batch * self.decode_keys(window) / self.decodes
        return SimpleNamespace(
            num_decodes=batch, decode_keys=keys, more_queries=batch * more, more_pairs=keys * more, prefill_tokens=0
        )

    def mean_step(self) -> dict[str, float]:
        """Seconds by resource of the run's mean step, from its start to its tokens: through all pipeline stages."""
        mean = self.result.time_by_resource / self.result.num_steps
        through = np.full(len(RESOURCES), 1 / self._cost.issue_share)
        through[HOST] = 1.0
        return dict(zip(RESOURCES, (mean * through).tolist(), strict=True))

    def _decode_moved(self, batch: float) -> dict[str, float]:
        moved = dict.fromkeys(MOVED, 0.0)
        for operator in self.operators:
            keys = batch * self.decode_keys(operator.window) / self.decodes
            tokens = batch * self.tokens_per_visit
            sums: Sums = {"step": 1.0, "tokens": tokens, "sequences": tokens, "decodes": batch, "decode_keys": keys}
            if operator.per in sums:
                sums = operator.routed(sums)
                times = operator.count * self._passes(operator)
                for kind in (*KINDS, "flops"):
                    moved[kind] += times * float(evaluate(getattr(operator, kind), sums))
                if operator.flops:
                    flops = times * float(evaluate(operator.flops, sums))
                    moved["seconds_at_peak"] += flops / peak_flops(self.result.scenario.hardware, operator)
        return moved

    def preempted_time(self) -> float:
        """Seconds that preempted requests spent waiting to be resumed, all together: the engine's own integral of
        waiting requests, less their waits for admission."""
        r = self.result.requests
        if not r["num_preemptions"].any():
            return 0.0
        came = r[(r["status"] == COMPLETED) & (r["scheduled"] >= 0)]
        admission = float((came["scheduled"] - came["visible"]).sum())
        return max(0.0, self.result.waiting_time - admission)


def decode_keys(prompt: np.ndarray, output: np.ndarray, window: int = 0) -> np.ndarray:
    """Keys that the decode tokens of each request see, all together: the sum of min(context, window) over its tokens
    but the first; with a window below 0 the keys of its own chunk of so many; 0: all."""
    steps = output - 1
    if window < 0:
        return chunked_pairs(prompt + output, -window) - chunked_pairs(prompt + 1, -window)
    if not window:
        return steps * prompt + steps * (steps + 1) // 2
    inside = np.clip(window - prompt, 0, steps)
    return inside * prompt + inside * (inside + 1) // 2 + (steps - inside) * window


def _pairs(tokens: np.ndarray, window: int) -> np.ndarray:
    """Query-key pairs of so many tokens from the start, as layers of the window see them."""
    if window < 0:
        return chunked_pairs(tokens, -window)
    inside = np.minimum(tokens, window) if window else tokens
    return inside * (inside + 1) // 2 + (tokens - inside) * inside


def _between(table: np.ndarray, row: float) -> np.ndarray:
    """f8[9]: the table at a row that need not be whole."""
    low = min(int(row), len(table) - 1)
    high = min(low + 1, len(table) - 1)
    return table[low] + (table[high] - table[low]) * (row - low)
