"""What a cluster does to a replica from outside: whatever is aborted, reserved, held or lost, nothing leaks."""

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import COLUMNS, Scenario, scenarios

from infersim.engine.compiled import interface, state
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs

quick = settings(max_examples=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))


def fleet_of(scenario: Scenario, replicas: int = 1) -> Fleet:
    return Fleet([ReplicaSpec(make_knobs(**scenario.knobs), scenario.cost)] * replicas)


def one_tick_fleet(num_gpu_blocks: int = 9, replicas: int = 1) -> Fleet:
    """Every step takes 1 s; blocks of 4 tokens."""
    linear, head = np.zeros((65, len(state.RESOURCES))), np.zeros((9, len(state.RESOURCES)))
    linear[1:, 0] = 1.0
    cost = StepCost(linear, head, np.zeros(1, state.ATTENTION_PRICE))
    knobs = make_knobs(
        block_size=4, num_gpu_blocks=num_gpu_blocks, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32
    )
    return Fleet([ReplicaSpec(knobs, cost)] * replicas)


def assert_nothing_leaks(fleet: Fleet) -> None:
    """All blocks are free, every request has ended, and Little's law holds with the aborted requests."""
    r = fleet.requests
    assert (r["status"] >= state.COMPLETED).all()
    assert (r["num_blocks"] == 0).all()
    assert (fleet.schedulers["free_blocks"] == fleet.knobs["num_gpu_blocks"] - 1).all()
    for scheduler, nodes in zip(fleet.schedulers, fleet.nodes, strict=True):  # nobody locks a node of the radix tree
        used = nodes[1 : 1 + scheduler["num_nodes"]]
        assert not used["locks"].any()
        free, node = 0, scheduler["free_node"]
        while node > 0:
            free, node = free + nodes["num_blocks"][node], nodes["next"][node]
        assert used["num_blocks"].sum() - free == scheduler["evictable_blocks"]
    assert (fleet.replicas["outstanding"] == 0).all()
    assert (fleet.replicas["num_reserved"] == 0).all()
    assert fleet.replicas["num_finished"].sum() == len(r)
    done = r["status"] == state.COMPLETED
    sojourns = (r["last_token"] - r["sent"])[done].sum()
    sojourns += fleet.aborted_time + fleet.replicas["given_up_time"].sum()
    assert fleet.replicas["outstanding_time"].sum() == pytest.approx(sojourns, rel=1e-9, abs=1e-9)


@quick
@given(scenarios(exact=True, may_speculate=False), st.data())
def test_aborted_requests_leave_nothing_behind(scenario, data):
    """Requests aborted at random moments, waiting, running or with steps in flight."""
    fleet = fleet_of(scenario)
    fleet.submit(0, *[[r[column] for r in scenario.requests] for column in COLUMNS])
    rows = st.integers(0, len(scenario.requests) - 1)
    for time in sorted(data.draw(st.lists(st.floats(0, 0.2), max_size=8))):
        fleet.advance(time)
        row = data.draw(rows)
        before = fleet.requests["status"][row]
        assert fleet.abort(row, time) == (fleet.requests["status"][row] == state.ABORTED != before)
    fleet.advance()
    assert_nothing_leaks(fleet)


@quick
@given(scenarios(exact=True, may_speculate=False), st.floats(0, 0.2))
def test_a_dead_replica_forgets_everything_and_serves_again(scenario, time):
    """After a failure the survivors of the other replica are untouched, and the dead one takes new requests."""
    if scenario.knobs.get("beam_turnover"):
        scenario.knobs["beam_turnover"] = 0.0  # which beams survive depends on the request's name
    fleet, alone = fleet_of(scenario, replicas=2), fleet_of(scenario)
    columns = [[r[column] for r in scenario.requests] for column in COLUMNS]
    fleet.submit(0, *columns)
    fleet.submit(1, *columns)
    alone.submit(0, *columns)
    fleet.advance(time)
    lost = fleet.fail(0, time)
    ended = fleet.requests[lost]["status"] == state.COMPLETED
    assert ((fleet.requests[lost]["status"] == state.ABORTED) | ended).all()
    assert (fleet.requests[lost][ended]["last_token"] > time).all()  # the API server had yet to send it
    again = max(time, columns[0][-1]) + 1
    fleet.submit(0, [again + arrival for arrival in columns[0]], *columns[1:])
    fleet.advance()
    alone.advance()
    assert_nothing_leaks(fleet)
    n = len(columns[0])
    assert np.array_equal(fleet.requests["last_token"][n : 2 * n], alone.requests["last_token"])
    assert np.array_equal(fleet.requests["num_output_tokens"][2 * n :], alone.requests["num_output_tokens"])


def test_kv_from_elsewhere_needs_one_step_per_token():
    """A prompt of 8 tokens whose KV has arrived: its last token is computed again, as in vLLM."""
    fleet = one_tick_fleet()
    row = fleet.add(8, 3, 3, 1)
    assert fleet.reserve(row, 0, 0.0) == 2
    assert fleet.schedulers["free_blocks"][0] == 8 - 2
    fleet.send(row, 0, 5.0)
    fleet.advance()
    assert fleet.requests["first_token"][row] == 6.0
    assert fleet.requests["last_token"][row] == 8.0
    assert fleet.replicas["num_scheduled_tokens"][0] == 3
    assert_nothing_leaks(fleet)


def test_reservation_waits_for_room_and_blocks_are_held_until_released():
    """With 4 usable blocks a held prompt of 3 blocks leaves no room for another until it is released."""
    fleet = one_tick_fleet(num_gpu_blocks=9)
    first, second = (fleet.add(20, 1, 1, 1) for _ in range(2))
    fleet.requests["hold"][first] = 1
    fleet.send(first, 0, 0.0)
    fleet.advance(2.0)
    assert fleet.requests["status"][first] == state.COMPLETED
    assert fleet.schedulers["free_blocks"][0] == 8 - 5
    assert fleet.reserve(second, 0, 2.0) == -1
    fleet.send(second, 0, 2.0)
    fleet.advance(4.0)
    assert fleet.requests["status"][second] == state.WAITING  # not stuck: something is held
    fleet.release(first, 4.5)
    fleet.advance()
    assert fleet.requests["last_token"][second] == 5.5
    assert_nothing_leaks(fleet)


def test_many_replicas_take_turns_in_order_of_time():
    """100 replicas with one request each: events come in order of time, one for each."""
    fleet = one_tick_fleet(replicas=100)
    arrivals = np.random.default_rng(1).random(100) * 10
    for replica, arrival in enumerate(arrivals):
        fleet.submit(replica, arrival, 4, 1, 1)
    times = []
    while len(events := fleet.advance(events=interface.FINISHED)):
        times += events["time"].tolist()
    assert times == pytest.approx(np.sort(arrivals) + 1)
