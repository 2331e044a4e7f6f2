"""Request rates that KV memory allows at equal latency: Kwon et al. 2023, figures 12, 14 and 18b."""

from collections.abc import Callable
from functools import cache

import numpy as np

from infersim.run import simulate

from .claims import SIMULATED, Claim, claim
from .kv_sharing import TURNOVER, TURNOVER_FITTED, samples
from .kwon import HOST, HOUR, LENGTHS_FITTED, SERVERS, kv_time, latency, normalised_latency, requests_of, scenario

LIMIT = 0.5  # s per output token, queueing included: assumed, the middle of figure 12's axis
WIDTH = 6
BLOCK_SIZES = (16, 32, 64, 128, 256)
FIXED_RATES = {"sharegpt": 2.01, "alpaca": 30.1}  # of figure 18b (artifact, experiments/fig18-b.sh and plot_fig12.py)
FIXED_RATES_TIME, TRACES = 600.0, 8  # s
GOOD = 3.0  # times the latency of blocks of 16
SHORT = 900.0  # s of OPT-175B's traces (section 6.1), and here of Alpaca's, which have 15 times as many requests


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
    seconds = SHORT if server == "175b" or data == "alpaca" else HOUR
    return highest(lambda rate: latency(system, data, rate, server, seconds) <= LIMIT)


@cache
def sustained_beams(system: str) -> float:
    """The same of OPT-13B on Alpaca, each request being WIDTH beams. A beam that goes on as another copies its last
    block where they share paged memory, and all of its piece of contiguous memory (artifact, orca's block manager)."""
    copy_time = TURNOVER * (1 - 1 / WIDTH) * 2 * _piece() * kv_time("13b")

    def holds(rate: float) -> bool:
        if system == "vllm":
            setting = scenario(system, "alpaca", rate, seconds=SHORT, width=WIDTH)
            requests, beams = requests_of(setting), {"beam_width": WIDTH, "beam_turnover": TURNOVER}
            setting = setting.model_copy(update={"workload": setting.workload.model_copy(update=beams)})
        else:
            setting = scenario(system, "alpaca", rate, seconds=SHORT, width=WIDTH, copy_time=copy_time)
            requests = samples(requests_of(setting), WIDTH)
        return normalised_latency(simulate(setting, requests)) <= LIMIT

    return highest(holds)


def _piece() -> float:
    """Tokens of a running sequence's piece of Orca (Oracle)'s memory, mean over time."""
    requests = requests_of(scenario("orca_oracle", "alpaca", 10.0))
    pieces = 2 ** np.ceil(np.log2(requests.prompt_tokens + requests.output_tokens))
    return float(np.average(pieces, weights=requests.output_tokens))


def over(system: str, server: str) -> float:
    return sustained("vllm", "sharegpt", server) / sustained(system, "sharegpt", server)


def _over_oracle_on_alpaca() -> tuple[float, float]:
    basic = sustained("vllm", "alpaca", "13b") / sustained("orca_oracle", "alpaca", "13b")
    return basic, sustained_beams("vllm") / sustained_beams("orca_oracle")


def _largest_good_block(data: str) -> float:
    """Tokens per block, with at most GOOD times the latency that blocks of 16 give; mean over traces."""
    rate, seconds = FIXED_RATES[data], FIXED_RATES_TIME
    times = [
        sum(latency("vllm", data, rate, seconds=seconds, block_size=size, seed=seed) for seed in range(TRACES))
        for size in BLOCK_SIZES
    ]
    return float(max(size for size, t in zip(BLOCK_SIZES, times, strict=True) if t <= GOOD * times[0]))


def claims() -> tuple[Claim, ...]:
    note = f"{', '.join(model for model, *_ in SERVERS.values())}; assumed: {LIMIT} s per token, queueing included"
    (sharegpt, alpaca), rates = LENGTHS_FITTED.values(), FIXED_RATES.values()
    return (
        claim("vllm.rate.vs_oracle", SIMULATED, lambda: tuple(over("orca_oracle", server) for server in SERVERS), note,
              **sharegpt, **HOST),
        claim("vllm.rate.vs_max", SIMULATED, lambda: tuple(over("orca_max", server) for server in SERVERS), note,
              **sharegpt, **HOST),
        claim("vllm.rate.vs_ft", SIMULATED, lambda: max(over("ft", server) for server in SERVERS),
              f"{note} (30 x at 0.35 s, 12 x at 0.6 s; others hardly move); batches as large as in the artifact,"
              " answered when the last of a batch has ended", **sharegpt, **HOST),
        claim("vllm.alpaca.oracle_basic_beam6", SIMULATED, _over_oracle_on_alpaca, "OPT-13B; 6 beams as in"
              " vllm.fig15.beam6, in contiguous memory 6 requests; copies are made at the device's bandwidth",
              **alpaca, **HOST, **TURNOVER_FITTED),
        claim("kv.gain", SIMULATED, lambda: over("orca_max", "13b"),
              f"OPT-13B on ShareGPT, blocks of 16 against reservations of 2,048, both at {LIMIT} s per token",
              **sharegpt, **HOST),
        claim("vllm.fig18b", SIMULATED, lambda: tuple(_largest_good_block(data) for data in FIXED_RATES),
              f"{' and '.join(f'{rate:g}' for rate in rates)} requests a second for ten minutes; {TRACES} traces;"
              f" assumed: good is at most {GOOD:g} times the latency of blocks of 16 (2.5 to 4.7 would tell the same)",
              **sharegpt, **alpaca, **HOST),
    )  # fmt: skip
