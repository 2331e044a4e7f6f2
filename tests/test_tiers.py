"""Tiers below the GPU: what they find again, what bringing it back costs, and what they must not change."""

import resource
import sys
from dataclasses import asdict

import numpy as np
import pytest
from prefixes import BLOCK, cached, fleet, load_mooncake, lru_hit_rate, serve_trace
from shared import needs_shared

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.explain.attribution import divide_sum, latency_terms
from infersim.explain.break_even import loading_over_prompt
from infersim.explain.change import by_row
from infersim.explain.summary import summarize
from infersim.report.servers import vllm_serve
from infersim.run import run

A, B, C = [(1, 16)], [(2, 19)], [(3, 16)]  # texts of blocks of 4 tokens


def tiers(cpu: int, disk: int = 0, blocks: int = 6, **knobs) -> Fleet:
    """Five usable blocks, so that a prompt of 19 tokens evicts all others; steps of 1 s."""
    values = {"max_model_len": 20, "tier_blocks": (cpu, disk), "tier_latency": (0.25, 0.5), **knobs}
    return fleet(blocks, tier_block_time=(0.125, 2.0), **values)


def seconds(engine: Fleet) -> list[float]:
    return (engine.requests["last_token"] - engine.requests["scheduled"]).tolist()


def by_tier(engine: Fleet) -> list[tuple[int, int]]:
    return engine.requests[["num_cpu_cached_tokens", "num_disk_cached_tokens"]].tolist()


def test_what_the_gpu_evicts_returns_in_latency_and_bytes_over_bandwidth():
    """Alone, a prompt whose text is in the CPU's memory takes its step and latency + blocks x seconds per block. Three
    of four blocks: at least one token is computed."""
    engine = tiers(cpu=8)
    assert cached(engine, [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A]) == [0, 0, 12]
    assert by_tier(engine) == [(0, 0), (0, 0), (12, 0)]
    assert seconds(engine) == [1.0, 1.0, 1.0 + 0.25 + 3 * 0.125]
    assert engine.replicas["load_time"][0] == 0.25 + 3 * 0.125
    assert engine.time_by_resource[state.OFFLOAD] == 0.25 + 3 * 0.125
    assert engine.time_by_resource[state.WEIGHTS] == 3.0


def test_what_the_cpu_evicts_returns_from_the_disk_through_its_memory():
    """Two slots keep the two blocks evicted last, which are the prompt's first; the third is on the disk."""
    engine = tiers(cpu=2, disk=8)
    assert cached(engine, [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A]) == [0, 0, 12]
    assert by_tier(engine)[2] == (8, 4)
    assert seconds(engine)[2] == 1.0 + (0.25 + 3 * 0.125) + (0.5 + 1 * 2.0)


def test_the_last_tier_forgets():
    """Without a disk a CPU tier of two blocks has the prompt's first two."""
    assert cached(tiers(cpu=2), [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A]) == [0, 0, 8]


@pytest.mark.parametrize("disk", [8, 100_000_000])
def test_a_crash_clears_every_tier_and_reaches_no_slot_that_was_not_used(disk):
    """Nothing is found afterwards. Slots take 32 bytes each: gigabytes, were all of them written to."""
    engine = tiers(cpu=2, disk=disk)
    assert cached(engine, [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A])[2] == 12
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine.fail(0, 30.0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 1e8
    if disk == 8:
        assert not any(engine.blocks[name].any() for name in ("hash", "bucket", "references"))
    assert cached(engine, [40, 50], [16, 19], [1] * 2, [A, B])[3:] == [0, 0]


def test_a_load_is_behind_what_the_gpu_has():
    """Seven usable blocks: of the first prompt the GPU keeps two blocks, and the third comes from the tier."""
    engine = tiers(cpu=8, blocks=8)
    assert cached(engine, [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A]) == [0, 0, 12]
    assert by_tier(engine)[2] == (4, 0)
    assert seconds(engine)[2] == 1.0 + 0.25 + 0.125


def test_text_that_was_loaded_is_a_hit_in_the_same_step():
    """A second request for the same text, scheduled with the first, finds it on the GPU: it is there before the step,
    also where text that a step computes is no hit."""
    for late_hits in ("hit", "miss", "wait"):
        engine = tiers(cpu=16, blocks=11, max_num_seqs=4, late_hits=late_hits)
        found = cached(engine, [0, 10, 20, 30, 30], [16, 19, 16, 16, 16], [1] * 5, [A, B, C, A, A])
        assert found[3:] == [12, 12]
        assert by_tier(engine)[3][0] > 0
        assert by_tier(engine)[4] == (0, 0)


def test_layers_are_loaded_while_others_are_computed():
    """A pipeline of n layers, each loaded in l / n and computed in c / n: l/n + (n - 1) max(l, c)/n + c/n in all."""
    load, step = 0.25 + 3 * 0.125, 1.0
    for n, time, more in ((1, load, {}), (4, load, {}), (4, 1.25, {"tier_latency": (0.875, 0)})):
        engine = tiers(cpu=8, kv_offloading_load="layers", num_layers=n, **more)
        assert cached(engine, [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A])[2] == 12
        assert seconds(engine)[2] == time / n + (n - 1) * max(time, step) / n + step / n


def test_a_load_in_the_background_delays_its_request_alone():
    """The prompt waits until its text is there; the one that decodes meanwhile has steps of 1 s as if there were no
    load. Loads go one after another."""
    engine = tiers(cpu=30, blocks=14, max_num_seqs=4, kv_offloading_load="background", tier_latency=(2.25, 0.5))
    times, prompts = [0, 10, 20, 30, 40, 40.5, 40.5], [16, 16, 19, 19, 8, 16, 16]
    found = cached(engine, times, prompts, [1, 1, 1, 1, 9, 1, 1], [A, C, B, [(4, 19)], [(9, 8)], A, C])
    assert found[5:] == [12, 12]
    first, second = (2.25 + 0.125 * cpu / 4 for cpu, _ in by_tier(engine)[5:])
    ends = np.array([41 + first, 41 + first + second])
    assert engine.requests["scheduled"][5:].tolist() == np.ceil(ends).tolist()
    assert engine.requests["last_token"][4] - engine.requests["scheduled"][4] == 9.0
    assert engine.time_by_resource[state.OFFLOAD] == 0.0


def test_written_through_is_there_before_the_gpu_evicts_it():
    """The tier has every block that was ever computed; evicted first or not, as much is found."""
    through, back = (tiers(cpu=99, write_through=f"write_{name}") for name in ("through", "back"))
    for engine in (through, back):
        assert cached(engine, [0, 10, 20], [16, 19, 16], [1] * 3, [A, B, A])[2] == 12
        engine.submit(0, [30.0], [9], [1], [1], segments=(np.array([0]), 1, [5], [9]))
        engine.advance()
    used = [int(engine.blocks[0]["references"][6]) for engine in (through, back)]
    assert used[0] == 4 + 4 + 2 > used[1]
    assert by_tier(through)[:3] == by_tier(back)[:3]


def test_a_store_of_all_replicas_brings_what_it_has():
    """So many blocks in latency and seconds per block, but at least one token is computed, and no tier is needed."""
    engine = fleet(6, max_model_len=20, store_latency=0.5, store_block_time=0.25)
    engine.submit(0, [0.0, 10.0], [16, 16], [1, 1], [1, 1], segments=(np.arange(2), 1, [1, 2], [16, 16]))
    engine.requests["stored_tokens"] = [10, 16]
    engine.advance()
    assert seconds(engine) == [1.0 + 0.5 + 2 * 0.25, 1.0 + 0.5 + 3 * 0.25]
    assert engine.requests["num_stored_cached_tokens"].tolist() == [8, 12]


def test_a_router_is_told_of_tiers():
    """Three of four blocks on the GPU or below it, the latter at the weight asked for."""
    engine = tiers(cpu=8)
    cached(engine, [0, 10], [16, 19], [1] * 2, [A, B])
    row = engine.add(16, 1, 1, 1, segments=(np.array([0]), 1, [1], [16]))
    assert [engine.match(row, weight)[0] for weight in (0.0, 0.75, 1.0)] == [0.0, 9.0, 12.0]


def test_prompts_wait_for_the_step_that_takes_them():
    """Every fifth step since it had nothing to do, while others decode and none was left behind; steps of 1 s."""
    engine = fleet(40, max_num_seqs=4, max_model_len=40, prefill_schedule_interval=5)
    engine.submit(0, [0, 0.5, 6.5], [4, 4, 4], [30, 1, 1], [30, 1, 1])
    engine.advance()
    assert engine.requests["scheduled"].tolist() == [0.0, 5.0, 10.0]


def records(engine: Fleet, but: tuple[str, ...] = ()) -> list[np.ndarray]:
    return [engine.requests[name] for name in engine.requests.dtype.names if name not in but]


def crowd(**knobs) -> Fleet:
    """3,000 requests of 5 to 48 tokens for 12 blocks of 4, which share 8 texts; every fiftieth needs all blocks."""
    n, random = 3000, np.random.default_rng(7)
    values = {"max_num_seqs": 12, "max_num_batched_tokens": 48, "max_model_len": 48, **knobs}
    engine = fleet(13, **values)
    prompts, outputs = random.integers(1, 21, n), random.integers(4, 21, n)
    prompts[::50], outputs[::50] = 27, 21
    segments = np.arange(n), 1, random.integers(1, 9, n), prompts
    engine.submit(0, np.arange(n) * 1.0, prompts, outputs, outputs, segments=segments)
    engine.advance()
    return engine


@pytest.mark.parametrize("swap", [{}, {"num_cpu_blocks": 3}, {"num_cpu_blocks": 7}, {"num_cpu_blocks": 10_000}])
@pytest.mark.parametrize("tier_blocks", [(0, 0), (1, 0), (1, 1), (5, 30), (10_000, 0)])
def test_thousands_of_preemptions_end(swap, tier_blocks):
    """Pools too small by far: every request completes, every block is free, no tier has more than it holds."""
    engine = crowd(tier_blocks=tier_blocks, tier_block_time=(0.5, 2.0), swap_block_time=0.5, **swap)
    assert (engine.requests["status"] == state.COMPLETED).all()
    assert engine.replicas["num_preemptions"][0] > 1000
    assert engine.schedulers["free_blocks"][0] == 12
    assert engine.schedulers["free_cpu_blocks"][0] == engine.knobs["num_cpu_blocks"][0]
    assert not engine.schedulers["num_shared"][0]
    assert engine.replicas["num_copied"][0] > 0 or "num_cpu_blocks" not in swap
    assert not engine.blocks[0]["references"][1:13].any()


@pytest.mark.parametrize("swap", [{}, {"num_cpu_blocks": 7, "swap_block_time": 0.5}])
def test_no_tier_is_no_change(swap):
    """Room for no block, and a tier whose text nobody asks for again, leave every record as it was."""
    none, empty = crowd(**swap), crowd(tier_blocks=(0, 99), tier_latency=(9.0, 9.0), **swap)
    for one, other in zip(records(none), records(empty), strict=True):
        assert np.array_equal(one, other)
    texts = [[(name, 16)] for name in range(30)]
    unasked, without = tiers(cpu=100), fleet(6, max_model_len=20)
    for engine in (unasked, without):
        assert cached(engine, np.arange(30.0), [16] * 30, [3] * 30, texts) == [0] * 30
    for one, other in zip(records(unasked), records(without), strict=True):
        assert np.array_equal(one, other)


def test_more_tier_never_finds_less():
    """Prompts drawn from 40 texts, one after another: whatever the split into CPU and disk, a larger tier has all that
    a smaller one has, and with room for all everything but first sights is found."""
    random = np.random.default_rng(3)
    names = np.minimum(random.zipf(1.3, 400), 40).tolist()
    prompts = [[(int(name), 16)] for name in names]
    n = len(prompts)

    def found(cpu: int, disk: int = 0) -> int:
        return sum(cached(tiers(cpu, disk), 20.0 * np.arange(n), [17] * n, [1] * n, prompts))

    only_cpu = [found(cpu) for cpu in (0, 1, 2, 5, 10, 20, 50, 100, 200)]
    assert only_cpu == sorted(only_cpu)
    assert only_cpu[0] < only_cpu[-1] == (n - len(set(names))) * 16
    beside = [found(10, disk) for disk in (0, 1, 5, 20, 200)]
    assert beside == sorted(beside)
    assert beside[0] == found(10)
    assert beside[-1] == only_cpu[-1]


@pytest.fixture(scope="module")
def mooncake():
    return load_mooncake()


def below_a_small_gpu(requests, cpu: int, disk: int = 0) -> Fleet:
    """The trace on a GPU that holds 300 blocks of 512 tokens."""
    return serve_trace(requests, 301, BLOCK, tier_blocks=(cpu, disk))


@needs_shared
@pytest.mark.parametrize(("cpu", "disk"), [(600_000, 0), (5_000, 600_000)])
def test_endless_tiers_find_what_an_endless_cache_finds(mooncake, cpu, disk):
    """Each request the same: 37.34 % of the trace's tokens, and 36.60 % of its blocks, full ones only; 36.64 % of all
    (test_prefix_caching)."""
    everything = int((mooncake.prompt_tokens // BLOCK + 3).sum() + mooncake.output_tokens.sum() // BLOCK)
    endless = serve_trace(mooncake, everything, BLOCK).requests["num_cached_tokens"]
    requests = below_a_small_gpu(mooncake, cpu, disk).requests
    assert np.array_equal(requests["num_cached_tokens"], endless)
    assert endless.sum() / requests["prompt_tokens"].sum() * 100 == pytest.approx(37.34, abs=0.02)
    assert endless.sum() / BLOCK / len(mooncake.segment_ids) * 100 == pytest.approx(36.64, abs=0.1)
    assert (requests["num_disk_cached_tokens"].sum() > 0) == (disk > 0)


@needs_shared
def test_a_full_tier_finds_about_what_an_lru_set_finds(mooncake):
    """10,000 blocks below a GPU of 300: generated text takes room, and what is on the GPU has its copy below."""
    requests = below_a_small_gpu(mooncake, 10_000).requests
    blocks = requests["num_cached_tokens"].sum() / BLOCK / len(mooncake.segment_ids)
    assert blocks == pytest.approx(lru_hit_rate(mooncake, 10_000), abs=0.02)


def test_a_router_counts_what_the_gpu_has():
    """Text in the CPU's memory is no match (commands.match), as kv-aware routers see blocks that the GPU has."""
    engine = tiers(cpu=8)
    cached(engine, [0, 10], [16, 19], [1, 1], [A, B])
    segments = (0, 1, [1], [16]), (0, 1, [2], [16])
    rows = [engine.add(16, 1, 1, 1, segments=piece) for piece in segments]
    assert [engine.match(row)[0] for row in rows] == [0, 12]


def test_a_dead_replica_has_forgotten_its_tiers():
    engine = tiers(cpu=8)
    cached(engine, [0, 10], [16, 19], [1, 1], [A, B])
    engine.fail(0, 15.0)
    assert cached(engine, [20, 30, 40], [16, 19, 16], [1] * 3, [A, B, A])[2:] == [0, 0, 12]


def test_a_swapped_request_is_copied_whole_and_computed_once():
    """Two requests share two of their first three blocks. When both have four, and six are taken, the second is swapped
    out: the four blocks that it holds are copied, the shared ones too, and only its own two come free. It returns when
    the first has ended, with all four, and no token is computed twice."""
    engine = fleet(7, max_model_len=24, max_num_seqs=4, num_cpu_blocks=4, swap_block_time=0.125)
    assert cached(engine, [0, 0], [9, 9], [11, 11], [[(1, 8)], [(1, 8)]]) == [0, 8]
    assert engine.requests["num_preemptions"].tolist() == [0, 1]
    assert engine.replicas["num_copied"][0] == 2 * 4
    assert engine.time_by_resource[state.OFFLOAD] == 2 * 4 * 0.125
    assert engine.replicas["peak_blocks"][0] == 6
    once = (engine.requests["prompt_tokens"] + engine.requests["num_output_tokens"] - 1).sum()
    assert engine.replicas["num_scheduled_tokens"][0] == once - 8


def conversations(**engine):
    """Turns that come back after a minute to a GPU whose pool holds few of them."""
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "engine": {"num_gpu_blocks_override": 4000, "max_model_len": 32768} | engine,
        "workload": {"request_rate": 0.5, "num_requests": 150, "turns": {"uniform": [2, 6]}, "think_time": "30 s",
                     "input_tokens": 4000, "output_tokens": 100},
    }  # fmt: skip
    return build_scenario(parts, "test")


SLOW = {"kv_offloading_size": "1 GiB", "kv_offloading_disk_size": "1 TB", "kv_offloading_disk_bandwidth": "500 MB/s"}


def test_bytes_over_the_links_of_the_deployment():
    """A block's bytes over PCIe; those of all GPUs of the replica over the disk. Sizes are the replica's: tensor
    parallel halves share them, data-parallel ranks have one each."""
    scenario = conversations(**SLOW)
    deployment = deployment_of(scenario)
    knobs, memory = deployment.knobs(), deployment.memory
    assert knobs["tier_block_time"][0] == memory.block_bytes / scenario.hardware.pcie_bandwidth
    assert knobs["tier_block_time"][1] == memory.block_bytes / 500e6
    assert knobs["tier_blocks"][0] == 2**30 // memory.block_bytes
    for parallelism, share in (({"tensor": 2}, 1), ({"attention_data": 2}, 1)):
        other = build_scenario(scenario.resolved() | {"parallelism": parallelism}, "test")
        deployment = deployment_of(other)
        gpus = 2 if "tensor" in parallelism else 1
        knobs, size = deployment.knobs(), deployment.memory.block_bytes
        assert knobs["tier_blocks"][0] == share * 2**30 // (size * gpus)
        assert knobs["tier_block_time"][1] == pytest.approx(size * gpus / 500e6)
        assert knobs["tier_block_time"][0] == pytest.approx(size / other.hardware.pcie_bandwidth)


def test_a_slow_disk_is_seen_to_cost_more_than_it_saves():
    """Hits from a disk at 0.5 GB/s make a run slower; the difference names loading against the prompts' compute, the
    summary says how many tokens came from where, and break-even the bandwidth that it would have needed."""
    slow, none = run(conversations(**SLOW))[0], run(conversations())[0]
    tiers = summarize([slow])["explain"]["kv_offloading"]
    assert tiers["disk_hit_rate"] > 0.1
    assert sum(tiers[f"{name}_hit_rate"] for name in ("gpu", "cpu", "disk")) == pytest.approx(
        summarize([slow])["explain"]["prefix_cache_token_hit_rate"]
    )
    assert slow.time_by_resource[state.OFFLOAD] == pytest.approx(tiers["load_s"])
    assert summarize([none])["explain"]["kv_offloading"] is None
    columns = slow.columns()
    assert columns["disk_cached_tokens"].sum() > 0
    parts = divide_sum(latency_terms(none), latency_terms(slow))
    rows = by_row(parts)
    assert sum(rows.values()) > 0  # slower
    assert rows["offload"] == max(rows[name] for name in rows if name != "queue")
    # their own, not the row: loading makes a request meet more of others' prompts, whose compute it waits for
    assert sum(parts["compute.prefill"].values()) < 0
    assert slow.time_by_resource[state.COMPUTE] < none.time_by_resource[state.COMPUTE]
    deployment = deployment_of(slow.scenario)
    table = loading_over_prompt(deployment.knobs(), deployment.step_cost(), deployment.memory.block_bytes)
    row = next(row for row in table if row["prompt"] == 4096)
    assert row["disk_ms"] > row["compute_ms"] > row["cpu_ms"]
    assert row["needed_gb_per_s"] > 0.5


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"enable_prefix_caching": False}, "engine.kv_offloading_size: keeps what prefix caching evicts"),
        ({"kv_offloading_size": 0}, "engine.kv_offloading_size must be above 0"),
        ({"kv_offloading_disk_bandwidth": None}, "engine.kv_offloading_disk_bandwidth: missing"),
    ],
)
def test_what_is_missing_is_named(engine, message):
    with pytest.raises(InputError, match=message):
        deployment_of(conversations(**SLOW | engine))


@pytest.mark.parametrize("engine", [{"kv_offloading_size": "1 GiB"}, {"preemption_mode": "swap"}])
def test_windows_are_refused(engine):
    parts = {"model": "gemma-3-27b", "hardware": "h100-sxm", "parallelism": {"tensor": 2}, "engine": engine}
    scenario = build_scenario(parts | {"workload": {"input_tokens": 10, "output_tokens": 10}}, "test")
    with pytest.raises(InputError, match="sliding windows"):
        deployment_of(scenario)


def test_all_ranks_wait_for_the_one_that_loads():
    """A step takes as long as its slowest rank: one that loads."""
    linear = np.zeros((65, len(state.RESOURCES)))
    linear[1:, 0] = 1.0
    cost = StepCost(linear, np.zeros((9, len(state.RESOURCES))), np.zeros(1, state.ATTENTION_PRICE))
    knobs = make_knobs(
        block_size=4, num_gpu_blocks=6, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=20,
        enable_prefix_caching=1, tier_blocks=(8, 0), tier_block_time=(0.125, 0.0),
    )  # fmt: skip
    engine = Fleet([ReplicaSpec(knobs, cost)], ranks=2, shares_text=True)
    ranks, texts = [0, 0, 0, 1], [1, 2, 1, 3]
    engine.submit(
        0, [0.0, 10.0, 20.0, 20.0], [16, 19, 16, 16], [1] * 4, [1] * 4, rank=np.array(ranks),
        segments=(np.arange(4), 1, texts, [16, 19, 16, 16]),
    )  # fmt: skip
    engine.advance()
    assert seconds(engine) == [1.0, 1.0, 1.0 + 3 * 0.125, 1.0 + 3 * 0.125]


def test_the_exported_server_has_the_tier():
    """vLLM's own flags, its backend that loads as is simulated here."""
    scenario = conversations(**SLOW)
    words = vllm_serve(scenario, asdict(deployment_of(scenario).engine))
    assert words[words.index("--kv-offloading-size") + 1] == "1"
    assert words[words.index("--kv-offloading-backend") + 1] == "lmcache"
