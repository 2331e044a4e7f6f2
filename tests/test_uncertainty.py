"""Intervals of model error: as wide as deployments that they were not made from say, and shown beside every answer."""

import json
from dataclasses import replace

import numpy as np
import pytest

import infersim
from infersim.config.hardware import load_hardware
from infersim.config.scenario import build_scenario
from infersim.explain.uncertainty import FIGURES, LEAST, LEVEL, Kind, device_of, error_of, load_of, measured, spread
from infersim.planning.unknowns import BOX, unknowns
from infersim.report.notebook import printed
from infersim.report.plan import print_plan
from infersim.report.terminal import render
from infersim.run import run

KEYS = ("model", "engine", "device", "pools", "load")


@pytest.mark.parametrize("figure", FIGURES)
def test_four_in_five_of_deployments_that_an_interval_was_not_made_from_lie_within_it(figure):
    """One deployment after another is left out; of calibrated devices counted by measured load, too."""
    rows = measured()
    inside: dict[str, list[tuple[float, int]]] = {"calibrated": [], "sibling": [], "datasheet": []}
    for name in np.unique(rows["deployment"]):
        own = rows["deployment"] == name
        rest = {column: values[~own] for column, values in rows.items()}
        hits: dict[str, list[bool]] = {device: [] for device in inside}
        for i in np.flatnonzero(own & np.isfinite(rows[figure])):
            kind = Kind(*(str(rows[key][i]) for key in KEYS))
            if found := error_of(kind, figure, rest):
                low, high = found[0]
                hits[kind.device].append(low <= rows[figure][i] <= high)
        for device, known in hits.items():
            inside[device] += [(float(np.mean(known)), len(known))] if known else []
    for shares in inside.values():
        assert len(shares) > 30
        assert 0.75 <= np.mean([share for share, _ in shares]) <= 0.85
    shares, loads = zip(*inside["calibrated"], strict=True)
    assert 0.75 <= np.average(shares, weights=loads) <= 0.85


def test_the_interval_of_n_alike_deployments_covers_one_more():
    """Whatever the errors' distribution: 20,000 draws of 9 deployments and one more."""
    draws = np.random.default_rng(3).lognormal(sigma=2, size=(20_000, 10))
    names = np.arange(9)
    low, high = np.array([spread(row[:9], names) for row in draws]).T
    inside = ((low <= draws[:, 9]) & (draws[:, 9] <= high)).mean()
    assert inside == pytest.approx(LEVEL, abs=0.01)


def test_a_deployment_counts_once_however_often_it_was_measured():
    errors, names = np.arange(10.0), np.arange(10)
    often = np.concatenate([errors, np.full(90, 9.0)]), np.concatenate([names, np.full(90, 9)])
    assert spread(*often)[0] == pytest.approx(spread(errors, names)[0])


def test_a_kind_with_few_deployments_borrows_from_a_wider_one_and_never_from_other_devices():
    alike = {"engine": "vllm", "device": "calibrated", "pools": "aggregated", "load": "light"}
    few = {key: np.array([word] * (LEAST + 1)) for key, word in alike.items()}
    few |= {"deployment": np.arange(LEAST + 1), "model": np.array(["dense"] * LEAST + ["MoE"])}
    few["ttft"] = np.ones(LEAST + 1)
    dense = Kind("dense", "vllm", "calibrated", "aggregated", "light")
    assert error_of(dense, "ttft", few)[1] == {
        "like": ["model", "engine", "load"],
        "deployments": LEAST,
        "loads": LEAST,
    }
    two = few | {"engine": np.array(["sglang", *few["engine"][1:]])}
    assert error_of(replace(dense, engine="sglang", load="heavy"), "ttft", two)[1]["like"] == ["model"]
    for changed in ({"device": "sibling"}, {"pools": "pools"}, {"engine": "orca"}, {"model": "MoE"}):
        assert error_of(replace(dense, **changed), "ttft", few) is None


def test_what_the_kernels_of_a_device_are():
    names = {"h100-sxm": "calibrated", "b300-sxm": "sibling", "h100-pcie": "sibling", "mi300x": "datasheet"}
    assert {name: device_of(load_hardware(name)) for name in names} == names
    assert [load_of(n) for n in (0, 8, 9, 64, 65)] == ["light", "light", "medium", "medium", "heavy"]


LOOP = {"request_rate": "inf", "max_concurrency": 4, "num_requests": 12, "input_tokens": 200, "output_tokens": 30}
BASE = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": LOOP, "engine": {"preset": "vllm-0.19"}}


def test_an_answer_has_its_intervals_in_words_and_numbers():
    answer = infersim.run(BASE)
    error = answer.summary["model_error"]
    assert error["kind"] == {"model": "dense", "engine": "vllm", "device": "calibrated", "pools": "aggregated",
                             "load": "light"}  # fmt: skip
    for figure, (metric, _) in FIGURES.items():
        low, high = error["intervals"][metric]
        assert (low, high) == pytest.approx([answer.metrics[metric] * factor for factor in error["factors"][figure]])
        assert 0 < low < high
    text = "\n".join(line for _, line in render(answer.summary, []))
    assert "in 4 of 5 deployments" in " ".join(text.split())
    json.dumps(error, allow_nan=False)


def test_throughput_that_is_the_load_has_no_interval():
    answer = infersim.run(BASE, {"workload.max_concurrency": None, "workload.request_rate": 2})
    assert "output_throughput" not in answer.summary["model_error"]["intervals"]


PLAN = {
    "model": "Llama-3.1-8B", "slo": {"p99_ttft_ms": 1000, "p99_tpot_ms": 60}, "max_gpus": 2,
    "workload": {"request_rate": 4, "num_requests": 300, "input_tokens": 500, "output_tokens": 60},
    "candidates": {"hardware": ["h100-sxm", "l40s"], "engine": [{"preset": "vllm-0.19"}]},
}  # fmt: skip


def test_a_plan_says_whether_its_answer_holds_and_stays_within_the_error():
    document = infersim.plan(PLAN)
    best, stays = document["best"], document["stays"]
    factors, held = best["model_error"]["factors"], best["model_error"]["held"]
    for x in best["limits"]:
        low, high = held[x["name"]]["interval"]
        assert (low, high) == pytest.approx([x["mean"] * f for f in factors[x["name"].split("_")[1]]])
        assert held[x["name"]]["holds"] == (high <= x["limit"])
        assert x["mean"] * (1 + held[x["name"]]["wrong"]) == pytest.approx(x["limit"])
    assert held["rate"]["interval"][0] == pytest.approx(best["largest_rate"] * factors["throughput"][0])
    assert 0 < stays["carry"] <= 1
    assert stays["wins"] == (factors["throughput"][0] >= stays["carry"])
    text = " ".join(" ".join(printed(print_plan, document)).split())
    assert f"{stays['carry']:.0%} of what is predicted" in text


@pytest.mark.parametrize("changes", [
    {"engine.preset": "orca"},
    {"speculation": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 0.5}}},
])  # fmt: skip
def test_where_nothing_was_measured_it_says_so(changes):
    error = infersim.run(BASE, changes).summary["model_error"]
    assert error["intervals"] == {}
    assert error["text"][0].startswith("no interval: ")


def test_the_link_of_a_box_moves_the_answer_unless_it_is_given():
    load = {"request_rate": "inf", "max_concurrency": 2, "num_requests": 6, "input_tokens": 4000, "output_tokens": 4}
    scenario = BASE | {"hardware": "rtx-pro-6000", "parallelism": {"tensor": 2}, "workload": load}
    (row,) = [x for x in infersim.run(scenario).summary["unknowns"] if "link" in x["input"]]
    low, high = row["intervals"]["mean_ttft_ms"]
    device = load_hardware("rtx-pro-6000")
    slow = {"hardware.link.bandwidth": BOX * device.link.bandwidth}
    assert infersim.run(scenario, slow).metrics["mean_ttft_ms"] == pytest.approx(high, rel=1e-6)
    assert high > 1.2 * low
    (given,) = run(build_scenario(scenario | {"hardware": device.model_copy(update={
        "link": device.link.model_copy(update={"bandwidth": 24e9})}).model_dump(mode="json")}, "given"))  # fmt: skip
    assert not [x for x in unknowns(given, infersim.run(scenario).metrics) if "link" in x["input"]]
