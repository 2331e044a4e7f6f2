"""The reference of scenario and plan files as Markdown, from their schema."""

from collections.abc import Iterable, Mapping
from typing import Any

from infersim.config.base import field_docstrings
from infersim.config.plan import Plan
from infersim.config.schema import json_schema

WIDE = 150


def reference(rules: Iterable[tuple[str, str, str]], facts: Mapping[str, str]) -> str:
    """Every key of a scenario, section by section, with its kind, default and meaning; then those of a plan; then what
    does not go together: (condition, key, message), and what conditions may name beside knobs."""
    schema = json_schema()
    parts = [
        "# Reference of scenario and plan files",
        "Generated from the schema by `infersim show reference`. Quantities take a number in SI units or a text with a"
        " unit: `3.35 TB/s`, `80 GiB`, `989 TFLOP/s`, `500 ms`. Any key can be set on the command line:"
        " `--set engine.max_num_seqs=512`.",
        "## Scenario",
        _keys(schema["properties"], schema.get("required", ())),
    ]
    for name, definition in sorted(schema["$defs"].items()):
        if "properties" in definition:
            about = " ".join((definition.get("description") or "").split())
            parts += [f"## {name}", *([about] if about else [])]
            parts.append(_keys(definition["properties"], definition.get("required", ())))
    plan = Plan.model_json_schema()
    described = field_docstrings(Plan)
    for key, text in described.items():
        plan["properties"][key]["description"] = text
    parts += ["## Plan", "All keys of a scenario, the same for all candidates, and:"]
    parts.append(_keys(plan["properties"], plan.get("required", ())))
    parts += ["## What does not go together", "Conditions name keys of `engine`, and what the last table explains."]
    lines = ["| when | key | message |", "|---|---|---|"]
    parts.append("\n".join(lines + [f"| `{_cell(when)}` | {key} | {_cell(text)} |" for when, key, text in rules]))
    lines = ["| name in conditions | |", "|---|---|"]
    parts.append("\n".join(lines + [f"| `{name}` | {_cell(about)} |" for name, about in facts.items()]))
    return "\n\n".join(parts) + "\n"


def _keys(properties: dict[str, Any], required: Any) -> str:
    lines = ["| key | kind | default | |", "|---|---|---|---|"]
    for key, field in properties.items():
        default = "required" if key in required else _value(field.get("default"))
        about = " ".join((field.get("description") or "").split())
        lines.append(f"| `{key}` | {_kind(field)} | {default} | {_cell(about)} |")
    return "\n".join(lines)


def _kind(field: dict[str, Any]) -> str:
    """The kind of a value in a few words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in field:
            if field.get("title", "A")[0].islower():  # one of ours: what a quantity is
                return _cell(field["title"])
            kinds = [_kind(each) for each in field[key] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in field or "const" in field:
        values = ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
        return values if len(values) < WIDE else f"one of {len(field['enum'])} words"
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    if field.get("type") == "object":
        return "mapping"
    return {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}.get(
        field.get("type", ""), "value"
    )


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict | list):
        return "its own defaults" if value else ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
