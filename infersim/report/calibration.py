"""Calibration and validation on the terminal."""

import textwrap
from typing import Any

from infersim.explain.change import by, plain
from infersim.metrics.latency import METRICS, STATISTICS

from .html import Page
from .parts import reproduce, table
from .svg import Series, chart
from .terminal import width


def validation_lines(document: dict[str, Any]) -> list[str]:
    """The report of one run of `calibration.validation`."""
    failed = f", {document['failed']:,} failed" if document["failed"] else ""
    lines = [f"{document['where']}: {document['requests']:,} requests{failed}"]
    errors = document["errors"]
    lines.append(f"{'ms':6}{'':10}" + "".join(f"{statistic:>12}" for statistic in STATISTICS))
    for metric in METRICS:
        cells = [errors.get(f"{statistic}_{metric}_ms") for statistic in STATISTICS]
        if any(cells):
            for row, form in (("measured", plain), ("predicted", plain), ("error", by)):
                label = metric if row == "measured" else ""
                texts = (form(cell[row]) if cell else "-" for cell in cells)
                lines.append(f"{label:6}{row:10}" + "".join(f"{text:>12}" for text in texts))
    for name, row in errors.items():
        if "throughput" in name:
            measured, predicted = (f"{who} {plain(row[who])}/s" for who in ("measured", "predicted"))
            lines.append(f"{name}: {measured}, {predicted}, {by(row['error'])}")
    verdicts = [(who, document[who]) for who in ("measured", "predicted") if document[who]]
    lines += [f"server {who}: {verdict['state']} ({verdict['reason']})" for who, verdict in verdicts]
    if document["points_to"]:
        lines.append(f"residual points to: {document['points_to']}")
    lines += [f"warning: {warning}" for warning in document["warnings"]]
    lines += [f"note: {note}" for note in document["notes"]]
    return [wrapped for line in lines for wrapped in (textwrap.wrap(line, width()) if len(line) > width() else [line])]


def validation_page(documents: list[dict[str, Any]], command: list[str]) -> Page:
    """The report of `infersim validate`: each run's errors, and where requests were kept, both distributions."""
    sections = []
    for number, document in enumerate(documents):
        charts = [
            {
                "title": f"{metric}, measured and predicted",
                "note": "share of requests that come at most so late",
                "svg": chart(
                    f"Distribution of {metric}",
                    "",
                    [Series(who, values, list(range(1, 100))) for who, values in pair.items()],
                    "ms",
                    "%",
                ),
            }
            for metric, pair in (document["quantiles"] or {}).items()
        ]
        rows = [[name, row["measured"], row["predicted"], by(row["error"])]
                for name, row in document["errors"].items()]  # fmt: skip
        said = [f"server {who}: {found['state']} ({found['reason']})"
                for who in ("measured", "predicted") if (found := document[who])]  # fmt: skip
        said += [f"residual points to: {document['points_to']}"] if document["points_to"] else []
        said += [f"warning: {warning}" for warning in document["warnings"]]
        caption = "Errors; latencies in ms, rates in 1/s"
        sections.append(
            {
                "id": f"run-{number}",
                "title": document["where"],
                "charts": charts,
                "tables": [table(caption, ["metric", "measured", "predicted", "error"], rows)],
                "notes": said + document["notes"],
            }
        )
    wrong = sum(bool(document["warnings"]) for document in documents)
    found = f"{sum(document['requests'] for document in documents):,} requests of {len(documents)} runs"
    head = f"{found}; {wrong} of them do not match the scenario" if wrong else found
    return Page("Prediction against measurement", head, not wrong, [*sections, reproduce(command)])


def device_lines(document: dict[str, Any]) -> list[str]:
    """The report of `infersim calibrate device`: the error of what was not fitted comes last."""
    calibration, rejected = document["calibration"], document["rejected"]
    lines = [
        f"{document['name']}: {calibration['device']}, driver {calibration['driver']},"
        f" {calibration['stack']} {calibration['version']}",
        f"{document['measured']} cases measured, {len(rejected)} rejected or not possible here",
    ]
    lines += [f"  {row['name']}: {row['why']}" for row in rejected[:MOST_REJECTED]]
    if len(rejected) > MOST_REJECTED:
        lines.append(f"  ... and {len(rejected) - MOST_REJECTED} more in the report")
    lines += [f"note: {note}" for note in calibration["notes"]]
    lines.append(f"{'class':24}{'bandwidth':>10}{'FLOP/s':>8}{'fixed us':>10}{'softness':>10}  errors")
    for key, row in document["efficiency"].items():
        errors = "; ".join(f"{what} {text}" for what, text in row["errors"].items())
        numbers = f"{row['bandwidth']:>10.3f}{row['flops']:>8.3f}{row['fixed'] * 1e6:>10.2f}{row['softness']:>10.3f}"
        lines.append(f"{key:24}{numbers}  {errors}")
    lines += [f"{what}: {text}" for what, text in calibration["errors"].items() if what != "step, all"]
    lines += [f"written {file}" for file in document["files"]]
    lines.append(
        f"whole model steps, not fitted: {document['step_error']} (steps repeat themselves within"
        f" {calibration['repeat_spread']:.1%})"
    )
    return lines


MOST_REJECTED = 12


def overheads_lines(document: dict[str, Any]) -> list[str]:
    """The report of `infersim calibrate server`."""
    lines = ["engine:"]
    for name, value in document["engine"].items():
        lines.append(f"  {name}: {seconds(value)}  # +- {seconds(document['uncertainty'][name])} (two standard errors)")
    lines.append("mean errors of the prediction (fitted: before -> after; held out: after)")
    for run in document["runs"]:
        texts = []
        for metric in ("ttft", "tpot"):
            if metric in run["before"]:
                texts.append(f"{metric} {run['before'][metric]:+.1%} -> {run['after'][metric]:+.1%}")
        held = ", ".join(f"{metric} {value:+.1%}" for metric, value in run["held_out"].items())
        held = f"{run['held_out_requests']:,} held out: {held}" if held else "nothing held out"
        lines.append(f"  {run['where']}: {run['fitted_requests']:,} fitted: {', '.join(texts)}; {held}")
    return lines


def seconds(value: float) -> str:
    """A time as the description files write it."""
    return f"{value * 1e3:.4g} ms" if value >= 0.5e-3 or value == 0 else f"{value * 1e6:.3g} us"


def kernel_lines(efficiency: dict[str, Any]) -> list[str]:
    """The report of `infersim calibrate kernels`: OperatorEfficiency by class and dtype."""
    lines = []
    for key, shares in efficiency.items():
        lines += [f"{key}"] + [f"  {what}: {text}" for what, text in shares.errors.items()]
    return lines
