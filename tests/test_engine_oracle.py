"""The compiled engine and the plain oracle decide alike and agree on every time."""

import hypothesis
import numpy as np
import oracle
import oracle_price
import pytest
from hypothesis import given, settings
from strategies import COLUMNS, InTurn, Scenario, scenarios

from infersim.engine.compiled import histogram, interface, state
from infersim.engine.fleet import Fleet
from infersim.engine.replica import ReplicaSpec, make_knobs


def fleet_of(scenario: Scenario, replicas: int = 1, keep_gaps: bool = False) -> Fleet:
    return Fleet(
        [replica_of(scenario)] * replicas,
        keep_gaps=keep_gaps,
        shares_text=shares_text(scenario),
        acceptance=None if scenario.draft is None else InTurn(scenario.accepted),
    )


def replica_of(scenario: Scenario) -> ReplicaSpec:
    ours = {name: value for name, value in scenario.knobs.items() if name not in ("drafts", "draft_passes", "depth")}
    drafts = np.array(scenario.knobs.get("drafts", ()), "i4")
    return ReplicaSpec(make_knobs(**ours), scenario.cost, scenario.draft, drafts)


def expected_of(scenario: Scenario) -> oracle.Outcome:
    price = oracle_price.price_from_step_cost(scenario.cost, scenario.draft)
    return oracle.simulate(scenario.requests, scenario.knobs, price, scenario.accept, scenario.jumps, scenario.parent)


def shares_text(scenario: Scenario) -> bool:
    return "segments" in scenario.requests[0]


def submit(fleet: Fleet, requests: list[dict], replica: int = 0) -> None:
    """With segments as columns, if the requests have any."""
    shared = {}
    if requests and "segments" in requests[0]:
        pieces = [piece for r in requests for piece in r["segments"]]
        shared["names"] = [r["name"] for r in requests]
        shared["segments"] = (
            np.cumsum([0, *(len(r["segments"]) for r in requests[:-1])]),
            [len(r["segments"]) for r in requests],
            [name for name, _ in pieces],
            [length for _, length in pieces],
        )
    if requests and "stop_tokens" in requests[0]:
        shared["stop_tokens"] = [r["stop_tokens"] for r in requests]
    columns = [[r[column] for r in requests] for column in COLUMNS]
    fleet.submit(replica, *columns, priority=[r["priority"] for r in requests], **shared)
    if requests and "stored_tokens" in requests[0]:
        fleet.requests["stored_tokens"][-len(requests) :] = [r["stored_tokens"] for r in requests]


def run(scenario: Scenario) -> Fleet:
    fleet = fleet_of(scenario)
    submit(fleet, scenario.requests)
    fleet.advance()
    return fleet


def tree_of(fleet: Fleet) -> list[int]:
    """Blocks of the radix tree's nodes that nobody holds, least recently used first."""
    nodes, node, sizes = fleet.nodes[0], int(fleet.nodes[0]["next"][0]), []
    while node > 0:
        sizes.append(int(nodes["num_blocks"][node]))
        node = int(nodes["next"][node])
    return sizes


def assert_agree(fleet: Fleet, expected: oracle.Outcome, exact: bool) -> None:
    """Status, tokens and preemptions equal; times equal (exact) or to 1e-9."""
    tolerance = 0 if exact else 1e-9
    codes = {oracle.COMPLETED: state.COMPLETED, oracle.REJECTED: state.REJECTED}
    reasons = {
        "": 0,
        oracle.PROMPT_TOO_LONG: state.PROMPT_TOO_LONG,
        oracle.OVER_MAX_MODEL_LEN: state.OVER_MAX_MODEL_LEN,
        oracle.GROUP_TOO_LARGE: state.GROUP_TOO_LARGE,
        oracle.SWAP_SPACE_FULL: state.SWAP_SPACE_FULL,
    }
    gaps = []
    for got, want in zip(fleet.requests, expected.records, strict=True):
        assert got["status"] == codes[want.status]
        assert got["reason"] == reasons[want.reason]
        assert got["sent"] == pytest.approx(want.sent, rel=tolerance, abs=tolerance)
        assert got["num_output_tokens"] == want.outputs
        assert got["num_preemptions"] == want.num_preemptions
        if want.status == oracle.COMPLETED:
            assert got["num_cached_tokens"] == want.num_cached_tokens
            assert (got["num_cpu_cached_tokens"], got["num_disk_cached_tokens"]) == want.num_tier_tokens
            assert got["num_stored_cached_tokens"] == want.num_stored_tokens
            for name in ("scheduled", "first_token", "last_token"):
                assert got[name] == pytest.approx(getattr(want, name), rel=tolerance, abs=tolerance)
            assert got["num_accepted_tokens"] == want.num_accepted
        gaps += list(np.diff(want.chunk_times))
    if fleet.num_sequences > 1:
        assert_groups_agree(fleet, expected, tolerance)
    replica = fleet.replicas[0]
    assert replica["num_steps"] == expected.num_steps
    assert replica["num_preemptions"] == expected.num_preemptions
    assert replica["num_scheduled_tokens"] == sum(n for _, step in expected.steps for _, n in step)
    assert replica["outstanding_time"] == pytest.approx(expected.in_system_time, rel=1e-9, abs=1e-12)
    if expected.num_preemptions == 0:
        waits = sum(r.scheduled - r.visible for r in expected.records if r.status == oracle.COMPLETED)
        assert replica["waiting_time"] == pytest.approx(waits, rel=1e-9, abs=1e-12)
    assert fleet.schedulers["free_blocks"][0] == fleet.knobs["num_gpu_blocks"][0] - 1
    assert not any(
        fleet.schedulers[name][0]
        for name in ("held_tokens", "final_tokens", "asked_blocks", "num_pieces", "num_shared")
    )
    assert tree_of(fleet) == expected.tree
    assert fleet.schedulers["evictable_blocks"][0] == sum(expected.tree)
    assert fleet.schedulers["free_cpu_blocks"][0] == fleet.knobs["num_cpu_blocks"][0]
    assert replica["load_time"] == pytest.approx(expected.load_time, rel=1e-9)
    assert_tiers(fleet, expected)
    assert fleet.time_by_resource.sum() == pytest.approx(replica["busy_time"], rel=1e-9)
    assert fleet.histogram.sum() == len(gaps)
    if exact:  # a gap near a bin's edge may fall on either side if it was rounded
        bins = (np.array(gaps).view("i8") >> histogram.HISTOGRAM_SHIFT) - histogram.HISTOGRAM_FIRST
        assert np.array_equal(np.bincount(bins.clip(0), minlength=histogram.HISTOGRAM_BINS), fleet.histogram)


def assert_groups_agree(fleet: Fleet, expected: oracle.Outcome, tolerance: float) -> None:
    """When each sequence ended, blocks held and saved over time, copies; and nothing is left of any tree."""
    for got, want in zip(fleet.sequences_of(np.arange(fleet.num_requests)), expected.records, strict=True):
        for s, sequence in enumerate(got):
            assert sequence["last_token"] == pytest.approx(want.ends.get(s, -1.0), rel=tolerance, abs=tolerance)
    replica, scheduler = fleet.replicas[0], fleet.schedulers[0]
    assert replica["block_time"] == pytest.approx(expected.block_time, rel=1e-9, abs=1e-12)
    assert replica["shared_time"] == pytest.approx(expected.saved_time, rel=1e-9, abs=1e-12)
    assert replica["num_block_copies"] == expected.block_copies
    assert not any(scheduler[name] for name in ("num_forks", "num_given_up"))
    free, node = set(), scheduler["free_tree_block"]
    while node:
        free.add(int(node))
        node = fleet.blocks[0, node]["next"]
    assert len(free) == scheduler["num_tree_blocks"]
    assert not fleet.blocks[0, : len(free) + 1]["references"].any()


def assert_tiers(fleet: Fleet, expected: oracle.Outcome) -> None:
    """The tiers hold as many texts, each once, and the ring of each goes through all of them."""
    blocks, sizes = fleet.blocks[0], fleet.knobs["tier_blocks"][0].tolist()
    ring = int(fleet.knobs["num_gpu_blocks"][0])
    for size, held in zip(sizes, expected.tiers, strict=True):
        if size == 0:
            assert held == 0
            continue
        slots = [int(blocks["next"][ring])]
        while slots[-1] != ring and len(slots) <= held:
            slots.append(int(blocks["next"][slots[-1]]))
        assert sorted(slots) == list(range(ring, ring + held + 1))
        assert len(set(blocks["hash"][ring + 1 : ring + held + 1].tolist()) - {0}) == held
        ring += 1 + size


@settings(max_examples=400, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(scenarios(exact=True))
def test_decides_as_the_oracle(scenario):
    """Times that floating point adds without rounding: ties are frequent, and every decision must be the same."""
    expected = expected_of(scenario)
    assert_agree(run(scenario), expected, exact=True)


@settings(max_examples=300, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(scenarios(exact=True, forks=True))
def test_groups_decide_as_the_oracle(scenario):
    """Several sequences of each request."""
    expected = expected_of(scenario)
    assert_agree(run(scenario), expected, exact=True)


@settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(scenarios(exact=False))
def test_times_agree_to_1e_9(scenario):
    """Arbitrary prices."""
    expected = expected_of(scenario)
    assert_agree(run(scenario), expected, exact=False)


@settings(max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(scenarios(exact=True), hypothesis.strategies.data())
def test_where_it_is_stopped_changes_nothing(scenario, data):
    """Stops at random moments and at random events, and requests submitted as late as allowed: identical records."""
    whole = run(scenario)
    end = float(whole.replicas["now"][0])
    stops = sorted(data.draw(hypothesis.strategies.lists(hypothesis.strategies.floats(0, end), max_size=12)))
    mask = data.draw(hypothesis.strategies.integers(0, 7))
    fleet = fleet_of(scenario)
    left = list(scenario.requests)
    for stop in [*stops, np.inf]:
        submit(fleet, [r for r in left if r["arrival"] < stop])
        left = [r for r in left if r["arrival"] >= stop]
        while len(fleet.advance(stop, mask)):
            pass
    for name in set(state.REQUEST.names) - {"next", "prev"}:  # links of queues that are empty by now
        assert np.array_equal(fleet.requests[name], whole.requests[name]), name
    assert np.array_equal(fleet.histogram, whole.histogram)
    for name in ("num_steps", "busy_time", "outstanding_time", "now", "peak_blocks"):
        assert fleet.replicas[name][0] == whole.replicas[name][0]


@settings(max_examples=50, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(*2 * [scenarios(exact=True, may_speculate=False, forks=False)])
def test_replicas_do_not_disturb_each_other(one, other):
    """Two replicas of a fleet run as each would alone, one after another or in turns."""
    for mask in (0, interface.FINISHED):
        specs = [replica_of(s) for s in (one, other)]
        fleet = Fleet(specs, shares_text=shares_text(one) or shares_text(other))
        submit(fleet, one.requests, 0)
        submit(fleet, other.requests, 1)
        while len(fleet.advance(events=mask)):
            pass
        for replica, scenario in enumerate((one, other)):
            alone = run(scenario).requests
            together = fleet.requests[fleet.requests["replica"] == replica]
            for name in ("status", "sent", "scheduled", "first_token", "last_token", "num_preemptions"):
                assert np.array_equal(together[name], alone[name])


@settings(max_examples=50, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(scenarios(exact=True))
def test_every_event_comes_once_and_in_order(scenario):
    """One event for each request's first token, end or rejection, in order of time."""
    fleet = fleet_of(scenario, replicas=2)
    for replica in range(2):
        submit(fleet, scenario.requests, replica)
    seen = []
    mask = interface.PREFILL_DONE | interface.FINISHED | interface.TURNED_AWAY
    while len(events := fleet.advance(events=mask)):
        seen += events.tolist()
    times = [event[0] for event in seen]
    assert times == sorted(times)
    requests = fleet.requests
    done, rejected = (int((requests["status"] == status).sum()) for status in (state.COMPLETED, state.REJECTED))
    given_up = int(np.isin(requests["reason"], (state.GROUP_TOO_LARGE, state.SWAP_SPACE_FULL)).sum())
    assert len(seen) == 2 * done + rejected + given_up  # these had begun


@settings(max_examples=30, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@given(scenarios(exact=True))
def test_kept_gaps_are_the_token_times(scenario):
    """With keep_gaps every gap is kept, in order of tokens, to a float32's precision."""
    fleet = fleet_of(scenario, keep_gaps=True)
    submit(fleet, scenario.requests)
    fleet.advance()
    expected = expected_of(scenario)
    for q, want in enumerate(expected.records):
        start = fleet.gap_offset[q]
        gaps = np.diff(want.chunk_times)  # drafts come with another token
        assert np.allclose(fleet.gaps[start : start + len(gaps)], gaps, rtol=1e-6)
