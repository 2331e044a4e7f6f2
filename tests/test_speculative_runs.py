"""Runs that speculate: closed forms, conservation, common random numbers, memory, and what users see."""

import json

import numba
import numpy as np
import pytest
from typer.testing import CliRunner

from infersim.cli.app import app
from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.deployment import deployment_of
from infersim.engine.compiled.draws import make_keys, uniforms
from infersim.engine.compiled.speculation import uniform
from infersim.engine.compiled.state import DRAFT
from infersim.metrics.conservation import check_conservation
from infersim.run import run
from infersim.workload.acceptance import acceptance_table

EAGLE = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"rate": 0.7}}


def scenario_of(speculation=None, engine=None, **keys):
    workload = {"num_requests": 40, "input_tokens": 64, "output_tokens": 400, "max_concurrency": 4}
    data = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "workload": workload | keys.pop("workload", {})}
    return build_scenario(data | {"speculation": speculation, "engine": engine or {}} | keys, "test")


def tokens_per_step(result) -> float:
    """Of sequences: output tokens after the first, over steps that gave some."""
    visits = result.replicas.visits
    outputs = visits["num_output_tokens"] - 1
    return outputs.sum() / (outputs - visits["num_accepted_tokens"]).sum()


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        ({"rate": 0.7}, 1 + 0.7 + 0.49 + 0.343),
        ({"conditional": [0.8, 0.6, 0.5]}, 1 + 0.8 + 0.48 + 0.24),
        ({"synthetic_acceptance_length": 2.5}, 2.5),
        ({"rate": 0.0}, 1.0),
        ({"rate": 1.0}, 4.0),
        ({"match": {"enter": 0.2, "stay": 0.8}}, None),
    ],
)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_tokens_per_step_are_the_closed_form(acceptance, expected, asynchronous):
    """Within what 16,000 draws and the cut at the last token leave; nothing is lost on the way."""
    speculation = EAGLE | {"acceptance": acceptance}
    scenario = scenario_of(speculation, {"async_scheduling": asynchronous})
    (result,) = run(scenario)
    check_conservation(result)
    if expected is None:
        expected = acceptance_table(scenario.speculation).mean_tokens_per_step
    assert tokens_per_step(result) == pytest.approx(expected, rel=0.03)


def test_speculation_shortens_tpot_as_the_closed_form_says():
    """TPOT falls by tokens per step over what a step costs more; itl is the step's."""
    (plain,), (fast,) = run(scenario_of()), run(scenario_of(EAGLE))
    tpot = [((r.requests["last_token"] - r.requests["first_token"]) / 399).mean() for r in (plain, fast)]
    deployment = deployment_of(scenario_of(EAGLE))
    from infersim.cost.batch import batch_time, draft_time

    cost, draft = deployment.step_cost(), deployment.draft_cost()
    step = batch_time(cost, 4, 264, 3) + draft_time(draft, cost, 4, 264, 3)
    expected = tokens_per_step(fast) * batch_time(cost, 4, 264) / step
    assert tpot[0] / tpot[1] == pytest.approx(expected, rel=0.05)


def test_draws_do_not_depend_on_the_schedule():
    """Two runs that differ in batch size accept the same drafts of every request: common random numbers."""
    accepted = [
        run(scenario_of(EAGLE, workload={"max_concurrency": n}))[0].requests["num_accepted_tokens"] for n in (1, 16)
    ]
    assert np.array_equal(*accepted)
    other = run(scenario_of(EAGLE, simulation={"seed": 1}))[0].requests["num_accepted_tokens"]
    assert not np.array_equal(accepted[0], other)


def test_compiled_draws_are_those_of_numpy():
    keys = make_keys(7, "acceptance", np.arange(-50, 50))
    compiled = numba.njit(lambda key: uniform(key, 3))  # the engine's functions are called from compiled code only
    assert [compiled(key) for key in keys] == uniforms(keys, 3).tolist()
    assert len(set(keys.tolist())) == 100
    many = uniforms(make_keys(0, "acceptance", np.arange(20_000)), 0)
    assert many.mean() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(many, 20)[0].std() < 3 * np.sqrt(1000)


def test_more_acceptance_is_never_slower():
    ends = [run(scenario_of(EAGLE | {"acceptance": {"rate": r}}))[0].end_time for r in (0.0, 0.4, 0.8, 1.0)]
    assert ends == sorted(ends, reverse=True)


def test_requests_differ_as_described():
    """A spread over requests, and classes of traffic, show in the requests' own tokens per step."""

    def own(**more):
        (result,) = run(scenario_of(EAGLE | more, workload={"num_requests": 200, "max_concurrency": 32}))
        r = result.requests
        return 399 / (399 - r["num_accepted_tokens"])

    even, spread = own(), own(acceptance={"rate": 0.7, "request_spread": 1.0})
    assert spread.std() > 2 * even.std()
    classes = {"chat": {"share": 1, "rate": 0.9}, "json": {"share": 1, "rate": 0.1}}
    two = own(acceptance=None, classes=classes)
    assert ((two > 2.5) | (two < 1.5)).all()
    assert 0.35 < (two > 2.5).mean() < 0.65


def test_drafts_by_batch_size():
    """Fewer drafts at larger batches, none where they do not pay; goodput never drafts where it loses."""
    sizes = EAGLE | {"num_speculative_tokens_per_batch_size": [[1, 3], [4, 1], [9, 0]]}
    spec = deployment_of(scenario_of(sizes)).replica()
    assert spec.drafts[[1, 3, 4, 8, 9, 100]].tolist() == [3, 3, 1, 1, 0, 0]
    (none,) = run(scenario_of(EAGLE | {"num_speculative_tokens_per_batch_size": [[1, 0]]}))
    assert none.replicas.rows["num_drafts"].sum() == 0
    best = EAGLE | {"num_speculative_tokens_per_batch_size": "goodput", "num_speculative_tokens": 7}
    drafts = deployment_of(scenario_of(best)).replica().drafts
    assert drafts[1] > drafts[512]
    assert drafts[1] >= 3


@pytest.mark.parametrize(
    "speculation",
    [
        EAGLE | {"method": "draft_model", "model": "Llama-3.2-1B"},
        EAGLE | {"method": "medusa", "num_speculative_tokens": 12, "tree": {"depth": 4, "width": 3}},
        EAGLE | {"method": "eagle", "num_speculative_tokens": 20, "tree": {"depth": 5, "width": 4}},
        EAGLE | {"method": "ngram"},
        EAGLE | {"method": "suffix"},
        EAGLE | {"method": "mtp", "num_speculative_tokens": 1},
        EAGLE | {"method": "self", "exit_layer": 8},
    ],
    ids=lambda s: s["method"],
)
def test_every_drafter_runs_and_is_paid_for(speculation):
    (result,) = run(scenario_of(speculation))
    check_conservation(result)
    seconds = result.time_by_resource
    assert seconds[DRAFT] > 0
    assert tokens_per_step(result) > 1.2


def test_memory_of_the_drafter_and_look_ahead():
    plain, eagle = deployment_of(scenario_of()), deployment_of(scenario_of(EAGLE))
    assert eagle.memory.num_gpu_blocks < plain.memory.num_gpu_blocks
    assert eagle.knobs()["lookahead"] == 3
    assert deployment_of(scenario_of(EAGLE | {"method": "ngram"})).knobs()["lookahead"] == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"speculation": EAGLE, "parallelism": {"pipeline": 2}}, "speculation: is not modelled with pipeline"),
        ({"speculation": EAGLE | {"method": "self", "exit_layer": 40}}, "exit_layer: must be below the 32 layers"),
        ({"speculation": EAGLE, "early_exit": {"exit_layers": [8], "shares": [0.1]}}, "not modelled together"),
        (
            {"early_exit": {"exit_layers": [8], "shares": [0.1], "policy": "rebatch"}},
            "rebatch is not modelled in a run",
        ),
        ({"early_exit": {"exit_layers": [32], "shares": [0.1]}}, "exit_layers: must be below the 32 layers"),
    ],
)
def test_what_does_not_go_together_is_one_line(keys, message):
    with pytest.raises(InputError, match=message):
        run(scenario_of(**keys))


def test_early_exit_in_a_run():
    """One sequence gains the mixture; a batch that waits for all gains nothing; riding along costs the head."""
    exits = {"exit_layers": [16], "shares": [0.5]}

    def tpot(policy, concurrency):
        early = None if policy is None else exits | {"policy": policy}
        (result,) = run(scenario_of(early_exit=early, workload={"max_concurrency": concurrency}))
        return ((result.requests["last_token"] - result.requests["first_token"]) / 399).mean()

    assert tpot(None, 1) / tpot("wait_for_all", 1) > 1.15
    assert 0.9 < tpot(None, 32) / tpot("wait_for_all", 32) <= 1.03
    assert tpot(None, 32) / tpot("leave_alone", 32) <= 1.0


def test_the_report_and_break_even_on_the_command_line():
    spec = "speculation={method: eagle3, num_speculative_tokens: 3, acceptance: {rate: 0.7}}"
    workload = ["--set", "workload.num_requests=200", "--set", spec]
    outcome = CliRunner().invoke(app, ["run", "llama-8b-h100", *workload, "--json"])
    assert outcome.exit_code == 0
    explained = json.loads(outcome.stdout)["explain"]["speculation"]
    assert explained["acceptance_rate"] == pytest.approx((0.7 + 0.49 + 0.343) / 3, rel=0.05)
    text = CliRunner().invoke(app, ["run", "llama-8b-h100", *workload]).stdout
    assert "tokens per step and sequence" in text
    assert "speculation is exact" in text
    outcome = CliRunner().invoke(app, ["show", "break-even", "llama-8b-h100", "--set", spec, "--json"])
    document = json.loads(outcome.stdout)
    rows = document["speculation"]["over_batch"]
    assert rows[0]["regime"] == "bandwidth"
    assert rows[-1]["regime"] == "compute"
    assert rows[0]["gain"] > 1.5 > rows[-1]["gain"]
    for row in rows:  # a gain is more tokens than needed
        assert (row["gain"] > 1) == (row["tokens_expected"] > row["tokens_needed"])
    assert document["int4_crossover_rows"]["marlin"] > document["int4_crossover_rows"]["awq"]
    early = "early_exit={exit_layers: [20], shares: [0.4], policy: rebatch}"
    text = CliRunner().invoke(app, ["show", "break-even", "llama-8b-h100", "--set", early]).stdout
    assert "early exit (approximate" in text


@pytest.mark.parametrize("budget", [1, 2, 3, 8])
def test_drafts_by_goodput_where_a_step_has_little_room(budget):
    """No plan drafts more than what one step can verify."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 0.5},
                   "num_speculative_tokens_per_batch_size": "goodput"}  # fmt: skip
    load = {"request_rate": 1, "num_requests": 20, "input_tokens": 10, "output_tokens": 20}
    engine = {"max_num_batched_tokens": budget, "max_num_seqs": 1}
    keys = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine, "workload": load}
    scenario = build_scenario(keys | {"speculation": speculation}, "test")
    assert run(scenario)[0].completed.all()
    assert deployment_of(scenario).replica().drafts.max() <= budget - 1
