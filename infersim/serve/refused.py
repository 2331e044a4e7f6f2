"""Of a scenario, what only a run can have."""

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario


def refuse(scenario: Scenario) -> None:
    """InputError for what only a run can have."""
    cluster, problems = scenario.cluster, []
    if cluster.encode is not None:
        problems.append("cluster.encode: is not served: prompts are text, images have no tokens here; must be left out")
    if cluster.role_switch is not None:
        problems.append("cluster.role_switch: is not served; must be left out")
    if any(group.autoscaler and group.autoscaler.policy == "predictive" for group in cluster.groups):
        problems.append("autoscaler.policy: predictive is not served: nobody knows what will come; must be another")
    if any(failure.kind == "partition" and failure.duration is None for failure in cluster.failures):
        problems.append("cluster.failures: a partition for ever is not served; must have a duration")
    if scenario.workload.n > 1 or scenario.workload.beam_width > 1:
        problems.append("workload.n, beam_width: are not served; must be 1: clients ask for n")
    if scenario.engine.stream_interval or scenario.engine.stream_first_token is False:
        problems.append("engine.stream_interval, stream_first_token: are not served; must be left out: clients ask")
    if problems:
        raise InputError(problems)
