"""A description made concrete: the model, the engine's settings on this device, and what its memory holds."""

from dataclasses import dataclass, replace

import numpy as np

from .cost.attention_io import with_attention_kernel
from .cost.depth import with_early_exit
from .cost.drafting import (
    batch_time,
    compile_draft_cost,
    draft_time,
    own_bytes,
    verification_engine,
    with_drafter,
)
from .cost.memory import Memory, longest_sequence, memory_waterfall
from .cost.steptime import compile_step_cost
from .engine.fleet import ReplicaSpec, make_knobs
from .engine.price import DraftCost, StepCost
from .models.architecture import Model
from .models.catalog import load_model
from .spec.cluster import Kind
from .spec.early_exit import EarlyExit
from .spec.engine import Engine, ResolvedEngine, resolve
from .spec.errors import InputError
from .spec.hardware import Hardware, with_kernels_of
from .spec.parallelism import Parallelism
from .spec.precision import Precision
from .spec.scenario import Scenario
from .spec.speculation import Speculation
from .workload.acceptance import acceptance_table

FAMILY = ("order", "reserve", "admit_when_idle", "retracts", "late_hits", "clip_max_new_tokens", "new_token_ratio",
          "min_new_token_ratio", "new_token_ratio_decay")  # fmt: skip
"""knobs in which engines differ and that both sides call the same"""


@dataclass(frozen=True)
class Deployment:
    """One replica of a model on a kind of device."""

    model: Model
    hardware: Hardware
    precision: Precision
    parallelism: Parallelism
    engine: ResolvedEngine
    memory: Memory
    speculation: Speculation | None = None
    early_exit: EarlyExit | None = None

    def step_cost(self) -> StepCost:
        """The engine's tables of seconds."""
        k = self.speculation.num_speculative_tokens if self.speculation else 0
        cost = compile_step_cost(*self._parts, verification_engine(self.engine, k))
        if self.early_exit is not None:
            cost = with_early_exit(cost, self.early_exit, self.model, self.engine.max_num_seqs)
        return cost

    def draft_cost(self) -> DraftCost | None:
        """What drafting adds to them."""
        return compile_draft_cost(self.speculation, *self._parts, self.engine) if self.speculation else None

    @property
    def _parts(self) -> tuple[Model, Hardware, Precision, Parallelism]:
        return self.model, self.hardware, self.precision, self.parallelism

    def replica(self) -> ReplicaSpec:
        """All that the engine needs of a replica."""
        cost, draft = self.step_cost(), self.draft_cost()
        return ReplicaSpec(self.knobs(), cost, draft, self._drafts(cost, draft) if draft else None)

    def _drafts(self, cost: StepCost, draft: DraftCost) -> np.ndarray:
        """i4[max_num_seqs + 1]: drafts of a sequence by running sequences."""
        sizes, most = self.speculation.num_speculative_tokens_per_batch_size, self.speculation.num_speculative_tokens
        running = np.arange(self.engine.max_num_seqs + 1)
        if sizes is None:
            return np.full(len(running), most, "i4")
        if sizes == "goodput":
            sizes = self._best_drafts(cost, draft, most)
        drafts = np.zeros(len(running), "i4")
        for first, k in sizes:
            drafts[first:] = k
        return drafts

    def _best_drafts(self, cost: StepCost, draft: DraftCost, most: int) -> list[tuple[int, int]]:
        """[running sequences from here on, drafts with the most tokens per second] after GOODPUT_CONTEXT tokens."""
        table = acceptance_table(self.speculation)
        chances = (table.accepted[:, 0] * table.share[:, None]).sum(axis=0)
        result = []
        limit = min(self.engine.max_num_seqs, (len(cost.head) - 1) // (1 + most))
        for batch in dict.fromkeys(np.geomspace(1, limit, 40).astype(int).tolist()):

            def rate(k: int, batch=batch) -> float:
                seconds = batch_time(cost, batch, GOODPUT_CONTEXT, k) + draft_time(draft, batch, GOODPUT_CONTEXT, k)
                return (1 + chances[:k].sum()) / seconds

            result.append((batch, max(range(most + 1), key=rate)))
        return result

    def knobs(self, max_concurrency: int = 0):
        """A state.KNOBS record; max_concurrency is the client's limit, 0 for none."""
        engine = self.engine
        return make_knobs(
            block_size=self.memory.block_size,
            num_gpu_blocks=self.memory.num_gpu_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
            watermark_blocks=int(engine.watermark * self.memory.num_gpu_blocks),
            steps_in_flight=max(2 if engine.async_scheduling else 1, self.parallelism.pipeline),
            max_concurrency=max_concurrency,
            kv_window=[group.window for group in self.memory.kv_groups],
            kv_multiplicity=[group.tables for group in self.memory.kv_groups],
            chunked_prefill=engine.chunked_prefill,
            skip_unfit_prefill=engine.skip_unfit_prefill,
            long_prefill_needs_contention=engine.long_prefill_needs_contention,
            reserve_full_isl=engine.reserve_full_isl,
            async_scheduling=engine.async_scheduling,
            enable_prefix_caching=engine.enable_prefix_caching,
            **{name: getattr(engine, name) for name in FAMILY},
            lookahead=self._lookahead,
            host_step_time=engine.host_step_time,
            host_sequence_time=engine.host_sequence_time,
            host_request_time=engine.host_request_time,
        )

    @property
    def _lookahead(self) -> int:
        """Tokens for which a running sequence takes blocks beyond those of its step: drafters with keys write there."""
        spec = self.speculation
        return spec.num_speculative_tokens if spec and spec.method in ("draft_model", "eagle", "eagle3", "mtp") else 0


GOODPUT_CONTEXT = 1024  # tokens of context at which drafts by goodput are chosen


def deploy(
    model_name: str,
    hardware: Hardware,
    precision: Precision,
    parallelism: Parallelism,
    engine: Engine,
    speculation: Speculation | None = None,
    early_exit: EarlyExit | None = None,
) -> Deployment:
    """Resolve names and defaults, and divide the memory. InputError if the server would not start.

    A max_model_len that nobody asked for is lowered to what the KV cache holds (vLLM: --max-model-len auto).
    """
    model = load_model(model_name)
    resolved = resolve(engine, hardware, model.max_position_embeddings)
    hardware = with_kernels_of(hardware, resolved.preset.partition("-")[0])
    hardware = with_attention_kernel(hardware, resolved.attention_kernel)
    if engine.max_model_len is None:
        longest = longest_sequence(model, hardware, precision, parallelism, resolved)
        if longest < resolved.max_model_len:
            origin = {**resolved.origin, "max_model_len": "limited by the KV cache"}
            resolved = replace(resolved, max_model_len=longest, origin=origin)
    memory = memory_waterfall(model, hardware, precision, parallelism, resolved)
    if resolved.enable_prefix_caching and any(group.window == 1 for group in memory.kv_groups):
        origin = {**resolved.origin, "enable_prefix_caching": "off: the model has recurrent state"}
        resolved = replace(resolved, enable_prefix_caching=False, origin=origin)
    if speculation is not None:
        memory, resolved = _beside_drafter(model, hardware, precision, parallelism, resolved, memory, speculation)
    if speculation is not None and early_exit is not None:
        raise InputError("early_exit: is not modelled together with speculation; one of them must be null")
    return Deployment(model, hardware, precision, parallelism, resolved, memory, speculation, early_exit)


def _beside_drafter(
    model: Model,
    hardware: Hardware,
    precision: Precision,
    parallelism: Parallelism,
    engine: ResolvedEngine,
    memory: Memory,
    speculation: Speculation,
) -> tuple[Memory, ResolvedEngine]:
    """Memory and engine when the drafter has taken its part. InputError if speculation does not go with the rest."""
    if parallelism.pipeline > 1 or parallelism.attention_data > 1:
        raise InputError(
            "speculation: is not modelled with pipeline or data-parallel attention yet; parallelism.pipeline and"
            " parallelism.attention_data must be 1"
        )
    if engine.late_hits == "wait" and engine.enable_prefix_caching:
        raise InputError(
            f"speculation: is not modelled with the prefix cache of {engine.preset}, which waits for text that is being"
            " computed; engine.enable_prefix_caching must be false"
        )
    if engine.max_num_seqs * (1 + speculation.num_speculative_tokens) > MAX_LOGITS:
        raise InputError(
            f"speculation.num_speculative_tokens: {engine.max_num_seqs} sequences of"
            f" {1 + speculation.num_speculative_tokens} tokens are too many; engine.max_num_seqs must be smaller"
        )
    weights, kv = own_bytes(speculation, model, hardware, precision, parallelism)
    memory = with_drafter(memory, weights, kv)
    tables = sum(group.tables for group in memory.kv_groups)
    longest = (memory.num_gpu_blocks - 1) // tables * memory.block_size
    if engine.max_model_len > longest:
        if engine.origin["max_model_len"] == "user":
            raise InputError(
                f"engine.max_model_len: one sequence of {engine.max_model_len} tokens does not fit beside the drafter;"
                f" must be at most {longest}"
            )
        origin = {**engine.origin, "max_model_len": "limited by the KV cache"}
        engine = replace(engine, max_model_len=longest, origin=origin)
    return memory, engine


MAX_LOGITS = 2**20  # rows of the LM head's table


def deployments_of(scenario: Scenario) -> list[tuple[Deployment, Kind]]:
    """Each kind of replica that a scenario describes, in the order of their numbers. InputError if models differ."""
    cluster = scenario.cluster
    kinds = [(_deployment(scenario, kind), kind) for kind in cluster.groups]
    first = kinds[0][0].model
    for number, (deployment, _) in enumerate(kinds):
        if deployment.model != first:
            if cluster.prefill:
                where, right = "cluster.prefill.model", "that of the decode replicas, whose KV it computes"
            else:
                where, right = f"cluster.kinds.{number}.model", "that of kinds.0: any replica may get any request"
            raise InputError(f"{where}: must be {right} (got {deployment.model.name} and {first.name})")
    return kinds


def _deployment(scenario: Scenario, kind: Kind) -> Deployment:
    names = ("model", "hardware", "precision", "parallelism", "engine")
    own = (getattr(kind, name) for name in names)
    parts = (getattr(scenario, name) if mine is None else mine for name, mine in zip(names, own, strict=True))
    return deploy(*parts, scenario.speculation, scenario.early_exit)


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that a scenario describes; of several kinds the first."""
    return deployments_of(scenario)[0][0]
