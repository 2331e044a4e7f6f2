"""The inputs beside the answer, with their values in a scenario, and what changing one does to its text."""

from dataclasses import replace
from typing import Any

import numpy as np

from infersim.config.errors import InputError
from infersim.config.scenario import Scenario
from infersim.deployment import deployments_of

from . import inputs
from .control import Change, Control, Form, Group
from .edit import WHERE


def controls(scenario: Scenario, data: dict[str, Any], ran: dict[str, Any] | None = None) -> list[Group]:
    """Every input, in groups. scenario: what `data`, a mapping read from YAML, says; ran: its engine as resolved."""
    resolved = scenario.resolved()
    engine = ran or _engine(scenario)
    origin = engine.get("origin", {})
    bare = type(scenario.engine)(preset=scenario.engine.preset)
    without = _engine(scenario.model_copy(update={"engine": bare})) if scenario.engine != bare else engine

    def filled(control: Control | Form) -> Control | Form:
        if isinstance(control, Form):
            return control
        given = _at(data, control.key) is not None
        value, default = _at(resolved, control.key), ""
        value = scenario.hardware.name if control.key == "hardware" else value
        section, _, name = control.key.partition(".")
        if section == "engine" and name != "preset":
            value = engine.get(name, value)
            where = "" if given else f" ({origin.get(name, '')})"
            default = f"{_shown(without[name])}{where}" if name in without else ""
        elif not given:
            default = _shown(value) if value is not None else "none"
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = value * control.factor
        if value == "inf":
            value = None
        return replace(control, value=value, default=default, given=given).widened()

    groups: list[Group] = [
        ("Traffic", inputs.traffic(scenario)),
        ("Prompts and answers", inputs.lengths(scenario)),
        ("Limits (SLO)", inputs.slo()),
        ("Model and device", inputs.device(scenario)),
        ("Replicas and router", inputs.cluster(scenario)),
        ("Precision", inputs.precision()),
        ("Engine", inputs.engine_controls(engine)),
        ("Speculative decoding", inputs.speculation(scenario)),
        ("Run", inputs.run()),
    ]
    return [(name, [filled(control) for control in group]) for name, group in groups]


def _engine(scenario: Scenario) -> dict[str, Any]:
    """The engine as resolved; empty if it cannot be."""
    try:
        return dict(vars(deployments_of(scenario)[0][0].engine))
    except InputError:
        return {}


def changes_of(groups: list[Group], key: str, value: Any) -> list[Change]:
    """What the page's input comes to in the YAML. InputError for an input that there is not."""
    for control in (control for _, group in groups for control in group):
        if control.key == key:
            if isinstance(control, Form):
                if value not in control.options:
                    raise InputError(f"{WHERE}: {key}: must be one of {', '.join(control.options)}")
                return control.options[value]
            return [(key, control.written(value))]
    raise InputError(f"{WHERE}: {key[:60]!r} is no input of this page")


def text_alone(data: dict[str, Any], groups: list[Group]) -> list[str]:
    """Keys that the text sets and no input of the page shows: nothing that changes the answer is hidden."""
    shown = [
        key
        for _, group in groups
        for c in group
        for key in ([k for way in c.options.values() for k, _ in way] if isinstance(c, Form) else [c.key])
    ]

    def leaves(value: Any, path: str) -> list[str]:
        if any(path == key or path.startswith(f"{key}.") for key in shown):
            return []
        if not isinstance(value, dict):
            return [path]
        return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{path}.{name}")]

    return [leaf for name, value in data.items() for leaf in leaves(value, str(name))]


def _at(data: Any, key: str) -> Any:
    for name in key.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,.6g}" if isinstance(value, int | float) else str(value)


def histogram(columns: np.ndarray, bins: int = 40) -> tuple[list[float], list[float]]:
    """Edges and shares of a distribution of lengths, without its last percent."""
    top = max(float(np.percentile(columns, 99)), 2.0)
    counts, edges = np.histogram(columns, bins=bins, range=(0, top))
    return edges[:-1].tolist(), (counts / max(1, len(columns))).tolist()
