"""KV memory as a capacity: Kwon et al. 2023, PagedAttention (arXiv 2309.06180), and the notes on it.

A contiguous reservation of the longest length is a paged cache whose block is that long: the same engine runs both.
"""

from functools import cache, partial

import numpy as np

from infersim.models.catalog import load_model
from infersim.run import run
from infersim.spec.scenario import build_scenario

from .claims import CLOSED_FORM, SIMULATION, Claim, relation, share_holding

PAPER = "Kwon et al. 2023, PagedAttention"
SPEED = "Inference speed isn't just a model-size problem (notes)"
NOTES = "The Papers Behind Modern Inference Optimisation (notes)"
GIB = 2.0**30
LONGEST, BLOCK = 2048, 16
TABLE_1 = (  # name, model, GiB of KV cache (printed as GB), slots, tolerance
    ("13b", "OPT-13B", 12, 15_700, 0.002),
    ("66b", "OPT-66B", 21, 9_700, 0.02),
    ("175b", "OPT-175B", 264, 60_100, 0.001),
)
SLOTS = 15_728  # of OPT-13B in 12 GiB

# Log-normal lengths that, cut at 2,048 in all, have ShareGPT's printed means (161.31 and 337.99, figure 11) and outputs
# the coefficient of variation that Orca's rows of figures 2 and 13a imply, 0.84. The joint distribution is not printed.
SHAREGPT = {
    "input_tokens": {"lognormal": {"mean": 185, "sigma": 1.0, "max": 500}},
    "output_tokens": {"lognormal": {"mean": 344, "sigma": 0.79, "max": 1548}},
}
LENGTHS = "the real sample's lengths are not printed, and vLLM was not saturated"
KEPT_FREE = 0.01  # vLLM 0.x's watermark, share of the blocks


def slots(model: str, gib: float) -> float:
    """Tokens whose keys and values fit."""
    return gib * GIB / load_model(model).kv_bytes_per_token(2)


@cache
def saturated(block: int):
    """OPT-13B on an A100 of 40 GB with 12 GiB of KV cache, 1,500 conversations waiting from the start."""
    engine = {
        "preset": "vllm-0.11",
        "block_size": block,
        "max_model_len": LONGEST,
        "num_gpu_blocks_override": SLOTS // block + 1,
        "gpu_memory_utilization": 0.95,
        "enable_prefix_caching": False,
    }
    data = {"model": "OPT-13B", "hardware": "a100-sxm-40gb", "precision": {"weights": "fp16", "kv_cache": "fp16"}}
    return run(build_scenario(data | {"engine": engine, "workload": {"num_requests": 1500, **SHAREGPT}}, "reproduce"))[
        0
    ]


def throughput(block: int) -> float:
    result = saturated(block)
    return float(result.requests["num_output_tokens"].sum() / result.end_time)


def running(block: int) -> float:
    """Sequences in a step while others wait, once those that began together have gone their ways."""
    r = saturated(block).requests
    end = r["scheduled"].max()
    start = end / 3
    inside = np.minimum(r["last_token"], end) - np.maximum(r["scheduled"], start)
    return float(np.maximum(inside, 0).sum() / (end - start))


def _utilisation() -> float:
    """Percent of all slots that hold a token: blocks are kept free, and last blocks are partly full."""
    r = saturated(BLOCK).requests
    tokens = held = 0
    for prompt, outputs in zip(r["prompt_tokens"].tolist(), r["num_output_tokens"].tolist(), strict=True):
        lengths = np.arange(prompt + 1, prompt + outputs + 1)
        tokens += lengths.sum()
        held += (-(-lengths // BLOCK) * BLOCK).sum()
    return float(100 * tokens / held * (1 - KEPT_FREE))


def held() -> float:
    """Mean tokens of a sequence that runs, weighted by the time it does."""
    r = saturated(BLOCK).requests
    prompt, outputs = r["prompt_tokens"].astype("f8"), r["num_output_tokens"].astype("f8")
    return float((outputs * (prompt + outputs / 2)).sum() / outputs.sum())


def _left_over() -> float:
    return 100 * (1 - SLOTS // LONGEST * LONGEST / SLOTS)


def _concurrency() -> float:
    """More sequences at once, more tokens per second, at a time per token that is less than twice as long."""
    paged, contiguous = saturated(BLOCK), saturated(LONGEST)
    tpot = []
    for result in (paged, contiguous):
        r = result.requests[result.requests["num_output_tokens"] > 1]
        tpot.append(((r["last_token"] - r["first_token"]) / (r["num_output_tokens"] - 1)).mean())
    return share_holding(
        [running(BLOCK) > 3 * running(LONGEST), throughput(BLOCK) > 2 * throughput(LONGEST), tpot[0] < 2 * tpot[1]]
    )


def sharing(tokens: int, shared: float, samples: int) -> float:
    """Percent of KV memory that `samples` sequences save by sharing the prompt's part of theirs."""
    whole = samples * tokens
    return 100 * (1 - (shared * tokens + samples * (1 - shared) * tokens) / whole)


def claims() -> tuple[Claim, ...]:
    rows = [
        Claim(f"vllm.tab1.{name}", PAPER, expected, "token slots", tolerance, partial(slots, model, gib),
              f"{gib} GiB of KV cache, as printed in GB; input: that size")
        for name, model, gib, expected, tolerance in TABLE_1
    ]  # fmt: skip
    rows += [
        Claim("vllm.kv_per_token.13b", PAPER, 819_200, "bytes", 0,
              lambda: load_model("OPT-13B").kv_bytes_per_token(2), "OPT-13B in 16 bits"),
        Claim("vllm.fig2.vllm", PAPER, 96.3, "% of slots used", 0.0156, _utilisation,
              "the last block's waste and 1 % kept free; assumed: log-normal lengths"),
        Claim("vllm.fig13a.orca_max", PAPER, 7.0, "sequences at once", CLOSED_FORM, lambda: running(LONGEST),
              "ShareGPT; 2,048 slots reserved for each; simulated"),
        Claim("vllm.fig13a.vllm", PAPER, 30.42, "sequences at once", 0.10, lambda: running(BLOCK),
              "ShareGPT; saturated here, at 2 requests a second there; assumed: log-normal lengths", why=LENGTHS),
        Claim("vllm.fig13b.orca_max", PAPER, 7.0, "sequences at once", 0, lambda: float(SLOTS // LONGEST),
              "Alpaca; whatever the lengths"),
        Claim("vllm.derived.vllm", PAPER, 498, "tokens held per running sequence", 0.10, held, "assumed: as above",
              why=LENGTHS),
        Claim("vllm.fig2.orca_max", PAPER, 8.9, "% of slots that no reservation fits", 0.0112, _left_over,
              "of the other three shares the lengths assumed here were made"),
        Claim("vllm.rate.vs_max", PAPER, (2.7, 8.0), "x rate over Orca (Max)", SIMULATION,
              lambda: throughput(BLOCK) / throughput(LONGEST), "OPT-13B, saturated; the range is over three models",
              "range"),
        Claim("kv.gain", SPEED, (2, 4), "x throughput", SIMULATION, lambda: throughput(BLOCK) / throughput(LONGEST),
              "OPT-13B, blocks of 16 against reservations of 2,048, both saturated", "range"),
        relation("kv.concurrency", NOTES, _concurrency, "the same runs: sequences, tokens/s, time per token",
                 "behaviour"),
    ]  # fmt: skip
    for samples, expected in ((2, 6.09), (4, 8.53), (6, 9.79)):
        rows.append(
            Claim(f"vllm.fig15.parallel{samples}", PAPER, expected, "% of memory saved", 1 / expected,
                  partial(sharing, 80, 0.122, samples), "input: the prompt is 12 % of the KV memory, as printed")
        )  # fmt: skip
    return tuple(rows)
