"""A Llama-like decoder in plain torch with random weights and a paged KV cache: the operators of cost/operators.py."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from infersim.models.architecture import Model

from .cases import BLOCK_SIZE

Take = Callable[..., torch.Tensor]
EPS = 1e-5


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


def prompt_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [sequences, heads, tokens, width]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def gather_attention(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """One query per sequence, q [sequences, heads, width], over the blocks of table [sequences, blocks].

    cache [blocks, BLOCK_SIZE, 2 * kv_heads * width]. The blocks are gathered into one piece, then the queries that
    share a key head go through SDPA as its queries.
    """
    sequences, heads, width = q.shape
    pages = cache[table].view(sequences, -1, 2, kv_heads, width)
    k, v = pages[:, :, 0].transpose(1, 2), pages[:, :, 1].transpose(1, 2)
    grouped = q.view(sequences, kv_heads, heads // kv_heads, width)
    return F.scaled_dot_product_attention(grouped, k, v).reshape(sequences, heads, width)


class Decoder:
    """Weights are views that `take` hands out."""

    def __init__(self, model: Model, take: Take, device: torch.device):
        self.model, self.device = model, device
        layer, h = model.layers[0], model.hidden_size
        self.attention = layer.attention
        self.heads, self.kv_heads, self.width = (
            self.attention.num_heads,
            self.attention.num_kv_heads,
            self.attention.head_dim,
        )
        matrices = [*self.attention.linears(h), *layer.mlp.linears(h)]
        self.layers = [[take(one.outputs, one.inputs) for one in matrices] for _ in model.layers]
        self.embedding, self.head = take(model.vocab_size, h), take(model.vocab_size, h)
        self.weight = torch.ones(h, dtype=torch.bfloat16, device=device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).mul_(0.05).bfloat16()

    def elementwise(self, tokens: int) -> Callable[[], torch.Tensor]:
        """What one layer does beside matrices and attention."""
        x, qkv = self._random(tokens, self.model.hidden_size), self._random(tokens, self._qkv_width())
        wide = self._random(tokens, 2 * self.model.layers[0].mlp.intermediate_size)
        batch = Batch(self, tokens, BLOCK_SIZE, 0, 1)

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
            return sample(F.linear(x[last], self.head))

        return call

    def _layer(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, batch: "Batch"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv_proj, o_proj, up_proj, down_proj = self.layers[index]
        x, residual = norm(x, residual, self.weight)
        x = F.linear(batch.attend(F.linear(x, qkv_proj), index), o_proj)
        x, residual = norm(x, residual, self.weight)
        return F.linear(activation(F.linear(x, up_proj)), down_proj), residual


class Batch:
    """The sequences of one step and their KV cache, [layers, blocks, BLOCK_SIZE, 2 * kv_heads * width].

    A decode's blocks lie in random order; its newest token is the last of its context.
    """

    def __init__(self, decoder: Decoder, sequences: int, context: int, prompt: int, layers: int):
        d, device = decoder, decoder.device
        self.decoder, self.sequences, self.prompt = d, sequences, prompt
        self.tokens = sequences + prompt
        blocks, prompt_blocks = -(-context // BLOCK_SIZE), -(-prompt // BLOCK_SIZE)
        total = sequences * blocks + prompt_blocks
        shape = (layers, total, BLOCK_SIZE, 2 * d.kv_heads * d.width)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.05)
        order = torch.randperm(total, device=device)
        self.table = order[: sequences * blocks].view(sequences, blocks)
        newest = self.table[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE if sequences else order[:0]
        places = (order[sequences * blocks :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).view(-1)
        self.slots = torch.cat((newest, places[:prompt]))
        positions = torch.cat((torch.full((sequences,), context - 1), torch.arange(prompt))).to(device)
        frequency = 10000.0 ** (-torch.arange(0, d.width, 2, device=device) / d.width)
        angle = (positions[:, None] * frequency)[:, None]
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def project(self, qkv: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of [tokens, qkv], rotated, the new keys and values written to the cache."""
        d = self.decoder
        q, k, v = qkv.view(self.tokens, -1, d.width).split((d.heads, d.kv_heads, d.kv_heads), dim=1)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        new = torch.cat((k, v), dim=1).view(self.tokens, -1)
        self.cache[index].view(-1, new.shape[-1]).index_copy_(0, self.slots, new)
        return q, k, v

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        """[tokens, heads * width]"""
        d, n = self.decoder, self.sequences
        q, k, v = self.project(qkv, index)
        parts = []
        if n:
            parts.append(gather_attention(q[:n], self.cache[index], self.table, d.kv_heads).view(n, -1))
        if self.prompt:
            whole = prompt_attention(*(one[n:].transpose(0, 1)[None] for one in (q, k, v)))
            parts.append(whole[0].transpose(0, 1).reshape(self.prompt, -1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]
