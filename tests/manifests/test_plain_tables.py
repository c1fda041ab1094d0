"""A table that is named without `input.table` is refused by its folder: read as plain files, rows that it removed
would be labelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.input_files import list_input
from tests import real_tables
from tests.real_tables import pairs


@pytest.fixture(params=real_tables.FORMATS)
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
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
def test_a_local_folder_of_a_table_is_refused_by_its_name(table: str, pattern: str) -> None:
    kind = "iceberg" if "db" in table else "delta"
    above = str(Path(table).parent)
    with pytest.raises(InputError) as raised:
        list_input(pattern.format(table, above=above), Storage())
    message = str(raised.value)
    assert message.partition(":")[0].removeprefix("./") == table
    assert f"`input: {{path: {message.partition(':')[0]}, table: {kind}}}`" in message


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet", "/../*"])
def test_by_url_the_same_is_refused(table: str, pattern: str, memory: Any) -> None:
    memory.put(table, "/lake/t", recursive=True)
    url = "memory://lake/*" if ".." in pattern else f"memory://lake/t{pattern}"
    with pytest.raises(InputError, match=r"^memory:///lake/t: .*table: (delta|iceberg)}"):
        list_input(url, Storage())


def test_a_table_that_is_left_out_or_not_touched_is_no_error(table: str, memory: Any) -> None:
    files = list(Path(table).rglob("*.parquet"))
    assert [file.path for file in list_input(str(files[0]), Storage()).files] == [str(files[0])]
    Path("in").mkdir()
    Path("in/_old").symlink_to(Path(table).absolute())
    Path("in/a.parquet").write_bytes(files[0].read_bytes())
    assert [file.path for file in list_input("in", Storage()).files] == ["in/a.parquet"]
    assert [file.path for file in list_input("in/*.parquet", Storage()).files] == ["in/a.parquet"]
    memory.put(table, "/lake/_old", recursive=True)
    memory.put("in/a.parquet", "/lake/a.parquet")
    assert [file.path for file in list_input("memory://lake", Storage()).files] == ["memory:///lake/a.parquet"]
