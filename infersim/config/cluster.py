"""Several replicas behind one front door."""

from itertools import accumulate
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from .base import Description, Sparse
from .engine import Engine
from .hardware import Hardware
from .lora import Lora
from .parallelism import Parallelism
from .precision import Precision
from .router import Router, RouterOrPolicy
from .units import Bytes, BytesPerSecond, Count, CountOrZero, Number, Seconds, Share, Weight

Replicas = Annotated[Count, Field(le=10_000)]


class Startup(Description):
    """The time from the decision to start a replica until it serves."""

    node: Seconds = 0.0
    """time to get the machine and start the container"""
    load_bandwidth: Annotated[BytesPerSecond, Field(gt=0)] | None = None
    """rate at which weights are read; default: they take no time"""
    warmup: Seconds = 0.0
    """time for compilation and CUDA graphs"""
    sleep: bool = False
    """a replica that stops sleeps (vLLM's sleep mode, level 1): its weights go to the host's memory and come back over
    PCIe when it starts again, without `node`, `load_bandwidth` and `warmup`; its GPUs count as given up meanwhile"""


class Autoscaler(Description):
    """Starts and stops replicas so that a figure of each stays near its target, as Kubernetes' HPA does:
    wanted = ceil(ready x figure / target), unless that is within 10 % of what there is."""

    policy: Literal["outstanding", "queue", "kv_usage", "utilization", "ttft", "tpot", "predictive"] = "outstanding"
    """figure of one replica: requests in it, requests waiting, share of KV blocks held, share of time busy, mean TTFT
    or TPOT (s) of what ended since the last look; predictive: arrivals per second when a replica started now would be
    ready. What waits at the front door counts evenly for all replicas behind it"""
    target: Weight
    """the value of that figure to hold"""
    min: CountOrZero = 1
    """0: no replica runs while there is nothing to do, and the next request waits until one has started"""
    max: Replicas
    interval: Annotated[Seconds, Field(ge=0.01)] = 15.0
    """time between two decisions (HPA's default)"""
    scale_down_delay: Seconds = 300.0
    """replicas are removed once fewer have been enough for this long (HPA's default)"""
    startup: Startup = Startup()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min must not be above max (got {self.min} and {self.max})")
        return self


class Group(Sparse):
    """Some replicas that are alike; what is left out is the scenario's own."""

    replicas: Replicas = 1
    hardware: Hardware | None = None
    weight: Weight = 1.0
    """of router weighted-random"""
    autoscaler: Autoscaler | None = None
    """of these replicas; begins with `replicas`"""

    @property
    def most(self) -> int:
        """Replicas that there may be at one time."""
        return self.autoscaler.max if self.autoscaler else self.replicas


class Kind(Group):
    """Some replicas that are alike; what is left out is the scenario's own."""

    model: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    served_model_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """what requests call the model (vLLM's option); default: its own name"""
    parallelism: Parallelism | None = None
    precision: Precision | None = None
    engine: Engine | None = None
    lora: Lora | None = None


class Pool(Kind):
    """Replicas that only prefill or only decode, and the router in front of them."""

    router: RouterOrPolicy = Router(policy="least-outstanding")


class Encoder(Description):
    """A vision transformer in bf16 (names of Hugging Face's vision_config); every patch of an image sees all others."""

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    intermediate_size: Count
    gated: bool = False
    """whether its MLPs have three matrices"""
    patches_per_token: Count = 1
    """patches that become one token of the prompt: spatial_merge_size squared"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"num_attention_heads must divide hidden_size (got {self.num_attention_heads})")
        return self


class EncodePool(Group):
    """Replicas of one GPU that turn the images of prompts into embeddings; numbered last, and not among `replicas`.

    Of the scenario's engine they obey token budget, share of memory, times of host and launches, and kernels.
    """

    encoder: Encoder
    router: RouterOrPolicy = Router(policy="least-outstanding")

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism()


HandOver = Annotated[
    Annotated[Literal["always", "never"], Tag("Word")] | Annotated[CountOrZero, Tag("Tokens")],
    Discriminator(lambda value: "Word" if isinstance(value, str) else "Tokens"),
]


class Transfer(Description):
    """The link over which KV goes from prefill to decode replicas, and embeddings go from encode replicas; transfers at
    one time share it evenly."""

    bandwidth: Annotated[BytesPerSecond, Field(gt=0)]
    """of the whole link"""
    latency: Seconds = 0.0
    """time before the first byte arrives"""
    request_time: Seconds = 0.0
    """time per request that is handed over, beside its bytes: the front door's second hop, the connector's hand-shake
    """
    overlap: Literal["none", "layers"] = "none"
    """layers: each layer's KV is sent while the next are computed, so that most of it is there when prefill ends"""
    hand_over: HandOver = "always"
    """which prompts are computed by a prefill replica: always, never, or those of which the decode replica would have
    to compute at least so many tokens, as far as its router knows what it has cached (policies prefix-aware, kv-aware
    and weighted; with others nothing counts as cached)"""


class RoleSwitch(Description):
    """Replicas of the two pools change places when one pool is above its upper threshold and the other below its lower;
    one at a time, the idlest, and never a pool's last. It finishes its requests, gives up its prefix cache and keeps
    its weights (SGLang 0.5.23's /pd_role_switch; names and thresholds of Dynamo's load-based planner)."""

    interval: Annotated[Seconds, Field(ge=0.01)] = 30.0
    """time between two looks (Dynamo's adjustment-interval)"""
    prefill_queue_scale_up_threshold: Number = 5.0
    """requests that wait in a prefill replica, on average, above which one more is wanted"""
    prefill_queue_scale_down_threshold: Number = 0.2
    """and below which one may go"""
    decode_kv_scale_up_threshold: Share = 0.9
    """share of a decode replica's KV blocks that are held, on average, above which one more is wanted"""
    decode_kv_scale_down_threshold: Share = 0.5
    """and below which one may go"""
    switch_time: Seconds = 0.0
    """from when it has finished its requests until it serves in the other pool (queues and connections made anew;
    SGLang captures CUDA graphs when a prefill replica decodes first)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("prefill_queue", "decode_kv"):
            low, high = (getattr(self, f"{name}_scale_{way}_threshold") for way in ("down", "up"))
            if low > high:
                raise ValueError(f"{name}_scale_down_threshold must not be above {name}_scale_up_threshold")
        return self


class KvStore(Description):
    """Memory of many hosts that keeps the KV of requests that have ended for all replicas (Mooncake store, a remote
    backend of HiCache or LMCache), the least recently used leaving first. What a replica has not it loads from there,
    as `engine.kv_offloading_load` says; writing takes no time."""

    size: Annotated[Bytes, Field(gt=0)]
    bandwidth: Annotated[BytesPerSecond, Field(gt=0)]
    """of each replica's way there"""
    latency: Seconds = 0.0
    """of a load, beyond its bytes"""


class Admission(Description):
    """The front door holds requests back while every replica has enough of them; replicas refuse what is too much for
    them (HTTP 503), which clients may try again."""

    max_outstanding: Count | None = None
    """most requests in a replica; further ones wait at the front door, lowest priority number first"""
    max_queue: CountOrZero | None = None
    """most requests that wait at the front door for a model; above it the least urgent is refused; default: no limit"""
    max_num_queued_reqs: CountOrZero | None = None
    """most requests in a replica, waiting or running; it refuses a further one (vLLM 0.32); default: no limit"""
    max_num_queued_tokens: CountOrZero | None = None
    """prompt tokens of a replica's requests without a first token, from which on it refuses a further request (vLLM
    0.32: TTFT wanted x prefill throughput); default: no limit"""

    @property
    def refuses(self) -> bool:
        """Whether replicas refuse requests by themselves."""
        return self.max_num_queued_reqs is not None or self.max_num_queued_tokens is not None

    @model_validator(mode="after")
    def _some(self) -> "Admission":
        if self.max_outstanding is None and not self.refuses:
            raise ValueError("must give max_outstanding, max_num_queued_reqs or max_num_queued_tokens")
        if self.max_queue is not None and self.max_outstanding is None:
            raise ValueError("max_queue: nothing waits at the front door without max_outstanding; must be null")
        return self


class Failure(Description):
    """Something fails, at a stated or a random time, and is repaired after `duration`."""

    kind: Literal["crash", "slow", "partition"] = "crash"
    """crash: a replica loses its requests and its memory; slow: its steps take `factor` times as long; partition:
    nothing goes over the `transfer` link"""
    replica: CountOrZero | None = None
    """its number, from 0; decode replicas come before prefill, and these before encode replicas; default: 0, by chance
    every one"""
    at: Seconds | None = None
    """time since the start of the run"""
    mean_time_between: Annotated[Seconds, Field(ge=0.01)] | None = None
    """instead of `at`: from being whole to the next time, exponential, of each replica by itself; `duration` is then
    the mean time to repair, exponential too"""
    duration: Annotated[Seconds, Field(gt=0)] | None = None
    """how long it lasts; default: to the end of the run"""
    factor: Annotated[Number, Field(ge=1, le=1e6)] = 2.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.at is None) == (self.mean_time_between is None):
            raise ValueError("must have at or mean_time_between, and not both")
        return self


class Cluster(Sparse):
    """Copies of the engine: of one kind (`replicas`), of several (`kinds`), or in pools for `prefill` and `decode`."""

    replicas: Replicas = 1
    kinds: Annotated[list[Kind], Field(min_length=1, max_length=100)] | None = None
    """groups of replicas that differ, instead of `replicas`"""
    prefill: Pool | None = None
    """replicas that only compute prompts, and send the KV cache on"""
    decode: Pool | None = None
    """replicas that generate; their numbers come first"""
    encode: EncodePool | None = None
    """replicas that encode images; without them images are not modelled"""
    transfer: Transfer | None = None
    """the link between them"""
    role_switch: RoleSwitch | None = None
    """replicas of prefill and decode change places as the load asks; they must be alike"""
    kv_store: KvStore | None = None
    """a store of KV that all replicas share; replicas must be alike"""
    router: RouterOrPolicy = Router()
    """a policy, or a mapping with its settings"""
    admission: Admission | None = None
    """how many requests the front door lets in"""
    autoscaler: Autoscaler | None = None
    """starts and stops replicas; begins with `replicas`"""
    failures: tuple[Failure, ...] = ()
    """what fails, and when"""

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, data: Any) -> Any:
        """`replicas` of kinds or pools is their sum; given too (as `resolved` writes it), it must be."""
        if isinstance(data, dict) and data.get("replicas") is None:
            kinds = data.get("kinds")
            groups = [
                *(kinds if isinstance(kinds, list) else ()),
                *(data[name] for name in ("decode", "prefill") if data.get(name) is not None),
            ]
            counts = [group.get("replicas", 1) for group in groups if isinstance(group, dict)]
            if counts and all(isinstance(count, int) for count in counts):
                return data | {"replicas": max(sum(counts), 1)}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        groups = self.groups
        if (total := sum(group.replicas for group in groups if group is not self.encode)) != self.replicas:
            name = "kinds" if self.kinds else "prefill and decode"
            raise ValueError(f"{name} have {total} replicas and replicas is {self.replicas}; leave replicas out")
        if (self.prefill is None) != (self.decode is None):
            name = "decode" if self.prefill else "prefill"
            raise ValueError(f"{name}: missing; prefill, decode and transfer go together")
        if (self.prefill or self.encode) and not self.transfer:
            raise ValueError("transfer: missing; prefill, decode and encode need it")
        if self.transfer and not (self.prefill or self.encode):
            raise ValueError("transfer: is for prefill and decode, or for encode; give them or remove it")
        if (self.prefill or self.encode) and self.admission and self.admission.refuses:
            raise ValueError("admission: max_num_queued_reqs and max_num_queued_tokens are not modelled with pools")
        if self.prefill and self.kinds:
            raise ValueError("kinds: must not be given with prefill and decode, which are kinds themselves")
        if self.prefill and self.router != Router():
            raise ValueError("router: each pool has its own; give prefill.router and decode.router")
        if self.role_switch:
            self._check_role_switch()
        if self.autoscaler and (self.kinds or self.prefill):
            raise ValueError(f"autoscaler: each group has its own; give {self.group_names[0]}.autoscaler")
        for name, group in zip(self.group_names, groups, strict=True):
            if (scaler := group.autoscaler) and not scaler.min <= group.replicas <= scaler.max:
                where = name if name == "replicas" else f"{name}.replicas"
                raise ValueError(f"{where}: must lie between autoscaler.min and autoscaler.max (got {group.replicas})")
        for name, pool in (("prefill", self.prefill), ("decode", self.decode), ("encode", self.encode)):
            if pool and pool.autoscaler and not pool.autoscaler.min:
                raise ValueError(f"{name}.autoscaler.min: must be at least 1: what was computed must go somewhere")
        for number, failure in enumerate(self.failures):
            if failure.kind == "partition" and not self.transfer:
                raise ValueError(f"failures.{number}: a partition needs pools with a transfer link between them")
            if failure.replica is not None and failure.replica >= self.most:
                raise ValueError(
                    f"failures.{number}.replica: must be below {self.most}, the replicas are numbered from 0"
                    f" (got {failure.replica})"
                )
        return self

    def _check_role_switch(self) -> None:
        if not self.prefill or not self.decode:
            raise ValueError("role_switch: is between prefill and decode; give them or remove it")
        one, other = (pool.model_dump(exclude={"replicas", "router"}) for pool in (self.prefill, self.decode))
        if one != other:
            raise ValueError("role_switch: prefill and decode must be alike but for replicas and router")
        if self.prefill.autoscaler or self.failures:
            raise ValueError("role_switch: is not modelled with autoscalers and failures; remove them")

    @property
    def groups(self) -> list[Kind | EncodePool]:
        """The replicas in the order of their numbers."""
        if self.prefill and self.decode:
            groups: list[Kind | EncodePool] = [self.decode, self.prefill]
        else:
            groups = [*(self.kinds or [Kind(replicas=self.replicas, autoscaler=self.autoscaler)])]
        return [*groups, self.encode] if self.encode else groups

    @property
    def routers(self) -> dict[str, Router]:
        """Every router by its key."""
        pools = {"decode": self.decode, "prefill": self.prefill, "encode": self.encode}
        routers = {f"cluster.{name}.router": pool.router for name, pool in pools.items() if pool}
        return routers if self.prefill else {"cluster.router": self.router} | routers

    @property
    def interacts(self) -> bool:
        """Whether replicas have to do with one another, whatever the router."""
        scaled = any(group.autoscaler for group in self.groups)
        return bool(self.prefill or self.encode or self.admission or self.kv_store or scaled or self.failures)

    @property
    def most(self) -> int:
        """Replicas that there may be at one time."""
        return sum(group.most for group in self.groups)

    @property
    def ranges(self) -> list[range]:
        """The numbers of each group's replicas, those included that its autoscaler may start."""
        ends = list(accumulate(group.most for group in self.groups))
        return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]

    @property
    def group_names(self) -> list[str]:
        """The keys of `groups`."""
        names = [f"kinds.{number}" for number in range(len(self.kinds))] if self.kinds else ["replicas"]
        if self.prefill and self.decode:
            names = ["decode", "prefill"]
        return [*names, "encode"] if self.encode else names
