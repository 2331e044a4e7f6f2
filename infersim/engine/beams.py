"""Beam search over paged KV memory: what beams of one prompt share, by a model of who descends from whom.

Which beams survive is a matter of the text, which a simulator has not: each new beam continues its own predecessor, or,
with the chance `turnover`, that of a beam drawn evenly (as generations follow one another in Wright and Fisher's
model). Written plainly: a block knows how many point to it, beams whose last block it is and blocks that follow it.
"""

from collections.abc import Iterable

import numpy as np


class Block:
    """One KV block in the tree of texts that begin alike."""

    __slots__ = ("previous", "references")

    def __init__(self, previous: "Block | None"):
        self.previous, self.references = previous, 1
        if previous is not None:
            previous.references += 1


class Beams:
    """The block tables of one request's beams, which begin with the same prompt; sizes in tokens."""

    def __init__(self, prompt_tokens: int, width: int, block_size: int):
        self.num_tokens, self.block_size, self.physical = prompt_tokens, block_size, 0
        last = None
        for _ in range(-(-prompt_tokens // block_size)):
            last = self._allocate(last)
            if last.previous is not None:
                last.previous.references -= 1  # it is no beam's last block any more
        last.references = width
        self.last = [last] * width

    @property
    def logical(self) -> int:
        """Blocks that the beams would hold if they shared none."""
        return len(self.last) * -(-self.num_tokens // self.block_size)

    def step(self, parents: np.ndarray) -> None:
        """The beams become children of `parents` (i8[width]) and each takes one more token."""
        chosen = [self.last[parent] for parent in parents]
        for block in chosen:
            block.references += 1
        for block in self.last:
            self._release(block)
        full = self.num_tokens % self.block_size == 0
        self.last = [self._follow(block) if full else self._own(block) for block in chosen]
        self.num_tokens += 1

    def _allocate(self, previous: Block | None) -> Block:
        self.physical += 1
        return Block(previous)

    def _follow(self, block: Block) -> Block:
        """A new block behind a full one."""
        new = self._allocate(block)
        self._release(block)
        return new

    def _own(self, block: Block) -> Block:
        """The block itself, or a copy if others write to it too."""
        if block.references == 1:
            return block
        copy = self._allocate(block.previous)
        self._release(block)
        return copy

    def _release(self, block: Block | None) -> None:
        while block is not None:
            block.references -= 1
            if block.references:
                return
            self.physical -= 1
            block = block.previous


def saved_share(
    lengths: Iterable[tuple[int, int]], width: int, turnover: float, block_size: int = 16, seed: int = 0
) -> float:
    """Share of the KV blocks that sharing saves: logical less physical blocks over logical ones, summed over all steps
    of requests with these (prompt, output) tokens. turnover: 0, every beam goes on as itself, to 1, all are drawn.
    """
    random = np.random.default_rng(seed)
    own = np.arange(width)
    logical = physical = 0
    for prompt, outputs in lengths:
        beams = Beams(prompt, width, block_size)
        drawn = random.integers(width, size=(outputs, width))
        parents = np.where(random.random((outputs, width)) < turnover, drawn, own)
        for row in parents.tolist():
            beams.step(row)
            logical += beams.logical
            physical += beams.physical
    return 1 - physical / logical
