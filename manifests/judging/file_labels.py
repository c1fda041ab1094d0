"""Labels of a Parquet, JSONL or CSV file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.grade_columns import read_grades
from relabel.manifests.inputs.table_files import Column, as_ids, distinct, load_columns, require_column, rows_of
from relabel.manifests.judging.label_columns import LabelPart, file_distributions, file_samples
from relabel.manifests.judging.label_sets import LabelOrigin, LabelSet
from relabel.manifests.storage.context import Storage


def open_label_file(
    path: str,
    storage: Storage,
    *,
    label: str,
    by: str,
    doc: str,
    where: Mapping[str, str],
    wants_ids: bool,
    is_by_named: bool,
) -> LabelSet:
    """The labels of a Parquet, JSONL or CSV file; `probs` and `samples` are taken where they are as in a run's files.

    Args:
        label, by, doc: columns of label, query and document.
        where: only rows whose column equals this text.
        wants_ids: query and document ids must be there, since labels are joined by them.
        is_by_named: the user named `by`, so it must be there.
    Raises:
        InputError: unreadable, or a column is missing.
    """

    def choose(names: list[str]) -> list[str]:
        require_column(label, names, path=path, role="the label", option="--label")
        if wants_ids or is_by_named:
            require_column(by, names, path=path, role="the query id", option="--by")
        if wants_ids:
            require_column(doc, names, path=path, role="the document id", option="--doc")
        for name in where:
            require_column(name, names, path=path, role="--where", option="--where COLUMN=VALUE")
        return [*where, *(name for name in (label, by, doc, "probs", "samples") if name in names)]

    columns = load_columns(path, choose, storage)
    origin = LabelOrigin(column=label, where=dict(where) or None)
    found = LabelSet(path, "file", None, None, origin, None, lambda: iter(()))
    is_kept = np.ones(len(columns[label]), dtype=bool)
    seen: dict[str, list[str]] = {}
    for name, value in where.items():
        values, code_N = distinct(columns[name])
        texts = [str(one) for one in values]
        seen[name] = sorted(set(texts))[:10]
        is_kept &= np.array([text == value for text in texts], dtype=bool)[code_N]
    if where and not is_kept.any():
        raise InputError(f"{path}: no row with {where}. There are: {seen}.")
    kept = np.flatnonzero(is_kept)
    if len(kept) < len(is_kept):
        columns = {name: rows_of(column, kept) for name, column in columns.items()}
    part = _file_part(path, columns, kept, label=label, by=by, doc=doc, notes=found.notes)
    found.parts = lambda: iter((part,))
    return found


def _file_part(
    path: str, columns: dict[str, Column], kept: np.ndarray, *, label: str, by: str, doc: str, notes: list[str]
) -> LabelPart:
    grades = read_grades(columns[label])
    if grades.unreadable is not None:
        examples = ", ".join(map(repr, grades.unreadable.texts[:5]))
        notes.append(f"{grades.unreadable.rows:,} values of `{label}` are no whole number and are left out: {examples}")
    if grades.odd is not None:
        examples = ", ".join(map(repr, grades.odd.texts[:5]))
        notes.append(f"{grades.odd.rows:,} labels are written oddly and read as the number that they are: {examples}")
    query_ids, doc_ids = (
        as_ids(columns[name], path=path, name=name) if name in columns else None for name in (by, doc)
    )
    return LabelPart(
        pa.array(kept),
        grades.values,
        query_ids,
        doc_ids,
        file_distributions(columns["probs"], path) if "probs" in columns else None,
        file_samples(columns["samples"], path) if "samples" in columns else None,
    )
