"""How answers show themselves in a notebook and at Python's prompt: a line, or a piece of HTML."""

import contextlib
import io
from collections.abc import Callable
from html import escape
from typing import Any

from .parts import shown
from .terminal import SLO, state, title

STATISTICS = ("mean", "median", "p90", "p95", "p99")


def answer_text(document: dict[str, Any]) -> str:
    """The answer of a run in one line."""
    metrics, slo = document["metrics"], document["slo"]
    parts = [state(document)] + ([f"SLO {SLO[slo['met']]}"] if slo else [])
    parts += [f"{shown(metrics['output_throughput'])} output tokens/s", f"p99 ttft {shown(metrics['p99_ttft_ms'])} ms"]
    return f"{title(document)}: {', '.join(parts)}"


def answer_html(document: dict[str, Any]) -> str:
    """The answer of a run: its head, vLLM's metrics as a table, and what binds."""
    metrics, explain, slo = document["metrics"], document["explain"], document["slo"]
    rates = [f"{shown(metrics[name])} {unit}" for name, unit in
             (("request_throughput", "requests/s"), ("output_throughput", "output tokens/s"))]  # fmt: skip
    rows = "".join(
        f"<tr><th>{metric}, ms</th>"
        + "".join(f"<td>{shown(metrics[f'{statistic}_{metric}_ms'])}</td>" for statistic in STATISTICS)
        + "</tr>"
        for metric in ("ttft", "tpot", "itl", "e2el")
    )
    head = "".join(f"<th>{statistic}</th>" for statistic in ("", *STATISTICS))
    ceiling = f" ({explain['ceiling']})" if explain["ceiling"] else ""
    lines = [
        f"<b>{escape(title(document))}</b>",
        escape(f"{state(document)}: {document['verdict']['reason']}" + (f"; SLO {SLO[slo['met']]}" if slo else "")),
        escape(f"{', '.join(rates)}; what binds: {explain['binding']}{ceiling}"),
        *map(escape, document["model_error"]["text"]),
    ]
    return f"<p>{'<br>'.join(lines)}</p><table><tr>{head}</tr>{rows}</table>"


def printed(action: Callable[..., None], *args: Any) -> list[str]:
    """The lines that a function of this package prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        action(*args)
    return text.getvalue().splitlines()


def text_html(lines: list[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"
