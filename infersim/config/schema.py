"""The JSON Schema of a scenario file, for editors."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from .base import Description, field_docstrings
from .scenario import Scenario


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a scenario; each key is described by the text below its field in the source."""
    schema = described(Scenario, _descriptions(Description))
    for key in ("hardware", "workload"):
        named = {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{key.capitalize()}"}]}
        schema["properties"][key] = named | {"description": schema["properties"][key]["description"]}
    return schema


def described(model: type[BaseModel], parts: Sequence[type]) -> dict[str, Any]:
    """JSON Schema of a model; keys of it and of its parts with the texts below them."""
    schema = model.model_json_schema()
    texts = {part.__name__: field_docstrings(part) for part in parts}
    for name, definition in [(model.__name__, schema), *schema["$defs"].items()]:
        for key, text in texts.get(name, {}).items():
            if key in definition.get("properties", {}):
                definition["properties"][key]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _descriptions(model: type[Description]) -> list[type[Description]]:
    return [model, *(inner for child in model.__subclasses__() for inner in _descriptions(child))]
