"""Several models behind one front door: who serves whom, alone as together, and what is no name of a model."""

from dataclasses import replace

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.explain.summary import summarize
from infersim.run import run, simulate
from infersim.workload.build import build_requests

SMALL, LARGE = "Llama-3.2-1B", "Llama-3.1-8B"
CHAT = {
    "model": LARGE,
    "hardware": "h100-sxm",
    "workload": {
        "request_rate": 30,
        "num_requests": 600,
        "input_tokens": {"lognormal": {"median": 500, "sigma": 1}},
        "output_tokens": {"lognormal": {"median": 60, "sigma": 1}},
        "models": {LARGE: 2, SMALL: 1},
    },
    "cluster": {"kinds": [{"replicas": 2}, {"replicas": 1, "model": SMALL}, {"replicas": 1}]},
}
TIMES = ("status", "sent", "scheduled", "first_token", "last_token", "num_preemptions")


def scenario_of(cluster: dict | None = None, **workload):
    data = CHAT | {"cluster": CHAT["cluster"] | (cluster or {}), "workload": CHAT["workload"] | workload}
    return build_scenario(data, "test")


@pytest.mark.parametrize("router", ["round-robin", "weighted-random", "least-outstanding", "prefix-aware", "kv-aware"])
def test_a_request_goes_where_its_model_is(router):
    result = run(scenario_of({"router": router}))[0]
    assert result.completed.all()
    small = result.models.index(SMALL)
    assert np.array_equal(result.requests["replica"] == 2, result.model == small)
    document = summarize([result])
    assert document["models"][SMALL]["requests"] == (result.model == small).sum()
    assert (result.columns()["model"] == SMALL).sum() == (result.model == small).sum()


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding", "kv-aware"])
def test_models_do_not_disturb_one_another(router):
    """Each model's requests, run alone on its own replicas, have the records that they have in the cluster."""
    scenario = scenario_of({"router": router})
    requests = build_requests(scenario.workload, 0, None)
    together = run(scenario)[0]
    for number, (model, replicas) in enumerate(((LARGE, 3), (SMALL, 1))):
        mine = requests.model == number
        alone = build_scenario(
            CHAT | {"model": model, "workload": CHAT["workload"] | {"models": {model: 1}},
                    "cluster": {"replicas": replicas, "router": router}}, "test")  # fmt: skip
        kept = replace(requests.keep(mine), model=np.zeros(mine.sum(), "i4"), models=(model,))
        r = simulate(alone, kept).requests
        for name in TIMES:
            assert np.array_equal(r[name], together.requests[name][mine]), name


def test_a_full_model_does_not_hold_up_the_other():
    """One request at a time for each replica: the small model's wait no longer than without the large one's flood.

    A front end's waits, the same for both models, would be most of what the small one takes: they are left out.
    """
    admission = {"admission": {"max_outstanding": 1}, "router": "least-outstanding"}
    load = CHAT["workload"] | {"request_rate": 60}
    none = {"host_request_time": 0, "host_prompt_token_time": 0, "host_request_latency": 0}
    data = CHAT | {"cluster": CHAT["cluster"] | admission, "workload": load, "engine": none}
    result = run(build_scenario(data, "test"))[0]
    wait = result.requests["scheduled"] - result.requests["sent"]
    small = result.model == result.models.index(SMALL)
    assert wait[small].mean() < 0.2 * wait[~small].mean()


def test_a_trace_names_its_models(tmp_path):
    """BurstGPT's column says ChatGPT or GPT-4; served_model_name says which replicas that is."""
    rows = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    rows += [f"{i},{('ChatGPT', 'GPT-4')[i % 3 == 0]},100,20,120,Conversation log" for i in range(30)]
    (tmp_path / "burst.csv").write_text("\n".join(rows))
    kinds = [{"served_model_name": "ChatGPT", "model": SMALL}, {"served_model_name": "GPT-4"}]
    data = CHAT | {"workload": {"trace": str(tmp_path / "burst.csv"), "model_column": "Model"}}
    result = run(build_scenario(data | {"cluster": {"kinds": kinds}}, "test"))[0]
    assert result.requests["replica"].tolist() == [int(i % 3 == 0) for i in range(30)]


def test_sessions_stay_with_their_model():
    scenario = scenario_of(turns=4, num_requests=200)
    requests = build_requests(scenario.workload, 0, None)
    for session in np.unique(requests.session):
        assert len(set(requests.model[requests.session == session])) == 1
    share = [(requests.model == number).mean() for number in (0, 1)]
    assert share[0] == pytest.approx(2 / 3, abs=5 * np.sqrt(2 / 9 / 50))


def test_blocks_of_one_model_are_not_anothers(tmp_path):
    """The same prompt twice is a hit; asked of two models (here: two names of one) it is none."""
    rows = [
        f'{{"timestamp": {i * 1000}, "input_length": 1024, "output_length": 2, "hash_ids": [7, 8], "model": "{name}"}}'
        for i, name in enumerate("AABB")
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    workload = {"trace": str(tmp_path / "t.jsonl"), "model_column": "model"}
    requests = build_requests(scenario_of().workload.validate(workload, "test"), 0, tmp_path)
    ids = requests.segment_ids.reshape(4, 2)
    assert (ids[0] == ids[1]).all()
    assert (ids[2] == ids[3]).all()
    assert len({*ids[0], *ids[2]}) == 4


@pytest.mark.parametrize(
    ("cluster", "workload", "problem"),
    [
        ({}, {"models": {"GPT-5": 1}}, "workload: no replica serves model 'GPT-5'; served are Llama-3.1-8B, Llama"),
        ({}, {"models": None}, "cluster.kinds.1.model: must be that of kinds.0, unless workload.models says"),
        ({}, {"model_column": "Model"}, "model_column is for a trace, instead of models"),
        ({}, {"models": {SMALL: 0}}, "workload.models.Llama-3.2-1B: must be greater than"),
        ({"kinds": [{}, {"model": SMALL, "served_model_name": LARGE}]}, {}, "kinds.1.served_model_name: Llama-3.1-8B"),
    ],
)
def test_what_is_no_model_is_one_line(cluster, workload, problem):
    with pytest.raises(InputError, match=problem) as error:
        run(scenario_of(cluster, **workload))
    assert len(error.value.problems) == 1
