"""Human grades for a report: those that were named, or the gold column that a run's own spec names; and the grade of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jobs.judging import JudgingOptions, gold_of, load_pairs, open_set
from jobs.report.artifacts import RunArtifact
from manifests.errors import InputError, ManifestError, MissingExtraError, UsageError
from manifests.label_sets import own_input
from manifests.qrels import Duplicates, GradeMap

CANT = (InputError, ManifestError, UsageError, MissingExtraError)
"""What keeps a run from being judged: where grades were found and not asked for, it is told on the page."""
NO_GOLD = JudgingOptions(
    qrels=None,
    label="grade",
    grade=None,
    by=None,
    doc="doc_id",
    grades=None,
    grade_map=None,
    label_map=None,
    duplicates="error",
    where={},
    allow_partial=True,
)


@dataclass(frozen=True)
class GoldChoice:
    """Where human grades are.

    Args:
        path: of `--gold`; None takes the column that a run's own spec names, where it names one.
        grade, by, doc: columns of grade, query and document.
        grade_map: brings them to the labels' scale.
        duplicates: what becomes of a pair whose grades differ.
    """

    path: str | None = None
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    grade_map: GradeMap | None = None
    duplicates: Duplicates = "error"

    def options(self, run: RunArtifact | None) -> JudgingOptions | None:
        """How to judge: by what was named, else by the gold column of the run's input, else not at all."""
        path, grade = self.path, self.grade
        if path is None and run is not None:
            path, grade = _own_gold(run)
        if path is None:
            return None
        return replace(NO_GOLD, qrels=path, grade=grade, by=self.by, doc=self.doc, grade_map=self.grade_map, duplicates=self.duplicates)


def _own_gold(run: RunArtifact) -> tuple[str | None, str | None]:
    spec = run.spec.get("input") or {}
    column = (spec.get("columns") or {}).get("gold")
    paths = list(spec.get("path") or [])
    if not column or len(paths) != 1 or own_input(run.plan, str(paths[0]), str(column)) is None:  # gone, or not what was labelled any more
        return None, None
    return str(paths[0]), str(column)


class Humans:
    """The human grade of each row of a run, as the browser shows it."""

    def __init__(self, run: RunArtifact, options: JudgingOptions) -> None:
        gold = gold_of(open_set(run.path, options), options)
        self._by_row = gold.by_row
        self._by_pair: dict[tuple[str, str], int | None] = {} if gold.by_row is not None else load_pairs(options)[1].by_pair

    def of(self, row: dict[str, Any]) -> int | None:
        if self._by_row is not None:
            return self._by_row[int(row["row_id"])]
        return self._by_pair.get((row["query_id"], row["doc_id"]))
