"""Prefix caching: what is found again, on hand-made requests and on a real trace whose reuse is published."""

import numpy as np
import pytest
from prefixes import BLOCK, cached, fleet, load_mooncake, lru_hit_rate, serve_trace
from shared import needs_shared

from infersim.config.scenario import build_scenario
from infersim.run import run


def test_only_full_blocks_are_found():
    """10 shared tokens are two blocks of 4 and a rest."""
    assert cached(fleet(17), [0, 10], [12, 12], [1, 1], [[(1, 10)], [(1, 10)]]) == [0, 8]


def test_at_least_one_token_is_computed():
    """A prompt of two whole blocks that is cached to its end computes its second block again."""
    assert cached(fleet(17), [0, 10], [8, 8], [1, 1], [[(1, 8)], [(1, 8)]]) == [0, 4]


def test_what_was_generated_is_found_by_the_next_turn():
    """Prompt of 6 and 7 generated tokens, of which the last is never computed: three full blocks of 12."""
    turns = [[], [(-1, 13)]]
    assert cached(fleet(17), [0, 20], [6, 20], [7, 1], turns, names=[-1, -2]) == [0, 12]


def test_a_request_of_the_same_step_is_a_hit():
    assert cached(fleet(17), [0, 0], [12, 12], [1, 1], [[(1, 12)], [(1, 12)]]) == [0, 8]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    """Five usable blocks: a prompt of four is freed last block first; another takes two blocks, the older ones."""
    shared, other = [(1, 16)], [(2, 8)]
    found = cached(fleet(6, max_model_len=20), [0, 10, 20], [16, 8, 16], [1, 1, 1], [shared, other, shared])
    assert found == [0, 0, 12]  # the unused fifth block and the last of the four went to the other


def test_more_blocks_never_find_less():
    """A loop over 6 prompts of 4 blocks in a pool of growing size (LRU keeps inclusion for whole prompts in turn)."""
    prompts = [[(name, 16)] for name in range(6)] * 5
    n = len(prompts)
    found = [sum(cached(fleet(blocks), 20.0 * np.arange(n), [17] * n, [1] * n, prompts)) for blocks in range(18, 40, 3)]
    assert found == sorted(found)
    assert found[-1] == (n - 6) * 16


@pytest.fixture(scope="module")
def mooncake():
    return load_mooncake()


@needs_shared
@pytest.mark.parametrize(
    ("capacity", "percent"), [(1e9, 36.64), (1e3, 4.5), (3e3, 6.5), (10e3, 21.1), (30e3, 32.6), (50e3, 35.5)]
)
def test_published_reuse_of_the_trace(mooncake, capacity, percent):
    assert lru_hit_rate(mooncake, capacity) * 100 == pytest.approx(percent, abs=0.1)


@needs_shared
@pytest.mark.parametrize("block_size", [512, 16])
def test_the_engine_finds_what_the_trace_repeats(mooncake, block_size):
    """With room for everything: 37.34 % of tokens if only full blocks of 512 count, 37.36 % if any part does."""
    blocks = int((mooncake.prompt_tokens // block_size + 3).sum() + mooncake.output_tokens.sum() // block_size)
    requests = serve_trace(mooncake, blocks, block_size).requests
    rate = requests["num_cached_tokens"].sum() / requests["prompt_tokens"].sum()
    assert rate * 100 == pytest.approx({512: 37.34, 16: 37.36}[block_size], abs=0.02)


@needs_shared
def test_real_rules_find_about_what_an_lru_set_finds(mooncake):
    """In a pool of 10,000 blocks of 512: blocks in use and generated text take room, ends of prompts go first."""
    requests = serve_trace(mooncake, 10_001, BLOCK).requests
    blocks = requests["num_cached_tokens"].sum() / BLOCK / len(mooncake.segment_ids)
    assert blocks == pytest.approx(lru_hit_rate(mooncake, 10_000), abs=0.02)


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Nemotron-3-Nano-30B-A3B"])
def test_a_recurrent_model_finds_prompts_where_it_kept_a_state(name):
    """Four texts of 8,000 tokens before 2,000 of their own. The first prompt of each keeps its state at its own end;
    the second parts from it at the text's last whole block, where nobody kept one, and keeps it; all others find it."""
    workload = {"request_rate": 0.2, "num_requests": 40, "prefixes": {"count": 4, "tokens": 8000},
                "input_tokens": 2000, "output_tokens": 20}  # fmt: skip
    data = {"model": name, "hardware": "b300-sxm", "workload": workload,
            "engine": {"enable_prefix_caching": True, "max_model_len": 32768}}  # fmt: skip
    (on,) = run(build_scenario(data, "test"))
    (off,) = run(build_scenario(data | {"engine": {"preset": "vllm-0.24", "max_model_len": 32768}}, "test"))
    (by_itself,) = run(build_scenario(data | {"engine": {"max_model_len": 32768}}, "test"))  # from vLLM 0.28 on
    block = on.memory.block_size
    assert block > 500
    assert sorted(set(on.requests["num_cached_tokens"].tolist())) == [0, 8000 // block * block]
    assert (on.requests["num_cached_tokens"] == 0).sum() == 8
    assert not off.requests["num_cached_tokens"].any()
    assert by_itself.requests["num_cached_tokens"].tolist() == on.requests["num_cached_tokens"].tolist()
