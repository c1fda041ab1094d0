"""The columns beyond grades by which labelers that see a query's documents together are judged: those that they declare
for their labels, and those of gold that say what is wanted.

Nothing of this is read for labelers that declare none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.ids import texts_of
from relabel.manifests.inputs.table_files import Column

CHUNKS = "gold_chunks"
ANSWER_IDS, EXPAND_IDS = "gold_answer_ids", "gold_expand_ids"
GRADING = (CHUNKS, ANSWER_IDS)
"""Columns of gold that tell a grade where gold has no column of grades."""
SHOWN_CHARS = 60
_SURROGATE = re.compile("[\ud800-\udfff]")


class GoldColumn(NamedTuple):
    """A column of gold.

    Args:
        kind: how it is kept.
        wanted: what a row holds, in words; null where it has none.
        is_kind: whether an Arrow column of this type holds that.
        is_value: whether a plain value is that.
    """

    name: str
    kind: pa.DataType
    wanted: str
    is_kind: Callable[[pa.DataType], bool]
    is_value: Callable[[Any], bool]

    def read(self, column: Column, path: str) -> pa.Array:
        """The column of a file, null where a row has none.

        Raises:
            InputError: a row holds something else; names file, row and value.
        """
        if isinstance(column, pa.ChunkedArray):
            if self.is_kind(column.type):
                held = column.combine_chunks().cast(self.kind)
                if not pa.types.is_large_list(self.kind) or not pc.list_flatten(held).null_count:
                    return held
            column = column.to_pylist()
        for row, value in enumerate(column):
            if value is not None and not self.is_value(value):
                raise InputError(
                    f"{path}: row {row} of column `{self.name}` holds {str(value)[:SHOWN_CHARS]!r}; {self.wanted} is "
                    "wanted, or null. Parquet and JSONL can hold that; leave the column out where it is something else."
                )
        return pa.array(column, self.kind)


def _is_list_of(is_kind: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_kind(kind.value_type))


def _is_list_with(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_value, value))


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair, as JSON can hold one, is none."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


def _answers(name: str) -> GoldColumn:
    return GoldColumn(
        name,
        pa.large_list(pa.string()),
        "a list of strings",
        _is_list_of(pa.types.is_large_string),
        _is_list_with(_is_text),
    )


def _numbers(name: str) -> GoldColumn:
    is_kind, is_value = _is_list_of(pa.types.is_signed_integer), _is_list_with(_is_whole)
    return GoldColumn(name, pa.large_list(pa.int64()), "a list of whole numbers", is_kind, is_value)


GOLD_CHUNKS = _numbers(CHUNKS)
GOLD_SUFFICIENT = GoldColumn(
    "gold_sufficient", pa.bool_(), "true or false", pa.types.is_boolean, lambda value: isinstance(value, bool)
)

_JUDGED_BY: tuple[tuple[Mapping[str, str], tuple[GoldColumn, ...]], ...] = (
    (
        {
            "selected": "list<int16>",
            "num_chunks": "int32",
            "selected_tokens": "int32",
            "over_budget": "float32",
        },
        (GOLD_CHUNKS, _answers("answers"), _answers("gold_answers")),
    ),
    ({"sufficient_probs": "list<float32>"}, (GOLD_SUFFICIENT,)),
    (
        {"answer_ids": "list<int32>", "expand_ids": "list<int32>", "refused": "bool", "expelled": "int32"},
        (_numbers(ANSWER_IDS), _numbers(EXPAND_IDS)),
    ),
)
"""Columns that a labeler declares, by kind, and what gold may say of such labels: of `evidence-set`, of `review`, of
`route`.
"""


def label_columns(own: Mapping[str, str]) -> list[str]:
    """Which of a labeler's own columns are judged.

    Args:
        own: all that it declares, name → kind.
    """
    return [name for declared, _ in _JUDGED_BY if declared.items() <= own.items() for name in declared]


def gold_columns(labels: Iterable[str]) -> list[GoldColumn]:
    """What gold may say of labels with these columns."""
    held = set(labels)
    return [column for declared, columns in _JUDGED_BY if declared.keys() <= held for column in columns]


def columns_taken(columns: Mapping[str, pa.Array], rows: pa.Array) -> dict[str, pa.Array]:
    """Some rows of each column, by their places; null for a null place."""
    return {name: column.take(rows) for name, column in columns.items()}


def grades_told(columns: Mapping[str, pa.Array]) -> pa.Int64Array:
    """Gold grades of rows that say no more than what is wanted, by the first column of `GRADING` that is there.

    A document with a wanted chunk is 1, one with none 0. A row with a node that answers is 2; one with none is 1 where
    a heading is to be unfolded, 0 where none is, and null where the headings are not known. Null stays null.
    """
    if CHUNKS in columns:
        return _has_any(columns[CHUNKS]).cast(pa.int64())
    answers = columns[ANSWER_IDS]
    is_answered, expands = _has_any(answers), columns.get(EXPAND_IDS, pa.nulls(len(answers), answers.type))
    return pc.if_else(is_answered, 2, _has_any(expands).cast(pa.int64()))


def _has_any(lists: pa.LargeListArray) -> pa.BooleanArray:
    return pc.greater(pc.list_value_length(lists), 0)


def check_chunks(
    columns: Mapping[str, pa.Array], query_ids: pa.Array | None, doc_ids: pa.Array | None, *, where: str
) -> None:
    """Every gold chunk is one that its document has.

    Args:
        columns: of the rows; nothing to check where they lack chunks.
        query_ids, doc_ids: of the rows.
        where: gold came from.
    Raises:
        InputError: names the document, the chunk, and how many there are.
    """
    if not {CHUNKS, "num_chunks"} <= columns.keys():
        return
    number_M, row_M = pc.list_flatten(columns[CHUNKS]).to_numpy(), pc.list_parent_indices(columns[CHUNKS]).to_numpy()
    most_M = columns["num_chunks"].fill_null(0).to_numpy()[row_M]
    wrong = np.flatnonzero((number_M < 1) | (number_M > most_M))
    if len(wrong):
        first = wrong[0]
        row = slice(int(row_M[first]), int(row_M[first]) + 1)
        query, doc = ("" if ids is None else texts_of(ids[row])[0] for ids in (query_ids, doc_ids))
        raise InputError(
            f"{where}: column `{CHUNKS}` names chunk {number_M[first]} of document {doc} of query {query}, which has "
            f"{most_M[first]} chunks, numbered from 1. Take the numbers `n` of the column `chunks` that was labelled."
        )
