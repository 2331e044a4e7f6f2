"""The kinds of replicas that a scenario describes."""

from dataclasses import replace
from typing import Any

from infersim.config.cluster import EncodePool, Kind
from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.config.units import short
from infersim.cost.memory import memory_waterfall
from infersim.cost.placement import Placement
from infersim.models.architecture import MLP, Attention, Layer, Model

from .compatibility import check
from .groups import asked_by, with_groups
from .lower import Deployment, EncoderDeployment
from .resolve import deploy, resolve


def deployments_of(scenario: Scenario) -> list[tuple[Deployment, Kind | EncodePool]]:
    """Each kind of replica that a scenario describes, in the order of their numbers.

    InputError if models differ and requests do not say which they ask for, or if two have one name.
    """
    cluster, workload = scenario.cluster, scenario.workload
    about = {"cluster": cluster, "workload": workload}
    check(**about)
    kinds = [(_deployment(scenario, kind), kind) for kind in cluster.groups if isinstance(kind, Kind)]
    check(**about, asked=asked_by(workload), group_sizes={deployment.num_sequences for deployment, _ in kinds})
    served = [served_name(*each) for each in kinds]
    lora = [deployment.lora.adapters if deployment.lora else {} for deployment, _ in kinds]
    owners = dict(zip(served, served, strict=True))
    store = [_kv(deployment) for deployment, _ in kinds]
    for (deployment, kind), where, name, own in zip(kinds, cluster.group_names, served, lora, strict=False):
        same = served.index(name)
        taken = [short(each)[1:-1] for each in own if each in served or owners.setdefault(each, name) != name]
        check(
            **about, where=where, parallelism=deployment.parallelism, model=deployment.model,
            hardware=deployment.hardware, first=kinds[0][0].model,
            served=name, namesake=kinds[same][0].model, adapters=own, namesakes_adapters=lora[same], taken=taken,
            asked_load=(kind.engine or scenario.engine).kv_offloading_load is not None,
            offloads=deployment.engine.kv_offloading_size > 0, first_kv=store[0], kv_width=_kv(deployment)[1],
            keeps_blocks=deployment.knobs()["enable_prefix_caching"] and not deployment.knobs()["kv_window"].any()
        )  # fmt: skip
    caches = any(deployment.engine.enable_prefix_caching for deployment, _ in kinds)
    for where, router in cluster.routers.items():
        check(where=where, router=router, any_prefix_caching=caches)
    return [*kinds, (encoder_of(scenario), cluster.encode)] if cluster.encode else [*kinds]


OF_EVERY_STEP = (
    "max_num_batched_tokens", "gpu_memory_utilization", "async_scheduling", "host_step_time", "host_sequence_time",
    "host_request_time", "worker_step_time", "worker_sequence_time", "eager_launch_time", "fuse_norm_quant",
    "enforce_eager", "fuse_allreduce_rms", "attention_kernel",
)  # fmt: skip
"""knobs that an encoder obeys; the others are about text and its KV cache"""


def encoder_of(scenario: Scenario) -> EncoderDeployment:
    """The replica that encodes the scenario's images: in a step as many as the engine's token budget has prompt tokens
    for, at least one (vLLM, compute_mm_encoder_budget)."""
    pool, images = scenario.cluster.encode, scenario.workload.images
    assert pool is not None and images is not None  # one needs the other
    encoder, hardware = pool.encoder, pool.hardware or scenario.hardware
    patches = images.tokens * encoder.patches_per_token
    heads, width = encoder.num_attention_heads, encoder.hidden_size
    attention = Attention("full", heads, heads, width // heads, rope=False)
    layer = Layer(attention, MLP(encoder.intermediate_size, gated=encoder.gated), norm_params=2 * width)
    layers = (layer,) * encoder.num_hidden_layers
    model = Model("encoder", "vision transformer", width, 1, layers, False, patches + 1, 0, 0, 0)
    given = {name: getattr(scenario.engine, name) for name in OF_EVERY_STEP}
    plain = resolve(Engine(preset=scenario.engine.preset, **given), hardware, 1)
    at_once = max(plain.max_num_batched_tokens // images.tokens, 1)
    engine = replace(
        plain,
        max_model_len=patches + 1,
        max_num_batched_tokens=max(at_once * patches, patches + 1),
        max_num_seqs=at_once,
        enable_chunked_prefill=False,
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


def _kv(deployment: Deployment) -> tuple[Model, float]:
    """What a store keeps of it: the model's KV, and bytes per token."""
    gpus = deployment.parallelism.kv_gpus
    return deployment.model, deployment.memory.block_bytes * gpus / deployment.memory.block_size


def served_name(deployment: Deployment, kind: Kind) -> str:
    """What requests call its model."""
    return kind.served_model_name or deployment.model.name


def _deployment(scenario: Scenario, kind: Kind) -> Deployment:
    def of(name: str) -> Any:
        mine = getattr(kind, name)
        return getattr(scenario, name) if mine is None else mine

    speculation = scenario.speculation
    cluster = scenario.cluster
    if speculation and speculation.drafter and kind is cluster.prefill and not cluster.role_switch:
        speculation = None  # who only computes prompts has no use for a drafter
    parts = of("model"), of("hardware"), of("precision"), of("parallelism"), of("engine")
    deployment = deploy(*parts, speculation, scenario.early_exit, kind.lora or scenario.lora)
    return with_groups(deployment, scenario.workload)


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that a scenario describes; of several kinds the first."""
    return deployments_of(scenario)[0][0]
