"""The log of a Delta table says what its own library says, and what relabel can't read is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, open_dataset, open_table
from relabel.manifests.specs import InputSpec
from relabel.manifests.table_snapshots import TableSnapshot
from tests.real_tables import DOCUMENT, Delta, pairs

FEATURES = {"minReaderVersion": 3, "minWriterVersion": 7}


@pytest.fixture
def delta(tmp_path: Path) -> Delta:
    """A table of two appends of eight rows."""
    made = Delta(tmp_path)
    made.append(pairs(0, 8))
    made.append(pairs(8, 16))
    return made


def opened(table: Delta, **read: Any) -> TableSnapshot:
    return open_table(InputSpec(path=(table.path,), table="delta", **read), Storage())


def read(table: Delta, **columns: Any) -> Dataset:
    spec = {"path": (table.path,), "table": "delta", "columns": columns}
    return open_dataset(InputSpec.model_validate(spec), Storage())


def test_deleted_rows_are_refused_and_a_rewrite_is_read_again(delta: Delta) -> None:
    """deltalake writes no deletion vectors; this commit is what Spark's DELETE writes."""
    add = next(action["add"] for action in delta.actions(1) if "add" in action)
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}
    vector |= {"cardinality": 1}
    features = {**FEATURES, "readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    gone = {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}
    marked = delta.commit(
        {"commitInfo": {"operation": "DELETE"}},
        {"protocol": features},
        {"remove": gone},
        {"add": {**add, "deletionVector": vector}},
    )
    with pytest.raises(InputError, match=f"version {marked} has deleted rows .*REORG TABLE"):
        opened(delta)
    with pytest.raises(InputError, match="has deleted rows"):
        opened(delta, since=1)
    assert len(opened(delta, snapshot=1).files) == 2
    other = {**add, "path": "rewritten.parquet"}
    shutil.copy(Path(delta.path, add["path"]), Path(delta.path, other["path"]))
    delta.commit({"commitInfo": {"operation": "REORG"}}, {"remove": {**gone, "deletionVector": vector}}, {"add": other})
    assert [Path(path).name for path in opened(delta).paths].count("rewritten.parquet") == 1
    assert len(opened(delta).files) == 2
    with pytest.raises(
        InputError, match=f"version 1 .input.since. were removed or rewritten up to version {marked + 1}, {add['path']}"
    ):
        opened(delta, since=1)


def test_a_partition_column_is_not_in_the_files(tmp_path: Path) -> None:
    table = Delta(tmp_path)
    table.append(pairs(0, 4), partition_by=["title"])
    assert read(table, document=["body"]).rows == 4  # names with %20 in them
    with pytest.raises(InputError, match=r"does not hold column `title` of the table.*partition column"):
        read(table, document=DOCUMENT)


def renamed(table: Delta, names: dict[str, str], *, mode: str = "name") -> None:
    """A commit as Spark's RENAME COLUMN writes it."""
    metadata = next(action["metaData"] for action in table.actions(0) if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    for number, one in enumerate(schema["fields"], start=1):
        one["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": one["name"]}
        one["name"] = names.get(one["name"], one["name"])
    mapped = {"schemaString": json.dumps(schema), "configuration": {"delta.columnMapping.mode": mode}}
    table.commit({"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": {**metadata, **mapped}})


def test_a_renamed_column_is_refused_and_never_taken_for_another(delta: Delta) -> None:
    renamed(delta, {"title": "body", "body": "title"})
    assert DeltaTable(delta.path).schema().fields[3].name == "body"
    with pytest.raises(
        InputError, match=r"column `title` of the table .* is called `body` there, since it was renamed"
    ):
        read(delta, document=["title"])
    assert read(delta, document=["doc_id"]).rows == 16


def test_a_column_that_was_added_is_read_where_all_files_hold_it(delta: Delta) -> None:
    rows = pairs(16, 24)
    delta.append(rows.append_column("note", [rows.column("title")]), schema_mode="merge")
    assert read(delta, document=DOCUMENT).rows == 24
    with pytest.raises(InputError, match=r"does not hold column `note` of the table.*added after the file was written"):
        read(delta, document=["note"])
    assert open_dataset(
        InputSpec(path=(delta.path,), table="delta", since=1, columns={"document": "note"}),  # type: ignore[arg-type]
        Storage(),
    ).rows == 8  # fmt: skip


@pytest.mark.parametrize("place", ["../outside.parquet", "file:///{}/outside.parquet"])
def test_files_outside_the_folder_are_refused(delta: Delta, tmp_path: Path, place: str) -> None:
    pq.write_table(pairs(0, 4), tmp_path / "outside.parquet")
    add = next(action["add"] for action in delta.actions(1) if "add" in action)
    delta.commit({"add": {**add, "path": place.format(str(tmp_path).lstrip("/"))}})
    with pytest.raises(InputError, match=r"outside.parquet, which lies outside the table's folder"):
        opened(delta)


@pytest.mark.parametrize(
    "text",
    ["{", '{"add": {"size": 3}}', '{"metaData": {"id": "x", "schemaString": "{"}}'],
)
def test_a_broken_log_is_one_error_that_names_the_table(delta: Delta, text: str) -> None:
    delta.commit_file(2).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as caught:
        open_dataset(InputSpec(path=(delta.path,), table="delta"), Storage())
    assert delta.path in str(caught.value)
