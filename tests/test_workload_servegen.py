"""ServeGen's client models: rates, lengths and burstiness come back."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.workload import Workload
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests

HISTOGRAM = {"10": 0.5, "300": 0.3, "20": 0.2}
CLIENTS = {
    "a": {
        "trace": [[0, 10.0, 2.0, "Gamma", 0.25, 0.4], [600, 0, None, "", None, None], [1200, 2.0, 1, "Gamma", 1.0, 1]],
        "dataset": {
            "0": {"input_tokens": HISTOGRAM, "output_tokens": {"1": 0.5, "9": 0.5}},
            "1200": {"input_tokens": {"7": 1.0}, "output_tokens": {"8": 1.0}},
        },
    },
    "b": {
        "trace": [[0, 5.0, 1.5, "Weibull", 0.7, 0.1]],
        "dataset": {"0": {"input_tokens": {"1000": 1}, "output_tokens": {"0": 1}}},
    },
}


def draw(folder: Path, content: object = CLIENTS, seed: int = 0, **keys) -> Requests:
    (folder / "clients.json").write_text(json.dumps({"clients": content}))
    return build_requests(Workload.validate({"trace": "clients.json"} | keys, "w.yaml"), seed, folder)


def test_each_client_has_its_rate_in_every_window(tmp_path):
    r = draw(tmp_path)
    b = r.prompt_tokens == 1000
    late = r.prompt_tokens == 7
    assert (np.sum(~b & ~late), np.sum(b), np.sum(late)) == (6000, 3000, 1200)
    assert r.arrival[~late].max() <= 600
    assert r.arrival[late].min() > 1199
    assert np.all(np.diff(r.arrival) >= 0)


def test_lengths_follow_the_histogram_and_are_at_least_one(tmp_path):
    r = draw(tmp_path)
    a = r.prompt_tokens[(r.prompt_tokens != 1000) & (r.prompt_tokens != 7)]
    assert np.mean(a == 10) == pytest.approx(0.5, abs=0.03)
    assert np.mean(a == 20) == pytest.approx(0.2, abs=0.03)
    assert set(r.output_tokens[r.prompt_tokens == 1000]) == {1}


def test_long_prompts_have_long_outputs_as_in_the_reference(tmp_path):
    r = draw(tmp_path)
    a = np.isin(r.prompt_tokens, [10, 20, 300])
    assert np.array_equal(r.prompt_tokens[a] > 10, r.output_tokens[a] == 9)
    assert "the same random number" in r.notes[0]


@pytest.mark.parametrize(
    ("pattern", "shape", "cv"),
    [
        ("Gamma", 0.25, 2.0),
        ("Weibull", 0.7, math.sqrt(math.gamma(1 + 2 / 0.7) / math.gamma(1 + 1 / 0.7) ** 2 - 1)),
    ],
)
def test_gaps_have_the_cv_of_their_distribution(tmp_path, pattern, shape, cv):
    client = {"trace": [[0, 100.0, 0, pattern, shape, 1]], "dataset": CLIENTS["b"]["dataset"]}
    gaps = np.diff(draw(tmp_path, {"a": client}).arrival)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_fewer_requests_are_the_first_of_all(tmp_path):
    whole, part = draw(tmp_path), draw(tmp_path, num_requests=4000)
    assert len(part) == 4000
    assert np.array_equal(part.arrival, whole.arrival[:4000])
    assert np.array_equal(part.output_tokens, whole.output_tokens[:4000])


def test_one_clients_draws_do_not_depend_on_the_others(tmp_path):
    both, alone = draw(tmp_path), draw(tmp_path, {"b": CLIENTS["b"]})
    b = both.arrival[both.prompt_tokens == 1000]
    assert b - b[0] == pytest.approx(alone.arrival)


def test_the_published_folder_layout_gives_the_same_requests(tmp_path):
    folder = tmp_path / "m-small"
    folder.mkdir()
    for name, client in zip("01", CLIENTS.values(), strict=True):
        rows = [",".join("" if cell is None else str(cell) for cell in row) for row in client["trace"]]
        (folder / f"chunk-{name}-trace.csv").write_text("\n".join(rows) + "\n")
        dataset = {t: {f: f"{{{', '.join(f'{k}: {v}' for k, v in h.items())}}}" for f, h in fields.items()}
                   for t, fields in client["dataset"].items()}  # fmt: skip
        (folder / f"chunk-{name}-dataset.json").write_text(json.dumps(dataset))
    published = build_requests(Workload.validate({"trace": "m-small"}, "w.yaml"), 0, tmp_path)
    one_file = draw(tmp_path, {str(i): client for i, client in enumerate(CLIENTS.values())})
    for column in ("arrival", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(published, column), getattr(one_file, column))


def changed(**keys) -> dict:
    return {"a": CLIENTS["b"] | keys}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (3, "clients: not a ServeGen client"),
        ({}, "no clients"),
        ({"a": {}}, "clients: not a ServeGen client"),
        (changed(trace=[[0, 1, 2]]), "clients: not a ServeGen client"),
        (changed(trace=[[0, -1, 1, "Gamma", 1, 1]]), "clients: not a ServeGen client"),
        (changed(trace=[[0, 1, 1, "Pareto", 1, 1]]), "clients: not a ServeGen client"),
        (changed(trace=[[0, 0, 1, "Gamma", 1, 1]]), "no client has a rate above 0"),
        (changed(trace=[[0, 9e5, 1, "Gamma", 1, 1]]), "more than 1e+08 requests by 600 s"),
        (changed(dataset={}), "client a: not a ServeGen client"),
        (changed(dataset={"0": {"input_tokens": {"5": 1}}}), "client a: not a ServeGen client"),
        (changed(dataset={"0": {"input_tokens": {"5": -1}, "output_tokens": {"5": 1}}}), "client a: not a ServeGen cl"),
        (changed(dataset={"0": {"input_tokens": {}, "output_tokens": {"5": 1}}}), "client a: not a ServeGen client"),
    ],
)
def test_a_broken_client_is_one_line(tmp_path, content, line):
    with pytest.raises(InputError) as caught:
        draw(tmp_path, content)
    (problem,) = caught.value.problems
    assert problem.removeprefix(f"{tmp_path}/clients.json: ").startswith(line)


def test_a_folder_without_chunks_is_one_line(tmp_path):
    with pytest.raises(InputError, match="a folder without chunk-"):
        build_requests(Workload.validate({"trace": "."}, "w.yaml"), 0, tmp_path)
