"""Classes of service: limits of each tenant's own, and who is due first goes first."""

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.scenario import build_scenario
from infersim.metrics.tenants import compare_tenants
from infersim.run import run

LIMITS = {"chat": 500, "agent": 2000, "batch": 20000}
DATA = {
    "model": "Llama-3.1-8B",
    "hardware": "h100-sxm",
    "engine": {"max_num_seqs": 1, "max_model_len": 4096, "scheduling_policy": "priority"},
    "workload": {
        "num_requests": 60, "input_tokens": 800, "output_tokens": {"uniform": [1, 40]},
        "tenants": {name: {"goodput": {"ttft_ms": limit}} for name, limit in LIMITS.items()},
    },
}  # fmt: skip


def result(**load):
    return run(build_scenario(DATA | {"workload": DATA["workload"] | load}, ""))[0]


def lateness(answer) -> np.ndarray:
    """s: of each first token behind its limit."""
    r = answer.requests
    return r["first_token"] - r["sent"] - np.array([*LIMITS.values()])[answer.tenant] / 1e3


def test_the_earliest_deadline_first_has_the_least_lateness():
    """All there at once, one at a time: in order of what is due, and no other order's latest is less late (Jackson
    1955); the same draws under first come, first served."""
    due, plain = result(deadline_order=True), result()
    order = np.argsort(due.requests["scheduled"], kind="stable")
    limits = np.array([*LIMITS.values()])[due.tenant]
    assert (np.diff(limits[order][1:]) >= 0).all()  # the first was taken before the others were seen
    assert lateness(due).max() <= lateness(plain).max()
    shares = [compare_tenants(answer)["by_name"]["chat"]["good_share"] for answer in (due, plain)]
    assert shares[0] > shares[1]


def test_shares_within_limits_are_counted_by_tenant():
    answer = result(request_rate=4)
    for number, (name, row) in enumerate(compare_tenants(answer)["by_name"].items()):
        mine = answer.tenant == number
        assert row["good_share"] == pytest.approx((lateness(answer)[mine] <= 0).mean()), name


def test_a_deadline_needs_an_arrival():
    for load in ({"users": 3}, {"tenants": None}, {"max_concurrency": 4}):
        with pytest.raises(InputError, match="deadline_order is for requests of tenants"):
            result(deadline_order=True, **load)
