"""The way of the data: who may import whom, what stays lazy, how large things are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "infersim"
ROOMS = {
    "config",
    "models",
    "cost",
    "engine",
    "workload",
    "cluster",
    "metrics",
    "explain",
    "planning",
    "report",
    "calibration",
    "reproduce",
    "cli",
}
ALLOWED = {
    "config": set(),
    "models": {"config"},
    "cost": {"config", "models", "engine"},  # of engine only the tables that it fills: price and state
    "engine": set(),
    "workload": {"config"},
    "cluster": {"config", "engine", "workload"},
    "metrics": {"config", "engine", "cost"},
    "explain": {"config", "models", "engine", "cost", "metrics"},
    "planning": {"config", "models", "cost", "engine", "workload", "metrics", "explain"},  # and run
    "report": {"config", "engine", "metrics", "explain"},
    "calibration": ROOMS - {"cli"},
    "reproduce": ROOMS - {"cli"},
    "cli": ROOMS,
}


def imports_of(path: Path) -> set[tuple[str, str]]:
    """(room, module) of infersim that a file imports, at run time or lazily."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    skipped = {id(inner) for node in typing_only for inner in ast.walk(node)}
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            target = [*base, *(node.module or "").split(".")] if node.module else base
        elif isinstance(node, ast.Import):
            target = node.names[0].name.split(".")
        else:
            continue
        if target[0] == "infersim" and len(target) > 1 and target[1] in ROOMS:
            found.add((target[1], ".".join(target)))
    return found


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_it_may(room):
    for path in (PACKAGE / room).rglob("*.py"):
        others = {other for other, _ in imports_of(path)} - {room}
        assert others <= ALLOWED[room], f"{path.name} imports {others - ALLOWED[room]}"


def test_cost_sees_only_the_engine_tables():
    for path in (PACKAGE / "cost").rglob("*.py"):
        of_engine = {module for room, module in imports_of(path) if room == "engine"}
        assert of_engine <= {"infersim.engine.price", "infersim.engine.compiled.state"}


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
