"""While a listing shows the input as it was planned no footer is read again; whenever it does not, every footer is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests import inputs as dataset_module
from relabel.manifests.files import Storage
from relabel.manifests.input_files import list_files
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.labels import Reads
from relabel.manifests.plan import (
    KNOWN_NAME,
    Plan,
    known_dataset,
    known_file,
    load_known,
    load_plan,
    write_plan,
)
from relabel.manifests.records import digest_of
from relabel.manifests.shards import make_plan
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import LocalRunStore


def write(path: Path, word: str = "red", rows: int = 6) -> None:
    table = {
        "query_id": [f"q{row // 2}" for row in range(rows)],
        "query": ["shoes"] * rows,
        "doc_id": [str(row) for row in range(rows)],
        "title": [f"{word} shoes"] * rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, row_group_size=4)


class Planned:
    """An input of two files, planned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "in"
        for name in ("a", "b"):
            write(self.folder / f"{name}.parquet")
        self.spec = InputSpec(path=(str(self.folder),))
        self.store = LocalRunStore(folder / "out")
        self.first = open_dataset(self.spec, Storage())
        parts = {"inputs": digest_of([list(file.identity) for file in self.first.files])}
        plan, alongside = make_plan(self.first, parts, name="job", shards=1, chunk_rows=4)
        write_plan(self.store, plan, {**alongside, **known_file(self.first, plan, self.spec, Reads())})

    @property
    def plan(self) -> Plan:
        plan = load_plan(self.store)
        assert plan is not None
        return plan

    def shortcut(self, spec: InputSpec | None = None) -> Dataset | None:
        """The dataset that needs no look at a footer."""
        spec = spec or self.spec
        known = load_known(self.store, self.plan)
        listed = [file for pattern in spec.path for file in list_files(pattern, Storage())]
        return known and known_dataset(known, self.plan, spec, listed, Storage(), Reads())


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


def test_files_that_are_as_they_were_give_the_same_dataset_without_a_look(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(path: str, storage: Storage) -> Any:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(dataset_module, "_open_footer", opens)
    known = load_known(planned.store, planned.plan)
    assert known is not None
    found = open_dataset(
        planned.spec,
        Storage(),
        known=lambda listed: known_dataset(known, planned.plan, planned.spec, listed, Storage(), Reads()),
    )
    assert found == planned.first


def replaced(path: Path) -> None:
    write(path.with_name("new"), "tan")
    path.with_name("new").replace(path)


def overwritten(path: Path) -> None:
    write(path.with_name("new"), "tan")
    path.write_bytes(path.with_name("new").read_bytes())
    path.with_name("new").unlink()


@pytest.mark.parametrize("change", [replaced, overwritten])
def test_a_file_of_equal_size_and_date_is_looked_at_again(planned: Planned, change: Callable[[Path], None]) -> None:
    path = planned.folder / "b.parquet"
    before = path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert planned.shortcut() is None


def test_another_file_or_place_or_wish_is_looked_at_again(planned: Planned, tmp_path: Path) -> None:
    assert planned.shortcut() is not None
    assert planned.shortcut(planned.spec.model_copy(update={"columns": Columns(document=("query",))})) is None
    write(planned.folder / "c.parquet")
    assert planned.shortcut() is None
    (planned.folder / "c.parquet").unlink()
    assert planned.shortcut() is not None
    planned.folder.rename(tmp_path / "moved")
    moved = InputSpec(path=(str(tmp_path / "moved"),))
    assert planned.shortcut(moved) is None
    assert [file.identity for file in open_dataset(moved, Storage()).files] == [
        file.identity for file in planned.plan.files
    ]


def test_a_shortcut_that_is_damaged_is_never_believed(planned: Planned) -> None:
    path = planned.store.path(KNOWN_NAME)
    data = path.read_bytes()
    whole = load_known(planned.store, planned.plan)
    for place in range(0, len(data), 7):
        for bit in (0, 5):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            assert load_known(planned.store, planned.plan) in (None, whole)
    for cut in (0, 1, len(data) // 2):
        path.write_bytes(data[:cut])
        assert load_known(planned.store, planned.plan) is None


def test_a_shortcut_of_another_plan_is_never_believed(planned: Planned, tmp_path: Path) -> None:
    other = Planned(tmp_path / "other")
    write(other.folder / "b.parquet", "green")
    found = open_dataset(other.spec, Storage())
    parts = {"inputs": digest_of([list(file.identity) for file in found.files])}
    plan, _ = make_plan(found, parts, name="job", shards=1, chunk_rows=4)
    planned.store.put(KNOWN_NAME, known_file(found, plan, other.spec, Reads())[KNOWN_NAME])
    assert load_known(planned.store, planned.plan) is None


def test_a_file_that_is_written_between_its_listing_and_the_look_at_it_has_no_stamp(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = dataset_module.list_input

    def listing(pattern: str, storage: Storage) -> Any:
        listed = true(pattern, storage)
        write(planned.folder / "b.parquet", "tan")
        return listed

    monkeypatch.setattr(dataset_module, "list_input", listing)
    found = open_dataset(planned.spec, Storage())
    assert found.stamps == ()
    assert known_file(found, planned.plan, planned.spec, Reads()) == {}
