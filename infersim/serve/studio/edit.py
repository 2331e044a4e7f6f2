"""A scenario as a text: one key is set or removed, and everything else stays as its author wrote it."""

import copy
from pathlib import Path
from typing import Any

import yaml

from infersim.config.errors import InputError
from infersim.config.resources import Loader, parse_yaml
from infersim.config.scenario import LOAD, section

WHERE = "scenario"
"""what errors call the text"""


class Remove:
    """In the place of a value: the key goes, and what has nothing left in it."""


def read(text: str) -> dict[str, Any]:
    """The mapping that the text holds. InputError if it holds none."""
    data = parse_yaml(text, WHERE)
    if not isinstance(data, dict):
        raise InputError(f"{WHERE}: must be a mapping with model, hardware and workload")
    return data


def set_key(text: str, key: str, value: Any, near_file: Path | None) -> str:
    """The text with `key.key` set to a value, or removed. InputError if a part of the key holds no mapping."""
    data, path = copy.deepcopy(read(text)), key.split(".")
    if len(path) > 1 and path[0] in LOAD and isinstance(data.get(path[0]), str):
        data[path[0]] = section(data[path[0]], path[0], WHERE, near_file)
        text = _written(text, path[:1], data[path[0]], data)
    cluster = data.get("cluster")
    router = cluster.get("router") if isinstance(cluster, dict) else None
    if path[:2] == ["cluster", "router"] and len(path) > 2 and isinstance(router, str):  # a policy stands for the whole
        data["cluster"]["router"] = {"policy": router}
        text = _written(text, path[:2], {"policy": router}, data)
    if value is Remove:
        path = _remove(data, path)
        return _written(text, path, value, data) if path else text
    here = data
    for depth, name in enumerate(path[:-1]):
        inner = here.get(name)
        if inner is None:
            inner = here[name] = {}
        if not isinstance(inner, dict):
            raise InputError(
                f"{WHERE}: {'.'.join(path[: depth + 1])} is {inner!r:.40}, which has no key {path[depth + 1]}"
            )
        here = inner
    here[path[-1]] = value
    return _written(text, path, value, data)


def _remove(data: dict[str, Any], path: list[str]) -> list[str]:
    """Removes what the path names; returns the path of the outermost thing that went, empty if nothing was there."""
    chain = [data]
    for name in path[:-1]:
        inner = chain[-1].get(name)
        if not isinstance(inner, dict):
            return []
        chain.append(inner)
    if path[-1] not in chain[-1]:
        return []
    depth = len(path) - 1
    del chain[depth][path[depth]]
    while depth and not chain[depth]:
        depth -= 1
        del chain[depth][path[depth]]
    return path[: depth + 1]


def _written(text: str, path: list[str], value: Any, data: dict[str, Any]) -> str:
    """The text with one change made in place; written anew where that does not come to the same as `data`."""
    try:
        changed = _without(text, path) if value is Remove else _with(text, path, value)
        if parse_yaml(changed, WHERE) == data:
            return changed
    except (InputError, yaml.YAMLError, LookupError, AttributeError, StopIteration):
        pass
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


def _with(text: str, path: list[str], value: Any) -> str:
    node = yaml.compose(text, Loader=Loader)
    for depth, name in enumerate(path):
        found = [inner for key, inner in node.value if key.value == name]
        if not found:
            for inner in reversed(path[depth + 1 :]):
                value = {inner: value}
            return _added(text, node, f"{name}: {_flow(value)}")
        node = found[0]
    start, end = _span(text, node)
    return text[:start] + _flow(value) + text[end:]


def _added(text: str, node: Any, entry: str) -> str:
    """The text with an entry at the end of a mapping."""
    if node.flow_style:
        end = node.end_mark.index - 1
        return text[:end].rstrip() + (", " if node.value else "") + entry + text[end:]
    end = text.find("\n", _span(text, node.value[-1][1])[1])
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{' ' * node.value[0][0].start_mark.column}{entry}{text[end:]}"


def _without(text: str, path: list[str]) -> str:
    node = yaml.compose(text, Loader=Loader)
    for name in path[:-1]:
        node = next(inner for key, inner in node.value if key.value == name)
    number = next(i for i, (key, _) in enumerate(node.value) if key.value == path[-1])
    key, value = node.value[number]
    start, end = key.start_mark.index, _span(text, value)[1]
    if not node.flow_style:
        line_end = text.find("\n", end)
        return text[: text.rfind("\n", 0, start) + 1] + (text[line_end + 1 :] if line_end >= 0 else "")
    if number:
        start = _span(text, node.value[number - 1][1])[1]
    elif len(node.value) > 1:
        end = node.value[1][0].start_mark.index
    return text[:start] + text[end:]


def _span(text: str, node: Any) -> tuple[int, int]:
    """Where a node stands, without the blanks behind it."""
    start, end = node.start_mark.index, node.end_mark.index
    return start, start + len(text[start:end].rstrip())


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
