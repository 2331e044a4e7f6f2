"""The answer of a run as one JSON-ready document: what `infersim run --json` prints and the terminal shows."""

import math
from collections import Counter
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from infersim import __version__
from infersim.config.workload import MaxTokensFactor
from infersim.engine.compiled.state import OVER_MAX_MODEL_LEN, REJECTED, RESOURCES
from infersim.metrics.confidence import LEVEL, combine
from infersim.metrics.conservation import check_conservation
from infersim.metrics.jobs import job_times
from infersim.metrics.latency import count, measure
from infersim.metrics.result import Result, select
from infersim.metrics.sampling import intervals
from infersim.metrics.tenants import compare_models, compare_tenants
from infersim.metrics.verdict import STABLE, TOO_LONG, TOO_SHORT, Verdict, combine_verdicts, judge

from .binding import find_binding
from .uncertainty import model_error

SCHEMA_VERSION = 1


def summarize(results: list[Result]) -> dict[str, Any]:
    """The document of one scenario's replications: means over them; counts and seconds of the first.

    Every result is checked against the conservation laws first (ConservationError: a bug). Numbers are finite or None.
    """
    for result in results:
        check_conservation(result)
    first = results[0]
    measured = [measure(result) for result in results]
    metrics, half_widths = combine(measured)
    verdict = combine_verdicts([judge(result) for result in results])
    within = intervals(first, verdict) if len(results) == 1 else None
    counts = count(first)
    document = {
        "schema_version": SCHEMA_VERSION,
        "infersim_version": __version__,
        "interrupted": any(result.interrupted for result in results),
        "scenario": None,
        "engine": vars(first.engine),
        "seeds": [result.seed for result in results],
        "warmup_s": first.warmup,
        "counts": counts,
        "metrics": metrics,
        "confidence": {"level": LEVEL, "half_width": half_widths} if half_widths else None,
        "sampling": {"level": LEVEL, "interval": within} if within else None,
        "model_error": model_error(first, metrics, not verdict.burst and verdict.state in (STABLE, TOO_SHORT)),
        "slo": _slo(results, measured, metrics, verdict),
        "verdict": asdict(verdict),
        "memory": asdict(first.memory),
        "replicas": [row | {"role": role} for row, role in zip(first.replicas.figures(), _roles(first), strict=True)],
        "route": first.route | first.replicas.paid(first.end_time) | first.replicas.balance(),
        "explain": _explain(results, metrics),
        "tenants": compare_tenants(first),
        "jobs": job_times(first),
        "models": compare_models(first),
        "provenance": first.provenance,
        "assumed": _assumed(first),
    }
    return finite(document) | {"scenario": first.scenario.resolved()}


def _roles(result: Result) -> list[str]:
    """Of each replica: serve, prefill, decode or encode."""
    return [ran.role for ran in result.ran for _ in range(ran.replicas.start, ran.replicas.stop)]


def _slo(
    results: list[Result], measured: list[dict[str, float | None]], metrics: dict, verdict: Verdict
) -> dict[str, Any] | None:
    """Each limit with the value that is held against it. Met only by a system that keeps up and serves everything; None
    if the limits hold in a run that is too short to tell whether they go on to."""
    slo = results[0].scenario.slo
    if not slo.limits and not slo.request_limits:
        return None
    limits = []
    for name, limit in slo.limits.items():
        value = metrics[name.replace("p50_", "median_")]
        limits.append({"name": name, "limit": limit, "value": value, "met": value is not None and value <= limit})
    held = all(limit["met"] for limit in limits)
    short = verdict.state in (STABLE, TOO_SHORT) and not verdict.in_balance
    met = None if held and short else held and verdict.state == STABLE
    shares = [_goodput_share(result, own) for result, own in zip(results, measured, strict=True)]
    known = [share for share in shares if share is not None]
    return {"met": met, "limits": limits, "goodput_share": fmean(known) if len(known) == len(shares) else None}


def _goodput_share(result: Result, metrics: dict[str, float | None]) -> float | None:
    """Of the requests that could be served at all, those within all limits of one request: who is refused is a miss."""
    r = result.requests
    since = np.where(r["sent"] >= 0, r["sent"], r["arrival"]) >= result.warmup
    asked = int((since & ~np.isin(r["reason"], TOO_LONG)).sum())
    goodput, duration = metrics["request_goodput"], metrics["duration_s"]
    return goodput * duration / asked if goodput is not None and duration and asked else None


def _explain(results: list[Result], metrics: dict) -> dict[str, Any]:
    result = results[0]
    binding = find_binding(result)
    seconds = {name: float(t) for name, t in zip(RESOURCES, result.time_by_resource, strict=True)}
    available = float(result.replicas.available.sum())
    floors = {name: result.floors[name] * 1e3 for name in ("itl", "ttft")}
    rows, blocks = result.replicas.rows, result.replicas.usable_blocks

    def share_of(floor: float, mean: float | None) -> float | None:
        return floor / mean if mean else None

    def over_time(integral: float) -> float | None:
        return integral / available if available > 0 else None

    done = result.done
    # tokens that wait for an API server may come closer to one another than steps
    bunched = any(ran.spec.knobs["host_token_time"] > 0 for ran in result.ran)
    one_by_one = len(done) and done["arrival"][0] < done["arrival"][-1]  # else waiting is what a closed loop is about
    return {
        "binding": binding.text,
        "binding_constraint": binding.name,
        "ceiling": binding.ceiling,
        "ceiling_factor": binding.factor,
        "time_by_resource": seconds,
        "busy_s": result.busy_time,
        "busy_share": over_time(result.busy_time),
        "floor_itl_ms": floors["itl"],
        "floor_ttft_ms": floors["ttft"],
        "floor_share_itl": None if bunched else share_of(floors["itl"], metrics["mean_itl_ms"]),
        "floor_share_ttft": share_of(floors["ttft"], metrics["mean_ttft_ms"]),
        "mean_queue_ms": float((done["scheduled"] - done["sent"]).mean()) * 1e3 if len(done) else None,
        "mean_client_queue_ms": float((done["sent"] - done["arrival"]).mean()) * 1e3 if one_by_one else None,
        "num_steps": result.num_steps,
        "mean_tokens_per_step": result.num_scheduled_tokens / result.num_steps if result.num_steps else None,
        "wasted_tokens": result.num_wasted_tokens,
        "mean_running": over_time(result.running_time),
        "mean_waiting": over_time(result.waiting_time),
        "peak_running": result.peak_running,
        "mean_kv_usage": over_time(float((rows["block_time"] / blocks).sum())),
        "peak_kv_usage": float((rows["peak_blocks"] / blocks).max()),
        "kv_shares": kv_shares(result),
        **_prefix_cache(result),
        "sequences": _sequences(result),
        "kv_offloading": _offloading(result),
        "speculation": _speculation(result),
    }


def kv_shares(result: Result) -> dict[str, float] | None:
    """Shares of KV memory while anything ran, weighted by time, adding up to 1; None where a token has no fixed place
    in it (windows, states, prefix caching, groups of sequences) or kinds of replicas divide it unlike.

    token: keys and values that are there; reserved: room that the request will fill (a page's are internal); internal:
    given out and never filled; external: what buddy allocation rounds up, and free while a request waits that no hole
    holds; free. Kwon et al. 2023, figure 2, counts free memory as external.
    """
    memory, engine, rows = result.memory, result.engine, result.replicas.rows
    plain = len(memory.kv_groups) == 1 and memory.kv_groups[0].window == 0 and result.num_sequences == 1
    unlike = ("allocator", "block_size", "num_gpu_blocks", "enable_prefix_caching")
    kinds = {tuple(ran.spec.knobs[name].item() for name in unlike) for ran in result.ran}
    if not plain or result.scenario.cluster.prefill or engine.enable_prefix_caching or len(kinds) > 1:
        return None
    size = memory.block_size
    capacity = float((rows["occupied_time"] * result.replicas.usable_blocks).sum()) * size
    if capacity == 0:
        return None
    sums = ("token_time", "final_time", "asked_time", "block_time", "stranded_time")
    token, final, asked, given, stranded = (float(rows[name].sum()) for name in sums)
    asked, given, stranded = asked * size, given * size, stranded * size
    if engine.allocator == "paged":
        final, asked = token, given
    shares = {
        "token": token,
        "reserved": final - token,
        "internal": asked - final,
        "external": given - asked + stranded,
        "free": capacity - given - stranded,
    }
    return {name: part / capacity for name, part in shares.items()}


def _speculation(result: Result) -> dict[str, float | str] | None:
    """What drafts brought: shares of them, and tokens that a sequence got from a step that verified some."""
    spec = result.scenario.speculation
    drafts = int(result.replicas.rows["num_drafts"].sum())
    if spec is None or not drafts:
        return None
    accepted = int(result.replicas.rows["num_accepted"].sum())
    visits = result.replicas.visits
    chunks = int(np.maximum(visits["num_output_tokens"] - visits["num_accepted_tokens"] - 1, 0).sum(dtype="i8"))
    return {
        "method": spec.method,
        "num_drafts": drafts,
        "num_accepted": accepted,
        "acceptance_rate": accepted / drafts,
        "mean_acceptance_length": 1 + int(visits["num_accepted_tokens"].sum(dtype="i8")) / chunks if chunks else 1.0,
    }


def _sequences(result: Result) -> dict[str, int | str] | None:
    """What groups of sequences decoded, beside the output tokens of the requests that they answer."""
    if result.num_sequences == 1:
        return None
    visits, beams = result.replicas.visits, result.scenario.workload.beam_width
    answers = visits if beams > 1 else result.requests
    return {
        "kind": "beams" if beams > 1 else "samples",
        "per_request": result.num_sequences,
        "decoded_tokens": int(answers["num_output_tokens"].sum(dtype="i8")) * beams,
        "copied_blocks": int(result.replicas.rows["num_block_copies"].sum()),
        "swapped_blocks": int(result.replicas.rows["num_copied"].sum()),
    }


def _prefix_cache(result: Result) -> dict[str, float | None]:
    """Shares of the prompts, in tokens and in KV blocks, that stood in the cache when a request was first scheduled.

    And of the blocks of all requests, over time, those saved because others, or other sequences of their group, held
    the same (Kwon et al. 2023, section 6.3).
    """
    rates = dict.fromkeys(("prefix_cache_token_hit_rate", "prefix_cache_block_hit_rate", "kv_blocks_saved"))
    seen = select(result.requests, result.requests["scheduled"] >= 0)
    if result.engine.enable_prefix_caching and len(seen):
        size = result.engine.block_size
        cached, prompts = seen["num_cached_tokens"].sum(dtype="i8"), seen["prompt_tokens"]
        rates["prefix_cache_token_hit_rate"] = float(cached / prompts.sum(dtype="i8"))
        rates["prefix_cache_block_hit_rate"] = float(cached // size / (-(-prompts // size)).sum(dtype="i8"))
    if (result.engine.enable_prefix_caching or result.num_sequences > 1) and len(seen):
        rows = result.replicas.rows
        shared, held = float(rows["shared_time"].sum()), float(rows["block_time"].sum())
        rates["kv_blocks_saved"] = shared / (shared + held) if held else 0.0
    return rates


def _offloading(result: Result) -> dict[str, float] | None:
    """Shares of the prompt tokens that stood on the GPU, in the CPU's memory, on the disk and in the store when a
    request was first scheduled, and the seconds that loading took, whenever; None without tiers."""
    seen = select(result.requests, result.requests["scheduled"] >= 0)
    stores = result.scenario.cluster.kv_store is not None
    if not (result.engine.kv_offloading_size or stores) or not len(seen):
        return None
    prompts = int(seen["prompt_tokens"].sum(dtype="i8"))
    found, cpu, disk, store = (
        int(seen[name].sum(dtype="i8")) / prompts
        for name in (
            "num_cached_tokens", "num_cpu_cached_tokens", "num_disk_cached_tokens", "num_stored_cached_tokens"
        )
    )  # fmt: skip
    return {
        "gpu_hit_rate": found - cpu - disk - store,
        "cpu_hit_rate": cpu,
        "disk_hit_rate": disk,
        **({"store_hit_rate": store} if stores else {}),
        "load_s": float(result.replicas.rows["load_time"].sum()),
    }


def _use_of_max_tokens(result: Result) -> str:
    if result.engine.reserve == "to-completion":
        return "admits a request only if memory for all its max_tokens is left"
    if result.engine.clip_max_new_tokens:
        return "admits by a share of the tokens that running requests may still generate"
    return "admits without regard to it"


def _use_of_groups(result: Result) -> str:
    load = result.scenario.workload
    keys = "attention reads every sequence's keys, shared or not"
    if load.beam_width == 1:
        return f"a prompt's {load.n} samples are one group: computed once, blocks copied on write; {keys}"
    return (
        f"after each token a beam goes on from another drawn evenly with a chance of {load.beam_turnover:g}; all have"
        f" the output length of the request; {keys}"
    )


def _assumed(result: Result) -> list[str]:
    """What a reader must know to trust the answer: one sentence each."""
    r = result.requests
    rule = result.scenario.workload.max_tokens
    name = f"{rule.factor:g} x output length" if isinstance(rule, MaxTokensFactor) else rule
    lines = [f"max_model_len {result.engine.max_model_len:,} ({result.engine.origin['max_model_len']})"]
    over = int((r["reason"] == OVER_MAX_MODEL_LEN).sum())
    cut = int((r["max_tokens"] < r["output_tokens"]).sum())
    effects = [f"it rejects {over:,} requests" if over else "", f"it cuts {cut:,} outputs short" if cut else ""]
    effect = " and ".join(filter(None, effects)) or f"{result.engine.preset} {_use_of_max_tokens(result)}"
    lines.append(f"max_tokens {name}: {effect}")
    if (exits := result.scenario.early_exit) is not None:
        layers = ", ".join(
            f"{share:.0%} after {n}" for share, n in zip(exits.token_shares, exits.exit_layers, strict=False)
        )
        lines.append(f"early exit is approximate, outputs change: {layers} layers, {exits.policy.replace('_', ' ')}")
    if result.scenario.speculation is not None:
        lines.append(
            "speculation is exact: outputs are drawn from the model's own distribution; acceptance is the scenario's"
        )
    cached = _prefix_cache(result)["prefix_cache_token_hit_rate"]
    if cached:
        lines.append(f"prefix caching on: {cached:.1%} of the prompt tokens were in the cache")
    elif result.engine.enable_prefix_caching:
        lines.append("prefix caching on, but no prompt found its beginning in the cache")
    else:
        lines.append("prefix caching off: every prompt is computed in full")
    if result.engine.enable_prefix_caching and any(group.window == 1 for group in result.memory.kv_groups):
        size = result.memory.block_size
        at = f"recurrent states are kept at the end of each block of {size:,} tokens"
        lines.append(
            f"{at} (vLLM 0.32 keeps those where a step ends: fewer hits where shared text ends inside a chunk)"
        )
    if result.num_sequences > 1:
        lines.append(_use_of_groups(result))
    reasons = Counter(r["reason"][r["status"] == REJECTED].tolist())
    lines += [f"{n:,} requests rejected: {result.rejection_reasons[code]}" for code, n in sorted(reasons.items())]
    lines += result.notes
    if result.warmup:
        before = int((r["sent"] < result.warmup).sum())
        lines.append(f"the first {result.warmup:.4g} s are warm-up: {before:,} requests are left out of the metrics")
    kinds: dict[str, list[str]] = {}
    for row in result.provenance:
        kinds.setdefault(row["provenance"], []).append(f"{row['operator']} {row['dtype']}".strip())
    for kind, operators in sorted(kinds.items()):
        lines.append(f"efficiencies {kind}: {', '.join(operators)}")
    for deployment in (ran.deployment for ran in result.ran):
        found = deployment.hardware.calibration
        if found and found.stack != deployment.engine.engine:
            lines.append(
                f"{deployment.hardware.name}'s efficiencies were measured with {found.stack} {found.version}'s kernels,"
                f" which stand for {deployment.engine.preset}'s"
            )
    return list(dict.fromkeys(lines))


def finite(value: Any) -> Any:
    """The same JSON-ready value with None for NaN and infinities, and plain numbers for numpy's."""
    if isinstance(value, float):  # numpy's f8 too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return finite(value.item()) if isinstance(value, np.generic) else value
