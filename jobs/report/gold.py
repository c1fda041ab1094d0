"""Gold grades for a report: those that were named, or the gold column that a run's own spec names; and the grade of
each row.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.jobs.evaluate.judging import gold_of, load_pairs, open_set
from relabel.jobs.evaluate.sides import Side
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.manifests.errors import InputError, ManifestError, MissingExtraError, UsageError
from relabel.manifests.judging.gold_columns import own_input
from relabel.manifests.judging.qrels import Duplicates, GradeMap
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.storage.filesystems import is_url

CANT = (InputError, ManifestError, UsageError, MissingExtraError)
"""What keeps a run from being judged: where grades were found and not asked for, it is reported on the page."""
NO_GOLD = JudgingOptions(allow_partial=True)


def gold_files(path: str | None) -> list[str]:
    """What must not be written over where these are the gold grades: the path as given, and the local files that a
    pattern stands for.
    """
    if path is None:
        return []
    return [path] if is_url(path) else [path, *glob.glob(path, recursive=True)]  # noqa: PTH207 (an absolute pattern is beyond Path.glob)


@dataclass(frozen=True)
class GoldChoice:
    """Where gold grades are.

    Args:
        path: of `--gold`; None takes the column that a run's own spec names, where it names one.
        grade, by, doc: columns of grade, query and document.
        grade_map: brings them to the labels' scale.
        duplicates: what becomes of a pair whose grades differ.
        side: of a student's split that is judged.
        students: scored runs on the page, whose split cuts all of them.
    """

    path: str | None = None
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    grade_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    side: Side | None = None
    students: tuple[str, ...] = ()

    def options(self, run: RunArtifact | None) -> JudgingOptions | None:
        """How to judge: by what was named, else by the gold column of the run's input, else not at all."""
        path, grade = self.path, self.grade
        if path is None and run is not None:
            own = _own_gold(run)
            path, grade = own.path, own.column
        if path is None:
            return None
        return replace(
            self.no_gold,
            qrels=path,
            grade=grade,
            by=self.by,
            doc=self.doc,
            grade_map=self.grade_map,
            duplicates=self.duplicates,
        )

    @property
    def no_gold(self) -> JudgingOptions:
        """How to compare without gold."""
        return replace(NO_GOLD, side=self.side, students=self.students)

    def why_not(self, run: RunArtifact) -> str | None:
        """Why the gold column that a run's job names is not used; None where it is, where there is none, or `--gold` is
        given.
        """
        return None if self.path is not None else _own_gold(run).why_not


class _OwnGold(NamedTuple):
    """Where the gold column of a run's own input is, or why it is not used."""

    path: str | None = None
    column: str | None = None
    why_not: str | None = None


def _own_gold(run: RunArtifact) -> _OwnGold:
    column = run.spec_part("input", "columns").get("gold") or run.plan.facts.columns.gold
    if not column:
        return _OwnGold()
    return _gold_of_paths(run, str(column))


def _gold_of_paths(run: RunArtifact, column: str) -> _OwnGold:
    said = f"{run.name}: the job names the gold column `{column}`, which is not used: "
    if run.manifest is None:
        return _OwnGold(
            why_not=f"{said}it is not finished, and only its manifest, which is written last, says where its input is."
        )
    named = run.spec_part("input").get("path")
    paths = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if not paths:
        return _OwnGold(why_not=f"{said}its manifest does not say where its input is.")
    if len(paths) > 1:
        return _OwnGold(why_not=f"{said}its input is {len(paths)} paths, and grades are read from one.")
    path = str(paths[0])
    try:
        own = own_input(run.path, run.plan, path, column, run.storage)
    except CANT as exc:
        return _OwnGold(why_not=f"{said}{exc}")
    if own is None:
        why = f"its input {path} is not there, as seen from this folder, or is not what was labelled any more."
        return _OwnGold(why_not=said + why)
    return _OwnGold(path, column)


class RunGold:
    """The gold grades of a run's rows, as the browser shows them."""

    def __init__(self, run: RunArtifact, options: JudgingOptions) -> None:
        labels = open_set(run.path, options, run.storage)
        self._by_row = gold_of(labels, options, run.storage).by_row
        self._by_pair = None if self._by_row is not None else load_pairs([labels], options, run.storage)

    def of(self, rows: Sequence[LabelRow] | Sequence[QuarantineRow]) -> list[int | None]:
        """The grade of each row, None where there is none."""
        if self._by_pair is not None:
            return self._by_pair.grades_of([(row.query_id, row.doc_id) for row in rows])
        assert self._by_row is not None
        return list(self._by_row.take(pa.array([row.row_id for row in rows], pa.int64())).to_pylist())
