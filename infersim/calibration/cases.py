"""What is measured on a device: each case is a few of infersim's own operators, at one shape."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from infersim.config.hardware import Hardware, load_hardware
from infersim.cost.formats import UNPACKED_FOR
from infersim.cost.operator import Operator, Sums
from infersim.cost.operators import forward_pass
from infersim.cost.placement import Placement
from infersim.cost.roofline import peak_flops
from infersim.engine.compiled.state import QUERY_TILE
from infersim.models.architecture import Model
from infersim.models.huggingface import model_from_config

BLOCK_SIZE = 16  # tokens per KV block
BYTES_PER_WEIGHT = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
"""int4: a 16-bit scale and zero point per group of 128 (torch's _weight_int4pack_mm)"""


@dataclass(frozen=True)
class Case:
    """One measurement. `work` is what the cost model says it does: operators, each with the sums of its step.

    `group` is the class that is fitted to it, or "step" (a whole model step, held back), "layer", or "" (reported).
    """

    name: str
    kind: str
    dtype: str
    shape: dict[str, int]
    group: str
    work: tuple[tuple[Operator, Sums], ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The shapes of one calibration."""

    config: dict
    """config.json of the random-weight model"""
    linears: tuple[tuple[int, int], ...]
    """(outputs, inputs) beyond the model's own"""
    tokens: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]
    """(sequences, tokens of each)"""
    decodes: tuple[tuple[int, int], ...]
    """(sequences, context of each)"""
    ratios: tuple[tuple[int, int], ...]
    """(query heads, key heads) beyond the model's own, at one shape each"""
    step_decodes: tuple[tuple[int, int], ...]
    step_prefills: tuple[int, ...]
    step_mixed: tuple[tuple[int, int, int], ...]
    """(sequences, context of each, prompt tokens beside them)"""
    dtypes: tuple[str, ...] = ("fp16", "fp8", "int8", "int4")
    flex: tuple[int, ...] = ()
    """lengths at which FlexAttention is compiled and timed"""


def _llama(hidden, intermediate, heads, kv_heads, layers, vocab) -> dict:
    return {"model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers,
            "vocab_size": vocab, "max_position_embeddings": 131072, "tie_word_embeddings": False}  # fmt: skip


SMALL = Sizes(
    _llama(128, 256, 4, 2, 2, 512), (), (1, 8, 64), ((1, 64), (1, 128), (2, 64), (4, 64)),
    ((1, 64), (4, 64), (1, 256), (4, 128)), ((4, 4),), ((1, 64), (4, 128)), (32, 128), ((2, 64, 32),), ("fp8", "int8"),
)  # fmt: skip
CPU = Sizes(
    _llama(2048, 5632, 32, 8, 14, 32000), ((4096, 4096), (1024, 4096)), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    ((1, 64), (1, 128), (1, 256), (1, 512), (2, 256), (4, 128), (8, 64), (1, 1024)),
    ((1, 128), (1, 1024), (4, 256), (4, 1024), (8, 512), (16, 128), (16, 1024), (1, 4096), (32, 256)),
    ((32, 32), (32, 4)),
    ((1, 128), (1, 1024), (2, 512), (4, 128), (4, 1024), (8, 256), (16, 128), (16, 1024)), (32, 64, 128, 256, 512),
    ((4, 256, 64), (8, 512, 128)), ("fp16", "fp32", "int8", "int4"), flex=(1024,),
)  # fmt: skip
GPU = Sizes(
    _llama(4096, 14336, 32, 8, 32, 128256), ((2048, 2048), (5120, 5120), (8192, 8192), (1024, 8192)),
    (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    ((1, 128), (1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (4, 512), (8, 256),
     (32, 128), (4, 2048)),
    ((1, 128), (1, 1024), (1, 8192), (1, 32768), (4, 1024), (4, 8192), (16, 512), (16, 4096), (64, 256), (64, 2048),
     (256, 128), (256, 1024), (8, 32768)),
    ((32, 32), (32, 4), (64, 8)),
    ((1, 128), (1, 1024), (1, 8192), (1, 32768), (4, 2048), (8, 512), (8, 16384), (16, 1024), (32, 4096), (64, 1024),
     (128, 512), (128, 1024), (256, 256), (256, 1024)),
    (128, 256, 512, 1024, 2048, 4096, 8192, 16384), ((16, 1024, 512), (64, 1024, 2048), (128, 512, 256)),
    flex=(4096,),
)  # fmt: skip


def quick(sizes: Sizes) -> Sizes:
    """About a third of the shapes, the ends among them, and no compilation."""

    def some(rows: tuple) -> tuple:
        return tuple(row for i, row in enumerate(rows) if i % 3 == 0 or i == len(rows) - 1)

    return replace(
        sizes, linears=sizes.linears[:1], tokens=some(sizes.tokens), prefills=some(sizes.prefills),
        decodes=some(sizes.decodes), ratios=sizes.ratios[:1], step_decodes=some(sizes.step_decodes),
        step_prefills=some(sizes.step_prefills), step_mixed=sizes.step_mixed[:1], flex=(),
    )  # fmt: skip


def model_of(sizes: Sizes, layers: int | None = None) -> Model:
    """The random-weight model, with fewer layers where memory is small."""
    config = sizes.config | ({"num_hidden_layers": layers} if layers else {})
    return model_from_config(config, "calibration")


def cases(sizes: Sizes, model: Model, devices: int = 1) -> list[Case]:
    """Every case, in the order in which they are measured."""
    h, vocab = model.hidden_size, model.vocab_size
    layer = model.layers[0]
    attention = layer.attention
    made = [_copy(), *_launches()]
    matrices = [*attention.linears(h), *layer.mlp.linears(h)]
    shapes = {(one.outputs, one.inputs) for one in matrices} | {(vocab, h), *sizes.linears}
    most = max(n * k for n, k in shapes)
    for n, k in sorted(shapes):
        made += [linear(n, k, m, "bf16") for m in sizes.tokens if m * n * k <= most * 1024 * 4]
    for dtype in sizes.dtypes:
        for n, k in ((h, h), (2 * layer.mlp.intermediate_size, h)):
            made += [linear(n, k, m, dtype) for m in sizes.tokens[::2]]
    made += [prefill(model, b, n) for b, n in sizes.prefills]
    made += [decode(model, b, n) for b, n in sizes.decodes]
    for heads, kv_heads in sizes.ratios:
        other = replace(attention, num_heads=heads, num_kv_heads=kv_heads)
        varied = replace(model, layers=(replace(layer, attention=other),))
        made += [prefill(varied, *sizes.prefills[1]), decode(varied, *sizes.decodes[1])]
    made += [Case(f"decode.fp8_kv.{b}x{n}", "decode", "fp8", {"sequences": b, "context": n}, "")
             for b, n in sizes.decodes[1:2]]  # fmt: skip
    for tokens in sizes.tokens:
        made += [_elementwise(model, "norm", tokens), _elementwise(model, "activation", tokens)]
        made.append(_elementwise(model, "layer_elementwise", tokens))
    made += [_elementwise(model, "sample", sequences) for sequences in sizes.tokens if sequences <= 256]
    made += [Case(f"flex.{kind}.{n}", f"flex_{kind}", "bf16", {"tokens": n}, "")
             for n in sizes.flex for kind in ("window", "paged")]  # fmt: skip
    if devices > 1:
        made += [_all_reduce(h * tokens * 2, devices) for tokens in sizes.tokens]
    b, context = sizes.step_decodes[-1]
    made += [_step(model, "layer", b, context, 0), _step(model, "layer", 0, 0, sizes.step_prefills[-1])]
    made += [_step(model, "step", b, n, 0) for b, n in sizes.step_decodes]
    made += [_step(model, "step", 0, 0, n) for n in sizes.step_prefills]
    made += [_step(model, "step", b, context, n) for b, context, n in sizes.step_mixed]
    return made


def _copy() -> Case:
    return Case("copy", "copy", "bf16", {}, "")


def _launches() -> list[Case]:
    return [Case(f"launch.{how}", f"launch_{how}", "bf16", {}, "") for how in ("eager", "graph")]


def linear(n: int, k: int, m: int, dtype: str) -> Case:
    """[m, k] x [k, n]."""
    unpacked = {"step": n * k, "tokens": n * k / UNPACKED_FOR} if dtype == "int4" else {}
    operator = Operator("linear", "gemm", dtype, 1, "tokens", flops={"tokens": 2.0 * n * k}, unpack=unpacked,
                        rate="bf16" if unpacked else "",
                        weights={"step": n * k * BYTES_PER_WEIGHT[dtype]},
                        activations={"tokens": 2.0 * (n + k)})  # fmt: skip
    shape = {"outputs": n, "inputs": k, "tokens": m}
    return Case(f"linear.{dtype}.{n}x{k}.{m}", "linear", dtype, shape, "gemm", ((operator, {"step": 1, "tokens": m}),))


def step_sums(decodes: int, context: int, prompt: int) -> dict[str, float]:
    """The sums of a step of so many decodes at this context and, if prompt > 0, one prompt of so many tokens."""
    return {
        "step": 1, "tokens": decodes + prompt, "sequences": decodes + (prompt > 0), "decodes": decodes,
        "decode_keys": decodes * context, "prefill_tokens": prompt, "prefill_keys": prompt,
        "prefill_pairs": prompt * (prompt + 1) / 2, "query_tiles": -(-prompt // QUERY_TILE),
    }  # fmt: skip


@functools.cache
def pass_of(model: Model) -> tuple[Operator, ...]:
    """The operators of a bf16 pass; which kernels they are is not asked: every device multiplies bf16 as it is."""
    return tuple(forward_pass(Placement(model, load_hardware("h100-sxm"))))


def _one_layer(model: Model) -> list[Operator]:
    """The operators of a single layer, each once."""
    single = replace(model, layers=model.layers[:1])
    return [op for op in pass_of(single) if op.per != "sequences" and op.name not in ENDS]


ENDS = ("embedding", "final_norm")


def _attention(model: Model, name: str) -> Operator:
    return next(op for op in _one_layer(model) if op.name == name)


def prefill(model: Model, sequences: int, tokens: int) -> Case:
    """Causal attention of whole prompts, one layer."""
    sums = {name: sequences * value for name, value in step_sums(0, 0, tokens).items()}
    attention = model.layers[0].attention
    shape = {"heads": attention.num_heads, "kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
             "sequences": sequences, "tokens": tokens}  # fmt: skip
    name = f"prefill.{attention.num_heads}-{attention.num_kv_heads}.{sequences}x{tokens}"
    return Case(name, "prefill", "bf16", shape, "attention_prefill", ((_attention(model, "attention_prefill"), sums),))


def decode(model: Model, sequences: int, context: int) -> Case:
    """Attention of one query per sequence to its keys and values, one layer."""
    sums = step_sums(sequences, context, 0)
    attention = model.layers[0].attention
    shape = {"heads": attention.num_heads, "kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
             "sequences": sequences, "context": context}  # fmt: skip
    name = f"decode.{attention.num_heads}-{attention.num_kv_heads}.{sequences}x{context}"
    return Case(name, "decode", "bf16", shape, "attention_decode", ((_attention(model, "attention_decode"), sums),))


def _elementwise(model: Model, name: str, tokens: int) -> Case:
    sums = step_sums(tokens, 1, 0)
    if name == "sample":
        operators = [op for op in pass_of(model) if op.name in ("logits_to_float32", "sample")]
    else:
        operators = [op for op in _one_layer(model) if op.operator_class == "elementwise"]
        if name != "layer_elementwise":
            operators = [replace(op, count=1) for op in operators if op.name == name]
    group = "elementwise" if name in ("layer_elementwise", "sample") else ""
    return Case(f"{name}.{tokens}", name, "bf16", {"tokens": tokens}, group, tuple((op, sums) for op in operators))


def _all_reduce(size: int, devices: int) -> Case:
    wire = Operator("all_reduce", "collective", "bf16", 1, "step", message={"step": size}, ranks=devices)
    return Case(f"all_reduce.{size}", "all_reduce", "bf16", {"bytes": size, "devices": devices}, "collective",
                ((wire, {"step": 1}),))  # fmt: skip


def _step(model: Model, kind: str, sequences: int, context: int, prompt: int) -> Case:
    sums = step_sums(sequences, context, prompt)
    operators = _one_layer(model) if kind == "layer" else pass_of(model)
    running = [op for op in operators if sums[op.per] > 0]
    what = "mixed" if sequences and prompt else "decode" if sequences else "prefill"
    name = f"{kind}.{what}." + ("+".join([f"{sequences}x{context}"] * bool(sequences) + [f"{prompt}"] * bool(prompt)))
    shape = {"sequences": sequences, "context": context, "prompt": prompt}
    return Case(name, kind, "bf16", shape, kind, tuple((op, sums) for op in running))


def amounts(case: Case) -> tuple[float, float]:
    """Bytes of memory traffic and FLOPs of a case, all its kernels."""
    moved: Any = 0.0
    flops: Any = 0.0
    for op, sums in case.work:
        for amount in (op.weights, op.kv, op.activations):
            moved += op.count * sum(value * sums[name] for name, value in amount.items())
        flops += op.count * sum(value * sums[name] for name, value in op.flops.items())
    return moved, flops


def floor(case: Case, hardware: Hardware) -> float:
    """Seconds that the datasheet allows at best; 0 where it says nothing. Only weights, keys and FLOPs count."""
    moved: Any = 0.0
    flop_time: Any = 0.0
    for op, sums in case.work:
        for amount in (op.weights, op.kv):
            moved += op.count * sum(value * sums[name] for name, value in amount.items())
        flops = op.count * sum(value * sums[name] for name, value in op.flops.items())
        flop_time += flops / peak_flops(hardware, op) if flops else 0.0
    return max(moved / hardware.memory_bandwidth, flop_time)
