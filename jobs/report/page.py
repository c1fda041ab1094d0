"""Blocks that a report page consists of, CSV downloads, the data of the label browser, and the renderer that writes one
self-contained HTML file."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from markupsafe import Markup

from relabel.manifests.labels import Pair, Span
from relabel.manifests.records import LEFT_OUT, plain
from relabel.manifests.schemas import LabelRow, QuarantineRow, Try
from relabel.manifests.secrets import redacted

if TYPE_CHECKING:
    from jinja2 import Environment

# ------------------------------------------------------------------------------
# The data behind a figure or table, as a CSV file that lies inside the page: a `data:` link, so that it works without
# a network.


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Download:
    """A file to save.

    Args:
        name: what it will be called.
        href: a `data:` URI.
        rows: of data, the head not counted.
    """

    name: str
    href: str
    rows: int


def csv_download(stem: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Download:
    """Rows as CSV, UTF-8.

    Text that a spreadsheet would take for a formula gets an apostrophe before it: a document's text must not run
    anywhere.

    Args:
        stem: the file's name without `.csv`; what no file name should hold becomes a hyphen.
    """
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(head)
    count = 0
    for row in rows:
        writer.writerow([_plain(redacted(value) if isinstance(value, str) else value) for value in row])
        count += 1
    data = base64.b64encode(sink.getvalue().encode("utf-8", "replace")).decode()
    # markup: base64 of what was redacted above, which must reach the page as it is
    return Download(f"{file_stem(stem)}.csv", Markup(f"data:text/csv;charset=utf-8;base64,{data}"), count)


def file_stem(text: str) -> str:
    """A part of a file name that any system takes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80] or "data"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value


# ------------------------------------------------------------------------------
# What a page is built of: text, facts, tables, figures. All of it is data; the templates escape it.


SHADES = 8
"""Steps of a shaded cell."""
INDENTS = 8
"""Levels that are drawn apart."""


@dataclass(frozen=True)
class Shade:
    """A number in a cell whose ground gets darker with its share of the most, 0 to 1."""

    text: str
    share: float
    kind: ClassVar[str] = "shade"

    @property
    def step(self) -> int:
        """The shade's number, 0 to `SHADES`."""
        return min(SHADES, max(0, round(self.share * SHADES)))


@dataclass(frozen=True)
class Badge:
    """A word with a tone: `good`, `bad`, `warn` or `plain`."""

    text: str
    tone: str = "plain"
    kind: ClassVar[str] = "badge"


Cell: TypeAlias = str | int | float | Shade | Badge | None


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. `tone` as a badge's; `plain` for text without one."""

    text: str
    tone: str = "plain"
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Facts:
    """Names and values, a line each."""

    rows: Sequence[tuple[str, Cell]]
    title: str = ""
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Table:
    """Rows under a head; columns of numbers are set to the right.

    Args:
        caption: what it shows, also what a screen reader calls it.
        has_row_heads: the first column names the row.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str
    download: Download | None = None
    has_row_heads: bool = True
    kind: ClassVar[str] = "table"

    def is_number(self, column: int) -> bool:
        """Whether a column's cells are numbers."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | float | Shade) for cell in cells)


@dataclass(frozen=True)
class Drawing:
    """A drawing.

    Args:
        svg: of `plots.py` or `lineage.py`.
        alt: in words, what a reader is to see in it.
        download: its data.
    """

    title: str
    svg: Markup
    alt: str
    download: Download | None = None
    note: str = ""
    is_wide: bool = False
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Code:
    """Text as it is in a file."""

    text: str
    label: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class OutlineLine:
    """A line of an outline.

    Args:
        level: how deep it stands, from 0.
        number: what it is called in the data.
        is_text: of the text, and no heading.
    """

    level: int
    number: str
    text: str
    badges: Sequence[Badge]
    is_text: bool = False

    @property
    def indent(self) -> int:
        """The level, as far as a narrow page has room."""
        return min(self.level, INDENTS)


@dataclass(frozen=True)
class Outline:
    """Lines, indented by their level."""

    title: str
    lines: Sequence[OutlineLine]
    kind: ClassVar[str] = "outline"


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them."""

    summary: str
    blocks: Sequence[Block]
    kind: ClassVar[str] = "fold"


@dataclass(frozen=True)
class Side:
    """Blocks side by side where there is room."""

    blocks: Sequence[Block]
    kind: ClassVar[str] = "side"


Block: TypeAlias = Paragraph | Facts | Table | Drawing | Code | Outline | Fold | Side


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: its anchor, `[a-z-]+`.
    """

    name: str
    title: str
    blocks: Sequence[Block]


def confusion_table(
    counts: Sequence[Sequence[int]], rows: str, columns: str, *, caption: str, download: Download | None = None
) -> Table:
    """A confusion matrix, each row shaded by its shares."""
    grades = range(len(counts))
    head = [f"{rows} \\ {columns}", *map(str, grades), "sum"]
    body: list[list[Cell]] = []
    for grade, row in zip(grades, counts, strict=True):
        total = sum(row)
        body.append([str(grade), *(Shade(f"{count:,}", count / total if total else 0.0) for count in row), total])
    return Table(head, body, caption, download)


def title_over(title: str, queries: Iterable[Collection[str]]) -> str:
    """A figure's title, with a word where its sets are over different queries: what sets them apart may be these.

    Args:
        queries: of each set, the ids.
    """
    return f"{title}, over different queries" if len(set(map(frozenset, queries))) > 1 else title


# ------------------------------------------------------------------------------
# The labels browser's data: rows as plain values, in JSON that may be inside a page whatever a document holds.


DOCUMENT_CHARS = 8_000
"""Most characters of a document that a page carries; a page of 5,000 rows must open on a phone."""
TRY_CHARS = 4_000
"""Of a try's answer, a reasoning or an intent."""
QUERY_CHARS = 2_000
SHORT_CHARS = 500
"""Of an id, a reason, a flag, a piece of evidence, and what a column of the labeler's own says."""
SPANS = 64
"""Most pieces of evidence of a row."""
ITEMS = 64
"""Most texts of a list."""
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""What could end the script element, or JavaScript's lines; JSON reads both spellings alike."""


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """A row as the browser takes it: a label, or what lies in quarantine. What is None is left out of the JSON.

    Args:
        run: its number among the page's runs.
        gold: a trusted grade.
        length: characters of the document, where the page carries only its beginning.
        tokens: of prompt and output.
        outside: mass outside the grades; entropy: nats.
        evidence: start, end and text of each piece; `evidence_more` counts those left out.
        own: the labeler's own columns.
        tries: with the fields of `manifests.schemas.TRY`.
    """

    run: int
    row: int
    query_id: str | None = field(default=None, metadata=LEFT_OUT)
    doc_id: str | None = field(default=None, metadata=LEFT_OUT)
    status: str
    gold: int | None = field(default=None, metadata=LEFT_OUT)
    query: str | None = field(default=None, metadata=LEFT_OUT)
    document: str | None = field(default=None, metadata=LEFT_OUT)
    length: int | None = field(default=None, metadata=LEFT_OUT)
    tokens: tuple[int, int]
    grade: int | None = field(default=None, metadata=LEFT_OUT)
    probs: list[float] | None = field(default=None, metadata=LEFT_OUT)
    outside: float | None = field(default=None, metadata=LEFT_OUT)
    entropy: float | None = field(default=None, metadata=LEFT_OUT)
    evidence: list[list[Any]] | None = field(default=None, metadata=LEFT_OUT)
    evidence_more: int | None = field(default=None, metadata=LEFT_OUT)
    intent: str | None = field(default=None, metadata=LEFT_OUT)
    reasoning: str | None = field(default=None, metadata=LEFT_OUT)
    flags: list[str] | None = field(default=None, metadata=LEFT_OUT)
    own: dict[str, Any] | None = field(default=None, metadata=LEFT_OUT)
    samples: list[dict[str, Any]] | None = field(default=None, metadata=LEFT_OUT)
    reused: bool | None = field(default=None, metadata=LEFT_OUT)
    reason: str | None = field(default=None, metadata=LEFT_OUT)
    tries: list[dict[str, Any]] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class BrowserData:
    """What the page's script shows.

    Args:
        runs: name of each run.
        notes: what a reader should know before, such as that this is a sample.
    """

    runs: Sequence[str]
    rows: Sequence[ShownRow]
    notes: Sequence[Paragraph]

    def as_json(self) -> str:
        """JSON that can't leave its script element."""
        held = {"runs": [{"name": name} for name in self.runs], "rows": [plain(row) for row in self.rows]}
        return json.dumps(held, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def label_view(run: int, row: LabelRow, pair: Pair | None, gold: int | None) -> ShownRow:
    """A label as the browser takes it, with the columns that its labeler has of its own.

    Args:
        run: its number among the page's runs.
        pair: its texts; None where they can't be read any more.
        gold: a trusted grade.
    """
    spans = [Span(**span) for span in row.evidence or ()]
    return ShownRow(
        **_ids(run, row, pair, gold),
        grade=row.grade,
        probs=_rounded(row.probs),
        outside=_number(row.outside_mass),
        entropy=entropy(row.probs),
        evidence=[[span.start, span.end, _cut(span.text, SHORT_CHARS)] for span in spans[:SPANS]] or None,
        evidence_more=len(spans) - SPANS if len(spans) > SPANS else None,
        intent=_cut_or_none(row.intent, TRY_CHARS),
        reasoning=_cut_or_none(row.reasoning, TRY_CHARS),
        flags=[_cut(flag, SHORT_CHARS) for flag in row.flags or ()] or None,
        own=_own(row.columns),
        samples=[{"status": one["status"], "grade": one["grade"]} for one in row.samples or ()] or None,
        reused=row.reused or None,
    )


def quarantine_view(run: int, row: QuarantineRow, pair: Pair | None, gold: int | None) -> ShownRow:
    """A row of quarantine, likewise."""
    tries = [
        one._replace(text=_cut(one.text, TRY_CHARS))._asdict() for one in (Try(**held) for held in row.tries or ())
    ]
    return ShownRow(**_ids(run, row, pair, gold), reason=_cut(row.reason, SHORT_CHARS), tries=tries or None)


def entropy(probs: Iterable[float] | None) -> float | None:
    """Of a distribution, nats."""
    if probs is None:
        return None
    return round(max(0.0, -math.fsum(p * math.log(p) for p in probs if p > 0)), 4)


def _ids(run: int, row: LabelRow | QuarantineRow, pair: Pair | None, gold: int | None) -> dict[str, Any]:
    document = pair.document if pair is not None else None
    return {
        "run": run,
        "row": row.row_id,
        "query_id": _cut_or_none(row.query_id, SHORT_CHARS),
        "doc_id": _cut_or_none(row.doc_id, SHORT_CHARS),
        "status": row.status,
        "gold": gold,
        "query": _cut(pair.query, QUERY_CHARS) if pair is not None else None,
        "document": None if document is None else document[:DOCUMENT_CHARS],
        "length": len(document) if document is not None and len(document) > DOCUMENT_CHARS else None,
        "tokens": (row.prompt_tokens, row.output_tokens),
    }


def _own(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    shown = {name: _browser_plain(value) for name, value in columns.items()}
    return {name: value for name, value in shown.items() if value is not None} or None


def _browser_plain(value: Any) -> Any:
    if not isinstance(value, list):
        return _number(value)
    is_probs = all(isinstance(one, float) for one in value)
    return _rounded(value) if is_probs else [_number(one) for one in value[:ITEMS]]


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value, SHORT_CHARS)
    if not isinstance(value, float):
        return value
    return round(value, 5) if math.isfinite(value) else None


def _rounded(probs: Sequence[float] | None) -> list[float] | None:
    return None if probs is None else [round(p, 5) if math.isfinite(p) else 0.0 for p in probs]


def _cut(text: str | None, most: int) -> str:
    text = text or ""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"


def _cut_or_none(text: str | None, most: int) -> str | None:
    return None if text is None else _cut(text, most)


# ------------------------------------------------------------------------------
# The page: sections of blocks, put into one HTML file that asks nobody for anything.
#
# Whatever a block holds is text, escaped by the templates. A content policy admits the page's own script and style, by
# their digests, and nothing else: no address, no frame, no inline handler, no string that becomes markup.


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
