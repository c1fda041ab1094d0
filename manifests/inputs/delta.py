"""Snapshots of Delta tables, read from the log (`_delta_log/`) through the same storage as everything else.

A version is the last checkpoint before it and the commits since. Nothing is passed over: a log with a gap, a reader
feature that is not known here and deleted rows are refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.delta_actions import DeltaFile, DeltaProtocol, DeltaSidecar, DeltaState
from relabel.manifests.inputs.snapshots import DataFile, TableSnapshot, counted, missing_snapshot, name_below
from relabel.manifests.inputs.table_marks import DELTA_LOG
from relabel.manifests.records import checked
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.run_stores import open_run_store

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


def open_snapshot(folder: str, snapshot: int | None, since: int | None, storage: Storage) -> TableSnapshot:
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
