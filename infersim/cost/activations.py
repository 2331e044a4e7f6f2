"""Bytes alive at the peak of vLLM's profile run, which its KV cache leaves free."""

from infersim.config.engine import ResolvedEngine
from infersim.models.architecture import Layer, MoE, Vision, counted

from .placement import Placement
from .sharding import rank_layer

# Bytes per logit alive at the peak of the profile run's sampler (Sampler.forward, TopKTopPSampler.forward_native, ATen
# SortStable.cu segmented_sort_pairs): the sort for top-p.
SAMPLER = {
    "logits in float32": 4,
    "sorted logits": 4,
    "sorted indices (int64)": 8,
    "indices before sorting (int64)": 8,
    "radix sort's second buffer (keys and indices)": 12,
}


def activation_terms(placement: Placement, engine: ResolvedEngine) -> dict[str, float]:
    """Bytes alive at the peak of vLLM's profile run (gpu_model_runner.profile_run), by name.

    It runs the model on max_num_batched_tokens, then, with the hidden states still alive, the sampler on max_num_seqs
    sequences with top-k and top-p; the larger of the two peaks counts.
    """
    model, width, tokens = placement.model, placement.activation_bytes, engine.max_num_batched_tokens
    hidden = {"hidden states": tokens * model.hidden_size * width}
    layers = [rank_layer(layer, placement.parallelism) for layer in counted(model.layers)]
    layer = max((_layer_terms(layer, model.hidden_size) for layer in layers), key=lambda terms: sum(terms.values()))
    forward = hidden | {name: tokens * elements * width for name, elements in layer.items()}
    logits = min(engine.max_num_seqs, tokens) * model.vocab_size
    sampler = hidden | {"logits": logits * width} | {name: logits * size for name, size in SAMPLER.items()}
    runs = [forward, sampler]
    if model.vision:
        # first the encoder on its largest image, whose embeddings are alive while the text model runs (encoder cache)
        image = {"image embeddings": model.vision.tokens * model.hidden_size * width}
        runs = [_vision_terms(model.vision, placement.parallelism.tensor, width), *(image | run for run in runs)]
    return max(runs, key=lambda terms: sum(terms.values()))


def _vision_terms(vision: Vision, tensor: int, width: float) -> dict[str, float]:
    """Bytes alive in a block of the encoder, at the wider of the ends of its attention and its MLP, which are cut as
    the text model is: input, residual and norm beside what the block makes (vLLM 0.32, models/qwen3_vl.py: names that a
    Python frame holds are not freed; queries and keys are copied, then turned; an all-reduce is not in place)."""
    patch, h = vision.patches * width, vision.hidden_size
    kept = {"pixels": patch * vision.pixels, "patches": 2 * patch * h, "encoder's o_proj": patch * h}
    kept |= {"position embeddings": patch * h} if vision.positions else {}
    kept |= {"encoder's all-reduce": patch * h} if tensor > 1 else {}
    attention = {"encoder's qkv_proj": 3 * patch * h / tensor, "encoder's attention": patch * h / tensor}
    attention |= {"encoder's queries and keys": 4 * patch * h / tensor} if vision.rotary else {}
    inner = patch * vision.intermediate_size / tensor
    mlp = {"encoder's up_proj": inner * (1 + vision.gated), "encoder's activation": inner}
    if sum(attention.values()) + patch * h * (1 + (tensor > 1)) >= sum(mlp.values()):
        return kept | attention
    del kept["encoder's o_proj"]
    kept.pop("encoder's all-reduce", None)
    return kept | mlp


def _layer_terms(layer: Layer, h: int) -> dict[str, float]:
    """Elements per token alive at the widest point of a layer, beside its residual: in the MLP, or in attention."""
    if isinstance(layer.mlp, MoE):
        # vLLM's fused_experts: one buffer for the first matrix's outputs and then the second's, one in between
        k, (up, down) = layer.mlp.num_experts_per_token, layer.mlp.expert_linears(h)
        mlp: dict[str, float] = {"experts' outputs": k * max(up.outputs, h), "experts' activation": k * down.inputs}
        shared = layer.mlp.shared_intermediate_size
        mlp |= {"shared experts": shared} if shared else {}
    elif not layer.mlp.intermediate_size:
        mlp = {}
    else:
        up, down = layer.mlp.linears(h)
        mlp = {up.name: up.outputs, "activation": down.inputs}
    linears = {linear.name: linear for linear in layer.attention.linears(h)}
    wide = sum(linear.outputs for name, linear in linears.items() if name != "o_proj" and "index" not in name)
    attention: dict[str, float] = {"projections": wide, "rotary embedding": wide, "attention": linears["o_proj"].inputs}
    if "qkv_proj" in linears:
        attention = {"qkv_proj": wide, "rotary embedding": wide, "attention": linears["o_proj"].inputs}
    return max(mlp, attention, key=lambda terms: sum(terms.values()))
