"""A new drafter's price is a YAML file, wherever it lies."""

import numpy as np
import pytest
import yaml

from infersim.config.drafting import Drafting, packaged_drafting
from infersim.config.errors import InputError
from infersim.config.resources import names
from infersim.config.scenario import load_scenario
from infersim.deployment import deployment_of
from infersim.run import run

SPECULATION = {"num_speculative_tokens": 3, "acceptance": {"rate": 0.7}}
SCENARIO = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "engine": {"max_model_len": 2048, "max_num_seqs": 32},
    "workload": {"num_requests": 20, "max_concurrency": 4, "input_tokens": 100, "output_tokens": 50},
}


def scenario_of(folder, method, drafter=None):
    if drafter:
        (folder / method).write_text(yaml.safe_dump(drafter | {"source": "us"}))
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(SCENARIO | {"speculation": SPECULATION | {"method": method}}))
    return load_scenario(path)


@pytest.mark.parametrize("method", names("drafters"))
def test_a_copy_of_a_packaged_drafter_is_that_drafter(method):
    how = packaged_drafting(method)
    assert Drafting.validate(how.model_dump(mode="json"), "x") == how
    assert len(how.source) > 10


def test_a_look_up_that_takes_longer(tmp_path):
    """Every sequence of every step waits by so much more, and nothing else changes."""
    slow = {"kind": "look_up", "sequence_time": "1 ms"}
    ours, theirs = (deployment_of(scenario_of(tmp_path, *args)) for args in (("slow.yaml", slow), ("ngram",)))
    extra = ours.draft_cost().once - theirs.draft_cost().once
    np.testing.assert_allclose(extra, np.arange(33) * (1e-3 - 10e-6), rtol=1e-12)
    assert ours.memory == theirs.memory
    runs = [run(scenario_of(tmp_path, *args))[0] for args in (("slow.yaml",), ("ngram",))]
    assert runs[0].num_steps == runs[1].num_steps
    assert runs[0].busy_time > runs[1].busy_time
    assert runs[0].scenario.resolved()["speculation"]["method"] == "slow"


def test_a_wider_layer_is_its_bytes(tmp_path):
    """One more joined input is hidden_size squared parameters, in memory and per pass at least their bytes."""
    wide = {"kind": "layer", "inputs": 4, "vocabulary": 32_000, "trees": True}
    ours, theirs = (deployment_of(scenario_of(tmp_path, *args)) for args in (("wide.yaml", wide), ("eagle3",)))
    more = 2 * ours.model.hidden_size**2
    assert ours.memory.weights_bytes - theirs.memory.weights_bytes == pytest.approx(more)
    passes = ours.draft_cost().following[1] - theirs.draft_cost().following[1]
    assert passes >= more / ours.hardware.memory_bandwidth
    assert run(scenario_of(tmp_path, "wide.yaml"))[0].completed.all()


@pytest.mark.parametrize(
    ("method", "drafter", "said"),
    [
        ("eagel", None, "method must be one of dflash, draft_model, eagle, .* did you mean eagle"),
        ("x.yaml", {"kind": "layer"}, "inputs must be given for kind layer"),
        ("x.yaml", {"kind": "look_up", "sequence_time": "1 us", "trees": True}, "trees are drafted by layer,"),
        ("x.yaml", {"kind": "block", "inputs": 2, "parallel": True}, "parallel is for kind layer"),
        ("x.yaml", {"kind": "look_up", "sequence_tim": 1}, "sequence_tim: unknown key; did you mean sequence_time"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, method, drafter, said):
    with pytest.raises(InputError, match=said):
        scenario_of(tmp_path, method, drafter)
