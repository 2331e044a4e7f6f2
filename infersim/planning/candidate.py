"""A kind of replica that may serve a workload, and what is known of it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from infersim.config.cluster import Cluster
from infersim.config.errors import InputError
from infersim.config.hardware import Hardware
from infersim.config.plan import Plan
from infersim.config.prices import price_of
from infersim.config.scenario import Scenario
from infersim.explain.change import plain
from infersim.explain.cost import fleet, num_gpus

from .bounds import ANY_RATE, Bounds, Lengths, bounds_of
from .decide import Decision, decide, deployed
from .spelling import OWN_PARTS


@dataclass
class Candidate:
    """A kind of replica; `load` is requests per second, or users where the objective counts these."""

    number: int
    scenario: Scenario
    unit: float
    """what the objective adds up, of one replica: USD/h, GPUs or W"""
    most: int
    """replicas within max_gpus and max_power; of `fixed` ones, as many as were asked for"""
    bounds: Bounds | None = None
    """None until it is examined"""
    decisions: dict[tuple[int, float], Decision] = field(default_factory=dict)
    """(replicas, load of all together) -> what came out"""

    @property
    def whole(self) -> bool:
        """Whether it is a cluster of several kinds of replicas, which is taken as it is rather than multiplied."""
        return is_whole(self.scenario)

    @property
    def rate(self) -> float:
        """Requests per second, or users, that one replica can sustain at most; of users nothing is known."""
        return self.bounds.rate if self.bounds and not self.scenario.workload.users else ANY_RATE

    @property
    def least(self) -> int:
        """The fewest replicas that may do."""
        return self.most if is_fixed(self.scenario) else max(1, math.ceil(self.load / self.rate))

    @property
    def load(self) -> float:
        """What the plan asks to serve."""
        return load_of(self.scenario)

    @property
    def gpus(self) -> int:
        return num_gpus(self.scenario) // (1 if self.whole else self.scenario.cluster.replicas)

    @property
    def arrangement(self) -> str:
        """What makes it another deployment, rather than another setting or another number of replicas of one: the
        devices and how they share the model."""
        parts = [self.scenario.hardware.name, self.scenario.parallelism.model_dump_json()]
        return " ".join([*parts, self.scenario.cluster.model_dump_json()] if self.whole else parts)

    def decide(self, replicas: int, load: float, plan: Plan) -> Decision:
        """Each number of replicas and load is simulated once."""
        if (replicas, load) not in self.decisions:
            least = plan.min_goodput_share
            self.decisions[replicas, load] = decide(self.scenario, replicas, load, least)
        return self.decisions[replicas, load]


@dataclass(frozen=True)
class Found:
    """A candidate with enough replicas at a load."""

    candidate: Candidate
    replicas: int
    load: float
    decision: Decision

    def scenario(self, replications: int = 1) -> Scenario:
        """What a run of it is; with those of the decision, the run has its metrics."""
        seed = self.candidate.scenario.simulation.seed
        return deployed(self.candidate.scenario, self.replicas, self.load, seed, replications)

    @property
    def key(self) -> tuple[float, float, int]:
        """Cheapest first; of equals, the largest margin."""
        return self.candidate.unit * self.replicas, -self.decision.margin, self.candidate.number


def is_whole(scenario: Scenario) -> bool:
    """Whether its replicas are of several kinds."""
    return len(scenario.cluster.groups) > 1


def as_one(scenario: Scenario) -> Scenario:
    """The same with the parts of its only kind of replicas as the scenario's own: a plan varies and names these."""
    cluster = scenario.cluster
    if is_whole(scenario) or not cluster.kinds or cluster.kinds[0].served_model_name:
        return scenario
    (kind,) = cluster.kinds
    own = {part: value for part in OWN_PARTS if (value := getattr(kind, part)) is not None}
    given = {key: getattr(cluster, key) for key in cluster.model_fields_set - {"kinds", "replicas"}}
    given |= {key: getattr(kind, key) for key in kind.model_fields_set & {"replicas", "autoscaler"}}
    return scenario.model_copy(update=own | {"cluster": Cluster(**given)})


def is_fixed(scenario: Scenario) -> bool:
    """Whether the plan says how many replicas there are."""
    return is_whole(scenario) or "replicas" in scenario.cluster.model_fields_set


def load_of(scenario: Scenario) -> float:
    """Requests per second, or users: every plan gives one."""
    load = scenario.workload.users or scenario.workload.request_rate
    assert load is not None
    return load


def name_of(scenario: Scenario, replicas: int = 1) -> str:
    """Its devices, in words."""
    if is_whole(scenario):
        return " and ".join(f"{count} {hardware.name}" for hardware, count in fleet(scenario))
    copies = f"{replicas} replicas of " if replicas > 1 else ""
    return f"{copies}{scenario.parallelism.num_gpus} {scenario.hardware.name}"


@dataclass
class Rejected:
    """What was left out before it was simulated: how many by reason, how near the nearest came, what has no price."""

    reasons: Counter[str] = field(default_factory=Counter)
    closest: list[tuple[float, str]] = field(default_factory=list)
    """(floor over limit, in words)"""
    unpriced: set[str] = field(default_factory=set)


def candidates_of(plan: Plan, scenarios: Sequence[Scenario]) -> tuple[list[Candidate], Rejected]:
    """Those with a price and within the budgets, not yet examined, and what became of the others."""
    rejected = Rejected()
    found = [_candidate(number, scenario, plan, rejected) for number, scenario in enumerate(scenarios)]
    return [c for c in found if c], rejected


def _candidate(number: int, scenario: Scenario, plan: Plan, rejected: Rejected) -> Candidate | None:
    one = scenario if is_whole(scenario) else deployed(scenario, 1, 1.0, 0)
    gpus, devices = num_gpus(one), fleet(one)
    unit, watts = (_add(objective, one, devices) for objective in (plan.objective, "energy"))
    if unit is None or (watts is None and plan.max_power):
        rejected.reasons["no price" if unit is None and plan.objective == "cost" else "no power limit known"] += 1
        if plan.objective == "cost":
            rejected.unpriced |= {hardware.name for hardware, _ in devices if not price_of(hardware.name, one.prices)}
        return None
    by_power = int(plan.max_power / watts) if plan.max_power and watts else plan.max_gpus
    asked = 1 if is_whole(scenario) else scenario.cluster.replicas
    most = min(plan.max_gpus // gpus, by_power)
    if most < asked:
        by_gpus = plan.max_gpus // gpus < asked
        rejected.reasons["more GPUs than max_gpus" if by_gpus else "more power than max_power"] += 1
        return None
    return Candidate(number, scenario, unit, asked if is_fixed(scenario) else most)


def examine(c: Candidate, plan: Plan, lengths: dict[str, Lengths], rejected: Rejected) -> bool:
    """Finds its bounds, and whether any of them forbids it. `lengths` are those of workloads seen so far."""
    scenario = c.scenario
    try:
        workload = scenario.workload.model_dump_json()
        if workload not in lengths:
            lengths[workload] = Lengths(scenario.workload, scenario.simulation.seed)
        c.bounds = bounds_of(scenario, lengths[workload])
    except InputError as error:
        modelled = "not modelled yet" in str(error)
        rejected.reasons["not modelled yet" if modelled else "does not fit or is not possible"] += 1
        if not modelled:
            rejected.closest.append((math.inf, error.problems[0]))
        return False
    if violated := c.bounds.violated(scenario.slo.limits):
        key, floor, limit = violated[0]
        rejected.reasons[f"floor of {key}"] += 1
        text = (
            f"{key} cannot be below {plain(floor)} on {name_of(scenario)}, whatever the software, and must be {limit:g}"
        )
        rejected.closest.append((floor / limit, text))
        return False
    most = c.most * c.rate
    if not plan.maximises and most < c.load:
        rejected.reasons["floor of GPU time"] += 1
        text = (
            f"{c.most * c.gpus} {scenario.hardware.name} cannot serve more than {plain(most)} requests/s at peak rates"
        )
        rejected.closest.append((c.load / most, text))
        return False
    return True


def _add(objective: str, scenario: Scenario, devices: list[tuple[Hardware, int]]) -> float | None:
    """What the objective adds up, of all accelerators; None if it is not known of one."""

    def unit(hardware: Hardware) -> float | None:
        if objective == "cost":
            price = price_of(hardware.name, scenario.prices)
            return price.middle if price else None
        return hardware.tdp if objective == "energy" else 1.0

    units = [(unit(hardware), count) for hardware, count in devices]
    return None if any(each is None for each, _ in units) else sum((each or 0.0) * count for each, count in units)
