"""The benchmark that would measure what was simulated: `vllm bench serve`, with the requests as a trace wherever its
options cannot say how they come."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from infersim.config.scenario import Scenario
from infersim.config.workload import Length, Workload
from infersim.metrics.result import Result

from .servers import PORT, name_of

if TYPE_CHECKING:
    from infersim.workload.requests import Requests

BLOCK = 16  # tokens per id of a trace: Bailian's
TRACE = "trace.jsonl"


def is_random(load: Workload) -> bool:
    """Whether vLLM's random dataset draws the same lengths, and its client the same arrivals."""
    lengths = all(isinstance(length, int) or (length is not None and (length.mean or length.uniform))
                  for length in (load.input_tokens, load.output_tokens))  # fmt: skip
    steady = not (load.curve or load.spikes or load.has_sessions or load.images or load.prefixes)
    return load.trace is None and lengths and steady and load.num_requests is not None


def bench_left_out(load: Workload) -> list[str]:
    """What of the traffic the client does not do, a sentence each."""
    given = {
        "timeout": "its client waits for every answer",
        "tenants": "its client has no priorities",
        "images": "sent as so many tokens of text",
        "models": "every request asks for one model",
        "model_column": "every request asks for one model",
        "beam_width": "its client asks for one sequence",
        "n": "its client asks for one sequence",
    }
    found = [f"workload.{key}: {why}" for key, why in given.items() if getattr(load, key) not in (None, 0, 1)]
    if load.has_sessions:
        found.append("workload.turns, users: sent at the times of the simulation, not when the answer before has come")
    return found


def bench_words(scenario: Scenario) -> list[str]:
    """The words of `vllm bench serve`; they name TRACE, of `trace_text`, unless `is_random`."""
    load, limits = scenario.workload, scenario.slo.request_limits
    words = ["vllm", "bench", "serve", "--model", name_of(scenario), "--port", str(PORT)]
    if is_random(load):
        mean_in, range_in = _random(load.input_tokens)
        mean_out, range_out = _random(load.output_tokens)
        ratio = f"{range_in:g}" if range_in == range_out else f'{{"input": {range_in:g}, "output": {range_out:g}}}'
        words += ["--dataset-name", "random", "--random-input-len", str(mean_in), "--random-output-len", str(mean_out)]
        words += ["--random-range-ratio", ratio, "--num-prompts", str(load.num_requests)]
        if load.ramp_up is not None:
            words += ["--ramp-up-strategy", load.ramp_up.strategy, "--ramp-up-start-rps", f"{load.ramp_up.start_rps:g}"]
            words += ["--ramp-up-end-rps", f"{load.ramp_up.end_rps:g}"]
        else:
            words += ["--request-rate", f"{load.request_rate:g}", "--burstiness", f"{load.burstiness:g}"]
    else:
        words += ["--dataset-name", "timed_trace", "--dataset-path", TRACE]
        words += ["--timed-trace-chunk-hash-size", str(BLOCK), "--timed-trace-sec-multiplier", "1"]
    words += ["--ignore-eos"]
    words += ["--max-concurrency", str(load.max_concurrency)] if load.max_concurrency is not None else []
    if limits:
        words += ["--goodput", *(f"{name}:{limit * 1e3:g}" for name, limit in limits.items())]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]
    return [*words, "--seed", str(scenario.simulation.seed), "--save-result"]


def trace_text(result: Result, requests: "Requests") -> str:
    """The requests as JSON lines in Bailian's format, which `workload.trace` reads too: when each
    was sent (s), its tokens, and an id per block of BLOCK tokens, equal where the text up to there is equal."""
    r, first = result.requests, np.isin(requests.request_id, result.request_ids)
    r = r[np.argsort(result.request_ids)]
    requests = requests.keep(first)
    order = np.argsort(requests.request_id)
    sent = np.where(r["sent"] >= 0, r["sent"], r["arrival"])
    lines, known = [], dict[tuple, int]()
    for number in np.argsort(sent, kind="stable").tolist():
        i = int(order[number])
        prompt, output = int(requests.prompt_tokens[i]), int(requests.output_tokens[i])
        row: dict[str, Any] = {"chat_id": int(requests.request_id[i]), "timestamp": round(float(sent[number]), 6)}
        row |= {"input_length": prompt, "output_length": output, "hash_ids": _blocks(requests, i, prompt, known)}
        lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"


def _blocks(requests: "Requests", i: int, prompt: int, known: dict[tuple, int]) -> list[int]:
    """Ids of a prompt's blocks: what the block before was, and which text fills it."""
    texts: list[tuple[int, int]] = []
    if requests.segments is not None:
        begins, counts, ids, lengths = requests.segments
        mine = slice(int(begins[i]), int(begins[i] + counts[i]))
        texts = list(zip(ids[mine].tolist(), lengths[mine].tolist(), strict=True))
    rest = prompt - sum(length for _, length in texts)
    texts += [(-1 - int(requests.request_id[i]), rest)] if rest > 0 else []
    found: list[int] = []
    part, room, before = [], BLOCK, -1
    for text, length in texts:
        at = 0
        while at < length:
            take = min(room, length - at)
            part.append((text, at, take))
            at, room = at + take, room - take
            if not room:
                before = known.setdefault((before, *part), len(known))
                found.append(before)
                part, room = [], BLOCK
    if part:
        found.append(known.setdefault((before, *part), len(known)))
    return found


def _random(length: int | Length | None) -> tuple[int, float]:
    """Mean and range ratio of vLLM's random dataset for one length or a uniform one."""
    assert length is not None  # is_random
    if isinstance(length, int):
        return length, 0.0
    if length.mean is not None and length.range_ratio is not None:
        return length.mean, length.range_ratio
    assert length.uniform is not None
    low, high = length.uniform
    return (low + high) // 2, (high - low) / (high + low)
