"""Snapshots of Delta and Iceberg tables: their data files and the names of their columns."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.input_files import DELTA_LOG, ICEBERG_METADATA
from relabel.manifests.process import require
from relabel.manifests.records import checked
from relabel.manifests.secrets import shortened
from relabel.manifests.specs import TableFormat, nearest
from relabel.manifests.store import map_concurrent, open_run_store, read_whole

# ------------------------------------------------------------------------------
# One snapshot of a table, whatever its format: which data files it has, and what its columns are called in them.


FIELD_ID = b"PARQUET:field_id"


class DataFile(NamedTuple):
    """A data file: its path from the table's folder, and its size by the table's metadata."""

    name: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """A snapshot, or what was added to a table since an earlier one.

    Args:
        folder: of the table, as it was given.
        table_id: the table's own, which a copy keeps.
        snapshot: its id; Delta: the version.
        since: rows of this snapshot are left out.
        latest: the table's current snapshot.
        committed: when this one was; None where the table does not tell any more.
        files: in name order.
        columns: the table's columns in order, each with what tells it in a file: its field id, or its name there.
        mapped: field ids by name, for files that hold no field ids.
    """

    format: TableFormat
    folder: str
    table_id: str
    snapshot: int
    since: int | None
    latest: int
    committed: datetime | None
    files: tuple[DataFile, ...]
    columns: Mapping[str, int | str]
    mapped: Mapping[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, str | None]:
        """What ties a plan to it. Ids are text: those of Iceberg are larger than what all readers of JSON keep."""
        since = None if self.since is None else str(self.since)
        return {"format": self.format, "id": self.table_id, "snapshot": str(self.snapshot), "since": since}

    @property
    def is_latest(self) -> bool:
        """Whether nothing was committed to the table since."""
        return self.snapshot == self.latest

    @property
    def paths(self) -> list[str]:
        """Where the data files lie."""
        return [f"{self.folder}/{file.name}" for file in self.files]

    def check_size(self, number: int, size_bytes: int) -> None:
        """Refuse a data file that is not the one which was committed.

        Args:
            number: of the file.
        Raises:
            InputError: its size is another.
        """
        wanted = self.files[number].size_bytes
        if wanted is not None and wanted != size_bytes:
            raise InputError(
                f"{self.paths[number]}: has {size_bytes:,} bytes, and snapshot {self.snapshot} of {self.folder} names "
                f"a file of {wanted:,}. It was written over: restore it."
            )

    def check_columns(self, names: Iterable[str], schema: pa.Schema, path: str) -> None:
        """Refuse a file that holds a column of the table under another name, or not at all.

        Args:
            names: the table's columns that are read.
            schema: the file's.
        Raises:
            InputError: which column, and what it is called there.
        """
        for name in names:
            if name not in self.columns:
                hint = nearest(name, list(self.columns))
                raise InputError(
                    f"{self.folder}: no column `{name}` in snapshot {self.snapshot} of this table; it has "
                    f"{', '.join(self.columns)}." + (f" Did you mean `{hint}`?" if hint else "")
                )
            found = self._name_in(schema, name)
            if found is None:
                raise InputError(
                    f"{path}: does not hold column `{name}` of the table {self.folder}: the column was added after "
                    "the file was written, or is a partition column of which the table alone knows. Write the table's "
                    "files again with it, or leave the column out."
                )
            if found != name:
                raise InputError(
                    f"{path}: column `{name}` of the table {self.folder} is called `{found}` there, since it was "
                    "renamed. relabel reads columns by the names in the files: write the table's files again first."
                )

    def _name_in(self, schema: pa.Schema, name: str) -> str | None:
        key = self.columns[name]
        if isinstance(key, str):
            return key if key in schema.names else None
        ids = field_ids(schema) or {one: self.mapped[one] for one in schema.names if one in self.mapped}
        return next((one for one, number in ids.items() if number == key), None)


def field_ids(schema: pa.Schema) -> dict[str, int]:
    """Iceberg's numbers of a file's columns by name; of none where the file has none."""
    return {one.name: int(one.metadata[FIELD_ID]) for one in schema if one.metadata and FIELD_ID in one.metadata}


def name_below(folder: str, path: str) -> str:
    """The path of a file from the table's folder.

    Raises:
        InputError: it lies elsewhere.
    """
    outer, inner = place_of(folder), place_of(path)
    name = inner.removeprefix(f"{outer}/")
    if name == inner or ".." in name.split("/"):
        raise InputError(
            f"{folder}: its metadata names {shortened(path, 200)}, which lies outside the table's folder. relabel "
            "reads what lies in the folder alone. Was the table copied? Then write its paths again, or name the "
            "original."
        )
    return name


def missing_snapshot(folder: str, wanted: int, known: Sequence[int]) -> InputError:
    """The error for a snapshot that a table does not have."""
    shown = ", ".join(map(str, known[-5:]))
    return InputError(
        f"{folder}: no snapshot {wanted} in this table; it has {'… ' if len(known) > 5 else ''}{shown or 'none'}. "
        "Was it expired? Name one that is there."
    )


@contextlib.contextmanager
def reading_table(folder: str, format_name: TableFormat) -> Iterator[None]:
    """Turn whatever is wrong with a table's metadata into an InputError that names the table."""
    try:
        yield
    except RelabelError:
        raise
    except FileNotFoundError as exc:
        raise InputError(
            f"{folder}: its metadata names {shortened(str(exc.filename or exc), 300)}, and there is no such file. Was "
            "the snapshot expired, or the table only partly copied?"
        ) from exc
    except Exception as exc:  # readers of damaged JSON, Avro and Parquet have no error in common
        first = shortened((str(exc).strip() or "no reason given").split("\n", 1)[0].rstrip("."), 200)
        raise InputError(
            f"{folder}: not a readable {format_name} table: {first} ({type(exc).__name__}). Restore its metadata, or "
            "check `input.table`."
        ) from exc


def counted(rows: Mapping[str, Any]) -> str:
    """How many, and the first, for messages about files."""
    names = sorted(rows)
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


# ------------------------------------------------------------------------------
# Actions of a Delta table's log, and what they come to.


@dataclass(frozen=True)
class DeltaFile:
    """An action that adds or removes a file."""

    path: str
    size: int | None = None
    deletion_vector: Annotated[dict[str, Any] | None, Field(alias="deletionVector")] = None
    is_data_change: Annotated[bool, Field(alias="dataChange")] = True

    @property
    def key(self) -> tuple[str, str]:
        """What makes it one file of the log: its path, and its deletion vector."""
        vector = self.deletion_vector or {}
        return self.path, "".join(str(vector.get(part)) for part in ("storageType", "pathOrInlineDv", "offset"))


@dataclass(frozen=True)
class DeltaProtocol:
    min_reader_version: Annotated[int, Field(alias="minReaderVersion")]
    reader_features: Annotated[list[str] | None, Field(alias="readerFeatures")] = None


@dataclass(frozen=True)
class DeltaSidecar:
    """A further Parquet file of a checkpoint."""

    path: str


@dataclass(frozen=True)
class _Column:
    name: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class _Schema:
    fields: list[_Column]


@dataclass(frozen=True)
class _Metadata:
    id: str
    schema_string: Annotated[str, Field(alias="schemaString")]
    configuration: dict[str, str | None] = field(default_factory=dict)

    def columns(self) -> dict[str, str]:
        """The name in the files of each column."""
        is_mapped = self.configuration.get("delta.columnMapping.mode", "none") != "none"
        key = "delta.columnMapping.physicalName"
        return {
            one.name: one.metadata.get(key, one.name) if is_mapped else one.name
            for one in checked(_Schema, json.loads(self.schema_string)).fields
        }


@dataclass
class DeltaState:
    """What the log says up to a version."""

    protocol: DeltaProtocol | None = None
    metadata: _Metadata | None = None
    files: dict[tuple[str, str], DeltaFile] = field(default_factory=dict)

    def take(self, actions: Iterable[dict[str, Any]]) -> None:
        """Go on by one commit or checkpoint."""
        added = []
        for action in actions:
            if (one := action.get("protocol")) is not None:
                self.protocol = checked(DeltaProtocol, one)
            if (one := action.get("metaData")) is not None:
                self.metadata = checked(_Metadata, {**one, "configuration": dict(one.get("configuration") or {})})
            if (one := action.get("remove")) is not None:
                self.files.pop(checked(DeltaFile, one).key, None)
            if (one := action.get("add")) is not None:
                added.append(checked(DeltaFile, one))
        self.files.update((file.key, file) for file in added)  # after what the same commit removed


# ------------------------------------------------------------------------------
# Snapshots of Delta tables, read from the log (`_delta_log/`) through the same storage as everything else.
#
# A version is the last checkpoint before it and the commits since. Nothing is passed over: a log with a gap, a reader
# feature that is not known here and deleted rows are refused.


READER_VERSION = 3
READER_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Those that change no row, or whose effect is known from the log and refused where it matters."""
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)")
_CHECKPOINT_COLUMNS = ["protocol", "metaData", "add.path", "add.size", "add.deletionVector", "sidecar"]


class _Log:
    """The log of a table: its commits, and its whole checkpoints, by version."""

    def __init__(self, folder: str, storage: Storage) -> None:
        self._store = open_run_store(folder, storage, single_writer=True)
        names = [name.rpartition("/")[2] for name in self._store.names(DELTA_LOG)]
        self.commits = sorted(int(found[1]) for name in names if (found := _COMMIT.fullmatch(name)))
        parts: dict[tuple[int, int], list[str]] = {}
        for name in names:
            if found := _CHECKPOINT.fullmatch(name):
                parts.setdefault((int(found[1]), int(found[3] or 1)), []).append(name)
        # one version may have several, each of which tells all
        self.checkpoints = {
            version: sorted(held)[:count] for (version, count), held in parts.items() if len(held) >= count
        }
        self.versions = sorted({*self.commits, *self.checkpoints})
        self.commit = functools.cache(self._commit)

    def _commit(self, version: int) -> list[dict[str, Any]]:
        """The actions of a commit.

        Raises:
            FileNotFoundError: the log does not hold it any more.
        """
        text = self._store.read(f"{DELTA_LOG}/{version:020}.json").decode()
        return [json.loads(line) for line in text.split("\n") if line.strip()]

    def state(self, version: int) -> DeltaState:
        """What the log says up to a version."""
        first = max((one for one in self.checkpoints if one <= version), default=None)
        state = DeltaState()
        for name in self.checkpoints.get(first, ()) if first is not None else ():
            state.take(self._checkpoint(name))
        steps = range(0 if first is None else first + 1, version + 1)
        if missing := set(steps) - set(self.commits):
            raise InputError(
                f"{self._store.root}: {DELTA_LOG} holds neither commit {min(missing)} nor a checkpoint after it, so "
                f"version {version} can't be determined. Restore the log, or name a later `input.snapshot`."
            )
        for actions in map_concurrent(self._store, self.commit, steps):
            state.take(actions)
        return state

    def _checkpoint(self, name: str) -> Iterator[dict[str, Any]]:
        data = self._store.read(f"{DELTA_LOG}/{name}")
        actions = _rows(data) if name.endswith(".parquet") else map(json.loads, filter(None, data.decode().split("\n")))
        for action in actions:
            yield action
            if (one := action.get("sidecar")) is not None:
                _, _, sidecar = checked(DeltaSidecar, one).path.rpartition("/")
                yield from _rows(self._store.read(f"{DELTA_LOG}/_sidecars/{sidecar}"))


def _rows(data: bytes) -> list[dict[str, Any]]:
    """The actions in a Parquet file, one a row."""
    with pq.ParquetFile(pa.BufferReader(data)) as parquet:
        found: list[dict[str, Any]] = parquet.read(columns=_CHECKPOINT_COLUMNS).to_pylist()
    return found


def open_delta_snapshot(folder: str, snapshot: int | None, since: int | None, storage: Storage) -> TableSnapshot:
    """Read the log of a Delta table.

    Args:
        snapshot: version; the latest by default.
        since: leave out the files of this version.
    Raises:
        InputError: no such version; deleted rows; commits since `since` that do more than append.
        Exception: whatever damaged JSON and Parquet raise (`reading_table`).
    """
    folder = folder.rstrip("/")
    log = _Log(folder, storage)
    if not log.versions:
        raise InputError(f"{folder}: no Delta table: there is no {DELTA_LOG}/ with commits. Check `input.path`.")
    latest = log.versions[-1]
    version = latest if snapshot is None else snapshot
    if not 0 <= version <= latest:
        raise missing_snapshot(folder, version, log.versions)
    state = log.state(version)
    if state.protocol is None or state.metadata is None:
        raise InputError(
            f"{folder}: {DELTA_LOG} has no protocol or no metaData up to version {version}. Restore the log."
        )
    _check_features(state.protocol, folder)
    if deleted := {file.path: file for file in state.files.values() if file.deletion_vector is not None}:
        raise InputError(
            f"{folder}: version {version} has deleted rows in {counted(deleted)} (deletion vectors), which relabel "
            "does not read. Write the files again first: REORG TABLE … APPLY (PURGE), or OPTIMIZE."
        )
    added = None if since is None else _added(log, since, version, folder)
    names = [
        DataFile(_name(folder, file.path), file.size)
        for file in state.files.values()
        if added is None or file.path in added
    ]
    return TableSnapshot(
        format="delta",
        folder=folder,
        table_id=state.metadata.id,
        snapshot=version,
        since=since,
        latest=latest,
        committed=_committed(log, version),
        files=tuple(sorted(names)),
        columns=state.metadata.columns(),
    )


def _check_features(protocol: DeltaProtocol, folder: str) -> None:
    unknown = set(protocol.reader_features or ()) - READER_FEATURES
    if protocol.min_reader_version > READER_VERSION or unknown:
        wanted = ", ".join(sorted(unknown)) or f"version {protocol.min_reader_version}"
        raise InputError(
            f"{folder}: to be read, this table asks for {wanted}, which relabel does not know. Copy its rows to a "
            "table without, or to Parquet files."
        )


def _added(log: _Log, since: int, version: int, folder: str) -> set[str]:
    """Paths of the files that commits after `since` added, if they did nothing else to rows."""
    if since > version:
        raise InputError(f"{folder}: input.since {since} is newer than snapshot {version}. Give an earlier one.")
    if missing := set(range(since + 1, version + 1)) - set(log.commits):
        raise InputError(
            f"{folder}: {DELTA_LOG} does not hold commit {min(missing)} any more, so what was added since version "
            f"{since} can't be determined. Give a later input.since, or label the whole snapshot."
        )
    added: set[str] = set()
    for number in range(since + 1, version + 1):
        actions = log.commit(number)
        if any("remove" in action for action in actions):
            what = _info(actions).get("operation", "a commit that removes files")
            raise InputError(
                f"{folder}: version {number}, after input.since {since}, is no append but {what}: which rows are new "
                f"can't be determined from its files. Give an input.since of {number} or later, or label the whole "
                "snapshot."
            )
        files = [checked(DeltaFile, action["add"]) for action in actions if "add" in action]
        added.update(file.path for file in files if file.is_data_change)
    return added


def _name(folder: str, path: str) -> str:
    decoded = unquote(path)
    return name_below(folder, decoded if is_url(decoded) or decoded.startswith("/") else f"{folder}/{decoded}")


def _info(actions: list[dict[str, Any]]) -> dict[str, Any]:
    return functools.reduce(lambda found, action: {**found, **(action.get("commitInfo") or {})}, actions, {})


def _committed(log: _Log, version: int) -> datetime | None:
    if version not in log.commits:
        return None
    info = _info(log.commit(version))
    when = info.get("inCommitTimestamp", info.get("timestamp"))
    return None if when is None else datetime.fromtimestamp(int(when) / 1000, UTC)


# ------------------------------------------------------------------------------
# Snapshots of Iceberg tables, without a catalog: from a metadata file, or the newest in the table's folder. pyiceberg
# reads the formats (JSON, Avro), relabel fetches the files, so that storage options and retries hold here too.


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


def open_iceberg_snapshot(path: str, snapshot: int | None, since: int | None, storage: Storage) -> TableSnapshot:
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
        files=_data_files(
            found, None if since is None else _iceberg_added(metadata, since, found, path), folder, storage
        ),
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
