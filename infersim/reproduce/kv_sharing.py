"""KV blocks that several sequences hold together: samples and beams of one prompt (Kwon et al. 2023, figure 15), and
prefixes that requests have in common."""

from functools import cache, partial
from typing import Any

import numpy as np

from infersim.config.scenario import Scenario, build_scenario
from infersim.explain.summary import kv_shares
from infersim.run import run, simulate
from infersim.workload.requests import Requests

from .claims import SIMULATED, Claim, claim, share_holding
from .kv_capacity import memory
from .kwon import ASSUMED, LENGTHS, LENGTHS_FITTED, LONGEST, requests_of, served
from .simulation import NO_FRONT_END

NUM_PROMPTS = {"alpaca": 10_000, "sharegpt": 1000}
TURNOVER = 0.1  # chance that a beam's successor comes of a beam drawn evenly
TURNOVER_FITTED: dict[str, Any] = {"chance that beams turn over, 0.1": ("vllm.fig15.beam4",)}
WIDTHS = (2, 4, 6)
BEAM_POINTS = 8


def samples(requests: Requests, n: int) -> Requests:
    """n requests for each, at the same time, with its prompt and, as segments of equal text, all of it but their own
    first tokens, which differ."""
    total = len(requests) * n
    arrival, prompt, outputs = (
        np.repeat(getattr(requests, name), n) for name in ("arrival", "prompt_tokens", "output_tokens")
    )
    return Requests(
        arrival=arrival,
        prompt_tokens=prompt + 1,
        output_tokens=np.maximum(outputs - 1, 1),
        request_id=np.arange(total),
        segment_offsets=np.arange(total + 1),
        segment_ids=np.repeat(np.arange(len(requests)), n),
        segment_lengths=prompt,
    )


def _roomy(prefix_caching: bool, workload: dict[str, Any], preset: str = "vllm-0.11") -> Scenario:
    """OPT-13B where all fit: what is held is counted. Samples of a prompt are there at once, as forks of it are: no
    front end takes one after another."""
    engine = {"preset": preset, "max_model_len": LONGEST, "enable_prefix_caching": prefix_caching, **NO_FRONT_END}
    description = {"model": "OPT-13B", "hardware": "h200-sxm", "engine": engine, "workload": workload}
    return build_scenario(description, "reproduce")


def saved_by_cache(data: str, n: int) -> float:
    """Percent of the block-seconds that n samples of each prompt save as requests that find its blocks (vLLM 1)."""
    workload = {"num_requests": NUM_PROMPTS[data], "request_rate": 0.1, **LENGTHS[data]}  # seldom two prompts at once
    shared, alone = (
        simulate(setting, samples(requests_of(setting), n)).block_time
        for setting in (_roomy(True, workload), _roomy(False, workload))
    )
    return 100 * (1 - shared / alone)


@cache
def saved_by_beams(data: str, width: int, turnover: float = TURNOVER) -> float:
    """Percent of the block-seconds that beams of one prompt save by sharing blocks, copied on write (vLLM 0)."""
    beams = {"beam_width": width, "beam_turnover": turnover}
    setting = _roomy(
        False, {"num_requests": NUM_PROMPTS[data], "request_rate": 0.1, **beams, **LENGTHS[data]}, "vllm-0"
    )
    rows = run(setting)[0].replicas.rows
    shared, held = (float(rows[name].sum()) for name in ("shared_time", "block_time"))
    return 100 * shared / (shared + held)


def saved_by_samples(data: str, n: int) -> float:
    """The same of samples, which are beams that go on from their own."""
    return saved_by_beams(data, n, turnover=0.0)


def _blog() -> float:
    """Older systems waste 60 to 80 % of the KV memory, vLLM less than 4; sharing saves 55 % at most."""
    wasted = [100 - memory(system)[0] for system in ("orca_max", "orca_pow2", "orca_oracle")]
    shares = kv_shares(served("vllm"))
    assert shares is not None
    paged = 100 * (1 - shares["token"])
    saved = saved_by_beams("alpaca", 6)
    return share_holding([*(57 <= percent <= 84 for percent in wasted), paged < 4, abs(saved - 55) <= BEAM_POINTS])


def _shared_once() -> float:
    """Samples of a prompt hold its full blocks once, found in the cache or forked and copied on write; requests with a
    prefix in common find it in memory, and prefill of it is done once."""
    cases = [abs(saved_by_cache("alpaca", n) - saved_by_samples("alpaca", n)) < 0.5 for n in WIDTHS]
    prefix = []
    for caching in (True, False):
        setting = _roomy(caching, {"num_requests": 1, "input_tokens": 1008, "output_tokens": 64})
        prefix.append(simulate(setting, samples(requests_of(setting), 64)))
    shared, alone = prefix
    cached = shared.requests["num_cached_tokens"]
    blocks = 1008 // 16
    cases += [
        (cached == 1008).sum() == 63,
        shared.peak_blocks == blocks + 64 * -(-(1 + 63) // 16),
        alone.peak_blocks == 64 * -(-(1009 + 63) // 16),
        shared.num_scheduled_tokens == alone.num_scheduled_tokens - 63 * 1008,
    ]
    return share_holding(cases)


def claims() -> tuple[Claim, ...]:
    sharegpt, alpaca = LENGTHS_FITTED.values()
    samples_note = "over time, prompts forked and copied on write"
    return (
        *(claim(f"vllm.fig15.parallel{n}", SIMULATED, partial(saved_by_samples, "alpaca", n),
                f"{samples_note}; {ASSUMED['alpaca']}", **alpaca) for n in WIDTHS),
        *(claim(f"vllm.fig15.beam{n}", SIMULATED, partial(saved_by_beams, "alpaca", n), **alpaca, **TURNOVER_FITTED)
          for n in WIDTHS),
        claim("vllm.sharegpt.parallel", SIMULATED, lambda: tuple(saved_by_samples("sharegpt", n) for n in WIDTHS),
              f"{samples_note}; {ASSUMED['sharegpt']}", **sharegpt),
        claim("vllm.sharegpt.beam", SIMULATED, lambda: tuple(saved_by_beams("sharegpt", n) for n in WIDTHS),
              "beams turn over as on Alpaca", **sharegpt, **TURNOVER_FITTED,
              why="prompts of ShareGPT were zeros (artifact, datasets/README.md), so that beams survive longer"),
        claim("vllm.blog.waste", SIMULATED, _blog, "OPT-13B for LLaMA-13B: Orca's three reservations, vLLM, 6 beams;"
              " not checked: rates over systems that are not modelled", **sharegpt),
        claim("kv.sharing", SIMULATED, _shared_once, "samples of a prompt by two models; 64 requests that begin alike"),
    )  # fmt: skip
