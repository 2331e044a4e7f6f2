"""Scenarios side by side under common random numbers, and why they differ."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infersim.config.errors import InputError
from infersim.config.scenario import Given, Scenario, load_scenario, load_variants, name_of
from infersim.explain.attribution import (
    Terms,
    divide_sum,
    latency_terms,
    phase_of,
    ratio_factors,
    row_of,
    throughput_terms,
    total,
)
from infersim.explain.change import explain_change
from infersim.explain.cost import cost_of
from infersim.explain.summary import finite, summarize
from infersim.explain.techniques import label
from infersim.explain.work import RunWork
from infersim.metrics.confidence import LEVEL, combine
from infersim.metrics.latency import measure
from infersim.metrics.result import Result
from infersim.run import is_drawn, run

from .limits import with_limits
from .spelling import changed_parts, spelled_out

REPLICATIONS = 5  # where the scenario asks for one only and has something to draw
MAX_CHANGES = 4  # so many settings are exchanged one by one: 2**4 runs
NOISE = 1e-12  # of the whole: a difference below it is rounding
NEXT_KEY = re.compile(r",\s*(?=[A-Za-z_][\w.]*=)")


def load_compared(names: Sequence[Given], settings: Sequence[str] = ()) -> list[tuple[str, Scenario]]:
    """(name, scenario) of what `infersim compare` is asked to compare: the first is what others are compared with.

    Several files, with `settings` in all of them; or one file as it is, and one variant of it per setting, where one
    setting may hold several, `a.b=1,c.d=2`. InputError with less than two.
    """
    if len(names) > 1:
        scenarios = [load_scenario(name, settings) for name in names]
        labels = [name_of(name) for name in names]
        if len(set(labels)) < len(labels):
            labels = [
                str(name) if isinstance(name, str | Path) else f"{name_of(name)} {i}" for i, name in enumerate(names, 1)
            ]
        return list(zip(labels, scenarios, strict=True))
    if not settings:
        raise InputError(
            "compare: has one scenario only; must be several, or one with --set for each variant,"
            " such as --set precision.kv_cache=fp8"
        )
    variants = load_variants(names[0], [[], *(NEXT_KEY.split(setting) for setting in settings)])
    return list(zip([name_of(names[0]), *settings], variants, strict=True))


def compare(scenarios: Sequence[tuple[str, Scenario]]) -> dict[str, Any]:
    """`variants`, each with its answer and work, and `differences` of each from the first, JSON-ready.

    Every variant runs the same seeds. Times are in ms. InputError if one of them cannot run.
    """
    return compare_runs(scenarios, run_all(scenarios))


def run_all(scenarios: Sequence[tuple[str, Scenario]]) -> list[list[Result]]:
    """The replications of each scenario, with the same seeds."""
    replications = max(scenario.simulation.replications for _, scenario in scenarios)
    if replications == 1 and all(is_drawn(scenario.workload) for _, scenario in scenarios):
        replications = REPLICATIONS
    seed = scenarios[0][1].simulation.seed
    runs: list[list[Result]] = []
    for name, scenario in scenarios:
        simulation = scenario.simulation.model_copy(update={"seed": seed, "replications": replications})
        try:
            runs.append(run(scenario.model_copy(update={"simulation": simulation})))
        except InputError as error:
            raise InputError(f"{name}: {problem}" for problem in error.problems) from None
        if runs[-1][-1].interrupted:
            raise KeyboardInterrupt
        if not runs[-1][0].measured.any():
            raise InputError(f"{name}: no request was completed, so there is nothing to compare; see infersim run")
    return runs


def compare_runs(scenarios: Sequence[tuple[str, Scenario]], runs: list[list[Result]]) -> dict[str, Any]:
    """The document of `compare`, from the runs of `run_all`."""
    names = [name for name, _ in scenarios]
    variants = [_variant(name, results) for name, results in zip(names, runs, strict=True)]
    return finite({
        "schema_version": 1,
        "seeds": [result.seed for result in runs[0]],
        "variants": variants,
        "differences": [_difference(variants, runs, i) for i in range(1, len(runs))],
    })  # fmt: skip


def _variant(name: str, results: list[Result]) -> dict[str, Any]:
    answer = with_limits(summarize(results), results[0])
    cost = cost_of(results[0], answer["metrics"])
    return {"name": name, "answer": answer, "work": RunWork(results[0]).facts(), "cost": cost}


def _difference(variants: list[dict[str, Any]], runs: list[list[Result]], i: int) -> dict[str, Any]:
    one, other = runs[0], runs[i]
    binding, costs = variants[i]["answer"]["explain"]["binding"], [variants[j]["cost"] for j in (0, i)]
    metrics = _metric_differences(one, other)
    changes = changed_parts(*spelled_out([one[0], other[0]]))
    a, b = _mean_terms(one, latency_terms), _mean_terms(other, latency_terms)
    noise = NOISE * (total(a) + total(b))
    parts = {
        name: {factor: part if abs(part) > noise else 0.0 for factor, part in factors.items()}
        for name, factors in divide_sum(a, b).items()
    }
    x, y = _mean_terms(one, throughput_terms), _mean_terms(other, throughput_terms)
    words = explain_change(parts, total(a), total(b), metrics["mean_e2el_ms"]["clear"], binding, costs)
    return {
        "variant": variants[i]["name"],
        "against": variants[0]["name"],
        "changes": {key: [_short(x), _short(y)] for key, (x, y) in changes.items()},
        "techniques": label(_leaves(changes)),
        "metrics": metrics,
        "latency": {
            "metric": "mean_e2el_ms",
            "difference": (total(b) - total(a)) * 1e3 if abs(total(b) - total(a)) > noise else 0.0,
            "terms": [
                {
                    "term": row_of(name),
                    "phase": phase_of(name),
                    "before": math.prod(a[name].values()) * 1e3,
                    "after": math.prod(b[name].values()) * 1e3,
                    "difference": math.fsum(factors.values()) * 1e3,
                    "factors": {factor: part * 1e3 for factor, part in factors.items()},
                }
                for name, factors in parts.items()
            ],
        },
        "throughput": {
            "metric": "output_throughput",
            "ratio": total(x) / total(y),
            "factors": {name: 1 / factor for name, factor in ratio_factors(x, y).items()},
        },
        "one_by_one": _one_by_one(one[0].scenario, other[0].scenario, list(changes)),
        **(words if changes else words | {"why": "no difference: both are the same deployment"}),
        "gpus": [cost["gpus"] for cost in costs],
    }


def _mean_terms(results: list[Result], terms_of: Callable[[Result], Terms]) -> Terms:
    """The terms of the replications' mean: each term's mean, its factors scaled to it.

    All factors but the last are the mean of the replications'; the last takes what the product's mean needs.
    """
    every = [terms_of(result) for result in results]
    mean: dict[str, dict[str, float]] = {}
    for name in every[0]:
        product = math.fsum(math.prod(terms[name].values()) for terms in every) / len(every)
        keys = every[0][name].keys()
        if any(terms[name].keys() != keys for terms in every):
            mean[name] = {"seconds": product}
            continue
        *others, last = keys
        mean[name] = {key: math.fsum(terms[name][key] for terms in every) / len(every) for key in others}
        rest = math.prod(mean[name].values())
        mean[name][last] = product / rest if rest else 0.0
    return mean


def _metric_differences(one: list[Result], other: list[Result]) -> dict[str, Any]:
    """Every metric's two means, the difference of pairs with the same seed, and the half-width of its interval."""
    before, after = [measure(r) for r in one], [measure(r) for r in other]
    pairs = [
        {name: None if (b := y[name]) is None or (a := x[name]) is None else b - a for name in x}
        for x, y in zip(before, after, strict=True)
    ]
    means, half_widths = combine(pairs)
    x, y = combine(before)[0], combine(after)[0]
    return {
        name: {
            "before": x[name],
            "after": y[name],
            "difference": _unless_noise(means[name], x[name], y[name]),
            "half_width": half_widths.get(name),
            "clear": _clear(means[name], half_widths.get(name)),
        }
        for name in means
    } | {"level": LEVEL}


def _unless_noise(difference: float | None, before: float | None, after: float | None) -> float | None:
    """The difference; 0 if it is rounding."""
    if difference is None or abs(difference) > NOISE * (abs(before or 0.0) + abs(after or 0.0)):
        return difference
    return 0.0


def _clear(mean: float | None, half_width: float | None) -> bool | None:
    return None if mean is None or half_width is None else abs(mean) > half_width


def _one_by_one(a: Scenario, b: Scenario, changes: list[str]) -> dict[str, Any] | None:
    """What each changed setting does to the mean end-to-end latency (ms) by itself: its Shapley value.

    That is the mean, over all orders in which the settings could be changed, of the difference that it makes when its
    turn comes; each order is re-simulated. The values add up to the whole difference. None if there is one change only,
    too many, or a mixture that cannot run; nor of several groups of replicas, each with settings of its own.
    """
    own = any(len(scenario.cluster.groups) > 1 for scenario in (a, b))
    if own or not 2 <= len(changes) <= MAX_CHANGES:
        return None
    values: dict[tuple[bool, ...], float] = {}
    for chosen in itertools.product((False, True), repeat=len(changes)):
        try:
            mixed = _mixture(a, b, [key for key, taken in zip(changes, chosen, strict=True) if taken])
            latency = measure(run(mixed)[0])["mean_e2el_ms"]
        except InputError:
            return None
        if latency is None:
            return None
        values[chosen] = latency
    n, shares = len(changes), dict.fromkeys(changes, 0.0)
    for chosen, value in values.items():
        size = sum(chosen)
        for i, key in enumerate(changes):
            if not chosen[i]:
                with_it = values[(*chosen[:i], True, *chosen[i + 1 :])]
                weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
                shares[key] += weight * (with_it - value)
    return {"seed": a.simulation.seed, "difference": values[(True,) * n] - values[(False,) * n], "changes": shares}


def _mixture(a: Scenario, b: Scenario, taken: list[str]) -> Scenario:
    """Scenario `a` with the settings `taken` from `b`, one replication."""
    update: dict[str, Any] = {"simulation": a.simulation.model_copy(update={"replications": 1})}
    for key in taken:
        section, _, name = key.partition(".")
        if not name:
            update[section] = getattr(b, section)
            continue
        names = ["weights", "activations"] if key == "precision.weights" else [name]
        inner = {each: getattr(getattr(b, section), each) for each in names}
        update[section] = update.get(section, getattr(a, section)).model_copy(update=inner)
    return a.model_copy(update=update)


def _leaves(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """The changed settings, those of the parallelism one by one."""
    leaves = []
    for key, (x, y) in changes.items():
        inner = [name for name in x if x[name] != y[name] and name != "moe_tensor"] if key == "parallelism" else []
        leaves += [f"{key}.{name}" for name in inner] or [key]
    return leaves


def _short(value: Any) -> Any:
    """A changed section by its name, where it has one; else what in it is not 1, the default of parallelism."""
    if not isinstance(value, dict):
        return value
    return value.get("name") or {key: inner for key, inner in value.items() if inner not in (1, None)}
