"""Trusted grades: joined to labels by row or by pair, and as rows of their own to learn from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from relabel.distill.students.data_facts import LearnedGold
from relabel.distill.students.pair_texts import read_pairs
from relabel.distill.students.sources import GoldSource
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import InputError
from relabel.manifests.inputs.dataset import open_dataset
from relabel.manifests.inputs.grade_columns import read_grades
from relabel.manifests.inputs.input_folders import PARQUET_SUFFIXES
from relabel.manifests.inputs.table_files import Column
from relabel.manifests.judging.gold_columns import load_gold_by_row, own_input
from relabel.manifests.judging.pair_grades import PairGrades, grades_by_pair
from relabel.manifests.judging.qrels import load_qrels, mapped
from relabel.manifests.labels import Pair
from relabel.manifests.runs.plans import Plan
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url

_KEYS = {
    "input.path": "path",
    "input.columns.gold": "grade",
    "input.columns": "columns",
    "--grade": "grade",
    "--duplicates mean": "duplicates: mean",
    "--duplicates first": "duplicates: first",
    "--by": "columns.query_id",
    "--doc": "columns.doc_id",
    "--map": "map",
}


class Joined(Protocol):
    """Rows that grades are joined to: where they are, the run's plan if they are one's, and their texts."""

    @property
    def where(self) -> str: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def pairs(self) -> list[Pair]: ...


@dataclass
class GoldGrades:
    """All grades of a gold source.

    Args:
        pairs: its rows with texts, where they are learned from; else empty.
        grades: of those rows, None where there is none.
        key: where the source stands in its spec.
        by_pair: by (query_id, doc_id), filled on first use.
    """

    source: GoldSource
    storage: Storage
    pairs: list[Pair]
    grades: list[int | None]
    columns: Columns | None
    about: LearnedGold
    key: str = "gold"
    by_pair: PairGrades | None = field(default=None)

    def of(self, table: Joined) -> list[int | None]:
        """The grade of each label's pair; by row where the gold file is the run's own input, else by (query_id,
        doc_id).

        Raises:
            InputError: grades can't be joined, or a pair has several.
        """
        with in_words_of_the_spec(self.key):
            return self._of(table)

    def _of(self, table: Joined) -> list[int | None]:
        own = (
            None
            if table.plan is None
            else own_input(table.where, table.plan, self.source.path, self.source.grade, self.storage)
        )
        if own is not None:
            files, column = own
            grades = _grades(load_gold_by_row(files, column, self.storage), self.source)
            self.about = replace(self.about, joined_by="row of the labels' own input")
            return list(grades.take(pa.array([pair.row_id for pair in table.pairs], pa.int64())).to_pylist())
        if self.by_pair is None:
            self.by_pair = self._read_by_pair()
        self.about = replace(self.about, joined_by="query_id and doc_id")
        return self.by_pair.grades_of([(pair.query_id, pair.doc_id) for pair in table.pairs])

    def _read_by_pair(self) -> PairGrades:
        source = self.source
        qrels = load_qrels(
            source.path,
            self.storage,
            grade=source.grade,
            by=source.columns.query_id,
            doc=source.columns.doc_id,
            is_by_row=False,
            grade_map=source.map,
        )
        return grades_by_pair(qrels, source.duplicates)


def load_gold(source: GoldSource, storage: Storage, *, is_learned: bool, key: str = "gold") -> GoldGrades:
    """Open a gold source; texts are read only where they are learned from.

    Args:
        key: where it stands in its spec, for errors.
    Raises:
        InputError: it can't be read, has no texts while it is learned from, or its grades are off.
    """
    about = LearnedGold(path=source.path, grade=source.grade, map=source.map)
    if not is_learned:
        return GoldGrades(source, storage, [], [], None, about, key)
    is_folder = not is_url(source.path) and Path(source.path).is_dir()
    if not is_folder and not source.path.endswith(PARQUET_SUFFIXES):
        raise InputError(
            f"{source.path}: gold that is learned from wants Parquet with the pairs' texts beside the grades."
        )
    columns = source.columns.model_copy(update={"gold": source.grade, "context": None})
    with in_words_of_the_spec(key):
        dataset = open_dataset(InputSpec(path=(source.path,), columns=columns), storage)
        column = load_gold_by_row([file.path for file in dataset.files], source.grade, storage)
        grades = _grades(column, source).to_pylist()
    pairs = read_pairs(dataset, np.arange(dataset.rows), readings=None)
    about = replace(
        about,
        rows=len(grades),
        without_grade=grades.count(None),
        inputs_sha256=digest_of([list(file.identity) for file in dataset.files]),
    )
    return GoldGrades(source, storage, pairs, grades, dataset.columns, about, key)


@contextlib.contextmanager
def in_words_of_the_spec(spec_key: str) -> Iterator[None]:
    """Readers are those of `relabel evaluate` and of a job's input, and name their flags and keys."""
    try:
        yield
    except InputError as exc:
        text = str(exc).replace("nothing to label", "nothing to learn from")
        for flag, key in _KEYS.items():
            text = text.replace(flag, f"`{spec_key}.{key}`")
        raise InputError(text) from exc


def _grades(column: Column, source: GoldSource) -> pa.Int64Array:
    found = read_grades(column).readable(source.path, source.grade)
    return mapped(found, source.map, where=f"{source.path}, column `{source.grade}`", option="gold.map")
