"""Real traces against their published statistics."""

import gzip
import json

import numpy as np
import pytest
from shared import SHARED, needs_shared

from infersim.config.resources import load_yaml, packaged
from infersim.config.workload import Workload
from infersim.workload.build import build_requests
from infersim.workload.requests import Requests

pytestmark = needs_shared
FOLDER = SHARED / "data" / "traces"
AZURE, MOONCAKE = "azure2023_conv.csv.gz", "mooncake_conversation.jsonl.gz"
VIDUR, SHAREGPT = "vidur_arxiv_summarization_lengths.csv.gz", "llmservingsim_sharegpt_llama-3.1-8b_300_lengths.csv"
AIBRIX, SERVEGEN = "aibrix_8min_lengths.csv", "servegen_m-large_day1_top15.json.gz"


def read(name: str, **keys) -> Requests:
    return build_requests(Workload.validate({"trace": name} | keys, "w.yaml"), 0, FOLDER)


def summary(tokens: np.ndarray) -> list[float]:
    return [tokens.mean(), *np.percentile(tokens, [50, 90, 99, 100])]


@pytest.mark.parametrize(
    ("name", "keys", "rate", "prompt", "output"),
    [
        (AZURE, {}, 5.530, [1154.7, 1020, 2734, 4142, 14050], [211.1, 129, 424, 601, 1000]),
        (MOONCAKE, {}, 3.401, [12035.1, 6909, 27367, 85400, 126195], [342.6, 350, 597, 1119, 2000]),
        (SHAREGPT, {}, 10.3, [857.5, 732, 1460, 2765, 3998], [652.5, 632, 770, 784, 1021]),
        (VIDUR, {"request_rate": 5}, 5, [2588, 2730, 3702, 3933, 4054], [291, 167, 372, 3271, 4056]),
        (AIBRIX, {}, 4.44, [293.6, 264, 525, 789, 2415], [73.3, 34, 179, 560, 925]),
    ],
)
def test_rate_and_lengths_are_as_published(name, keys, rate, prompt, output):
    r = read(name, **keys)
    assert len(r) / r.arrival[-1] == pytest.approx(rate, rel=2e-3)
    assert summary(r.prompt_tokens) == pytest.approx(prompt, rel=4e-3)
    assert summary(r.output_tokens) == pytest.approx(output, rel=4e-3)


def test_azure_is_as_bursty_as_published():
    r = read(AZURE)
    gaps = np.diff(r.arrival)
    assert len(r) == 19366
    assert gaps.std() / gaps.mean() == pytest.approx(1.094, abs=5e-4)
    for window, dispersion in ((1, 1.39), (10, 4.0), (60, 20.6)):
        counts = np.bincount((r.arrival / window).astype(int))
        assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.01)


def test_mooncake_ticks_are_spread_without_moving_a_request_out_of_its_tick():
    """Literal ticks have 90 % of gaps at 0 and an IAT CV of 3.03; neither is real."""
    r = read(MOONCAKE)
    gaps = np.diff(r.arrival)
    assert gaps.min() > 0
    assert gaps.std() / gaps.mean() < 0.5
    counts = np.bincount((r.arrival / 60).astype(int))
    assert counts.var() / counts.mean() == pytest.approx(2.9, rel=0.05)
    assert any("ticks of 3 s" in note for note in r.notes)


def test_mooncake_segments_give_the_published_prefix_reuse():
    """Leading blocks seen in any earlier request: 36.64 % of blocks, 37.36 % of tokens; 182,790 blocks in all."""
    r = read(MOONCAKE)
    assert np.array_equal(np.add.reduceat(r.segment_lengths, r.segment_offsets[:-1]), r.prompt_tokens)
    assert len(np.unique(r.segment_ids)) == 182_790
    first = np.zeros(len(r.segment_ids), bool)
    first[np.unique(r.segment_ids, return_index=True)[1]] = True  # ids are of whole prefixes: seen once, all before was
    assert np.mean(~first) == pytest.approx(0.3664, abs=5e-5)
    assert r.segment_lengths[~first].sum() / r.segment_lengths.sum() == pytest.approx(0.3736, abs=5e-5)


def test_servegen_has_the_rates_and_mean_lengths_of_its_clients():
    n = 300_000
    r = read(SERVEGEN, num_requests=n)
    whole = read(SERVEGEN, time_scale=2, num_requests=n)
    assert np.array_equal(r.arrival * 2, whole.arrival)
    clients = json.loads(gzip.decompress((FOLDER / SERVEGEN).read_bytes()))["clients"].values()
    expected = sum(row[1] for client in clients for row in client["trace"] if row[0] == 0) * 600
    assert np.searchsorted(r.arrival, 600) == pytest.approx(expected, rel=2e-3)
    weights = tokens = 0
    for client in clients:
        rate = sum(row[1] for row in client["trace"] if row[0] < 600)
        histogram = next(iter(client["dataset"].values()))["input_tokens"]
        weights += rate
        tokens += rate * sum(int(k) * p for k, p in histogram.items()) / sum(histogram.values())
    assert r.prompt_tokens[r.arrival < 600].mean() == pytest.approx(tokens / weights, rel=0.02)


@pytest.mark.parametrize(
    ("name", "trace"), [("chat", AZURE), ("summarisation", VIDUR), ("long-context-chat", MOONCAKE)]
)
def test_packaged_workloads_have_the_lengths_of_the_trace_that_they_name(name, trace):
    w = Workload.validate(load_yaml(packaged("workloads") / f"{name}.yaml"), name)
    drawn, real = build_requests(w, 0, FOLDER), read(trace, request_rate=1)
    for column in ("prompt_tokens", "output_tokens"):
        a, b = getattr(drawn, column), getattr(real, column)
        assert a.mean() == pytest.approx(b.mean(), rel=0.05)
        for q in (10, 50, 90, 99):
            assert np.percentile(a, q) == pytest.approx(np.percentile(b, q), rel=0.1)
