"""The way of the data: who may import whom, what stays lazy, how large things are."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "infersim"
ROOMS = {
    "config",
    "models",
    "cost",
    "engine",
    "workload",
    "deployment",
    "cluster",
    "metrics",
    "explain",
    "planning",
    "report",
    "calibration",
    "reproduce",
    "serve",
    "cli",
}
ALLOWED = {
    "config": {"engine"},  # only its table of knobs
    "models": {"config"},
    "cost": {"config", "models", "engine"},  # of engine only its law, and the tables that it fills: price and state
    "engine": set(),
    "workload": {"config"},
    "deployment": {"config", "models", "cost", "engine", "workload"},
    "cluster": {"config", "engine", "workload"},
    "metrics": {"config", "engine", "cost"},
    "explain": {"config", "models", "engine", "cost", "metrics"},
    "planning": {"config", "models", "cost", "engine", "workload", "deployment", "metrics", "explain"},  # and run
    "report": {"config", "engine", "metrics", "explain"},
    "serve": ROOMS - {"cli", "reproduce"},
    "calibration": ROOMS - {"cli", "serve"},
    "reproduce": ROOMS - {"cli", "serve"},
    "cli": ROOMS,
}


MODULES = {path.relative_to(PACKAGE.parent).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}


def modules_of(path: Path, for_types: bool = False) -> set[tuple[str, ...]]:
    """Modules of infersim that a file imports, at run time or lazily, and on request also for its types only."""
    found = set()
    tree = ast.parse(path.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    guards = [node for node in guards if getattr(node.test, "id", "") == "TYPE_CHECKING" and not for_types]
    skipped = {id(inner) for node in guards for inner in ast.walk(node)}
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found |= {module} | {(*module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
    return found & MODULES.keys()


def imports_of(path: Path) -> set[tuple[str, str]]:
    """(room, module) of infersim that a file imports, at run time or lazily."""
    return {(module[1], ".".join(module)) for module in modules_of(path) if module[1] in ROOMS}


def test_no_circle():
    """No module needs another that needs it, neither when it runs nor for its types.

    Packages are left out: their __init__ only forward names, if anything.
    """
    needs = {name: modules_of(path, for_types=True) for name, path in MODULES.items() if name[-1] != "__init__"}
    assert sum(map(len, needs.values())) > len(needs)
    TopologicalSorter(needs).prepare()  # CycleError names the circle


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_it_may(room):
    for path in (PACKAGE / room).rglob("*.py"):
        others = {other for other, _ in imports_of(path)} - {room}
        assert others <= ALLOWED[room], f"{path.name} imports {others - ALLOWED[room]}"


def test_cost_sees_only_the_engine_tables():
    for path in (PACKAGE / "cost").rglob("*.py"):
        of_engine = {module for room, module in imports_of(path) if room == "engine"}
        law = {"infersim.engine.compiled.law", "infersim.engine.compiled.state"}
        assert of_engine <= law | {"infersim.engine.price"}


def test_config_sees_only_the_table_of_knobs():
    for path in (PACKAGE / "config").rglob("*.py"):
        assert {module for room, module in imports_of(path) if room == "engine"} <= {"infersim.engine.knobs"}
    assert not modules_of(PACKAGE / "engine" / "knobs.py")


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], {"numpy", "pandas", "matplotlib", "numba", "pydantic", "simpy", "rich"}),
        (["run", "llama-8b-h100", "--set", "workload.num_requests=10"], {"pandas", "matplotlib", "numba", "simpy"}),
    ],
)
def test_heavy_imports_are_lazy(arguments, unwanted):
    """numba too: once the engine is compiled, its machine code is loaded without it."""
    code = (
        "import sys\nfrom infersim.cli.app import main\nsys.argv = ['infersim', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit: pass\nprint('LOADED', *sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)  # compiles if need be
    output = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout
    loaded = set(output.split("LOADED", 1)[1].split())
    assert not unwanted & loaded
