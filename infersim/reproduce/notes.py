"""The value claims of two notes on inference speed: bandwidth bounds, KV capacity, and what speculation must accept.

The 70B of the notes is 70e9 parameters in 16 bits with 80 layers and 8 KV heads of 128, on an H100 SXM at 3.35 TB/s:
every efficiency 1, no overheads.
"""

from dataclasses import replace

from infersim.config.hardware import load_hardware
from infersim.config.precision import Precision
from infersim.cost.floors import decode_sums, floor_itl, reference_70b, step_bytes
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.models.architecture import Model

from .claims import Claim

TWO_WAYS = "Two Ways to Go Faster (notes)"
PAPERS = "The Papers Behind Modern Inference Optimisation (notes)"
CONTEXT = 8192
FP16 = Precision(weights="fp16", kv_cache="fp16")
DRAFT_TOKENS, ACCEPTED = 4, 3


def _step(model: Model, context: int = 0, weight_bits: float | None = None) -> float:
    """Seconds of one decode step at the H100's peak."""
    return floor_itl(Placement(model, load_hardware("h100-sxm"), FP16), context, weight_bits)


def _weight_bytes(weight_bits: float = 16) -> float:
    operators = forward_pass(Placement(reference_70b(), load_hardware("h100-sxm"), FP16))
    return step_bytes(operators, decode_sums(0), weight_bits / 16) - _kv_bytes(1)


def _kv_bytes(tokens: int) -> float:
    return tokens * reference_70b().kv_bytes_per_token(2)


def _kv_without_grouping() -> Model:
    """The reference with a KV head for each of its 64 query heads."""
    model = reference_70b()
    attention = replace(model.layers[0].attention, num_kv_heads=model.layers[0].attention.num_heads)
    return replace(model, layers=(replace(model.layers[0], attention=attention),) * model.num_layers)


def _draft_7b() -> Model:
    """7e9 parameters that a step reads: layers like the reference's, filled up to the round number."""
    model = replace(reference_70b(), layers=reference_70b().layers[:6])
    return replace(model, other_params=model.other_params + 7_000_000_000 - model.num_params)


def _draft_cost() -> float:
    return DRAFT_TOKENS * _step(_draft_7b())


def _per_token() -> float:
    return (_step(reference_70b()) + _draft_cost()) / ACCEPTED


def _wasted_slots(tokens: int, block_size: int) -> int:
    """KV slots that are held and empty; a contiguous reservation is a single block of its size."""
    return -(-tokens // block_size) * block_size - tokens


def _gqa() -> float:
    return _kv_without_grouping().kv_bytes_per_token(2) / reference_70b().kv_bytes_per_token(2)


NOTES = (
    Claim("bw.weights", TWO_WAYS, 140e9, "bytes", 0, _weight_bytes, "70e9 parameters of 2 bytes"),
    Claim("bw.step", TWO_WAYS, 0.0418, "s", 0.005, lambda: _step(reference_70b()), "all weights once, at peak"),
    Claim("bw.tps", TWO_WAYS, 23.9, "tokens/s", 0.005, lambda: 1 / _step(reference_70b()), "one sequence"),
    Claim("bw.kv_bytes", TWO_WAYS, 2684354560, "bytes", 0, lambda: _kv_bytes(CONTEXT), "K and V of 8,192 tokens"),
    Claim(
        "bw.kv_time", TWO_WAYS, 0.00080, "s", 0.01,
        lambda: _step(reference_70b(), CONTEXT) - _step(reference_70b()), "the step at 8,192 tokens less that at 0",
    ),
    Claim("bw.int4_bytes", TWO_WAYS, 35e9, "bytes", 0, lambda: _weight_bytes(4), "4 bits, scales not counted"),
    Claim(
        "bw.int4_step", TWO_WAYS, 0.0104, "s", 0.01, lambda: _step(reference_70b(), weight_bits=4), "4-bit weights",
    ),
    Claim(
        "bw.int4_tps", TWO_WAYS, 96, "tokens/s", 0.01, lambda: 1 / _step(reference_70b(), weight_bits=4),
        "one sequence, 4-bit weights",
    ),
    Claim("bw.gqa", TWO_WAYS, 8, "ratio of KV bytes", 0, _gqa, "64 KV heads against 8"),
    Claim(
        "kv.contiguous_waste", PAPERS, 1950, "token slots", 0, lambda: _wasted_slots(50, block_size=2000),
        "50 tokens generated in one contiguous reservation of 2,000",
    ),
    Claim("sd.draft_step", TWO_WAYS, 0.0042, "s per draft token", 0.01, lambda: _step(_draft_7b()), "7e9 parameters"),
    Claim("sd.draft_cost", TWO_WAYS, 0.0168, "s", 0.01, _draft_cost, "4 draft tokens"),
    Claim("sd.per_token", TWO_WAYS, 0.0195, "s per token", 0.01, _per_token, "3 tokens accepted per target step"),
    Claim("sd.tps", TWO_WAYS, 51, "tokens/s", 0.01, lambda: 1 / _per_token(), "3 tokens accepted per target step"),
    Claim(
        "sd.break_even", TWO_WAYS, 1.40, "accepted tokens per target step", 0.005,
        lambda: 1 + _draft_cost() / _step(reference_70b()), "1 + draft cost / target cost",
    ),
)  # fmt: skip
