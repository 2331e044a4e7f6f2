"""Bytes and FLOPs that papers on serving print: rooflines, KV traffic, quantised weights, chunked prefill."""

from dataclasses import replace
from functools import cache, partial

from infersim.config.engine import Engine, resolve
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.cost.drafting import batch_time
from infersim.cost.floors import floor_itl, reference_70b
from infersim.cost.placement import Placement
from infersim.cost.steptime import compile_step_cost
from infersim.cost.weight_only import KERNELS, gain
from infersim.deployment import deploy
from infersim.engine.compiled.state import QUERY_TILE
from infersim.models.catalog import load_model

from .claims import CLOSED_FORM, SIMULATION, Claim

RIDGES = {  # FLOP/B of 2-byte weights
    "A100-40GB-SXM": ("a100-sxm-40gb", 200.6), "A100-80GB-SXM": ("a100-sxm-80gb", 153.0),
    "H100-SXM": ("h100-sxm", 295.2), "H200-SXM": ("h200-sxm", 206.0), "A10": ("a10", 208.3),
}  # fmt: skip
MARLIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MARLIN_IDEAL = (3.87, 3.87, 3.87, 3.87, 3.87, 3.85, 3.27, 1.65)
GIB = 2.0**30


def ridge(profile: str) -> float:
    hardware = load_hardware(profile)
    return hardware.flops["fp16"] / hardware.memory_bandwidth


# --- KV traffic -------------------------------------------------------------------------------------------------------
def _distserve_kv() -> float:
    return 512 * load_model("OPT-66B").kv_bytes_per_token(2) * 10 / GIB


def _mooncake_bandwidth(flops: float) -> float:
    """GB/s at which loading the KV of a prefix of 8,192 tokens is as quick as computing it (equation 2: LLaMA3-70B)."""
    layers, width, prefix, groups = 80, 8192, 8192, 8
    kv_bytes = 2 * layers * width / groups * 2 * prefix
    work = layers * (4 * prefix**2 * width + 22 * prefix * width**2)
    return kv_bytes / (work / flops) / 1e9


# --- quantised weights ------------------------------------------------------------------------------------------------
@cache
def _decode_time(model: str, gpu: str, weights: str) -> float:
    """Seconds of a step of one sequence after 512 tokens."""
    engine = Engine(max_model_len=2048, max_num_seqs=64)
    d = deploy(model, load_hardware(gpu), Precision(weights=weights), Parallelism(), engine)
    return batch_time(d.step_cost(), 1, 512)


def _marlin_e2e() -> float:
    return _decode_time("Llama-2-7B", "a10", "fp16") / _decode_time("Llama-2-7B", "a10", "int4")


def _fp8_weights() -> float:
    return _decode_time("Llama-3.1-8B", "h100-sxm", "bf16") / _decode_time("Llama-3.1-8B", "h100-sxm", "fp8")


def _fp8_kv() -> tuple[float, float]:
    """ms: the intercept, and per token of context with FP8 keys and values. Llama-3.1-8B on an H100, one sequence."""
    engine = Engine(max_model_len=131072, max_num_seqs=8)
    hardware = load_hardware("h100-sxm")
    times = {}
    for kv in ("bf16", "fp8"):
        cost = deploy("Llama-3.1-8B", hardware, Precision(kv_cache=kv), Parallelism(), engine).step_cost()
        times[kv] = [batch_time(cost, 1, context) for context in (256, 100_256)]
    return times["bf16"][0] * 1e3, (times["fp8"][1] - times["fp8"][0]) / 100_000 * 1e3


def _gqa() -> float:
    """Time of MHA over that of 8 groups, the share of KV such that MHA over one KV head is 1.51 / 0.24. 64 heads."""
    ratio = 1.51 / 0.24
    kv = (ratio - 1) / (1 - ratio / 64)  # KV bytes over all others
    return (1 + kv) / (1 + kv / 8)


# --- prefill ----------------------------------------------------------------------------------------------------------
def prefill_time(model: str, gpu: str, tensor: int, tokens: int, chunk: int) -> float:
    """Seconds to prefill a prompt in chunks, memory not asked for."""
    hardware, loaded = load_hardware(gpu), load_model(model)
    engine = resolve(Engine(max_num_batched_tokens=chunk, max_num_seqs=8, max_model_len=tokens), hardware, tokens)
    parallelism = Parallelism.validate({"tensor": tensor}, "reproduce")
    cost = compile_step_cost(Placement(loaded, hardware, parallelism=parallelism), engine)
    total = 0.0
    for start in range(0, tokens, chunk):
        n = min(chunk, tokens - start)
        total += float(cost.linear[n].sum() + cost.head[1].sum())
        for row in cost.attention:
            window = int(row["window"]) or tokens
            keys = min(start + n, window - 1 + n)
            pairs = sum(min(start + i + 1, window) for i in range(n))
            memory = row["prefill_kv"] * keys + row["prefill_activations"] * n
            compute = row["prefill_compute"] * pairs + row["prefill_tile"] * -(-n // QUERY_TILE)
            total += float(max(memory, compute) + row["prefill_fixed"])
    return total


CHUNKED = (("Mistral-7B", "a100-sxm-80gb", 1), ("Yi-34B", "a100-sxm-80gb", 2))


def _chunk_overhead() -> float:
    """Percent: the worst of the two models over prompts of 2,048 and 4,096 tokens."""
    return max(
        100 * (prefill_time(*deployment, tokens, 512) / prefill_time(*deployment, tokens, tokens) - 1)
        for deployment in CHUNKED
        for tokens in (2048, 4096)
    )


def _falcon() -> tuple[float, float]:
    """ms of a 4,096-token prefill and of a decode step of 32 after 4,096, one stage of four GPUs after the other."""
    hardware, loaded = load_hardware("a100-sxm-80gb"), load_model("Falcon-180B")
    engine = resolve(Engine(max_num_batched_tokens=64, max_num_seqs=32, max_model_len=8192), hardware, 8192)
    parallelism = Parallelism.validate({"tensor": 4}, "reproduce")
    cost = compile_step_cost(Placement(loaded, hardware, parallelism=parallelism), engine)
    prefill = prefill_time("Falcon-180B", "a100-sxm-80gb", 4, 4096, 4096)
    return prefill * 1e3, batch_time(cost, 32, 4096) * 1e3


def _seed() -> tuple[float, ...]:
    """ms, tokens/s, GB, ms, ms, ms per token, tokens: the notes' 70B on an H100."""
    h100, model, fp16 = load_hardware("h100-sxm"), reference_70b(), Precision(weights="fp16", kv_cache="fp16")
    placed = Placement(model, h100, fp16)
    step, at_8192 = floor_itl(placed, 0), floor_itl(placed, 8192)
    int4 = floor_itl(placed, 0, weight_bits=4)
    draft = 4 * 4.2e-3  # the note's own draft time
    kv = 8192 * model.kv_bytes_per_token(2)
    return (
        step * 1e3,
        1 / step,
        kv / 1e9,
        (at_8192 - step) * 1e3,
        int4 * 1e3,
        (step + draft) / 3 * 1e3,
        1 + draft / step,
    )


def claims() -> tuple[Claim, ...]:
    a10, ideal = load_hardware("a10"), replace(KERNELS["marlin"], flops=1.0)
    rows = [
        Claim(f"ridge.{name}", "datasheets", expected, "FLOP/B", 0.001, partial(ridge, profile), f"profile {profile}")
        for name, (profile, expected) in RIDGES.items()
    ]
    rows += [
        Claim(
            "distserve.kv",
            "Zhong et al. 2024, DistServe",
            11.3,
            "GiB/s",
            CLOSED_FORM / 5,
            _distserve_kv,
            "OPT-66B, prompts of 512 tokens, 10 a second; printed as GB/s",
        ),
        Claim(
            "mooncake.eq2",
            "Qin et al. 2025, Mooncake, equation 2",
            (6, 19),
            "GB/s, 8 A800 and 8 H800",
            CLOSED_FORM,
            lambda: (_mooncake_bandwidth(8 * 312e12), _mooncake_bandwidth(8 * 989e12)),
            "prefix of 8,192 tokens",
        ),
        Claim(
            "mooncake.kv",
            "Qin et al. 2025, Mooncake",
            320,
            "KiB per token",
            0,
            lambda: load_model("Llama-3-70B").kv_bytes_per_token(2) / 1024,
            "LLaMA3-70B in 16 bits",
        ),
        Claim(
            "marlin.peak",
            "IST-DASLab/marlin README",
            MARLIN_IDEAL,
            "x fp16",
            0.02,
            lambda: tuple(gain(ideal, a10, batch) for batch in MARLIN_BATCHES),
            "the ideal kernel by batch on an A10, read off a figure; the real ones are fitted on theirs",
        ),
        Claim(
            "marlin.paper",
            "Frantar et al. 2024, MARLIN (arXiv 2408.11743)",
            2.8,
            "x end to end, most",
            SIMULATION,
            _marlin_e2e,
            "assumed: Llama-2-7B on an A10, one sequence, LM head in 16 bits",
        ),
        Claim(
            "fp8.w8a8",
            "vLLM documentation, FP8 W8A8",
            1.6,
            "x throughput, most",
            SIMULATION,
            _fp8_weights,
            "assumed: Llama-3.1-8B on an H100, one sequence, LM head in 16 bits",
        ),
        Claim(
            "fp8kv.itl",
            "vLLM blog 2026-04-22",
            (6.44, 2.37e-5),
            "ms, ms per token with FP8 KV",
            SIMULATION,
            _fp8_kv,
            "not counted: the slope in bf16, from which the attention kernel's bandwidth was taken",
        ),
        Claim(
            "gqa.tab1",
            "Ainslie et al. 2023, GQA (arXiv 2305.13245)",
            1.51 / 0.28,
            "x, MHA over 8 groups",
            0.30,
            _gqa,
            "input: MHA over one KV head, 1.51 s over 0.24 s, which tells the share of KV",
        ),
        Claim(
            "sarathi.chunk_ovh",
            "Agrawal et al. 2024, Sarathi-Serve",
            (0, 25),
            "% with chunks of 512",
            0,
            _chunk_overhead,
            "printed as the most; Mistral-7B on one A100, Yi-34B on two, prompts of 2,048 and 4,096",
            "range",
        ),
        Claim(
            "sarathi.falcon",
            "Agrawal et al. 2024, Sarathi-Serve",
            (1150, 200),
            "ms, prefill and decode",
            SIMULATION,
            _falcon,
            "8 A100 as two stages of four; assumed: decode after 4,096 tokens",
            why="4,096 tokens are 1.47 PFLOP, for four GPUs at their peak 1,180 ms, so eight worked on the prompt;"
            " decode takes 4.5 times what reading the weights does, an engine slower than its device",
        ),
        Claim(
            "seed.70b",
            "Two Ways to Go Faster (notes)",
            (41.8, 23.9, 2.68435456, 0.8, 10.4, 19.5, 1.4),
            "ms, tokens/s, GB, ms, ms, ms per token, tokens",
            CLOSED_FORM / 5,
            _seed,
            "70e9 parameters on an H100",
        ),
    ]
    return tuple(rows)
