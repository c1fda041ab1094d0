"""Snapshots of Delta and Iceberg tables: their data files and the names of their columns."""

import gzip
import io
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from relabel.manifests.errors import InputError, NothingNewError, RelabelError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.process import require
from relabel.manifests.secrets import shortened
from relabel.manifests.specs import InputSpec, TableFormat, nearest
from relabel.manifests.store import map_concurrent, open_run_store, read_whole

# ------------------------------------------------------------------------------
# What distinguishes the folder of a table from one of plain Parquet files: the log or the metadata in it.
#
# A table keeps files of which rows were removed or rewritten. Read as plain files, those rows would come along.


DELTA_LOG = "_delta_log"
TABLE_MARKS = frozenset((DELTA_LOG, "metadata"))
ICEBERG_METADATA = re.compile(r"v?(\d+)(?:-[^/]*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
"""The name of a metadata file in `metadata/`, with its number."""
_IN_A_TABLE = re.compile(rf"(?:^|/)(?:({DELTA_LOG})/|metadata/{ICEBERG_METADATA.pattern}\Z)")
"""What follows a table's folder in a key of Delta's log (which is the group), or of Iceberg's metadata."""


def folders_above(path: str) -> Iterator[str]:
    """The folders that a path lies in, as it is written, the innermost first."""
    while path := path.rpartition("/")[0]:
        yield path


def refuse_tables(files: Iterable[str], keys: Iterable[str]) -> None:
    """Refuse files of tables that are read as plain ones.

    Args:
        keys: of the deep listing that the files are from.
    Raises:
        InputError: names the folder of the table.
    """
    formats: dict[str, TableFormat] = {}
    for key in keys:
        mark = None
        if DELTA_LOG in key or "metadata" in key:  # most keys have neither, and this is faster than the pattern
            mark = _IN_A_TABLE.search(key)
        if mark is not None:
            formats[key[: mark.start()]] = "delta" if mark[1] else "iceberg"
    if not formats:
        return
    for path in files:
        table = next((folder for folder in (*folders_above(path), "") if folder in formats), None)
        if table is not None:
            folder = table or "."
            raise InputError(
                f"{folder}: the folder of a table ({DELTA_LOG}/ or metadata/….metadata.json lies in it); read as "
                "plain files it gives rows that the table has no more. In a job write "
                f"`input: {{path: {folder}, table: {formats[table]}}}`; other commands want the table's rows as "
                "plain Parquet files."
            )


# ------------------------------------------------------------------------------
# One snapshot of a table, whatever its format: which data files it has, and what its columns are called in them.


FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """A snapshot, or what was added to a table since an earlier one.

    Args:
        folder: of the table, as it was given.
        table_id: the table's own, which a copy keeps.
        snapshot: its id; Delta: the version.
        since: rows of this snapshot are left out.
        latest: the table's current snapshot.
        committed: when this one was; None where the table does not hold it any more.
        files: in name order, each by its path from the table's folder and its size by the table's metadata.
        columns: the table's columns in order, each with what identifies it in a file: its field id, or its name there.
        mapped: field ids by name, for files that hold no field ids.
    """

    format: TableFormat
    folder: str
    table_id: str
    snapshot: int
    since: int | None
    latest: int
    committed: datetime | None
    files: tuple[tuple[str, int], ...]
    columns: Mapping[str, int | str]
    mapped: Mapping[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, str | None]:
        """What ties a plan to it. Ids are text: those of Iceberg are larger than what all readers of JSON keep."""
        since = None if self.since is None else str(self.since)
        return {"format": self.format, "id": self.table_id, "snapshot": str(self.snapshot), "since": since}

    @property
    def paths(self) -> list[str]:
        """Where the data files lie."""
        return [f"{self.folder}/{name}" for name, _ in self.files]

    def check_file(self, number: int, path: str, size_bytes: int, names: Iterable[str], schema: pa.Schema) -> None:
        """Refuse a data file that is not the one which was committed, or that holds a column of the table under another
        name, or not at all.

        Args:
            number: of the file.
            names: the table's columns that are read.
            schema: the file's.
        Raises:
            InputError: its size is another; or which column, and what it is called there.
        """
        committed_bytes = self.files[number][1]
        if committed_bytes != size_bytes:
            raise InputError(
                f"{path}: has {size_bytes:,} bytes, and snapshot {self.snapshot} of {self.folder} names "
                f"a file of {committed_bytes:,}. It was written over: restore it."
            )
        names_in_file = self._names_in_file(schema)
        for name in names:
            if name not in self.columns:
                hint = nearest(name, list(self.columns))
                raise InputError(
                    f"{self.folder}: no column `{name}` in snapshot {self.snapshot} of this table; it has "
                    f"{', '.join(self.columns)}." + (f" Did you mean `{hint}`?" if hint else "")
                )
            name_in_file = names_in_file.get(self.columns[name])
            if name_in_file is None:
                raise InputError(
                    f"{path}: does not hold column `{name}` of the table {self.folder}: the column was added after "
                    "the file was written, or is a partition column of which the table alone knows. Write the table's "
                    "files again with it, or leave the column out."
                )
            if name_in_file != name:
                raise InputError(
                    f"{path}: column `{name}` of the table {self.folder} is called `{name_in_file}` there, since it "
                    "was renamed. relabel reads columns by the names in the files: write the table's files again first."
                )

    def _names_in_file(self, schema: pa.Schema) -> dict[int | str, str]:
        """The columns of a file, each by its field id, if it has one, and by its name."""
        ids = {}
        for column in schema:
            if column.metadata and FIELD_ID in column.metadata:
                ids[column.name] = int(column.metadata[FIELD_ID])
        if not ids:
            ids = {name: self.mapped[name] for name in schema.names if name in self.mapped}
        names: dict[int | str, str] = {name: name for name in schema.names}
        names |= {field_id: name for name, field_id in ids.items()}
        return names


def name_below(folder: str, path: str) -> str:
    """The path of a file from the table's folder.

    Args:
        path: of the file; some writers put `file:` before local ones.
    Raises:
        InputError: it lies elsewhere.
    """
    path = re.sub(r"^file:(?://)?(?=/)", "", path)
    outer = place_of(folder)
    inner = place_of(path)
    name = inner.removeprefix(f"{outer}/")
    if name == inner or ".." in name.split("/"):
        raise InputError(
            f"{folder}: its metadata names {shortened(path, 200)}, which lies outside the table's folder. relabel "
            "reads what lies in the folder alone. Was the table copied? Then write its paths again, or name the "
            "original."
        )
    return name


def first_of(names: Iterable[str]) -> str:
    """The first, and how many more, for messages about files."""
    first, *others = sorted(names)
    return f"{first} and {len(others):,} more" if others else first


# ------------------------------------------------------------------------------
# Delta tables, read by the deltalake library from the log (`_delta_log/`). By URL the log is fetched into a temporary
# folder first, so that storage options and retries are the same as for everything else.


def open_delta_snapshot(folder: str, snapshot: int | None, since: int | None, storage: Storage) -> TableSnapshot:
    """Read the log of a Delta table.

    Args:
        snapshot: version; the latest by default.
        since: leave out the files of this version.
    Raises:
        InputError: no such version; deleted rows; files of `since` that were removed or rewritten.
        MissingExtraError: deltalake is not installed.
        Exception: whatever deltalake raises for a damaged log (`open_table`).
    """
    library = require("deltalake", extra="delta", purpose="input.table: delta")
    folder = folder.rstrip("/")
    with tempfile.TemporaryDirectory(prefix="relabel-delta-") as temporary:
        local = folder
        if is_url(folder):
            local = temporary
            _fetch_log(folder, storage, Path(temporary))
        if not any(Path(local, DELTA_LOG).glob("*.*")):
            raise InputError(f"{folder}: no Delta table: there is no {DELTA_LOG}/ with commits. Check `input.path`.")
        table = library.DeltaTable(local)
        latest = table.version()
        version = latest if snapshot is None else snapshot
        if not 0 <= version <= latest:
            raise InputError(f"{folder}: no snapshot {version} in this table; it has 0 to {latest}. Was it expired?")
        before: Set[str] = frozenset()
        if since is not None:
            if since > version:
                raise InputError(f"{folder}: input.since {since} is newer than snapshot {version}. Give another.")
            before = _delta_files(table, since).keys()
        files = _delta_files(table, version)
        removed = sorted(before - files.keys())
        if removed:
            raise InputError(
                f"{folder}: files of version {since} (input.since) were removed or rewritten up to version {version}, "
                f"{first_of(removed)}: which rows are new can't be determined. Give a later input.since, or label the "
                "whole snapshot."
            )
        if "deletionVectors" in (table.protocol().reader_features or ()) and _has_deleted_rows(table):
            raise InputError(
                f"{folder}: version {version} has deleted rows (deletion vectors), which relabel does not read. Write "
                "the files again first: REORG TABLE … APPLY (PURGE), or OPTIMIZE."
            )
        data_files = []
        for path in files.keys() - before:
            name = unquote(path)
            if not is_url(name) and not name.startswith("/"):
                name = f"{folder}/{name}"
            data_files.append((name_below(folder, name), files[path]))
        return TableSnapshot(
            format="delta",
            folder=folder,
            table_id=str(table.metadata().id),
            snapshot=version,
            since=since,
            latest=latest,
            committed=_delta_commit_time(table, Path(local, DELTA_LOG, f"{version:020}.json")),
            files=tuple(sorted(data_files)),
            columns=_delta_columns(table),
        )


def _fetch_log(folder: str, storage: Storage, target: Path) -> None:
    store = open_run_store(folder, storage)
    names = store.names(DELTA_LOG)
    for name, data in zip(names, map_concurrent(store, store.read, names), strict=True):
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def _delta_commit_time(table: Any, commit: Path) -> datetime | None:
    """When the version that a table is at was written.

    Args:
        commit: its own file; without it the library gives another commit's time.
    """
    history = table.history(1)
    if not history or not commit.is_file():
        return None
    written_ms = history[0].get("timestamp")
    return None if written_ms is None else datetime.fromtimestamp(written_ms / 1000, UTC)


def _delta_columns(table: Any) -> dict[str, str]:
    """What each column of a table is called in its files."""
    columns = table.schema().fields
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") == "none":
        return {column.name: column.name for column in columns}
    physical = "delta.columnMapping.physicalName"
    return {column.name: str(column.metadata.get(physical, column.name)) for column in columns}


def _delta_files(table: Any, version: int) -> dict[str, int]:
    """Sizes of a version's data files by path; the table is at that version then."""
    table.load_as_version(version)
    actions = pa.table(table.get_add_actions(flatten=True))
    return dict(zip(actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist(), strict=True))


def _has_deleted_rows(table: Any) -> bool:
    """Whether any file has a deletion vector; one that can't be read counts too."""
    try:
        return next(table.deletion_vectors(), None) is not None
    except Exception:  # noqa: BLE001 — the vectors are files, which a fetched log does not hold
        return True


# ------------------------------------------------------------------------------
# Snapshots of Iceberg tables, without a catalog: from a metadata file, or the newest in the table's folder. pyiceberg
# reads the formats (JSON, Avro), relabel fetches the files, so that storage options and retries hold here too.


HINT = "version-hint.text"


class _InputFile(bytes):
    """What pyiceberg takes for an InputFile."""

    def open(self, seekable: bool = True) -> io.BytesIO:
        """Its bytes."""
        return io.BytesIO(self)


def open_iceberg_snapshot(path: str, snapshot: int | None, since: int | None, storage: Storage) -> TableSnapshot:
    """Read the metadata of an Iceberg table.

    Args:
        path: the table's folder, or one of its `….metadata.json`.
        snapshot: its id; the current one by default.
        since: leave out the files of this snapshot.
    Raises:
        InputError: no such snapshot; delete files; snapshots after `since` that do more than append.
        MissingExtraError: pyiceberg is not here.
        Exception: whatever damaged JSON and Avro raise (`open_table`).
    """
    parser = require("pyiceberg.table.metadata", extra="iceberg", purpose="input.table: iceberg")
    folder, name = _metadata_file(path.rstrip("/"), storage)
    data = read_whole(f"{folder}/{name}", storage)
    if ".gz" in name:
        data = gzip.decompress(data)
    metadata = parser.TableMetadataUtil.parse_raw(data.decode())
    snapshot_id = metadata.current_snapshot_id if snapshot is None else snapshot
    if snapshot_id is None:
        raise InputError(f"{path}: this table has no snapshot yet, so no rows. Write some to it first.")
    chosen = metadata.snapshot_by_id(snapshot_id)
    if chosen is None:
        known = ", ".join(str(recent.snapshot_id) for recent in metadata.snapshots[-5:])
        raise InputError(f"{path}: no snapshot {snapshot_id} in this table; it has {known}. Was it expired?")
    added = None if since is None else _iceberg_added(metadata, since, chosen, path)
    return TableSnapshot(
        format="iceberg",
        folder=folder,
        table_id=str(metadata.table_uuid),
        snapshot=snapshot_id,
        since=since,
        latest=metadata.current_snapshot_id or snapshot_id,
        committed=datetime.fromtimestamp(chosen.timestamp_ms / 1000, UTC),
        files=_data_files(chosen, added, folder, storage),
        columns={column.name: column.field_id for column in _schema_of(metadata, chosen).fields},
        mapped=_mapped_ids(metadata),
    )


def _schema_of(metadata: Any, snapshot: Any) -> Any:
    """The schema that a snapshot was written with, else the table's current one."""
    for schema in metadata.schemas:
        if schema.schema_id == snapshot.schema_id:
            return schema
    return metadata.schema_by_id(metadata.current_schema_id)


def _mapped_ids(metadata: Any) -> dict[str, int]:
    """Field ids by name, of a table's name mapping."""
    mapping = metadata.name_mapping()
    ids: dict[str, int] = {}
    if mapping is not None:
        for column in mapping.root:
            ids |= dict.fromkeys(column.names, column.field_id)
    return ids


def _metadata_file(path: str, storage: Storage) -> tuple[str, str]:
    """The folder of a table, and the metadata file in it that counts: the one that was named, or that the hint names,
    or that has the highest number.
    """
    above, _, name = path.rpartition("/")
    if ICEBERG_METADATA.fullmatch(name) or name.endswith(".metadata.json"):
        folder, _, inside = above.rpartition("/")
        if folder and inside == "metadata":
            return folder, f"metadata/{name}"
        return above or ".", name
    store = open_run_store(path, storage, single_writer=True)
    names = [key.removeprefix("metadata/") for key in store.names("metadata") if key.count("/") == 1]
    if HINT in names:
        hint = store.read(f"metadata/{HINT}").decode().strip()
        for name in (f"v{hint}.metadata.json", f"v{hint}.gz.metadata.json", f"{hint}.metadata.json", hint):
            if name in names:
                return path, f"metadata/{name}"
        raise InputError(f"{path}: metadata/{HINT} names {hint!r}, which is not there. Name a metadata file.")
    by_number = defaultdict[int, list[str]](list)
    for name in names:
        match = ICEBERG_METADATA.fullmatch(name)
        if match:
            by_number[int(match[1])].append(name)
    if not by_number:
        raise InputError(f"{path}: no Iceberg table: there is no metadata/….metadata.json. Check `input.path`.")
    newest = sorted(by_number[max(by_number)])
    if len(newest) > 1:
        raise InputError(
            f"{path}: {' and '.join(newest)} have one number, and only the table's catalog knows which counts. Give "
            "input.path the metadata file that the catalog names."
        )
    return path, f"metadata/{newest[0]}"


def _iceberg_added(metadata: Any, since: int, snapshot: Any, path: str) -> set[int]:
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
    for later in reversed(between):
        operation = "unknown" if later.summary is None else str(later.summary.operation.value)
        if operation != "append":
            raise InputError(
                f"{path}: snapshot {later.snapshot_id}, after input.since {since}, is no append but {operation}: which "
                f"rows are new can't be determined from its files. Give input.since {later.snapshot_id} or a later "
                "one, or label the whole snapshot."
            )
    return {later.snapshot_id for later in between}


def _data_files(snapshot: Any, added: set[int] | None, folder: str, storage: Storage) -> tuple[tuple[str, int], ...]:
    """The data files of a snapshot, in name order; of those that some snapshots added, if these are given."""

    def new_input(location: str) -> _InputFile:
        return _InputFile(read_whole(f"{folder}/{name_below(folder, location)}", storage))

    files = SimpleNamespace(new_input=new_input)  # what pyiceberg takes for a FileIO
    wanted = []
    deletes = set()
    other = set()
    for manifest in snapshot.manifests(files):
        for entry in manifest.fetch_manifest_entry(files):
            file = entry.data_file
            if file.content.name != "DATA":
                deletes.add(file.file_path)
            if file.file_format.name != "PARQUET":
                other.add(file.file_path)
            if added is None or entry.snapshot_id in added:
                wanted.append((file.file_path, file.file_size_in_bytes))
    if deletes:
        raise InputError(
            f"{folder}: snapshot {snapshot.snapshot_id} has deleted rows in {first_of(deletes)} (delete files), which "
            "relabel does not read. Write the data files again first: rewrite_data_files with delete-file-threshold 1."
        )
    if other:
        raise InputError(f"{folder}: {first_of(other)} is no Parquet. Write the table's files again as Parquet.")
    return tuple(sorted((name_below(folder, path), size) for path, size in wanted))


def open_table(spec: InputSpec, storage: Storage) -> TableSnapshot:
    """The snapshot of a table that a job's input names.

    Raises:
        InputError: no such table or snapshot, or one that can't be read as files alone.
        NothingNewError: nothing was added since `since`.
        MissingExtraError: a package is not here.
    """
    (path,) = spec.path
    opener = open_iceberg_snapshot if spec.table == "iceberg" else open_delta_snapshot
    try:
        table = opener(path, spec.snapshot, spec.since, storage)
    except RelabelError:
        raise
    except FileNotFoundError as exc:
        raise InputError(
            f"{path}: its metadata names {shortened(str(exc.filename or exc), 300)}, and there is no such file. Was "
            "the snapshot expired, or the table only partly copied?"
        ) from exc
    except Exception as exc:  # readers of damaged JSON, Avro and Parquet have no error in common
        first = shortened((str(exc).strip() or "no reason given").split("\n", 1)[0].rstrip("."), 200)
        raise InputError(
            f"{path}: not a readable {spec.table} table: {first} ({type(exc).__name__}). Restore its metadata, or "
            "check `input.table`."
        ) from exc
    if not table.files and table.since is not None:
        raise NothingNewError(
            f"{path}: no rows were added since snapshot {table.since}, up to snapshot {table.snapshot}: nothing to "
            "label yet."
        )
    if not table.files:
        raise InputError(f"{path}: snapshot {table.snapshot} has no data files. There is nothing to label.")
    return table
