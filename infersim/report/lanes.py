"""Requests as bars over time: one lane per request in the system, each bar cut into waiting, prefill and decode."""

from html import escape

from .parts import shown
from .svg import LEFT, RIGHT, axis, picture, short

PHASES = (("waiting", 1), ("prefill", 3), ("decode", 0))
"""what a bar's parts are, and their colours"""
WIDTH, TOP, TALLEST, LANE = 960, 22, 340, 13


def lanes(title: str, bars: dict[str, list]) -> str:
    """bars: metrics.timeline.request_bars'. Every bar says in its title what became of the request."""
    count = max(bars["lane"], default=0) + 1
    step = min(LANE, TALLEST / count)
    ends = [x for name in ("sent", "scheduled", "first_token", "last_token") for x in bars[name] if x is not None]
    start, end = min(ends, default=0.0), max(ends, default=1.0)
    over = axis("s", [0.0, end - start])
    scale = (WIDTH - LEFT - RIGHT) / (over.high - over.low)

    def at(moment: float) -> float:
        return LEFT + (moment - start) * scale

    height = TOP + step * count
    parts = []
    for tick in over.ticks():
        x = LEFT + tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height:.1f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height + 15:.1f}" text-anchor="middle">{short(tick)}</text>')
    thick = max(step * 0.8, 0.3)
    paths: dict[str, list[str]] = {name: [] for name, _ in PHASES}
    titles, preempted = [], []
    for i, lane in enumerate(bars["lane"]):
        y = TOP + step * lane
        moments = [bars[name][i] for name in ("sent", "scheduled", "first_token", "last_token")]
        known = [moment for moment in moments if moment is not None]
        for (name, _), begin, stop in zip(PHASES, known, known[1:], strict=False):
            paths[name].append(
                f"M{at(begin):.2f} {y:.2f}h{max((stop - begin) * scale, 0.15):.2f}v{thick:.2f}H{at(begin):.2f}z"
            )
        if bars["num_preemptions"][i]:
            preempted.append(f"M{at(known[-1]):.2f} {y:.2f}v{thick:.2f}")
        width = max((known[-1] - known[0]) * scale, 0.5)
        titles.append(
            f'<rect class="hit" x="{at(known[0]):.2f}" y="{y:.2f}" width="{width:.2f}" height="{step:.2f}">'
            f"<title>{escape(_words(bars, i, moments))}</title></rect>"
        )
    for name, colour in PHASES:
        parts.append(f'<path class="bar c{colour}" d="{"".join(paths[name])}"/>')
    parts.append(f'<path class="mark" d="{"".join(preempted)}"/>' if preempted else "")
    x = float(LEFT)
    for name, colour in PHASES:
        parts.append(f'<rect class="bar c{colour}" x="{x:.0f}" y="4" width="12" height="10"/>')
        parts.append(f'<text class="tick" x="{x + 17:.0f}" y="13">{name}</text>')
        x += 30 + 7 * len(name)
    middle = (TOP + height) / 2
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height + 31:.1f}" text-anchor="middle">s</text>'
    )
    parts.append(
        f'<text class="label" x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">'
        "requests in the system</text>"
    )
    for count_shown in sorted({1, count}):
        y = TOP + step * (count_shown - 0.5) + 4
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{count_shown}</text>')
    about = f"{len(titles):,} requests over {shown(end - start)} s; at most {count:,} are in the system at one time."
    return picture(title, about, "".join([*parts, *titles]), int(height + 36), width=WIDTH)


def _words(bars: dict[str, list], i: int, moments: list[float | None]) -> str:
    sent, scheduled, first, last = moments
    words = [f"request {bars['id'][i]}: {bars['prompt_tokens'][i]:,} + {bars['num_output_tokens'][i]:,} tokens"]
    for name, begin, end in (("waits", sent, scheduled), ("prefill", scheduled, first), ("decode", first, last)):
        if begin is not None and end is not None:
            words.append(f"{name} {shown((end - begin) * 1e3)} ms")
    if bars["num_preemptions"][i]:
        words.append(f"preempted {bars['num_preemptions'][i]} times")
    return ", ".join(words)
