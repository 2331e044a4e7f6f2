"""What a run came to, from the fleet that made it."""

from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np

from .cluster.serve import Served
from .config.cluster import EncodePool, Kind
from .config.prices import hourly
from .config.scenario import Scenario
from .cost.floors import decode_sums, prefill_sums, step_floor
from .deployment import Deployment
from .engine.compiled.state import COMPLETED
from .engine.fleet import Fleet
from .engine.replica import ReplicaSpec
from .metrics.replicas import Replicas
from .metrics.result import Ran, Result, select
from .metrics.warmup import warmup_time
from .workload.requests import Requests

PIECES = 8


def result_of(
    scenario: Scenario,
    kinds: list[tuple[Deployment, Kind | EncodePool]],
    specs: list[ReplicaSpec],
    fleet: Fleet,
    served: Served,
    requests: Requests,
    seed: int,
) -> Result:
    """What one run came to, from the fleet that made it."""
    rows, deployment = fleet.replicas, kinds[0][0]
    counts = [kind.most for _, kind in kinds]
    answering = [d for d, kind in kinds if kind is not scenario.cluster.encode]
    warmup = warmup_time(scenario, served.requests)
    sums = ("outstanding_time", "running_time", "waiting_time", "block_time")
    usable_blocks = (fleet.knobs["num_gpu_blocks"] - 1) * fleet.knobs["ranks"]
    ran: list[Ran] = []
    for (d, kind), numbers in zip(kinds, scenario.cluster.ranges, strict=True):
        role, first = _role(scenario, kind), numbers.start
        if ran and (ran[-1].deployment, ran[-1].role) == (d, role):  # the same kind, written twice
            first = ran.pop().replicas.start
        where = slice(first, numbers.stop)
        ran.append(Ran(d, specs[first], role, where, fleet.time_of(where)))
    return Result(
        scenario=scenario,
        ran=tuple(ran),
        seed=seed,
        requests=served.requests,
        request_ids=requests.request_id,
        itl_histogram=fleet.histogram,
        time_by_resource=fleet.time_by_resource,
        busy_time=float(rows["busy_time"].sum()),
        end_time=served.end,
        **cast(Any, {name: float(rows[name].sum()) for name in sums}),
        num_steps=int(rows["num_steps"].sum()),
        num_scheduled_tokens=int(rows["num_scheduled_tokens"].sum()),
        num_wasted_tokens=int(rows["num_wasted_tokens"].sum()),
        blocks_held=int(usable_blocks.sum() - fleet.schedulers["free_blocks"].sum()),
        floors=_floors(served.requests, warmup, answering),
        provenance=answering[0].provenance,
        replicas=Replicas(
            names=tuple(np.repeat([d.hardware.name for d, _ in kinds], counts).tolist()),
            gpus=np.repeat([sum(n for _, n in d.accelerators) for d, _ in kinds], counts),
            usd_per_hour=np.repeat(
                [hourly(d.accelerators, scenario.prices) or (np.nan, np.nan) for d, _ in kinds], counts, axis=0
            ),
            rows=rows,
            usable_blocks=usable_blocks,
            available=served.available,
            visits=select(fleet.requests, fleet.requests["replica"] >= 0),
            aborted_time=fleet.aborted_time,
        ),
        route=served.route,
        retries=served.retries,
        route_columns=served.columns,
        num_sequences=deployment.num_sequences,
        tenant=requests.tenant,
        model=requests.model,
        models=requests.models,
        notes=requests.notes,
        opened_until=np.inf if requests.after is None else float(served.requests["arrival"][requests.after < 0].max()),
        session=requests.session,
        warmup=warmup,
        itl_gaps=fleet.gaps if fleet.keep_gaps else None,
        itl_offsets=fleet.gap_offset[served.rows] if fleet.keep_gaps else None,
        interrupted=served.interrupted,
    )


def each_sample(served: Served, fleet: Fleet, output_tokens: np.ndarray, max_tokens: np.ndarray) -> Served:
    """The same with a record for each sample: its group's, but for its own tokens and end. All but the first of a group
    found their prompt computed."""
    k = fleet.num_sequences
    groups = np.repeat(np.arange(len(served.rows)), k)
    own = fleet.sequences_of(served.rows).reshape(-1)
    records = served.requests[groups]
    records["output_tokens"], records["max_tokens"] = output_tokens, max_tokens
    records["stop_tokens"] = own["stop_tokens"]
    records["num_output_tokens"] = np.minimum(records["num_output_tokens"], own["stop_tokens"])
    ended = own["last_token"] >= 0
    records["last_token"][ended] = own["last_token"][ended]
    others = (np.arange(len(records)) % k > 0) & (records["scheduled"] >= 0)
    records["num_cached_tokens"][others] = records["prompt_tokens"][others]
    columns = {name: column[groups] for name, column in served.columns.items()}
    return replace(served, requests=records, rows=served.rows[groups], columns=columns)


def _role(scenario: Scenario, kind: Kind | EncodePool) -> Literal["serve", "prefill", "decode", "encode"]:
    cluster = scenario.cluster
    if kind is cluster.encode:
        return "encode"
    if cluster.prefill is None:
        return "serve"
    return "prefill" if kind is cluster.prefill else "decode"


def _floors(records: np.ndarray, warmup: float, answering: list[Deployment]) -> dict[str, float]:
    """itl and ttft, s: below which no mean over the requests measured is, on the fastest of these deployments.

    At the mean context of their tokens, and at the mean of what their prompts had to compute: a floor rises no slower
    with more of it, so it is at most the mean of the requests' own floors. Where a prompt of few tokens needs only some
    of the experts it rises slower at last, so prompts are taken in PIECES of about one length, each at its shortest.
    """
    done = select(records, (records["status"] == COMPLETED) & (records["sent"] >= warmup))
    done = done if len(done) else records
    gaps = np.maximum(done["num_output_tokens"].astype("i8") - 1, 0)
    contexts = done["prompt_tokens"] + gaps / 2
    context = int(np.average(contexts, weights=gaps)) if gaps.any() else int(contexts.mean())
    own = done["prompt_tokens"] - done["num_cached_tokens"]  # what a prefix cache has is not computed again
    return {
        "itl": min(step_floor(d.shortest_pass, d.hardware, decode_sums(context)) for d in answering),
        "ttft": min(_floor_ttft(d, np.maximum(own, 1)) for d in answering),
    }


def _floor_ttft(deployment: Deployment, tokens: np.ndarray) -> float:
    """Seconds below which the mean time of i4[n] prompts' tokens is not."""

    def floor(n: int) -> float:
        return step_floor(deployment.shortest_pass, deployment.hardware, prefill_sums(n))

    if not any(operator.routing for operator in deployment.shortest_pass):
        return floor(int(tokens.mean()))
    pieces = np.array_split(np.sort(tokens), min(PIECES, len(tokens)))
    return sum(len(piece) * floor(int(piece[0])) for piece in pieces) / len(tokens)
