"""The answer to a plan on the terminal."""

import textwrap
from typing import Any

from .terminal import LABEL, width


def print_plan(document: dict[str, Any]) -> None:
    """The best deployment and the runner-up, what binds, and how the search went."""
    slo = ", ".join(f"{name} <= {limit:g}" for name, limit in document["slo"].items())
    if not document["feasible"]:
        _field("answer", f"nothing can: {document['binding']['text']}")
        _field("slo", slo)
    else:
        best, other = document["best"], document["runner_up"]
        _field("answer", describe(best["deployment"]))
        _answer(best)
        _field("binding", _binding(document["binding"]))
        if document["equals"]:
            _field("equals", f"{equals_text(document)} (--json lists them)")
        if other:
            print()
            _field("runner-up", describe(other["deployment"]))
            _answer(other)
            _field("margin", margin_text(document["margin"]))
    print()
    counts = f"{document['considered']:,} candidates, {document['simulated']:,} simulated, {document['pruned']:,} not"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in document["pruned_by"].items() if count)
    _field("search", f"{counts}: {reasons}" if reasons else counts)
    for line in document["assumed"]:
        _field("assumed", line)


def equals_text(document: dict[str, Any]) -> str:
    """How many deployments cost as much as the best."""
    n = len(document["equals"])
    return f"{n} other{'s' * (n > 1)} cost{'s' * (n == 1)} the same and hold{'s' * (n == 1)} the SLO too"


def describe(deployment: dict[str, Any]) -> str:
    """A deployment in one line."""
    parallelism = deployment["parallelism"]
    shape = [f"{key} {n}" for key, n in parallelism.items() if n > 1 and key not in ("moe_tensor",)]
    precision = deployment["precision"]
    replicas = deployment["replicas"]
    each = deployment["gpus"] // replicas
    gpus = (
        f"{replicas} replicas of {each} {deployment['hardware']}"
        if replicas > 1
        else f"{each} {deployment['hardware']}"
    )
    if deployment["cluster"]:
        pools = [(name, deployment["cluster"].get(name)) for name in ("prefill", "decode")]
        named = [f"{pool['replicas']} for {name}" for name, pool in pools if pool]
        gpus = f"{deployment['gpus']} GPUs, {', '.join(named) or 'several kinds of replicas'}"
    parts = [*shape, f"weights {precision['weights']}", f"KV {precision['kv_cache']}", deployment["engine"]["preset"]]
    if speculation := deployment["speculation"]:
        parts.append(f"{speculation['method']} drafting {speculation['num_speculative_tokens']}")
    parts += ["early exit"] if deployment["early_exit"] else []
    return f"{deployment['model']} on {gpus}: {', '.join(parts)}"


def shape_of(deployment: dict[str, Any]) -> str:
    """Its shape in a picture: replicas, tensor, pipeline and data parallelism, weights: "2 x tp4 fp8"."""
    sizes = (("tp", "tensor"), ("pp", "pipeline"), ("dp", "attention_data"))
    parts = [f"{short}{n}" for short, key in sizes if (n := deployment["parallelism"][key]) > 1]
    copies = f"{deployment['replicas']} x " if deployment["replicas"] > 1 else ""
    return f"{copies}{' '.join([*(parts or ['1 GPU']), deployment['precision']['weights']])}"


def _answer(answer: dict[str, Any]) -> None:
    headroom = f" ({answer['headroom']:+.0%})" if answer["headroom"] else ""
    _field("rate", f"{answer['rate']:.4g} requests/s; holds the SLO up to {answer['largest_rate']:.4g}{headroom}")
    for limit in answer["limits"]:
        runs = (
            f"mean of {answer['replications']} runs at most {limit['upper']:.4g}, one more run {limit['run_upper']:.4g}"
        )
        _field("slo", f"{limit['name']} {limit['mean']:.4g} <= {limit['limit']:g} ({runs})")
    cost = answer["cost"]
    parts = []
    if cost["usd_per_hour"]:
        parts.append(f"{_range(cost['usd_per_hour'])} USD/h")
        parts.append(f"{_range(cost['usd_per_million_output_tokens'])} USD per million output tokens")
        parts.append(f"{_range(cost['usd_per_million_tokens'])} with prompt tokens")
    apart = {kind.replace("_", " "): usd for kind, usd in cost["usd_per_million_apart"].items() if usd}
    if apart:
        parts.append("apart " + ", ".join(f"{kind} {_range(usd)}" for kind, usd in apart.items()))
    if cost["joules_per_output_token"]:
        parts.append(f"{_range(cost['joules_per_output_token'])} J per output token")
    _field("cost", ", ".join(parts) or "no price known")


def _binding(binding: dict[str, Any]) -> str:
    return f"{binding['limit']} is the first limit to break at a higher rate; {binding['text']}"


def margin_text(margin: dict[str, Any]) -> str:
    """What the runner-up costs and carries, against the best."""
    parts = []
    if margin["cost"] is not None:
        parts.append(f"costs {margin['cost']:+.1%}" if abs(margin["cost"]) > 5e-4 else "costs the same")
    gpus = f"{margin['gpus']:+g} GPU{'s' if abs(margin['gpus']) > 1 else ''}"
    parts.append(gpus if margin["gpus"] else "as many GPUs")
    if margin["largest_rate"] is not None:
        parts.append(f"carries {margin['largest_rate']:+.1%}")
    return ", ".join(parts)


def _range(pair: list[float]) -> str:
    low, high = pair
    return f"{low:.3g}" if high - low < 0.005 * high else f"{low:.3g}-{high:.3g}"


def _field(label: str, text: str) -> None:
    for i, line in enumerate(textwrap.wrap(text, width() - LABEL, break_on_hyphens=False)):
        print(f"{label if i == 0 else '':{LABEL}}{line}")
