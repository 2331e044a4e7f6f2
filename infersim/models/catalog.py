"""Models by name or by path."""

import difflib
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from infersim.config.errors import InputError
from infersim.config.resources import is_file
from infersim.config.units import short

from .architecture import Model
from .huggingface import model_from_config

MAX_FILE_BYTES = 10_000_000
SAME_ARCHITECTURE = {"base", "chat", "hf", "instruct", "it", "meta"}
"""Words of a name that tell nothing about the architecture."""


def names() -> list[str]:
    """The catalogue's names, family by family."""
    return list(catalogue().lines)


def load_model(name_or_path: str | Path) -> Model:
    """A model by catalogue name (case, an organisation before it and a revision behind an @ do not matter) or by path
    to a config.json or folder.

    InputError says what a file lacks, or which known names come near an unknown one.
    """
    given = str(name_or_path)
    for path in (Path(given), Path(given) / "config.json"):
        if given and is_file(path):
            return model_from_config(_with_quantization(_read(path), path), _name_of(path), str(path))
    if given.endswith(".json") or given.startswith((".", "/", "~")):
        raise InputError(f"{short(given)}: no such file; must be a config.json, the folder of one, or a known name")
    words = [word for word in re.split(r"[-_ ]", given.lower().partition("@")[0].rsplit("/", 1)[-1]) if word]
    index = _index()
    plain = [word for word in words if word not in SAME_ARCHITECTURE]
    name = index.get("".join(words)) or index.get("".join(plain))
    if name is None:
        raise InputError(f"model {short(given)}: not in the catalogue{_hint('-'.join(plain))}")
    return _model(name)


@functools.cache
def _model(name: str) -> Model:
    return model_from_config(entry(name), name, f"catalogue: {name}")


def _akin(word: str, name: str) -> bool:
    """Whether two names begin with the same word, but for a slip: mamba is spelt like llama and is not meant by it."""
    a, b = (re.match("[a-z]*", each)[0] for each in (word, name))  # type: ignore[index]
    return a == b or (a[:1] == b[:1] and difflib.SequenceMatcher(None, a, b).ratio() > 0.7)


def _hint(word: str) -> str:
    lower = {name.lower(): name for name in names()}
    near = [lower[name] for name in difflib.get_close_matches(word[:100], lower, 12, 0.5) if _akin(word, name)][:4]
    known = f"did you mean {', '.join(near)}?" if near else "`infersim show models` lists what is;"
    return f"; {known} a path to a Hugging Face config.json works too"


class Catalogue(NamedTuple):
    """catalogue.txt as it stands."""

    words: dict[str, dict[str, Any]]
    columns: dict[str, list[str]]
    """by family"""
    lines: dict[str, tuple[str, list[str], list[str]]]
    """name -> family, values as they are written, and the model's other names"""


@functools.cache
def catalogue() -> Catalogue:
    found, family = Catalogue({}, {}, {}), ""
    for line in Path(__file__).with_name("catalogue.txt").read_text(encoding="utf-8").splitlines():
        facts, _, aliases = line.partition("|")
        first, *rest = facts.split() or ["#"]
        if first == "word":
            found.words[rest[0]] = json.loads(line.split(maxsplit=2)[2])
        elif first == "family":
            family, *found.columns[rest[0]] = rest
        elif not first.startswith("#"):
            found.lines[first] = (family, rest, aliases.split())
    return found


def entry(name: str) -> dict[str, Any]:
    """What the config.json of a model of the catalogue says."""
    words, columns, lines = catalogue()
    family, values, _ = lines[name]
    own, extras = values[: len(columns[family])], values[len(columns[family]) :]
    config = {"model_type": family} | {c: json.loads(v) for c, v in zip(columns[family], own, strict=True)}
    for extra in extras:
        key, _, value = extra.partition("=")
        config |= {key: json.loads(value)} if value else words[key]
    return config


@functools.cache
def _index() -> dict[str, str]:
    """Any spelling, lower case and without separators -> name."""
    return {
        re.sub("[-_]", "", known.lower()): name
        for name, (_, _, aliases) in catalogue().lines.items()
        for known in (name, *aliases)
    }


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: larger than {MAX_FILE_BYTES // 10**6} MB; must be a Hugging Face config.json")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text; must be a Hugging Face config.json") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{path}: {where}: {error.msg}; must be a complete JSON object") from None
    except (RecursionError, ValueError):  # ValueError: a number with thousands of digits
        raise InputError(f"{path}: nested too deeply, or a number is too long; must be a config.json") from None


def _with_quantization(config: Any, path: Path) -> Any:
    """The config with what ModelOpt wrote beside it where it does not say itself how it is quantised, as vLLM reads
    both (get_quant_config)."""
    beside = path.parent / "hf_quant_config.json"
    if not isinstance(config, dict) or config.get("quantization_config") or path.name != "config.json":
        return config
    return config | {"quantization_config": _read(beside)} if is_file(beside) else config


def _name_of(path: Path) -> str:
    """The folder of a config.json is named after the model; other files carry the name themselves."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
