"""The labels browser's data: rows as plain values, in JSON that may be inside a page whatever a document holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relabel.manifests.labels import Pair, Span
from relabel.manifests.records import LEFT_OUT, plain
from relabel.manifests.schemas import LabelRow, QuarantineRow, Try

if TYPE_CHECKING:
    from relabel.jobs.report.blocks import Paragraph

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
    shown = {name: _plain(value) for name, value in columns.items()}
    return {name: value for name, value in shown.items() if value is not None} or None


def _plain(value: Any) -> Any:
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
