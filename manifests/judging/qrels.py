"""Qrels: gold grades as a file holds them, and maps between scales."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.inputs.grade_columns import read_grades
from relabel.manifests.inputs.table_files import Column, as_ids, load_columns, require_column
from relabel.manifests.judging.further_columns import GRADING, GoldColumn, grades_told
from relabel.manifests.storage.context import Storage

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
        if not tells_grades(grade, names, held):
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


def tells_grades(grade: str, names: Collection[str], further: Collection[str]) -> bool:
    """Whether grades come from further columns: a file has one that tells them, and no grade under the default name."""
    return grade == DEFAULT_GRADE and grade not in names and any(name in further for name in GRADING)


def graded(
    column: Column | None, further: Mapping[str, pa.Array], name: str, grade_map: GradeMap | None, *, path: str
) -> pa.Int64Array:
    """Gold grades, after `--map`, of the column of that name; without it (`tells_grades`) of the others.

    Raises:
        InputError: one is no whole number, or `grade_map` does not map it.
    """
    if column is None:
        return grades_told(further)
    advice = " Name another column with --grade, or leave those rows empty."
    found = read_grades(column).readable(path, name, advice=advice)
    return mapped(found, grade_map, where=f"{path}, column `{name}`", option="--map")


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
            raise UsageError(f"{option} {text}: grade {key} occurs twice.")
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
