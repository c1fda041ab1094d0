"""The page: sections of blocks, put into one HTML file that asks nobody for anything.

Whatever a block holds is text, escaped by the templates. A content policy admits the page's own script and style, by
their digests, and nothing else: no address, no frame, no inline handler, no string that becomes markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from relabel.jobs.report.blocks import Section
from relabel.manifests.secrets.redaction import redacted

if TYPE_CHECKING:
    from jinja2 import Environment

    from relabel.jobs.report.browser import BrowserData


@dataclass(frozen=True)
class Page:
    """All of it.

    Args:
        made_by: the command, which the file's first bytes name.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]
    browser: BrowserData | None = None
    notes: Sequence[str] = field(default=())
    made_by: str = "report"


def render_page(page: Page) -> str:
    """The HTML file."""
    style, script = _asset("report.css"), _asset("report.js")
    sections = [section for section in page.sections if section.blocks]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            opening=Markup(opening(page.made_by)),
            sections=sections,
            style=Markup(style),
            script=Markup(script),
            policy=(
                f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
                "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
            ),
            rows=Markup(page.browser.as_json()) if page.browser is not None else None,
        )
    )


def opening(command: str) -> str:
    """What a page of a command begins with, by which the command knows its own again."""
    return f"<!DOCTYPE html>\n<!-- relabel {command} -->"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _asset(name: str) -> str:
    return resources.files("relabel.jobs.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # records of others may hold a secret; Markup is ours
        finalize=lambda value: redacted(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["figure"] = show_number
    return found


def show_number(value: Any) -> str:
    """A number as people read it: thousands apart, four digits after the point, tiny ones as powers."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value != value:
        return "–"
    if value == 0 or 0.001 <= abs(value) < 1e6:
        return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:.2e}"
