"""A comparison on the terminal."""

import textwrap
from typing import Any

from infersim.explain.attribution import NAMES, PHASES
from infersim.explain.change import by, plain
from infersim.explain.techniques import NEITHER

from .terminal import number, width

SHOWN = (
    "request_throughput",
    "output_throughput",
    "request_goodput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
)
METRIC_ROOM, DIFFERENCE_ROOM, ROUTER_ROOM, OF_WHICH_ROOM = 33, 39, 20, 34
"""characters: of a metric's name and A's value, of another variant's, of a variant's router, of a division's causes"""
LEAST = 5e-4  # a term below this share of the latency is not shown


def print_comparison(document: dict[str, Any]) -> None:
    """Metrics side by side, then each difference from the first variant divided among its terms."""
    variants, differences = document["variants"], document["differences"]
    for i, variant in enumerate(variants):
        state = variant["answer"]["verdict"]["state"]
        _print_text(chr(65 + i), f"{variant['name']}: {state}; binds: {variant['answer']['explain']['binding']}", 3)
    replications = len(document["seeds"])
    print(
        f"\n{replications} replications, the same draws in each"
        if replications > 1
        else "\nnothing is drawn: no intervals"
    )
    each = max(1, (width() - METRIC_ROOM) // DIFFERENCE_ROOM)
    for i in range(0, len(differences), each):
        _print_metrics(i, variants, differences[i : i + each])
    _print_routers(router_rows(variants))
    for i, variant in enumerate(variants):
        _print_text(f"error {chr(65 + i)}", "; ".join(variant["answer"]["model_error"]["text"]))
    for i, difference in enumerate(differences):
        _print_difference(chr(66 + i), difference)


def _print_metrics(at: int, variants: list[dict], differences: list[dict]) -> None:
    """A table of the differences from number `at` on, those that find room beside each other."""
    variants = [variants[0], *variants[at + 1 : at + 1 + len(differences)]]
    print(f"{'':22}{'A':>11}" + "".join(f"{chr(66 + at + i):>11}{'difference':>28}" for i in range(len(differences))))
    for name in SHOWN:
        first = variants[0]["answer"]["metrics"][name]
        if first is None:
            continue
        line = f"{name:22}{number(first):>11}"
        for difference in differences:
            x = difference["metrics"][name]
            line += f"{number(x['after']):>11}{_change(x):>28}"
        print(line)
    for label, key in (("GPUs", "gpus"), ("USD/M output tokens", "usd_per_million_output_tokens")):
        cells = [_range(variant["cost"][key]) for variant in variants]
        print(f"{label:20}{cells[0]:>13}" + "".join(f" {cell:>12}{'':26}" for cell in cells[1:]).rstrip())


def router_rows(variants: list[dict[str, Any]]) -> list[list[str]]:
    """How each variant's replicas share the work, and what their caches hold; nothing where each has one replica."""
    rows = [["router", "requests, most / mean", "busy, most / mean", "prompts cached", "by replica"]]
    for variant in variants:
        route, replicas = variant["answer"]["route"], variant["answer"]["replicas"]
        policies = dict.fromkeys(filter(None, (route.get("prefill_policy"), route["policy"])))
        shares = [row["cached_share"] for row in replicas if row["requests"] and row["role"] in ("serve", "prefill")]
        balance = (route["requests_max_over_mean"], route["busy_time_max_over_mean"])
        cached = variant["answer"]["explain"]["prefix_cache_token_hit_rate"]
        rows.append([" / ".join(policies) or "-", *map(number, balance), f"{cached or 0:.1%}",
                     f"{min(shares):.1%} to {max(shares):.1%}" if len(shares) > 1 else "-"])  # fmt: skip
    several = any(len(variant["answer"]["replicas"]) > 1 for variant in variants)
    return [list(row) for row in zip(*rows, strict=True)] if several else []


def _print_routers(rows: list[list[str]]) -> None:
    room = max(1, (width() - 22) // ROUTER_ROOM)
    for first in range(1, len(rows[0]) if rows else 0, room):
        print(
            f"{'':22}"
            + "".join(f"{chr(65 + first - 1 + i):>{ROUTER_ROOM}}" for i in range(len(rows[0][first : first + room])))
        )
        for label, *cells in rows:
            print(f"{label:22}" + "".join(f"{cell:>{ROUTER_ROOM}}" for cell in cells[first - 1 : first - 1 + room]))


def _change(x: dict[str, Any]) -> str:
    if x["difference"] is None:
        return "-"
    width = "" if x["half_width"] is None else f" +-{number(x['half_width'])}"
    share = f" ({by(x['difference'] / x['before'])})" if x["before"] else ""
    return f"{'+' if x['difference'] > 0 else ''}{number(x['difference'])}{width}{share}"


def _print_difference(letter: str, difference: dict[str, Any]) -> None:
    print(f"\n{letter} against A")
    for technique in difference["techniques"]:
        kind = {True: "exact", False: "approximate", None: "another model"}[technique["exact"]]
        side = f"{technique['side']}, by {technique['mechanism']}; {kind}" if technique["side"] != NEITHER else kind
        _print_text("technique", f"{technique['name']}: {side}")
    _print_text("why", difference["why"])
    if difference["break_even"]:
        _print_text("to pay", difference["break_even"])
    before, after = difference["gpus"]
    if before != after:
        each = difference["throughput"]["ratio"] * before / after
        _print_text("per GPU", f"{after} GPUs against {before}: {each:.3g} times the output tokens/s of each")
    latency = difference["latency"]
    terms = latency["terms"]
    before, after = (sum(term[side] for term in terms) for side in ("before", "after"))
    least = LEAST * (abs(before) + abs(after))
    print(f"\n  mean e2el, ms per request{'A':>16}{letter:>11}{'difference':>12}   of which".rstrip())
    for row in dict.fromkeys(term["term"] for term in terms):
        mine = [term for term in terms if term["term"] == row]
        x, y, change = (sum(term[side] for term in mine) for side in ("before", "after", "difference"))
        if max(abs(x), abs(y)) > least:
            of_which = ", ".join(_of_which(mine, least)) if len(mine) > 1 else ""
            line = f"  {NAMES[row]:28}{number(x):>13}{number(y):>11}{_signed(change):>12}   "
            beside = width() - len(line) >= OF_WHICH_ROOM
            texts = textwrap.wrap(of_which, width() - (len(line) if beside else 6)) or [""]
            print((line + texts.pop(0) if beside else line).rstrip())
            for text in texts if of_which else []:
                print(" " * (len(line) if beside else 6) + text)
    print(f"  {'in all':28}{number(before):>13}{number(after):>11}{_signed(latency['difference']):>12}")
    phases = {phase: sum(term["difference"] for term in terms if term["phase"] == phase) for phase in PHASES}
    _print_text("by phase", ", ".join(f"{PHASES[phase]} {_signed(part)}" for phase, part in phases.items()))
    throughput = difference["throughput"]
    ranked = sorted(throughput["factors"].items(), key=lambda item: -abs(item[1] - 1))
    factors = " x ".join(f"{name} {number(factor)}" for name, factor in ranked if abs(factor - 1) > LEAST)
    _print_text("throughput", f"x {number(throughput['ratio'])}" + (f" = {factors}" if factors else ""))
    if one_by_one := difference["one_by_one"]:
        parts = ", ".join(f"{key} {_signed(part)}" for key, part in one_by_one["changes"].items())
        _print_text("each", f"{parts} ms of mean e2el (mean over all orders, each re-simulated)")


def _of_which(terms: list[dict[str, Any]], least: float) -> list[str]:
    """A row's difference by phase, decode by its factors."""
    texts = []
    for term in terms:
        if abs(term["difference"]) <= least:
            continue
        factors = [f"{name} {_signed(part)}" for name, part in term["factors"].items() if abs(part) > least]
        causes = f" ({', '.join(factors)})" if len(term["factors"]) > 1 and factors else ""
        texts.append(f"{PHASES[term['phase']]} {_signed(term['difference'])}{causes}")
    return texts


def _print_text(label: str, text: str, room: int = 0) -> None:
    """A text behind its label: in the column of all texts, or `room` wide at the margin."""
    margin, space = ("", room) if room else ("  ", 11)
    for i, line in enumerate(textwrap.wrap(text, width() - len(margin) - space, break_on_hyphens=False)):
        print(f"{margin}{label if i == 0 else '':{space}}{line}")


def _range(value: Any) -> str:
    return "-" if value is None else f"{value[0]:.3g}-{value[1]:.3g}" if isinstance(value, list) else f"{value}"


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{plain(abs(value))}"
