"""The answer to a plan on the terminal."""

import textwrap
from typing import Any

from infersim.explain.change import more, plain

from .terminal import LABEL, copies, width


def print_plan(document: dict[str, Any]) -> None:
    """The best deployment and the runner-up, what binds, what others miss, at which prices, and how the search went."""
    slo = ", ".join(f"{name} <= {limit:g}" for name, limit in document["slo"].items())
    best, other = document["best"], document["runner_up"]
    if not best:
        _field("answer", nothing_text(document))
        _field("slo", slo)
    else:
        _field("answer", describe(best["deployment"]))
        _answer(best, document["objective"])
        for line in error_lines(best, document["stays"]):
            _field("error bar", line)
        _field("binding", _binding(document["binding"]))
        _field("rests on", efficiencies_text(best))
        if document["equals"]:
            _field("equals", f"{equals_text(document)} (--json lists them)")
    if other:
        print()
        _field("runner-up", describe(other["deployment"]))
        _answer(other, document["objective"])
        _field("margin", margin_text(document["margin"]))
        if document["to_win"]:
            _field("would win", to_win_text(document["to_win"]))
    if len(document["deployments"]) > 1 or not best:
        _table(document["deployments"])
    print()
    for line in prices_lines(document):
        _field("price", line)
    n = document["considered"]
    counts = f"{n:,} candidate{'s' * (n != 1)}, {document['simulated']:,} simulated, {document['pruned']:,} not"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in document["pruned_by"].items() if count)
    _field("search", f"{counts}: {reasons}" if reasons else counts)
    for line in document["assumed"]:
        _field("assumed", line)


def nothing_text(document: dict[str, Any]) -> str:
    """Why there is no answer."""
    binding = document["binding"]
    return binding["text"] if binding["resource"] == "price" else f"nothing can: {binding['text']}"


def prices_lines(document: dict[str, Any]) -> list[str]:
    """The prices that count, with source and date, and which are missing."""
    prices = document["prices"]
    if document["objective"] != "cost" or document["binding"]["resource"] == "price":
        return []
    lines = [f"{device} {_range(price['usd'])} USD/h: {price['source']}" for device, price in prices["of"].items()]
    return [*lines, *([prices["missing"]] if prices["missing"] else [])]


def _table(deployments: list[dict[str, Any]]) -> None:
    """The best different deployments, and what those that do not hold the SLO miss."""
    from rich.console import Console
    from rich.table import Table

    if not deployments:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("USD/h", justify="right", no_wrap=True)
    for column in ("deployment", "SLO"):
        table.add_column(column, overflow="fold")
    for row in deployments:
        table.add_row(*deployment_row(row))
    print()
    Console(highlight=False, markup=False, width=width()).print(table)


def deployment_row(row: dict[str, Any]) -> tuple[str, str, str]:
    """USD per hour, the deployment, whether it holds."""
    usd = row["usd_per_hour"]
    return _range(usd) if usd else "-", describe(row["deployment"], model=False), holds_text(row)


def holds_text(row: dict[str, Any]) -> str:
    """Whether a deployment holds the SLO, or what it misses."""
    return f"holds, {row['tightest']:.0%} of a limit" if row["holds"] else ", ".join(row["misses"])


def efficiencies_text(answer: dict[str, Any]) -> str:
    """Which efficiencies stand behind the times of a deployment, and which are assumed, of which device."""
    known: dict[str, list[str]] = {}
    for row in answer["efficiencies"]:
        assumed = row["provenance"] == "assumed"
        known.setdefault(row["provenance"], []).append(row["operator"] + (f" ({row['source']})" if assumed else ""))
    return f"efficiencies of {answer['deployment']['hardware']}: " + "; ".join(
        f"{kind}: {', '.join(operators)}" for kind, operators in sorted(known.items(), key=lambda x: x[0] == "assumed")
    )


def error_lines(best: dict[str, Any], stays: dict[str, Any]) -> list[str]:
    """Whether the answer holds, and stays the answer, within the error of the model; then the errors of its kind."""
    error = best["model_error"]
    asked = {x["name"]: f"at most {x['limit']:g}" for x in best["limits"]} | {"rate": f"{plain(best['rate'])} asked"}
    lines, held = [], error["held"]
    if held:
        ends = {name: " to ".join(map(plain, x["interval"])) for name, x in held.items()}
        parts = (f"{name} {ends[name]} ({asked[name]}, breaks if {_wrong(x['wrong'])})" for name, x in held.items())
        word = "holds the SLO" if all(x["holds"] for x in held.values()) else "may miss the SLO"
        missing = [name for name in asked if name not in held]
        without = f"; of {', '.join(missing)} too few were measured" if missing else ""
        lines.append(f"{word} in 4 of 5 deployments of this kind: {', '.join(parts)}{without}")
    if stays["carry"] is not None and stays["wins"] is not None:
        word = "stays" if stays["wins"] else "may not stay"
        lines.append(f"{word} the answer: it is while it carries {stays['carry']:.0%} of what is predicted")
    return [*lines, *error["text"]]


def _wrong(share: float) -> str:
    return f"{more(share)} off" if share else "off at all"


def to_win_text(to_win: dict[str, Any]) -> str:
    """What it would take for the runner-up to be the answer."""
    ways = []
    if to_win["usd_per_hour"]:
        ways.append(f"with {to_win['device']} below {to_win['usd_per_hour']:.3g} USD/h")
    if to_win["rate"]:
        ways.append(f"above {plain(to_win['rate'])} requests/s, which the best as it is does not hold")
    if to_win["carry"]:
        ways.append(f"if it carried {more(to_win['carry'] - 1) if to_win['carry'] > 1 else 'more'}")
    if to_win["speed"]:
        ways.append(
            f"if {to_win['device']}'s memory, arithmetic and links were about {to_win['speed'] - 1:.0%} faster, as it"
            " then needed fewer"
        )
    return "; or ".join(ways) or "by no price, rate or speed alone (up to twice as fast)"


def equals_text(document: dict[str, Any]) -> str:
    """How many deployments cost as much as the best."""
    n = len(document["equals"])
    return f"{n} other{'s' * (n > 1)} cost{'s' * (n == 1)} the same and hold{'s' * (n == 1)} the SLO too"


def describe(deployment: dict[str, Any], model: bool = True) -> str:
    """A deployment in one line."""
    parallelism = deployment["parallelism"]
    shape = [f"{key} {n}" for key, n in parallelism.items() if isinstance(n, int) and n > 1 and key != "moe_tensor"]
    precision = deployment["precision"]
    replicas = deployment["replicas"]
    each = deployment["gpus"] // replicas
    gpus = copies(replicas, each, deployment["hardware"])
    if deployment["cluster"]:
        pools = [(name, deployment["cluster"].get(name)) for name in ("prefill", "decode")]
        named = [f"{pool['replicas']} for {name}" for name, pool in pools if pool]
        gpus = f"{deployment['gpus']} GPUs, {', '.join(named) or 'several kinds of replicas'}"
    parts = [*shape, f"weights {precision['weights']}", f"KV {precision['kv_cache']}", deployment["engine"]["preset"]]
    if speculation := deployment["speculation"]:
        parts.append(f"{speculation['method']} drafting {speculation['num_speculative_tokens']}")
    parts += ["early exit"] if deployment["early_exit"] else []
    return f"{deployment['model']} on {gpus}: {', '.join(parts)}" if model else f"{gpus}: {', '.join(parts)}"


def shape_of(deployment: dict[str, Any]) -> str:
    """Its shape in a picture: replicas, tensor, pipeline and data parallelism, weights: "2 x tp4 fp8"."""
    sizes = (("tp", "tensor"), ("pp", "pipeline"), ("dp", "attention_data"))
    parts = [f"{short}{n}" for short, key in sizes if (n := deployment["parallelism"][key]) > 1]
    copies = f"{deployment['replicas']} x " if deployment["replicas"] > 1 else ""
    return f"{copies}{' '.join([*(parts or ['1 GPU']), deployment['precision']['weights']])}"


def _answer(answer: dict[str, Any], objective: str) -> None:
    headroom = f" ({more(answer['headroom'])})" if answer["headroom"] else ""
    if objective == "users":
        _field(
            "users",
            f"{answer['rate']:,.0f} at once hold the SLO; {plain(answer['metrics']['request_throughput'])} requests/s",
        )
    else:
        _field(
            "rate", f"{plain(answer['rate'])} requests/s; holds the SLO up to {plain(answer['largest_rate'])}{headroom}"
        )
    for limit in answer["limits"]:
        upper, one = plain(limit["upper"]), plain(limit["run_upper"])
        runs = f"mean of {answer['replications']} runs at most {upper}, one more run {one}"
        _field("slo", f"{limit['name']} {plain(limit['mean'])} <= {limit['limit']:g} ({runs})")
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
        carries = margin["largest_rate"]
        parts.append(f"carries {more(carries)}" if abs(carries) >= 5e-3 else "carries as much")
    return ", ".join(parts)


def _range(pair: list[float]) -> str:
    low, high = pair
    return plain(low, 3) if high - low < 0.005 * high else f"{plain(low, 3)}-{plain(high, 3)}"


def _field(label: str, text: str) -> None:
    for i, line in enumerate(textwrap.wrap(text, width() - LABEL, break_on_hyphens=False)):
        print(f"{label if i == 0 else '':{LABEL}}{line}")
