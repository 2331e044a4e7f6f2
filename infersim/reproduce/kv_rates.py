"""Request rates that KV memory allows at equal latency: Kwon et al. 2023, figures 12, 14 and 18b."""

from collections.abc import Callable
from functools import cache

import numpy as np

from infersim.run import run, simulate

from .claims import SIMULATION, Claim
from .kv_sharing import TURNOVER, samples
from .kwon import PAPER, SERVERS, latency, normalised_latency, requests_of, scenario

SPEED = "Inference speed isn't just a model-size problem (notes)"
LIMIT = 0.5  # s per output token, queueing included: assumed, the middle of figure 12's axis
WIDTH = 6
BLOCK_SIZES = (16, 32, 64, 128, 256)


def highest(holds: Callable[[float], bool]) -> float:
    """Requests per second up to which holds(rate), within 0.1 %."""
    low, high = 0.02, 100.0
    while high > 1.002 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low * high) ** 0.5


@cache
def sustained(system: str, data: str, server: str) -> float:
    """Requests per second."""
    return highest(lambda rate: latency(system, data, rate, server) <= LIMIT)


@cache
def sustained_beams(system: str) -> float:
    """The same of OPT-13B on Alpaca, each request being WIDTH beams, which share paged memory only."""

    def holds(rate: float) -> bool:
        setting = scenario(system, "alpaca", rate)
        prompts = requests_of(setting)
        prompts = prompts.keep(np.arange(len(prompts)) < 10_000)
        if system == "vllm":
            beams = {"beam_width": WIDTH, "beam_turnover": TURNOVER, "num_requests": len(prompts)}
            load = setting.workload.model_copy(update=beams)
            return normalised_latency(run(setting.model_copy(update={"workload": load}))[0]) <= LIMIT
        return normalised_latency(simulate(setting, samples(prompts, WIDTH))) <= LIMIT

    return highest(holds)


def over(system: str, server: str) -> float:
    return sustained("vllm", "sharegpt", server) / sustained(system, "sharegpt", server)


def _over_oracle_on_alpaca() -> tuple[float, float]:
    basic = sustained("vllm", "alpaca", "13b") / sustained("orca_oracle", "alpaca", "13b")
    return basic, sustained_beams("vllm") / sustained_beams("orca_oracle")


def _largest_good_block(data: str, rate: float) -> float:
    """Tokens per block, with at most twice the latency that blocks of 16 give."""
    times = [latency("vllm", data, rate, block_size=size) for size in BLOCK_SIZES]
    return float(max(size for size, t in zip(BLOCK_SIZES, times, strict=True) if t <= 2 * times[0]))


def claims() -> tuple[Claim, ...]:
    note = f"{', '.join(model for model, *_ in SERVERS.values())}; assumed: {LIMIT} s per token, queueing included"
    return (
        Claim("vllm.rate.vs_oracle", PAPER, (1.7, 2.7), "x rate over Orca (Oracle)", SIMULATION,
              lambda: tuple(over("orca_oracle", server) for server in SERVERS), note, "range"),
        Claim("vllm.rate.vs_max", PAPER, (2.7, 8.0), "x rate over Orca (Max)", 0.25,
              lambda: tuple(over("orca_max", server) for server in SERVERS), note, "range"),
        Claim("vllm.rate.vs_ft", PAPER, 22, "x rate over FasterTransformer, most", 0.30,
              lambda: max(over("ft", server) for server in SERVERS), note,
              why="a batch here waits only for its longest request; how theirs was formed and padded is not printed"),
        Claim("vllm.alpaca.oracle_basic_beam6", PAPER, (1.3, 2.3), "x rate over Orca (Oracle), one sequence and beams",
              SIMULATION, _over_oracle_on_alpaca, "OPT-13B; 6 beams as in vllm.fig15.beam6;"
              " in contiguous memory 6 requests", why="beams gain less: contiguous memory does not copy beams here, and"
              " early vLLM's time per sequence and its 256 sequences bind"),
        Claim("kv.gain", SPEED, (2, 4), "x requests per second", SIMULATION, lambda: over("orca_max", "13b"),
              f"OPT-13B on ShareGPT, blocks of 16 against reservations of 2,048, both at {LIMIT} s per token", "range"),
        Claim("vllm.fig18b", PAPER, (128, 32), "tokens per block at most, ShareGPT and Alpaca", 0,
              lambda: (_largest_good_block("sharegpt", 2.0), _largest_good_block("alpaca", 30.0)),
              "assumed: figure 13's rates, and at most twice the latency of blocks of 16",
              why="nearer to what vLLM sustains than these rates are, blocks of 64 hurt Alpaca here too"),
    )  # fmt: skip
