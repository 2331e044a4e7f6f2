"""What the notes say that serving systems do, each shown on its preset or its cluster; speculation under load.

Constrained decoding is its two parts: the grammar's mask as the worker's time per sequence, and tokens that the grammar
leaves no choice of (jump-forward) as drafts that cost no pass and are always accepted.
"""

from functools import cache
from typing import Any

import numpy as np

from infersim.config.scenario import Scenario, build_scenario
from infersim.metrics.result import Result
from infersim.run import simulate

from .claims import SIMULATED, Claim, claim, share_holding
from .kv_rates import highest
from .kv_sharing import samples
from .kwon import requests_of
from .simulation import CHAT, simulated, token_time, tpot, ttft
from .speculation import drafts

LENGTHS: dict[str, Any] = {"input_tokens": 512, "output_tokens": 129}


def _p99_gap(result: Result) -> float:
    assert result.itl_gaps is not None
    return float(np.percentile(result.itl_gaps, 99))


def _setting(**keys: Any) -> Scenario:
    return build_scenario(CHAT | keys, "reproduce")


def _vllm() -> float:
    """Blocks of 16 taken as needed; requests join while others run, up to what is asked for."""
    result = simulated({"num_requests": 32, "max_concurrency": 8, **LENGTHS})
    order = np.sort(result.requests["scheduled"])
    joined = order[8] < result.requests["last_token"].max() and result.peak_running == 8
    peak = result.peak_blocks <= 8 * -(-(512 + 129) // 16)
    return share_holding([result.engine.block_size == 16, joined, peak])


@cache
def _one_by_one(preset: str, speculation: str = "", weights: str = "bf16", kv_cache: str = "bf16", mask: float = 0.0):
    """Eight requests, one at a time. speculation: method, or none."""
    return simulated(
        {"num_requests": 8, "max_concurrency": 1, **LENGTHS},
        engine={"preset": preset, "worker_sequence_time": mask} if mask else {"preset": preset},
        precision={"weights": weights, "kv_cache": kv_cache},
        speculation=drafts(speculation, 3, 1.0) if speculation else None,
    )


def _sglang() -> float:
    """A prefix of 1,001 tokens is found to the token (in blocks of 16, vLLM finds 992) and not computed again; the
    mask of a grammar adds its time to each step; forced tokens and drafts save steps."""
    found = {}
    for preset in ("sglang-0.5", "vllm-0.33"):
        setting = _setting(
            engine={"preset": preset}, workload={"num_requests": 1, "input_tokens": 1001, "output_tokens": 8}
        )
        alike = samples(requests_of(setting), 2)
        alike.arrival[1] = 10.0
        found[preset] = simulate(setting, alike).requests["num_cached_tokens"][1]
    plain, mask, forced, eagle = (
        _one_by_one("sglang-0.5", **more)
        for more in ({}, {"mask": 1e-3}, {"speculation": "ngram"}, {"speculation": "eagle3"})
    )
    return share_holding(
        [
            found == {"sglang-0.5": 1001, "vllm-0.33": 992},
            abs(tpot(mask) - tpot(plain) - 1e-3) < 1e-4,
            forced.num_steps < plain.num_steps / 3,
            tpot(forced) < tpot(eagle) < tpot(plain),
        ]
    )


def _trtllm() -> float:
    """4-bit weights and FP8 each shorten the step, FP8 that of a long prompt too (a short one takes as long as its
    launches, of which FP8 has more); blocks of 32 as they fill; attention
    that keeps no matrix in memory; drafts save steps; requests join while others run."""
    preset = "trtllm-1.0-no-evict"
    plain, int4, fp8, drafted = (
        _one_by_one(preset, **more)
        for more in ({}, {"weights": "int4"}, {"weights": "fp8", "kv_cache": "fp8"}, {"speculation": "eagle3"})
    )
    many = simulated({"num_requests": 32, "max_concurrency": 8, **LENGTHS}, engine={"preset": preset})
    long = {"num_requests": 1, "input_tokens": 16_000, "output_tokens": 2}
    unfused, fused = (
        simulated(long, engine={"preset": preset, "attention_kernel": kernel}) for kernel in ("standard", "flash3")
    )
    wide, narrow = (
        simulated(long, engine={"preset": preset}, precision={"weights": name, "kv_cache": name})
        for name in ("bf16", "fp8")
    )
    joined = np.sort(many.requests["scheduled"])[8]
    return share_holding(
        [
            tpot(int4) < tpot(fp8) < tpot(plain),
            ttft(narrow) < ttft(wide),
            many.engine.block_size == 32 and many.peak_blocks <= 8 * -(-(512 + 129) // 32),
            ttft(fused) < ttft(unfused),
            drafted.num_steps < plain.num_steps / 3,
            joined < many.requests["last_token"].max() and many.peak_running == 8,
        ]
    )


@cache
def _conversations(router: str) -> Result:
    """Sessions of four turns on four replicas."""
    turns = {"num_requests": 1200, "turns": 4, "request_rate": 5, "think_time": 2.0, "input_tokens": 1500,
             "output_tokens": 100}  # fmt: skip
    return simulated(turns, cluster={"replicas": 4, "router": router})


def _hit_rate(result: Result) -> float:
    return float(result.requests["num_cached_tokens"].sum() / result.requests["prompt_tokens"].sum())


def _llmd() -> float:
    """Placement by what is cached (llm-d's scorers) finds more of the prompts and answers sooner than round-robin."""
    placed, dealt = _conversations("weighted"), _conversations("round-robin")
    return share_holding([_hit_rate(placed) > 1.3 * _hit_rate(dealt), ttft(placed) < ttft(dealt)])


def _dynamo() -> float:
    """Prefill apart: no decode step waits for a prompt, so the longest gaps shrink, and keys and values cross the link;
    routing by KV events finds more of the prompts; a drafter apart costs each step its round trip and nothing else."""
    long = {"num_requests": 300, "request_rate": 6, "input_tokens": 6000, "output_tokens": 100}
    together = simulated(long, cluster={"replicas": 2}, save_detailed=True)
    link = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "transfer": {"bandwidth": 50e9}}
    apart = simulated(long, cluster=link, save_detailed=True)
    worst = [_p99_gap(result) for result in (together, apart)]
    near, far = (
        simulated(
            {"num_requests": 4, "max_concurrency": 1, **LENGTHS},
            speculation=drafts("draft_model", 3, 0.7) | {"drafter": {"latency": latency}},
        )
        for latency in (0, 1e-3)
    )
    aware, dealt = _conversations("kv-aware"), _conversations("round-robin")
    return share_holding(
        [
            worst[1] < 0.5 * worst[0],
            apart.route["transfer_bytes"] > 0,
            _hit_rate(aware) > 1.3 * _hit_rate(dealt),
            far.num_steps == near.num_steps,
            abs(far.busy_time - near.busy_time - 2e-3 * near.num_steps) < 1e-3 * near.num_steps,
        ]
    )


def _under_load() -> float:
    """Mean end-to-end latency: drafts shorten it at a low rate, lengthen it near what the engine sustains without, and
    lengthen it if few are accepted."""

    def latency(rate: float, k: int, acceptance: float) -> float:
        load = {"num_requests": 600, "request_rate": rate, **LENGTHS}
        result = simulated(load, speculation=drafts("draft_model", k, acceptance) if k else None)
        return float((result.requests["last_token"] - result.requests["sent"]).mean())

    low, high = 1.0, 90.0
    return share_holding(
        [
            latency(low, 5, 0.8) < latency(low, 0, 0.8),
            latency(high, 5, 0.8) > latency(high, 0, 0.8),
            latency(low, 5, 0.1) > latency(low, 0, 0.1),
        ]
    )


# Sarathi-Serve's openchat_sharegpt4 (its table 2), and its limits: P99 of the gaps between tokens within five decode
# steps of 32 sequences after 4,096 tokens (strict), half of the requests scheduled within 2 s.
SHAREGPT4 = {
    "input_tokens": {"lognormal": {"median": 1730, "p90": 5696, "max": 7000}},
    "output_tokens": {"lognormal": {"median": 415, "p90": 834, "max": 1100}},
}
STRICT, DELAY = 5, 2.0


def _capacity(preset: str) -> float:
    """Requests per second of Mistral-7B on an A100 within these limits."""
    limit = STRICT * token_time("Mistral-7B", "a100-sxm-80gb", 32, 4096)

    def holds(rate: float) -> bool:
        load, engine = (
            {"num_requests": 1500, "request_rate": rate, **SHAREGPT4},
            {"preset": preset, "max_model_len": 8192},
        )
        deployment = {"model": "Mistral-7B", "hardware": "a100-sxm-80gb", "engine": engine}
        result = simulated(load, **deployment, save_detailed=True)
        delay = np.median(result.requests["scheduled"] - result.requests["sent"])
        return bool(_p99_gap(result) <= limit and delay <= DELAY)

    return highest(holds)


def claims() -> tuple[Claim, ...]:
    return (
        claim("sys.vllm", SIMULATED, _vllm, "a run with 8 of 32 requests at once"),
        claim("sys.sglang", SIMULATED, _sglang, "radix cache, grammar's mask and forced tokens, drafts"),
        claim("sys.trtllm", SIMULATED, _trtllm, "INT4, FP8 (prefill: 16,000 tokens; a prompt of 512 waits for its"
              " launches, of which FP8 has more), paging, fused attention, drafts, joining"),
        claim("sys.dynamo", SIMULATED, _dynamo, "prefill apart, KV routing, a drafter apart"),
        claim("sys.llmd", SIMULATED, _llmd, "conversations of four turns on four replicas"),
        claim("sarathi.cap", SIMULATED, lambda: _capacity("sarathi") / _capacity("vllm-0"), "P99 between tokens within"
              " five decode steps; chunks of 512; assumed: log-normal lengths; the larger models' contexts are"
              " longer than their checkpoints'"),
        claim("turbospec", SIMULATED, _under_load, "Llama-3.2-1B drafts five for Llama-3.1-8B; the largest gain,"
              " printed as 3.2x, is over loads that are not listed"),
    )  # fmt: skip
