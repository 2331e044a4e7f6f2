"""What one run leaves behind: a record per request, the engine's own sums, and what they rest on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from infersim.engine.compiled.state import COMPLETED, LOST, QUEUE_FULL, REJECTED, REJECTION_REASONS, TIMED_OUT
from infersim.engine.replica import ReplicaSpec

from .replicas import Replicas

if TYPE_CHECKING:
    import pandas

    from infersim.config.engine import ResolvedEngine
    from infersim.config.scenario import Scenario
    from infersim.cost.memory import Memory
    from infersim.deployment import Deployment


def select(records: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The records of bool[n]; where that is all of them, themselves: to copy them takes longer than most that is done
    with them."""
    return records if which.all() else records[which]


@dataclass(frozen=True)
class Ran:
    """Replicas of one kind in a run: what they were, the prices that their engine had, and what they did."""

    deployment: "Deployment"
    spec: ReplicaSpec
    role: Literal["serve", "prefill", "decode", "encode"]
    replicas: slice
    """their numbers"""
    time_by_resource: np.ndarray
    """f8[len(RESOURCES)]: their busy seconds by what they were spent on"""


@dataclass(frozen=True)
class Result:
    """One replication of one scenario. Times in seconds, sums over all replicas."""

    scenario: "Scenario"
    ran: tuple[Ran, ...]
    """every kind of replica, in the order of their numbers: what explains a run reads these, and builds no others"""
    seed: int
    """of this replication"""
    requests: np.ndarray
    """engine.state.REQUEST[n], in order of arrival; a time below 0 never came"""
    request_ids: np.ndarray
    """i8[n]: stable names of the requests"""
    itl_histogram: np.ndarray
    """i8[HISTOGRAM_BINS]: all inter-token gaps of the run"""
    time_by_resource: np.ndarray
    """f8[len(RESOURCES)]: busy seconds by what they were spent on"""
    busy_time: float
    """seconds in which a device worked or waited for its host"""
    end_time: float
    """the clock at the end, or at the interruption"""
    outstanding_time: float
    """the engine's own integral over time of requests sent and not finished"""
    running_time: float
    waiting_time: float
    block_time: float
    """integrals over time of requests running and waiting, and of KV blocks held"""
    num_steps: int
    num_scheduled_tokens: int
    num_wasted_tokens: int
    """scheduled for requests that had already ended (async scheduling)"""
    blocks_held: int
    """KV blocks that the engine holds at the end"""
    floors: dict[str, float]
    """itl, ttft: s, what no software on this device can be faster than"""
    provenance: list[dict[str, Any]]
    """one row per operator class and dtype: its efficiencies, where they come from and who says so"""
    replicas: Replicas
    route: dict[str, Any]
    """how requests found their replica, JSON-ready"""
    retries: int = 0
    """attempts of clients beyond the first"""
    route_columns: dict[str, np.ndarray] = field(default_factory=dict)
    """what the cluster has to say of each request: attempts, hand-over"""
    num_sequences: int = 1
    """of each group, where several sequences of one request share their blocks; a record is a group's, or a sample's"""
    tenant: np.ndarray | None = None
    """i2[n]: the tenant of each request, by its place in the workload"""
    model: np.ndarray | None = None
    """i4[n]: which of `models` each request asked for"""
    models: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """one sentence for each liberty taken"""
    opened_until: float = np.inf
    """when the last request came that follows no other: after that only sessions end"""
    session: np.ndarray | None = None
    """i8[n]: equal for requests of one conversation, one after another"""
    warmup: float = 0.0
    """requests sent earlier are left out of the metrics"""
    itl_gaps: np.ndarray | None = None
    """f4[...]: every inter-token gap, request after request; kept on demand, and whenever there is a warm-up"""
    itl_offsets: np.ndarray | None = None
    """i8[n]: where each request's gaps begin"""
    interrupted: bool = False
    overload: "Callable[[Result], tuple[float, float] | None] | None" = None

    @cached_property
    def completes(self) -> tuple[float, float] | None:
        """[low, high] of the requests/s that are completed when far more arrive (metrics.overload): None if unknown.
        Simulated when it is asked for."""
        return self.overload(self) if self.overload and not self.interrupted else None

    @property
    def engine(self) -> "ResolvedEngine":
        """Of the first kind of replicas."""
        return self.ran[0].deployment.engine

    @property
    def memory(self) -> "Memory":
        """Of the first kind of replicas."""
        return self.ran[0].deployment.memory

    def kind_of(self, replica: int) -> Ran:
        """What the replica of this number is."""
        return next(ran for ran in self.ran if ran.replicas.start <= replica < ran.replicas.stop)

    @property
    def peak_running(self) -> int:
        """Most requests running at once in one replica."""
        return int(self.replicas.rows["peak_running"].max())

    @property
    def peak_blocks(self) -> int:
        """Most KV blocks held at once in one replica."""
        return int(self.replicas.rows["peak_blocks"].max())

    @property
    def completed(self) -> np.ndarray:
        """bool[n]"""
        return self.requests["status"] == COMPLETED

    @property
    def measured(self) -> np.ndarray:
        """bool[n]: the requests that metrics are about, completed and sent after the warm-up."""
        return self.completed & (self.requests["sent"] >= self.warmup)

    @cached_property
    def done(self) -> np.ndarray:
        """REQUEST[m]: those records, the measured."""
        return select(self.requests, self.measured)

    @property
    def rejection_reasons(self) -> dict[int, str]:
        """Words of the records' reasons: without a queue at the front door it was a replica that refused."""
        admission = self.scenario.cluster.admission
        if admission is None or admission.max_outstanding is not None:
            return REJECTION_REASONS
        return REJECTION_REASONS | {QUEUE_FULL: "a replica had max_num_queued_reqs or max_num_queued_tokens (HTTP 503)"}

    def columns(self, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """One row per request, as written to requests.csv; NaN where something never happened."""
        r = self.requests[rows]
        tenants = self.scenario.workload.tenants or {}
        reasons = np.array(["", *self.rejection_reasons.values()])  # reasons are numbered from 1
        status = np.full(len(r), "unfinished")
        for code, name in ((COMPLETED, "completed"), (REJECTED, "rejected"), (TIMED_OUT, "timed_out"), (LOST, "lost")):
            status[r["status"] == code] = name

        def time(name: str) -> np.ndarray:
            return np.where(r[name] >= 0, r[name], np.nan)

        sent, first, last, outputs = time("sent"), time("first_token"), time("last_token"), r["num_output_tokens"]
        done = np.where(r["status"] == COMPLETED, 1.0, np.nan)
        stores = self.scenario.cluster.kv_store is not None
        return {
            "request_id": self.request_ids[rows],
            "status": status,
            "reason": reasons[r["reason"]],
            "arrival_s": r["arrival"],
            "sent_s": sent,
            "scheduled_s": time("scheduled"),
            "first_token_s": first,
            "last_token_s": last,
            "prompt_tokens": r["prompt_tokens"],
            "output_tokens": outputs,
            "num_preemptions": r["num_preemptions"],
            "replica": r["replica"],
            **(_cached(r, stores) if self.engine.kv_offloading_size or stores else {}),
            **({} if self.tenant is None else {"tenant": np.array(list(tenants))[self.tenant[rows]]}),
            **({} if self.model is None else {"model": np.array(self.models)[self.model[rows]]}),
            **{name: column[rows] for name, column in self.route_columns.items()},
            "ttft_ms": (first - sent) * 1e3,
            "tpot_ms": (last - first) * done * 1e3 / np.where(outputs > 1, outputs - 1, np.nan),
            "e2el_ms": (last - sent) * done * 1e3,
        }

    def to_pandas(self) -> "pandas.DataFrame":
        """`columns` as a table."""
        import pandas

        return pandas.DataFrame(self.columns())


def _cached(r: np.ndarray, stores: bool) -> dict[str, np.ndarray]:
    """Prompt tokens of each request that stood in the cache when it was first scheduled, by tier."""
    cpu, disk, store = (r[f"num_{name}_cached_tokens"] for name in ("cpu", "disk", "stored"))
    found = {
        "gpu_cached_tokens": r["num_cached_tokens"] - cpu - disk - store,
        "cpu_cached_tokens": cpu,
        "disk_cached_tokens": disk,
    }
    return found | ({"store_cached_tokens": store} if stores else {})
