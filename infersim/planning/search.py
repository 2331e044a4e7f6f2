"""The cheapest deployment that holds an SLO: candidates in order of a lower bound on their cost, simulated until the
next one cannot be cheaper."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infersim.config.errors import InputError
from infersim.config.hardware import Hardware
from infersim.config.plan import Plan, load_plan
from infersim.config.scenario import Given, Scenario
from infersim.explain.binding import find_binding
from infersim.explain.cost import cost_of, fleet, num_gpus, usd_per_hour
from infersim.explain.summary import finite

from .bounds import Bounds, Lengths, bounds_of
from .decide import Decision, decide, deployed, longer
from .outlook import per_gpu_and_user

OVERLOAD = 1.1  # a replica that completes x requests/s under overload sustains at most this times x
PRECISION = 0.02  # of the largest rate
STEP = 1.25  # by which a rate that is held is raised to find one that is not
LOWEST = 1e-3  # requests/s: below, a deployment holds the SLO at no rate
Progress = Callable[[int, int], None]
"""called with trials made and trials known to be left"""


@dataclass
class Candidate:
    """A kind of replica, and what is known of it."""

    number: int
    scenario: Scenario
    bounds: Bounds
    unit: float
    """what the objective adds up, of one replica: USD/h, GPUs or W"""
    decisions: dict[tuple[int, float], Decision] = field(default_factory=dict)
    """(replicas, requests per second of all together) -> what came out"""

    @property
    def whole(self) -> bool:
        """Whether it is a cluster of several kinds of replicas, which is taken as it is rather than multiplied."""
        return len(self.scenario.cluster.groups) > 1

    @property
    def gpus(self) -> int:
        return num_gpus(self.scenario) // (1 if self.whole else self.scenario.cluster.replicas)

    def most_replicas(self, plan: Plan) -> int:
        return 1 if self.whole else plan.max_gpus // self.gpus

    @property
    def arrangement(self) -> tuple[str, str]:
        """What makes it another deployment, rather than another setting of one: the devices and how they share it."""
        cluster = self.scenario.cluster.model_dump_json() if self.whole else ""
        return self.scenario.hardware.name, self.scenario.parallelism.model_dump_json() + cluster

    def decide(self, replicas: int, rate: float, plan: Plan) -> Decision:
        """Each number of replicas and rate is simulated once."""
        if (replicas, rate) not in self.decisions:
            self.decisions[replicas, rate] = decide(self.scenario, replicas, rate, plan.min_goodput_share)
        return self.decisions[replicas, rate]


@dataclass(frozen=True)
class Found:
    """A candidate with enough replicas at a rate."""

    candidate: Candidate
    replicas: int
    rate: float
    decision: Decision

    @property
    def arrangement(self) -> tuple[str, str, int]:
        return *self.candidate.arrangement, self.replicas

    @property
    def deployed(self) -> Scenario:
        return self.scenario()

    def scenario(self, replications: int = 1) -> Scenario:
        """What a run of it is; with those of the decision, the run has its metrics."""
        seed = self.candidate.scenario.simulation.seed
        return deployed(self.candidate.scenario, self.replicas, self.rate, seed, replications)

    @property
    def key(self) -> tuple[float, float, int]:
        """Cheapest first; of equals, the largest margin."""
        return self.candidate.unit * self.replicas, -self.decision.margin, self.candidate.number


def plan(given: Given, overrides: Sequence[str] = (), progress: Progress | None = None) -> dict[str, Any]:
    """The answer to a plan file, JSON-ready. InputError for what is no plan."""
    return search(*load_plan(given, overrides), progress)


def search(plan: Plan, scenarios: Sequence[Scenario], progress: Progress | None = None) -> dict[str, Any]:
    """`feasible`, `best` and `runner_up` (deployment, rate, cost, metrics, slo_met), `binding`, and how many candidates
    were considered, simulated and pruned, by reason."""
    pruned: Counter[str] = Counter()
    closest: list[tuple[float, str]] = []
    lengths: dict[str, Lengths] = {}
    candidates = [c for i, s in enumerate(scenarios) if (c := _candidate(i, s, plan, lengths, pruned, closest))]
    found = _most(plan, candidates, pruned, progress) if plan.objective == "goodput" else _cheapest(
        plan, candidates, pruned, progress
    )  # fmt: skip
    others = [one for one in found if one.arrangement != found[0].arrangement]
    answers = [_answer(plan, one) for one in found[:1] + others[:1]]
    if len(answers) == 2 and others[0].key[0] == found[0].key[0]:  # the same cost: what carries more is better
        answers.sort(key=lambda answer: -answer["largest_rate"])
    simulated = [c for c in candidates if c.decisions]
    return finite({
        "schema_version": 1,
        "feasible": bool(found),
        "objective": plan.objective,
        "request_rate": None if plan.objective == "goodput" else scenarios[0].workload.request_rate,
        "slo": scenarios[0].slo.limits,
        "best": answers[0] if answers else None,
        "runner_up": answers[1] if len(answers) > 1 else None,
        "margin": _margin(answers),
        "equals": [_deployment(one.deployed) for one in found[1:] if one.key[0] == found[0].key[0]],
        "binding": answers[0]["binding"] if answers else _forbids(plan, scenarios[0], simulated, closest),
        "considered": len(scenarios),
        "simulated": len(simulated),
        "pruned": len(scenarios) - len(simulated),
        "pruned_by": dict(sorted((+pruned).items())),
        "simulated_candidates": [_trial(c) for c in sorted(simulated, key=lambda c: c.number)],
        "assumed": _assumed(plan, scenarios[0]),
    })  # fmt: skip


def _candidate(
    number: int,
    scenario: Scenario,
    plan: Plan,
    lengths: dict[str, Lengths],
    pruned: Counter[str],
    closest: list[tuple[float, str]],
) -> Candidate | None:
    """The candidate, unless a floor forbids it. `lengths` are those of workloads seen so far."""
    one = scenario if len(scenario.cluster.groups) > 1 else deployed(scenario, 1, 1.0, 0)
    gpus, units = num_gpus(one), [_unit(plan.objective, hardware) for hardware, _ in fleet(one)]
    if None in units:
        pruned["no price" if plan.objective == "cost" else "no power limit known"] += 1
        return None
    if gpus > plan.max_gpus:
        pruned["more GPUs than max_gpus"] += 1
        return None
    try:
        workload = scenario.workload.model_dump_json()
        if workload not in lengths:
            lengths[workload] = Lengths(scenario.workload, scenario.simulation.seed)
        bounds = bounds_of(scenario, lengths[workload])
    except InputError as error:
        modelled = "not modelled yet" in str(error)
        pruned["not modelled yet" if modelled else "does not fit or is not possible"] += 1
        if not modelled:
            closest.append((math.inf, error.problems[0]))
        return None
    if violated := bounds.violated(scenario.slo.limits):
        key, floor, limit = violated[0]
        pruned[f"floor of {key}"] += 1
        text = f"{key} cannot be below {floor:.4g} on {_name(scenario)}, whatever the software, and must be {limit:g}"
        closest.append((floor / limit, text))
        return None
    most, rate = plan.max_gpus // gpus * bounds.rate, _rate(scenario)
    if plan.objective != "goodput" and most < rate:
        pruned["floor of GPU time"] += 1
        all_gpus = f"{plan.max_gpus // gpus * gpus} {scenario.hardware.name}"
        text = f"{all_gpus} cannot serve more than {most:.4g} requests/s at peak rates"
        closest.append((rate / most, text))
        return None
    unit = sum((each or 0.0) * count for each, (_, count) in zip(units, fleet(one), strict=True))  # all are known
    return Candidate(number, scenario, bounds, unit)


def _rate(scenario: Scenario) -> float:
    """Requests per second to serve, which every plan gives."""
    assert scenario.workload.request_rate is not None
    return scenario.workload.request_rate


def _unit(objective: str, hardware: Hardware) -> float | None:
    """What the objective adds up, of one accelerator; None if it is not known."""
    if objective == "cost":
        return (hardware.price.low + hardware.price.high) / 2 if hardware.price else None
    return hardware.tdp if objective == "energy" else 1.0


def _cheapest(plan: Plan, candidates: list[Candidate], pruned: Counter[str], progress: Progress | None) -> list[Found]:
    """Best first: the queue holds each candidate with the fewest replicas that may do; failing, it comes back with
    more. What comes off the queue and holds the SLO is the cheapest, and the next one the runner-up."""
    queue: list[tuple[float, int, int, Candidate]] = []
    for c in candidates:
        replicas = max(1, math.ceil(_rate(c.scenario) / c.bounds.rate))
        heapq.heappush(queue, (c.unit * replicas, c.number, replicas, c))
    found: list[Found] = []
    trials = 0
    while queue:
        cost, _, replicas, c = queue[0]
        second = [one for one in found if one.arrangement != found[0].arrangement]
        if second and cost > second[0].key[0]:
            break
        heapq.heappop(queue)
        if found and cost > found[0].key[0] and (*c.arrangement, replicas) == found[0].arrangement:
            continue  # no runner-up
        rate = _rate(c.scenario)
        decision = c.decide(replicas, rate, plan)
        trials += 1
        if progress:
            progress(trials, len(queue))
        if decision.met:
            found = sorted([*found, Found(c, replicas, rate, decision)], key=lambda one: one.key)
            continue
        more = replicas + 1
        if decision.saturated and decision.rate:
            more = max(more, math.ceil(replicas * rate / (OVERLOAD * decision.rate)))
        if more * c.gpus <= plan.max_gpus and not c.whole:
            heapq.heappush(queue, (c.unit * more, c.number, more, c))
    pruned["a lower bound on its cost is above the answer's"] += len({c.number for *_, c in queue if not c.decisions})
    return found


def _most(plan: Plan, candidates: list[Candidate], pruned: Counter[str], progress: Progress | None) -> list[Found]:
    """The largest rate on max_gpus: candidates in order of an upper bound on it, each tried at the second best rate so
    far first."""
    found: list[Found] = []
    ranked = sorted(candidates, key=lambda c: (-(c.most_replicas(plan)) * c.bounds.rate, c.number))
    for i, c in enumerate(ranked):
        replicas = c.most_replicas(plan)
        to_beat = found[1].rate if len(found) > 1 else 0.0
        if replicas * c.bounds.rate <= to_beat:
            pruned["an upper bound on its rate is below the answer's"] += len(ranked) - i
            break
        if progress:
            progress(i, len(ranked) - i)
        if to_beat and not c.decide(replicas, to_beat, plan).met:
            continue
        rate = largest_rate(c, replicas, plan, to_beat)
        if rate > 0:
            found.append(Found(c, replicas, rate, c.decide(replicas, rate, plan)))
            found.sort(key=lambda one: (-one.rate, one.candidate.number))
    return found


def largest_rate(c: Candidate, replicas: int, plan: Plan, held: float) -> float:
    """The largest rate of so many replicas that holds the SLO, to 2 %: bisection from `held` (0: none known), which it
    first tries to exceed by steps, to a bound."""
    low, high = held, replicas * c.bounds.rate
    while low and low < high:
        step = min(low * STEP, high)
        if not c.decide(replicas, step, plan).met:
            high = step
            break
        low = step
    while high - low > PRECISION * high and high > LOWEST:
        middle = math.sqrt(low * high) if low else high / 2
        decision = c.decide(replicas, middle, plan)
        if decision.met:
            low = middle
        else:
            high = max(low, min(middle, decision.rate * OVERLOAD)) if decision.saturated else middle
    return low


def _answer(plan: Plan, found: Found) -> dict[str, Any]:
    """A deployment with its rate, cost, metrics and what binds."""
    c, decision = found.candidate, found.decision
    largest = found.rate if plan.objective == "goodput" else largest_rate(c, found.replicas, plan, found.rate)
    binding = find_binding(decision.result)
    result = decision.result
    return {
        "deployment": _deployment(found.deployed),
        "scenario": longer(found.scenario(decision.replications), decision.num_requests).resolved(),
        "rate": found.rate,
        "largest_rate": largest,
        "headroom": largest / found.rate - 1,
        "cost": cost_of(result, decision.metrics),
        "metrics": decision.metrics,
        "limits": decision.limits,
        "replications": decision.replications,
        "slo_met": decision.met,
        "binding": {
            "limit": _first_to_break(c, found.replicas, largest),
            "resource": binding.name,
            "text": binding.text,
            "ceiling": binding.ceiling,
        },
    }


def _first_to_break(c: Candidate, replicas: int, rate: float) -> str:
    """Which limit the lowest rate that was tried above the largest one broke; without any, the tightest there."""
    tried = {r: decision for (n, r), decision in c.decisions.items() if n == replicas}
    above = sorted(r for r in tried if r > rate and not tried[r].met)
    if not above:
        return tried[rate].tightest["name"]
    decision = tried[above[0]]
    return "throughput" if decision.saturated else decision.tightest["name"]


def _deployment(scenario: Scenario) -> dict[str, Any]:
    return {
        "model": scenario.model,
        "hardware": scenario.hardware.name,
        "gpus": num_gpus(scenario),
        "replicas": scenario.cluster.replicas,
        "parallelism": scenario.parallelism.model_dump(mode="json"),
        "precision": scenario.precision.model_dump(mode="json"),
        "engine": scenario.engine.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        | {"preset": scenario.engine.preset},
        "speculation": scenario.speculation and scenario.speculation.model_dump(mode="json", exclude_none=True),
        "early_exit": scenario.early_exit and scenario.early_exit.model_dump(mode="json", exclude_none=True),
        "router": scenario.cluster.router.policy,
        "cluster": scenario.cluster.model_dump(mode="json") if len(scenario.cluster.groups) > 1 else None,
    }


def _trial(c: Candidate) -> dict[str, Any]:
    return {
        "deployment": _deployment(c.scenario),
        "rates": [
            {
                "replicas": replicas,
                "rate": rate,
                "state": d.state,
                "saturated": d.saturated,
                "limits": {x["name"]: x["mean"] for x in d.limits},
                "tightest": 1 - d.margin,
                "gpus": replicas * c.gpus,
                "usd_per_hour": usd_per_hour(d.result.scenario),
                **per_gpu_and_user(d.metrics, replicas * c.gpus),
            }
            for (replicas, rate), d in sorted(c.decisions.items())
        ],
    }


def _margin(answers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """By how much the runner-up is dearer, and what more it carries."""
    if len(answers) < 2:
        return None
    best, other = answers

    def hourly(answer: dict[str, Any]) -> float | None:
        usd = answer["cost"]["usd_per_hour"]
        return sum(usd) / 2 if usd else None

    return {
        "cost": dear / cheap - 1 if (dear := hourly(other)) and (cheap := hourly(best)) else None,
        "gpus": other["cost"]["gpus"] - best["cost"]["gpus"],
        "largest_rate": other["largest_rate"] / best["largest_rate"] - 1 if best["largest_rate"] else None,
    }


def _forbids(
    plan: Plan, base: Scenario, simulated: list[Candidate], closest: list[tuple[float, str]]
) -> dict[str, Any]:
    """Why nothing holds the SLO: the nearest miss of a simulation, or the floor that comes nearest to allowing it."""
    tried = [(d, c) for c in simulated for d in c.decisions.values()]
    if tried:
        decision, c = min(tried, key=lambda pair: (pair[0].saturated, -pair[0].margin))
        x = decision.tightest
        text = (
            f"the nearest is {_name(c.scenario)}: {x['name']} {x['mean']:.4g} against a limit of {x['limit']:g}"
            if not decision.saturated
            else f"none of at most {plan.max_gpus} GPUs keeps up with {base.workload.request_rate:g} requests/s"
        )
        return {"limit": x["name"], "resource": "simulation", "text": text, "ceiling": ""}
    text = min(closest)[1] if closest else "no candidate is modelled"
    return {"limit": None, "resource": "floor", "text": text, "ceiling": ""}


def _name(scenario: Scenario) -> str:
    if len(scenario.cluster.groups) > 1:
        return " + ".join(f"{count} x {hardware.name}" for hardware, count in fleet(scenario))
    return f"{scenario.parallelism.num_gpus} x {scenario.hardware.name}"


def _assumed(plan: Plan, base: Scenario) -> list[str]:
    count = base.workload.num_requests
    each = (
        f"each of {count:,} requests, or more until they tell whether it lasts" if count else "each of the whole trace"
    )
    lines = [
        "the objective counts the middle of the price range; an SLO is met if one more run would meet it with 99 %"
        f" confidence, {each}",
    ]
    if plan.objective == "energy":
        lines.append("energy is that of GPUs at their power limit all the time")
    return lines
