"""vLLM's definitions, on requests whose times can be read off, and on random ones against numpy."""

import numpy as np
import pytest
from synthetic import histogram_of, result_of, result_of_queue, scenario_of

from infersim.engine.compiled.state import REJECTED
from infersim.metrics.latency import count, histogram_percentiles, latency_quantiles, measure, measured_gaps
from infersim.run import run


def three(**keys):
    """One request of 1 token, one of 3, one of 5; ttft 0.1, 0.2, 0.3 s; gaps of 0.05 and 0.1 s."""
    arrival = np.array([0.0, 1.0, 2.0])
    first = arrival + np.array([0.1, 0.2, 0.3])
    last = first + np.array([0.0, 0.1, 0.4])
    return result_of(arrival, arrival, first, last, prompts=[10, 20, 30], outputs=[1, 3, 5], **keys)


def test_times_are_measured_from_sending_and_a_request_of_one_token_has_no_tpot_and_no_gap():
    metrics = measure(three())
    assert metrics["mean_ttft_ms"] == pytest.approx(200)
    assert metrics["mean_tpot_ms"] == pytest.approx((50 + 100) / 2)  # two requests
    assert metrics["mean_itl_ms"] == pytest.approx((2 * 50 + 4 * 100) / 6)  # six gaps
    assert metrics["mean_e2el_ms"] == pytest.approx((100 + 300 + 700) / 3)
    assert metrics["p90_e2el_ms"] == pytest.approx(np.percentile([100, 300, 700], 90))


def test_throughputs_run_from_the_start_to_the_last_completion():
    """`vllm bench serve` starts its clock before it waits for the first request."""
    late = np.array([5.0])
    assert measure(result_of(late, late, late + 1, late + 1))["duration_s"] == 6
    metrics = measure(three())
    assert metrics["duration_s"] == pytest.approx(2.7)
    assert metrics["request_throughput"] == pytest.approx(3 / 2.7)
    assert metrics["output_throughput"] == pytest.approx(9 / 2.7)
    assert metrics["total_token_throughput"] == pytest.approx(69 / 2.7)
    assert metrics["request_goodput"] is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"goodput": {"ttft_ms": 250}}, 2),
        ({"goodput": {"tpot_ms": 60}}, 2),  # the request of one token counts as tpot 0
        ({"goodput": {"ttft_ms": 250, "e2el_ms": 290}}, 1),
        ({"p99_ttft_ms": 150}, 1),  # without goodput limits, those of the percentiles
    ],
)
def test_goodput_counts_requests_that_meet_every_limit(slo, good):
    assert measure(three(scenario=scenario_of(slo=slo)))["request_goodput"] == pytest.approx(good / 2.7)


def test_percentiles_from_the_histogram_are_within_half_a_percent_and_the_mean_is_exact():
    random = np.random.default_rng(0)
    gaps = random.lognormal(-4, 1.5, (300, 50))
    arrival = np.arange(300.0)
    first = arrival + 0.5
    run = result_of(arrival, arrival, first, first + gaps.sum(axis=1), outputs=51, gaps=list(gaps))
    metrics = measure(run)
    assert metrics["mean_itl_ms"] == pytest.approx(gaps.mean() * 1e3, rel=1e-12)
    for name, percentile in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert metrics[f"{name}_itl_ms"] == pytest.approx(np.percentile(gaps, percentile) * 1e3, rel=0.005)
    kept = np.concatenate(list(gaps)).astype("f4")
    exact = measure(
        result_of(arrival, arrival, first, first + gaps.sum(axis=1), outputs=51, gaps=list(gaps), itl_gaps=kept,
                  itl_offsets=50 * np.arange(300))
    )  # fmt: skip
    assert exact["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99) * 1e3, rel=1e-6)


@pytest.mark.parametrize("values", [[0.01], [0.01, 0.02], [0.5] * 7 + [2.0]])
def test_histogram_percentiles_of_few_values(values):
    percentiles = [0, 25, 50, 90, 100]
    got = histogram_percentiles(histogram_of(values), percentiles)
    assert got == pytest.approx(np.percentile(values, percentiles), rel=0.005)


def test_a_warm_up_leaves_out_what_was_sent_before_it_gaps_included():
    gaps = [np.zeros(0), np.array([0.05, 0.05]), np.full(4, 0.1)]
    run = three(warmup=1.5, gaps=gaps, itl_gaps=np.concatenate(gaps), itl_offsets=np.array([0, 0, 2]))
    metrics = measure(run)
    assert [metrics["mean_ttft_ms"], metrics["p99_ttft_ms"]] == pytest.approx([300, 300])
    assert [metrics["mean_itl_ms"], metrics["median_itl_ms"]] == pytest.approx([100, 100])
    assert metrics["duration_s"] == pytest.approx(1.2)  # from the end of the warm-up


def test_what_cannot_be_measured_is_none():
    run = three()
    run.requests["status"] = REJECTED
    assert set(measure(run).values()) == {None}
    one_token = result_of([0.0], [0.0], [1.0], [1.0])
    assert measure(one_token)["mean_itl_ms"] is None
    assert measure(one_token)["mean_e2el_ms"] == 1000


def test_counts_add_up():
    run = three()
    run.requests["status"][1] = REJECTED
    counts = count(run)
    ends = ("completed", "rejected", "timed_out", "lost", "unfinished")
    assert counts["submitted"] == 3 == sum(counts[name] for name in ends)
    assert counts["rejected"] == 1


@pytest.mark.parametrize(("rho", "deterministic"), [(0.5, False), (0.8, False), (0.8, True)])
def test_mean_ttft_of_a_single_server_is_the_closed_form(rho, deterministic):
    """M/M/1: 1 / (1 - rho); M/D/1 (Pollaczek-Khinchine): 1 + rho / (2 (1 - rho)); service time 1."""
    expected = 1 + rho / (2 * (1 - rho)) if deterministic else 1 / (1 - rho)
    metrics = measure(result_of_queue(rho, 400_000, deterministic=deterministic))
    assert metrics["mean_ttft_ms"] / 1e3 == pytest.approx(expected, rel=0.03)


def test_columns_say_what_never_happened_with_nan():
    run = three()
    run.requests["status"][1] = REJECTED
    run.requests["first_token"][1] = run.requests["last_token"][1] = -1
    columns = run.columns()
    assert np.isnan([columns[name][1] for name in ("first_token_s", "ttft_ms", "tpot_ms", "e2el_ms")]).all()
    assert list(columns["status"]) == ["completed", "rejected", "completed"]
    assert columns["tpot_ms"][2] == pytest.approx(100)
    assert list(run.to_pandas()["request_id"]) == [0, 1, 2]


@pytest.mark.parametrize("ends", [{"timeout": 3}, {"failures": [{"at": 5, "duration": 1}]}])
def test_gaps_are_those_of_completed_requests_whether_they_are_saved_or_not(ends):
    """Clients that give up after some tokens, and requests that die with their replica, are no part of any metric."""
    load = {"request_rate": 30, "num_requests": 400, "input_tokens": 800, "output_tokens": {"uniform": [10, 600]}}
    cluster = {"failures": ends.pop("failures", [])}
    scenario = scenario_of(workload=load | ends, cluster=cluster)
    plain, saved = run(scenario)[0], run(scenario, save_detailed=True)[0]
    assert measure(plain) == measure(saved)
    one_by_one = measured_gaps(saved)
    assert len(one_by_one) < plain.itl_histogram.sum()
    assert measure(plain)["p90_itl_ms"] == pytest.approx(np.percentile(one_by_one, 90) * 1e3)
    assert measure(plain)["mean_itl_ms"] == pytest.approx(one_by_one.mean() * 1e3, rel=1e-5)
    assert latency_quantiles(plain, np.array([0.9]))["itl"][0] == pytest.approx(measure(plain)["p90_itl_ms"])


def test_a_histogram_that_counts_other_gaps_gives_no_percentile():
    run = three()
    run.requests["status"][1] = REJECTED
    metrics = measure(run)
    assert metrics["p90_itl_ms"] is None
    assert metrics["mean_itl_ms"] == pytest.approx(100)
