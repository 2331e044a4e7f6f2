"""What a run had to move and compute, whatever the time it took: bytes by kind, FLOPs, and a typical decode step."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from infersim.cost.batch import attention_split
from infersim.cost.depth import passed
from infersim.cost.operator import Operator, Sums, evaluate
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.roofline import peak_flops
from infersim.engine.compiled.state import COMPLETED, DRAFT, HOST, QUERY_TILE, RESOURCES
from infersim.engine.price import StepCost
from infersim.metrics.result import Ran, Result

from .seen import decode_keys, prompt_pairs

LEAST_EXCESS = 0.02  # of a decode step: below, what prompts add to a step cannot be told from noise
KINDS = ("weights", "kv", "activations")
MOVED = (*KINDS, "flops", "seconds_at_peak", "seconds_at_bandwidth")
"""bytes by kind, FLOPs, and the seconds that these and those take at the peaks"""


@dataclass(frozen=True)
class Work:
    """One GPU's share of what the replicas of one kind did in a run.

    Recomputation after preemption counts as prompt tokens; a prompt's keys are read once, by its last chunk.
    """

    result: Result
    ran: Ran

    @property
    def placement(self) -> Placement:
        return self.ran.deployment.placement

    @cached_property
    def operators(self) -> list[Operator]:
        """One pass on one rank."""
        return forward_pass(self.placement)

    @property
    def cost(self) -> StepCost:
        return self.ran.spec.cost

    def _rows(self, name: str) -> float:
        """A sum of the engine's over these replicas."""
        return float(self.result.replicas.rows[name][self.ran.replicas].sum())

    @cached_property
    def num_steps(self) -> int:
        return int(self._rows("num_steps"))

    @cached_property
    def busy_time(self) -> float:
        return self._rows("busy_time")

    @cached_property
    def _scheduled(self) -> int:
        return int(self._rows("num_scheduled_tokens"))

    def _passes(self, operator: Operator) -> float:
        """Times that a decode step goes through one of the operator's `count`: below 1 for layers behind an early exit,
        above for the LM head, which each exit computes too."""
        early_exit = self.ran.deployment.early_exit
        if early_exit is None or operator.per not in ("tokens", "sequences"):
            return 1.0
        depth, heads = passed(early_exit, self.placement.model, np.array([self.decode_batch]))
        return float(depth[0]) if operator.per == "tokens" else 1.0 + float(heads[0])

    @cached_property
    def _records(self) -> np.ndarray:
        """Who had a first token here: requests, or where there are several kinds their visits to this one."""
        r = self.result.requests
        if len(self.result.ran) > 1:
            r = self.result.replicas.visits
            r = r[(r["replica"] >= self.ran.replicas.start) & (r["replica"] < self.ran.replicas.stop)]
        return r[r["num_output_tokens"] > 0]

    @cached_property
    def _served(self) -> tuple[np.ndarray, np.ndarray]:
        """i8[n], i8[n]: prompt tokens, and output tokens so far, of the requests that had a first token."""
        return self._records["prompt_tokens"].astype("i8"), self._records["num_output_tokens"].astype("i8")

    @cached_property
    def _cached(self) -> np.ndarray:
        """i8[n]: prompt tokens of `_served` that were not computed here: found in the prefix cache, or handed over."""
        cached = self._records["num_cached_tokens"].astype("i8")
        # which of them computed their prompts here the tokens tell, not the records
        if self.ran.role == "decode" or self.result.scenario.cluster.role_switch:
            prompt, output = self._served
            here = max(self._scheduled - int(output.sum()), 0) / max(int((prompt - cached).sum()), 1)
            cached = np.maximum(cached, prompt - np.round(min(here, 1.0) * (prompt - cached)).astype("i8"))
        return cached

    @property
    def _beams(self) -> int:
        """Sequences that are decoded for one answer."""
        return self.result.scenario.workload.beam_width

    @property
    def computed_prompts(self) -> int:
        """Prompt tokens that were computed here, once each."""
        return int((self._served[0] - self._cached).sum())

    @property
    def decode_share(self) -> float:
        """Share of the busy time that pure decode steps would have taken."""
        if not self.num_steps:
            return 0.0
        return min(sum(self.decode_step()[0].values()) / sum(self.mean_step().values()), 1.0)

    @property
    def excess(self) -> dict[str, float]:
        """What a mean step takes longer than a pure decode step, by resource; the step itself where that is noise."""
        seconds, mean = self.decode_step()[0], self.mean_step()
        excess = {name: mean[name] - seconds[name] for name in RESOURCES}
        step = math.fsum(seconds.values())
        if math.fsum(excess.values()) < LEAST_EXCESS * step:
            return seconds if step > 0 else mean
        return excess

    def prompt_step(self) -> dict[str, float]:
        """Seconds by resource of a step with a prompt."""
        seconds, excess, share = self.decode_step()[0], self.excess, self.steps_with_prompt
        return {name: max(seconds[name] + excess[name] / share, 0.0) for name in RESOURCES}

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
        if self.result.num_sequences > 1 or not self.decodes:
            return self.decodes
        share = self.decodes / sum(work.decodes for work in works(self.result)) if len(self.result.ran) > 1 else 1.0
        return round(share * int(self.result.itl_histogram.sum()))

    @property
    def tokens_per_visit(self) -> float:
        """Tokens that a sequence has in a decode step: one, and the drafts that are verified with it."""
        if self.result.scenario.speculation is None or not self.visits:
            return 1.0
        return max((self._scheduled - self.computed_prompts) / self.visits, 1.0)

    def decode_keys(self, window: int = 0) -> float:
        """Keys that all decode tokens saw: those of every beam, shared or not."""
        return float(decode_keys(*self._served, window).sum()) * self._beams

    def sums(self, window: int = 0) -> Sums:
        """The sums of all steps of the run as layers of this window see them."""
        prompt, cached = self._served[0], self._cached
        inside = np.minimum(prompt, abs(window)) if window else prompt
        inside = np.where(cached < prompt, inside, 0)
        pairs = prompt_pairs(prompt, window) - prompt_pairs(cached, window)
        tokens = self._scheduled
        return {
            "step": self.num_steps,
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
        sums, steps = self.sums(operator.window), self.num_steps
        if operator.routing is None or not steps:
            return operator.routed(sums)
        ranks = self.placement.parallelism.attention_data if operator.shared else 1
        one = operator.routed({"tokens": sums["tokens"] / steps * ranks})
        return {**sums, "experts": one["experts"] * steps, "expert_tokens": one["expert_tokens"] * steps}

    @property
    def steps_with_prompt(self) -> float:
        """About the share of steps that hold a prompt."""
        return min(1.0, len(self._served[0]) / max(self.num_steps, 1))

    @property
    def moved(self) -> dict[str, float]:
        """MOVED of the whole run on one GPU."""
        with_prompt = self.steps_with_prompt
        every = ((op, self.routed(op), with_prompt + (1 - with_prompt) * self._passes(op)) for op in self.operators)
        return self._moved([(op, sums, passes) for op, sums, passes in every if sums[op.per] > 0])

    def _moved(self, work: Iterable[tuple[Operator, Sums, float]]) -> dict[str, float]:
        """MOVED of operators with their sums, each gone through so many times."""
        moved, hardware = dict.fromkeys(MOVED, 0.0), self.placement.hardware
        for operator, sums, passes in work:
            for kind in (*KINDS, "flops"):
                moved[kind] += operator.count * passes * float(evaluate(getattr(operator, kind), sums))
            if operator.flops:
                flops = operator.count * passes * float(evaluate(operator.flops, sums))
                moved["seconds_at_peak"] += flops / peak_flops(hardware, operator)
        moved["seconds_at_bandwidth"] = sum(moved[kind] for kind in KINDS) / hardware.memory_bandwidth
        return moved

    @property
    def decode_batch(self) -> float:
        """Sequences that a step decodes, on average: one at least, if any does."""
        return max(self.visits / self.num_steps, 1.0) if self.visits else 0.0

    def decode_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by resource, and bytes by kind, `flops` and `seconds_at_peak`, of a pure decode step of the average
        batch and context.

        The host's part, and that of drafting, is what it was on average in the run.
        """
        batch = self.decode_batch
        seconds = dict.fromkeys(RESOURCES, 0.0)
        if not self.visits:
            return seconds, dict.fromkeys(MOVED, 0.0)
        cost, rows = self.cost, self.result.replicas.rows["time_by_resource"][self.ran.replicas]
        tokens = batch * self.tokens_per_visit
        split = _between(cost.linear, tokens) + _between(cost.head, tokens)
        if cost.shared is not None:
            split += _between(cost.shared, tokens)
        sums = [self._decode_sums(int(row["window"])) for row in cost.attention]
        split += attention_split(cost.attention, sums)
        split[HOST] += rows[:, HOST].sum() / self.num_steps  # beside what is priced: what the device waited for
        split[DRAFT] += self.ran.time_by_resource[DRAFT] / self.num_steps
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
        mean = self.ran.time_by_resource / max(self.num_steps, 1)
        through = np.full(len(RESOURCES), 1 / self.cost.issue_share)
        through[HOST] = 1.0
        return dict(zip(RESOURCES, (mean * through).tolist(), strict=True))

    def _decode_moved(self, batch: float) -> dict[str, float]:
        found, tokens = [], batch * self.tokens_per_visit
        for operator in self.operators:
            keys = batch * self.decode_keys(operator.window) / self.decodes
            sums: Sums = {"step": 1.0, "tokens": tokens, "sequences": tokens, "decodes": batch, "decode_keys": keys}
            if operator.per in sums:
                found.append((operator, operator.routed(sums), self._passes(operator)))
        return self._moved(found)


def works(result: Result) -> list[Work]:
    """One for each kind of replica that computes tokens."""
    return [Work(result, ran) for ran in result.ran if ran.role != "encode"]


@dataclass(frozen=True)
class RunWork:
    """The work of a whole run: sums over its kinds of replicas, or means, each kind by its share of the decoding."""

    result: Result

    @cached_property
    def kinds(self) -> list[Work]:
        return works(self.result)

    def _mean(self, of: Callable[[Work], dict[str, float]], weights: list[float]) -> dict[str, float]:
        """The mean over kinds, of those with a weight."""
        total = math.fsum(weights)
        parts = [(weight / total, of(work)) for weight, work in zip(weights, self.kinds, strict=True) if weight]
        return {name: math.fsum(share * part[name] for share, part in parts) for name in parts[0][1]}

    @cached_property
    def moved(self) -> dict[str, float]:
        """MOVED of all steps."""
        every = [work.moved for work in self.kinds]
        return {name: math.fsum(moved[name] for moved in every) for name in MOVED}

    @property
    def mean_moved(self) -> dict[str, float]:
        """The same of the run's mean step."""
        return {name: amount / self.result.num_steps for name, amount in self.moved.items()}

    @property
    def visits(self) -> int:
        return sum(work.visits for work in self.kinds)

    @property
    def decodes(self) -> int:
        return sum(work.decodes for work in self.kinds)

    @cached_property
    def _by_decoding(self) -> list[float]:
        return [float(work.visits) for work in self.kinds]

    @cached_property
    def _by_prompts(self) -> list[float]:
        return [float(work.computed_prompts) for work in self.kinds]

    @cached_property
    def decode_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Work.decode_step of the mean kind."""
        if not self.visits:
            return dict.fromkeys(RESOURCES, 0.0), dict.fromkeys(MOVED, 0.0)
        seconds = self._mean(lambda work: work.decode_step()[0], self._by_decoding)
        return seconds, self._mean(lambda work: work.decode_step()[1], self._by_decoding)

    @cached_property
    def mean_step(self) -> dict[str, float]:
        """Work.mean_step of the mean kind that decodes; of the mean one that computes prompts if none does."""
        return self._mean(Work.mean_step, self._by_decoding if self.visits else self._by_prompts)

    @cached_property
    def excess(self) -> dict[str, float]:
        """What the mean step of those that decode takes longer than a pure decode step, by resource."""
        return self._mean(lambda work: work.excess, self._by_decoding if self.visits else self._by_prompts)

    @cached_property
    def prompt_step(self) -> dict[str, float]:
        """Seconds by resource of a step with a prompt, of the mean kind that computes them."""
        if not any(self._by_prompts):
            return self.mean_step
        return self._mean(Work.prompt_step, self._by_prompts)

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were found in a prefix cache."""
        r = self.result.requests[self.result.requests["num_output_tokens"] > 0]
        prompts = int(r["prompt_tokens"].sum())
        return int(r["num_cached_tokens"].sum()) / prompts if prompts else 0.0

    @cached_property
    def prompt_share(self) -> float:
        """Share of the busy time that prompts take: what steps take longer than pure decode steps."""
        if not self.result.busy_time:
            return 0.0
        decode = sum(work.decode_share * work.busy_time for work in self.kinds) / self.result.busy_time
        return min(max(1 - decode, 0.0), 1.0)

    def facts(self) -> dict[str, Any]:
        """Steps, bytes and shares of the peaks while devices were busy, JSON-ready."""
        steps, busy = self.result.num_steps, sum(work.busy_time for work in self.kinds)
        outputs = int(self.result.requests["num_output_tokens"].sum())
        return {
            "steps_per_output_token": steps / outputs if outputs else None,
            "mean_step_ms": self.result.busy_time / steps * 1e3 if steps else None,
            "decode_batch": self.decode_batch,
            "bytes_per_step": {kind: self.moved[kind] / steps for kind in KINDS} if steps else None,
            "bandwidth_share": self.moved["seconds_at_bandwidth"] / busy if busy else None,
            "compute_share": self.moved["seconds_at_peak"] / busy if busy else None,
        }

    @property
    def decode_batch(self) -> float:
        """Sequences that a step of those kinds that decode has, on average."""
        steps = sum(work.num_steps for work in self.kinds if work.visits)
        return self.visits / steps if steps else 0.0

    def preempted_time(self) -> float:
        """Seconds that preempted requests spent waiting to be resumed, all together: the engine's own integral of
        waiting requests, less their waits for admission."""
        r = self.result.requests
        if not r["num_preemptions"].any():
            return 0.0
        came = r[(r["status"] == COMPLETED) & (r["scheduled"] >= 0)]
        admission = float((came["scheduled"] - came["visible"]).sum())
        return max(0.0, self.result.waiting_time - admission)


def _between(table: np.ndarray, row: float) -> np.ndarray:
    """f8[9]: the table at a row that need not be whole."""
    low = min(int(row), len(table) - 1)
    high = min(low + 1, len(table) - 1)
    return table[low] + (table[high] - table[low]) * (row - low)
