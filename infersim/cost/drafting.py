"""What drafting costs: a drafter's passes as tables of seconds, and its share of the memory."""

from dataclasses import replace

import numpy as np

from infersim.config.drafting import LAYERS
from infersim.config.engine import ResolvedEngine
from infersim.config.errors import InputError
from infersim.config.parallelism import Parallelism
from infersim.config.speculation import Speculation
from infersim.engine.compiled.state import ATTENTION_PRICE, MAX_ATTENTION_KINDS
from infersim.engine.price import DraftCost, StepCost
from infersim.models.architecture import Model
from infersim.models.catalog import load_model

from .efficiency import launch
from .memory import Memory, weight_bytes
from .operator import Operator
from .operators import forward_pass
from .placement import Placement
from .roofline import PAIRS, add_time, rate, zero_split
from .sharding import rank_layer
from .steptime import compile_step_cost


def drafter(speculation: Speculation, target: Model) -> Model | None:
    """The model that drafts pass by pass; None for heads and look-ups. InputError if it cannot draft for the target.

    Layers (EAGLE, MTP, DFlash): like the target's last, a projection of the joined inputs, the target's embedding and
    head.
    """
    how = speculation.how
    if how.kind == "model" and speculation.model:
        model = load_model(speculation.model)
        if model.vocab_size != target.vocab_size:
            raise InputError(
                f"speculation.model: {model.name} has {model.vocab_size} tokens and {target.name} {target.vocab_size};"
                " must have the same vocabulary"
            )
        return model
    if how.kind == "exit" and speculation.exit_layer:
        if speculation.exit_layer >= target.num_layers:
            raise InputError(
                f"speculation.exit_layer: must be below the {target.num_layers} layers of {target.name}"
                f" (got {speculation.exit_layer})"
            )
        return replace(target, name=f"{target.name}, exit layer", layers=target.layers[: speculation.exit_layer])
    if how.kind in LAYERS and how.inputs:
        h = target.hidden_size
        model = replace(
            target,
            name=f"{target.name}, {speculation.method}",
            layers=target.layers[-1:] * how.layers,
            other_params=how.inputs * h * h + h,
            encoder_layers=(),
        )
        if how.vocabulary:
            vocabulary = min(how.vocabulary, target.vocab_size)
            model = replace(
                model, vocab_size=vocabulary, lm_head_params=vocabulary * h, tie_word_embeddings=False
            )  # its own head
        return model
    return None


def drafter_placement(speculation: Speculation, target: Placement) -> Placement | None:
    """The drafter on its devices: the target's, one of them, or one of its own. None for heads and look-ups."""
    model, apart = drafter(speculation, target.model), speculation.drafter
    if model is None:
        return None
    alone = speculation.draft_tensor_parallel_size or apart
    return replace(
        target,
        model=model,
        hardware=(apart and apart.hardware) or target.hardware,
        parallelism=Parallelism() if alone else target.parallelism,
    )


def own_bytes(speculation: Speculation, target: Placement) -> tuple[float, float]:
    """Bytes of weights, and of KV per token, that the drafter adds on one GPU of the target."""
    width, h = target.activation_bytes, target.model.hidden_size
    how = speculation.how
    if how.kind == "heads":
        heads = _medusa_heads(speculation)
        return heads * (h * h + h * target.model.vocab_size) * width / target.parallelism.tensor, 0.0
    own = drafter_placement(speculation, target)
    if own is None or how.kind == "exit" or speculation.drafter:
        return 0.0, 0.0
    held = [rank_layer(layer, own.parallelism).attention for layer in own.model.layers if not layer.attention.kv_shared]
    kv = sum(own.key_bytes(a) + a.index_bytes_per_token for a in held)
    if how.kind in LAYERS:  # embedding, rotary table, and mostly the head, are the target's
        head = own.model.lm_head_params if how.vocabulary else 0
        alone = replace(own.model, embedding_params=0, lm_head_params=head, max_position_embeddings=0, vision=None)
        precision = own.precision
        if speculation.method != "mtp":  # a checkpoint of its own, in 16 bits; MTP layers are in the target's
            precision = precision.model_copy(update={"weights": precision.activations})
        own = replace(own, model=alone, precision=precision)
    return weight_bytes(own), kv


def with_drafter(memory: Memory, weights: float, kv_per_token: float, engine: ResolvedEngine | None = None) -> Memory:
    """The waterfall with a drafter in it: its keys and values go into every block, and its weights off the KV cache,
    unless the engine was told how large that is."""
    block_bytes = memory.block_bytes + kv_per_token * memory.block_size
    room = (engine and engine.kv_cache_memory_bytes) or memory.num_gpu_blocks * memory.block_bytes - weights
    blocks = (engine and engine.num_gpu_blocks_override) or int(room // block_bytes)
    if blocks < 2:
        raise InputError(f"speculation: the drafter's {weights / 2**30:.2f} GiB leave no KV cache; must be smaller")
    return replace(
        memory,
        weights_bytes=memory.weights_bytes + weights,
        kv_bytes=blocks * block_bytes,
        block_bytes=block_bytes,
        num_gpu_blocks=blocks,
        kv_bytes_per_token=memory.kv_bytes_per_token + kv_per_token,
        max_concurrency=memory.max_concurrency * blocks / memory.num_gpu_blocks,
    )


def compile_draft_cost(speculation: Speculation, target: Placement, engine: ResolvedEngine) -> DraftCost:
    """The price of drafting beside every step of this deployment."""
    tokens, sequences = engine.max_num_batched_tokens + 1, engine.max_num_seqs + 1
    depth, none = speculation.depth, np.zeros(0, ATTENTION_PRICE)
    no_passes = np.zeros(speculation.num_speculative_tokens + 1, "i4")
    any_drafts = np.arange(sequences) > 0
    waits = engine.verification_time * any_drafts
    own = drafter_placement(speculation, target)
    if own is None:
        if speculation.how.kind == "heads":
            once = _medusa_time(speculation, target, sequences) + engine.draft_pass_time * any_drafts
        else:
            once = (speculation.how.sequence_time or 0.0) * np.arange(sequences)
        return DraftCost(np.zeros(tokens), once + waits, np.zeros(sequences), none, no_passes)
    if speculation.how.kind == "block" or speculation.how.parallel:
        return _in_one_pass(speculation, target, own, engine)
    round_trip = 2 * speculation.drafter.latency if speculation.drafter else 0.0
    width = speculation.tree.width if speculation.tree else 1
    verified = verification_engine(engine, speculation.num_speculative_tokens).max_num_seqs
    wide = replace(
        engine,
        worker_step_time=0.0,  # the target's pass has it
        worker_sequence_time=0.0,
        max_num_seqs=max(engine.max_num_seqs * width, verified),  # graphs are captured for the verified tokens too
        max_num_batched_tokens=max(engine.max_num_batched_tokens, engine.max_num_seqs * width),
    )
    linear, head, attention = _tables(own, wide)
    many = width * np.arange(sequences)
    following = linear[many] + head[many] + engine.draft_pass_time * any_drafts
    own_pass = speculation.how.kind != "exit"  # the exit layers have seen the step's tokens in the target's own pass
    passes = np.minimum(np.arange(len(no_passes)), depth)
    if speculation.tree:
        passes = np.where(passes > 0, depth, 0)
    return DraftCost(
        first=linear[:tokens] if own_pass else np.zeros(tokens),
        once=waits + own_pass * (head[:sequences] + (round_trip + engine.draft_pass_time) * any_drafts),
        following=following,
        attention=attention,
        passes=np.maximum(passes - own_pass, 0).astype("i4"),
        first_attends=own_pass,
    )


def _tables(own: Placement, engine: ResolvedEngine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a drafter's matrices by tokens, of its head by tokens, and the prices of its attention."""
    cost = compile_step_cost(own, engine)
    linear = cost.linear.sum(axis=1)
    if cost.shared is not None:  # experts of a drafting layer: the other ranks are taken to draft as much
        linear += cost.shared.sum(axis=1)
    return linear, cost.head.sum(axis=1), cost.attention


def _in_one_pass(speculation: Speculation, target: Placement, own: Placement, engine: ResolvedEngine) -> DraftCost:
    """All drafts of a step come from one pass, as many as there can be.

    P-EAGLE: the pass over the step's tokens has k - 1 mask tokens more per sequence; what these cost more is that of
    a step of verifications. DFlash: the step's tokens become keys and values of the layers, and a block of 1 + k tokens
    per sequence goes through these; its attention reads each sequence's keys once.
    """
    how, k, tokens = speculation.how, speculation.num_speculative_tokens, engine.max_num_batched_tokens + 1
    n = np.arange(engine.max_num_seqs + 1)
    most = 2 * (1 + k) * engine.max_num_seqs
    wide = replace(
        engine,
        worker_step_time=0.0,
        worker_sequence_time=0.0,
        max_num_seqs=most // 2,
        max_num_batched_tokens=max(engine.max_num_batched_tokens, most),
    )
    linear, head, attention = _tables(own, wide)
    any_drafts = n > 0
    drafts = head[k * n] + engine.draft_pass_time * any_drafts
    waits, block = engine.verification_time * any_drafts, how.kind == "block"
    if block:
        h, layers = own.model.hidden_size, [rank_layer(layer, own.parallelism) for layer in own.model.layers]
        keys = sum(layer.attention.kv_elements_per_token for layer in layers)
        first = _matrices_time(target, "draft_keys", h * ((how.inputs or 0) * h + keys), 1, tokens)
        drafts = linear[(1 + k) * n] + drafts
    else:
        first = linear[:tokens]
        waits = waits + drafts + linear[2 * k * n] - linear[(1 + k) * n]
        drafts = np.zeros(len(n))
    passes = (np.arange(k + 1) > 0) & block
    return DraftCost(first, waits, drafts, attention, passes.astype("i4"), first_attends=not block)


def seen_by(drafter: Placement, cost: StepCost) -> StepCost:
    """The target's price with a row that costs nothing for each window that only its drafter has: what the drafter sees
    is then counted."""
    windows = {operator.window for operator in forward_pass(drafter) if operator.per in PAIRS}
    more = np.zeros(len(windows - set(cost.attention["window"].tolist())), ATTENTION_PRICE)
    more["window"] = sorted(windows - set(cost.attention["window"].tolist()))
    if len(cost.attention) + len(more) > MAX_ATTENTION_KINDS:
        raise InputError(
            f"speculation: {drafter.model.name} and its target have more than {MAX_ATTENTION_KINDS} kinds of attention"
            " together, which is not modelled; must be another drafter"
        )
    return replace(cost, attention=np.concatenate([cost.attention, more])) if len(more) else cost


def _medusa_heads(speculation: Speculation) -> int:
    """A head for each position ahead."""
    return speculation.depth


def _medusa_time(speculation: Speculation, target: Placement, sequences: int) -> np.ndarray:
    """f8[sequences]: a residual block of hidden_size squared and an LM head for each position, in one go."""
    h, v = target.model.hidden_size, target.model.vocab_size // target.parallelism.tensor
    return _matrices_time(target, "medusa_heads", h * (h + v), _medusa_heads(speculation), sequences, 3 * h + v)


def _matrices_time(
    target: Placement, name: str, params: float, count: int, rows: int, activations: float = 0.0
) -> np.ndarray:
    """f8[rows]: `count` matrices of the drafter of so many parameters each, launched beside graphs, by rows that go
    through them; activations: elements of each row."""
    hardware, width = target.hardware, target.activation_bytes
    operator = Operator(
        name, "gemm", target.precision.activations, count, "sequences",
        flops={"sequences": 2 * params},
        weights={"step": params * width},
        activations={"sequences": activations * width},
    )  # fmt: skip
    split = zero_split(rows)
    add_time(split, operator, rate(hardware, operator), {"step": 1.0, "sequences": np.arange(rows)})
    split += operator.count * (launch(hardware).eager - launch(hardware).graph) / split.shape[1]
    split[0] = 0.0
    return split.sum(axis=1)


def verification_engine(engine: ResolvedEngine, drafts: int) -> ResolvedEngine:
    """The engine as the target's tables must see it: a sequence brings up to 1 + drafts tokens and as many logits."""
    return replace(engine, max_num_seqs=min(engine.max_num_seqs * (1 + drafts), engine.max_num_batched_tokens))
