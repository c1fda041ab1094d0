"""A pair going in, a label coming out, in memory. `schemas.py` says how they lie in Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from relabel.manifests.asks import Distribution


class Pair(NamedTuple):
    """One row of the input.

    `document` is the named columns that are not empty, joined by a blank line; it may be empty. `context` holds up to
    four high-click documents of the query. `columns` holds, by name, those of the labeler's `input_columns` that the
    input has; a null is `""` or `()`. `siblings` holds all rows of the query that the input has, this one too, in row
    order, for labelers with `uses_siblings`; they have no siblings of their own.
    """

    row_id: int
    query_id: str
    query: str
    doc_id: str
    document: str
    context: tuple[str, ...] = ()
    columns: Mapping[str, Any] = MappingProxyType({})
    siblings: tuple[Pair, ...] = ()


class InputColumn(NamedTuple):
    """A further column of the input that a labeler looks at where it is there.

    Args:
        name: as it is called in the input.
        kind: `string`, `list<string>`, `list<chunk>` or `list<node>` (`manifests.inputs.column_types.STRUCT_KINDS`, as
            dicts).
        about: what it holds, in a line.
        is_required: an input without it is refused.
    """

    name: str
    kind: str
    about: str
    is_required: bool = False


class Reads(NamedTuple):
    """What a labeler looks at beside the query: what it does not look at is not read, and no part of a label's key.

    Args:
        context, document: `Pair.context`, `Pair.document`.
        columns: what it finds in `Pair.columns`.
        siblings: `Pair.siblings`.
    """

    context: bool = False
    document: bool = True
    columns: tuple[InputColumn, ...] = ()
    siblings: bool = False

    @property
    def whole_query(self) -> bool:
        """Whether rows of a query take their labels from one answer, about all its documents or none. Chunks then hold
        whole queries, however large, so that whatever interrupts a run, no query has labels of two answers.
        """
        return self.siblings or not self.document


QUERY_AND_DOCUMENT = Reads()
"""What most labelers look at."""


class Span(NamedTuple):
    """A piece of the document: `document[start:end]`, in code points, and that text."""

    start: int
    end: int
    text: str


class LabelColumn(NamedTuple):
    """A column of the label files that a labeler declares for its own labels.

    Args:
        name: of lower-case letters, digits and `_`; none of the columns that all label files have.
        kind: `bool`, `int8`, `int32`, `int64`, `float32`, `string`, `list<float32>`, `list<int16>`, `list<int32>` or
            `list<string>`. Null stands for no value.
        about: what it holds, in a line; `relabel schema labels --labeler NAME` prints it.
    """

    name: str
    kind: str
    about: str


@dataclass(slots=True)
class Label:
    """What a labeler read from the answers about one pair.

    Args:
        grade: what the model wrote (or, where it writes nothing, the most probable grade), 0..K-1; None of a labeler
            whose `grades` is 0.
        distribution: over the grades at the decision; None where the engine can't give it.
        columns: values of the columns that the labeler declares, by name; one that is not there is null.
        evidence: quoted spans of the document, in the order quoted.
        flags: remarks on this label, each a word of `[a-z_]`.
    """

    grade: int | None
    distribution: Distribution | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[Span, ...] = ()
    intent: str | None = None
    reasoning: str | None = None
    flags: list[str] = field(default_factory=list)
