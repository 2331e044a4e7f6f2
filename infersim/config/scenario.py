"""A scenario: everything that one run needs, read from YAML."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from .base import Description, near
from .cluster import Cluster
from .drafting import load_drafting
from .early_exit import EarlyExit
from .engine import Engine
from .errors import InputError
from .hardware import Hardware, load_hardware
from .lora import Lora
from .parallelism import Parallelism
from .precision import Precision
from .prices import Prices
from .resources import MAX_FILE_BYTES, exists, find, is_file, load_yaml, names, parse_yaml
from .slo import Slo
from .speculation import Speculation
from .units import Count, CountOrZero, parse_quantity, short
from .workload import Workload


def _warmup(value: Any) -> float | str:
    return value if value == "auto" else parse_quantity(value, "s")


class Simulation(Description):
    """How the run is made, not what is run."""

    seed: CountOrZero = 0
    replications: Annotated[Count, Field(le=10_000)] = 1
    """runs with different draws, for confidence intervals"""
    warmup: Annotated[
        float | Literal["auto"],
        BeforeValidator(_warmup),
        WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}),
    ] = 0.0
    """seconds at the start that metrics leave out; auto only for open-ended stationary workloads"""


class Scenario(Description):
    """One deployment under one workload; the least is model, hardware and workload."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    """catalogue name, or a path to a Hugging Face config.json or its folder"""
    hardware: Hardware
    """name or path of a hardware profile, or the profile itself"""
    workload: Workload
    """name or path of a workload, or the workload itself"""
    parallelism: Parallelism = Parallelism()
    precision: Precision = Precision()
    engine: Engine = Engine()
    slo: Slo = Slo()
    cluster: Cluster = Cluster()
    speculation: Speculation | None = None
    """speculative decoding; null: none"""
    lora: Lora | None = None
    """LoRA adapters; null: none"""
    early_exit: EarlyExit | None = None
    """layers after which tokens may leave; approximate; null: none"""
    prices: Prices = Prices()
    simulation: Simulation = Simulation()

    @model_validator(mode="after")
    def _priced(self) -> "Scenario":
        for device in self.prices.usd_per_hour.keys() - {hardware.name for hardware in self.devices}:
            if device not in (known := names("hardware_profiles")):
                raise ValueError(f"prices.usd_per_hour.{short(device)[1:-1]}: is no device" + near(device, known))
        return self

    @property
    def devices(self) -> list[Hardware]:
        """Of its own, of kinds and pools, of a drafter apart."""
        apart = self.speculation and self.speculation.drafter and self.speculation.drafter.hardware
        return [
            self.hardware,
            *(h for group in self.cluster.groups if (h := group.hardware)),
            *([apart] if apart else []),
        ]

    def resolved(self) -> dict[str, Any]:
        """The scenario with every default, JSON-ready, in SI units; valid input for `build_scenario` again."""
        told = self.model_dump(mode="json", exclude={"hardware"})
        told["slo"] = self.slo.model_dump(mode="json", exclude_none=True)
        return {"model": told.pop("model"), "hardware": self.hardware.told(), **told}


Given = str | Path | Mapping[str, Any] | Scenario
"""what a scenario may be given as: path or packaged name of a file, "-" for standard input, its keys, or itself"""


def source(given: Given) -> tuple[Any, str, Path | None]:
    """What a scenario or plan holds before it is read, what errors call it, and its file, if it is one."""
    if isinstance(given, Scenario):
        return given.resolved(), "scenario", None
    if isinstance(given, Mapping):
        return dict(given), "scenario", None
    if str(given) == "-":
        try:
            return parse_yaml(sys.stdin.read(MAX_FILE_BYTES), "stdin"), "stdin", None
        except UnicodeDecodeError as error:
            raise InputError(f"stdin: byte {error.start} is not UTF-8 text; must be a YAML file") from None
    path = find("scenarios", given)
    return load_yaml(path), str(path), path


def name_of(given: Given) -> str:
    """What a scenario is called beside others: the stem of its file."""
    return "scenario" if isinstance(given, Scenario | Mapping) else "stdin" if str(given) == "-" else Path(given).stem


def load_scenario(given: Given, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario, with `key.key=value` overrides. InputError with all problems at once.

    Paths inside a file are looked for beside it, then in the current folder.
    """
    if isinstance(given, Scenario) and not overrides:
        return given
    data, where, path = source(given)
    return build_scenario(data, where, overrides, path)


def load_variants(given: Given, variants: Iterable[Sequence[str]]) -> list[Scenario]:
    """The scenario with each of several lists of overrides, its files read once. InputError: all problems of all."""
    data, where, path = source(given)
    problems: list[str] = []
    if isinstance(data, dict):
        data = dict(data)
        for key, load in LOAD.items():
            if isinstance(data.get(key), str):
                _collect(problems, lambda key=key, load=load: data.update({key: load(data[key], where, path)}))
    scenarios: list[Scenario] = []
    for overrides in variants:
        _collect(problems, lambda given=overrides: scenarios.append(build_scenario(data, where, given, path)))
    if problems:
        raise InputError(dict.fromkeys(problems))
    return scenarios


def build_scenario(data: Any, where: str, overrides: Sequence[str] = (), near_file: Path | None = None) -> Scenario:
    """The scenario that a mapping holds; `where` names it in errors."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: must be a mapping with model, hardware and workload (got {short(data)})")
    if "candidates" in data:
        raise InputError(f"{where}: has candidates, so it is a plan and no scenario; must be given to infersim plan")
    data = dict(data)
    problems: list[str] = []
    for override in overrides:
        _collect(problems, apply_override, data, override, where, near_file)
    data = {k: v for k, v in data.items() if v is not None or k not in Scenario.model_fields}  # empty: its default
    if "model" in data:
        data["model"] = _beside(data["model"], near_file)
    for key, load in LOAD.items():
        if isinstance(data.get(key), str):
            _collect(problems, lambda key=key, load=load: data.update({key: load(data[key], where, near_file)}))
    data |= {key: _anchored(data[key], near_file) for key in ("engine", "workload") if isinstance(data.get(key), dict)}
    if isinstance(data.get("speculation"), dict):
        data["speculation"] = _speculation(data["speculation"], where, near_file, problems)
    if isinstance(data.get("cluster"), dict):
        data["cluster"] = _load_kinds(data["cluster"], where, near_file, problems)
    # what could not be loaded is still a name, and has its own message already
    unloaded = tuple(f"{where}: {key}:" for key in ("hardware", "workload") if isinstance(data.get(key), str))
    unloaded += tuple(
        line[: line.index("hardware:") + 9] for line in problems if ": cluster." in line or ": speculation." in line
    )
    try:
        scenario = Scenario.validate(data, where)
    except InputError as error:
        problems += [line for line in error.problems if not line.startswith(unloaded)]
    if problems:
        raise InputError(dict.fromkeys(problems))
    return scenario


def _collect(problems: list[str], action: Any, *args: Any) -> None:
    try:
        action(*args)
    except InputError as error:
        problems += error.problems


def apply_override(data: dict, text: str, where: str, near_file: Path | None) -> None:
    """Sets one `key.key=value` in `data`; the value is YAML."""
    asked = f"--set {short(text)[1:-1]}"
    keys, equals, value = text.partition("=")
    *path, last = keys.strip().split(".")
    if not equals or not all([*path, last]):
        raise InputError(f"{asked}: must be key=value, such as engine.max_num_seqs=512")
    here = data
    for depth, key in enumerate(path):
        inner = here.get(key)
        if depth == 0:
            inner = section(inner, key, where, near_file)
        if inner is not None and not isinstance(inner, dict):
            raise InputError(f"{asked}: {'.'.join(path[: depth + 1])} is {short(inner)}, which has no key {last}")
        here[key] = dict(inner or {})
        here = here[key]
    here[last] = parse_yaml(value, asked)


def _load_kinds(cluster: dict, where: str, near_file: Path | None, problems: list[str]) -> dict:
    """The cluster with the hardware of its kinds read by name, and their models as seen from the file."""
    cluster = dict(cluster)

    def loaded(kind: Any, path: str) -> Any:
        if not isinstance(kind, dict):
            return kind
        kind = dict(kind)
        if "model" in kind:
            kind["model"] = _beside(kind["model"], near_file)
        if isinstance(kind.get("engine"), dict):
            kind["engine"] = _anchored(kind["engine"], near_file)
        return _with_hardware(kind, f"{where}: cluster.{path}.hardware", near_file, problems)

    if isinstance(cluster.get("kinds"), list):
        cluster["kinds"] = [loaded(kind, f"kinds.{i}") for i, kind in enumerate(cluster["kinds"])]
    cluster |= {name: loaded(cluster[name], name) for name in ("prefill", "decode", "encode") if name in cluster}
    return cluster


def _with_hardware(section: dict, where: str, near_file: Path | None, problems: list[str]) -> dict:
    """The section with its hardware read by name."""
    found = dict(section)
    if isinstance(section.get("hardware"), str):
        name = section["hardware"]
        _collect(problems, lambda: found.update(hardware=load_hardware(name, near_file, where)))
    return found


def _load_hardware(name: str, where: str, near_file: Path | None) -> Hardware:
    return load_hardware(name, near_file, f"{where}: hardware")


def _load_workload(name: str, where: str, near_file: Path | None) -> dict:
    path = find("workloads", name, near_file, f"{where}: workload")
    data = load_yaml(path)
    Workload.validate(data, str(path))
    return _anchored(data, path)


LOAD: dict[str, Callable[[str, str, Path | None], Any]] = {"hardware": _load_hardware, "workload": _load_workload}
"""sections that a name or path may stand for"""


def section(value: Any, key: str, where: str, near_file: Path | None) -> Any:
    """The keys of a section, of which one is to be changed, where a name or a description may stand for it."""
    loaded = LOAD[key](value, where, near_file) if key in LOAD and isinstance(value, str) else value
    return loaded.model_dump(mode="json") if isinstance(loaded, Description) else loaded


def _anchored(section: dict, file: Path | None) -> dict:
    """The section with the file that it names as seen from the folder of `file`."""
    return {key: _beside(value, file) if key in ("trace", "preset") else value for key, value in section.items()}


def _speculation(speculation: dict, where: str, file: Path | None, problems: list[str]) -> dict:
    """The same with its method, draft model and acceptance trace as seen from the folder of `file`."""
    result = {key: _beside(value, file) if key == "model" else value for key, value in speculation.items()}
    if isinstance(result.get("acceptance"), dict):
        result["acceptance"] = _anchored(result["acceptance"], file)
    method = result.get("method")
    if isinstance(method, str) and method not in names("drafters"):
        path = Path(_beside(method, file))
        if is_file(path):
            _collect(problems, lambda: result.update(drafting=load_drafting(path).model_dump(mode="json")))
            result["method"] = path.stem
    if isinstance(result.get("drafter"), dict):
        at = f"{where}: speculation.drafter.hardware"
        result["drafter"] = _with_hardware(result["drafter"], at, file, problems)
    return result


def _beside(value: Any, file: Path | None) -> Any:
    """The path `value` as seen from the folder of `file`, if something lies there; else `value`."""
    if isinstance(value, str) and value and file and exists(file.parent / value):
        return str(file.parent / value)
    return value
