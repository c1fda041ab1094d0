"""Columns of an input that say what is trusted: grades by row, and further ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.changed_files import changed_files
from relabel.manifests.inputs.dataset import open_dataset, open_parquet
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.inputs.input_files import list_files
from relabel.manifests.inputs.table_files import (
    Column,
    read_parquet,
    require_column,
)
from relabel.manifests.judging.further_columns import GoldColumn
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.run_inputs import prove_run_input
from relabel.manifests.specs import InputSpec
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url


def own_input(root: str, plan: Plan, path: str, grade: str | None, storage: Storage) -> tuple[list[str], str] | None:
    """The files of a run's own input in row order and the name of its gold column, if `path` is that input; None if it
    is not.

    They are the same if their sizes and footers are those that were planned.

    Args:
        root: the run's output.
    Raises:
        InputError, ManifestError: they were written over since the run read them (`prove_run_input`), or it is a folder
            that can't be read.
    """
    columns = plan.facts.columns
    try:
        spec = InputSpec(path=(path,), columns=columns.model_copy(update={"gold": None}))
        found = open_dataset(spec, storage) if list_files(path, storage) else None
    except InputError:
        if not is_url(path) and Path(path).is_dir():
            # grades lie in files: a folder can be nothing else, so its fault is reported
            raise
        return None
    if found is None or changed_files(plan.files, found.files):
        return None
    prove_run_input(root, plan, found)
    return [file.path for file in found.files], grade or columns.gold or "grade"


def load_gold_by_row(
    files: list[str], column: str, storage: Storage, *, role: str = "the gold grade", option: str = "--grade"
) -> Column:
    """A column of a run's own input, in the order of row ids.

    Args:
        role, option: what it is for and what names it, for errors.
    Raises:
        InputError: it is not there.
    """
    parts: list[pa.ChunkedArray] = []
    for path in files:
        with open_parquet(path, storage) as parquet, reading(path):
            require_column(column, parquet.plain_schema.names, path=path, role=role, option=option)
            parts.append(read_parquet(parquet, column))
    if len({part.type for part in parts}) > 1:
        return [value for part in parts for value in part.to_pylist()]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)


def column_names(path: str, storage: Storage) -> list[str]:
    """What the columns of a Parquet file are called."""
    with open_parquet(path, storage) as parquet, reading(path):
        return list(parquet.plain_schema.names)


def further_of_input(
    files: list[str], further: Sequence[GoldColumn], storage: Storage, *, where: str
) -> dict[str, pa.Array]:
    """Further columns of a run's own input, in the order of row ids, where it has them.

    Args:
        where: what to call the input in an error about a row.
    Raises:
        InputError: some of the files have one and others not, or a row holds something else.
    """
    names = {path: column_names(path, storage) for path in files} if further else {}
    found = {}
    for one in further:
        lacking = [path for path in files if one.name not in names[path]]
        if lacking and len(lacking) < len(files):
            raise InputError(
                f"{lacking[0]}: no column `{one.name}`, which other files of the input have. Give it to all of them, "
                "or to none."
            )
        if not lacking:
            found[one.name] = one.read(load_gold_by_row(files, one.name, storage), where)
    return found
