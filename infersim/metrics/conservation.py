"""What must be true of every run, checked at its end."""

import itertools
from collections.abc import Iterator

import numpy as np

from infersim.engine.compiled.state import COMPLETED

from .latency import count, num_gaps
from .result import Result, select

RELATIVE_ERROR = 1e-9


class ConservationError(RuntimeError):
    """The simulator contradicts itself: a bug in infersim, never in the user's input."""


def check_conservation(result: Result) -> None:
    """ConservationError naming every law that a run breaks: requests, blocks, tokens, time, order, Little, shares."""
    broken = [*_counts(result), *_order(result), *_sums(result), *_shares(result)]
    if broken:
        raise ConservationError("this is a bug in infersim: " + "; ".join(broken))


def _counts(result: Result) -> Iterator[str]:
    counts = count(result)
    ends = sum(counts[key] for key in ("completed", "rejected", "timed_out", "lost", "unfinished"))
    if counts["submitted"] != ends:
        yield f"{counts['submitted']} requests submitted, {ends} accounted for"
    if counts["unfinished"] and not result.interrupted:
        yield f"{counts['unfinished']} requests were never finished nor rejected"
    r = result.replicas.visits
    held = int(r["num_blocks"].sum()) - result.blocks_held
    engines = [ran.deployment.engine for ran in result.ran]
    if held < 0 or (held > 0 and not any(e.enable_prefix_caching for e in engines)):  # requests may share blocks
        yield f"requests hold {held} KV blocks more than the engine knows of"
    if not result.interrupted and r["num_blocks"].any():
        yield "a request holds KV blocks"
    done = select(result.requests, result.completed)
    outputs = done["num_output_tokens"]
    if (outputs != np.minimum(done["output_tokens"], done["max_tokens"])).any():
        yield "a completed request has not the tokens it was to generate"
    # every token in that was not cached, and every token out but the last ones, goes through a step; recomputation adds
    last = 1 + max(engine.jump_forward_tokens if engine.jump_forward_share > 0 else 0 for engine in engines)
    decoded = int((outputs - np.minimum(outputs, last)).sum(dtype="i8")) * result.scenario.workload.beam_width
    prompts = done["prompt_tokens"] - done["num_cached_tokens"]
    if any(engine.enable_prefix_caching for engine in engines):  # after a preemption others' text may be found as well
        prompts = np.where(done["num_preemptions"] > 0, 0, prompts)
    if result.num_scheduled_tokens < int(prompts.sum(dtype="i8")) + decoded:
        yield f"{result.num_scheduled_tokens} tokens were scheduled, fewer than completed requests needed"
    spec = result.scenario.speculation  # in flight when it was preempted or given up: tokens, and drafts with them
    ahead = 2 + max(int(ran.spec.knobs["steps_in_flight"]) for ran in result.ran)
    ahead *= last + (spec.num_speculative_tokens if spec else 0)
    each = r["prompt_tokens"].astype("i8") + r["num_output_tokens"] + ahead
    most = int((each * (1 + r["num_preemptions"])).sum()) * result.num_sequences
    most += int(result.replicas.rows["num_drafts"].sum()) + result.num_wasted_tokens
    if result.num_scheduled_tokens > most:
        yield f"{result.num_scheduled_tokens} tokens were scheduled, more than {most}: requests' own, anew if preempted"
    if int(result.itl_histogram.sum()) != int(num_gaps(r).sum()):
        yield "there are not as many inter-token gaps as chunks between"


def _order(result: Result) -> Iterator[str]:
    done = select(result.requests, result.completed)
    steps = ("arrival", "sent", "scheduled", "first_token", "last_token")
    for before, after in itertools.pairwise(steps):
        wrong = np.flatnonzero(~(done[before] <= done[after]))
        if len(wrong):
            row = done[wrong[0]]
            yield f"{len(wrong)} requests have {after} before {before} ({row[after]} < {row[before]} s)"
    if len(done) and done["last_token"].max() > result.end_time * (1 + RELATIVE_ERROR):
        yield "a request ended after the end of the run"


def _sums(result: Result) -> Iterator[str]:
    split = float(result.time_by_resource.sum())
    if (result.time_by_resource < 0).any() or _differ(split, result.busy_time):
        yield f"time by resource adds up to {split} s of {result.busy_time} s busy"
    if result.interrupted:  # clocks of several replicas stand apart
        return
    visits = result.replicas.visits
    done = select(visits, visits["status"] == COMPLETED)
    sojourns = float((done["last_token"] - done["sent"]).sum())
    sojourns += result.replicas.aborted_time + float(result.replicas.rows["given_up_time"].sum())
    if _differ(sojourns, result.outstanding_time):
        yield f"Little's law: sojourns add up to {sojourns} s, the integral of requests is {result.outstanding_time} s"


def _shares(result: Result) -> Iterator[str]:
    """What a replica did fits into the time for which it was there, and into what it has."""
    if result.interrupted:  # its clock stands beyond the end
        return
    rows, there = result.replicas.rows, result.replicas.available * (1 + RELATIVE_ERROR) + RELATIVE_ERROR
    blocks = result.replicas.usable_blocks
    ranks = result.ran[0].deployment.parallelism.attention_data
    sequences = np.concatenate(
        [np.full(r.replicas.stop - r.replicas.start, r.spec.knobs["max_num_seqs"]) for r in result.ran]
    )
    sums = {"busy_time": there, "occupied_time": there, "running_time": there * sequences * ranks}
    sums |= {"block_time": there * blocks, "peak_blocks": blocks, "peak_running": sequences * ranks}
    for name, most in sums.items():
        if (wrong := np.flatnonzero((rows[name] < 0) | (rows[name] > most))).size:
            r = int(wrong[0])
            yield f"replica {r} has {name} {rows[name][r]} of at most {most[r]}"


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > RELATIVE_ERROR * max(abs(a), abs(b)) + 1e-12
