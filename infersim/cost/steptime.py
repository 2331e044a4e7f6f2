"""Compiles a deployment into the engine's tables of seconds."""

import numpy as np

from infersim.engine.price import StepCost
from infersim.engine.state import ATTENTION_PRICE, HOST, LAUNCH, MAX_ATTENTION_KINDS
from infersim.models.architecture import Model
from infersim.spec.engine import ResolvedEngine
from infersim.spec.errors import InputError
from infersim.spec.hardware import Hardware
from infersim.spec.parallelism import Parallelism
from infersim.spec.precision import Precision

from .efficiency import efficiency, launch
from .operators import Operator, forward_pass
from .roofline import Rate, add_time, rate, tile_flops, zero_split
from .sharding import check_modelled


def capture_sizes(engine: ResolvedEngine) -> np.ndarray:
    """i8[n], the token counts for which vLLM captures CUDA graphs, ascending.

    1, 2, 4 and multiples of 8, from 256 on of 16 (in 0.11 of 8 throughout), up to min(2 max_num_seqs, 512) and the
    token budget (config/vllm.py; start-up logs count 51 sizes, that of 0.10.2 still 67).
    """
    largest = min(2 * engine.max_num_seqs, 512, engine.max_num_batched_tokens)
    coarse = np.arange(256, largest + 1, 8 if engine.version.startswith("0.11") else 16)
    sizes = np.concatenate([[1, 2, 4], np.arange(8, 256, 8), coarse])
    return sizes[sizes <= largest]


def padded_tokens(engine: ResolvedEngine) -> tuple[np.ndarray, np.ndarray]:
    """i8[max_num_batched_tokens + 1]: the tokens that a step of so many computes; bool: whether a graph runs it."""
    sizes = capture_sizes(engine)
    tokens = np.arange(engine.max_num_batched_tokens + 1)
    captured = tokens <= sizes[-1]
    index = np.searchsorted(sizes, np.minimum(tokens, sizes[-1]))
    return np.where(captured, sizes[index], tokens), captured


def compile_step_cost(
    model: Model, hardware: Hardware, precision: Precision, parallelism: Parallelism, engine: ResolvedEngine
) -> StepCost:
    """The price of every step of this deployment. InputError names what is not modelled."""
    check_modelled(model, hardware, precision, parallelism)
    tokens, captured = padded_tokens(engine)
    sequences = np.arange(engine.max_num_seqs + 1)
    linear, head = zero_split(len(tokens)), zero_split(len(sequences))
    kinds: dict[int, np.void] = {}
    times = launch(hardware)
    for operator in forward_pass(model, precision, parallelism.tensor):
        speed = rate(hardware, operator, parallelism.tensor)
        kernels = 0 if operator.wire else operator.count
        if operator.per == "tokens":
            add_time(linear, operator, speed, {"step": 1.0, "tokens": tokens})
            linear[:, LAUNCH] += np.where(captured, 0.0, kernels * (times.eager - times.graph))
        elif operator.per == "sequences":  # the head runs outside the graphs
            add_time(head, operator, speed, {"step": 1.0, "sequences": sequences})
            head[:, LAUNCH] += kernels * (times.eager - times.graph)
        else:
            _add_attention(kinds, operator, speed)
    if len(kinds) > MAX_ATTENTION_KINDS:
        raise InputError(
            f"model: {model.name} has {len(kinds)} different attention windows; at most {MAX_ATTENTION_KINDS} are"
            " modelled"
        )
    linear[:, HOST] += engine.worker_step_time
    head[:, HOST] += engine.worker_sequence_time * sequences
    linear[0] = head[0] = 0.0
    return StepCost(linear, head, np.array(list(kinds.values()), ATTENTION_PRICE))


def _add_attention(kinds: dict[int, np.void], operator: Operator, speed: Rate) -> None:
    """Add an attention operator to its window's row: seconds per sum, of all layers of the window."""
    row = kinds.setdefault(operator.window, np.zeros((), ATTENTION_PRICE)[()])
    row["window"] = operator.window
    phase, keys, queries = {
        "decodes": ("decode", "decode_keys", "decodes"),
        "prefill_tokens": ("prefill", "prefill_keys", "prefill_tokens"),
    }[operator.per]
    row[f"{phase}_kv"] += operator.count * speed.per_byte * operator.kv[keys]
    row[f"{phase}_activations"] += operator.count * speed.per_byte * operator.activations[queries]
    row[f"{phase}_fixed"] += operator.count * speed.fixed
    row[f"{phase}_softness"] = speed.softness
    (pair_flops,) = operator.flops.values()
    row[f"{phase}_compute"] += operator.count * speed.per_flop * pair_flops
    if phase == "prefill":
        row["prefill_tile"] += operator.count * speed.per_flop * tile_flops(operator, speed)


def provenance(
    model: Model, hardware: Hardware, precision: Precision, parallelism: Parallelism
) -> list[dict[str, str | float]]:
    """Every efficiency behind the prices of this deployment: operator class, dtype, the numbers, and their source.

    The last row, "launch", is what a kernel outside a CUDA graph takes longer.
    """
    used = dict.fromkeys((op.operator_class, op.dtype) for op in forward_pass(model, precision, parallelism.tensor))
    times = launch(hardware)
    rows = [(name, dtype, efficiency(hardware, name, dtype).model_dump()) for name, dtype in used]
    outside = {"bandwidth": 1.0, "flops": 1.0, "fixed": times.eager - times.graph, "knee": 1.0}
    rows.append(("launch", "", outside | {"provenance": "published", "source": times.source}))
    return [{"operator": name, "dtype": dtype, **row} for name, dtype, row in rows]
