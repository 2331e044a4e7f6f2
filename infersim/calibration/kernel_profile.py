"""A hardware profile with calibrated efficiencies, as YAML that people can read."""

import json
import textwrap

from infersim.config.hardware import OperatorEfficiency

HEADING = """
# From here on written by `infersim calibrate kernels`: numbers of the laws in infersim/cost/laws.py, and corrections on
# grids (logarithms of factors, in thousandths). Errors are |predicted / measured - 1|.
efficiency:
"""
WIDTH = 110


def with_efficiency(text: str, efficiency: dict[str, OperatorEfficiency]) -> str:
    """The profile `text`, its own efficiency replaced by this one: the last part of the file, heading included."""
    base = text.split(HEADING.strip().splitlines()[0])[0]
    if "\nefficiency:" in base:
        base = base.split("\nefficiency:")[0]
    return base.rstrip() + "\n" + HEADING + "".join(_entry(key, shares) for key, shares in efficiency.items())


def _entry(key: str, shares: OperatorEfficiency) -> str:
    lines = [
        f"  {key}:",
        f"    bandwidth: {shares.bandwidth:.4g}",
        f"    flops: {shares.flops:.4g}",
        f"    fixed: {shares.fixed * 1e6:.4g} us",
        f"    softness: {shares.softness:.4g}",
    ]
    if shares.terms:
        lines.append("    terms: {" + ", ".join(f"{name}: {value:.4g}" for name, value in shares.terms.items()) + "}")
    lines.append(f"    provenance: {shares.provenance}")
    lines += _folded("    source: ", shares.source)
    if shares.errors:
        lines.append("    errors:")
        lines += [f"      {name}: {json.dumps(value)}" for name, value in shares.errors.items()]
    if shares.correction:
        axes = ", ".join(f"{name}: {list(axis)}" for name, axis in shares.correction.axes.items())
        lines += ["    correction:", f"      axes: {{{axes}}}"]
        lines += _folded("      values: ", shares.correction.values)
    return "\n".join(lines) + "\n"


def _folded(label: str, text: str) -> list[str]:
    indent = " " * (len(label) - len(label.lstrip()) + 2)
    return [f"{label}>-", *(indent + line for line in textwrap.wrap(text, WIDTH - len(indent), break_on_hyphens=False))]
