"""A report as one HTML page that needs nothing else: no network, no fonts, no libraries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infersim import __version__
from infersim.files import replace_text

from .parts import COLOURS

TEMPLATE = Path(__file__).with_name("report.html.j2")
SECTION = {"text": "", "cards": [], "charts": [], "tables": [], "folded": [], "blocks": [], "notes": []}
CHART = {"note": "", "table": None}


@dataclass(frozen=True)
class Page:
    """title and verdict: its head; good: whether the verdict is what was hoped for; empty sections are no part."""

    title: str
    verdict: str
    good: bool
    sections: list[dict[str, Any]]


def write_page(path: Path, page: Page) -> None:
    """Writes the page, whole or not at all."""
    replace_text(path, render_page(page), "--report")


def render_page(page: Page) -> str:
    """The page as text."""
    import jinja2
    import markupsafe

    sections = [SECTION | section for section in page.sections if section]
    for section in sections:
        section["charts"] = [CHART | each | {"svg": markupsafe.Markup(each["svg"])} for each in section["charts"]]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=page.title,
        verdict=page.verdict,
        good=page.good,
        sections=sections,
        version=__version__,
        colours=COLOURS,
    )
