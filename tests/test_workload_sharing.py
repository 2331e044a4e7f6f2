"""Prompts that begin alike: shared prefixes and several samples of one prompt, and the blocks that they save."""

from pathlib import Path

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.config.workload import Prefixes, Workload
from infersim.explain.summary import summarize
from infersim.run import run
from infersim.workload.build import build_requests
from infersim.workload.sharing import with_prefixes

LENGTHS = {"input_tokens": {"uniform": [10, 60]}, "output_tokens": {"uniform": [1, 50]}, "num_requests": 40}


def built(**settings):
    return build_requests(Workload(**LENGTHS, **settings), 3, Path())


def texts(requests):
    """The segments of each request."""
    begins, counts, ids, lengths = (column.tolist() for column in requests.segments)
    pieces = list(zip(ids, lengths, strict=True))
    return [pieces[first : first + count] for first, count in zip(begins, counts, strict=True)]


@pytest.mark.parametrize("prefixes", [None, {"count": 3, "tokens": {"uniform": [5, 30]}}])
def test_samples_share_the_whole_prompt_and_nothing_else(prefixes):
    alone, four = built(prefixes=prefixes), built(prefixes=prefixes, n=4)
    assert len(four) == 4 * len(alone)
    assert np.array_equal(four.prompt_tokens, np.repeat(alone.prompt_tokens, 4))
    assert np.array_equal(four.arrival, np.repeat(alone.arrival, 4))
    assert np.array_equal(four.output_tokens[::4], alone.output_tokens)  # the first sample is the one that was alone
    assert len(set(four.request_id.tolist())) == len(four)
    said = texts(four)
    for i, pieces in enumerate(said):
        assert sum(length for _, length in pieces) == four.prompt_tokens[i]
        assert pieces == said[i - i % 4]
    own = {pieces[-1][0] for pieces in said}
    assert len(own) == len(alone)
    first = {pieces[0] for pieces in said}
    assert len(first) == (3 if prefixes else len(alone))


def test_prefixes_come_before_what_is_asked():
    plain, behind = built(), built(prefixes={"count": 5, "tokens": 100})
    assert np.array_equal(behind.prompt_tokens, plain.prompt_tokens + 100)
    assert np.array_equal(behind.output_tokens, plain.output_tokens)
    assert set(behind.segment_ids.tolist()) == set(range(5))


def test_all_turns_of_a_conversation_begin_with_its_system_prompt():
    chat = {"turns": 4, "think_time": 1, "request_rate": 2}
    plain, behind = built(**chat), built(**chat, prefixes={"count": 3, "tokens": 100})
    assert np.array_equal(behind.prompt_tokens, plain.prompt_tokens + 100)
    system: dict[int, set] = {}
    for session, one, both in zip(plain.session.tolist(), texts(plain), texts(behind), strict=True):
        assert both[1:] == one
        assert both[0][1] == 100
        system.setdefault(session, set()).add(both[0][0])
    assert all(len(names) == 1 for names in system.values())
    assert set.union(*system.values()) == {0, 1, 2}


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_blocks_saved_by_samples(n):
    """A prompt of 8 full blocks, and n answers of 5 blocks each that grow together: the prompt's blocks but its last,
    which each sample computes itself, are held once instead of n times; the answers' mean over time is 3 blocks."""
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "engine": {"max_model_len": 1024},
        "workload": {"num_requests": 1, "n": n, "input_tokens": 128, "output_tokens": 80},
    }
    saved = summarize(run(build_scenario(parts, "test")))["explain"]["kv_blocks_saved"]
    assert saved == pytest.approx((n - 1) * 7 / (n * (8 + 3)), rel=0.03)


def test_without_prefix_cache_every_sample_computes_its_prompt():
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "engine": {"max_model_len": 1024},
        "workload": {"num_requests": 5, "n": 3, "input_tokens": 160, "output_tokens": 10},
    }
    shared = run(build_scenario(parts, "test"))[0]
    parts["engine"]["enable_prefix_caching"] = False
    alone = run(build_scenario(parts, "test"))[0]
    assert alone.num_scheduled_tokens - shared.num_scheduled_tokens == 5 * 2 * 144  # the last block is never found
    assert int(shared.requests["num_cached_tokens"].sum()) == 5 * 2 * 144


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 2, "turns": 3}, "n is for single requests"),
        ({"n": 0}, "must be a whole number >= 1"),
        ({"prefixes": {"count": 2}}, "tokens"),
    ],
)
def test_wrong(wrong, message):
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LENGTHS | wrong}
    with pytest.raises(InputError, match=message):
        build_scenario(parts, "test")


def test_a_session_of_many_turns_takes_the_memory_of_few():
    """16,000 turns of one session: its texts stand once, not once in each prompt that repeats them."""
    n = 16_000
    chat = Workload(input_tokens=3, output_tokens=2, num_requests=n, turns=n, request_rate=1)
    requests = with_prefixes(build_requests(chat, 0, Path()), Prefixes(count=2, tokens=7), 0)
    begins, counts, _, lengths = requests.segments
    assert len(lengths) == n + 1
    assert (begins == 0).all()
    assert np.array_equal(counts, np.arange(1, n + 1))
    assert lengths[0] == 7
    assert np.array_equal(requests.prompt_tokens, 7 + 5 * np.arange(n) + 3)
