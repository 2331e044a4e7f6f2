"""What `infersim run --json` writes, key by key: the source of its JSON Schema.

Numbers are SI units unless a name ends in _ms; null where there is nothing to say. `schema_version` rises when a key
goes or changes its meaning; new keys may come without.
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from infersim.cost.memory import Memory
from infersim.engine.compiled.state import RESOURCES
from infersim.metrics.latency import METRICS, STATISTICS
from infersim.metrics.verdict import STATES

RATES = ("duration_s", "request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
LATENCIES = tuple(f"{statistic}_{metric}_ms" for metric in METRICS for statistic in STATISTICS)
if TYPE_CHECKING:
    from typing import TypeAlias

    Latency: TypeAlias = str
    Metric: TypeAlias = str
    State: TypeAlias = str
    Resource: TypeAlias = str
else:
    Latency, Metric = Literal[LATENCIES], Literal[(*RATES, *LATENCIES)]
    State, Resource = Literal[STATES], Literal[RESOURCES]
Role = Literal["serve", "prefill", "decode", "encode"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Counts(Part):
    submitted: int
    completed: int
    rejected: int
    timed_out: int
    lost: int
    unfinished: int
    preemptions: int
    retries: int
    """attempts of clients beyond the first"""


class Confidence(Part):
    level: float
    half_width: dict[Metric, float | None]
    """of the interval of the mean over replications (Student's t)"""


class Sampling(Part):
    level: float
    interval: dict[Latency, tuple[float, float | None]]
    """[low, high] as far as chance goes, from this run alone; high null: the run does not bound it"""


class ErrorBasis(Part):
    like: list[str]
    deployments: int
    loads: int


class ModelError(Part):
    level: float
    kind: dict[str, str]
    """what of the deployment counts as alike"""
    intervals: dict[Metric, tuple[float, float]]
    """within which `level` of measured deployments of the kind lie"""
    factors: dict[str, tuple[float, float]]
    """of measured over predicted"""
    basis: dict[str, ErrorBasis]
    text: list[str]


class Unknown(Part):
    input: str
    range: tuple[float, float]
    """times what was assumed"""
    intervals: dict[Metric, tuple[float, float]]
    text: str


class Limit(Part):
    name: str
    limit: float
    """ms"""
    value: float | None
    met: bool


class Slo(Part):
    met: bool | None
    """null: held in a run that is too short to tell whether it stays so"""
    limits: list[Limit]
    goodput_share: float | None
    """of the requests that could be served at all, those within the limits of one request"""


class Verdict(Part):
    state: State
    backlog_per_s: float
    """requests/s by which the backlog grows"""
    reason: str
    needed_requests: int | None
    """about so many would decide"""
    burst: bool
    """there is no rate to keep up with"""


class Replica(Part):
    replica: int
    hardware: str
    gpus: int
    available_s: float
    requests: int
    completed: int
    output_tokens: int
    preemptions: int
    busy_share: float
    mean_running: float
    mean_waiting: float
    peak_running: int
    mean_kv_usage: float
    peak_kv_usage: float
    cached_share: float
    """of the prompt tokens of its requests, those found in its cache, or handed over"""
    role: Role


class Scaler(Part):
    group: str
    starts: int
    stops: int
    peak_replicas: int
    startup_s: float
    ready: list[tuple[float, int]]
    """[s, replicas that serve from then on]"""


class RoleSwitches(Part):
    to_decode: int
    to_prefill: int
    mean_drain_s: float | None
    """from the decision until the replica had finished its requests"""
    roles: list[tuple[float, int, int]]
    """[s, replicas that decode, and that prefill, from then on]"""


class Route(Part):
    policy: str | None
    """null: one replica"""
    prefill_policy: str | None = None
    replica_seconds: float
    gpu_seconds: float
    mean_gpus: float | None
    usd: tuple[float, float] | None
    """of the whole run, at the low and high price"""
    requests_max_over_mean: float | None
    requests_cv: float | None
    busy_time_max_over_mean: float | None
    busy_time_cv: float | None
    link_busy_share: float | None = None
    handed_over: int | None = None
    transfer_bytes: float | None = None
    mean_wait_for_room_ms: float | None = None
    mean_transfer_ms: float | None = None
    images: int | None = None
    embedding_bytes: float | None = None
    mean_encode_ms: float | None = None
    adapter_requests: int | None = None
    adapter_loads: int | None = None
    adapter_stalls_s: float | None = None
    """that replicas' next steps waited for loads"""
    mean_adapter_wait_ms: float | None = None
    role_switch: RoleSwitches | None = None
    autoscalers: list[Scaler] = []


class Lifted(Part):
    limit: str
    name: str
    change: str
    faster: float
    """times shorter the latency of requests completed before and after"""
    completed: tuple[float, float]
    """share of the requests, before and after"""
    hardware: bool
    """whether it takes more accelerators"""


class Drafts(Part):
    method: str
    num_drafts: int
    num_accepted: int
    acceptance_rate: float
    mean_acceptance_length: float


class Sequences(Part):
    kind: Literal["beams", "samples"]
    per_request: int
    decoded_tokens: int
    copied_blocks: int
    swapped_blocks: int


class Offloading(Part):
    gpu_hit_rate: float
    cpu_hit_rate: float
    disk_hit_rate: float
    store_hit_rate: float | None = None
    load_s: float


class Explain(Part):
    binding: str
    binding_constraint: str
    ceiling: str
    ceiling_factor: float | None
    time_by_resource: dict[Resource, float]
    """busy seconds"""
    busy_s: float
    busy_share: float | None
    floor_itl_ms: float
    floor_ttft_ms: float
    floor_share_itl: float | None
    floor_share_ttft: float | None
    mean_queue_ms: float | None
    mean_client_queue_ms: float | None
    num_steps: int
    mean_tokens_per_step: float | None
    wasted_tokens: int
    mean_running: float | None
    mean_waiting: float | None
    peak_running: int
    mean_kv_usage: float | None
    peak_kv_usage: float
    kv_shares: dict[Literal["token", "reserved", "internal", "external", "free"], float] | None
    prefix_cache_token_hit_rate: float | None
    prefix_cache_block_hit_rate: float | None
    kv_blocks_saved: float | None
    sequences: Sequences | None
    kv_offloading: Offloading | None
    speculation: Drafts | None
    lifted: list[Lifted] = []
    """what lifting each limit that was reached brings, the most helpful first; not in a sweep's points"""


class Figures(Part):
    requests: int
    completed: int
    output_tokens_per_request_s: float
    mean_ttft_ms: float | None
    p99_ttft_ms: float | None
    mean_e2el_ms: float | None
    good_share: float | None = None


class Jobs(Part):
    sessions: int
    completed: int
    mean_s: float | None
    median_s: float | None
    p99_s: float | None


class Tenants(Part):
    jain_index: float | None
    by_name: dict[str, Figures]


class Efficiency(Part):
    operator: str
    dtype: str
    bandwidth: float | None = None
    flops: float | None = None
    fixed: float | None = None
    softness: float | None = None
    provenance: str
    source: str


class Result(Part):
    schema_version: Literal[1]
    infersim_version: str
    interrupted: bool
    scenario: dict[str, Any]
    """as it ran, with every default: valid input again"""
    engine: dict[str, Any]
    """every knob, and in origin where each comes from"""
    seeds: list[int]
    warmup_s: float
    counts: Counts
    """of the first replication"""
    metrics: dict[Metric, float | None]
    """vLLM's, means over the replications"""
    confidence: Confidence | None
    """chance over replications"""
    sampling: Sampling | None
    """chance within one run"""
    model_error: ModelError
    """how far measured deployments of this kind were from predictions: no chance of this run"""
    unknowns: list[Unknown] = []
    """inputs that move the answer and that nobody gave; not in a sweep's points"""
    slo: Slo | None
    verdict: Verdict
    memory: Memory
    """of one GPU of the first kind of replicas"""
    replicas: list[Replica]
    route: Route
    explain: Explain
    tenants: Tenants | None
    jobs: Jobs | None
    """of sessions with several requests: from the first one sent to the last token"""
    models: dict[str, Figures] | None
    provenance: list[Efficiency]
    """of each class of operators"""
    assumed: list[str]
