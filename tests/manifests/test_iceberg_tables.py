"""Iceberg tables as pyiceberg writes them: which metadata counts, and what is refused by name."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.manifest import DataFileContent

from relabel.manifests.errors import InputError, MissingExtraError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset, list_input, open_dataset
from relabel.manifests.specs import InputSpec
from relabel.manifests.table_snapshots import TableSnapshot, open_table
from tests import real_tables
from tests.real_tables import DOCUMENT, Delta, Iceberg, pairs


@pytest.fixture
def table(tmp_path: Path) -> Iceberg:
    """A table of two appends of eight rows."""
    made = Iceberg(tmp_path)
    made.append(pairs(0, 8))
    made.append(pairs(8, 16))
    return made


def opened(path: str, **read: Any) -> TableSnapshot:
    return open_table(InputSpec(path=(path,), table="iceberg", **read), Storage())


def read(table: Iceberg, **columns: Any) -> Dataset:
    # a change of the schema alone is no snapshot: the rows are those of the last one
    spec = {"path": (table.path,), "table": "iceberg", "columns": columns}
    return open_dataset(InputSpec.model_validate(spec), Storage())


def metadata_files(table: Iceberg) -> list[Path]:
    return sorted(Path(table.path, "metadata").glob("*.metadata.json"))


def test_the_newest_metadata_counts_or_the_one_that_is_named(table: Iceberg) -> None:
    current = table.snapshot()
    assert opened(table.path).snapshot == opened(table.path + "/").snapshot == current
    *_, before, newest = metadata_files(table)
    assert opened(str(newest)).files == opened(table.path).files
    older = opened(str(before))
    assert older.snapshot == older.latest != current
    assert older.folder == table.path
    assert len(older.files) == 1


def test_the_hint_counts_where_there_is_one(table: Iceberg) -> None:
    folder = Path(table.path, "metadata")
    metadata_files(table)[-2].rename(folder / "v7.metadata.json")
    (folder / "version-hint.text").write_text("7\n")
    assert len(opened(table.path).files) == 1
    (folder / "v7.metadata.json").unlink()
    with pytest.raises(InputError, match=r"version-hint.text names '.*', which is not there"):
        opened(table.path)


def test_metadata_of_a_commit_that_failed_is_not_guessed_about(table: Iceberg) -> None:
    newest = metadata_files(table)[-1]
    other = newest.with_name(f"{newest.name.partition('-')[0]}-0000.metadata.json")
    shutil.copy(newest, other)
    with pytest.raises(InputError, match="have one number, and only the table's catalog knows which counts"):
        opened(table.path)
    assert len(opened(str(newest)).files) == 2


@pytest.mark.parametrize("kind", [DataFileContent.POSITION_DELETES, DataFileContent.EQUALITY_DELETES])
def test_delete_files_are_refused(table: Iceberg, kind: DataFileContent) -> None:
    before = table.snapshot()
    path = table.delete_rows([0, 3], kind)
    with pytest.raises(
        InputError, match=r"has deleted rows in file://.*deletes-.*\(delete files\).*rewrite_data_files"
    ):
        opened(path)
    assert len(opened(path, snapshot=before).files) == 2


def test_a_renamed_column_is_refused_and_never_taken_for_another(table: Iceberg) -> None:
    with table.table().update_schema() as update:
        update.rename_column("title", "headline")
    with table.table().update_schema() as update:
        update.add_column("title", table.table().schema().find_type("body"))
    rows = pairs(16, 20)
    assert read(table, document=DOCUMENT).rows == 16  # the snapshot has the columns that it was committed with
    table.append(rows.append_column("headline", [rows.column("body")]))
    with pytest.raises(InputError, match=r"does not hold column `title` of the table.*added after"):
        read(table, document=DOCUMENT)
    with pytest.raises(InputError, match=r"`headline` of the table .* is called `title` there, since it was renamed"):
        read(table, document=["headline"])
    assert read(table, document=["body"]).rows == 20


def test_a_column_that_was_added_is_read_where_all_files_hold_it(table: Iceberg) -> None:
    first = table.snapshot()
    with table.table().update_schema() as update:
        update.add_column("note", table.table().schema().find_type("body"))
    rows = pairs(16, 24)
    table.append(rows.append_column("note", [rows.column("title")]))
    assert read(table, document=DOCUMENT).rows == 24
    with pytest.raises(InputError, match=r"does not hold column `note` of the table.*added after"):
        read(table, document=["note"])
    spec = {"path": (table.path,), "table": "iceberg", "since": first, "columns": {"document": "note"}}
    assert open_dataset(InputSpec.model_validate(spec), Storage()).rows == 8


def test_files_without_field_ids_are_read_by_the_name_mapping(table: Iceberg) -> None:
    path = Path(table.path, "data", "imported.parquet")
    pq.write_table(pairs(16, 24), path)
    table.table().add_files([f"file://{path}"])
    assert read(table, document=DOCUMENT).rows == 24
    table.table().transaction().remove_properties("schema.name-mapping.default").commit_transaction()
    with pytest.raises(InputError, match=r"imported.parquet: does not hold column `query_id`"):
        read(table, document=DOCUMENT)


def test_an_expired_snapshot_is_named(table: Iceberg) -> None:
    first = table.table().snapshots()[0].snapshot_id
    table.append(pairs(16, 20))
    table.table().maintenance.expire_snapshots().by_id(first).commit()
    with pytest.raises(InputError, match=f"no snapshot {first} in this table; it has"):
        opened(table.path, snapshot=first)
    with pytest.raises(InputError, match="what lies between was expired"):
        opened(table.path, since=first)


def edited(table: Iceberg, change: dict[str, Any]) -> str:
    """The newest metadata with other values, as another file of the table."""
    newest = metadata_files(table)[-1]
    path = newest.with_name("90000-edited.metadata.json")
    path.write_text(json.dumps({**json.loads(newest.read_text()), **change}))
    return str(path)


def test_metadata_that_names_files_outside_the_folder_is_refused(table: Iceberg, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(table.path, copy)
    with pytest.raises(InputError, match=r"copy: its metadata names /.*\.avro, which lies outside the table's folder"):
        opened(str(copy))
    snapshot = json.loads(metadata_files(table)[-1].read_text())["snapshots"][-1]
    place = f"file://{table.path}/metadata/../../../secret.avro"
    path = edited(table, {"snapshots": [{**snapshot, "manifest-list": place}]})
    with pytest.raises(InputError, match="lies outside the table's folder"):
        opened(path)


@pytest.mark.parametrize("text", ["", '{"format-version": 2}'])
def test_broken_metadata_is_one_error_that_names_the_table(table: Iceberg, text: str) -> None:
    path = Path(table.path, "metadata", "90000-x.metadata.json")
    path.write_text(text)
    with pytest.raises(InputError, match=f"{table.path}: not a readable iceberg table"):
        opened(table.path)


def test_without_pyiceberg_the_extra_is_named(table: Iceberg, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyiceberg", "pyiceberg.table", "pyiceberg.table.metadata"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"relabel-ir\[iceberg\]"):
        opened(table.path)


# A table that is named without `input.table` is refused by its folder: read as plain files, rows that it removed
# would be labelled.


@pytest.fixture(params=real_tables.FORMATS)
def any_table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a table, from the working directory."""
    monkeypatch.chdir(tmp_path)
    made = real_tables.make(request.param, tmp_path)
    made.append(pairs(0, 8))
    made.overwrite(pairs(8, 16))
    return str(Path(made.path).relative_to(tmp_path))


@pytest.fixture
def memory() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/lake", recursive=True)


@pytest.mark.parametrize("pattern", ["{}", "./{}", "{}/**/*.parquet", "{above}", "."])
def test_a_local_folder_of_a_table_is_refused_by_its_name(any_table: str, pattern: str) -> None:
    kind = "iceberg" if "db" in any_table else "delta"
    above = str(Path(any_table).parent)
    with pytest.raises(InputError) as raised:
        list_input(pattern.format(any_table, above=above), Storage())
    message = str(raised.value)
    assert message.partition(":")[0].removeprefix("./") == any_table
    assert f"`input: {{path: {message.partition(':')[0]}, table: {kind}}}`" in message


def test_a_table_that_is_left_out_or_not_touched_is_no_error(any_table: str, memory: Any) -> None:
    files = list(Path(any_table).rglob("*.parquet"))
    assert list_input(str(files[0]), Storage()).files == [str(files[0])]
    Path("in").mkdir()
    Path("in/_old").symlink_to(Path(any_table).absolute())
    Path("in/a.parquet").write_bytes(files[0].read_bytes())
    assert list_input("in", Storage()).files == ["in/a.parquet"]
    assert list_input("in/*.parquet", Storage()).files == ["in/a.parquet"]
    memory.put(any_table, "/lake/_old", recursive=True)
    memory.put("in/a.parquet", "/lake/a.parquet")
    assert list_input("memory://lake", Storage()).files == ["memory://lake/a.parquet"]


# The log of a Delta table says what its own library says, and what relabel can't read_delta is refused by name.


FEATURES = {"minReaderVersion": 3, "minWriterVersion": 7}


@pytest.fixture
def delta(tmp_path: Path) -> Delta:
    """A table of two appends of eight rows."""
    made = Delta(tmp_path)
    made.append(pairs(0, 8))
    made.append(pairs(8, 16))
    return made


def opened_delta(table: Delta, **read_delta: Any) -> TableSnapshot:
    return open_table(InputSpec(path=(table.path,), table="delta", **read_delta), Storage())


def read_delta(table: Delta, **columns: Any) -> Dataset:
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
        opened_delta(delta)
    with pytest.raises(InputError, match="has deleted rows"):
        opened_delta(delta, since=1)
    assert len(opened_delta(delta, snapshot=1).files) == 2
    other = {**add, "path": "rewritten.parquet"}
    shutil.copy(Path(delta.path, add["path"]), Path(delta.path, other["path"]))
    delta.commit({"commitInfo": {"operation": "REORG"}}, {"remove": {**gone, "deletionVector": vector}}, {"add": other})
    assert [Path(path).name for path in opened_delta(delta).paths].count("rewritten.parquet") == 1
    assert len(opened_delta(delta).files) == 2
    with pytest.raises(
        InputError, match=f"version 1 .input.since. were removed or rewritten up to version {marked + 1}, {add['path']}"
    ):
        opened_delta(delta, since=1)


def test_a_partition_column_is_not_in_the_files(tmp_path: Path) -> None:
    table = Delta(tmp_path)
    table.append(pairs(0, 4), partition_by=["title"])
    assert read_delta(table, document=["body"]).rows == 4  # names with %20 in them
    with pytest.raises(InputError, match=r"does not hold column `title` of the table.*partition column"):
        read_delta(table, document=DOCUMENT)


def renamed(table: Delta, names: dict[str, str], *, mode: str = "name") -> None:
    """A commit as Spark's RENAME COLUMN writes it."""
    metadata = next(action["metaData"] for action in table.actions(0) if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    for number, one in enumerate(schema["fields"], start=1):
        one["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": one["name"]}
        one["name"] = names.get(one["name"], one["name"])
    mapped = {"schemaString": json.dumps(schema), "configuration": {"delta.columnMapping.mode": mode}}
    table.commit({"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": {**metadata, **mapped}})


def test_a_renamed_column_of_delta_is_refused_and_never_taken_for_another(delta: Delta) -> None:
    renamed(delta, {"title": "body", "body": "title"})
    assert DeltaTable(delta.path).schema().fields[3].name == "body"
    with pytest.raises(
        InputError, match=r"column `title` of the table .* is called `body` there, since it was renamed"
    ):
        read_delta(delta, document=["title"])
    assert read_delta(delta, document=["doc_id"]).rows == 16


def test_a_column_that_was_added_to_delta_is_read_where_all_files_hold_it(delta: Delta) -> None:
    rows = pairs(16, 24)
    delta.append(rows.append_column("note", [rows.column("title")]), schema_mode="merge")
    assert read_delta(delta, document=DOCUMENT).rows == 24
    with pytest.raises(InputError, match=r"does not hold column `note` of the table.*added after the file was written"):
        read_delta(delta, document=["note"])
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
        opened_delta(delta)


@pytest.mark.parametrize(
    "text",
    ["{", '{"add": {"size": 3}}', '{"metaData": {"id": "x", "schemaString": "{"}}'],
)
def test_a_broken_log_is_one_error_that_names_the_table(delta: Delta, text: str) -> None:
    delta.commit_file(2).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as caught:
        open_dataset(InputSpec(path=(delta.path,), table="delta"), Storage())
    assert delta.path in str(caught.value)
