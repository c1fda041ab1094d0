"""Snapshots of Iceberg tables, without a catalog: from a metadata file, or the newest in the table's folder. pyiceberg
reads the formats (JSON, Avro), relabel fetches the files, so that storage options and retries hold here too.
"""

from __future__ import annotations

import gzip
import io
import re
from datetime import UTC, datetime
from typing import Any

from relabel.manifests.errors import InputError
from relabel.manifests.extras import require
from relabel.manifests.inputs.snapshots import DataFile, TableSnapshot, counted, missing_snapshot, name_below
from relabel.manifests.inputs.table_marks import ICEBERG_METADATA
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_stores import open_run_store
from relabel.manifests.storage.url_files import read_whole

HINT = "version-hint.text"


class _Files:
    """What pyiceberg takes for a FileIO: files below the table's folder, read through our storage."""

    def __init__(self, folder: str, storage: Storage) -> None:
        self._folder = folder
        self._storage = storage

    def new_input(self, location: str) -> _InputFile:
        """A file that metadata names."""
        path = f"{self._folder}/{name_below(self._folder, _plain(location))}"
        return _InputFile(location, read_whole(path, self._storage))


class _InputFile:
    """What pyiceberg takes for an InputFile."""

    def __init__(self, location: str, data: bytes) -> None:
        self.location = location
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def open(self, seekable: bool = True) -> io.BytesIO:
        """Its bytes."""
        return io.BytesIO(self._data)


def open_snapshot(path: str, snapshot: int | None, since: int | None, storage: Storage) -> TableSnapshot:
    """Read the metadata of an Iceberg table.

    Args:
        path: the table's folder, or one of its `….metadata.json`.
        snapshot: its id; the current one by default.
        since: leave out the files of this snapshot.
    Raises:
        InputError: no such snapshot; delete files; snapshots after `since` that do more than append.
        MissingExtraError: pyiceberg is not here.
        Exception: whatever damaged JSON and Avro raise (`reading_table`).
    """
    parser = require("pyiceberg.table.metadata", extra="iceberg", purpose="input.table: iceberg")
    folder, name = _metadata_file(path.rstrip("/"), storage)
    data = read_whole(f"{folder}/{name}", storage)
    metadata = parser.TableMetadataUtil.parse_raw((gzip.decompress(data) if ".gz" in name else data).decode())
    wanted = metadata.current_snapshot_id if snapshot is None else snapshot
    if wanted is None:
        raise InputError(f"{path}: this table has no snapshot yet, so no rows. Write some to it first.")
    found = metadata.snapshot_by_id(wanted)
    if found is None:
        raise missing_snapshot(path, wanted, [one.snapshot_id for one in metadata.snapshots])
    schema = next((one for one in metadata.schemas if one.schema_id == found.schema_id), None) or metadata.schema_by_id(
        metadata.current_schema_id
    )
    mapping = metadata.name_mapping()
    return TableSnapshot(
        format="iceberg",
        folder=folder,
        table_id=str(metadata.table_uuid),
        snapshot=wanted,
        since=since,
        latest=metadata.current_snapshot_id or wanted,
        committed=datetime.fromtimestamp(found.timestamp_ms / 1000, UTC),
        files=_data_files(found, None if since is None else _added(metadata, since, found, path), folder, storage),
        columns={field.name: field.field_id for field in schema.fields},
        mapped={} if mapping is None else {name: one.field_id for one in mapping.root for name in one.names},
    )


def _metadata_file(path: str, storage: Storage) -> tuple[str, str]:
    """The folder of a table, and the metadata file in it that counts: the one that was named, or that the hint names,
    or that has the highest number.
    """
    above, _, name = path.rpartition("/")
    if ICEBERG_METADATA.fullmatch(name) or name.endswith(".metadata.json"):
        folder, _, inside = above.rpartition("/")
        return (folder, f"metadata/{name}") if inside == "metadata" and folder else (above or ".", name)
    store = open_run_store(path, storage, single_writer=True)
    names = [one.rpartition("/")[2] for one in store.names("metadata")]
    if HINT in names:
        hint = store.read(f"metadata/{HINT}").decode().strip()
        meant = [f"v{hint}.metadata.json", f"v{hint}.gz.metadata.json", f"{hint}.metadata.json", hint]
        hinted = next((one for one in meant if one in names), None)
        if hinted is None:
            raise InputError(f"{path}: metadata/{HINT} names {hint!r}, which is not there. Name a metadata file.")
        return path, f"metadata/{hinted}"
    numbered = [(int(found[1]), one) for one in names if (found := ICEBERG_METADATA.fullmatch(one))]
    if not numbered:
        raise InputError(f"{path}: no Iceberg table: there is no metadata/….metadata.json. Check `input.path`.")
    newest = sorted(one for number, one in numbered if number == max(numbered)[0])
    if len(newest) > 1:
        raise InputError(
            f"{path}: {' and '.join(newest)} have one number, and only the table's catalog knows which counts. Give "
            "input.path the metadata file that the catalog names."
        )
    return path, f"metadata/{newest[0]}"


def _added(metadata: Any, since: int, snapshot: Any, path: str) -> set[int]:
    """Ids of the snapshots after `since` up to this one, if they only append."""
    between = [snapshot] if snapshot.snapshot_id != since else []
    while between and between[-1].parent_snapshot_id != since:  # which may be expired itself
        parent = metadata.snapshot_by_id(between[-1].parent_snapshot_id)
        if parent is None or parent in between:
            raise InputError(
                f"{path}: input.since {since} does not come before snapshot {snapshot.snapshot_id}: it is newer, on "
                "another branch, or what lies between was expired. Give one that comes before, or label the whole "
                "snapshot."
            )
        between.append(parent)
    for one in reversed(between):
        did = "unknown" if one.summary is None else str(one.summary.operation.value)
        if did != "append":
            raise InputError(
                f"{path}: snapshot {one.snapshot_id}, after input.since {since}, is no append but {did}: which rows "
                f"are new can't be determined from its files. Give input.since {one.snapshot_id} or a later one, or "
                "label the whole snapshot."
            )
    return {one.snapshot_id for one in between}


def _data_files(snapshot: Any, added: set[int] | None, folder: str, storage: Storage) -> tuple[DataFile, ...]:
    """The data files of a snapshot, in name order; of those that some snapshots added, if these are given."""
    files = _Files(folder, storage)
    found: list[DataFile] = []
    deletes: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for manifest in snapshot.manifests(files):
        for entry in manifest.fetch_manifest_entry(files):
            held = entry.data_file
            if held.content.name != "DATA":
                deletes[held.file_path] = held
            elif held.file_format.name != "PARQUET":
                other[held.file_path] = held
            elif added is None or entry.snapshot_id in added:
                found.append(DataFile(name_below(folder, _plain(held.file_path)), held.file_size_in_bytes))
    if deletes:
        raise InputError(
            f"{folder}: snapshot {snapshot.snapshot_id} has deleted rows in {counted(deletes)} (delete files), which "
            "relabel does not read. Write the data files again first: rewrite_data_files with delete-file-threshold 1."
        )
    if other:
        raise InputError(f"{folder}: {counted(other)} is no Parquet. Write the table's files again as Parquet.")
    return tuple(sorted(found))


def _plain(location: str) -> str:
    """A location without `file:`, which some writers put before local paths."""
    return re.sub(r"^file:(?://)?(?=/)", "", location)
