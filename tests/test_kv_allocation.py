"""KV memory in pieces and on the CPU: shares of memory, and what swapping saves and costs."""

import numpy as np
import pytest

from infersim.config.scenario import build_scenario
from infersim.explain.summary import kv_shares
from infersim.run import run, simulate
from infersim.workload.requests import Requests

SLOTS = 15_728  # of OPT-13B in 12 GiB (Kwon et al. 2023, table 1)


def pieces(**engine):
    """Conversations that all wait from the start, 2,048 tokens at most, on one A100."""
    parts = {
        "model": "OPT-13B",
        "hardware": "a100-sxm-40gb",
        "engine": {"preset": "orca", "max_model_len": 2048, "num_gpu_blocks_override": SLOTS + 1,
                   "gpu_memory_utilization": 0.95} | engine,
        "workload": {"num_requests": 400, "input_tokens": {"lognormal": {"mean": 180, "sigma": 1.0, "max": 500}},
                     "output_tokens": {"lognormal": {"mean": 340, "sigma": 0.8, "max": 1500}}},
    }  # fmt: skip
    return run(build_scenario(parts, "test"))[0]


@pytest.mark.parametrize("allocator", ["contiguous", "buddy"])
def test_the_longest_reservation_leaves_what_no_piece_fits_in(allocator):
    """Seven pieces of 2,048 fit in 15,728 slots; the rest is external as long as somebody waits."""
    result = pieces(allocator=allocator)
    shares = kv_shares(result)
    assert result.peak_running == SLOTS // 2048
    assert sum(shares.values()) == pytest.approx(1)
    held = shares["token"] + shares["reserved"] + shares["internal"]
    assert held <= 7 * 2048 / SLOTS + 1e-9
    r = result.requests
    tokens = (r["num_output_tokens"] * (r["prompt_tokens"] + r["num_output_tokens"])).sum()
    room = (r["num_output_tokens"] * 2048.0).sum()
    assert (shares["token"] + shares["reserved"]) / held == pytest.approx(tokens / room, rel=0.02)


@pytest.mark.parametrize("cached", [False, True])
def test_a_reservation_of_the_longest_sequence_fits_beside_states(cached):
    """With a prefix cache a state stands behind each block of text, so that less of it fits at once."""
    engine = {"reserve": "max-model-len", "enable_prefix_caching": cached, "num_gpu_blocks_override": 800}
    load = {"num_requests": 3, "input_tokens": 1609, "output_tokens": 5}
    parts = {"model": "Qwen3.5-35B-A3B", "hardware": "h200-sxm", "engine": engine, "workload": load}
    result = run(build_scenario(parts, "test"))[0]
    assert result.completed.all()
    assert (result.engine.max_model_len < 262_144) == cached


@pytest.mark.parametrize("allocator", ["contiguous", "buddy"])
def test_a_piece_holds_what_has_left_a_window_too(allocator):
    """Of 4 GiB, which are 32,768 tokens, one is the null block's."""
    engine = {"allocator": allocator, "kv_cache_memory_bytes": "4 GiB"}
    load = {"num_requests": 3, "input_tokens": 12, "output_tokens": 3}
    parts = {"model": "Mistral-7B-v0.1", "hardware": "h100-sxm", "engine": engine, "workload": load}
    result = run(build_scenario(parts, "test"))[0]
    assert result.completed.all()
    assert result.engine.max_model_len == (32_767 if allocator == "contiguous" else 16_384)


@pytest.mark.parametrize("allocator", ["paged", "contiguous", "buddy"])
@pytest.mark.parametrize(("at_once", "output"), [(1, 2), (4, 7), (16, {"uniform": [1, 9]})])
def test_shares_of_memory_are_shares(allocator, at_once, output):
    """However often requests end together, or alone while others wait: nothing is counted twice."""
    engine = {"allocator": allocator, "max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 33}
    engine |= {"reserve": "max-model-len", "max_num_seqs": at_once, "preset": "orca"}
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine}
    parts["workload"] = {"num_requests": 40, "input_tokens": {"uniform": [1, 50]}, "output_tokens": output}
    result = run(build_scenario(parts, "test"))[0]
    shares = kv_shares(result)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share >= -1e-12 for share in shares.values()), shares
    if at_once == 1:
        assert float(result.replicas.rows["occupied_time"][0]) == pytest.approx(result.running_time)
    if allocator == "buddy" and at_once <= 4:  # four pieces of eight blocks fill the memory
        assert shares["external"] == pytest.approx(0, abs=1e-12)


def test_who_knows_the_output_wastes_nothing_inside_and_a_buddy_allocator_outside():
    """With the true length nothing is reserved in vain; pieces of any length waste less outside than powers of two,
    and hold more sequences."""
    exact, buddy = (pieces(allocator=a, reserve="output-length") for a in ("contiguous", "buddy"))
    for result in (exact, buddy):
        assert kv_shares(result)["internal"] == pytest.approx(0, abs=1e-9)
    assert kv_shares(exact)["external"] < kv_shares(buddy)["external"]
    assert exact.running_time / exact.end_time > 1.2 * buddy.running_time / buddy.end_time


def test_a_buddy_allocator_keeps_large_holes_whole():
    """Of 8 slots 0 to 3 are free and 4 to 6 are not: a piece of one goes to 7, and one of four still fits."""
    setting = build_scenario(
        {
            "model": "OPT-13B",
            "hardware": "a100-sxm-40gb",
            "engine": {"preset": "orca", "reserve": "output-length", "max_model_len": 512, "host_request_time": 0.0,
                       "block_size": 64, "num_gpu_blocks_override": 9, "gpu_memory_utilization": 0.95},
            "workload": {"num_requests": 5, "input_tokens": 1, "output_tokens": 1},
        },
        "test",
    )  # fmt: skip
    # pieces of four, two and one blocks, of which the first is given back soon; then of one and of four
    lengths = ((250, 2), (64, 64), (32, 32), (20, 40), (200, 50))
    prompts, outputs = (np.array(x) for x in zip(*lengths, strict=True))
    result = simulate(setting, Requests(np.array([0.0, 0.0, 0.0, 0.5, 0.5]), prompts, outputs, np.arange(5)))
    r = result.requests
    assert r["last_token"][0] < 0.5 < r["last_token"][1:].min()
    assert r["scheduled"][4] < r["last_token"][1:4].min()


def test_powers_of_two_are_never_more_than_twice_the_output():
    shares = kv_shares(pieces(reserve="power-of-two"))
    assert 0 < shares["internal"] < shares["token"] + shares["reserved"]


def short_of_memory(**engine):
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "rtx-4090",
        "engine": {"preset": "vllm-0", "max_model_len": 2048, "num_gpu_blocks_override": 600} | engine,
        "workload": {"num_requests": 60, "input_tokens": {"uniform": [100, 600]},
                     "output_tokens": {"uniform": [200, 900]}},
    }  # fmt: skip
    return run(build_scenario(parts, "test"))[0]


@pytest.mark.parametrize("caching", [False, True])
def test_swapping_computes_every_token_once(caching):
    """What is copied out comes back: scheduled tokens are prompts and outputs, the last token apart; recomputation
    needs more, even where a request may find its own blocks again."""
    swapped, recomputed = (
        short_of_memory(enable_prefix_caching=caching, **swap)
        for swap in ({"preemption_mode": "swap", "swap_space": "64 GiB"}, {})
    )
    r = swapped.requests
    once = int((r["prompt_tokens"] + r["num_output_tokens"] - 1).sum(dtype="i8"))
    assert r["num_preemptions"].sum() > 20
    assert swapped.num_scheduled_tokens == once
    assert recomputed.num_scheduled_tokens > 1.05 * once


@pytest.mark.parametrize("caching", [False, True])
def test_copies_take_their_bytes_over_pcie(caching):
    """All that swapping adds to a step is its blocks' bytes at PCIe's bandwidth, out and in."""
    result = short_of_memory(preemption_mode="swap", swap_space="64 GiB", enable_prefix_caching=caching)
    rows = result.replicas.rows
    copied = int(rows["num_copied"].sum())
    assert copied > 0
    assert copied % 2 == 0  # every block that leaves returns
    seconds = copied * result.memory.block_bytes / result.scenario.hardware.pcie_bandwidth
    free = result.scenario.hardware.model_copy(update={"pcie_bandwidth": 1e30})
    slow, fast = result, run(result.scenario.model_copy(update={"hardware": free}))[0]
    assert slow.num_steps == fast.num_steps  # all wait from the start: time decides nothing
    assert slow.busy_time - fast.busy_time == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("caching", [False, True])
def test_no_room_on_the_cpu_is_recomputation(caching):
    """A CPU pool smaller than any request changes nothing at all."""
    tiny = short_of_memory(preemption_mode="swap", swap_space="3 MB", enable_prefix_caching=caching)
    none = short_of_memory(enable_prefix_caching=caching)
    for name in tiny.requests.dtype.names:
        assert np.array_equal(tiny.requests[name], none.requests[name]), name


def orca(cluster=None, max_num_seqs=256, **workload):
    engine = {"preset": "orca", "max_model_len": 2048, "max_num_seqs": max_num_seqs}
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine, "workload": workload}
    return run(build_scenario(parts | ({"cluster": cluster} if cluster else {}), "test"))[0]


def test_shares_of_memory_are_shares_when_clients_give_up():
    """What an aborted request held counts until the moment at which it was aborted, room that it was to fill too."""
    tokens = {"input_tokens": 1000, "output_tokens": 20}
    shares = kv_shares(orca(request_rate=50, num_requests=100, timeout=0.01, **tokens))
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= -1e-12
    assert shares["reserved"] > 0


def test_pieces_held_for_a_slow_link_are_no_more_than_there_is_a_place_for():
    """The table of pieces has room for max_num_seqs that run and as many that hold memory without running."""
    link = {"prefill": {}, "decode": {}, "transfer": {"bandwidth": "10 MB/s"}}
    tokens = {"input_tokens": 100, "output_tokens": 2}
    result = orca(link, max_num_seqs=8, request_rate="inf", num_requests=40, **tokens)
    assert (result.requests["num_output_tokens"] == 2).all()
    assert (result.replicas.rows["peak_blocks"] <= 2 * 8 * 2048).all()


def test_a_peak_is_of_what_lasted():
    """One request is in the engine for one step, and is seen."""
    result = orca(request_rate=1, num_requests=1, input_tokens=100, output_tokens=1)
    assert result.peak_running == 1
    assert result.replicas.rows["running_time"][0] == pytest.approx(result.busy_time)
