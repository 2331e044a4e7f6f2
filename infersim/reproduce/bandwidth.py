"""Bandwidth bounds of two notes on inference speed, and what ends them.

The 70B of the notes is 70e9 parameters in 16 bits with 80 layers and 8 KV heads of 128, on an H100 SXM at 3.35 TB/s:
every efficiency 1, no overheads.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from infersim.config.hardware import load_hardware
from infersim.config.precision import Precision
from infersim.cost.floors import decode_sums, floor_itl, prefill_sums, step_bytes, step_floor
from infersim.cost.operator import Operator
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.speculation import tokens_needed
from infersim.cost.weight_only import KERNELS, crossover_rows, gain
from infersim.models.architecture import MLP, Attention, Layer, Model

from .claims import CLOSED_FORM, SIMULATED, Claim, claim, share_holding
from .simulation import seconds, simulated

CONTEXT, DRAFT_TOKENS, ACCEPTED = 8192, 4, 3
FP16 = Precision(weights="fp16", kv_cache="fp16")


def reference_70b() -> Model:
    """70e9 parameters that a decode step reads: 80 layers, 8 KV heads of 128. What published arithmetic calls "70B".

    Llama-3.1-70B but for its MLP, whose width makes up the round number (other_params the last 0.01 %); the input
    embedding is not counted.
    """
    h, vocab_size, num_layers = 8192, 128256, 80
    layer = Layer(Attention("full", num_heads=64, num_kv_heads=8, head_dim=128), MLP(28920), norm_params=2 * h)
    lm_head_params = vocab_size * h
    return Model(
        name="reference-70b",
        family="llama",
        hidden_size=h,
        vocab_size=vocab_size,
        layers=(layer,) * num_layers,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        embedding_params=0,
        lm_head_params=lm_head_params,
        other_params=70_000_000_000 - num_layers * layer.num_params(h) - lm_head_params,
        source="70e9 parameters by definition",
    )


def placed(model: Model) -> Placement:
    return Placement(model, load_hardware("h100-sxm"), FP16)


def step(model: Model | None = None, context: int = 0, weight_bits: float | None = None) -> float:
    """Seconds of one decode step at the H100's peak; default: of the 70B."""
    return floor_itl(placed(model or reference_70b()), context, weight_bits)


def _operators() -> list[Operator]:
    return list(forward_pass(placed(reference_70b())))


def _weight_bytes(weight_bits: float = 16) -> float:
    operators = [replace(operator, kv={}) for operator in _operators()]
    return step_bytes(operators, decode_sums(0), weight_bits / 16)


def _kv_bytes(tokens: int) -> float:
    return tokens * reference_70b().kv_bytes_per_token(2)


def without_grouping() -> Model:
    """The reference with a KV head for each of its 64 query heads."""
    model = reference_70b()
    attention = replace(model.layers[0].attention, num_kv_heads=model.layers[0].attention.num_heads)
    return replace(model, layers=(replace(model.layers[0], attention=attention),) * model.num_layers)


def _draft_cost() -> float:
    """Of 7e9 parameters that a step reads: layers like the reference's, filled up to the round number."""
    model = replace(reference_70b(), layers=reference_70b().layers[:6])
    return DRAFT_TOKENS * step(replace(model, other_params=model.other_params + 7_000_000_000 - model.num_params))


def _per_token() -> float:
    return (step() + _draft_cost()) / ACCEPTED


def _mlp_flops() -> float:
    """Half the MLP's FLOPs, or half the weights' bytes, of 1 and of 4,096 tokens."""
    h100, whole = load_hardware("h100-sxm"), _operators()
    fewer = [
        replace(o, flops={k: x / 2 for k, x in o.flops.items()}) if o.name in ("gate_up_proj", "down_proj") else o
        for o in whole
    ]
    one, many = (
        [step_floor(whole, h100, sums), step_floor(fewer, h100, sums), step_floor(whole, h100, sums, 0.5)]
        for sums in (decode_sums(1), prefill_sums(4096))
    )
    return share_holding([one[1] == one[0], one[2] < 0.51 * one[0], many[1] < 0.7 * many[0], many[2] == many[0]])


def _int4_stops() -> float:
    """Near 4x at one row (the kernels' own A10; marlin on others too), and nothing left at 8,192."""
    pairs = [("a10", kernel) for kernel in KERNELS]
    pairs += [(device, "marlin") for device in ("h100-sxm", "rtx-4090", "a100-sxm-80gb")]
    gains = [[gain(KERNELS[kernel], load_hardware(device), rows) for rows in (1, 8192)] for device, kernel in pairs]
    return share_holding(3 <= few <= 4 and many < 1 for few, many in gains)


def _communication() -> float:
    """Share of 64 sequences' time in collectives and in reading weights, 1 to 8 L40S over PCIe."""
    shares = []
    for tensor in (1, 2, 4, 8):
        load = {"num_requests": 64, "input_tokens": 64, "output_tokens": 128}
        result = simulated(load, hardware="l40s", parallelism={"tensor": tensor})
        shares.append([seconds(result, name) / result.busy_time for name in ("collectives", "weights")])
    rising = [a[0] < b[0] for a, b in pairwise(shares)]
    return share_holding([*rising, shares[0][0] == 0, shares[-1][0] > shares[-1][1]])


def claims() -> tuple[Claim, ...]:
    ends = ", ".join(f"{crossover_rows(kernel, load_hardware('a10'))} ({name})" for name, kernel in KERNELS.items())
    closed: dict[str, Any] = {
        "bw.weights": (_weight_bytes, "70e9 parameters of 2 bytes"),
        "bw.step": (step, "all weights once, at peak"),
        "bw.tps": (lambda: 1 / step(), "one sequence"),
        "bw.kv_bytes": (lambda: _kv_bytes(CONTEXT), "K and V of 8,192 tokens"),
        "bw.kv_time": (lambda: step(context=CONTEXT) - step(), "the step at 8,192 tokens less that at 0"),
        "bw.int4_bytes": (lambda: _weight_bytes(4), "4 bits, scales not counted"),
        "bw.int4_step": (lambda: step(weight_bits=4), "4-bit weights"),
        "bw.int4_tps": (lambda: 1 / step(weight_bits=4), "one sequence, 4-bit weights"),
        "bw.gqa": (lambda: without_grouping().kv_bytes_per_token(2) / _kv_bytes(1), "64 KV heads against 8"),
        "sd.draft_step": (lambda: _draft_cost() / DRAFT_TOKENS, "7e9 parameters"),
        "sd.draft_cost": (_draft_cost, "4 draft tokens"),
        "sd.per_token": (_per_token, "3 tokens accepted per target step"),
        "sd.tps": (lambda: 1 / _per_token(), "3 tokens accepted per target step"),
        "sd.break_even": (lambda: tokens_needed(_draft_cost(), step()), "1 + draft cost / target cost"),
        "bw.mlp_flops": (_mlp_flops, "70B on an H100, 1 and 4,096 tokens"),
        "bw.int4_stops": (_int4_stops, f"4 kernels; on an A10 the gain ends at batch {ends}"),
    }
    return (
        *(claim(id, CLOSED_FORM, *row) for id, row in closed.items()),
        claim("bw.tp_comm", SIMULATED, _communication, "Llama-3.1-8B, 64 sequences, 1 to 8 L40S over PCIe"),
    )
