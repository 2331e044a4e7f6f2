"""Tables of measured layers of named models, as casys-kaist/LLMServingSim's profiler writes them.

    dense          hardware, model, tp, layer, tokens, time_us
    per sequence   hardware, model, tp, layer, sequences, time_us
    attention      hardware, model, tp, prefill_chunk, kv_prefill, n_decode, kv_decode, time_us

The model catalogue says how large a layer is. Of attention the batches that only prefill or only decode are read.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from infersim.config.errors import InputError
from infersim.models.architecture import MLP, Linear, Model
from infersim.models.catalog import load_model


def linears(frame: pd.DataFrame) -> Iterator:
    """GEMM rows, of the layers that are one matrix."""
    tokens = frame["tokens" if "tokens" in frame else "sequences"]
    found = []
    for (name, tensor, layer), part in frame.groupby(["model", "tp", "layer"]):
        linear = _linears(_cut_model(name, tensor)).get(layer)
        if linear:
            n, k = _cut(linear, int(tensor))
            found.append(part.assign(m=tokens[part.index], n=n, k=k))
    if found:
        rows = pd.concat(found)
        yield "gemm", "bf16", {name: rows[name] for name in "mnk"}, rows


def attention(frame: pd.DataFrame) -> Iterator:
    """Attention of one prompt's chunk, or of sequences of equal length that decode."""
    shapes = {}
    for name, tensor in frame[["model", "tp"]].drop_duplicates().itertuples(index=False):
        layer = _cut_model(name, tensor).layers[0].attention
        kv_heads = max(1, layer.num_kv_heads // tensor)
        shapes[name, tensor] = layer.num_heads // tensor, kv_heads, layer.head_dim
    sizes = np.array([shapes[key] for key in zip(frame.model, frame.tp, strict=True)])
    frame = frame.assign(heads=sizes[:, 0], kv_heads=sizes[:, 1], head_dim=sizes[:, 2])
    decode = frame[(frame.prefill_chunk == 0) & (frame.n_decode > 0)]
    keys = decode.n_decode * decode.kv_decode
    yield "attention_decode", "bf16", _shape(decode) | {
        "sequences": decode.n_decode, "window": 0 * keys, "queries": decode.n_decode, "keys": keys, "pairs": keys,
        "tiles": decode.n_decode}, decode  # fmt: skip
    prefill = frame[(frame.n_decode == 0) & (frame.prefill_chunk > 0)]
    new, before = prefill.prefill_chunk, prefill.kv_prefill
    yield "attention_prefill", "bf16", _shape(prefill) | {
        "sequences": before, "window": 0 * new, "queries": new, "keys": before + new,
        "pairs": new * before + new * (new + 1) / 2, "tiles": np.ceil(new / 128)}, prefill  # fmt: skip


def _shape(frame: pd.DataFrame) -> dict:
    return {name: frame[name] for name in ("heads", "kv_heads", "head_dim")}


def _cut_model(name: str, tensor: int) -> Model:
    """The model. InputError if so many ranks cannot share it."""
    try:
        model = load_model(name)
    except InputError as error:
        raise InputError(f"column model: {error.problems[0]}") from None
    heads = model.layers[0].attention.num_heads
    if heads % tensor:
        raise InputError(f"column tp: must divide the {heads} heads of {name} (got {tensor:g})")
    return model


def _linears(model: Model) -> dict[str, Linear]:
    layer = model.layers[0]
    found = {linear.name: linear for linear in layer.attention.linears(model.hidden_size)}
    if isinstance(layer.mlp, MLP):
        up, down = layer.mlp.linears(model.hidden_size)
        found |= {"gate_up_proj": up, "down_proj": down}
    return found | {"lm_head": model.lm_head}


def _cut(linear: Linear, tensor: int) -> tuple[int, int]:
    """Outputs and inputs of one rank's part."""
    if linear.parallel == "row":
        return linear.outputs, linear.inputs // tensor
    return -(-linear.outputs // tensor), linear.inputs
