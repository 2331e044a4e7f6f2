"""How near a device comes to its datasheet, by class of operator: published figures, each with its source.

The profile's own `efficiency` comes first (class.dtype, then class). Then a figure of this very device; then one of a
device of its generation, or of the nearest generation that has one: that is an assumption, and says so.
"""

from functools import lru_cache
from typing import NamedTuple

from infersim.config.hardware import Hardware, OperatorEfficiency, load_hardware
from infersim.config.resources import names


class Cited(NamedTuple):
    """A published number and who published it."""

    value: float
    source: str


class Figures(NamedTuple):
    """One row of OperatorEfficiency. `fixed` None: the launch time inside a graph."""

    bandwidth: Cited
    flops: Cited
    softness: Cited
    fixed: Cited | None = None


class Launch(NamedTuple):
    """Seconds from one small kernel's start to the next one's, both queued: replayed in a graph, or launched."""

    graph: float
    eager: float
    source: str


# Where to look for a figure, nearest first. Names are profiles', or a card's where only that card was measured.
GENERATIONS = {
    "ampere": ("a100-sxm-80gb",),
    "ampere-ga10x": ("a40", "a100-sxm-80gb"),
    "ada": ("l40s", "l40", "a100-sxm-80gb"),
    "hopper": ("h100-sxm", "h100-pcie", "h200-sxm"),
    "blackwell": ("b200-sxm", "h100-sxm", "h100-pcie", "h200-sxm"),
    "blackwell-gb202": ("rtx-pro-6000", "l40s", "l40", "a100-sxm-80gb"),
    "cdna3": ("mi300x", "mi210", "h100-sxm", "h100-pcie"),
    "cdna4": ("mi355x", "mi210", "h100-sxm", "h100-pcie"),
}
OTHER = ("h100-sxm", "h100-pcie", "h200-sxm")  # TPUs and whatever has no published figure of its kind


def _launch(card: str, graph_us: float, eager_us: float) -> Launch:
    source = f"te42kyfo/gpu-benches gpu-small-kernels (2024-06), {card}, mean of the 8 smallest sizes"
    return Launch(graph_us * 1e-6, eager_us * 1e-6, source)


LAUNCH = {
    "a100-sxm-80gb": _launch("A100 80 GB", 1.35, 2.66),
    "a40": _launch("A40", 1.11, 1.98),
    "l40": _launch("L40", 0.95, 1.63),
    "h200-sxm": _launch("H200", 1.27, 2.43),
    "mi210": _launch("MI210", 2.02, 2.04),
}


def _aic(value: float, what: str, version: str = "vllm 0.24.0") -> Cited:
    return Cited(value, f"ai-dynamo/aiconfigurator {what}, {version}")


def _serving_sim(value: float, what: str) -> Cited:
    return Cited(value, f"casys-kaist/LLMServingSim, vLLM 0.19, Llama-3.1-8B, {what}")


def _like(figure: Cited, device: str) -> Cited:
    return figure._replace(source=f"as on the {device} ({figure.source})")


def _gemm(m1: float, m256: float, m1024: float, m8192: float, softness: float, version: str = "vllm 0.24.0") -> Figures:
    """From medians of achieved shares over bf16 shapes with N x K >= 3.4e7: of bandwidth at M = 1, of FLOP/s above."""
    table = "gemm, bf16, N x K >= 3.4e7, median share of"
    return Figures(
        _aic(m1, f"{table} bandwidth at M=1", version),
        _aic((m1024 + m8192) / 2, f"{table} peak, mean of {m1024} at M=1024 and {m8192} at M=8192", version),
        _aic(softness, f"gemm, bf16, such that M=256 reaches its median share of peak, {m256}", version),
    )


def _attention(bandwidth: Cited, flops: Cited, fixed: Cited) -> Figures:
    return Figures(bandwidth, flops, Cited(0.036, "assumed: nothing published separates the two sides"), fixed)


def _all_reduce(share: float, fixed_us: float, how: str, version: str = "vllm 0.24.0") -> Figures:
    bandwidth = _aic(share, f"custom_allreduce, graph, bytes on the wire of {how}", version)
    return Figures(bandwidth, NOT_USED, NOT_USED, _aic(fixed_us * 1e-6, "custom_allreduce, graph, 2 KiB", version))


NOT_USED = Cited(1.0, "not used: no FLOPs are counted")

# Reading 4.9 GB, far beyond any cache.
READ = {
    card: Cited(share, f"te42kyfo/gpu-benches gpu-l2-cache (2024-06), {card}, 4.9 GB read")
    for card, share in (("A100 80 GB", 0.850), ("L40", 0.922), ("H100 PCIe", 0.882), ("H200", 0.810))
}
FLASH_3 = Cited(0.663, "FlashAttention-3 README, H100, forward, causal, head dimension 128, fit of 512 to 16384 tokens")
FLASH_2 = Cited(
    0.620, "FlashAttention-2 README, A100, forward and backward, causal, head dimension 128, fit of 512 to 16384 tokens"
)
PREFILL_B200 = _aic(0.593, "context_attention, 32 heads of 128, 16384 tokens, 1768 us (tile overhead taken out)")
PREFILL_L40S = _aic(0.529, "context_attention, 32 heads of 128, 16384 tokens, 11825 us (tile overhead taken out)")
PREFILL_4090 = _serving_sim(0.849, "RTX 4090, 2048 queries after 16384 keys, 4225 us (tile overhead taken out)")
PREFILL_PRO_6000 = _serving_sim(0.592, "RTX PRO 6000, 2048 queries after 16384 keys, 2138 us (tile overhead taken out)")

SMALL_KERNEL = Cited(
    2.4e-6,
    "casys-kaist/LLMServingSim, vLLM 0.19, RTX 4090 and RTX PRO 6000: norm, rotary embedding and activation of 8 to 64"
    " tokens of Llama-3.1-8B take 2.0 to 3.3 us in place",
)

GEMM = {
    "a100-sxm-80gb": _gemm(0.708, 0.707, 0.848, 0.914, 0.1656, "vllm 0.14.0"),
    "h100-sxm": _gemm(0.844, 0.622, 0.822, 0.774, 0.04983),
    "h200-sxm": _gemm(0.791, 0.730, 0.817, 0.757, 0.02747),
    "b200-sxm": _gemm(0.719, 0.518, 0.686, 0.690, 0.08712),
    "l40s": _gemm(0.847, 0.400, 0.664, 0.573, 0.1619),
    "rtx-pro-6000": _gemm(0.918, 0.625, 0.832, 0.852, 0.09844),
}
LLAMA_CPP = "llama.cpp, Llama-3-8B f16 decode (XiongjieDai/GPU-Benchmarks-on-LLM-Inference), {} tokens/s of 16.06 GB"
TORCH = "zzc0721/torch-performance-test-data issue {}, bf16, 8192 x 8192, {} TFLOP/s"
MAMF = "stas00/ml-engineering MAMF, bf16, {} TFLOP/s"
MI210_READ = Cited(0.821, "te42kyfo/gpu-benches gpu-stream (2024-06), MI210, read")
GEMM |= {
    "rtx-4090": Figures(Cited(0.866, LLAMA_CPP.format(54.34)), Cited(0.970, TORCH.format(78, 160.2)),
                        _like(GEMM["l40s"].softness, "L40S")),
    "l4": Figures(_like(GEMM["l40s"].bandwidth, "L40S"), Cited(0.491, TORCH.format(120, 59.4)),
                  _like(GEMM["l40s"].softness, "L40S")),
    "a40": Figures(Cited(0.784, LLAMA_CPP.format(33.95)), Cited(0.739, TORCH.format(185, 110.6)),
                   _like(GEMM["a100-sxm-80gb"].softness, "A100")),
    "mi300x": Figures(MI210_READ, Cited(0.511, MAMF.format(668.4)), _like(GEMM["h100-sxm"].softness, "H100")),
    "mi325x": Figures(MI210_READ, Cited(0.601, MAMF.format(784.9)), _like(GEMM["h100-sxm"].softness, "H100")),
    "mi355x": Figures(MI210_READ, Cited(0.622, MAMF.format(1565.0)), _like(GEMM["h100-sxm"].softness, "H100")),
}  # fmt: skip

FIGURES: dict[str, dict[str, Figures]] = {
    "gemm": GEMM,
    "attention_prefill": {
        "h100-sxm": _attention(READ["H100 PCIe"], FLASH_3, _aic(11.6e-6, "context_attention, one token")),
        "a100-sxm-80gb": _attention(
            READ["A100 80 GB"], FLASH_2, _aic(12.5e-6, "context_attention, one token", "vllm 0.14.0")
        ),
        "b200-sxm": _attention(
            _like(READ["H100 PCIe"], "H100"), PREFILL_B200, _aic(9.0e-6, "context_attention, one token")
        ),
        "l40s": _attention(READ["L40"], PREFILL_L40S, _aic(8.7e-6, "context_attention, one token")),
        "rtx-4090": _attention(READ["L40"], PREFILL_4090, _serving_sim(9.8e-6, "RTX 4090, 16 queries")),
        "rtx-pro-6000": _attention(READ["L40"], PREFILL_PRO_6000, _serving_sim(8.0e-6, "RTX PRO 6000, 16 queries")),
    },
    "attention_decode": {
        "h100-sxm": _attention(
            Cited(0.895, "vLLM blog 2026-04-22, slope of inter-token latency over context, Llama-3.1-8B bf16"),
            FLASH_3, _aic(11.8e-6, "generation_attention, 2 keys")
        ),
        "h200-sxm": _attention(READ["H200"], FLASH_3, _aic(11.4e-6, "generation_attention, 2 keys")),
        "a100-sxm-80gb": _attention(
            READ["A100 80 GB"], FLASH_2, _aic(12.5e-6, "generation_attention, 2 keys", "vllm 0.14.0")
        ),
        "b200-sxm": _attention(
            _like(READ["H100 PCIe"], "H100"), PREFILL_B200, _aic(9.0e-6, "generation_attention, 2 keys")
        ),
        "l40s": _attention(READ["L40"], PREFILL_L40S, _aic(9.0e-6, "generation_attention, 2 keys")),
        "rtx-4090": _attention(READ["L40"], PREFILL_4090, _serving_sim(9.3e-6, "RTX 4090, one sequence of 16 keys")),
        "rtx-pro-6000": _attention(
            READ["L40"], PREFILL_PRO_6000, _serving_sim(8.4e-6, "RTX PRO 6000, one sequence of 16 keys")
        ),
    },
    "elementwise": {
        device: Figures(Cited(share, f"te42kyfo/gpu-benches gpu-stream (2024-06), {card}, scale (one read, one write)"),
                        NOT_USED, NOT_USED, SMALL_KERNEL)
        for device, card, share in (
            ("a100-sxm-80gb", "A100 80 GB", 0.849),
            ("a40", "A40", 0.937),
            ("l40", "L40", 0.879),
            ("h100-pcie", "H100 PCIe", 0.852),
            ("mi210", "MI210", 0.829),
        )
    },
    "collective": {
        "a100-sxm-80gb": _all_reduce(0.40, 5.6, "8 MiB over 8 GPUs, 129.0 us", "vllm 0.14.0"),
        "h100-sxm": _all_reduce(0.71, 4.6, "8 MiB over 8 GPUs, 50.7 us"),
        "h200-sxm": _all_reduce(0.75, 4.8, "8 MiB over 8 GPUs, 48.4 us"),
        "b200-sxm": _all_reduce(0.51, 7.5, "8 MiB over 8 GPUs, 39.2 us"),
        "l40s": _all_reduce(0.59, 5.3, "8 MiB over 2 GPUs, 450 us", "vllm 0.14.0"),
        "rtx-pro-6000": _all_reduce(0.54, 4.2, "8 MiB over 2 GPUs, 244.5 us"),
    },
}  # fmt: skip

# A prefill kernel's work beyond its causal pairs (whole tiles on the diagonal, prologue, imbalance), as further keys
# per query: 1 / rate = (1 + 2 keys / tokens) / asymptote fits each README's rows of 512 to 16384 tokens within 3 %.
TILE_KEYS = {
    "hopper": 301.0,  # the rows of FLASH_3
    "blackwell": 596.0,  # PREFILL_B200's share of 0.553 falls to 0.375 for 32 prompts of 2048 tokens
}
TILE_KEYS_OTHER = 242.0  # the rows of FLASH_2

# Seconds per further hop of a ring over PCIe: aiconfigurator custom_allreduce, RTX PRO 6000, vllm 0.24.0, 2 KiB:
# 25.5 us over 8 GPUs against 12.8 over 4.
RING_HOP = 1.6e-6


# Classes of operators without published figures of their own take those of the class that is most like them, and the
# fixed time of so many of its kernels (vLLM's fused_experts: sorting tokens, two grouped GEMMs, activation, sum).
EXPERT_KERNELS = 5
LIKE = {
    "moe": ("gemm", EXPERT_KERNELS),
    "mla_prefill": ("attention_prefill", 1),
    "mla_decode": ("attention_decode", 1),
    "recurrent": ("attention_decode", 1),
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), ("collective", 1)),
}


QUANTISED_INPUTS = ("fp8", "fp8_block", "int8", "nvfp4")


def _nearest(figures: dict, hardware: Hardware) -> str:
    """The device whose figure to take."""
    return next(name for name in (hardware.name, *GENERATIONS.get(hardware.generation, ()), *OTHER) if name in figures)


def launch(hardware: Hardware) -> Launch:
    """Launch times of this device, or of the nearest that was measured."""
    if hardware.launch is not None:
        return Launch(hardware.launch.graph, hardware.launch.eager, hardware.launch.source)
    return LAUNCH[_nearest(LAUNCH, hardware)]


def tile_keys(hardware: Hardware) -> float:
    """Keys that a prefill kernel works off beyond those that a query sees, per query."""
    return TILE_KEYS.get(hardware.generation, TILE_KEYS_OTHER)


def efficiency(hardware: Hardware, operator_class: str, dtype: str) -> OperatorEfficiency:
    """The shares, fixed time and softness of one class of operators of one dtype on this device, with their source.

    The device's own first, then what its generation's nearest device with any has: calibrated before published.
    """
    if found := calibrated(hardware, operator_class, dtype):
        return found
    figures = FIGURES.get(operator_class, {})
    for name in (hardware.name, *GENERATIONS.get(hardware.generation, ()), *OTHER):
        if name != hardware.name and (found := calibrated(_profile(name), operator_class, dtype)):
            return _assumed(found, f"as {name}")
        if name in figures and (dtype not in QUANTISED_INPUTS or operator_class != "gemm"):
            return _published(hardware, operator_class, dtype, name)
    if operator_class in LIKE:
        other, kernels = LIKE[operator_class]
        base = efficiency(hardware, other, dtype)
        what = f"as {other}{f' x {kernels} kernels' if kernels > 1 else ''}"
        # what a law adds to the roofline holds for its own kernels
        terms = {name: value for name, value in base.terms.items() if name == "query_keys"}
        return _assumed(base, what, fixed=kernels * base.fixed, terms=terms, correction=None)
    # a kernel in front turns the inputs into the format
    base = efficiency(hardware, "gemm", "bf16")
    what = "as bf16, twice its fixed time for quantising the inputs"
    return _assumed(base, what, fixed=2 * base.fixed, correction=None)


def calibrated(hardware: Hardware | None, operator_class: str, dtype: str) -> OperatorEfficiency | None:
    """What the profile itself says; of attention over keys in a format that was not measured, as in bf16."""
    if hardware is None:
        return None
    own = hardware.efficiency
    if found := own.get(f"{operator_class}.{dtype}") or own.get(operator_class):
        return found
    if dtype == "fp16" or (operator_class.startswith(("attention", "mla")) and dtype != "fp32"):
        return own.get(f"{operator_class}.bf16")
    return None


@lru_cache(maxsize=32)
def _profile(name: str) -> Hardware | None:
    """The packaged profile of this name, if there is one."""
    return load_hardware(name) if name in names("hardware_profiles") else None


def _assumed(base: OperatorEfficiency, what: str, **changes) -> OperatorEfficiency:
    source = f"{what}: {base.source}"
    return base.model_copy(update={"provenance": "assumed", "source": source, "errors": {}, **changes})


def _published(hardware: Hardware, operator_class: str, dtype: str, device: str) -> OperatorEfficiency:
    """The figures of `device`, for this one."""
    figures = FIGURES[operator_class][device]
    fixed = figures.fixed or Cited(launch(hardware).graph, launch(hardware).source)
    named = {"bandwidth": figures.bandwidth, "flops": figures.flops, "softness": figures.softness, "fixed": fixed}
    source = "; ".join(f"{key}: {cited.source}" for key, cited in named.items() if cited is not NOT_USED)
    exact = device == hardware.name and (dtype in ("bf16", "fp16") or figures.flops is NOT_USED)
    return OperatorEfficiency(
        **{key: cited.value for key, cited in named.items()},
        terms={"query_keys": tile_keys(hardware)} if operator_class == "attention_prefill" else {},
        provenance="published" if exact else "assumed",
        source=source if exact else f"as {device} in bf16: {source}",
    )
