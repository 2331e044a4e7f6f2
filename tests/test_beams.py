"""Blocks that beams share, against counting them from the beams' whole histories."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infersim.engine.beams import Beams, saved_share


def ancestors(generations: list[list[int]], width: int) -> list[list[int]]:
    """For each beam, which beam of each generation it descends from, the last one itself."""
    lines = []
    for beam in range(width):
        line = []
        for parents in reversed(generations):
            line.append(beam)
            beam = parents[beam]
        lines.append(line[::-1])
    return lines


@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([1, 4, 16]), st.data())
def test_blocks_are_those_of_different_texts(width, prompt, block_size, data):
    """Two beams hold the same block if and only if all text up to its end is the same."""
    beams, generations = Beams(prompt, width, block_size), []
    for _ in range(data.draw(st.integers(1, 30))):
        generations.append(data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width)))
        beams.step(np.array(generations[-1]))
        texts = [[-1] * prompt + line for line in ancestors(generations, width)]
        blocks = {tuple(text[: i + block_size]) for text in texts for i in range(0, len(text), block_size)}
        assert beams.physical == len(blocks)
        assert beams.logical == width * -(-len(texts[0]) // block_size)


def test_samples_share_the_prompts_full_blocks_only():
    """Without turnover: prompts of 40 in blocks of 16 share 2 of 3 to 4 blocks; one sequence shares nothing."""
    saved, held = 2 * 2 * 16, 3 * sum(-(-(40 + i) // 16) for i in range(1, 17))
    assert saved_share([(40, 16)], 3, 0.0) == pytest.approx(saved / held)
    assert saved_share([(40, 16)], 1, 1.0) == 0


def test_more_turnover_and_more_beams_share_more():
    lengths = [(20, 60)] * 50
    by_turnover = [saved_share(lengths, 4, turnover) for turnover in (0.0, 0.05, 0.2, 1.0)]
    assert by_turnover == sorted(by_turnover)
    assert saved_share(lengths, 2, 0.1) < saved_share(lengths, 6, 0.1) < 5 / 6
