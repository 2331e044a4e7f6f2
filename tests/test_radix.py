"""The radix tree on cases small enough to count by hand, and what a real trace repeats. Every step takes 1 s."""

from pathlib import Path

import numpy as np
import pytest
from shared import SHARED, needs_shared

from infersim.config.engine import Engine
from infersim.config.errors import InputError
from infersim.config.hardware import load_hardware
from infersim.config.parallelism import Parallelism
from infersim.config.precision import Precision
from infersim.config.scenario import build_scenario
from infersim.config.workload import Workload
from infersim.deployment import deploy, resolve
from infersim.engine.compiled import state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs
from infersim.run import run
from infersim.workload.build import build_requests
from infersim.workload.requests import own_text

MOONCAKE = SHARED / "data" / "traces" / "mooncake_conversation.jsonl.gz"


def fleet(usable: int, step_time: float = 1.0, replicas: int = 1, **knobs) -> Fleet:
    """usable: blocks, of one token unless told otherwise."""
    values = {"block_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **knobs}
    linear = np.zeros((values["max_num_batched_tokens"] + 1, len(state.RESOURCES)))
    linear[1:, 0] = step_time
    head = np.zeros((values["max_num_seqs"] + 1, len(state.RESOURCES)))
    cost = StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE))
    record = make_knobs(num_gpu_blocks=usable + 1, radix=1, order="prefills-only", **values)
    return Fleet([ReplicaSpec(record, cost)] * replicas, shares_text=True)


def submit(fleet: Fleet, arrival, prompts, outputs, pieces, names=None) -> None:
    """pieces: what each prompt begins with, as (name, tokens)."""
    flat = [piece for row in pieces for piece in row]
    counts = np.array([len(row) for row in pieces])
    segments = (np.cumsum(counts) - counts, counts, [name for name, _ in flat], [length for _, length in flat])
    fleet.submit(0, arrival, prompts, outputs, outputs, names=names, segments=segments)


def cached(fleet: Fleet, *columns, **more) -> list[int]:
    """Tokens that each request found."""
    submit(fleet, *columns, **more)
    fleet.advance()
    assert (fleet.requests["status"] == state.COMPLETED).all()
    return fleet.requests["num_cached_tokens"].tolist()


def test_every_token_of_common_text_is_found():
    assert cached(fleet(100), [0, 10], [12, 12], [1, 1], [[(1, 10)], [(1, 10)]]) == [0, 10]


def test_pages_are_found_whole():
    """10 common tokens are two pages of 4 and a rest."""
    assert cached(fleet(25, block_size=4), [0, 10], [12, 12], [1, 1], [[(1, 10)], [(1, 10)]]) == [0, 8]


def test_at_least_one_token_is_computed():
    assert cached(fleet(100), [0, 10], [8, 8], [1, 1], [[(1, 8)], [(1, 8)]]) == [0, 7]


def test_what_was_generated_is_found_by_the_next_turn():
    """Prompt of 6 and 7 generated tokens, of which the last is never computed."""
    assert cached(fleet(100), [0, 20], [6, 20], [7, 1], [[], [(-1, 13)]], names=[-1, -2]) == [0, 12]


def test_text_is_found_from_the_next_step_on():
    """Not by a request of the same step; the copy that two have computed side by side is kept once."""
    f = fleet(100)
    assert cached(f, [0, 0, 0.5], [12, 12, 12], [1, 1, 1], [[(1, 12)]] * 3) == [0, 0, 11]
    assert f.schedulers["evictable_blocks"][0] == 12


def test_chunks_are_found_before_their_prompt_has_ended():
    """A prompt of 12 in chunks of 4: at 4 s, when its last chunk has not begun, 8 tokens of it are in the tree."""
    f = fleet(100, max_num_batched_tokens=4)
    submit(f, [0], [12], [1], [[(1, 12)]])
    row = f.add(12, 1, 1, 1, names=[-9], segments=(0, 1, [1], [12]))
    found = []
    for time in (0.5, 1.5, 2.5, 3.5):
        f.advance(time)
        found.append(int(f.match(row)[0]))
    assert found == [0, 4, 8, 11]


def test_the_least_recently_used_leaf_goes_first_and_parents_become_leaves():
    """Room for 24 tokens. Two prompts of 4 common and 4 own tokens, then one of 8; the next needs 6 and takes the leaf
    of the first (4) and of the second (4), not the common root that both have used, nor the third."""
    prompts = [[(1, 4), (2, 4)], [(1, 4), (3, 4)], [(4, 8)], [(5, 10)]]
    probes = [[(1, 4), (2, 4)], [(4, 8)]]
    f = fleet(24, max_model_len=24)
    submit(f, 10.0 * np.arange(4), [8, 8, 8, 10], [1] * 4, prompts)
    f.advance(25)
    assert sizes(f) == [4, 4, 4, 8]  # leaves of the first two, their root, the third: 4 blocks are empty
    f.advance(35)
    assert sizes(f) == [4, 8, 10]
    rows = [f.add(9, 1, 1, 1, names=[-9], segments=(0, len(p), *map(list, zip(*p, strict=True)))) for p in probes]
    assert [int(f.match(row)[0]) for row in rows] == [4, 8]


def sizes(fleet: Fleet) -> list[int]:
    """Nodes that nobody holds, least recently used first."""
    nodes, node, found = fleet.nodes[0], int(fleet.nodes["next"][0, 0]), []
    while node > 0:
        found.append(int(nodes["num_blocks"][node]))
        node = int(nodes["next"][node])
    return found


def test_what_somebody_holds_is_not_evicted():
    """A request of 10 tokens runs on while others, one after another, fill the other 20 tokens of memory twice."""
    prompts = [[(1, 10)], [(2, 9)], [(3, 9)], [(4, 9)], [(1, 10)]]
    f = fleet(50, max_model_len=50)
    assert cached(f, [0, 2, 4, 6, 30], [10, 9, 9, 9, 12], [20, 1, 1, 1, 1], prompts)[4] == 10


def test_retracted_output_is_not_found_again():
    """Memory for 20 tokens: two requests of 6 and up to 10 more. The younger is retracted, its prompt was in the tree
    and its output is not: when it comes back it computes at least what it had generated."""
    f = fleet(20, max_model_len=20, retracts=1)
    assert cached(f, [0, 0], [6, 6], [10, 10], [[], []]) == [0, 0]
    retracted = f.requests[f.requests["num_preemptions"] > 0]
    assert len(retracted) == 1
    whole = 12 + 2 * 9  # tokens to compute if nobody is retracted
    assert f.replicas["num_scheduled_tokens"][0] > whole
    assert f.schedulers["free_blocks"][0] == 20


def test_longest_prefix_first():
    """One at a time: after the first request, of those that wait the one goes first that shares most with it."""
    prompts = [[(1, 40)], [(2, 20)], [(1, 10)], [(1, 40)]]
    columns = [0, 0.1, 0.2, 0.3], [40] * 4, [1] * 4, prompts
    order = {}
    for policy in ("fcfs", "lpm"):
        f = fleet(500, max_num_seqs=1, policy=policy)
        cached(f, *columns)
        order[policy] = np.argsort(f.requests["scheduled"]).tolist()
    assert order == {"fcfs": [0, 1, 2, 3], "lpm": [0, 3, 2, 1]}


@pytest.mark.parametrize(("common", "scheduled", "found"), [(31, [0, 0, 1], 0), (32, [0, 1, 0], 32)])
def test_one_of_those_that_begin_alike_goes_first(common, scheduled, found):
    """Of three that come at once, two with 32 common tokens, two fit a step: the second's text is computed first."""
    f = fleet(500, policy="lpm", max_num_seqs=2, max_num_batched_tokens=100)
    assert cached(f, [0, 0, 0], [40] * 3, [1] * 3, [[(1, common)], [(1, common)], []])[1] == found
    assert f.requests["scheduled"].tolist() == scheduled


@pytest.mark.parametrize("waiting", [128, 129])
def test_long_queues_are_not_sorted(waiting):
    """The last of 128 that wait has the longest prefix and goes first; of 129 it waits for its turn once."""
    prompts = [[(1, 40)], *([(100 + i, 20)] for i in range(waiting - 1)), [(1, 40)]]
    n = len(prompts)
    f = fleet(100_000, policy="lpm", max_num_seqs=1)
    cached(f, [0.0, *[0.5] * (n - 1)], [41] * n, [1] * n, prompts)
    place = int(np.argsort(np.argsort(f.requests["scheduled"]))[-1])
    assert place == (1 if waiting == 128 else 2)


def test_a_dead_replica_forgets_its_tree():
    f = fleet(100)
    submit(f, [0], [12], [1], [[(1, 12)]])
    f.advance()
    row = f.add(12, 1, 1, 1, names=[-9], segments=(0, 1, [1], [12]))
    assert f.match(row)[0] == 11
    f.fail(0, 5.0)
    assert f.match(row)[0] == 0
    assert f.schedulers["evictable_blocks"][0] == 0


@pytest.mark.parametrize("usable", [100, 40_000])
def test_a_dead_replica_leaves_no_bucket_behind(usable):
    """Of a large tree fewer rows than it has are buckets."""
    one = fleet(usable)
    submit(one, [0] * 30, [12] * 30, [1] * 30, [[(name, 10)] for name in range(30)])
    one.advance()
    assert one.nodes["bucket"].any()
    one.clear(0)
    assert not one.nodes["bucket"].any()


def test_kv_from_elsewhere_and_kv_that_is_held():
    """A prefill replica keeps a prompt locked until it is released; a decode replica reserves what its tree lacks."""
    f = fleet(40, max_model_len=40, replicas=2)
    segments = (0, 1, [1], [20])
    rows = [f.add(20, 1, 1, 1, names=[-i], segments=segments) for i in (7, 8)]
    f.requests["hold"][rows[0]] = 1
    f.send(rows[0], 0, 0.0)
    f.advance(3)
    assert f.schedulers["free_blocks"].tolist() == [20, 40]
    f.release(rows[0], 3)
    assert f.schedulers["free_blocks"].tolist() == [40, 40]
    assert f.reserve(rows[1], 0, 3) == 1  # 19 of 20 tokens are there
    f.send(rows[1], 0, 3)
    f.advance()
    assert f.requests["last_token"][rows[1]] == 4
    assert f.schedulers["free_blocks"].tolist() == [40, 40]
    assert (f.requests["num_blocks"] == 0).all()


def test_kv_from_elsewhere_stays_first_in_longest_prefix_order():
    """A prompt whose KV has come holds none of the tree; another that the tree has wholly does not overtake it."""
    f = fleet(60, max_model_len=20, policy="lpm", max_num_seqs=1)
    segments = (0, 1, [1], [15])
    submit(f, [0], [15], [1], [[(1, 15)]])
    f.advance(5)
    came, similar = f.add(10, 3, 3, 1), f.add(15, 1, 1, 1, names=[-9], segments=segments)
    assert f.reserve(came, 0, 5) == 10
    for row in (similar, came):
        f.send(row, 0, 5)
    f.advance()
    assert f.requests["last_token"][[came, similar]].tolist() == [8, 9]
    assert f.schedulers["free_blocks"][0] == 60
    assert (f.requests["num_blocks"] == 0).all()


def test_windows_and_other_policies_are_refused():
    hardware = load_hardware("h100-sxm")
    with pytest.raises(InputError, match="lpm sorts by what a radix tree has"):
        resolve(Engine(scheduling_policy="lpm"), hardware, 8192)
    assert resolve(Engine(scheduling_policy="lpm", prefix_cache="radix"), hardware, 8192).scheduling_policy == "lpm"
    with pytest.raises(InputError, match="lpm sorts by what the prefix cache has, which is off"):
        resolve(Engine(preset="sglang-0.5", scheduling_policy="lpm", enable_prefix_caching=False), hardware, 8192)


def test_models_with_windows_find_text_by_blocks():
    parts = ("gpt-oss-20b", load_hardware("h100-sxm"), Precision(), Parallelism())
    engine = deploy(*parts, Engine(preset="sglang-0.5")).engine
    assert engine.prefix_cache == "blocks"
    assert "not modelled" in engine.origin["prefix_cache"]
    with pytest.raises(InputError, match="must be blocks"):
        deploy(*parts, Engine(preset="sglang-0.5", prefix_cache="radix"))


CHAT = {"request_rate": 6, "num_requests": 300, "input_tokens": 200, "output_tokens": 50, "turns": 5, "think_time": 0.5}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"engine": {"preset": "sglang-0.5", "scheduling_policy": "lpm"}},
        {"engine": {"preset": "sglang-0.5", "block_size": 16}},
        {"engine": {"preset": "sglang-0.5", "num_gpu_blocks_override": 6000, "max_model_len": 4096}},
        {"parallelism": {"attention_data": 2}},
        {"cluster": {"replicas": 2, "router": {"policy": "kv-aware"}}},
        {
            "cluster": {
                "prefill": {"replicas": 1},
                "decode": {"replicas": 1},
                "transfer": {"bandwidth": "50 GB/s", "latency": "1 ms"},
            }
        },
    ],
    ids=["one", "lpm", "pages", "small", "ranks", "kv-aware", "pools"],
)
def test_conversations_find_what_was_said(more):
    """Each run's books are checked; each of five turns finds what came before unless memory is short."""
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": {"preset": "sglang-0.5"}, "workload": CHAT}
    (result,) = run(build_scenario(parts | more, "chat"))
    requests = result.requests
    share = requests["num_cached_tokens"].sum() / requests["prompt_tokens"].sum()
    assert share > (0.01 if "num_gpu_blocks_override" in more.get("engine", {}) else 0.3 if more else 0.6)


def never_forgotten(requests) -> int:
    """Tokens found if each prompt comes when the ones before have ended, in a memory without end."""
    tree: dict = {}
    found = 0
    offsets = requests.segment_offsets
    for i, tokens in enumerate(requests.prompt_tokens.tolist()):
        node, common, same = tree, 0, True
        for k in range(offsets[i], offsets[i + 1]):
            name, length = int(requests.segment_ids[k]), int(requests.segment_lengths[k])
            known, below = node.get(name, (0, {}))
            common += min(known, length) if same else 0
            same = same and known == length
            node[name] = (max(known, length), below)
            node = below
        found += min(common, tokens - 1)
    return found


@needs_shared
def test_the_tree_finds_what_the_trace_repeats():
    """Token for token, on a device so fast that requests come one at a time, with room for everything."""
    requests = build_requests(Workload(trace=str(MOONCAKE)), 0, Path())
    blocks = int(requests.prompt_tokens.sum() + requests.output_tokens.sum())
    engine = fleet(blocks, step_time=1e-6, max_num_seqs=256, max_num_batched_tokens=131072, max_model_len=131072)
    outputs = requests.output_tokens
    engine.submit(
        0, requests.arrival, requests.prompt_tokens, outputs, outputs, names=own_text(requests.request_id),
        segments=requests.segments,
    )  # fmt: skip
    engine.advance()
    assert engine.requests["num_cached_tokens"].sum() == pytest.approx(never_forgotten(requests), rel=2e-3)


@pytest.mark.parametrize("more", [{"preemption_mode": "swap"}, {"kv_offloading_size": "10 GB"}])
def test_copies_of_blocks_beside_a_tree_are_refused(more):
    with pytest.raises(InputError, match="not modelled beside a radix tree"):
        resolve(Engine(preset="sglang-0.5", **more), load_hardware("h100-sxm"), 8192)
    assert resolve(Engine(preset="sglang-0.5", prefix_cache="blocks", **more), load_hardware("h100-sxm"), 8192)
