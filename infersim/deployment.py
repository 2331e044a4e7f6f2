"""A description made concrete: the model, the engine's settings on this device, and what its memory holds."""

from dataclasses import dataclass, replace

import numpy as np

from .config.cluster import Cluster, EncodePool, Kind
from .config.early_exit import EarlyExit
from .config.engine import Engine, ResolvedEngine, resolve
from .config.errors import InputError
from .config.hardware import Hardware, with_kernels_of
from .config.lora import Lora
from .config.parallelism import Parallelism
from .config.precision import Precision
from .config.scenario import Scenario
from .config.speculation import Speculation
from .config.units import short
from .config.workload import Workload
from .cost.attention_kernel import with_attention_kernel
from .cost.batch import batch_time, draft_time
from .cost.depth import with_early_exit
from .cost.drafting import (
    compile_draft_cost,
    drafter_placement,
    own_bytes,
    verification_engine,
    with_drafter,
)
from .cost.efficiency import efficiency
from .cost.lora import adapter_bytes, with_adapters
from .cost.memory import MAX_BLOCKS, Memory, longest_sequence, memory_waterfall
from .cost.placement import Placement
from .cost.steptime import compile_step_cost
from .engine.fleet import ReplicaSpec, make_knobs
from .engine.price import DraftCost, StepCost
from .models.architecture import MLP, Attention, Layer, Model
from .models.catalog import load_model
from .workload.acceptance import acceptance_table

FAMILY = ("order", "reserve", "allocator", "admit_when_idle", "retracts", "late_hits", "clip_max_new_tokens",
          "new_token_ratio", "min_new_token_ratio", "new_token_ratio_decay")  # fmt: skip
"""knobs in which engines differ and that both sides call the same"""


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

    def step_cost(self) -> StepCost:
        """The engine's tables of seconds."""
        k = self.speculation.num_speculative_tokens if self.speculation else 0
        cost = compile_step_cost(self.placement, verification_engine(self.engine, k))
        if self.early_exit is not None:
            cost = with_early_exit(cost, self.early_exit, self.model, self.engine.max_num_seqs)
        return cost

    def draft_cost(self) -> DraftCost | None:
        """What drafting adds to them."""
        return compile_draft_cost(self.speculation, self.placement, self.engine) if self.speculation else None

    @property
    def accelerators(self) -> list[tuple[Hardware, int]]:
        """Each kind of accelerator, and how many of it the replica has."""
        found = [(self.hardware, self.parallelism.num_gpus)]
        apart = self.speculation and self.speculation.drafter
        return [*found, (apart.hardware or self.hardware, 1)] if apart else found

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
                seconds = batch_time(cost, batch, GOODPUT_CONTEXT, k) + draft_time(
                    draft, cost, batch, GOODPUT_CONTEXT, k
                )
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
            steps_in_flight=2 if engine.async_scheduling else self.parallelism.pipeline,
            max_concurrency=max_concurrency,
            kv_window=[group.window for group in self.memory.kv_groups],
            kv_multiplicity=[group.tables for group in self.memory.kv_groups],
            chunked_prefill=engine.chunked_prefill,
            skip_unfit_prefill=engine.skip_unfit_prefill,
            long_prefill_needs_contention=engine.long_prefill_needs_contention,
            reserve_full_isl=engine.reserve_full_isl,
            async_scheduling=engine.async_scheduling,
            enable_prefix_caching=engine.enable_prefix_caching and engine.prefix_cache == "blocks",
            radix=engine.enable_prefix_caching and engine.prefix_cache == "radix",
            **{name: getattr(engine, name) for name in FAMILY},
            jump_tokens=engine.jump_forward_tokens if engine.jump_forward_share > 0 else 0,
            jump_chance=self._jump_chance,
            policy=engine.scheduling_policy,
            num_cpu_blocks=self._num_cpu_blocks,
            swap_block_time=self.memory.block_bytes / self.hardware.pcie_bandwidth if self._num_cpu_blocks else 0.0,
            num_sequences=self.num_sequences,
            beam_turnover=self.beam_turnover,
            copy_block_time=self._copy_block_time if self.num_sequences > 1 else 0.0,
            **self._tiers,
            lookahead=self._lookahead,
            host_step_time=engine.host_step_time,
            host_sequence_time=engine.host_sequence_time + engine.grammar_mask_time,
            host_request_time=engine.host_request_time,
            host_token_time=engine.host_token_time,
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
        gpus = self.parallelism.num_gpus // self.parallelism.attention_data
        room = (engine.kv_offloading_size, engine.kv_offloading_disk_size)
        disk = size * gpus / engine.kv_offloading_disk_bandwidth if engine.kv_offloading_disk_bandwidth else 0.0
        return {
            "tier_blocks": [min(int(each / (size * gpus)), MAX_TIER_BLOCKS) for each in room],
            "tier_latency": [engine.kv_offloading_latency, engine.kv_offloading_disk_latency],
            "tier_block_time": [size / self.hardware.pcie_bandwidth, disk],
        }

    @property
    def _lookahead(self) -> int:
        """Tokens for which a running sequence takes blocks beyond those of its step: drafters with keys write there."""
        spec = self.speculation
        return spec.num_speculative_tokens if spec and spec.writes_keys else 0


class EncoderDeployment(Deployment):
    """A replica that encodes images: a step is a batch of whole images, and has no LM head."""

    def step_cost(self) -> StepCost:
        cost = super().step_cost()
        attention = cost.attention.copy()
        attention["prefill_compute"] *= 2.0  # every patch sees all of its image, where a token sees those before it
        return replace(cost, head=np.zeros_like(cost.head), attention=attention)


MAX_TIER_BLOCKS = 2**29  # the compiled engine's integers count the blocks of all tiers together
GOODPUT_CONTEXT = 1024  # tokens of context at which drafts by goodput are chosen


def deploy(
    model_name: str,
    hardware: Hardware,
    precision: Precision,
    parallelism: Parallelism,
    engine: Engine,
    speculation: Speculation | None = None,
    early_exit: EarlyExit | None = None,
    lora: Lora | None = None,
) -> Deployment:
    """Resolve names and defaults, and divide the memory. InputError if the server would not start.

    A max_model_len that nobody asked for is lowered to what the KV cache holds (vLLM: --max-model-len auto).
    """
    model = load_model(model_name)
    resolved = resolve(engine, hardware, model.max_position_embeddings)
    if parallelism.pipeline > 1:
        resolved = _in_turn(resolved)
    hardware = with_kernels_of(hardware, resolved.preset.partition("-")[0])
    hardware = with_attention_kernel(hardware, resolved.attention_kernel)
    placement = Placement(model, hardware, precision, parallelism)
    if engine.max_model_len is None:
        longest = longest_sequence(placement, resolved)
        if longest < resolved.max_model_len:
            origin = {**resolved.origin, "max_model_len": "limited by the KV cache"}
            resolved = replace(resolved, max_model_len=longest, origin=origin)
    memory = memory_waterfall(placement, resolved)
    if resolved.enable_prefix_caching and any(group.window == 1 for group in memory.kv_groups):
        origin = {**resolved.origin, "enable_prefix_caching": "off: the model has recurrent state"}
        resolved = replace(resolved, enable_prefix_caching=False, origin=origin)
    if resolved.prefix_cache == "radix":
        resolved = _without_tree(resolved, memory)
    if any(group.window for group in memory.kv_groups):
        _refuse_copies_of_windows(resolved)
    if speculation is not None:
        memory, resolved = _beside_drafter(placement, resolved, memory, speculation)
    if lora is not None:
        slot = adapter_bytes(placement, lora.slot_rank)
        memory = with_adapters(memory, lora.max_loras * slot)
        resolved = _shortened(resolved, memory, "the adapters")
    if speculation is not None and early_exit is not None:
        raise InputError("early_exit: is not modelled together with speculation; one of them must be null")
    deployment = Deployment(placement, resolved, memory, speculation, early_exit, lora)
    _refuse_room_for_nothing(deployment)
    return deployment


def _refuse_room_for_nothing(deployment: Deployment) -> None:
    """InputError if the user gives memory for copies of blocks that is too small for one."""
    engine, size = deployment.engine, deployment.memory.block_bytes
    together = size * deployment.parallelism.num_gpus // deployment.parallelism.attention_data
    rooms = {"kv_offloading_size": together, "kv_offloading_disk_size": together}
    if engine.preemption_mode == "swap":
        rooms["swap_space"] = size
    problems = [
        f"engine.{name}: has no room for a KV block of {block:,.0f} B; must be 0, or at least that"
        for name, block in rooms.items()
        if 0 < getattr(engine, name) < block
    ]
    if problems:
        raise InputError(problems)


def _in_turn(engine: ResolvedEngine) -> ResolvedEngine:
    """The engine without asynchronous scheduling: in a pipeline a sequence is in one step at a time, since its next
    token enters the first stage when the last stage has made this one. InputError if the user wants it.

    vLLM never schedules two tokens of a request together there (pull request 32359), SGLang 0.5 and TensorRT-LLM 1.0 do
    not overlap schedules.
    """
    if engine.async_scheduling and engine.origin["async_scheduling"] == "user":
        raise InputError(
            "engine.async_scheduling: in a pipeline a token enters when the one before has left it; must be false with"
            " parallelism.pipeline above 1"
        )
    origin = {**engine.origin, "async_scheduling": "off: pipeline stages take turns"}
    return replace(engine, async_scheduling=False, origin=origin) if engine.async_scheduling else engine


def _without_tree(engine: ResolvedEngine, memory: Memory) -> ResolvedEngine:
    """The engine with another prefix cache if a radix tree is not modelled for these KV groups. InputError if the user
    wants one."""
    if [(group.window, group.tables) for group in memory.kv_groups] == [(0, 1)]:
        return engine
    why = "is not modelled for models with sliding windows or recurrent state"
    if engine.origin["prefix_cache"] == "user":
        raise InputError(f"engine.prefix_cache: radix {why}; must be blocks")
    if engine.scheduling_policy == "lpm":
        raise InputError(f"engine.scheduling_policy: lpm {why}; must be one of fcfs, priority, shortest-first")
    origin = {**engine.origin, "prefix_cache": f"a radix tree {why}"}
    return replace(engine, prefix_cache="blocks", origin=origin)


def _refuse_copies_of_windows(engine: ResolvedEngine) -> None:
    """InputError if blocks are to be copied to and from the CPU that a window drops, or that are a state."""
    problems = []
    if engine.kv_offloading_size > 0:
        problems.append(
            "engine.kv_offloading_size: is not modelled for sliding windows and recurrent states, which this model has;"
            " must be 0"
        )
    if engine.preemption_mode == "swap" and engine.enable_prefix_caching:
        problems.append(
            "engine.enable_prefix_caching: is not modelled together with swapping for sliding windows, which this model"
            " has; must be false, or engine.preemption_mode recompute"
        )
    if problems:
        raise InputError(problems)


def _beside_drafter(
    placement: Placement,
    engine: ResolvedEngine,
    memory: Memory,
    speculation: Speculation,
) -> tuple[Memory, ResolvedEngine]:
    """Memory and engine when the drafter has taken its part. InputError if speculation does not go with the rest."""
    if placement.parallelism.pipeline > 1 or placement.parallelism.attention_data > 1:
        raise InputError(
            "speculation: is not modelled with pipeline or data-parallel attention yet; parallelism.pipeline and"
            " parallelism.attention_data must be 1"
        )
    if engine.allocator != "paged":
        raise InputError("engine.allocator: drafts need memory that grows; must be paged under speculation")
    if engine.jump_forward_share > 0:
        raise InputError("engine.jump_forward_share: is not modelled together with drafts; must be 0 under speculation")
    if engine.preemption_mode == "swap":
        raise InputError(
            "engine.preemption_mode: drafts in flight are not modelled together with swapping; must be recompute under"
            " speculation"
        )
    if engine.max_num_seqs * (1 + speculation.num_speculative_tokens) > MAX_LOGITS:
        raise InputError(
            f"speculation.num_speculative_tokens: {engine.max_num_seqs} sequences of"
            f" {1 + speculation.num_speculative_tokens} tokens are too many; engine.max_num_seqs must be smaller"
        )
    weights, kv = own_bytes(speculation, placement)
    memory = with_drafter(memory, weights, kv)
    if speculation.drafter:
        memory = _as_drafter_holds(memory, drafter_placement(speculation, placement), engine)
    return memory, _shortened(engine, memory, "the drafter")


def _as_drafter_holds(memory: Memory, own: Placement, engine: ResolvedEngine) -> Memory:
    """No more KV blocks than a GPU of its own has for the draft model's keys and values. InputError if it has none."""
    try:
        alone = memory_waterfall(own, replace(engine, max_model_len=1))
    except InputError as error:
        raise InputError([f"speculation.drafter: {problem}" for problem in error.problems]) from None
    tables = sum(group.tables for group in memory.kv_groups)
    blocks = min(memory.num_gpu_blocks, alone.num_gpu_blocks * tables)
    return replace(
        memory,
        num_gpu_blocks=blocks,
        kv_bytes=blocks * memory.block_bytes,
        max_concurrency=memory.max_concurrency * blocks / memory.num_gpu_blocks,
    )


def _shortened(engine: ResolvedEngine, memory: Memory, beside: str) -> ResolvedEngine:
    """The engine with a max_model_len that fits what is left of the KV cache. InputError if the user's does not."""
    tables = sum(group.tables for group in memory.kv_groups)
    blocks = memory.num_gpu_blocks - 1
    if engine.allocator == "buddy":
        blocks = 1 << (blocks.bit_length() - 1)
    longest = blocks // tables * memory.block_size
    if engine.max_model_len <= longest:
        return engine
    if engine.origin["max_model_len"] == "user":
        raise InputError(
            f"engine.max_model_len: one sequence of {engine.max_model_len} tokens does not fit beside {beside};"
            f" must be at most {longest}"
        )
    origin = {**engine.origin, "max_model_len": "limited by the KV cache"}
    return replace(engine, max_model_len=longest, origin=origin)


MAX_LOGITS = 2**20  # rows of the LM head's table


def deployments_of(scenario: Scenario) -> list[tuple[Deployment, Kind | EncodePool]]:
    """Each kind of replica that a scenario describes, in the order of their numbers.

    InputError if models differ and requests do not say which they ask for, or if two have one name.
    """
    cluster, workload = scenario.cluster, scenario.workload
    if (cluster.encode is None) != (workload.images is None):
        raise InputError("cluster.encode and workload.images: one without the other is not modelled; give both")
    kinds = [(_deployment(scenario, kind), kind) for kind in cluster.groups if kind is not cluster.encode]
    _check_groups(cluster, workload, [deployment for deployment, _ in kinds])
    first = kinds[0][0].model
    named: dict[str, Model] = {}
    for (deployment, kind), where in zip(kinds, cluster.group_names, strict=False):
        got = f"(got {deployment.model.name} and {first.name})"
        if deployment.model != first and cluster.prefill:
            raise InputError(f"cluster.{where}.model: must be that of the decode replicas, whose KV it computes {got}")
        if deployment.model != first and not (workload.models or workload.model_column):
            raise InputError(
                f"cluster.{where}.model: must be that of kinds.0, unless workload.models says which model requests ask"
                f" for {got}"
            )
        name = served_name(deployment, kind)
        if named.setdefault(name, deployment.model) != deployment.model:
            raise InputError(f"cluster.{where}.served_model_name: {name} is another model already; must differ")
    _check_adapters(kinds, cluster.group_names)
    return [*kinds, (encoder_of(scenario), cluster.encode)] if cluster.encode else kinds


def _check_adapters(kinds: list[tuple[Deployment, Kind]], keys: list[str]) -> None:
    """InputError if an adapter has another model's name, or if only some of a model's replicas have it."""
    models = [served_name(deployment, kind) for deployment, kind in kinds]
    owner = {model: model for model in models}
    of_model: dict[str, dict[str, int]] = {}
    for (deployment, _), model, key in zip(kinds, models, keys, strict=False):
        own = deployment.lora.adapters if deployment.lora else {}
        if own != of_model.setdefault(model, own):
            raise InputError(f"cluster.{key}.lora.adapters: must be those of the other replicas of {model}")
        for adapter in own:
            if adapter in models or owner.setdefault(adapter, model) != model:
                raise InputError(f"cluster.{key}.lora.adapters: {short(adapter)} is another model's name; must differ")
        if own and deployment.hardware.pcie_bandwidth is None:
            raise InputError(
                f"hardware.pcie_bandwidth: missing; adapters are loaded over it ({deployment.hardware.name})"
            )


def encoder_of(scenario: Scenario) -> EncoderDeployment:
    """The replica that encodes the scenario's images: in a step as many as the engine's token budget has prompt tokens
    for, at least one (vLLM, compute_mm_encoder_budget)."""
    pool, images = scenario.cluster.encode, scenario.workload.images
    encoder, hardware = pool.encoder, pool.hardware or scenario.hardware
    patches = images.tokens * encoder.patches_per_token
    heads, width = encoder.num_attention_heads, encoder.hidden_size
    attention = Attention("full", heads, heads, width // heads, rope=False)
    layer = Layer(attention, MLP(encoder.intermediate_size, gated=encoder.gated), norm_params=2 * width)
    layers = (layer,) * encoder.num_hidden_layers
    model = Model("encoder", "vision transformer", width, 1, layers, False, patches + 1, 0, 0, 0)
    plain = resolve(Engine(preset=scenario.engine.preset), hardware, 1)
    at_once = max(plain.max_num_batched_tokens // images.tokens, 1)
    engine = replace(
        plain,
        max_model_len=patches + 1,
        max_num_batched_tokens=max(at_once * patches, patches + 1),
        max_num_seqs=at_once,
        chunked_prefill=False,
        enable_prefix_caching=False,
        order="running-first",
        reserve="first-chunk",
        allocator="paged",
    )
    placement = Placement(model, hardware)
    try:
        memory = memory_waterfall(placement, engine)
    except InputError as error:
        raise InputError([f"cluster.encode: {problem}" for problem in error.problems]) from None
    return EncoderDeployment(placement, engine, memory)


def served_name(deployment: Deployment, kind: Kind) -> str:
    """What requests call its model."""
    return kind.served_model_name or deployment.model.name


def _deployment(scenario: Scenario, kind: Kind) -> Deployment:
    names = ("model", "hardware", "precision", "parallelism", "engine")
    own = (getattr(kind, name) for name in names)
    parts = (getattr(scenario, name) if mine is None else mine for name, mine in zip(names, own, strict=True))
    speculation = scenario.speculation
    if speculation and speculation.drafter and kind is scenario.cluster.prefill:
        speculation = None  # who only computes prompts has no use for a drafter
    deployment = deploy(*parts, speculation, scenario.early_exit, kind.lora or scenario.lora)
    return _with_groups(deployment, scenario.workload)


def _with_groups(deployment: Deployment, workload: Workload) -> Deployment:
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


def _check_groups(cluster: Cluster, workload: Workload, deployments: list[Deployment]) -> None:
    """InputError for groups of sequences in a cluster that cannot have them."""
    key = "workload.beam_width" if workload.beam_width > 1 else "workload.n"
    grouped = {deployment.num_sequences > 1 for deployment in deployments}
    if len(grouped) > 1:
        raise InputError(f"{key}: some replicas make one group of a prompt's samples, others requests; must be alike")
    if True in grouped and (cluster.prefill or cluster.encode):
        raise InputError(
            f"{key}: groups of sequences are not handed over; cluster.prefill and cluster.encode must be null"
        )


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that a scenario describes; of several kinds the first."""
    return deployments_of(scenario)[0][0]
