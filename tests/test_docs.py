"""The documentation's examples run."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from notebooks import execute
from typer.testing import CliRunner

import infersim
from infersim.cli.app import app
from infersim.config.scenario import Scenario, load_scenario
from infersim.deployment.compatibility import FACTS, RULES
from infersim.report.reference import reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def blocks(name, language):
    """The fenced blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["tutorial.md", "how-to.md"])
def test_commands_run(name, tmp_path, monkeypatch):
    """Every command of the page, in the order of the page, with the files that it shows."""
    monkeypatch.chdir(tmp_path)
    for text in blocks(name, "yaml"):
        (tmp_path / re.match(r"# file: (\S+)", text)[1]).write_text(text)
    commands = [line for text in blocks(name, "console") for line in text.splitlines()]
    assert commands
    for command in commands:
        program, *words = shlex.split(command.removeprefix("$ "))
        assert program == "infersim"
        outcome = CliRunner().invoke(app, words)
        assert outcome.exit_code in (0, 1), f"{command}\n{outcome.output}"


@pytest.mark.parametrize("number", range(5))
def test_python_runs(number, capsys):
    """Every Python example prints something."""
    exec(blocks("python.md", "python")[number], {})
    assert capsys.readouterr().out


def test_public_names():
    """The package's public surface, and nothing heavy until it is used."""
    assert infersim.__all__ == ["InputError", "compare", "plan", "run", "sweep"]
    assert [name for name in dir(infersim) if not name.startswith("__")] == infersim.__all__
    assert all(callable(getattr(infersim, name)) for name in infersim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'calibrat'"):
        _ = infersim.calibrat


def test_the_reference_is_what_the_schema_says():
    """docs/reference.md is `infersim show reference > docs/reference.md`."""
    assert (DOCS / "reference.md").read_text() == reference(RULES, FACTS)


def test_reference_has_every_key():
    """Each key of a scenario and of its sections, each section linked."""
    text = reference(RULES, FACTS)
    for name, field in Scenario.model_fields.items():
        assert f"| `{name}` |" in text
        if isinstance(field.default, object) and hasattr(type(field.default), "model_fields"):
            for inner in type(field.default).model_fields:
                assert f"| `{inner}` |" in text, inner
    for link in re.findall(r"\]\(#([a-z]+)\)", text):
        assert f"\n## {link}\n" in text.lower()
    for key in ("candidates", "max_gpus", "objective"):
        assert f"| `{key}` |" in text


def test_the_readme_shows_what_a_run_prints():
    """To the last digit, which is the same on every machine."""
    shown = re.search(r"```\n\$ (infersim run .*?)\n(.*?)```", README, re.DOTALL)
    outcome = CliRunner().invoke(app, shlex.split(shown[1])[1:], env={"COLUMNS": "100"})
    assert outcome.exit_code == 0
    assert outcome.output.rstrip() == shown[2].rstrip()


def test_the_readme_activates_what_make_creates():
    folder = re.search(r"`source (\S+)/bin/activate`", README)[1]
    assert f"VENV := {folder}\n" in (ROOT / "Makefile").read_text()
    assert "infersim" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_links_of_the_pages_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *DOCS.glob("*.md")):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_files_that_architecture_names_exist():
    named = re.findall(r"`([\w./-]+/[\w./-]*|Makefile)`", (ROOT / "ARCHITECTURE.md").read_text())
    paths = {name for name in named if "NAME" not in name}
    assert len(paths) > 25
    assert not {name for name in paths if not (ROOT / name).exists()}


def test_the_notebook_shows_what_its_cells_say():
    """Its texts; `python tests/notebooks.py docs/planning.ipynb` writes them anew."""
    notebook = json.loads((DOCS / "planning.ipynb").read_text())
    stored = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]

    def texts(cells):
        return [[output.get("text") or output["data"]["text/plain"] for output in outputs] for outputs in cells]

    assert texts(execute(notebook)) == texts(stored)


def test_answers_are_short_at_the_prompt_and_whole_in_a_notebook(tmp_path):
    small = {"workload.num_requests": 50}
    scenario = load_scenario("llama-8b-h100")
    answer = infersim.run(scenario, small)
    assert repr(answer) == repr(infersim.run(scenario.resolved(), small)) == repr(infersim.run("llama-8b-h100", small))
    comparison = infersim.compare(scenario, variants=[small, small | {"precision.kv_cache": "fp8"}])
    points = infersim.sweep(scenario, {"workload.request_rate": [2, 4, 30]}, small, workers=1)
    for each in (answer, comparison, points):
        assert len(repr(each)) < 200
        assert len(each._repr_html_()) < 10_000
        page = each.report(tmp_path / "page.html").read_text()
        assert shlex.join(each.command) in page.replace("&#39;", "'").replace("&#34;", '"')
    assert len(answer.requests) == 50
    assert answer.requests["ttft_ms"].mean() == pytest.approx(answer.metrics["mean_ttft_ms"])
    for figure in (answer.plot(), points.plot()):
        assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(infersim.InputError, match="unknown key"):
        infersim.run(scenario, {"engine.max_num_seq": 1})
