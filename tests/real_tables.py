"""Iceberg and Delta tables as their own libraries write them, under one set of verbs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from pyiceberg import manifest as manifests
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot, Summary

FORMATS = ("iceberg", "delta")
DOCUMENT = ["title", "body"]


def pairs(first: int, stop: int) -> pa.Table:
    """Rows of pairs, four documents a query."""
    rows = range(first, stop)
    return pa.table(
        {
            "query_id": [f"q{row // 4}" for row in rows],
            "query": [f"red shoe {row // 4}" for row in rows],
            "doc_id": [f"d{row:03d}" for row in rows],
            "title": [f"shoe {row}" for row in rows],
            "body": [f"a red shoe of kind {row}" for row in rows],
        }
    )


class RealTable(Protocol):
    """A table.

    Attributes:
        format: for `input.table`.
        path: its folder.
    """

    format: str
    path: str

    def append(self, rows: pa.Table) -> int:
        """Add a data file; returns the snapshot."""

    def overwrite(self, rows: pa.Table) -> int:
        """Replace all rows; returns the snapshot."""

    def files(self, snapshot: int) -> list[str]:
        """Data files of a snapshot by the library's own reader, in name order."""


class Delta:
    """A Delta table."""

    format = "delta"

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "delta")

    def append(self, rows: pa.Table, **options: Any) -> int:
        write_deltalake(self.path, rows, mode="append", **options)
        return DeltaTable(self.path).version()

    def overwrite(self, rows: pa.Table, **options: Any) -> int:
        write_deltalake(self.path, rows, mode="overwrite", **options)
        return DeltaTable(self.path).version()

    def files(self, snapshot: int) -> list[str]:
        return sorted(DeltaTable(self.path, version=snapshot).file_uris())

    def actions(self, version: int) -> list[dict[str, Any]]:
        """Of a commit."""
        return [json.loads(line) for line in self.commit_file(version).read_text().split("\n") if line]

    def commit(self, *actions: dict[str, Any], version: int | None = None) -> int:
        """A commit of another writer, with what this library does not write, or not even read; returns the version."""
        if version is None:
            version = DeltaTable(self.path).version() + 1
        self.commit_file(version).write_text("\n".join(map(json.dumps, actions)))
        return version

    def commit_file(self, version: int) -> Path:
        return Path(self.path, "_delta_log", f"{version:020}.json")


class _DeleteWriter(manifests.ManifestWriterV2):
    """Writes a manifest of delete files, which pyiceberg reads and does not write."""

    def content(self) -> manifests.ManifestContent:
        return manifests.ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class Iceberg:
    """An Iceberg table in a catalog of its own (SQLite, in memory)."""

    format = "iceberg"

    def __init__(self, folder: Path, location: str | None = None, **properties: str) -> None:
        warehouse = location or f"file://{folder}/warehouse"
        self.catalog = SqlCatalog("test", uri="sqlite:///:memory:", warehouse=warehouse, **properties)
        self.catalog.create_namespace("db")
        self.path = f"{warehouse.removeprefix('file://')}/db/pairs"
        self._made: Table | None = None

    def table(self, rows: pa.Table | None = None) -> Table:
        if self._made is None:
            self._made = self.catalog.create_table("db.pairs", schema=(pairs(0, 1) if rows is None else rows).schema)
        return self._made

    def append(self, rows: pa.Table) -> int:
        self.table(rows).append(rows)
        return self.snapshot()

    def overwrite(self, rows: pa.Table) -> int:
        self.table().overwrite(rows)
        return self.snapshot()

    def snapshot(self) -> int:
        found = self.table().current_snapshot()
        return int(found.snapshot_id)

    def files(self, snapshot: int) -> list[str]:
        found = self.table().scan(snapshot_id=snapshot).plan_files()
        return sorted(task.file.file_path.removeprefix("file://") for task in found)

    def delete_rows(self, rows: Iterable[int], kind: manifests.DataFileContent) -> str:
        """A snapshot with a delete file, as Spark and Flink commit one; returns its metadata file."""
        table, io = self.table(), PyArrowFileIO()
        before = table.current_snapshot()
        number, sequence = before.snapshot_id + 1, (before.sequence_number or 0) + 1
        data = self.files(before.snapshot_id)[0]
        delete_file = f"{self.path}/data/deletes-{number}.parquet"
        held = list(rows)
        pq.write_table(pa.table({"file_path": [f"file://{data}"] * len(held), "pos": held}), delete_file)
        file = manifests.DataFile.from_args(
            _table_format_version=2,
            content=kind,
            file_path=f"file://{delete_file}",
            file_format=manifests.FileFormat.PARQUET,
            partition=manifests.Record(),
            record_count=len(held),
            file_size_in_bytes=Path(delete_file).stat().st_size,
        )
        file.spec_id = 0
        place = f"file://{self.path}/metadata/deletes-{number}"
        spec, schema = table.metadata.spec(), table.schema()
        with _DeleteWriter(spec, schema, io.new_output(f"{place}-m0.avro"), number, "deflate") as writer:
            status = manifests.ManifestEntryStatus.ADDED
            writer.add_entry(manifests.ManifestEntry.from_args(status=status, snapshot_id=number, data_file=file))
        listing = [*before.manifests(table.io), writer.to_manifest_file()]
        output = io.new_output(f"{place}.avro")
        with manifests.write_manifest_list(
            2, output, number, before.snapshot_id, sequence, "deflate"
        ) as writer_of_list:
            writer_of_list.add_manifests(listing)
        snapshot = Snapshot(
            snapshot_id=number,
            parent_snapshot_id=before.snapshot_id,
            sequence_number=sequence,
            timestamp_ms=before.timestamp_ms + 1,
            manifest_list=f"{place}.avro",
            summary=Summary(Operation.DELETE),
            schema_id=before.schema_id,
        )
        update = {"snapshots": [*table.metadata.snapshots, snapshot], "current_snapshot_id": number}
        path = f"{self.path}/metadata/90000-deletes.metadata.json"
        ToOutputFile.table_metadata(table.metadata.model_copy(update=update), io.new_output(f"file://{path}"))
        return path


def make(format_name: str, folder: Path) -> RealTable:
    """A table without rows."""
    return Delta(folder) if format_name == "delta" else Iceberg(folder)
