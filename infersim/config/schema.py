"""The JSON Schema of a scenario file, for editors."""

from typing import Any

from .base import Description, field_docstrings
from .scenario import Scenario


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a scenario; each key is described by the text below its field in the source."""
    schema = Scenario.model_json_schema()
    described = {model.__name__: field_docstrings(model) for model in _descriptions(Description)}
    for name, definition in [("Scenario", schema), *schema["$defs"].items()]:
        for key, text in described.get(name, {}).items():
            if key in definition.get("properties", {}):
                definition["properties"][key]["description"] = text
    for key in ("hardware", "workload"):
        named = {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{key.capitalize()}"}]}
        schema["properties"][key] = named | {"description": described["Scenario"][key]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _descriptions(model: type[Description]) -> list[type[Description]]:
    return [model, *(inner for child in model.__subclasses__() for inner in _descriptions(child))]
