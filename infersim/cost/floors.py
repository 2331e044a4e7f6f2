"""What physics leaves: bytes at peak bandwidth, FLOPs at peak rate, every efficiency 1 and no overhead.

T_step = max(bytes / bandwidth, FLOPs / peak). Only weights and KV count as bytes: activations may stay on the chip.
"""

from collections.abc import Callable, Iterable

from infersim.config.hardware import Hardware
from infersim.config.precision import FORMATS

from .formats import weight_format
from .operator import Operator, Sums, evaluate
from .operators import forward_pass
from .placement import Placement
from .roofline import peak_flops
from .sharding import check_modelled

SumsOf = Callable[[int], Sums]
"""window (0: none) -> the sums of one step as layers of that window see them"""


def decode_sums(context: int) -> SumsOf:
    """One sequence that makes a token and reads the keys and values of `context` earlier ones."""
    step = {"step": 1, "tokens": 1, "sequences": 1, "decodes": 1} | NO_PREFILL
    return lambda window: step | {"decode_keys": context % -window if window < 0 else min(context, window or context)}


def prefill_sums(prompt_tokens: int) -> SumsOf:
    """One prompt in one pass. Its own keys are written, but need not be read back: prefill_keys is 0."""
    n = prompt_tokens
    step = {"step": 1, "tokens": n, "sequences": 1, "decodes": 0, "decode_keys": 0}
    step |= NO_PREFILL | {"prefill_tokens": n}

    def sums(window: int) -> Sums:
        inside = min(n, abs(window) or n)
        pairs = inside * (inside + 1) / 2
        if window < 0:
            chunks, rest = divmod(n, -window)
            return step | {"prefill_pairs": chunks * window * (window - 1) / 2 + rest * (rest + 1) / 2}
        return step | {"prefill_pairs": pairs + (n - inside) * inside}

    return sums


NO_PREFILL = {"prefill_tokens": 0, "prefill_keys": 0, "prefill_pairs": 0, "query_tiles": 0}


def step_bytes(operators: Iterable[Operator], sums: SumsOf, weight_scale: float = 1.0) -> float:
    """Bytes of weights (times weight_scale) and of KV that a step has to move."""
    return sum(
        op.count * (weight_scale * evaluate(op.weights, of) + evaluate(op.kv, of))
        for op, of in ((op, op.routed(sums(op.window))) for op in operators)
        if of[op.per]
    )


def step_floor(operators: Iterable[Operator], hardware: Hardware, sums: SumsOf, weight_scale: float = 1.0) -> float:
    """Seconds that no device of this bandwidth and these rates can beat."""
    operators = list(operators)
    compute = sum(
        op.count * evaluate(op.flops, op.routed(sums(op.window))) / peak_flops(hardware, op)
        for op in operators
        if op.flops
    )
    return max(step_bytes(operators, sums, weight_scale) / hardware.memory_bandwidth, compute)


def floor_itl(placement: Placement, context: int, weight_bits: float | None = None) -> float:
    """Seconds per token of one sequence after `context` tokens.

    weight_bits: bits that a weight takes, scales not counted, instead of what the precision says.
    """
    check_modelled(placement)
    name = weight_format(placement.model, placement.precision)
    assert name is not None  # else it is not modelled
    scale = 1.0 if weight_bits is None else weight_bits / FORMATS[name].bits
    return step_floor(forward_pass(placement), placement.hardware, decode_sums(context), scale)


def floor_ttft(placement: Placement, prompt_tokens: int) -> float:
    """Seconds to the first token of a prompt alone on the device."""
    check_modelled(placement)
    return step_floor(forward_pass(placement), placement.hardware, prefill_sums(prompt_tokens))
