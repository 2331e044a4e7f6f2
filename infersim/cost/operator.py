"""An operator: some equal kernels of one pass, their FLOPs, and bytes by what they are (weights, KV, activations)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.models.architecture import Layer, Linear

from .formats import UNPACKED_FOR, Kernel, Kernels, matrix_bytes
from .moe import Routing
from .placement import Placement

Sums = Mapping[str, float | np.ndarray]
"""What a step is reduced to, one number each (or arrays, for many steps): step is 1; tokens are new tokens, sequences
scheduled sequences; decodes are sequences with one new token, decode_keys the keys that they see; prefill_tokens are
the new tokens of the others, prefill_keys the keys that these see, prefill_pairs their query-key pairs after the causal
mask, query_tiles their blocks of engine.state.QUERY_TILE queries. Keys and pairs are those of one window. experts and
expert_tokens follow from the tokens by an operator's routing."""

Amount = Mapping[str, float]
"""sum -> coefficient: a linear function of the sums of a step"""


def evaluate(amount: Amount, sums: Sums) -> Any:
    """The value of a linear function of the sums: a number, or an array of their shape."""
    return sum(coefficient * sums[name] for name, coefficient in amount.items())


@dataclass(frozen=True)
class Operator:
    """`count` equal kernels of one pass. Amounts are those of one kernel, on one rank.

    flops in FLOP; weights, kv and activations are bytes of memory traffic; message is what a collective among `ranks`
    leaves on each of them, in bytes. The operator runs in a step if the sum `per` is positive.
    """

    name: str
    operator_class: str
    dtype: str
    """of a matrix the format of its weights, else that of the elements: which efficiency holds"""
    count: int
    per: str
    flops: Amount = field(default_factory=dict)
    weights: Amount = field(default_factory=dict)
    kv: Amount = field(default_factory=dict)
    activations: Amount = field(default_factory=dict)
    message: Amount = field(default_factory=dict)
    ranks: int = 1
    crossing: float = 0.0
    """of a forwarded all-to-all: bytes between nodes, per byte of the message"""
    apart: int = 1
    """devices from one of these ranks to the next: 1 for neighbours"""
    window: int = 0
    """keys visible to a query, 0 for all, below 0 those of its own chunk of so many: which attention sums count"""
    row: str = ""
    """attention kernels of one window that run after one another, rather than on different layers, differ in it"""
    rate: str = ""
    """dtype of the arithmetic, if it is not `dtype`"""
    shape: Mapping[str, float] = field(default_factory=dict)
    """what its law asks for (cost/laws.py): of a matrix n, k, quantised, the bytes of an input once it is, or 0, and
    fused where another kernel does that; of experts hidden, inter, quantised; of attention heads, kv_heads, head_dim"""
    unpack: Amount = field(default_factory=dict)
    """weights that are turned back into 16 bits"""
    routing: Routing | None = None
    """of a mixture of experts: what gives `experts` (touched) and `expert_tokens` (computed), of the busiest rank"""
    shared: bool = False
    """its tokens are those of all data-parallel ranks"""
    split: int = 1
    """ranks among which its tokens are divided, each decode whole on one (prefill context parallelism)"""

    @property
    def efficiency_class(self) -> str:
        """The class whose efficiency holds: of a collective its kind."""
        return self.name if self.message else self.operator_class

    def routed(self, sums: Sums) -> Sums:
        """The sums, with those that follow from the routing; `several` is 1 where there are several tokens."""
        if self.split > 1:
            sums = {**sums, **self._of_rank(sums)}
        if "several" in self.weights:
            sums = {**sums, "several": sums["step"] * (sums[self.per] > sums["step"])}
        if self.routing is None:
            return sums
        tokens, routing = sums["tokens"], self.routing
        busy = routing.imbalance(tokens)
        return {**sums, "experts": routing.most_touched(tokens), "expert_tokens": routing.computed(tokens) * busy}

    def _of_rank(self, sums: Sums) -> Sums:
        """What one rank, that with most, has of those sums that are divided: keys are read by all."""
        found: dict[str, Any] = {"tokens": np.ceil(sums["tokens"] / self.split)} if "tokens" in sums else {}
        for name in ("prefill_tokens", "prefill_pairs", "query_tiles"):
            found |= {name: sums[name] / self.split} if name in sums else {}
        if "decodes" in sums:
            decodes = np.ceil(sums["decodes"] / self.split)
            share = decodes / np.maximum(sums["decodes"], 1)
            found |= {"decodes": decodes, "decode_keys": sums.get("decode_keys", 0.0) * share}
        return found


@dataclass(frozen=True)
class Pass:
    """What all operators of one pass share."""

    placement: Placement
    kernels: Kernels

    @property
    def hidden_size(self) -> int:
        return self.placement.model.hidden_size

    @property
    def precision(self) -> Precision:
        return self.placement.precision

    @property
    def parallelism(self) -> Parallelism:
        return self.placement.parallelism

    @property
    def dtype(self) -> str:
        """Of activations."""
        return self.precision.activations

    @property
    def width(self) -> float:
        """Bytes of an activation."""
        return self.placement.activation_bytes

    def gemm(
        self, linear: Linear, count: int, per: str = "tokens", kernel: Kernel | None = None, fused: bool = False
    ) -> Operator:
        """One linear layer: the matrix (in 16 bits without a `kernel`), and where its format wants it the inputs turned
        into it. `fused`: its inputs come from a norm or an activation that writes them in the matrix's format (vLLM's
        fuse_norm_quant and fuse_act_quant, TensorRT-LLM's fused norms)."""
        kernel = kernel or self.kernels.plain
        fused = fused and kernel.format in ("fp8", "nvfp4")
        inputs = linear.inputs * (self.width + 2 * kernel.activation_bytes)
        unpack = linear.inputs * linear.outputs if kernel.dequantised else 0
        return Operator(
            linear.name, "gemm", kernel.format, count, per,
            flops={per: 2 * linear.inputs * linear.outputs},
            weights={"step": matrix_bytes(linear, kernel, self.width),
                     **({"several": 2 * self.width * linear.inputs * linear.outputs} if kernel.copied else {})},
            activations={per: inputs + linear.outputs * self.width},
            rate=kernel.rate,
            shape={"n": linear.outputs, "k": linear.inputs, "quantised": kernel.activation_bytes,
                   **({"fused": 1.0} if fused else {})},
            unpack={"step": unpack, per: unpack / UNPACKED_FOR} if unpack else {},
        )  # fmt: skip

    def gemms(self, linear: Linear, layer: Layer, group: str, count: int, fused: bool = False) -> list[Operator]:
        """One of a layer's matrices as its checkpoint stores it."""
        pieces = self.kernels.split(layer, group, linear)
        return [self.gemm(piece, count, kernel=kernel, fused=fused) for piece, kernel in pieces]

    def elementwise(self, name: str, count: int, elements: float, weights: float = 0.0, per: str = "tokens"):
        """A kernel that moves `elements` activations per token, and reads `weights` parameters."""
        read = {"step": weights * self.width} if weights else {}
        return Operator(name, "elementwise", self.dtype, count, per, weights=read,
                        activations={per: elements * self.width})  # fmt: skip

    def norm(self, name: str, params: float, count: int) -> Operator:
        """A norm with the residual addition in front: both are read and written."""
        return self.elementwise(name, count, 4 * self.hidden_size, params)

    def all_reduce(self, count: int) -> list[Operator]:
        """The sum of the ranks' hidden states."""
        return self.collective("all_reduce", count, self.parallelism.tensor, self.hidden_size)

    def collective(
        self, kind: str, count: int, ranks: int, elements: float, per: str = "tokens", shared: bool = False,
        apart: int = 1, width: float = 0.0,
    ) -> list[Operator]:  # fmt: skip
        """width: bytes of an element, default: an activation's."""
        if ranks == 1 or count == 0:
            return []
        message = {per: elements * (width or self.width)}
        return [Operator(kind, "collective", self.dtype, count, per, message=message, ranks=ranks, apart=apart,
                         shared=shared)]  # fmt: skip
