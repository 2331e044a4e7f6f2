"""A sound run passes the laws; each law notices the run that breaks it."""

import math

import numpy as np
import pytest
from synthetic import result_of, result_of_queue, scenario_of

from infersim.engine.compiled.state import RUNNING
from infersim.explain.attribution import throughput_terms
from infersim.metrics.conservation import ConservationError, check_conservation
from infersim.run import run


def sound(**fields):
    arrival = np.arange(10.0)
    first = arrival + 0.5
    return result_of(arrival, arrival + 0.1, first, first + 0.3, prompts=20, outputs=4, **fields)


def test_a_sound_run_passes():
    check_conservation(sound())
    check_conservation(result_of_queue(0.7, 1000))


@pytest.mark.parametrize(
    ("fields", "law"),
    [
        ({"outstanding_time": 8.1}, "Little's law"),
        ({"busy_time": 9.0}, "time by resource"),
        ({"time_by_resource": np.array([9.0, -1.0, 0, 0, 0, 0, 0, 0, 0])}, "time by resource"),
        ({"blocks_held": 1}, "KV blocks"),
        ({"num_scheduled_tokens": 229}, "tokens were scheduled"),
        ({"itl_histogram": np.zeros(4864, "i8")}, "inter-token gaps"),
        ({"end_time": 9.0}, "after the end"),
    ],
)
def test_sums_that_do_not_agree_are_named(fields, law):
    with pytest.raises(ConservationError, match=law):
        check_conservation(sound(**fields))


@pytest.mark.parametrize(
    ("column", "value", "law"),
    [
        ("scheduled", 0.6, "first_token before scheduled"),
        ("scheduled", -1.0, "scheduled before sent"),
        ("sent", -0.5, "sent before arrival"),
        ("first_token", 0.9, "last_token before first_token"),
        ("status", RUNNING, "never finished"),
        ("num_blocks", 3, "KV blocks"),
        ("num_output_tokens", 3, "tokens it was to generate"),
        ("first_token", np.nan, "before"),
    ],
)
def test_records_that_cannot_be_are_named(column, value, law):
    run = sound()
    run.requests[column][0] = value
    with pytest.raises(ConservationError, match=law):
        check_conservation(run)


def test_an_interrupted_run_may_have_unfinished_requests():
    run = sound(interrupted=True)
    run.requests["status"][9] = RUNNING
    check_conservation(run)


def test_all_broken_laws_are_named_together():
    with pytest.raises(ConservationError, match=r"bug in infersim: .*blocks.*; .*Little"):
        check_conservation(sound(blocks_held=2, outstanding_time=1.0))


HARD = {
    "an API server that still sends": {"engine": {"preset": "vllm-0.11", "host_token_time": 1e-3}},
    "the same behind a router": {
        "engine": {"preset": "vllm-0.11", "host_token_time": 1e-3},
        "cluster": {"replicas": 2, "router": "least-outstanding"},
    },
    "a step that a crash cuts off": {
        "workload": {"request_rate": "inf", "input_tokens": 6000},
        "cluster": {"failures": [{"kind": "crash", "at": 2.1}]},
    },
    "two replicas": {"cluster": {"replicas": 2}},
    "requests that time out": {"workload": {"timeout": 0.3, "request_rate": "inf"}},
    "a warm-up": {"workload": {"request_rate": 100}, "simulation": {"warmup": 0.1}},
    "outputs whose end nobody knew": {"workload": {"max_tokens": "max_model_len", "request_rate": "inf"}},
}


@pytest.mark.parametrize("name", HARD)
def test_laws_hold_to_the_end(name):
    """Busy shares are at most 1, and the time per output token divides into parts that are at least 0."""
    changes = dict(HARD[name])
    load = {"num_requests": 40, "input_tokens": 100, "output_tokens": {"uniform": [1, 90]}, "request_rate": 20}
    changes["workload"] = load | changes.get("workload", {})
    result = run(scenario_of(**changes))[0]
    check_conservation(result)
    assert (result.replicas.rows["busy_time"] <= result.replicas.available * (1 + 1e-9)).all()
    parts = {name: math.prod(factors.values()) for name, factors in throughput_terms(result).items()}
    assert all(seconds >= -1e-12 for seconds in parts.values()), parts
