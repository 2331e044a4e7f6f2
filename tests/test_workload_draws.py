"""Arrivals and lengths by a rule, against closed forms and vLLM's definitions."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.workload import Workload
from infersim.workload.arrivals import warped
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests, resolve_max_tokens

LENGTHS = {"input_tokens": 100, "output_tokens": 10}


def requests(seed: int = 0, **keys) -> Requests:
    return build_requests(Workload.validate(LENGTHS | keys, "w.yaml"), seed, Path())


def gaps(r: Requests) -> np.ndarray:
    return np.diff(r.arrival, prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_cv_one_over_root_burstiness(burstiness):
    g = gaps(requests(request_rate=10, burstiness=burstiness, num_requests=200_000))
    assert g.std() / g.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.02)


def test_burstiness_one_is_poisson():
    """Counts per window have a variance equal to their mean, and a gap exceeds its mean with probability 1/e."""
    r = requests(request_rate=10, num_requests=200_000)
    counts = np.bincount(r.arrival.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.05)
    assert np.mean(gaps(r) > 0.1) == pytest.approx(math.exp(-1), abs=0.005)


@pytest.mark.parametrize("burstiness", [0.1, 1.0, "inf"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_request_arrives_at_n_over_rate_exactly(burstiness, seed):
    r = requests(seed, request_rate=7, burstiness=burstiness, num_requests=1001)
    assert r.arrival[-1] == 1001 / 7
    assert np.all(np.diff(r.arrival) >= 0)
    assert r.arrival[0] > 0


def test_infinite_burstiness_is_a_constant_gap():
    assert gaps(requests(request_rate=4, burstiness="inf", num_requests=100)) == pytest.approx(0.25)


def test_infinite_rate_is_all_at_once():
    assert not requests(num_requests=50).arrival.any()


def test_linear_ramp_follows_vllm_per_request_rate():
    """Request i comes 1/rate_i after the one before, with rate_i = r0 + (r1 - r0) i / (N - 1)."""
    ramp = {"strategy": "linear", "start_rps": 2, "end_rps": 10}
    g = gaps(requests(ramp_up=ramp, burstiness="inf", num_requests=5))
    assert 1 / g == pytest.approx([2, 4, 6, 8, 10])


def test_exponential_ramp_follows_vllm_per_request_rate():
    ramp = {"strategy": "exponential", "start_rps": 1, "end_rps": 16}
    g = gaps(requests(ramp_up=ramp, burstiness="inf", num_requests=5))
    assert 1 / g == pytest.approx([1, 2, 4, 8, 16])


def test_a_random_ramp_takes_as_long_as_the_sum_of_its_mean_gaps():
    ramp = {"strategy": "linear", "start_rps": 10, "end_rps": 1000}
    means = 1 / np.linspace(10, 1000, 200_000)
    sigma = math.sqrt(np.sum(means**2))
    assert requests(ramp_up=ramp, num_requests=200_000).arrival[-1] == pytest.approx(np.sum(means), abs=4 * sigma)


def test_random_range_is_vllms():
    """Every whole number in [floor(L (1 - r)), ceil(L (1 + r))] and no other, evenly."""
    r = requests(input_tokens={"mean": 10, "range_ratio": 0.25}, num_requests=100_000)
    values, counts = np.unique(r.prompt_tokens, return_counts=True)
    assert values.tolist() == list(range(7, 14))
    assert counts / 100_000 == pytest.approx(1 / 7, abs=0.005)


def test_range_ratio_is_the_uniform_that_it_names():
    a = requests(input_tokens={"mean": 512, "range_ratio": 0.25})
    b = requests(input_tokens={"uniform": [384, 640]})
    assert np.array_equal(a.prompt_tokens, b.prompt_tokens)


def test_a_length_is_never_below_one():
    r = requests(input_tokens={"mean": 1, "range_ratio": 0.9}, output_tokens={"lognormal": {"median": 1, "sigma": 3}})
    assert r.prompt_tokens.min() == 1
    assert r.output_tokens.min() == 1


@pytest.mark.parametrize(
    ("given", "median", "p90", "mean"),
    [
        ({"median": 300, "p90": 1200}, 300, 1200, 300 * math.exp((math.log(4) / 1.2815515655446004) ** 2 / 2)),
        ({"median": 300, "mean": 500}, 300, 300 * math.exp(1.2815515655 * math.sqrt(2 * math.log(5 / 3))), 500),
        ({"median": 300, "sigma": 0.5}, 300, 300 * math.exp(1.2815515655 * 0.5), 300 * math.exp(0.125)),
        ({"mean": 300, "sigma": 0.5}, 300 * math.exp(-0.125), 300 * math.exp(1.2815515655 * 0.5 - 0.125), 300),
    ],
)
def test_lognormal_has_the_closed_form_median_p90_and_mean(given, median, p90, mean):
    tokens = requests(input_tokens={"lognormal": given}, num_requests=400_000).prompt_tokens
    assert np.median(tokens) == pytest.approx(median, rel=0.01)
    assert np.percentile(tokens, 90) == pytest.approx(p90, rel=0.01)
    assert tokens.mean() == pytest.approx(mean, rel=0.02)


def test_lognormal_stops_at_its_maximum():
    tokens = requests(input_tokens={"lognormal": {"median": 300, "sigma": 10, "max": 4096}}).prompt_tokens
    assert tokens.max() == 4096


def test_quantiles_come_back():
    points = {"p0": 10, "p25": 100, "p50": 200, "p99": 4000, "p99.9": 9000, "p100": 10_000}
    tokens = requests(input_tokens={"quantiles": points}, num_requests=400_000).prompt_tokens
    for key, value in points.items():
        assert np.percentile(tokens, float(key[1:])) == pytest.approx(value, rel=0.02)
    knots = np.array(list(points.values()))
    shares = np.array([0, 0.25, 0.5, 0.99, 0.999, 1])
    assert tokens.mean() == pytest.approx(np.sum(np.diff(shares) * (knots[1:] + knots[:-1]) / 2), rel=0.01)


VARIED = {
    "request_rate": 5,
    "input_tokens": {"lognormal": {"median": 300, "sigma": 1}},
    "output_tokens": {"uniform": [1, 900]},
}


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    a, b, c = (requests(seed, **VARIED) for seed in (3, 3, 4))
    assert np.array_equal(a.arrival, b.arrival)
    assert np.array_equal(a.prompt_tokens, b.prompt_tokens)
    assert not np.array_equal(a.arrival, c.arrival)
    assert not np.array_equal(a.prompt_tokens, c.prompt_tokens)


def test_arrivals_stay_when_only_lengths_change():
    other = VARIED | {"input_tokens": 5, "output_tokens": {"quantiles": {"p0": 1, "p100": 9}}}
    assert np.array_equal(requests(**VARIED).arrival, requests(**other).arrival)


def test_one_length_stays_when_the_other_changes():
    assert np.array_equal(
        requests(**VARIED).output_tokens, requests(**VARIED | {"input_tokens": {"uniform": [1, 9]}}).output_tokens
    )


def test_prompt_and_output_are_independent():
    same = {"uniform": [1, 1000]}
    r = requests(input_tokens=same, output_tokens=same, num_requests=100_000)
    assert abs(np.corrcoef(r.prompt_tokens, r.output_tokens)[0, 1]) < 0.02


@pytest.mark.parametrize("burstiness", [0.5, 1.0])
def test_a_shorter_workload_is_the_start_of_a_longer_one(burstiness):
    """The draws are the same; only the scaling to n/rate differs."""
    short = requests(**VARIED, burstiness=burstiness, num_requests=500)
    long = requests(**VARIED, burstiness=burstiness, num_requests=5000)
    assert np.array_equal(short.prompt_tokens, long.prompt_tokens[:500])
    assert np.array_equal(short.output_tokens, long.output_tokens[:500])
    ratio = short.arrival / long.arrival[:500]
    assert ratio == pytest.approx(ratio[0])


def test_columns_have_the_types_that_the_engine_expects():
    r = requests(**VARIED)
    kinds = [column.dtype.str for column in (r.arrival, r.prompt_tokens, r.output_tokens, r.request_id)]
    assert kinds == ["<f8", "<i4", "<i4", "<i8"]
    assert r.request_id.tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("output_length", [10, 10]),
        ("max_model_len", [4000 - 100, 4000 - 100]),
        (256, [256, 256]),
        ({"factor": 1.25}, [13, 13]),
    ],
)
def test_max_tokens_is_what_the_client_asks_for(asked, expected):
    w = Workload.validate(LENGTHS | {"num_requests": 2, "max_tokens": asked}, "w.yaml")
    column = resolve_max_tokens(w, build_requests(w, 0, Path()), 4000)
    assert column.tolist() == expected
    assert column.dtype == np.int32


def test_a_prompt_beyond_the_models_length_leaves_room_for_one_token():
    w = Workload.validate(LENGTHS | {"max_tokens": "max_model_len"}, "w.yaml")
    assert set(resolve_max_tokens(w, build_requests(w, 0, Path()), 64)) == {1}


def test_a_large_factor_stays_within_the_engines_integers():
    w = Workload.validate(LENGTHS | {"output_tokens": 100_000, "max_tokens": {"factor": 1e6}}, "w.yaml")
    built = build_requests(w, 0, Path())
    total = resolve_max_tokens(w, built, 4000) + built.prompt_tokens  # 32 bits, as the engine adds them
    assert total.dtype == np.int32
    assert total.min() > 0


def test_arrivals_over_more_than_32_years_are_refused():
    """Later times would not be exact to a microsecond, and latencies are differences of times."""
    requests(request_rate=1e-6, num_requests=900)
    with pytest.raises(InputError, match=r"requests arrive over 2e\+09 s; must be at most 1e\+09 s"):
        requests(request_rate=1e-6, num_requests=2000)


def test_building_requests_needs_no_pandas_scipy_or_numba():
    code = "import sys, infersim.workload.build; print({'pandas', 'scipy', 'numba', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_curve_of_seconds_shapes_days_exactly():
    """Time t has as many arrivals as the curve's integral says, to rounding, however many periods came before."""
    load = {"input_tokens": 1, "output_tokens": 1, "request_rate": 1}
    curve = [[0, 1], [0.25, 3], [1, 1]]  # period 1 s, mean 2
    times = np.linspace(0, 2e6, 100_001) + 0.1
    workload = Workload.validate(load | {"curve": curve, "spikes": [{"at": 4e5, "duration": 1e5, "factor": 3}]}, "x")
    moved = warped(times, workload)

    def reached(t):
        whole, rest = np.divmod(t, 1.0)
        rise = np.minimum(rest, 0.25)
        fall = rest - rise
        return 2 * whole + rise + 4 * rise**2 + 3 * fall - 4 / 3 * fall**2

    inside = np.clip(moved, 4e5, 5e5)
    assert reached(moved) + 2 * (reached(inside) - reached(4e5)) == pytest.approx(times, rel=1e-9)


@pytest.mark.parametrize("rule", [{}, {"turns": 4}, {"curve": [(0.0, 0.1), (400.0, 3.0)]}, {"burstiness": 0.1}])
def test_a_duration_is_how_long_requests_arrive(rule):
    """About rate x duration of them (conversations), each drawn as with a number; with both, whichever ends first."""
    given = {"input_tokens": 9, "output_tokens": 9, "request_rate": 10, "duration": 200, **rule}
    found = build_requests(Workload(**given), 1, Path())
    assert found.arrival[-1] < 200
    begun = len(found) if found.session is None else int(found.session.max()) + 1
    share = 0.1 + 2.9 * 0.25 if "curve" in rule else 1.0
    assert begun == pytest.approx(2000 * share, rel=0.1)
    assert found.session is None or len(found) == 4 * begun
    few = build_requests(Workload(**given, num_requests=100), 1, Path())
    assert len(few) == 100
