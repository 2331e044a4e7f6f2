"""One replica, lowered: a deployment's knobs as numbers and its tables of seconds, as the engine wants them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from infersim.config.drafting import LAYERS
from infersim.config.early_exit import EarlyExit
from infersim.config.engine import ResolvedEngine
from infersim.config.hardware import Hardware
from infersim.config.lora import Lora
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.speculation import Speculation
from infersim.cost.batch import batch_time, draft_time
from infersim.cost.depth import with_early_exit
from infersim.cost.drafting import compile_draft_cost, drafter_placement, seen_by, verification_engine
from infersim.cost.efficiency import efficiency
from infersim.cost.lora import with_adapter_kernels
from infersim.cost.memory import MAX_BLOCKS, Memory
from infersim.cost.operator import Operator
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.steptime import compile_step_cost, provenance
from infersim.engine.knobs import lowered
from infersim.engine.price import DraftCost, StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.models.architecture import Model
from infersim.workload.acceptance import acceptance_table

MAX_TIER_BLOCKS = 2**29  # the compiled engine's integers count the blocks of all tiers together
GOODPUT_CONTEXT = 1024  # tokens of context at which drafts by goodput are chosen


@dataclass(frozen=True)
class Deployment:
    """One replica of a model on a kind of device."""

    placement: Placement
    engine: ResolvedEngine
    memory: Memory
    speculation: Speculation | None = None
    early_exit: EarlyExit | None = None
    lora: Lora | None = None
    num_sequences: int = 1
    """of each request: more than one are a group"""
    beam_turnover: float = 0.0

    @property
    def model(self) -> Model:
        return self.placement.model

    @property
    def hardware(self) -> Hardware:
        return self.placement.hardware

    @property
    def precision(self) -> Precision:
        return self.placement.precision

    @property
    def parallelism(self) -> Parallelism:
        return self.placement.parallelism

    @cached_property
    def shortest_pass(self) -> list[Operator]:
        """What a token has to go through at least: layers up to the first exit where any leave."""
        placement, exits = self.placement, self.early_exit
        if exits is not None:
            layers = [n for n, share in zip(exits.exit_layers, exits.token_shares, strict=False) if share > 0]
            model = replace(placement.model, layers=placement.model.layers[: min(layers, default=None)])
            placement = replace(placement, model=model)
        return forward_pass(placement)

    @cached_property
    def provenance(self) -> list[dict[str, str | float]]:
        """One row per operator class and dtype: its efficiencies, where they come from and who says so."""
        return provenance(self.placement)

    def step_cost(self) -> StepCost:
        """The engine's tables of seconds, made once: nobody may write to them. Each call gives an object of its own,
        since what one kind of replicas spends is told from another's by it (Fleet.time_of)."""
        return replace(self._step_cost)

    @cached_property
    def _step_cost(self) -> StepCost:
        return _fixed(self._priced())

    def _priced(self) -> StepCost:
        k = self.speculation.num_speculative_tokens if self.speculation else 0
        engine = verification_engine(self.engine, k)
        cost = compile_step_cost(self.placement, engine)
        if self.lora is not None:
            cost = with_adapter_kernels(cost, self.placement, engine)
        if self.speculation and (drafter := drafter_placement(self.speculation, self.placement)):
            cost = seen_by(drafter, cost)
        if self.early_exit is not None:
            cost = with_early_exit(cost, self.early_exit, self.model, self.engine.max_num_seqs)
        return cost

    def draft_cost(self) -> DraftCost | None:
        """What drafting adds to them; made once as well."""
        return replace(self._draft_cost) if self._draft_cost else None

    @cached_property
    def _draft_cost(self) -> DraftCost | None:
        spec = self.speculation
        return _fixed(compile_draft_cost(spec, self.placement, self.engine)) if spec else None

    @property
    def accelerators(self) -> list[tuple[Hardware, int]]:
        """Each kind of accelerator, and how many of it the replica has."""
        found = [(self.hardware, self.parallelism.num_gpus)]
        apart = self.speculation and self.speculation.drafter
        return [*found, (apart.hardware or self.hardware, 1)] if apart else found

    def replica(self) -> ReplicaSpec:
        """All that the engine needs of a replica."""
        return ReplicaSpec(self.knobs(), self.step_cost(), self.draft_cost(), self._drafts)

    @property
    def _host_block_time(self) -> float:
        """Seconds of one GPU's part of a KV block over PCIe."""
        assert self.hardware.pcie_bandwidth is not None  # else what needs it is refused
        return self.memory.block_bytes / self.hardware.pcie_bandwidth

    @cached_property
    def _drafts(self) -> np.ndarray | None:
        """i4[max_num_seqs + 1]: drafts of a sequence by running sequences."""
        if self.speculation is None or self._draft_cost is None:
            return None
        sizes, most = self.speculation.num_speculative_tokens_per_batch_size, self.speculation.num_speculative_tokens
        running = np.arange(self.engine.max_num_seqs + 1)
        if sizes is None:
            return np.full(len(running), most, "i4")
        if sizes == "goodput":
            sizes = self._best_drafts(self._step_cost, self._draft_cost, most)
        drafts = np.zeros(len(running), "i4")
        for first, k in sizes:
            drafts[first:] = k
        return drafts

    def _best_drafts(self, cost: StepCost, draft: DraftCost, most: int) -> list[tuple[int, int]]:
        """[running sequences from here on, drafts with the most tokens per second] after GOODPUT_CONTEXT tokens."""
        assert self.speculation is not None
        table = acceptance_table(self.speculation)
        chances = (table.accepted[:, 0] * table.share[:, None]).sum(axis=0)
        result = []
        room = len(cost.head) - 1  # tokens to sample in one step, drafts included
        limit = min(self.engine.max_num_seqs, max(room // (1 + most), 1))
        for batch in dict.fromkeys(np.geomspace(1, limit, 40).astype(int).tolist()):

            def rate(k: int, batch=batch) -> float:
                seconds = batch_time(cost, batch, GOODPUT_CONTEXT, k) + draft_time(
                    draft, cost, batch, GOODPUT_CONTEXT, k
                )
                return (1 + chances[:k].sum()) / seconds

            result.append((batch, max(range(min(most, room // batch - 1) + 1), key=rate)))
        return result

    def knobs(self, max_concurrency: int = 0):
        """A state.KNOBS record; max_concurrency is the client's limit, 0 for none."""
        engine = self.engine
        return make_knobs(
            **{name: getattr(engine, knob.name) for name, knob in lowered().items() if name != "host_token_time"}
            | self._drafter_knobs,
            ranks=self.parallelism.attention_data,
            block_size=self.memory.block_size,
            num_gpu_blocks=self.memory.num_gpu_blocks,
            watermark_blocks=int(engine.watermark * self.memory.num_gpu_blocks),
            steps_in_flight=2 if engine.async_scheduling else self.parallelism.pipeline,
            max_concurrency=max_concurrency,
            kv_window=[group.window for group in self.memory.kv_groups],
            kv_multiplicity=[group.tables for group in self.memory.kv_groups],
            enable_prefix_caching=engine.enable_prefix_caching and engine.prefix_cache == "blocks",
            radix=engine.enable_prefix_caching and engine.prefix_cache == "radix",
            jump_tokens=engine.jump_forward_tokens if engine.jump_forward_share > 0 else 0,
            jump_chance=self._jump_chance,
            num_cpu_blocks=self._num_cpu_blocks,
            swap_block_time=self._host_block_time if self._num_cpu_blocks else 0.0,
            num_sequences=self.num_sequences,
            beam_turnover=self.beam_turnover,
            copy_block_time=self._copy_block_time if self.num_sequences > 1 else 0.0,
            **self._tiers,
            num_layers=self.model.num_layers,
            lookahead=self._lookahead,
            host_sequence_time=engine.host_sequence_time + engine.grammar_mask_time,
            host_token_time=engine.host_token_time / engine.stream_interval,  # a chunk is sent at once
        )

    @property
    def _jump_chance(self) -> float:
        """After a sampled token: a share s of the output is forced if chance * tokens = s / (1 - s)."""
        share = self.engine.jump_forward_share
        return share / (1 - share) / self.engine.jump_forward_tokens

    @property
    def _num_cpu_blocks(self) -> int:
        swaps = self.engine.preemption_mode == "swap"
        return min(int(self.engine.swap_space / self.memory.block_bytes), MAX_BLOCKS) if swaps else 0

    @property
    def _copy_block_time(self) -> float:
        """A block is read and written once (vLLM's copy_blocks, whose one launch in a step is left out)."""
        copied = efficiency(self.hardware, "elementwise", self.precision.activations)
        return 2 * self.memory.block_bytes / (copied.bandwidth * self.hardware.memory_bandwidth)

    @property
    def _tiers(self) -> dict[str, list[float]]:
        """Knobs of the tiers below the GPU: each GPU has its share of them and its own PCIe link, one disk is read for
        all of them."""
        engine, size = self.engine, self.memory.block_bytes
        if engine.kv_offloading_size == 0:
            return {}
        gpus = self.parallelism.kv_gpus
        room = (engine.kv_offloading_size, engine.kv_offloading_disk_size)
        disk = size * gpus / engine.kv_offloading_disk_bandwidth if engine.kv_offloading_disk_bandwidth else 0.0
        return {
            "tier_blocks": [min(int(each / (size * gpus)), MAX_TIER_BLOCKS) for each in room],
            "tier_latency": [engine.kv_offloading_latency, engine.kv_offloading_disk_latency],
            "tier_block_time": [self._host_block_time, disk],
        }

    @property
    def _drafter_knobs(self) -> dict[str, int]:
        """How vLLM schedules sequences that draft."""
        spec, engine = self.speculation, self.engine
        if spec is None:
            return {}
        pads = engine.pads_drafts != "never" and spec.num_speculative_tokens_per_batch_size is None
        in_step, beforehand = (engine.drafting_slots == each for each in ("in-step", "max-num-seqs"))
        return {
            "max_num_batched_tokens": engine.max_num_batched_tokens
            - beforehand * spec.draft_slots * engine.max_num_seqs,
            "draft_slots": in_step * spec.draft_slots,
            "padded_drafts": spec.num_speculative_tokens if pads else 0,
            "drop_last_hit": int(engine.engine == "vllm" and spec.how.kind in LAYERS),
        }

    @property
    def _lookahead(self) -> int:
        """Tokens for which a running sequence takes blocks beyond those of its step: drafters with keys write there."""
        spec = self.speculation
        return spec.num_speculative_tokens if spec and spec.writes_keys else 0


def _fixed(cost: Any) -> Any:
    """The same, whose tables nobody can write to."""
    for table in vars(cost).values():
        if isinstance(table, np.ndarray):
            table.flags.writeable = False
    return cost


class EncoderDeployment(Deployment):
    """A replica that encodes images: a step is a batch of whole images, and has no LM head."""

    def _priced(self) -> StepCost:
        cost = super()._priced()
        attention = cost.attention.copy()
        attention["prefill_compute"] *= 2.0  # every patch sees all of its image, where a token sees those before it
        return replace(cost, head=np.zeros_like(cost.head), attention=attention)
