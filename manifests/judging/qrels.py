"""Qrels: gold grades, by (query, document) or by row; maps between scales; what to do with pairs that are
graded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from manifests.errors import InputError, UsageError
from manifests.inputs.table_files import as_ids, load_columns, read_grades, require_column
from manifests.storage.context import Storage

Duplicates = Literal["error", "mean", "first"]
GradeMap = Mapping[int, int]
SHOWN = 5


@dataclass(frozen=True)
class Qrels:
    """Grades of a file, in its row order, after `--map`.

    Args:
        path: where they came from, for messages.
        pairs: (query_id, doc_id) of each row; None where the file has no such columns (it can then be joined by row
            only).
        grades: None is null.
        num_null: rows without a grade; they are left out, never read as 0.
    """

    path: str
    pairs: list[tuple[str, str]] | None
    grades: list[int | None]
    num_null: int


@dataclass(frozen=True)
class PairGrades:
    """One grade a pair.

    Args:
        by_pair: None where every grade of the pair is null.
        num_repeated: rows beyond the first of their pair.
        num_conflicts: pairs with different grades, settled by `--duplicates`.
    """

    by_pair: dict[tuple[str, str], int | None]
    num_repeated: int
    num_conflicts: int


def load_qrels(
    path: str, storage: Storage, *, grade: str, by: str, doc: str, is_by_row: bool, grade_map: GradeMap | None = None
) -> Qrels:
    """Read qrels.

    Args:
        grade, by, doc: columns of grade, query and document; TREC text has `grade`, `query_id` and `doc_id`.
        is_by_row: they are joined by row, so that id columns need not be there.
    Raises:
        InputError: unreadable file, missing column, a grade that is no whole number, or one that `grade_map` does not
            map.
    """

    def choose(names: list[str]) -> list[str]:
        require_column(grade, names, path=path, role="the gold grade", option="--grade")
        if is_by_row:
            return [name for name in (by, doc, grade) if name in names]
        require_column(by, names, path=path, role="the query id", option="--by")
        require_column(doc, names, path=path, role="the document id", option="--doc")
        return [by, doc, grade]

    columns = load_columns(path, choose, storage)
    found = read_grades(columns[grade])
    if found.unreadable:
        row, text = next(iter(found.unreadable.items()))
        raise InputError(
            f"{path}: {len(found.unreadable)} values of `{grade}` are no whole number (row {row}: {text!r}). "
            "Name another column with --grade, or leave those rows empty."
        )
    grades = mapped(found.values, grade_map, where=f"{path}, column `{grade}`", option="--map")
    has_ids = by in columns and doc in columns
    pairs = None
    if has_ids and not is_by_row:
        pairs = list(
            zip(as_ids(columns[by], path=path, column=by), as_ids(columns[doc], path=path, column=doc), strict=True)
        )
    return Qrels(path, pairs, grades, grades.count(None))


def grades_by_pair(qrels: Qrels, duplicates: Duplicates) -> PairGrades:
    """One grade a pair; the same grade twice is one grade.

    Args:
        duplicates: `mean` takes the mean of a pair's grades, rounded to the nearest grade, halves up; `first` the first
            in the file.
    Raises:
        InputError: a pair has different grades and `duplicates` is `error`; it names them.
    """
    held: dict[tuple[str, str], list[int]] = {}
    for pair, grade in zip(qrels.pairs or [], qrels.grades, strict=True):
        grades = held.setdefault(pair, [])
        if grade is not None:
            grades.append(grade)
    conflicts = {pair: grades for pair, grades in held.items() if len(set(grades)) > 1}
    if conflicts and duplicates == "error":
        named = "; ".join(
            f"query {pair[0]}, document {pair[1]}: {', '.join(map(str, grades))}"
            for pair, grades in list(conflicts.items())[:SHOWN]
        )
        raise InputError(
            f"{qrels.path}: {len(conflicts)} pairs have several grades that differ "
            f"({named}{'; …' if len(conflicts) > SHOWN else ''}). "
            "Mend the file, or choose: --duplicates mean or --duplicates first."
        )
    by_pair = {pair: _settled(grades, duplicates) if grades else None for pair, grades in held.items()}
    return PairGrades(by_pair, len(qrels.grades) - len(held), len(conflicts))


def _settled(grades: list[int], duplicates: Duplicates) -> int:
    if duplicates == "mean":
        return (2 * sum(grades) + len(grades)) // (2 * len(grades))
    return grades[0]


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
        if value < 0:
            raise UsageError(f"{option} {text}: grade {key} would become {value}; grades start at 0.")
        found[key] = value
    return found


def mapped(grades: Sequence[int | None], grade_map: GradeMap | None, *, where: str, option: str) -> list[int | None]:
    """Grades through a map; None stays None.

    Raises:
        InputError: a grade that the map does not name.
    """
    if grade_map is None:
        return list(grades)
    missing = sorted({grade for grade in grades if grade is not None and grade not in grade_map})
    if missing:
        raise InputError(
            f"{where}: grade {', '.join(map(str, missing[:SHOWN]))} is there and {option} does not say what it "
            "becomes. Add it."
        )
    return [None if grade is None else grade_map[grade] for grade in grades]


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
