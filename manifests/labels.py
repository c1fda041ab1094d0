"""A pair going in, a label coming out, in memory. `schemas.py` says how they lie in Parquet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from manifests.asks import Distribution


class Pair(NamedTuple):
    """One row of the input.

    `document` is the named columns that are not empty, joined by a blank line; it may be empty. `context` holds up to four
    high-click documents of the query.
    """

    row_id: int
    query_id: str
    query: str
    doc_id: str
    document: str
    context: tuple[str, ...] = ()


class Span(NamedTuple):
    """A piece of the document: `document[start:end]`, in code points, and that text."""

    start: int
    end: int
    text: str


@dataclass(slots=True)
class Label:
    """What a labeler read from the answers about one pair.

    Args:
        grade: what the model wrote (or, where it writes nothing, the most probable grade), 0..K-1.
        distribution: over the grades at the decision; None where the engine can't give it.
        nodes: labeler-specific values, one key for each field of the schema's `nodes` struct; None for labelers without.
        evidence: quoted spans of the document, in the order quoted.
        flags: remarks on this label, each a word of `[a-z_]`.
    """

    grade: int
    distribution: Distribution | None
    nodes: dict[str, Any] | None = None
    evidence: tuple[Span, ...] = ()
    intent: str | None = None
    reasoning: str | None = None
    flags: list[str] = field(default_factory=list)
