"""Constrained decoding: what a grammar's mask costs, and what jumping over what it decides saves."""

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.explain.attribution import latency_terms, total
from infersim.explain.summary import summarize
from infersim.metrics.latency import measure
from infersim.run import run


def one_after_another(n=200, **engine):
    """One sequence at a time, prompts of 100 tokens and outputs of 300."""
    parts = {
        "model": "Llama-3.1-8B",
        "hardware": "h100-sxm",
        "engine": {"max_model_len": 1024, "async_scheduling": False, "enable_prefix_caching": False} | engine,
        "workload": {"num_requests": n, "max_concurrency": 1, "input_tokens": 100, "output_tokens": 300},
    }
    return run(build_scenario(parts, "test"))[0]


def test_a_mask_takes_its_time_in_every_step():
    """Without overlap a sequence's mask adds to each of its tokens."""
    plain, masked = one_after_another(5), one_after_another(5, grammar_mask_time=2e-3)
    found = measure(masked)["mean_tpot_ms"] - measure(plain)["mean_tpot_ms"]
    assert found == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize(("share", "tokens"), [(0.2, 2), (0.5, 4), (0.8, 8)])
def test_jumps_save_the_steps_of_what_the_grammar_decides(share, tokens):
    """Of 300 tokens the share is forced, so as many steps fewer; every token is still computed once."""
    result = one_after_another(jump_forward_share=share, jump_forward_tokens=tokens)
    r = result.requests
    forced = r["num_accepted_tokens"].sum(dtype="i8") / r["num_output_tokens"].sum(dtype="i8")
    spread = np.sqrt(share * tokens / r["num_output_tokens"].sum(dtype="i8"))
    assert forced == pytest.approx(share, abs=4 * spread + tokens / 300)  # a jump may be cut by the end
    assert result.num_steps == r["num_output_tokens"].sum(dtype="i8") - r["num_accepted_tokens"].sum(dtype="i8")
    assert result.num_scheduled_tokens <= len(r) * (100 + 300 - 1)
    assert result.num_scheduled_tokens >= len(r) * (100 + 300 - 1 - tokens)


def test_a_jump_is_nearly_free_where_weights_bind():
    """A step with a jump reads the weights once: the time per output token falls by nearly the share."""
    plain, jumping = one_after_another(50), one_after_another(50, jump_forward_share=0.5)
    ratio = measure(jumping)["mean_tpot_ms"] / measure(plain)["mean_tpot_ms"]
    assert 0.5 < ratio < 0.6
    assert summarize([jumping])["counts"]["completed"] == 50


def test_an_answer_of_one_jump_has_no_gap():
    """Both tokens come in one step, so that there is a time per output token and none between."""
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "simulation": {"seed": 1}}
    parts["engine"] = {"max_model_len": 64, "jump_forward_share": 0.5, "jump_forward_tokens": 1}
    parts["workload"] = {"num_requests": 1, "input_tokens": 5, "output_tokens": 2}
    results = run(build_scenario(parts, "test"))
    document, terms = summarize(results), latency_terms(results[0])
    assert document["metrics"]["mean_tpot_ms"] == 0
    assert total(terms) * 1e3 == pytest.approx(document["metrics"]["mean_e2el_ms"])
    assert document["metrics"]["mean_itl_ms"] is document["metrics"]["p99_itl_ms"] is None


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"jump_forward_share": 0.9, "jump_forward_tokens": 4}, r"must be at most 0.8"),
        ({"jump_forward_share": 0.3, "async_scheduling": True}, r"must be false with jump_forward_share"),
        ({"jump_forward_share": 1}, r"jump_forward_share"),
        ({"grammar_mask_time": -1}, r"grammar_mask_time"),
    ],
)
def test_wrong(engine, message):
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine,
             "workload": {"num_requests": 1, "input_tokens": 10, "output_tokens": 10}}  # fmt: skip
    with pytest.raises(InputError, match=message):
        run(build_scenario(parts, "test"))
