"""The report of a device calibration: one HTML page with two plots."""

import base64
import io
from typing import Any

import jinja2
import numpy as np

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #ddd}
td.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%}</style></head><body>
<h1>{{ title }}</h1>
<p>{{ calibration.device }}, driver {{ calibration.driver }}, {{ calibration.stack }} {{ calibration.version }},
{{ calibration.date }}.<br><code>{{ calibration.command }}</code></p>
{% for note in calibration.notes %}<p>{{ note }}</p>{% endfor %}
<h2>Whole model steps, measured and not fitted</h2>
<img alt="Predicted against measured time of model steps" src="data:image/png;base64,{{ steps_plot }}">
<table><tr><th>step</th><th>measured ms</th><th>predicted ms</th><th>error</th></tr>
{% for row in steps %}<tr><td>{{ row.name }}</td><td class="n">{{ "%.4g"|format(row.measured * 1e3) }}</td>
<td class="n">{{ "%.4g"|format(row.predicted * 1e3) }}</td>
<td class="n">{{ "%+.1f %%"|format((row.predicted / row.measured - 1) * 100) }}</td></tr>{% endfor %}</table>
<h2>Roofline</h2>
<img alt="Achieved FLOP/s against arithmetic intensity" src="data:image/png;base64,{{ roofline_plot }}">
<h2>Efficiencies</h2>
<table><tr><th>class</th><th>bandwidth</th><th>FLOP/s</th><th>fixed us</th><th>softness</th><th>errors</th></tr>
{% for key, row in efficiency.items() %}<tr><td>{{ key }}</td><td class="n">{{ "%.3f"|format(row.bandwidth) }}</td>
<td class="n">{{ "%.3f"|format(row.flops) }}</td><td class="n">{{ "%.2f"|format(row.fixed * 1e6) }}</td>
<td class="n">{{ "%.3f"|format(row.softness) }}</td>
<td>{% for what, text in row.errors.items() %}{{ what }}: {{ text }}<br>{% endfor %}</td></tr>{% endfor %}</table>
<h2>Rejected</h2>
{% if rejected %}<table>{% for row in rejected %}<tr><td>{{ row.name }}</td><td>{{ row.why }}</td></tr>
{% endfor %}</table>{% else %}<p>Nothing.</p>{% endif %}
</body></html>
"""


def calibration_page(document: dict[str, Any]) -> str:
    """HTML of `calibration.calibrate_device`'s document; plots are inside."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        **document,
        title=f"Calibration of {document['calibration']['device']}",
        steps_plot=_png(_plot_steps, document["steps"]),
        roofline_plot=_png(_plot_roofline, document),
    )


def _png(draw: Any, data: Any) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    draw(axes, data)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def _plot_steps(axes: Any, steps: list[dict]) -> None:
    for kind, marker in (("decode", "o"), ("prefill", "s"), ("mixed", "^")):
        rows = [row for row in steps if row["kind"] == kind]
        axes.plot([r["measured"] * 1e3 for r in rows], [r["predicted"] * 1e3 for r in rows], marker, label=kind)
    if steps:
        ends = np.array([min(r["measured"] for r in steps), max(r["measured"] for r in steps)]) * 1e3
        axes.plot(ends, ends, "-", color="black", linewidth=1, label="equal")
        axes.plot(ends, ends * 1.1, ":", ends, ends / 1.1, ":", color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel="measured, ms", ylabel="predicted, ms (dotted: 10 % off)", title="Whole model steps")
    axes.legend()


def _plot_roofline(axes: Any, document: dict) -> None:
    points, bandwidth, peak = document["points"], document["memory_bandwidth"], document["peak"]
    for group in dict.fromkeys(point["group"] for point in points):
        rows = [p for p in points if p["group"] == group]
        axes.plot([p["intensity"] for p in rows], [p["rate"] / 1e9 for p in rows], ".", label=group)
    if points:
        x = np.geomspace(min(p["intensity"] for p in points), max(p["intensity"] for p in points), 200)
        axes.plot(x, np.minimum(x * bandwidth, peak) / 1e9, "-", color="black", linewidth=1, label="peak")
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel="FLOP per byte", ylabel="GFLOP/s", title="Roofline (bf16)")
    axes.legend()
