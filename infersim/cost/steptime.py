"""Compiles a deployment into the engine's tables of seconds."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from infersim.config.engine import ResolvedEngine
from infersim.config.errors import InputError
from infersim.engine.compiled.law import decode_demand, prefill_demand, smooth_max
from infersim.engine.compiled.state import ATTENTION_PRICE, CORRECTION, HOST, LAUNCH, MAX_ATTENTION_KINDS, QUERY_TILE
from infersim.engine.price import StepCost

from .correction import exp2
from .efficiency import EXPERT_KERNELS, efficiency, launch, launch_provenance
from .laws import attention_coordinates
from .mixed import add_mixed
from .operator import Operator
from .operators import forward_pass
from .placement import Placement
from .roofline import PAIRS, Rate, add_time, attention_law, rate, zero_split
from .sharding import check_modelled, pipeline_stages
from .two_batches import SENDING_SMS, with_two_batches

FUSED_BYTES = 8 * 2**20
"""up to this size an all-reduce can add the residual and normalise on its way (vLLM's thresholds of FlashInfer's kernel
for 8 ranks; TensorRT-LLM's RESIDUAL_RMS_NORM)"""


def capture_sizes(engine: ResolvedEngine) -> np.ndarray:
    """i8[n], the token counts for which the engine captures CUDA graphs, ascending.

    vLLM: 1, 2, 4 and multiples of 8, from 256 on of engine.cuda_graph_step, up to min(2 max_num_seqs, 512) and the
    token budget (config/vllm.py; start-up logs count 51 sizes, that of 0.10.2 still 67). SGLang (server_args.py) and
    TensorRT-LLM (llm_args.py, padding on) capture batches of decodes, up to engine.max_cudagraph_capture_size.
    """
    largest = engine.max_cudagraph_capture_size or min(2 * engine.max_num_seqs, 512)
    largest = min(largest, engine.max_num_batched_tokens)
    if engine.cuda_graph_sizes == "sglang":
        steps: list = [
            [1, 2, 4, 8, 12],
            np.arange(16, 257, 8),
            np.arange(272, 512, 16),
            np.arange(512, largest + 1, 32),
        ]
    elif engine.cuda_graph_sizes == "trtllm":
        steps = [[1, 2, 4], np.arange(8, 129, 8), 2 ** np.arange(8, 20), [largest]]
    else:
        steps = [[1, 2, 4], np.arange(8, 256, 8), np.arange(256, largest + 1, engine.cuda_graph_step)]
    return np.array(sorted({int(n) for step in steps for n in step if n <= largest}), "i8")


def padded_tokens(engine: ResolvedEngine) -> tuple[np.ndarray, np.ndarray]:
    """i8[max_num_batched_tokens + 1]: the tokens that a step of so many computes; bool: whether a graph runs it."""
    tokens = np.arange(engine.max_num_batched_tokens + 1)
    if engine.enforce_eager:
        return tokens, np.zeros(len(tokens), bool)
    sizes = capture_sizes(engine)
    captured = tokens <= sizes[-1]
    index = np.searchsorted(sizes, np.minimum(tokens, sizes[-1]))
    return np.where(captured, sizes[index], tokens), captured


def compile_step_cost(placement: Placement, engine: ResolvedEngine) -> StepCost:
    """The price of every step of this deployment. InputError names what is not modelled.

    No step is dearer than one of more tokens, or of more keys, although some kernels were measured so: see `rising`.
    """
    cost = sum_operators(placement, engine)
    if placement.parallelism.enable_dbo:
        sms = placement.hardware.num_sms or 132
        sending = SENDING_SMS * (placement.parallelism.all2all_backend == "deepep_high_throughput")
        cost = with_two_batches(cost, placement.model.num_layers, sms / (sms - sending))
    shared = None if cost.shared is None else _rising(cost.shared)
    return replace(
        cost,
        linear=_rising(cost.linear),
        head=_rising(cost.head),
        shared=shared,
        attention=_rising_attention(cost.attention),
    )


def _rising(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table * rising(table.sum(1))[:, None])


def rising(times: np.ndarray) -> np.ndarray:
    """What to multiply times with so that they rise along every axis: to the geometric mean of what those before allow
    (at least as much as any of them) and what those behind do (at most)."""
    least, most = times, np.flip(times)
    for axis in range(times.ndim):
        least, most = np.maximum.accumulate(least, axis), np.minimum.accumulate(most, axis)
    return np.sqrt(least * np.flip(most)) / np.where(times > 0.0, times, 1.0)


def _rising_attention(prices: np.ndarray) -> np.ndarray:
    """ATTENTION_PRICE rows whose times rise from knot to knot of their corrections, with queries and with keys.

    Shapes that were not measured need it most: corrections of others' small chunks made 2 tokens behind a long context
    dearer than 256.
    """
    prices = prices.copy()
    for row in prices:
        for phase in ("decode", "prefill"):
            grid = row[f"{phase}_grid"]
            if not grid.any():
                continue
            first, per_work, low, per_key = row[f"{phase}_axes"]
            works, keys = (start + np.arange(n) / per for start, n, per in
                           zip((first, low), CORRECTION, (per_work, per_key), strict=True))  # fmt: skip
            queries, means = np.meshgrid(exp2(works), exp2(keys), indexing="ij")
            grid += np.log(rising(_kernel_time(row, phase, queries, means) * np.exp(grid)))
    return prices


def _kernel_time(row: np.void, phase: str, queries: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Seconds of one attention kernel before its correction; of a prefill one chunk, or prompts without a context."""
    price, pairs = SimpleNamespace(**{name: row[name] for name in row.dtype.names or ()}), queries * means
    if phase == "decode":
        sums = SimpleNamespace(num_decodes=queries, more_queries=0, decode_keys=pairs, more_pairs=0)
        kv, activations, compute = decode_demand(price, sums)
        return price.decode_fixed + smooth_max(kv + activations, compute, price.decode_softness)
    sums = SimpleNamespace(
        prefill_tokens=queries,
        prefill_keys=np.maximum(means + queries / 2, queries),
        prefill_pairs=pairs,
        query_tiles=queries / QUERY_TILE,
    )
    kv, activations, compute = prefill_demand(price, sums)
    return price.prefill_fixed + smooth_max(kv + activations, compute, price.prefill_softness)


RECURRENCE_KERNELS = 8
"""of a prompt's gated delta rule: norms of queries and keys, cumulative gates, products within a chunk, their inverse,
its application, states, outputs (fla/chunk.py of SGLang 0.5 and vLLM); the same for Mamba-2, whose scan has five"""


def launches(operator: Operator) -> int:
    """Kernels of one operator: experts and a recurrence over chunks are several, and quantising a matrix's inputs is
    one of its own."""
    if operator.routing:
        return EXPERT_KERNELS
    if operator.name == "recurrent_prefill":
        return RECURRENCE_KERNELS
    return 2 if operator.shape.get("quantised") and "fused" not in operator.shape else 1


def merged(operators: list[Operator]) -> list[Operator]:
    """The operators, equal ones of different layers as one."""
    found: dict[str, Operator] = {}
    for operator in operators:
        key = repr(vars(operator) | {"count": 0})
        known = found.get(key)
        found[key] = replace(known, count=known.count + operator.count) if known else operator
    return list(found.values())


def sum_operators(placement: Placement, engine: ResolvedEngine) -> StepCost:
    """The price of every step, operator by operator."""
    model, hardware, parallelism = placement.model, placement.hardware, placement.parallelism
    check_modelled(placement)
    tokens, captured = padded_tokens(engine)
    sequences = np.arange(engine.max_num_seqs + 1)
    linear, head = zero_split(len(tokens)), zero_split(len(sequences))
    shared = zero_split(len(tokens)) if parallelism.attention_data > 1 else None
    rows: dict[tuple[int, str], Any] = {}
    times, kernels_in_all = launch(hardware), 0
    for operator in merged(forward_pass(placement)):
        if "fused" in operator.shape and not engine.fuse_norm_quant:
            operator = replace(operator, shape={key: x for key, x in operator.shape.items() if key != "fused"})
        speed = rate(hardware, operator)
        kernels = 0 if operator.message else operator.count
        kernels_in_all += operator.count * launches(operator)
        if operator.shared and shared is not None:
            add_time(shared, operator, speed, {"step": 1.0, "tokens": tokens * parallelism.attention_data})
        elif operator.shared:  # by all ranks that divide the step's tokens
            add_time(linear, operator, speed, {"step": 1.0, "tokens": tokens})
        elif operator.per == "tokens":
            alone: Any = slice(None)
            if operator.name == "norm" and parallelism.tensor > 1 and engine.fuse_allreduce_rms:
                alone = tokens / operator.split * model.hidden_size * placement.activation_bytes > FUSED_BYTES
            own = linear[alone]
            add_time(own, operator, speed, {"step": 1.0, "tokens": tokens[alone]})
            linear[alone] = own
        elif operator.per == "sequences":  # the head runs outside the graphs
            add_time(head, operator, speed, {"step": 1.0, "sequences": sequences})
            head[:, LAUNCH] += kernels * (times.eager - times.graph)
        else:
            _add_attention(rows, operator, speed)
        if operator.per == "tokens":
            linear[:, LAUNCH] += np.where(captured, 0.0, kernels * (times.eager - times.graph))
    if len(rows) > MAX_ATTENTION_KINDS:
        raise InputError(
            f"model: {model.name} has {len(rows)} different kinds of attention; at most {MAX_ATTENTION_KINDS} are"
            " modelled"
        )
    # a step outside the graphs is not shorter than its launches: the device waits for the host's
    beside = linear.sum(-1) if shared is None else linear.sum(-1) + shared.sum(-1)
    waits = np.maximum(engine.eager_launch_time * kernels_in_all - beside, 0.0)
    linear[:, HOST] += np.where(captured, 0.0, waits) + engine.worker_step_time
    head[:, HOST] += engine.worker_sequence_time * sequences
    linear[0] = head[0] = 0.0
    if shared is not None:
        shared[0] = 0.0
    attention = np.array(list(rows.values()), ATTENTION_PRICE)
    add_mixed(attention, placement)
    share = slowest_stage(placement, linear, head, engine)
    return StepCost(linear, head, attention, issue_share=share, shared=shared)


def slowest_stage(placement: Placement, linear: np.ndarray, head: np.ndarray, engine: ResolvedEngine) -> float:
    """Share of a step's latency that the slowest pipeline stage takes, the LM head being on the last; taken at a full
    batch of decodes."""
    num_layers, stages = placement.model.num_layers, placement.parallelism.pipeline
    if stages == 1:
        return 1.0
    layers = np.array([last - first for first, last in pipeline_stages(num_layers, stages)])
    n = min(engine.max_num_seqs, engine.max_num_batched_tokens)
    of_layers, of_head = linear[n].sum(), head[n].sum()
    time = of_layers * layers / num_layers
    time[-1] += of_head
    return float(time.max() / (of_layers + of_head))


def _add_attention(rows: dict[tuple[int, str], Any], operator: Operator, speed: Rate) -> None:
    """Add an operator to the row of its window: seconds per sum, of all layers together.

    Where FLOPs and bytes follow the same sum, their soft maximum does too.
    """
    row = rows.setdefault((operator.window, operator.row), np.zeros((), ATTENTION_PRICE)[()])
    row["window"] = operator.window
    phase, keys = ("decode", "decode_keys") if operator.per == "decodes" else ("prefill", "prefill_keys")
    queries, pairs = operator.per, PAIRS[operator.per]
    count, flops, split = operator.count, operator.flops, 1 if phase == "decode" else operator.split
    kv = count * speed.per_byte * operator.kv.get(keys, 0.0)
    activations = count * speed.per_byte * operator.activations.get(queries, 0.0)
    compute = count * speed.per_flop * flops.get(pairs, 0.0)
    if keys in flops and keys != pairs:
        kv = smooth_max(kv, count * speed.per_flop * flops[keys], speed.softness)
    if queries in flops:
        activations = smooth_max(activations, count * speed.per_flop * flops[queries], speed.softness)
    if operator.shape:
        law = attention_law(operator, speed)
        activations, compute = count * law.activations, count * law.pair
        if phase == "prefill":
            row["prefill_query"] += count * law.query / split
            row["prefill_tile"] += count * law.tile / split
    row["decode_ranks"] = operator.split
    row[f"{phase}_kv"] += kv
    row[f"{phase}_activations"] += activations / split
    row[f"{phase}_compute"] += compute / split
    row[f"{phase}_fixed"] += count * speed.fixed
    row[f"{phase}_softness"] = speed.softness
    if operator.shape and speed.shares.correction:
        row[f"{phase}_axes"], row[f"{phase}_grid"] = _grid(operator, speed, phase)


def _grid(operator: Operator, speed: Rate, phase: str) -> tuple[np.ndarray, np.ndarray]:
    """The correction of this shape as the engine reads it: over the step's queries, and the keys that each sees.

    Its knots are those of the class's correction. Where it would beat physics (FLOPs at peak, a decode's keys at the
    memory's bandwidth) it is what physics leaves.
    """
    assert speed.shares.correction is not None
    (first, last, _), (low, high, _) = (speed.shares.correction.axes[name] for name in ("work", "keys"))
    unit = attention_coordinates(phase, speed.hardware, 1.0, 1.0, **operator.shape)["work"]
    whole, operator = np.log2(operator.split), replace(operator, split=1)
    works, keys = np.linspace(first, last, CORRECTION[0]) - unit, np.linspace(low, high, CORRECTION[1])
    queries, means = np.meshgrid(exp2(works), exp2(keys), indexing="ij")
    sums = {"step": 1.0, operator.per: queries, PAIRS[operator.per]: queries * means}
    if phase == "prefill":
        sums |= {"prefill_keys": queries, "query_tiles": queries / QUERY_TILE}
    split = zero_split(*queries.shape)
    add_time(split, replace(operator, count=1), speed, sums)
    plain = zero_split(*queries.shape)
    uncorrected = replace(speed, shares=speed.shares.model_copy(update={"correction": None}))
    add_time(plain, replace(operator, count=1), uncorrected, sums)
    steps = [(CORRECTION[0] - 1) / max(last - first, 1.0), (CORRECTION[1] - 1) / max(high - low, 1.0)]
    return np.array([first - unit + whole, steps[0], low, steps[1]]), np.log(split.sum(-1) / plain.sum(-1))


def provenance(placement: Placement) -> list[dict[str, str | float]]:
    """Every efficiency behind the prices of this deployment: operator class, dtype, the numbers, and their source.

    The last row, "launch", is what a kernel outside a CUDA graph takes longer.
    """
    operators, hardware = forward_pass(placement), placement.hardware
    used = dict.fromkeys((op.efficiency_class, op.dtype) for op in operators)
    times = launch(hardware)
    hidden = {"terms", "correction", "errors"}
    rows = [(name, dtype, efficiency(hardware, name, dtype).model_dump(exclude=hidden)) for name, dtype in used]
    outside = {"bandwidth": 1.0, "flops": 1.0, "fixed": times.eager - times.graph, "softness": 0.0}
    rows.append(("launch", "", outside | {"provenance": launch_provenance(hardware), "source": times.source}))
    return [{"operator": name, "dtype": dtype, **row} for name, dtype, row in rows]
