"""What `infersim plan --json`, `compare --json` and `sweep --json` write: the source of their JSON Schemas.

Units and `schema_version` are those of explain.document. A pair of USD or joules is [low, high].
"""

from typing import Any, Literal

from infersim.config.prices import PriceKind
from infersim.config.schema import described
from infersim.cost.memory import Memory
from infersim.explain.document import Metric, ModelError, Part, Result

Pair = tuple[float, float]


class TokenPrices(Part):
    """USD per million, by the busy time that is spent on each"""

    prompt: Pair | None
    cached_prompt: Pair | None
    output: Pair | None


class Cost(Part):
    gpus: float
    """there on average"""
    usd_per_hour: Pair | None
    usd_per_million_output_tokens: Pair | None
    usd_per_million_tokens: Pair | None
    usd_per_million_apart: TokenPrices
    joules_per_output_token: Pair | None
    """at the GPUs' power limits: while they are busy, and all the time"""
    price_sources: list[str]


class PlannedDeployment(Part):
    model: str
    hardware: str
    gpus: int
    replicas: int
    parallelism: dict[str, Any]
    precision: dict[str, Any]
    engine: dict[str, Any]
    """the preset, and what was set beside it"""
    speculation: dict[str, Any] | None
    early_exit: dict[str, Any] | None
    router: str
    cluster: dict[str, Any] | None
    """null: replicas of one kind"""


class LimitBounds(Part):
    name: str
    limit: float
    mean: float
    """over the replications"""
    lower: float
    upper: float
    """of the mean, 95 % each"""
    run_upper: float
    """of one more run, 99 %"""
    met: bool


class Held(Part):
    interval: Pair
    """within which 4 of 5 deployments of this kind lie"""
    holds: bool
    wrong: float
    """share by which the prediction must be off until it does not hold"""


class HeldWithin(ModelError):
    held: dict[str, Held]
    """by limit, and of the rate"""


class PlanBinding(Part):
    limit: str | None
    """the first to break at a higher rate; of no deployment, the nearest miss"""
    resource: str
    text: str
    ceiling: str


class Rests(Part):
    operator: str
    provenance: str
    source: str


class PlanAnswer(Part):
    deployment: PlannedDeployment
    scenario: dict[str, Any]
    """valid input of `infersim run`"""
    rate: float
    """requests/s, or users"""
    largest_rate: float
    """that holds the SLO"""
    headroom: float
    cost: Cost
    metrics: dict[Metric, float | None]
    limits: list[LimitBounds]
    replications: int
    slo_met: bool
    model_error: HeldWithin
    efficiencies: list[Rests]
    binding: PlanBinding


class Margin(Part):
    """What the runner-up has more than the best; shares, and GPUs"""

    cost: float | None
    gpus: float
    largest_rate: float | None


class Stays(Part):
    carry: float | None
    """share of what is predicted that the best must carry to stay the answer"""
    wins: bool | None


class ToWin(Part):
    """What would make the runner-up the answer; null: not that alone"""

    device: str
    usd_per_hour: float | None
    rate: float | None
    carry: float | None
    speed: float | None


class Row(Part):
    deployment: PlannedDeployment
    usd_per_hour: Pair | None
    rate: float
    tightest: float
    """the mean of the tightest limit over what is allowed"""
    saturated: bool
    holds: bool
    misses: list[str]


class TrialRate(Part):
    replicas: int
    rate: float
    state: Literal["met", "missed", "unclear"]
    saturated: bool
    limits: dict[str, float]
    tightest: float
    gpus: int
    usd_per_hour: Pair | None
    tokens_per_gpu: float | None
    tokens_per_user: float | None


class Trials(Part):
    deployment: PlannedDeployment
    rates: list[TrialRate]


class PriceOf(Part):
    usd: Pair
    source: str


class PlanPrices(Part):
    kind: PriceKind
    of: dict[str, PriceOf]
    missing: str | None


class PlanResult(Part):
    schema_version: Literal[1]
    feasible: bool
    objective: str
    request_rate: float | None
    """null: the load is what is looked for"""
    slo: dict[str, float]
    best: PlanAnswer | None
    runner_up: PlanAnswer | None
    margin: Margin | None
    stays: Stays | None
    to_win: ToWin | None
    deployments: list[Row]
    """the best different ones, and those that come nearest"""
    equals: list[PlannedDeployment]
    """others that cost as much and hold the SLO"""
    binding: PlanBinding
    considered: int
    simulated: int
    pruned: int
    pruned_by: dict[str, int]
    simulated_candidates: list[Trials]
    prices: PlanPrices
    assumed: list[str]


class WorkFacts(Part):
    """While devices were busy"""

    steps_per_output_token: float | None
    mean_step_ms: float | None
    decode_batch: float
    bytes_per_step: dict[str, float] | None
    """by kind"""
    bandwidth_share: float | None
    compute_share: float | None


class Variant(Part):
    name: str
    answer: Result
    work: WorkFacts
    cost: Cost


class MetricDifference(Part):
    before: float | None
    after: float | None
    difference: float | None
    half_width: float | None
    """of the interval of the difference, of pairs with the same seed"""
    clear: bool | None
    """whether it is above chance; null: nothing is drawn"""


class Term(Part):
    """A part of the mean end-to-end latency, ms"""

    term: str
    phase: str
    before: float
    after: float
    difference: float
    factors: dict[str, float]
    """their parts of the difference"""


class LatencyDifference(Part):
    metric: str
    difference: float
    terms: list[Term]


class ThroughputRatio(Part):
    metric: str
    ratio: float
    factors: dict[str, float]
    """their product is the ratio"""


class OneByOne(Part):
    seed: int
    difference: float
    changes: dict[str, float]
    """ms of each changed setting: its Shapley value"""


class TechniqueUsed(Part):
    setting: str
    name: str
    side: str
    mechanism: str
    exact: bool | None


class Difference(Part):
    variant: str
    against: str
    changes: dict[str, tuple[Any, Any]]
    techniques: list[TechniqueUsed]
    metrics: dict[str, MetricDifference | float]
    """by metric; `level` is the confidence of the intervals"""
    latency: LatencyDifference
    throughput: ThroughputRatio
    one_by_one: OneByOne | None
    why: str
    break_even: str
    gpus: tuple[float, float]


class CompareResult(Part):
    schema_version: Literal[1]
    seeds: list[int]
    variants: list[Variant]
    differences: list[Difference]
    """of each from the first"""


class Point(Part):
    set: dict[str, Any]
    answer: Result | None = None
    error: list[str] | None = None
    """why it cannot run, instead of an answer"""


class SweepResult(Part):
    schema_version: Literal[1]
    over: dict[str, list[Any]]
    points: list[Point]


DOCUMENTS: dict[str, type[Part]] = {
    "result": Result, "plan": PlanResult, "compare": CompareResult, "sweep": SweepResult
}  # fmt: skip


def document_schema(of: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one of DOCUMENTS."""
    verb = "run" if of == "result" else of
    return described(DOCUMENTS[of], [*Part.__subclasses__(), HeldWithin, Memory]) | {"title": f"infersim {verb} --json"}
