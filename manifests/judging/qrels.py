"""Qrels: gold grades, by (query, document) or by row; maps between scales; what to do with pairs that are
graded twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import InputError, UsageError
from manifests.ids import ids_of, texts_of
from manifests.inputs.table_files import Column, as_ids, load_columns, read_grades, require_column
from manifests.judging.further_columns import CHUNKS, GoldColumn, grades_of_chunks
from manifests.storage.context import Storage

Duplicates = Literal["error", "mean", "first"]
GradeMap = Mapping[int, int]
SHOWN = 5
MOST_GRADE = 999
DEFAULT_GRADE = "grade"
"""The column of gold grades where the user names none."""


@dataclass(frozen=True)
class Qrels:
    """Grades of a file, in its row order, after `--map`.

    Args:
        path: where they came from, for messages.
        query_ids, doc_ids: of each row; None where they are to be joined by row.
        grades: null where a row has none; such rows are left out, never read as 0.
        columns: further ones, by name.
    """

    path: str
    query_ids: pa.LargeBinaryArray | None
    doc_ids: pa.LargeBinaryArray | None
    grades: pa.Int64Array
    columns: Mapping[str, pa.Array] = field(default_factory=dict)


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
        """Where in `grades` each pair stands: int64 [N], -1 for one that is not there."""
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


def load_qrels(
    path: str,
    storage: Storage,
    *,
    grade: str,
    by: str,
    doc: str,
    is_by_row: bool,
    grade_map: GradeMap | None = None,
    further: Sequence[GoldColumn] = (),
) -> Qrels:
    """Read qrels.

    Args:
        grade, by, doc: columns of grade, query and document; TREC text has `grade`, `query_id` and `doc_id`.
        is_by_row: they are joined by row, so that id columns need not be there.
        further: columns that are read where they are there.
    Raises:
        InputError: unreadable file, missing column, a grade that is no whole number, or one that `grade_map` does not
            map; a further column that holds something else.
    """

    def choose(names: list[str]) -> list[str]:
        held = [one.name for one in further if one.name in names]
        if not is_graded_by_chunks(grade, names, held):
            held.append(require_column(grade, names, path=path, role="the gold grade", option="--grade"))
        if is_by_row:
            return held
        require_column(by, names, path=path, role="the query id", option="--by")
        require_column(doc, names, path=path, role="the document id", option="--doc")
        return [by, doc, *held]

    columns = load_columns(path, choose, storage)
    held = {one.name: one.read(columns[one.name], path) for one in further if one.name in columns}
    grades = graded(columns.get(grade), held, grade, grade_map, path=path)
    if is_by_row:
        return Qrels(path, None, None, grades, held)
    query_ids, doc_ids = (as_ids(columns[name], path=path, name=name) for name in (by, doc))
    return Qrels(path, query_ids, doc_ids, grades, held)


def is_graded_by_chunks(grade: str, names: Collection[str], further: Collection[str]) -> bool:
    """Whether grades come from gold chunks: a file has these, and no grade under the default name."""
    return grade == DEFAULT_GRADE and grade not in names and CHUNKS in further


def graded(
    column: Column | None, further: Mapping[str, pa.Array], name: str, grade_map: GradeMap | None, *, path: str
) -> pa.Int64Array:
    """Gold grades, after `--map`, of the column of that name; without it (`is_graded_by_chunks`) of the gold chunks.

    Raises:
        InputError: one is no whole number, or `grade_map` does not map it.
    """
    if column is None:
        return grades_of_chunks(further[CHUNKS])
    advice = " Name another column with --grade, or leave those rows empty."
    found = read_grades(column).readable(path, name, advice=advice)
    return mapped(found, grade_map, where=f"{path}, column `{name}`", option="--map")


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
                    "Mend the file, or take the first with --duplicates first."
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
            "Mend the file, or choose: --duplicates mean or --duplicates first."
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


def parse_map(text: str | None, option: str) -> dict[int, int] | None:
    """`0=0,1=1,2=2,3=2` as a map.

    Raises:
        UsageError: it is not that.
    """
    if text is None:
        return None
    found: dict[int, int] = {}
    for item in text.split(","):
        old, equals, new = item.partition("=")
        try:
            key, value = int(old), int(new)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(
                f"{option} {text}: `{item.strip()}` is no pair of grades. Write for instance {option} 0=0,1=1,2=2,3=2"
            )
        if key in found:
            raise UsageError(f"{option} {text}: grade {key} stands twice.")
        if not 0 <= value <= MOST_GRADE:
            raise UsageError(f"{option} {text}: grade {key} would become {value}; grades go from 0 to {MOST_GRADE}.")
        found[key] = value
    return found


def grades_seen(grades: pa.Int64Array) -> set[int]:
    """The grades that occur."""
    return set(pc.unique(grades.drop_null()).to_pylist())


def mapped(grades: pa.Int64Array, grade_map: GradeMap | None, *, where: str, option: str) -> pa.Int64Array:
    """Grades through a map; null stays null.

    Raises:
        InputError: a grade that the map does not name.
    """
    if grade_map is None:
        return grades
    seen = sorted(grades_seen(grades))
    missing = [grade for grade in seen if grade not in grade_map]
    if missing:
        raise InputError(
            f"{where}: grade {', '.join(map(str, missing[:SHOWN]))} is there and {option} does not say what it "
            "becomes. Add it."
        )
    known = pa.array(seen, pa.int64())
    return pa.array([grade_map[grade] for grade in seen], pa.int64()).take(pc.index_in(grades, value_set=known))


def check_scale(seen: Iterable[int], grades: int, *, where: str, option: str) -> None:
    """Every grade seen is one of 0..K-1.

    Raises:
        InputError: suggests a map.
    """
    all_seen = sorted(set(seen))
    off = [grade for grade in all_seen if not 0 <= grade < grades]
    if off:
        suggestion = ",".join(f"{grade}={_suggested(grade, all_seen[-1], grades)}" for grade in all_seen)
        raise InputError(
            f"{where}: grade {', '.join(map(str, off[:SHOWN]))} is off the scale 0 to {grades - 1}. "
            f"Say what each grade becomes, for instance {option} {suggestion}"
        )


def _suggested(grade: int, highest: int, grades: int) -> int:
    """A grade on the scale: cut at both ends; for two grades, the upper half is 1."""
    if grades == 2:
        return int(2 * grade > highest)
    return min(max(grade, 0), grades - 1)
