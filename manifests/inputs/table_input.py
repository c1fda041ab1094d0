"""The door to tables: `input.table` and its snapshot become a list of files, like a folder's."""

from __future__ import annotations

from relabel.manifests.errors import InputError, NothingNewError
from relabel.manifests.inputs import delta, iceberg
from relabel.manifests.inputs.input_files import ListedFile, list_named
from relabel.manifests.inputs.snapshots import TableSnapshot, reading_table
from relabel.manifests.specs import InputSpec
from relabel.manifests.storage.context import Storage

OPENERS = {"iceberg": iceberg.open_snapshot, "delta": delta.open_snapshot}


def open_table(spec: InputSpec, storage: Storage) -> TableSnapshot | None:
    """The snapshot that a job's input names; None where it names no table.

    Raises:
        InputError: no such table or snapshot, or one that can't be read as files alone.
        NothingNewError: nothing was added since `since`.
        MissingExtraError: a package is not here.
    """
    if spec.table is None:
        return None
    (path,) = spec.path
    with reading_table(path, spec.table):
        table = OPENERS[spec.table](path, spec.snapshot, spec.since, storage)
    if not table.files and table.since is not None:
        raise NothingNewError(
            f"{path}: no rows were added since snapshot {table.since}, up to snapshot {table.snapshot}: nothing to "
            "label yet."
        )
    if not table.files:
        raise InputError(f"{path}: snapshot {table.snapshot} has no data files. There is nothing to label.")
    return table


def list_table(table: TableSnapshot, storage: Storage) -> list[ListedFile]:
    """The data files of a snapshot, as their folder's listing shows them.

    Raises:
        InputError: one is not there any more.
    """
    try:
        return list_named(table.paths, table.folder, storage)
    except FileNotFoundError as exc:
        raise InputError(
            f"{exc.filename}: no such file, and snapshot {table.snapshot} of {table.folder} names it. Were old "
            "snapshots expired (expire_snapshots, VACUUM)? Name a later input.snapshot."
        ) from exc
