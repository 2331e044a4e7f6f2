"""What every description shares: frozen, no unknown keys, and all of its errors at once, one line each."""

import ast
import difflib
import inspect
import textwrap
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from .errors import InputError
from .units import short

MANY, FEW = 10, 3  # alternatives, more of which an error does not list, but so many of


class Description(BaseModel):
    """A frozen description read from YAML. `validate` is the only way in for data that a user wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def validate(cls, data: Any, where: str) -> Self:  # type: ignore[override]  # pydantic 1's, of that name
        """The description that `data` holds. InputError with a line `where: dotted.path: message` for each problem."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [_line(cls, data, e, where) for e in error.errors(include_url=False)]
            raise InputError(dict.fromkeys(lines)) from None


class Sparse(Description):
    """One that writes only what is given."""

    @model_serializer(mode="wrap")
    def _given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}


def near(word: str, known: list[str], known_as: str = "known") -> str:
    """`; did you mean X?` if some are close, else `; known: all of them`, of many the nearest."""
    alike = [k for k in known if word and k.startswith(word[:3])]
    longer = [k for k in known if word and k.startswith(word)]
    close = longer if 0 < len(longer) <= FEW else difflib.get_close_matches(word[:100], known, 1)
    close = close or (alike if len(alike) <= FEW else _nearest(word, alike))
    if close:
        return f"; did you mean {' or '.join(close)}?"
    if len(known) > MANY:
        return f"; nearest of {len(known)} {known_as}: {', '.join(_nearest(word, known))}"
    return f"; {known_as}: {', '.join(known)}"


def _nearest(word: str, known: list[str]) -> list[str]:
    return difflib.get_close_matches(word[:100], known, FEW, 0.0)


def _line(cls: type[BaseModel], data: Any, error: Any, where: str) -> str:
    model: type[BaseModel] | None = cls
    path: list[str] = []
    here = data
    parts = list(error["loc"])
    for i, part in enumerate(parts):
        inside = part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int)
        if not inside and i < len(parts) - 1:
            continue  # a branch of a union, not a key
        if not inside and error["type"] != "missing":
            continue
        path.append(short(part)[1:-1] if isinstance(part, str) else str(part))
        if i < len(parts) - 1:
            model = _model_of(model, part)
            here = here[part]
    message = _message(model, error)
    return f"{where}: {'.'.join(path)}: {message}" if path else f"{where}: {message}"


def _model_of(model: type[BaseModel] | None, part: Any) -> type[BaseModel] | None:
    """The description that field `part` of `model` holds, looking through Optional, dict, list and Annotated."""
    if model is None or part not in model.model_fields:
        return model  # an index or a dict key below the field already followed
    todo = [model.model_fields[part].annotation]
    while todo:
        kind = todo.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        todo += get_args(kind)
    return None


def _message(model: type[BaseModel] | None, error: Any) -> str:
    kind, context, got = error["type"], error.get("ctx", {}), short(error["input"])
    match kind:
        case "extra_forbidden":
            known = list(model.model_fields) if model else []
            return "unknown key" + near(str(error["loc"][-1]), known, "known keys")
        case "invalid_key":
            return "a key must be a word"
        case "missing":
            name = error["loc"][-1]
            about = field_docstrings(model).get(name) if model else None
            return "missing" + (f"; {' '.join(about.split())}" if about else "")
        case "value_error":
            return str(context["error"]).replace("\n", " ")
        case "literal_error" | "enum":
            return f"must be one of {context['expected'].replace(' or ', ', ')} (got {got})"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a mapping of keys to values (got {got})"
        case "string_too_short":
            return "must not be empty"
        case "string_too_long":
            return f"must have at most {context['max_length']} characters (got {len(error['input'])})"
        case "string_type":
            return f"must be a text (got {got}; quote it if it is a name)"
        case "list_type" | "tuple_type":
            return f"must be a list (got {got})"
        case "too_short" | "too_long":
            few, bound = ("least", "min_length") if kind == "too_short" else ("most", "max_length")
            return f"must have {context[bound]} at {few} (got {got})"
        case "bool_type" | "bool_parsing":
            return f"must be true or false (got {got})"
        case "none_required":
            return f"must be null (got {got})"
    return f"{error['msg'].replace('Input should', 'must').splitlines()[0]} (got {got})"


def field_docstrings(model: type) -> dict[str, str]:
    """Field -> the string that follows it in the class body. pydantic could do this, at every import: 40 ms."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    except (OSError, TypeError, ValueError):  # a class made by a function
        return {}
    texts = {}
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                texts[name] = inspect.cleandoc(about)
    return texts
