"""The engine against queueing theory: with a step whose price does not depend on the batch it is a textbook queue."""

import numpy as np
import pytest

from infersim.engine.compiled.state import ATTENTION_PRICE, RESOURCES
from infersim.engine.fleet import Fleet
from infersim.engine.price import StepCost
from infersim.engine.replica import ReplicaSpec, make_knobs

STEP = 0.01  # seconds of any step


def flat_cost(max_num_seqs: int, seconds: float = STEP) -> StepCost:
    linear = np.zeros((65, len(RESOURCES)))
    linear[1:, 0] = seconds
    return StepCost(linear, np.zeros((max_num_seqs + 1, len(RESOURCES))), np.zeros(1, ATTENTION_PRICE))


def sojourns(arrival, output_tokens, max_num_seqs: int = 1) -> np.ndarray:
    """Seconds in the system of requests with a prompt of one token."""
    knobs = make_knobs(
        block_size=16, num_gpu_blocks=100_000, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=65536
    )
    fleet = Fleet([ReplicaSpec(knobs, flat_cost(max_num_seqs))])
    fleet.submit(0, arrival, 1, output_tokens, output_tokens)
    fleet.advance()
    return fleet.requests["last_token"] - fleet.requests["sent"]


def poisson(rate: float, n: int, seed: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))


def half_width(values: np.ndarray, batches: int = 30) -> float:
    """4 standard errors of the mean by batch means: a correct mean lies outside once in 16,000."""
    means = values[: len(values) // batches * batches].reshape(batches, -1).mean(axis=1)
    return 4 * means.std(ddof=1) / np.sqrt(batches)


@pytest.mark.parametrize("max_concurrency", [8, 64])
def test_the_slowest_server_of_a_closed_loop_sets_its_throughput(max_concurrency):
    """Two servers in turn: steps, of any batch, and the API server, one token after another."""
    tokens, token_time = 50, 2e-3
    knobs = make_knobs(
        block_size=16, num_gpu_blocks=100_000, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=65536,
        max_concurrency=max_concurrency, host_token_time=token_time,
    )  # fmt: skip
    fleet = Fleet([ReplicaSpec(knobs, flat_cost(64))])
    n = 40 * max_concurrency
    fleet.submit(0, np.zeros(n), 1, np.full(n, tokens), np.full(n, tokens))
    fleet.advance()
    throughput = n * tokens / fleet.requests["last_token"].max()
    assert throughput <= min(max_concurrency / STEP, 1 / token_time)
    assert throughput == pytest.approx(min(max_concurrency / STEP, 1 / token_time), rel=0.1)


def test_steps_that_are_wasted_send_nothing():
    """Under asynchronous scheduling a sequence runs once more after its last token, if only the token tells that it was
    the last: what comes of that is thrown away before the API server sees it."""

    def last_token(max_tokens: int) -> tuple[float, int]:
        knobs = make_knobs(
            block_size=16, num_gpu_blocks=100_000, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=65536,
            async_scheduling=True, steps_in_flight=2, host_token_time=1.0,
        )  # fmt: skip
        fleet = Fleet([ReplicaSpec(knobs, flat_cost(64))])
        fleet.submit(0, np.zeros(8), 1, np.full(8, 3), np.full(8, max_tokens))
        fleet.advance()
        return fleet.requests["last_token"].max(), int(fleet.replicas["num_wasted_tokens"].sum())

    (known, none), (unknown, wasted) = last_token(3), last_token(100)
    assert (none, wasted) == (0, 8)
    assert unknown == known


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_and_equal_requests_is_m_d_1(load):
    """Mean wait of M/D/1: rho s / (2 (1 - rho)) (Pollaczek-Khinchine with no variance)."""
    tokens, n = 5, 200_000
    service = tokens * STEP
    got = sojourns(poisson(load / service, n, 1), np.full(n, tokens))[n // 10 :]
    expected = service + load * service / (2 * (1 - load))
    assert abs(got.mean() - expected) < half_width(got) < 0.1 * expected


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_and_geometric_requests_is_m_g_1(load):
    """Pollaczek-Khinchine with geometric output lengths: wait = lambda E[S^2] / (2 (1 - rho))."""
    mean, n = 20, 200_000
    outputs = np.random.default_rng(2).geometric(1 / mean, n)
    rate = load / (mean * STEP)
    got = sojourns(poisson(rate, n, 3), outputs)[n // 10 :]
    second_moment = (2 - 1 / mean) * mean**2 * STEP**2
    expected = mean * STEP + rate * second_moment / (2 * (1 - load))
    assert abs(got.mean() - expected) < half_width(got) < 0.2 * expected


def test_one_slot_and_long_geometric_requests_is_m_m_1():
    """Many short steps per request make a geometric service time exponential: mean sojourn s / (1 - rho), and the
    share of requests that stay longer than x is exp(-x (1 - rho) / s)."""
    mean, n, load = 400, 100_000, 0.5
    outputs = np.random.default_rng(4).geometric(1 / mean, n)
    service = mean * STEP
    got = sojourns(poisson(load / service, n, 5), outputs)[n // 10 :]
    assert abs(got.mean() - service / (1 - load)) < half_width(got)
    for x in (service, 3 * service, 6 * service):
        longer = (got > x).astype("f8")
        assert abs(longer.mean() - np.exp(-x * (1 - load) / service)) < half_width(longer) + 2 / mean


def test_many_slots_and_geometric_requests_is_m_m_k():
    """k slots with a step that costs the same for any batch: Erlang C gives the mean wait.

    Steps run only at the ends of steps, so a request waits up to one step more; steps are 1/400 of a service.
    """
    mean, n, slots, load = 400, 100_000, 4, 0.7
    outputs = np.random.default_rng(6).geometric(1 / mean, n)
    service = mean * STEP
    rate = load * slots / service
    got = sojourns(poisson(rate, n, 7), outputs, slots)[n // 10 :]
    offered = rate * service
    terms = [offered**i / np.prod(np.arange(1, i + 1)) for i in range(slots)]
    last = offered**slots / np.prod(np.arange(1, slots + 1)) / (1 - load)
    wait = last / (sum(terms) + last) * service / (slots * (1 - load))
    assert abs(got.mean() - (service + wait)) < half_width(got) + 2 * STEP


def test_infinite_slots_never_wait():
    """M/G/infinity: everybody's sojourn is its own tokens' time, and the step it waits to join."""
    n = 5_000
    outputs = np.random.default_rng(8).integers(1, 40, n)
    got = sojourns(poisson(50, n, 9), outputs, max_num_seqs=1024)
    assert np.all(got >= outputs * STEP - 1e-9)
    assert np.all(got <= (outputs + 1) * STEP + 1e-9)
