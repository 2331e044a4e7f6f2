"""A difference between two runs, attributed to the terms of T = N_steps * T_step, which add up to it.

A time is a sum of terms, and each term a product of factors (steps, bytes per step, seconds per byte). A sum's
difference is the sum of its terms' differences. A product's is divided by logarithmic means (the additive LMDI-I of
Ang, Energy Policy 32:1131, 2004):

    x_b - x_a = sum over factors f of L(x_a, x_b) * ln(f_b / f_a),    L(x, y) = (x - y) / ln(x / y)

which is exact, has no residual, and changes its sign and nothing else when the two runs change places. A ratio of two
sums is a product of one factor per term, exp((x_b - x_a) / L(total_a, total_b)) each: exact too.
"""

import math
from collections.abc import Mapping

from infersim.engine.compiled.state import RESOURCES
from infersim.metrics.latency import measure
from infersim.metrics.result import Result

from .work import KINDS, RunWork

Terms = Mapping[str, Mapping[str, float]]
"""term -> factor -> value; a term is the product of its factors"""

NAMES = {
    "queue": "waiting to be scheduled",
    "weights": "reading weights",
    "kv": "reading the KV cache",
    "activations": "moving activations",
    "compute": "compute",
    "launch": "kernel launches",
    "collectives": "communication between GPUs",
    "host": "the engine's CPU time",
    "draft": "drafting",
    "offload": "copying the KV cache to and from the CPU",
    "preemption": "waiting after preemption",
    "idle": "idle time",
}
"""rows of terms, for people"""
PHASES = {"waiting": "waiting", "prefill": "prefill", "decode": "decode", "interference": "prefill in the same steps"}
"""what a request was doing, for people; interference: it decoded, in steps that also held prompts"""


def log_mean(x: float, y: float) -> float:
    """The logarithmic mean of two positive numbers: between the geometric and the arithmetic one."""
    ratio = (y - x) / x
    if abs(ratio) < 1e-6:  # its series, where the quotient would lose digits
        return x * (1 + ratio / 2 - ratio * ratio / 12)
    return (y - x) / math.log(y / x)


def divide_product(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """The difference of two products, b's less a's, by factor; both have the same factors.

    A factor that is zero in either, or changes its sign, has no logarithm: such factors share the difference equally.
    """
    x, y = math.prod(a.values()), math.prod(b.values())
    flipped = [name for name in a if a[name] * b[name] <= 0 and a[name] != b[name]]
    if flipped or x == 0:
        return {name: (y - x) / len(flipped) if name in flipped else 0.0 for name in a}
    mean = math.copysign(log_mean(abs(x), abs(y)), x)
    return {name: mean * math.log(b[name] / a[name]) for name in a}


def divide_sum(a: Terms, b: Terms) -> dict[str, dict[str, float]]:
    """The difference of two sums of products: term -> factor -> its part. All parts add up to the difference.

    A term that has no bytes in one of the two is not divided there.
    """
    parts = {}
    for name in a:
        x, y = a[name], b[name]
        if x.keys() != y.keys():
            x, y = ({"seconds": math.prod(factors.values())} for factors in (x, y))
        parts[name] = divide_product(x, y)
    return parts


def total(terms: Terms) -> float:
    """The sum of the products."""
    return math.fsum(math.prod(factors.values()) for factors in terms.values())


def ratio_factors(a: Terms, b: Terms) -> dict[str, float]:
    """What each term multiplies total(b) / total(a) by; the factors' product is that ratio."""
    mean = log_mean(total(a), total(b))
    return {name: math.exp((math.prod(b[name].values()) - math.prod(a[name].values())) / mean) for name in a}


def row_of(term: str) -> str:
    """`weights` of the term `weights.decode`."""
    return term.partition(".")[0]


def phase_of(term: str) -> str:
    """`decode` of the term `weights.decode`; what has no phase is waiting."""
    return term.partition(".")[2] or "waiting"


def latency_terms(result: Result) -> Terms:
    """The mean end-to-end latency of a run (s) as terms `<resource>.<phase>`, and `queue` and `preemption`.

    decode: output tokens times a pure decode step of the average batch. interference: what a decoding request's steps
    take longer than that, since prompts are in them and batches are not all average; divided by resource as the run's
    mean step exceeds the pure one. prefill: from being scheduled to the first token, divided as a step with a prompt.
    """
    done, work = result.done, RunWork(result)
    tokens = float((done["num_output_tokens"] - 1.0).mean())
    decode = float((done["last_token"] - done["first_token"]).mean())
    prefill = float((done["first_token"] - done["scheduled"]).mean())
    seconds, moved = work.decode_step
    per_token = work.visits / work.decodes if work.decodes else 1.0
    alone = tokens * per_token * math.fsum(seconds.values())
    # what waited after preemption had its first token, as far as decoding took longer than it can have
    stalled = work.preempted_time() / len(done)
    stalled_decode = min(stalled, max(decode - alone, 0.0))
    stalled_prefill = min(stalled - stalled_decode, prefill)
    decode, prefill = decode - stalled_decode, prefill - stalled_prefill
    if decode < alone:  # the average batch of the run is not that of the requests that are measured
        seconds = {name: part * decode / alone for name, part in seconds.items()}
        alone = decode
    terms = {
        "queue": {"seconds": float((done["scheduled"] - done["sent"]).mean())},
        "preemption": {"seconds": stalled_decode + stalled_prefill},
    }
    excess, prompt_step = work.excess, work.prompt_step
    interference = (decode - alone) / math.fsum(excess.values())
    for name in RESOURCES:
        steps = {"output tokens": tokens, "steps per output token": per_token}
        terms[f"{name}.decode"] = steps | _step_factors(name, seconds[name], moved, result)
        terms[f"{name}.interference"] = {
            "prompts met while decoding": interference * len(done) / result.num_steps,
            "seconds that each prompt adds": excess[name] * result.num_steps / len(done),
        }
        terms[f"{name}.prefill"] = {"seconds": prefill * prompt_step[name] / math.fsum(prompt_step.values())}
    return terms


def throughput_terms(result: Result) -> Terms:
    """Seconds of the clock per output token (1 / output_throughput) as terms: idle time, and steps per token times the
    time of a step by resource."""
    work, throughput = RunWork(result), measure(result)["output_throughput"]
    assert throughput is not None  # runs without any are not compared
    steps = result.num_steps
    outputs = throughput * float(result.replicas.available.sum())  # of one replica, in the time that steps fill
    moved = work.mean_moved
    terms: dict[str, dict[str, float]] = {}
    for name, seconds in zip(RESOURCES, result.time_by_resource.tolist(), strict=True):
        terms[name] = {"steps per output token": steps / outputs} | _step_factors(name, seconds / steps, moved, result)
    terms["idle"] = {"seconds": 1 / throughput - total(terms)}
    return terms


def _step_factors(name: str, seconds: float, moved: Mapping[str, float], result: Result) -> dict[str, float]:
    """Seconds of a step as factors: bytes or FLOPs, seconds per one at peak, and how much longer it took."""
    if name == "compute" and seconds > 0 and moved["seconds_at_peak"] > 0:
        return {
            "FLOPs per step": moved["flops"],
            "seconds per FLOP at peak": moved["seconds_at_peak"] / moved["flops"],
            "1 / share of the peak FLOP/s": seconds / moved["seconds_at_peak"],
        }
    if name not in moved or seconds <= 0 or moved[name] <= 0:
        return {"seconds per step": max(seconds, 0.0)}
    bandwidth = sum(moved[kind] for kind in KINDS) / moved["seconds_at_bandwidth"]
    amount = {"bytes per step": moved[name]}
    if name == "kv":
        per_token = result.memory.kv_bytes_per_token
        amount = {"tokens read per step": moved[name] / per_token, "bytes per token": per_token}
    return {
        **amount,
        "seconds per byte at peak": 1 / bandwidth,
        "1 / share of the bandwidth": seconds * bandwidth / moved[name],
    }
