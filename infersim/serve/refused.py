"""Of a scenario, what only a run can have."""

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario


def refuse(scenario: Scenario) -> None:
    """InputError for what only a run can have."""
    cluster, problems = scenario.cluster, []
    for name in ("encode", "kv_store"):
        if getattr(cluster, name) is not None:
            problems.append(f"cluster.{name}: is not served; must be left out, or use `infersim run`")
    if any(group.autoscaler and group.autoscaler.policy == "predictive" for group in cluster.groups):
        problems.append("autoscaler.policy: predictive is not served: nobody knows what will come; must be another")
    if cluster.transfer and isinstance(cluster.transfer.hand_over, int):
        problems.append("cluster.transfer.hand_over: a number is not served; must be always or never")
    if any(failure.kind == "partition" and failure.duration is None for failure in cluster.failures):
        problems.append("cluster.failures: a partition for ever is not served; must have a duration")
    if scenario.workload.n > 1 or scenario.workload.beam_width > 1:
        problems.append("workload.n, beam_width: are not served; must be 1: clients ask for n")
    if cluster.router.signal_age:
        problems.append("cluster.router.signal_age: is not served; must be 0")
    if scenario.engine.stream_interval or scenario.engine.stream_first_token is False:
        problems.append("engine.stream_interval, stream_first_token: are not served; must be left out")
    if problems:
        raise InputError(problems)
