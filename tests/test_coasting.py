"""Steps that are made without a look at each request are those that are made one by one, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scenarios
from test_engine_oracle import fleet_of, submit

from infersim.config.scenario import build_scenario
from infersim.engine.fleet import Fleet
from infersim.run import run


def assert_alike(coasting: Fleet, other: Fleet) -> None:
    for name in ("requests", "replicas", "schedulers"):
        ours, theirs = getattr(coasting, name), getattr(other, name)
        for field in ours.dtype.names:
            if field not in LAST_STEP | (set() if coasting.knobs["enable_prefix_caching"].all() else HASHED):
                assert ours[field].tobytes() == theirs[field].tobytes(), f"{name}.{field}"
    assert (coasting.histogram == other.histogram).all()
    assert coasting.steps_priced.tobytes() == other.steps_priced.tobytes()


LAST_STEP = {"coasts", "step", "token_budget"}
"""what only the coasting engine has, and what the step made last leaves and the next one writes anew"""
HASHED = {"num_hashed_blocks"}
"""which nobody asks for without prefix caching"""


@given(
    scenarios(exact=False, may_speculate=False, forks=False), st.floats(1, 40), st.lists(st.floats(0, 1), max_size=3)
)
@settings(deadline=None)
def test_coasting_changes_nothing(scenario, apart, looks):
    """An engine that keeps every gap never coasts. Both are looked at on their way, too."""
    fleets = [fleet_of(scenario, keep_gaps=keep) for keep in (False, True)]
    for fleet in fleets:
        submit(fleet, [r | {"arrival": apart * r["arrival"]} for r in scenario.requests])
    last = apart * max(r["arrival"] for r in scenario.requests)
    for until in [*sorted(look * last for look in looks), np.inf]:
        for fleet in fleets:
            fleet.advance(until)
        assert_alike(*fleets)


@pytest.mark.parametrize("preset", ["vllm-0.11", "vllm-0.33", "trtllm-1.0-no-evict", "vllm-0", "sarathi"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    "load", [{"request_rate": 1.5}, {"request_rate": 12}, {"request_rate": "inf", "max_concurrency": 5}]
)
def test_presets_coast_as_they_step(preset, caching, load):
    if preset in ("vllm-0", "sarathi") and caching:
        pytest.skip("without prefix caching")
    workload = {"input_tokens": 300, "output_tokens": {"uniform": [5, 700]}, "num_requests": 60} | load
    engine = {"preset": preset, "enable_prefix_caching": caching}
    parts = {"model": "Llama-3.1-8B", "hardware": "h100-sxm", "engine": engine, "workload": workload}
    scenario = build_scenario(parts, "test")
    coasting, other = (run(scenario, save_detailed=keep)[0] for keep in (False, True))
    for field in set(coasting.requests.dtype.names) - (set() if caching else HASHED):
        assert coasting.requests[field].tobytes() == other.requests[field].tobytes()
    assert (coasting.itl_histogram == other.itl_histogram).all()
    assert coasting.time_by_resource.tobytes() == other.time_by_resource.tobytes()
    for field in set(coasting.replicas.rows.dtype.names) - LAST_STEP:
        assert coasting.replicas.rows[field].tobytes() == other.replicas.rows[field].tobytes(), field
