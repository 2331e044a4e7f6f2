"""The report of a comparison: what differs, why, and the sections of the runs side by side."""

from typing import Any

from infersim.explain.attribution import NAMES, PHASES
from infersim.explain.change import how_much, signed
from infersim.metrics.result import Result

from .compare import SHOWN, router_rows
from .html import Page
from .latencies import latency, load
from .parts import card, shown, span, table
from .sections import error_tables, inputs, memory, provenance, resources, what_if
from .svg import bars

EXACT = {True: "exact", False: "approximate", None: "another model"}
LEAST = 5e-4  # of the latency: a row of the division below it is not drawn


def compare_page(
    document: dict[str, Any], briefings: list[dict[str, Any]], results: list[Result], command: list[str]
) -> Page:
    """document: planning.compare's; of each variant its briefing and first replication; command: what reproduces it."""
    letters = [chr(65 + i) for i in range(len(briefings))]
    named = dict(zip(letters, briefings, strict=True))
    differences = dict(zip(letters[1:], document["differences"], strict=True))
    first, *others = (variant["name"] for variant in document["variants"])
    found = [
        *why_sections(document),
        latency(named),
        load(named),
        memory(named),
        resources(named),
        what_if(named),
        provenance(named),
        inputs(named, dict(zip(letters, results, strict=True)), command),
    ]
    verdict = "; ".join(f"{letter}: {_size(difference)}" for letter, difference in differences.items())
    good = all(difference["latency"]["difference"] <= 0 for difference in differences.values())
    head = others[0].replace(",", ", ") if len(others) == 1 else f"{len(others)} variants"
    return Page(f"{head} against {first}", verdict, good, found)


def why_sections(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What a comparison says by itself, without runs around it."""
    letters = [chr(65 + i) for i in range(len(document["variants"]))]
    differences = dict(zip(letters[1:], document["differences"], strict=True))
    whys = [_why(letter, difference) for letter, difference in differences.items()]
    return [_answer(document, letters, differences), *whys, _metrics(differences)]


def _size(difference: dict[str, Any]) -> str:
    x = difference["metrics"]["mean_e2el_ms"]
    return how_much(x["before"], x["after"], x["clear"]) if x["difference"] else "no difference"


def _answer(document: dict[str, Any], letters: list[str], differences: dict[str, Any]) -> dict[str, Any]:
    cards = []
    for letter, difference in differences.items():
        x = difference["metrics"]["mean_e2el_ms"]
        width = "" if x["half_width"] is None else f" ± {shown(x['half_width'])}"
        note = f"{signed(x['difference'])}{width} ms of mean e2el"
        cards.append(card(f"{letter} against A", _size(difference), note))
        ratio = difference["throughput"]["ratio"]
        before, after = difference["gpus"]
        each = f"{ratio * before / after:.3g} times for each GPU" if before != after else "as many GPUs"
        cards.append(card(f"Output tokens/s, {letter}", f"{ratio:.4g} times", each))
    rows = []
    for letter, variant in zip(letters, document["variants"], strict=True):
        answer, cost = variant["answer"], variant["cost"]
        usd = [span(cost[key], "") for key in ("usd_per_hour", "usd_per_million_output_tokens")]
        state, binding = answer["verdict"]["state"], answer["explain"]["binding"]
        rows.append([letter, variant["name"].replace(",", ", "), state, binding, cost["gpus"], *usd])
    head = ["run", "variant", "verdict", "what binds", "GPUs", "USD/h", "USD per million output tokens"]
    count = len(document["seeds"])
    text = f"{count} replications, the same draws in each variant." if count > 1 else "Nothing is drawn: no intervals."
    shares = router_rows(document["variants"])
    routers = [table("Routers and caches", ["", *letters], shares)] if shares else []
    answers = {letter: variant["answer"] for letter, variant in zip(letters, document["variants"], strict=True)}
    errors = {letter: answer["model_error"] for letter, answer in answers.items()}
    tables = error_tables(errors, {letter: answer["metrics"] for letter, answer in answers.items()})
    notes = [f"{letter}: {line}" for letter, error in errors.items() for line in error["text"]]
    return {"id": "answer", "title": "Answer", "text": text, "cards": cards, "notes": notes,
            "tables": [table("Variants", head, rows), *routers, *tables]}  # fmt: skip


def _metrics(differences: dict[str, Any]) -> dict[str, Any]:
    tables = []
    for letter, difference in differences.items():
        rows = []
        for name in SHOWN:
            x = difference["metrics"][name]
            if x["difference"] is not None:
                share = round(100 * x["difference"] / x["before"], 2) if x["before"] else None
                clear = {True: "yes", False: "no", None: "–"}[x["clear"]]
                rows.append([name, x["before"], x["after"], x["difference"], x["half_width"], share, clear])
        head = ["metric", "A", letter, "difference", "±", "%", "clear"]
        tables.append(table(f"{letter} against A", head, rows))
    level = next(iter(differences.values()))["metrics"]["level"]
    text = f"± is the half-width of the difference's {level:.0%} interval over pairs of runs with the same draws."
    return {"id": "metrics", "title": "Metrics side by side", "text": text, "tables": tables}


def _why(letter: str, difference: dict[str, Any]) -> dict[str, Any]:
    """One difference, divided among its terms."""
    terms = difference["latency"]["terms"]
    whole = sum(abs(term["before"]) + abs(term["after"]) for term in terms)
    rows = {name: [term for term in terms if term["term"] == name] for name in dict.fromkeys(t["term"] for t in terms)}
    parts = {name: sum(term["difference"] for term in mine) for name, mine in rows.items()}
    ranked = sorted(parts, key=lambda name: -abs(parts[name]))
    drawn = [(NAMES[name], parts[name]) for name in ranked if abs(parts[name]) > LEAST * whole]
    phases = {phase: sum(term["difference"] for term in terms if term["phase"] == phase) for phase in PHASES}
    words = f"Mean end-to-end latency, {letter} less A"
    about = f"In all {signed(difference['latency']['difference'])} ms. "
    charts = [
        {
            "title": words,
            "note": "by what the time is spent on; the bars add up to the whole difference",
            "svg": bars(words, about + "; ".join(f"{name} {signed(x)} ms" for name, x in drawn) + ".", drawn, "ms"),
        },
        {
            "title": f"{words}, by phase",
            "note": "by what the request was doing",
            "svg": bars(f"{words}, by phase", about, [(PHASES[phase], x) for phase, x in phases.items()], "ms"),
        },
    ]
    division = [
        [NAMES[term["term"]], PHASES[term["phase"]], term["before"], term["after"], term["difference"],
         ", ".join(f"{name} {signed(x)}" for name, x in term["factors"].items() if abs(x) > LEAST * whole)
         if len(term["factors"]) > 1 else ""]
        for name in ranked
        for term in rows[name]
        if max(abs(term["before"]), abs(term["after"])) > LEAST * whole
    ]  # fmt: skip
    tables = [
        table("Settings", ["setting", "A", letter],
              [[key, _setting(x), _setting(y)] for key, (x, y) in difference["changes"].items()]),
        table("Techniques", ["technique", "what it lowers", "by", "output"],
              [[t["name"], t["side"], t["mechanism"], EXACT[t["exact"]]] for t in difference["techniques"]]),
        table("The division, ms", ["spent on", "phase", "A", letter, "difference", "of which"], division),
        table("Factors of the throughput's ratio", ["term", "factor"],
              [[NAMES[name], x] for name, x in difference["throughput"]["factors"].items() if abs(x - 1) > LEAST]),
    ]  # fmt: skip
    if difference["one_by_one"]:
        each = list(map(list, difference["one_by_one"]["changes"].items()))
        tables.append(table("Each setting by itself, ms of mean e2el, over all orders", ["setting", "ms"], each))
    return {
        "id": f"why-{letter}",
        "title": f"Why {letter} differs",
        "text": f"{_sentence(difference['why'])} {_sentence(difference['break_even'])}".strip(),
        "charts": charts,
        "tables": [each for each in tables if each["rows"]],
    }


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _setting(value: Any) -> str:
    """A setting's value; of a section what is given in it."""
    if isinstance(value, dict):
        given = {key: inner for key, inner in value.items() if inner not in (None, [], {})}
        return ", ".join(f"{key} {_setting(inner)}" for key, inner in given.items()) or "–"
    return shown(value)
