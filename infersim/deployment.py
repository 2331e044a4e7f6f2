"""A description made concrete: the model, the engine's settings on this device, and what its memory holds."""

from dataclasses import dataclass, replace

from .cost.memory import Memory, longest_sequence, memory_waterfall
from .cost.steptime import compile_step_cost
from .engine.fleet import make_knobs
from .engine.price import StepCost
from .models.architecture import Model
from .models.catalog import load_model
from .spec.cluster import Kind
from .spec.engine import Engine, ResolvedEngine, resolve
from .spec.errors import InputError
from .spec.hardware import Hardware
from .spec.parallelism import Parallelism
from .spec.precision import Precision
from .spec.scenario import Scenario


@dataclass(frozen=True)
class Deployment:
    """One replica of a model on a kind of device."""

    model: Model
    hardware: Hardware
    precision: Precision
    parallelism: Parallelism
    engine: ResolvedEngine
    memory: Memory

    def step_cost(self) -> StepCost:
        """The engine's tables of seconds."""
        return compile_step_cost(self.model, self.hardware, self.precision, self.parallelism, self.engine)

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
            host_step_time=engine.host_step_time,
            host_sequence_time=engine.host_sequence_time,
            host_request_time=engine.host_request_time,
        )


def deploy(
    model_name: str, hardware: Hardware, precision: Precision, parallelism: Parallelism, engine: Engine
) -> Deployment:
    """Resolve names and defaults, and divide the memory. InputError if the server would not start.

    A max_model_len that nobody asked for is lowered to what the KV cache holds (vLLM: --max-model-len auto).
    """
    model = load_model(model_name)
    resolved = resolve(engine, hardware, model.max_position_embeddings)
    if engine.max_model_len is None:
        longest = longest_sequence(model, hardware, precision, parallelism, resolved)
        if longest < resolved.max_model_len:
            origin = {**resolved.origin, "max_model_len": "limited by the KV cache"}
            resolved = replace(resolved, max_model_len=longest, origin=origin)
    memory = memory_waterfall(model, hardware, precision, parallelism, resolved)
    return Deployment(model, hardware, precision, parallelism, resolved, memory)


def deployments_of(scenario: Scenario) -> list[tuple[Deployment, Kind]]:
    """Each kind of replica that a scenario describes, in the order of their numbers."""
    kinds = [(_deployment(scenario, kind), kind) for kind in scenario.cluster.groups]
    cluster = scenario.cluster
    if cluster.prefill and kinds[0][0].model != kinds[1][0].model:
        raise InputError(
            f"cluster.prefill.model: must be that of the decode replicas, whose KV it computes"
            f" (got {kinds[1][0].model.name} and {kinds[0][0].model.name})"
        )
    return kinds


def _deployment(scenario: Scenario, kind: Kind) -> Deployment:
    names = ("model", "hardware", "precision", "parallelism", "engine")
    own = (getattr(kind, name) for name in names)
    return deploy(*(getattr(scenario, name) if mine is None else mine for name, mine in zip(names, own, strict=True)))


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that a scenario describes; of several kinds the first."""
    return deployments_of(scenario)[0][0]
