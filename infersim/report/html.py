"""A run as one HTML page that needs nothing else: no network, no fonts, no libraries."""

from pathlib import Path
from typing import Any

from infersim.files import replace_file
from infersim.spec.scenario import Scenario

from .sections import sections
from .terminal import state, title

TEMPLATE = Path(__file__).with_name("report.html.j2")
SECTION = {"text": "", "cards": [], "charts": [], "tables": [], "blocks": [], "notes": []}
CHART = {"note": "", "table": None}


def write_report(path: Path, briefing: dict[str, Any], scenario: Scenario, command: list[str]) -> None:
    """Writes the page. briefing: planning.briefing's; command: the words that reproduce the run."""
    text = render_report(briefing, scenario, command)
    replace_file(path, lambda file: file.write(text.encode()), "--report")


def render_report(briefing: dict[str, Any], scenario: Scenario, command: list[str]) -> str:
    """The page as text."""
    import jinja2
    import markupsafe

    answer = briefing["answer"]
    found = [SECTION | section for section in sections(briefing, scenario, command)]
    for section in found:
        section["charts"] = [CHART | each | {"svg": markupsafe.Markup(each["svg"])} for each in section["charts"]]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title(answer),
        verdict=f"{state(answer)}: {answer['verdict']['reason']}",
        good=answer["verdict"]["state"] == "stable" and (answer["slo"] is None or answer["slo"]["met"]),
        sections=found,
        version=answer["infersim_version"],
    )
