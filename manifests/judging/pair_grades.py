"""Gold by pair: one grade for each (query, document), and what to do with pairs that are graded twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.ids import ids_of, texts_of
from relabel.manifests.judging.qrels import SHOWN, Duplicates, Qrels, grades_seen


@dataclass(frozen=True)
class PairGrades:
    """One grade a pair.

    Args:
        queries, docs: the different ids; a pair is a key, its query's place times the number of documents plus its
            document's place.
        keys: int64 [P], ascending.
        grades: of each key; null where every grade of the pair is.
        num_conflicts: pairs with different grades, settled by `--duplicates`.
        num_rows, num_null: rows of the qrels, and those without a grade.
        seen: the grades of all rows.
        begins: the first pairs of the file.
        columns: further ones, of each key: those of the pair's first row.
    """

    queries: pa.LargeBinaryArray
    docs: pa.LargeBinaryArray
    keys: np.ndarray
    grades: pa.Int64Array
    num_conflicts: int
    num_rows: int
    num_null: int
    seen: set[int]
    begins: list[tuple[str, str]]
    columns: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def num_repeated(self) -> int:
        """Rows beyond the first of their pair."""
        return self.num_rows - len(self.keys)

    def places(self, query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray) -> np.ndarray:
        """Where in `grades` each pair is: int64 [N], -1 for one that is not there."""
        query_N, doc_N = (
            pc.index_in(ids, value_set=known).fill_null(-1).to_numpy().astype(np.int64)
            for ids, known in ((query_ids, self.queries), (doc_ids, self.docs))
        )
        key_N = np.where((query_N < 0) | (doc_N < 0), -1, query_N * len(self.docs) + doc_N)
        place_N = np.searchsorted(self.keys, key_N)
        is_known_N = np.append(self.keys, -2)[place_N] == key_N
        return np.where(is_known_N, place_N, -1)

    def grades_of(self, pairs: Sequence[tuple[str, str]]) -> list[int | None]:
        """The grade of each (query_id, doc_id), None where there is none."""
        place_N = self.places(ids_of(query for query, _ in pairs), ids_of(doc for _, doc in pairs))
        return list(taken(self.grades, place_N).to_pylist())

    @property
    def pair_ids(self) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
        """Query and document id of each of `grades`."""
        query_P, doc_P = np.divmod(self.keys, max(len(self.docs), 1))
        return self.queries.take(pa.array(query_P)), self.docs.take(pa.array(doc_P))


def taken(column: pa.Array, place_N: np.ndarray) -> pa.Array:
    """Grades, or others' values, by their places; null for a negative place."""
    return column.take(pa.array(place_N, mask=place_N < 0))


def grades_by_pair(qrels: Qrels, duplicates: Duplicates) -> PairGrades:
    """One grade a pair; the same grade twice is one grade.

    Args:
        duplicates: `mean` takes the mean of a pair's grades, rounded to the nearest grade, halves up; `first` the first
            in the file.
    Raises:
        InputError: a pair has different grades and `duplicates` is `error`; it names them.
    """
    assert qrels.query_ids is not None
    assert qrels.doc_ids is not None
    query, doc = qrels.query_ids.dictionary_encode(), qrels.doc_ids.dictionary_encode()
    key_N = query.indices.to_numpy() * np.int64(len(doc.dictionary)) + doc.indices.to_numpy()
    order = np.argsort(key_N, kind="stable")
    key_N = key_N[order]
    start_P = np.flatnonzero(np.diff(key_N, prepend=-1))
    keys = key_N[start_P]
    grades, num_conflicts = qrels.grades.take(pa.array(order)), 0
    if len(keys) < len(order):
        grades, num_conflicts = _settled(qrels, grades, order, start_P, duplicates)
        if qrels.columns and duplicates == "error":
            _check_repeated(qrels, order, start_P)
    begins = list(zip(texts_of(qrels.query_ids[:SHOWN]), texts_of(qrels.doc_ids[:SHOWN]), strict=True))
    return PairGrades(
        query.dictionary,
        doc.dictionary,
        keys,
        grades,
        num_conflicts,
        len(order),
        qrels.grades.null_count,
        grades_seen(qrels.grades),
        begins,
        {name: column.take(pa.array(order[start_P])) for name, column in qrels.columns.items()},
    )


def _check_repeated(qrels: Qrels, order: np.ndarray, start_P: np.ndarray) -> None:
    """Rows of one pair have the same further columns; arguments as those of `_settled`.

    Raises:
        InputError: two differ; names the pair and the column.
    """
    first_N = np.repeat(order[start_P], np.diff(start_P, append=len(order)))
    again = np.flatnonzero(first_N != order)
    for name, column in qrels.columns.items():
        ours, theirs = (column.take(pa.array(rows[again])).to_pylist() for rows in (first_N, order))
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                assert qrels.query_ids is not None
                assert qrels.doc_ids is not None
                row = order[again[place]]
                query, doc = (texts_of(ids[row : row + 1])[0] for ids in (qrels.query_ids, qrels.doc_ids))
                raise InputError(
                    f"{qrels.path}: rows of query {query}, document {doc} differ in column `{name}`. "
                    "Correct the file, or take the first with --duplicates first."
                )


def _settled(
    qrels: Qrels, grades: pa.Int64Array, order: np.ndarray, start_P: np.ndarray, duplicates: Duplicates
) -> tuple[pa.Int64Array, int]:
    """One grade of each pair, and how many pairs have several that differ.

    Args:
        grades: of the qrels, in this order.
        order: rows of the qrels by pair, in the file's order within one.
        start_P: where each pair's begin.
    """
    has_N = grades.is_valid().to_numpy(zero_copy_only=False)
    value_M, pair_M = grades.drop_null().to_numpy(), (np.cumsum(np.bincount(start_P, minlength=len(order))) - 1)[has_N]
    present, start, count = np.unique(pair_M, return_index=True, return_counts=True)
    conflicts = present[np.minimum.reduceat(value_M, start) < np.maximum.reduceat(value_M, start)]
    if len(conflicts) and duplicates == "error":
        first = conflicts[np.argsort(order[start_P[conflicts]])][:SHOWN]
        end_P = np.append(start_P[1:], len(order))
        named = "; ".join(_conflict(qrels, order[start_P[pair] : end_P[pair]]) for pair in first)
        raise InputError(
            f"{qrels.path}: {len(conflicts)} pairs have several grades that differ "
            f"({named}{'; …' if len(conflicts) > SHOWN else ''}). "
            "Correct the file, or choose: --duplicates mean or --duplicates first."
        )
    is_null_P = np.ones(len(start_P), dtype=bool)
    is_null_P[present] = False
    settled_P = np.zeros(len(start_P), dtype=np.int64)
    settled_P[present] = (
        (2 * np.add.reduceat(value_M, start) + count) // (2 * count) if duplicates == "mean" else value_M[start]
    )
    return pa.array(settled_P, mask=is_null_P), len(conflicts)


def _conflict(qrels: Qrels, rows: np.ndarray) -> str:
    """A pair and its grades, by its rows."""
    chosen = pa.array(rows)
    query, doc = (texts_of(ids.take(chosen[:1]))[0] for ids in (qrels.query_ids, qrels.doc_ids) if ids is not None)
    return f"query {query}, document {doc}: {', '.join(map(str, qrels.grades.take(chosen).drop_null().to_pylist()))}"
