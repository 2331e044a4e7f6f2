"""Bytes and FLOPs that papers on serving print: rooflines, KV traffic, quantised weights, chunked prefill."""

from dataclasses import replace
from functools import partial
from typing import Any

from infersim.config.hardware import load_hardware
from infersim.cost.weight_only import KERNELS, gain
from infersim.models.catalog import load_model

from .claims import ARITHMETIC, CLOSED_FORM, SIMULATED, Claim, claim
from .simulation import decoding, prompt_time, token_time

RIDGES = {  # FLOP/B of 2-byte weights
    "A100-40GB-SXM": "a100-sxm-40gb", "A100-80GB-SXM": "a100-sxm-80gb", "H100-SXM": "h100-sxm", "H200-SXM": "h200-sxm",
    "A10": "a10",
}  # fmt: skip
MARLIN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
GIB = 2.0**30


def ridge(profile: str) -> float:
    hardware = load_hardware(profile)
    return hardware.flops["fp16"] / hardware.memory_bandwidth


# --- KV traffic -------------------------------------------------------------------------------------------------------
def _distserve_kv() -> float:
    return 512 * load_model("OPT-66B").kv_bytes_per_token(2) * 10 / GIB


def _mooncake_bandwidth(profile: str) -> float:
    """GB/s at which loading the KV of a prefix of 8,192 tokens is as quick as computing it on 8 GPUs (equation 2)."""
    model, prefix, flops = load_model("Llama-3-70B"), 8192, 8 * load_hardware(profile).flops["fp16"]
    width = model.hidden_size
    work = model.num_layers * (4 * prefix**2 * width + 22 * prefix * width**2)
    return prefix * model.kv_bytes_per_token(2) / (work / flops) / 1e9


# --- quantised weights and keys ---------------------------------------------------------------------------------------
def _fp8_kv(kv_cache: str) -> float:
    """ms per token of context, of one sequence."""
    near, far = (
        decoding(context=context, tokens=64, precision={"kv_cache": kv_cache}, engine={"max_num_seqs": 8})[0]
        for context in (1_000, 101_000)
    )
    return (far - near) / 100_000 * 1e3


def _gqa() -> float:
    """Time of MHA over that of 8 groups, the share of KV such that MHA over one KV head is 1.51 / 0.24. 64 heads."""
    ratio = 1.51 / 0.24
    kv = (ratio - 1) / (1 - ratio / 64)  # KV bytes over all others
    return (1 + kv) / (1 + kv / 8)


# --- prefill ----------------------------------------------------------------------------------------------------------
CHUNKED = (("Mistral-7B", 1), ("Yi-34B", 2))


def _chunk_overhead() -> float:
    """Percent: the worst of the two models over prompts of 2,048 and 4,095 tokens (Yi-34B ends there)."""
    found = []
    for model, tensor in CHUNKED:
        deployment = {"model": model, "hardware": "a100-sxm-80gb", "parallelism": {"tensor": tensor}}
        for tokens in (2048, 4095):
            chunks, whole = (
                prompt_time(tokens, **deployment, engine={"max_num_batched_tokens": most, "max_model_len": 4096})
                for most in (512, 4096)
            )
            found.append(100 * (chunks / whole - 1))
    return max(found)


def _falcon() -> tuple[float, float]:
    """ms of the longest prompt that the model takes and of a decode step of 32 after 1,500 tokens, one stage of four
    GPUs after the other."""
    deployment: dict[str, Any] = {
        "model": "Falcon-180B",
        "hardware": "a100-sxm-80gb",
        "parallelism": {"tensor": 4, "pipeline": 2},
    }
    return prompt_time(2047, **deployment) * 1e3, decoding(32, 1500, **deployment)[0] * 1e3


def claims() -> tuple[Claim, ...]:
    a10, ideal = load_hardware("a10"), replace(KERNELS["marlin"], flops=1.0)
    quantised = "one sequence, LM head in 16 bits"
    share: dict[str, Any] = {"share of KV": ("the two other rows of the table",)}
    return (
        *(claim(f"ridge.{name}", CLOSED_FORM, partial(ridge, profile), f"profile {profile}")
          for name, profile in RIDGES.items()),
        claim("distserve.kv", CLOSED_FORM, _distserve_kv,
              "OPT-66B, prompts of 512 tokens, 10 a second; printed as GB/s"),
        claim("mooncake.eq2", CLOSED_FORM, lambda: tuple(map(_mooncake_bandwidth, ("a100-sxm-80gb", "h100-sxm"))),
              "LLaMA3-70B, prefix of 8,192 tokens; an A800's and an H800's peaks are those of A100 and H100"),
        claim("mooncake.kv", CLOSED_FORM, lambda: load_model("Llama-3-70B").kv_bytes_per_token(2) / 1024,
              "LLaMA3-70B in 16 bits"),
        claim("marlin.peak", CLOSED_FORM, lambda: tuple(gain(ideal, a10, batch) for batch in MARLIN_BATCHES),
              "the ideal kernel by batch on an A10, read off a figure; the real ones are fitted on theirs",
              why="at batch 128 the A10's peak says 1.628, the figure 1.65"),
        claim("marlin.paper", SIMULATED, lambda: token_time("Llama-2-7B", "a10", weights="fp16")
              / token_time("Llama-2-7B", "a10", weights="int4"), f"assumed: Llama-2-7B on an A10, {quantised}"),
        claim("fp8.w8a8", SIMULATED, lambda: token_time("Llama-3.1-8B", "h100-sxm")
              / token_time("Llama-3.1-8B", "h100-sxm", weights="fp8"),
              f"assumed: Llama-3.1-8B on an H100, {quantised}"),
        claim("fp8kv.itl", SIMULATED, lambda: (_fp8_kv("bf16"), _fp8_kv("fp8")),
              "Llama-3.1-8B on an H100, one sequence; the intercept is not counted",
              why="FP8 keys are read at another share of the bandwidth in the kernel tables that price them"),
        claim("gqa.tab1", ARITHMETIC, _gqa, "the share of KV such that MHA over one KV head takes 1.51 s over 0.24 s",
              **share),
        claim("sarathi.chunk_ovh", SIMULATED, _chunk_overhead,
              "printed as the most; Mistral-7B on one A100, Yi-34B on two, prompts of 2,048 and 4,095"),
        claim("sarathi.falcon", SIMULATED, _falcon, "8 A100 as two stages of four; lengths are not printed: assumed",
              why="decode takes 4.5 times what reading the weights does, an engine slower than its device"),
    )  # fmt: skip
