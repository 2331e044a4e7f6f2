"""YAML files that users copy: found by path or by name, read with errors that say where."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .base import near
from .errors import InputError
from .units import short

PACKAGE = Path(__file__).parents[1]
FOLDERS = {"hardware_profiles": "hardware profile", "workloads": "workload", "scenarios": "scenario",
           "drafters": "drafter", "engine_presets": "engine preset"}  # fmt: skip
MAX_FILE_BYTES = 1_000_000  # a description is a page; a bigger file is a trace given by mistake


def packaged(folder: str) -> Path:
    """Where `folder`'s files lie: inside an installed wheel, or at the top of a source checkout."""
    inside = PACKAGE / "data" / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


@cache
def names(folder: str) -> list[str]:
    """Names of the packaged files of `folder`, sorted."""
    return sorted(path.stem for path in packaged(folder).glob("*.yaml"))


def exists(path: Path) -> bool:
    """Whether a file or folder lies there; no is also the answer for text that cannot be a path."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether a file lies there."""
    return exists(path) and path.is_file()


def find(folder: str, name_or_path: str | Path, near_file: Path | None = None, where: str = "") -> Path:
    """The file meant: a path (from the folder of `near_file`, then from the current one), else a packaged name.

    InputError lists near names; `where` says who asked. Names are lower case; any case is understood.
    """
    for base in ([near_file.parent] if near_file else []) + [Path()]:
        if is_file(base / name_or_path):
            return base / name_or_path
    path = packaged(folder) / f"{str(name_or_path).lower()}.yaml"
    if Path(name_or_path).name == str(name_or_path) and is_file(path):
        return path
    hint = near(str(name_or_path), names(folder), "known")
    asked = f"{where}: " if where else ""
    raise InputError(f"{asked}{short(str(name_or_path))}: no such {FOLDERS[folder]} or file{hint}")


def load_yaml(path: Path) -> Any:
    """The content of one YAML file. InputError with the line for anything that is not plain, unambiguous YAML."""
    where = str(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{where}: larger than {MAX_FILE_BYTES} bytes; a description is a short YAML file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start} is not UTF-8 text; must be a YAML file") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from None
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """The value that a YAML text holds; errors as in `load_yaml`."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        why = " ".join(str(error.problem or error.context).split())
        if "another document" in why:
            why = "a second YAML document; must be one (`infersim show deployment` reads manifests)"
        raise InputError(f"{where}: {line}{why}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise InputError(f"{where}: not YAML text: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; a description is a few levels deep") from None
    except (ValueError, LookupError, AttributeError) as error:  # what PyYAML lets through for odd values: !!int x
        raise InputError(f"{where}: a value cannot be read: {short(str(error))}") from None


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser, where PyYAML was built with it


class Loader(_SafeLoader):
    """Safe YAML in which a key given twice is an error, and without dates and merge keys: a scenario needs neither."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute)
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":timestamp", ":merge"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """YAML 1.1 takes 1:30 for 90, in base 60: here it is text, which no number may be."""
        if ":" in node.value:
            return node.value
        return self.construct_yaml_float(node) if node.tag.endswith(":float") else self.construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict | set):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in mapping:
                problem = f"key {short(key)} is given twice; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


for kind in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)
