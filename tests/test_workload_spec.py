"""The workload description: defaults, the forms of a length, and one clear line for everything that is wrong."""

import json
import math

import pytest

from infersim.config.errors import InputError
from infersim.config.resources import load_yaml, names, packaged
from infersim.config.workload import Workload

LENGTHS = {"input_tokens": 100, "output_tokens": 10}


def workload(**keys) -> Workload:
    return Workload.validate(keys, "w.yaml")


def test_generated_defaults_are_those_of_vllm_bench_serve():
    w = workload(**LENGTHS)
    assert (w.request_rate, w.num_requests, w.burstiness, w.max_tokens) == (math.inf, 1000, 1.0, "output_length")


def test_a_trace_keeps_its_own_times_and_hides_output_lengths_from_the_scheduler():
    w = workload(trace="t.csv")
    assert (w.request_rate, w.num_requests, w.max_tokens, w.has_arrival_rule) == (None, None, "max_model_len", False)


@pytest.mark.parametrize(
    "keys",
    [
        LENGTHS,
        LENGTHS | {"request_rate": "inf", "max_tokens": {"factor": 1.5}, "max_concurrency": 8},
        LENGTHS | {"request_rate": "2.5 req/s", "burstiness": math.inf, "max_tokens": 512},
        LENGTHS | {"ramp_up": {"strategy": "linear", "start_rps": 1, "end_rps": 2}},
        {"input_tokens": {"mean": 512, "range_ratio": 0.25}, "output_tokens": {"uniform": [1, 9]}},
        {"input_tokens": {"lognormal": {"mean": 9, "sigma": 1}}, "output_tokens": {"quantiles": {"p0": 1, "p100": 9}}},
        {"trace": "t.csv", "time_scale": 2, "num_requests": "1e3", "format": "azure", "max_tokens": "output_length"},
    ],
)
def test_what_is_echoed_is_json_and_describes_the_same_workload(keys):
    w = workload(**keys)
    echoed = json.loads(json.dumps(w.model_dump(mode="json"), allow_nan=False))
    assert Workload.validate(echoed, "echo") == w


RAMP = {"strategy": "linear", "start_rps": 1, "end_rps": 2}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "w.yaml: must have trace, or both input_tokens and output_tokens"),
        ({"input_tokens": 3}, "w.yaml: must have trace, or both"),
        (LENGTHS | {"trace": "t"}, "w.yaml: trace has its own lengths"),
        (LENGTHS | {"request_rate": 0}, "w.yaml: request_rate: must be inf or a number of at least 1e-6 (got 0)"),
        (LENGTHS | {"request_rate": -1}, "w.yaml: request_rate: must be a rate per second"),
        (LENGTHS | {"request_rate": math.nan}, "w.yaml: request_rate: must be a rate per second"),
        (LENGTHS | {"request_rate": "3 GB"}, "w.yaml: request_rate: must be a rate per second"),
        (LENGTHS | {"burstiness": 0}, "w.yaml: burstiness: must be inf or"),
        (LENGTHS | {"num_requests": 0}, "w.yaml: num_requests: must be a whole number >= 1 (got 0)"),
        (LENGTHS | {"num_requests": 1e12}, "w.yaml: num_requests: must be less than"),
        (LENGTHS | {"num_request": 1}, "w.yaml: num_request: unknown key; did you mean num_requests?"),
        (LENGTHS | {"duration": 60}, "w.yaml: duration is for a finite request_rate or a trace"),
        (LENGTHS | {"format": "azure"}, "w.yaml: format is for a trace"),
        (LENGTHS | {"time_scale": 2}, "w.yaml: time_scale is for the times of a trace"),
        (LENGTHS | {"ramp_up": RAMP, "request_rate": 1}, "w.yaml: must have request_rate or ramp_up, not both"),
        (LENGTHS | {"ramp_up": RAMP | {"start_rps": 2}}, "w.yaml: ramp_up: end_rps must be above start_rps"),
        (LENGTHS | {"ramp_up": RAMP | {"start_rps": 0}}, "w.yaml: ramp_up.start_rps: must be"),
        (LENGTHS | {"ramp_up": RAMP | {"strategy": "log"}}, "w.yaml: ramp_up.strategy: must be one of"),
        (LENGTHS | {"max_tokens": "all"}, "w.yaml: max_tokens: must be one of"),
        (LENGTHS | {"max_tokens": {"factor": 0.5}}, "w.yaml: max_tokens.factor: must be"),
        (LENGTHS | {"max_tokens": 0}, "w.yaml: max_tokens: must be a whole number >= 1"),
        (LENGTHS | {"max_concurrency": 0}, "w.yaml: max_concurrency: must be a whole number >= 1"),
        (LENGTHS | {"input_tokens": 0}, "w.yaml: input_tokens: must be a whole number >= 1 (got 0)"),
        (LENGTHS | {"input_tokens": {"mean": 5}}, "w.yaml: input_tokens: must be a number of tokens or one of"),
        (LENGTHS | {"input_tokens": {"mean": 5, "range_ratio": 1}}, "w.yaml: input_tokens.range_ratio: must be less"),
        (LENGTHS | {"input_tokens": {"uniform": [5, 2]}}, "w.yaml: input_tokens: uniform must be [shortest, longest]"),
        (LENGTHS | {"input_tokens": {"uniforms": [5, 2]}}, "w.yaml: input_tokens.uniforms: unknown key"),
        (LENGTHS | {"input_tokens": {"lognormal": {"median": 5}}}, "w.yaml: input_tokens.lognormal: must have two of"),
        (
            LENGTHS | {"input_tokens": {"lognormal": {"median": 50, "p90": 5}}},
            "w.yaml: input_tokens.lognormal: median must not be above p90",
        ),
        (
            LENGTHS | {"input_tokens": {"quantiles": {"p0": 1, "p50": 9}}},
            "w.yaml: input_tokens: quantiles must have p0",
        ),
        (
            LENGTHS | {"input_tokens": {"quantiles": {"p0": 3, "p50": 2, "p100": 9}}},
            "w.yaml: input_tokens: quantiles must not fall",
        ),
        (
            LENGTHS | {"input_tokens": {"quantiles": {"p0": 3, "q50": 4, "p100": 9}}},
            "w.yaml: input_tokens: quantiles: keys must be p0 ... p100",
        ),
        ({"trace": "t", "burstiness": 2}, "w.yaml: burstiness is for a request_rate"),
        ({"trace": "t", "request_rate": 2, "time_scale": 2}, "w.yaml: time_scale is for the times of the trace"),
        ({"trace": "t", "time_scale": 0}, "w.yaml: time_scale: must be"),
        ({"trace": "t", "format": "azur"}, "w.yaml: format: must be one of"),
        ({"trace": ""}, "w.yaml: trace: "),
    ],
)
def test_each_mistake_is_one_line_that_says_where_and_what_is_right(keys, line):
    with pytest.raises(InputError) as caught:
        workload(**keys)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(line)
    assert "\n" not in caught.value.problems[0]


def test_several_mistakes_are_reported_together():
    with pytest.raises(InputError) as caught:
        workload(input_tokens=0, output_tokens={"mean": 5}, request_rate=-1, burst=2)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("name", names("workloads"))
def test_every_packaged_workload_is_valid(name):
    Workload.validate(load_yaml(packaged("workloads") / f"{name}.yaml"), name)
