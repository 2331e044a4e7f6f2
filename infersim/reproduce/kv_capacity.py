"""KV memory as a capacity: what of it holds tokens, and how many sequences run at once (Kwon et al. 2023, figures 2 and
13), and the notes on it."""

from functools import partial
from typing import Any

import numpy as np

from infersim.explain.summary import kv_shares
from infersim.metrics.result import Result
from infersim.models.catalog import load_model

from .claims import CLOSED_FORM, SIMULATED, Claim, claim, share_holding
from .kwon import ASSUMED, HOST, LENGTHS_FITTED, SATURATED, running, served, slots, throughput
from .simulation import simulated, tpot

FIGURE_13 = (  # data, requests a second, systems
    ("a", "sharegpt", 2.0, ("orca_max", "orca_pow2", "orca_oracle", "vllm")),
    ("b", "alpaca", 30.0, ("orca_max", "orca_pow2", "orca_oracle", "vllm")),
)


def _shares(result: Result) -> dict[str, float]:
    shares = kv_shares(result)
    assert shares is not None  # pages of full attention
    return shares


def memory(system: str) -> tuple[float, ...]:
    """Percent of KV memory that holds tokens, is reserved, wasted inside reservations, and all other: figure 2."""
    shares = _shares(served(system))
    rest = shares["external"] + shares["free"]
    return tuple(100 * part for part in (shares["token"], shares["reserved"], shares["internal"], rest))


def held(system: str) -> float:
    """Tokens per sequence as the anchors are derived: figure 2's share of the slots, with more waiting than fits, over
    the sequences of figure 13a, at 2 requests a second, which vLLM still serves."""
    return _shares(served(system))["token"] * slots("13b") / running(served(system, rate=2.0))


def _step(data: str, rate: float) -> float:
    result = served("vllm", data, rate)
    return 1e3 * result.busy_time / result.num_steps


def _concurrency() -> float:
    """More sequences at once, more tokens per second, at a time per token that is less than twice as long."""
    both = (served("vllm"), served("orca_max"))
    sequences, rate, time = ([measure(result) for result in both] for measure in (running, throughput, tpot))
    return share_holding([sequences[0] > 3 * sequences[1], rate[0] > 2 * rate[1], time[0] < 2 * time[1]])


# --- the notes --------------------------------------------------------------------------------------------------------
def _alone(prompt: int, outputs: int, **engine: Any) -> Result:
    """One sequence, whose last token takes no slot."""
    load = {"num_requests": 1, "input_tokens": prompt, "output_tokens": outputs}
    return simulated(load, engine={"max_num_seqs": 1, "enable_prefix_caching": False, **engine})


def _contiguous_waste() -> float:
    """Slots of a reservation of 2,000 that are never filled."""
    shares = _shares(_alone(25, 25, preset="orca", reserve="max-model-len", max_model_len=2000))
    return 50 * shares["internal"] / (shares["token"] + shares["reserved"])


def _internal_waste() -> float:
    random = np.random.default_rng(0)
    sizes, prompts = random.choice((8, 16, 32, 64, 128), 24), random.integers(1, 6_000, 24)
    held = [
        _alone(int(n), 40, block_size=int(size), max_model_len=8192).peak_blocks * size
        for size, n in zip(sizes, prompts, strict=True)
    ]
    return share_holding(0 <= slots - (n + 39) < size for slots, size, n in zip(held, sizes, prompts, strict=True))


def kv_crossover(model: str) -> float:
    """Tokens in the cache from which keys and values outweigh the model."""
    loaded = load_model(model)
    return 2 * loaded.num_params / loaded.kv_bytes_per_token(2)


def _outweighs() -> float:
    """What an engine holds at most of 64 sequences' keys and values, over its weights: more than once with prompts of
    8,000 tokens, if they fit; less with 100."""
    cases = []
    for tokens, more in ((8000, True), (100, False)):
        load = {"num_requests": 64, "input_tokens": tokens, "output_tokens": 128}
        result = simulated(load, hardware="h200-sxm", engine={"max_model_len": 8192})
        held = result.peak_blocks * result.memory.block_bytes
        cases.append((held > result.memory.weights_bytes) == more)
        crossing = kv_crossover("Llama-3.1-8B") * result.memory.block_bytes / result.memory.block_size
        cases.append(abs(crossing / result.memory.weights_bytes - 1) < 0.01)
    return share_holding(cases)


def _running(system: str, data: str, rate: float) -> float:
    return running(served(system, data, rate))


def claims() -> tuple[Claim, ...]:
    lengths, host = LENGTHS_FITTED["sharegpt"], HOST
    rows = [
        *(claim(f"vllm.tab1.{name}", CLOSED_FORM, partial(slots, name),
                "input: the size of the KV cache, GiB that are printed as GB") for name in ("13b", "66b", "175b")),
        claim("vllm.kv_per_token.13b", CLOSED_FORM, lambda: load_model("OPT-13B").kv_bytes_per_token(2),
              "OPT-13B in 16 bits"),
        *(claim(f"vllm.fig2.{system}", SIMULATED, partial(memory, system),
                f"OPT-13B, {SATURATED:.0f} requests a second; {ASSUMED['sharegpt']}", **lengths)
          for system in ("orca_max", "orca_pow2", "orca_oracle")),
        claim("vllm.fig2.orca_max.external", SIMULATED, lambda: memory("orca_max")[3], "7 reservations of 2,048 slots"),
        claim("vllm.fig2.vllm", SIMULATED, lambda: 100 * _shares(served("vllm"))["token"],
              "more waiting than fit", **lengths),
    ]  # fmt: skip
    for part, data, rate, systems in FIGURE_13:
        rows += [
            claim(f"vllm.fig13{part}.{system}", SIMULATED,
                  partial(_running, system, data, rate),
                  f"OPT-13B, {data}, {rate:.0f} requests a second; {ASSUMED[data]}", **LENGTHS_FITTED[data], **host)
            for system in systems
        ]  # fmt: skip
    rows += [
        claim(f"vllm.derived.{name}", SIMULATED, partial(held, system),
              "tokens held: figure 2's share over figure 13a's sequences", **lengths)
        for name, system in (("max", "orca_max"), ("pow2", "orca_pow2"), ("oracle", "orca_oracle"), ("vllm", "vllm"))
    ]  # fmt: skip
    crossing = kv_crossover("Llama-3.1-8B")
    return (
        *rows,
        claim("vllm.derived.step", SIMULATED, lambda: _step("sharegpt", 2.0), "2 requests a second", **lengths, **host),
        claim("vllm.derived.step.alpaca", SIMULATED, lambda: _step("alpaca", 30.0), "30 requests a second",
              **LENGTHS_FITTED["alpaca"], **host),
        claim("kv.concurrency", SIMULATED, _concurrency,
              "OPT-13B, more waiting than fit: sequences, tokens/s, time per token"),
        claim("kv.contiguous_waste", SIMULATED, _contiguous_waste,
              "50 tokens in one contiguous reservation of 2,000"),
        claim("kv.internal_waste", SIMULATED, _internal_waste, "24 lengths and block sizes"),
        claim("kv.larger_than_weights", SIMULATED, _outweighs, f"Llama-3.1-8B: from {crossing:,.0f} cached tokens"),
    )  # fmt: skip
