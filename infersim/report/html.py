"""A report as one HTML page that needs nothing else: no network, no fonts, no libraries."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infersim import __version__
from infersim.files import replace_text

from .parts import COLOURS

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
    sections = [_whole(section) for section in page.sections if section]
    return (
        templates()
        .get_template("report.html.j2")
        .render(title=page.title, verdict=page.verdict, good=page.good, sections=sections, version=__version__)
    )


def render_section(section: dict[str, Any]) -> str:
    """One section as a piece of a page; empty for an empty one."""
    return str(templates().get_template("parts.html.j2").module.section_of(_whole(section))) if section else ""


@functools.cache
def templates() -> Any:
    """Where the pages' templates lie."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    found = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    found.globals["colours"] = COLOURS
    return found


def _whole(section: dict[str, Any]) -> dict[str, Any]:
    import markupsafe

    section = SECTION | section
    return section | {"charts": [CHART | each | {"svg": markupsafe.Markup(each["svg"])} for each in section["charts"]]}
