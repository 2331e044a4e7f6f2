"""What a search found, as one JSON-ready document."""

from collections.abc import Callable, Sequence
from typing import Any

from infersim.config.plan import Plan
from infersim.config.prices import price_of, quotes
from infersim.config.scenario import Scenario
from infersim.explain.binding import find_binding
from infersim.explain.change import plain
from infersim.explain.cost import cost_of, num_gpus, usd_per_hour
from infersim.explain.summary import finite
from infersim.run import longer

from .candidate import Candidate, Found, Rejected, is_fixed, is_whole, name_of
from .decide import Decision, decide
from .outlook import per_gpu_and_user
from .within import stays, within

SHOWN = 5  # different deployments
FASTEST = 2.0  # times as fast: above, a runner-up is no rival
CLOSE, ABOUT = 0.05, (1,)  # to which a speed is found, and by how many runs: it is no answer, but a hint
LargestLoad = Callable[[Candidate, int, Plan, float], float]


def answer_of(
    plan: Plan,
    scenarios: Sequence[Scenario],
    candidates: list[Candidate],
    rejected: Rejected,
    found: list[Found],
    largest_load: LargestLoad,
) -> dict[str, Any]:
    """The document of `infersim plan --json`. found: best first."""
    others = [one for one in found if one.candidate.arrangement != found[0].candidate.arrangement]
    pairs = [(one, _answer(plan, one, largest_load)) for one in found[:1] + others[:1]]
    if len(pairs) == 2 and others[0].key[0] == found[0].key[0]:  # the same cost: what carries more is better
        pairs.sort(key=lambda pair: -pair[1]["largest_rate"])
    answers = [answer for _, answer in pairs]
    simulated = sorted((c for c in candidates if c.decisions), key=lambda c: c.number)
    same = [one for one in found if pairs and one.key[0] == pairs[0][0].key[0] and one is not pairs[0][0]]
    return finite({
        "schema_version": 1,
        "feasible": bool(found),
        "objective": plan.objective,
        "request_rate": None if plan.maximises else scenarios[0].workload.request_rate,
        "slo": scenarios[0].slo.limits,
        "best": answers[0] if answers else None,
        "runner_up": answers[1] if len(answers) > 1 else None,
        "margin": _margin(answers),
        "stays": stays(plan, pairs[0], pairs[1] if len(pairs) > 1 else None) if pairs else None,
        "to_win": _to_win(plan, *pairs) if len(pairs) > 1 and not plan.maximises else None,
        "deployments": _deployments([one for one, _ in pairs] + found, simulated),
        "equals": [] if plan.maximises else [_deployment(one.scenario()) for one in same],
        "binding": answers[0]["binding"] if answers else _forbids(plan, scenarios[0], simulated, rejected),
        "considered": len(scenarios),
        "simulated": len(simulated),
        "pruned": len(scenarios) - len(simulated),
        "pruned_by": dict(sorted((+rejected.reasons).items())),
        "simulated_candidates": [_trial(c) for c in simulated],
        "prices": _prices(scenarios, rejected),
        "assumed": _assumed(plan, scenarios[0]),
    })  # fmt: skip


def _answer(plan: Plan, found: Found, largest_load: LargestLoad) -> dict[str, Any]:
    """A deployment with its rate, cost, metrics, what binds, and what its prices of a step rest on."""
    c, decision = found.candidate, found.decision
    largest = found.load if plan.maximises else largest_load(c, found.replicas, plan, found.load)
    binding = find_binding(decision.result)
    result = decision.result
    return {
        "deployment": _deployment(found.scenario()),
        "scenario": longer(found.scenario(decision.replications), decision.num_requests).resolved(),
        "rate": found.load,
        "largest_rate": largest,
        "headroom": largest / found.load - 1,
        "cost": cost_of(result, decision.metrics),
        "metrics": decision.metrics,
        "limits": decision.limits,
        "replications": decision.replications,
        "slo_met": decision.met,
        "model_error": within(decision, found.load, largest),
        "efficiencies": [
            {"operator": f"{row['operator']} {row['dtype']}".strip(), "provenance": row["provenance"],
             "source": str(row["source"]).partition(":")[0]}
            for row in result.provenance
        ],
        "binding": {
            "limit": _first_to_break(c, found.replicas, largest),
            "resource": binding.name,
            "text": binding.text,
            "ceiling": binding.ceiling,
        },
    }  # fmt: skip


def _first_to_break(c: Candidate, replicas: int, load: float) -> str:
    """Which limit the lowest load that was tried above the largest one broke; without any, the tightest there."""
    tried = {r: decision for (n, r), decision in c.decisions.items() if n == replicas}
    above = sorted(r for r in tried if r > load and not tried[r].met)
    if not above:
        return tried[load].tightest["name"]
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
        "cluster": scenario.cluster.model_dump(mode="json") if is_whole(scenario) else None,
    }


def _deployments(found: list[Found], simulated: list[Candidate]) -> list[dict[str, Any]]:
    """The best different deployments: those that hold the SLO, cheapest first, then those that come nearest to it.

    Each has `deployment`, `usd_per_hour`, `tightest` (the mean of that limit over what is allowed), `holds`, and in
    words `misses`, what breaks.
    """
    shown: dict[str, dict[str, Any]] = {}
    for one in found:
        row = _row(one.scenario(), one.load, one.decision)
        shown.setdefault(one.candidate.arrangement, row)
    nearest: dict[str, tuple[Any, dict[str, Any]]] = {}
    for c in simulated:
        for (replicas, load), decision in c.decisions.items():
            key = (not decision.saturated, decision.margin, replicas)
            if not decision.met and (c.arrangement not in nearest or key > nearest[c.arrangement][0]):
                row = _row(Found(c, replicas, load, decision).scenario(), load, decision)
                nearest[c.arrangement] = key, row
    missed = [row for arrangement, (_, row) in nearest.items() if arrangement not in shown]
    missed.sort(key=lambda row: (row["saturated"], row["tightest"]))
    return [*shown.values(), *missed][:SHOWN]


def _row(scenario: Scenario, load: float, decision: Decision) -> dict[str, Any]:
    return {
        "deployment": _deployment(scenario),
        "usd_per_hour": usd_per_hour(scenario),
        "rate": load,
        "tightest": 1 - decision.margin,
        "saturated": decision.saturated,
        "holds": decision.met,
        "misses": [] if decision.met else _misses(load, decision),
    }


def _misses(load: float, decision: Decision) -> list[str]:
    """What a deployment does not hold, each in a few words."""
    if decision.saturated:
        return [f"completes {plain(decision.rate, 3)} of {load:g} requests/s"]
    over = [f"{x['name']} {plain(x['mean'])} > {x['limit']:g}" for x in decision.limits if x["mean"] > x["limit"]]
    return (
        over
        or [
            f"{x['name']} of 1 run in 100 {plain(x['run_upper'])} > {x['limit']:g}"
            for x in decision.limits
            if not x["met"]
        ]
        or ["too short to tell"]
    )


def _trial(c: Candidate) -> dict[str, Any]:
    return {
        "deployment": _deployment(c.scenario),
        "rates": [
            {
                "replicas": replicas,
                "rate": load,
                "state": d.state,
                "saturated": d.saturated,
                "limits": {x["name"]: x["mean"] for x in d.limits},
                "tightest": 1 - d.margin,
                "gpus": replicas * c.gpus,
                "usd_per_hour": usd_per_hour(d.result.scenario),
                **per_gpu_and_user(d.metrics, replicas * c.gpus),
            }
            for (replicas, load), d in sorted(c.decisions.items())
        ],
    }


def _hourly(answer: dict[str, Any]) -> float | None:
    usd = answer["cost"]["usd_per_hour"]
    return sum(usd) / 2 if usd else None


def _margin(answers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """By how much the runner-up is dearer, and what more it carries."""
    if len(answers) < 2:
        return None
    best, other = answers
    return {
        "cost": dear / cheap - 1 if (dear := _hourly(other)) and (cheap := _hourly(best)) else None,
        "gpus": other["cost"]["gpus"] - best["cost"]["gpus"],
        "largest_rate": other["largest_rate"] / best["largest_rate"] - 1 if best["largest_rate"] else None,
    }


def _to_win(plan: Plan, best: tuple[Found, dict[str, Any]], other: tuple[Found, dict[str, Any]]) -> dict[str, Any]:
    """What would make the runner-up the answer. None: not by that alone.

    `usd_per_hour`: its accelerator cheaper than this; `rate`: more than this, which the best does not hold and it does;
    `carry`: so many times what it carries, if it costs the same; `speed`: memory, arithmetic and links so many times as
    fast, at most twice, so that fewer replicas do.
    """
    one, two = best[0], other[0]
    device, rival = (found.candidate.scenario.hardware.name for found in (one, two))
    price = price_of(rival, two.candidate.scenario.prices)
    alone = plan.objective == "cost" and price and device != rival and not two.candidate.whole
    rate = best[1]["largest_rate"]
    return {
        "device": rival,
        "usd_per_hour": price.middle * one.key[0] / two.key[0] if price and alone else None,
        "rate": rate if other[1]["largest_rate"] > rate else None,
        "carry": rate / other[1]["largest_rate"] if one.key[0] == two.key[0] else None,
        "speed": _speed(plan, one, two),
    }


def _speed(plan: Plan, best: Found, other: Found) -> float | None:
    c, load = other.candidate, other.load
    replicas = min(int((best.key[0] - 1e-9) / c.unit), other.replicas - 1)
    if replicas < 1 or is_fixed(c.scenario):
        return None
    low, high = 1.0, FASTEST

    def holds(times: float) -> bool:
        faster = longer(_faster(c.scenario, times), other.decision.num_requests)
        return decide(faster, replicas, load, plan.min_goodput_share, ABOUT).met

    if not holds(high):
        return None
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _faster(scenario: Scenario, times: float) -> Scenario:
    """The same on a device whose memory, arithmetic and links are so many times as fast."""
    device = scenario.hardware
    update = {
        "memory_bandwidth": device.memory_bandwidth * times,
        "flops": {dtype: rate * times for dtype, rate in device.flops.items()},
        "link": device.link.model_copy(update={"bandwidth": device.link.bandwidth * times}),
    }
    return scenario.model_copy(update={"hardware": device.model_copy(update=update)})


def _forbids(plan: Plan, base: Scenario, simulated: list[Candidate], rejected: Rejected) -> dict[str, Any]:
    """Why nothing holds the SLO: the nearest miss of a simulation, or the floor that comes nearest to allowing it."""
    tried = [(d, c, n) for c in simulated for (n, _), d in c.decisions.items()]
    if tried:
        decision, c, replicas = min(tried, key=lambda one: (one[0].saturated, -one[0].margin))
        x = decision.tightest
        limits = " and ".join([f"{plan.max_gpus} GPUs", *([f"{plan.max_power / 1e3:g} kW"] if plan.max_power else [])])
        text = (
            f"the nearest is {name_of(c.scenario, replicas)}: {', '.join(_misses(c.load, decision))}"
            if not decision.saturated
            else f"none of at most {limits} keeps up with {base.workload.request_rate:g} requests/s"
        )
        return {"limit": x["name"], "resource": "simulation", "text": text, "ceiling": ""}
    if rejected.closest:
        text = min(rejected.closest)[1]
    elif rejected.unpriced:
        text = f"no candidate has a price: {_unpriced(base, rejected)}"
        return {"limit": None, "resource": "price", "text": text, "ceiling": ""}
    else:
        text = "every candidate was left out: " + ", ".join(f"{n:,} {why}" for why, n in (+rejected.reasons).items())
    return {"limit": None, "resource": "floor", "text": text, "ceiling": ""}


def _prices(scenarios: Sequence[Scenario], rejected: Rejected) -> dict[str, Any]:
    """`kind`; `of`: the price of each device, its source and date; `missing`: in words, which have none."""
    prices = scenarios[0].prices
    devices = sorted({hardware.name for scenario in scenarios for hardware in scenario.devices})
    known = {device: price for device in devices if (price := price_of(device, prices))}
    return {
        "kind": prices.kind,
        "of": {device: {"usd": [p.low, p.high], "source": p.source} for device, p in known.items()},
        "missing": _unpriced(scenarios[0], rejected) if rejected.unpriced else None,
    }


def _unpriced(scenario: Scenario, rejected: Rejected) -> str:
    devices, kind = sorted(rejected.unpriced), scenario.prices.kind
    others = [f"{device} has {', '.join(kinds)}" for device in devices
              if (kinds := dict.fromkeys(quote.kind for quote in quotes().get(device, ())))]  # fmt: skip
    known = f"; {'; '.join(others)} (--price-kind)" if others else ""
    return f"no {kind} quote for {', '.join(devices)}; give your own, --price {devices[0]}=USD{known}"


def _assumed(plan: Plan, base: Scenario) -> list[str]:
    load = base.workload
    each = (
        "the whole trace"
        if load.trace
        else f"{load.num_requests:,} requests"
        if load.num_requests
        else f"{load.duration:g} s"
    )
    each = f"each of {each}" + ("" if load.trace else ", or more until they tell whether it lasts")
    met = f"an SLO is met if one more run would meet it with 99 % confidence, {each}"
    lines = [f"the objective counts the middle of the price range; {met}" if plan.objective == "cost" else met]
    if plan.objective == "energy" or plan.max_power:
        lines.append("power is that of GPUs at their limit all the time, without hosts, switches and cooling")
    return lines
