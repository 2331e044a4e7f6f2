"""A Llama-like decoder in plain torch with random weights and a KV cache: the operators of cost/operators.py."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from infersim.models.architecture import Model

Take = Callable[..., torch.Tensor]
Matrix = Callable[[torch.Tensor], torch.Tensor]
EPS = 1e-5
QUERIES = 64
"""that attention on a CPU computes at once"""


def norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual, and the sum."""
    residual = x + residual
    return F.rms_norm(residual, (residual.shape[-1],), weight, EPS), residual


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, width] with cos and sin [tokens, 1, width / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def activation(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [tokens, 2 width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def sample(logits: torch.Tensor) -> torch.Tensor:
    """Greedy, as vLLM: float32 first."""
    return logits.float().argmax(dim=-1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the newest `tokens` of each sequence: q [sequences, heads, tokens, width], k and v
    [sequences, kv_heads, keys, width]. On CUDA tokens is 1 or keys.

    CUDA: PyTorch's fused kernels. CPU: two multiplications per QUERIES queries, without the keys behind them; PyTorch's
    own kernel takes twice the time of those that engines bring along (vLLM's cpu_attn).
    """
    sequences, heads, tokens, width = q.shape
    kv_heads, keys = k.shape[1:3]
    grouped = q.reshape(sequences, kv_heads, -1, tokens, width)
    if q.is_cuda and tokens > 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    if tokens == 1:
        one = grouped[..., 0, :]
        if q.is_cuda:
            return F.scaled_dot_product_attention(one, k, v).reshape(q.shape)
        return ((one * width**-0.5 @ k.mT).softmax(-1) @ v).reshape(q.shape)
    output = torch.empty_like(grouped)
    for first in range(0, tokens, QUERIES):
        block = grouped[:, :, :, first : first + QUERIES] * width**-0.5
        seen, size = keys - tokens + first + block.shape[3], block.shape[3]
        scores = (block.flatten(2, 3) @ k[:, :, :seen].mT).unflatten(2, (-1, size))
        scores[..., seen - size :].masked_fill_(torch.ones(size, size, dtype=torch.bool).triu(1), -math.inf)
        found = scores.softmax(-1).flatten(2, 3) @ v[:, :, :seen]
        output[:, :, :, first : first + QUERIES] = found.unflatten(2, (-1, size))
    return output.view(q.shape)


class Decoder:
    """Weights are views that `take` hands out, and matrices what `matrix` makes of theirs."""

    def __init__(self, model: Model, take: Take, matrix: Callable[[int, int], Matrix], device: torch.device):
        self.model, self.device = model, device
        layer, h = model.layers[0], model.hidden_size
        self.attention = layer.attention
        self.heads, self.kv_heads, self.width = (
            self.attention.num_heads,
            self.attention.num_kv_heads,
            self.attention.head_dim,
        )
        matrices = [*self.attention.linears(h), *layer.mlp.linears(h)]
        self.layers = [[matrix(one.outputs, one.inputs) for one in matrices] for _ in model.layers]
        self.embedding, self.head = take(model.vocab_size, h), matrix(model.vocab_size, h)
        self.weight = torch.ones(h, dtype=torch.bfloat16, device=device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).mul_(0.05).bfloat16()

    def elementwise(self, tokens: int) -> Callable[[], torch.Tensor]:
        """What one layer does beside matrices and attention."""
        x, qkv = self._random(tokens, self.model.hidden_size), self._random(tokens, self._qkv_width())
        wide = self._random(tokens, 2 * self.model.layers[0].mlp.intermediate_size)
        batch = Batch(self, tokens, 1, 0, 1)

        def call() -> torch.Tensor:
            normed, residual = norm(x, x, self.weight)
            batch.project(qkv, 0)
            normed, residual = norm(normed, residual, self.weight)
            return activation(wide)

        return call

    def _qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.width

    def layer_step(self, sequences: int, context: int, prompt: int) -> Callable[[], torch.Tensor]:
        """One layer of a step, a different one each time."""
        batch = Batch(self, sequences, context, prompt, len(self.layers))
        x = self._random(batch.tokens, self.model.hidden_size)
        turn = iter(range(2**62))

        def call() -> torch.Tensor:
            index = next(turn) % len(self.layers)
            return self._layer(index, x, x, batch)[0]

        return call

    def step(self, sequences: int, context: int, prompt: int) -> Callable[[], torch.Tensor]:
        """A whole step: `sequences` decodes at `context` and a prompt of `prompt` tokens (0: none)."""
        batch = Batch(self, sequences, context, prompt, len(self.layers))
        ids = torch.randint(0, self.model.vocab_size, (batch.tokens,), device=self.device)
        last = torch.arange(sequences + (prompt > 0), device=self.device)
        if prompt:
            last[-1] = batch.tokens - 1

        def call() -> torch.Tensor:
            x = F.embedding(ids, self.embedding)
            residual = torch.zeros_like(x)
            for index in range(len(self.layers)):
                x, residual = self._layer(index, x, residual, batch)
            x, _ = norm(x, residual, self.weight)
            return sample(self.head(x[last]))

        return call

    def _layer(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, batch: "Batch"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv_proj, o_proj, up_proj, down_proj = self.layers[index]
        x, residual = norm(x, residual, self.weight)
        x = o_proj(batch.attend(qkv_proj(x), index))
        x, residual = norm(x, residual, self.weight)
        return down_proj(activation(up_proj(x))), residual


class Batch:
    """The sequences of one step and their keys and values: of those that decode
    [layers, 2, sequences, kv_heads, context, width], the newest token's last; of the prompt [layers, 2, 1, kv_heads,
    prompt, width].

    Each sequence's lie in one piece: engines read paged ones where they are, and PyTorch has no kernel that can. To
    gather them first takes longer than the attention.
    """

    def __init__(self, decoder: Decoder, sequences: int, context: int, prompt: int, layers: int):
        d, device = decoder, decoder.device
        self.decoder, self.sequences, self.prompt = d, sequences, prompt
        self.tokens = sequences + prompt
        self.caches = [
            torch.empty((layers, 2, n, d.kv_heads, keys, d.width), dtype=torch.bfloat16, device=device).normal_(0, 0.05)
            for n, keys in ((sequences, context), (1, prompt))
        ]
        positions = torch.cat((torch.full((sequences,), context - 1), torch.arange(prompt))).to(device)
        frequency = 10000.0 ** (-torch.arange(0, d.width, 2, device=device) / d.width)
        angle = (positions[:, None] * frequency)[:, None]
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def project(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        """Queries [tokens, heads, width] of [tokens, qkv], rotated; the new keys and values go to the cache."""
        d, n = self.decoder, self.sequences
        q, k, v = qkv.view(self.tokens, -1, d.width).split((d.heads, d.kv_heads, d.kv_heads), dim=1)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        decodes, prompt = (cache[index] for cache in self.caches)
        for which, new in enumerate((k, v)):
            if n:
                decodes[which, :, :, -1] = new[:n]
            if self.prompt:
                prompt[which, 0] = new[n:].transpose(0, 1)
        return q

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        """[tokens, heads * width]"""
        q, n = self.project(qkv, index), self.sequences
        parts = []
        if n:
            parts.append(attention(q[:n, :, None], *self.caches[0][index]).view(n, -1))
        if self.prompt:
            whole = attention(q[n:].transpose(0, 1)[None], *self.caches[1][index])
            parts.append(whole[0].transpose(0, 1).reshape(self.prompt, -1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]
