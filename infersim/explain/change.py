"""Why one run is faster than another, in one sentence, and what would have to be true for the change to pay."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from .attribution import NAMES, PHASES, phase_of, row_of

NOTABLE = 0.05  # a part below this share of all gains and losses is not worth a word


def explain_change(
    terms: dict[str, dict[str, float]],
    before: float,
    after: float,
    clear: bool | None,
    binding: str,
    costs: Sequence[dict[str, Any]],
) -> dict[str, str]:
    """`why` and `break_even` of a difference in mean end-to-end latency (s), divided as attribution.divide_sum does.

    clear: whether it is above chance, None if nothing is drawn; binding: what binds after the change, as a text;
    costs: explain.cost's of both.
    """
    parts = by_row(terms)
    gains = {name: part for name, part in parts.items() if part < 0}
    losses = {name: part for name, part in parts.items() if part > 0}
    change = after - before
    if abs(change) < 1e-9 + 1e-6 * before:
        return {"why": "no difference: this workload does not feel the change", "break_even": ""}
    size = how_much(before, after, clear)
    first, second = (gains, losses) if change < 0 else (losses, gains)
    why = f"{size}: {_phrase(first, terms)}"
    if _weight(second) > NOTABLE * _weight(first):
        why += f", against {_phrase(second, terms)}"
    return {"why": f"{why}; now binds: {binding}", "break_even": _break_even(gains, losses, _dearer(costs))}


def how_much(before: float, after: float, clear: bool | None) -> str:
    """A change of the time of a request, in words. clear: False if it may be chance."""
    doubt = ", which may be chance" if clear is False else ""
    if after >= 2 * before:
        return f"{plain(after / before, 3)} times as long per request{doubt}"
    return f"{abs(after / before - 1):.1%} {'faster' if after < before else 'slower'} per request{doubt}"


def _weight(parts: dict[str, float]) -> float:
    return math.fsum(abs(part) for part in parts.values())


def _phrase(parts: dict[str, float], terms: dict[str, dict[str, float]]) -> str:
    """The parts that matter, largest first, each with the factor that moved it."""
    ranked = sorted(parts, key=lambda name: -abs(parts[name]))[:3]
    notable = [name for name in ranked if abs(parts[name]) > NOTABLE * _weight(parts)]
    return ", ".join(f"{NAMES[name]} {signed(parts[name] * 1e3)} ms{_cause(name, terms)}" for name in notable)


def by_row(terms: dict[str, dict[str, float]]) -> dict[str, float]:
    """The parts of each row together: queue, weights, kv, ..."""
    rows = dict.fromkeys(map(row_of, terms), 0.0)
    for name, factors in terms.items():
        rows[row_of(name)] += math.fsum(factors.values())
    return rows


def _cause(row: str, terms: dict[str, dict[str, float]]) -> str:
    """Where most of a row's difference lies: a factor of decoding, or another phase."""
    found: dict[str, float] = {}
    for name, factors in terms.items():
        if row_of(name) == row and phase_of(name) != "waiting":
            found |= factors if len(factors) > 1 else {PHASES[phase_of(name)]: math.fsum(factors.values())}
    return f" ({max(found, key=lambda cause: abs(found[cause]))})" if found else ""


def more(share: float) -> str:
    """A change by a share, in words: "+58%", "+0.3%", or from twice on "3.1 times"."""
    if share >= 1:
        return f"{plain(1 + share, 3)} times"
    return f"{share:+.0%}" if abs(share) >= 0.005 or not share else f"{100 * share:+.1g}%"


def by(share: float) -> str:
    """A change by a share to a tenth of a percent, or from ten times on "129 times"."""
    return f"{share:+.1%}" if share < 10 else f"{plain(1 + share, 3)} times"


def plain(value: float, digits: int = 4) -> str:
    """So many digits that matter, thousands apart, without powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{Decimal(f'{value or 0:.{digits}g}'):f}"


def signed(value: float) -> str:
    """A difference in three digits."""
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.3g}"


def _dearer(costs: Sequence[dict[str, Any]]) -> str:
    """How much more the changed deployment costs, in words; "" if no more."""
    for key, what in (("usd_per_hour", "an hour"), ("gpus", "GPUs")):
        before, after = (cost[key] for cost in costs)
        if before and after:
            more = (sum(after) / sum(before) if isinstance(after, list) else after / before) - 1
            each = [cost["usd_per_million_output_tokens"] for cost in costs]
            tokens = f", an output token {sum(each[1]) / sum(each[0]) - 1:+.0%}" if all(each) else ""
            words = (
                f"{what} costs {more:.0%} more{tokens}" if key == "usd_per_hour" else f"it takes {more:.0%} more GPUs"
            )
            return words if more > 5e-3 else ""
    return ""


def _break_even(gains: dict[str, float], losses: dict[str, float], dearer: str) -> str:
    gain, loss = _weight(gains), _weight(losses)
    if loss <= 1e-3 * gain and dearer:
        return f"it costs no time on this workload, but {dearer}"
    if loss <= 1e-3 * gain:
        return "it takes nothing away on this workload: any gain pays"
    money = f"; {dearer}" if dearer else ""
    if gain <= 1e-3 * loss:
        return "it gains nothing on this workload, so that no lower cost would make it pay"
    top = NAMES[max(losses, key=lambda key: losses[key])]
    if gain > loss:
        ratio = f"{gain / loss:.3g}"
        return f"it pays as long as what it costs (mostly {top}) stays below {ratio} times what it is here{money}"
    best = NAMES[min(gains, key=lambda key: gains[key])]
    return (
        f"what it costs (mostly {top}) would have to fall to {gain / loss:.0%}, or what it gains (mostly {best}) to be"
        f" {loss / gain:.3g} times as much"
    )
