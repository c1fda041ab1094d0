"""Every name in a folder of input is read, left out by a rule that is counted, or an error that names it: nothing is
passed over.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.input_files import list_input
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `in` with one data file, and a folder `elsewhere` with another."""
    monkeypatch.chdir(tmp_path)
    write("in/a.parquet")
    write("elsewhere/deep/b.parquet")
    return tmp_path


def write(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"query_id": ["q"], "query": ["x"], "doc_id": ["d"], "title": [path]}), path)


def listed(pattern: str = "in") -> list[str]:
    return [file.path for file in list_input(pattern, Storage()).files]


def test_linked_folders_and_files_are_read_under_the_names_of_their_links(folder: Path) -> None:
    Path("in/more").symlink_to("../elsewhere")
    Path("in/c.parquet").symlink_to(folder / "elsewhere/deep/b.parquet")
    with pytest.raises(InputError, match=r"in/c\.parquet and in/more/deep/b\.parquet are one file"):
        open_dataset(InputSpec(path=("in",)), Storage())
    Path("in/c.parquet").unlink()
    assert listed() == ["in/a.parquet", "in/more/deep/b.parquet"]
    Path("whole").symlink_to("in")
    assert listed("whole") == ["whole/a.parquet", "whole/more/deep/b.parquet"]
    assert listed("in/**/*.parquet") == ["in/a.parquet", "in/more/deep/b.parquet"]


@pytest.mark.parametrize("pattern", ["in", "in/**/*.parquet"])
@pytest.mark.parametrize("place", ["in/sub/loop", "elsewhere/back"])
def test_links_in_a_circle_are_refused_by_name(folder: Path, pattern: str, place: str) -> None:
    Path("in/sub").mkdir()
    Path("in/other").symlink_to("../elsewhere")
    Path(place).symlink_to(folder / "in" / "sub" if "loop" in place else folder / "in")
    with pytest.raises(InputError, match=f"{place.replace('elsewhere', 'in/other')}.*link back to"):
        listed(pattern)


def test_a_folder_that_is_reached_in_two_ways_is_refused_with_both_if_it_holds_data(folder: Path) -> None:
    Path("elsewhere/empty").mkdir()
    for name in "xy":
        Path(f"in/{name}").symlink_to("../elsewhere/empty")
    assert listed() == ["in/a.parquet"]
    for name in "pq":
        Path(f"in/{name}").symlink_to("../elsewhere/deep")
    with pytest.raises(InputError, match=r"in/[pq] and in/[pq] are one folder, so its rows would be labelled twice"):
        listed()
    with pytest.raises(InputError, match="are one folder"):
        listed("in/**/*.parquet")


def test_a_dangling_link_that_may_have_led_to_a_folder_is_refused(folder: Path) -> None:
    Path("in/2026-11-20").symlink_to("/mnt/gone/2026-11-20")
    with pytest.raises(InputError, match="in/2026-11-20: a link to /mnt/gone/2026-11-20, which is not there"):
        listed()


def test_what_rules_leave_out_is_counted_and_not_looked_into(folder: Path) -> None:
    for name in ("_SUCCESS", "_metadata", ".a.parquet.crc", "README", "sub/x.csv", "sub/y.csv", "sub/z.PARQUET"):
        Path("in", name).parent.mkdir(exist_ok=True)
        Path("in", name).write_text("")
    write("in/_temporary/0/t.parquet")
    write("in/.cache/t.parquet")
    Path("in/_gone").symlink_to("nowhere")
    Path("in/.loop").symlink_to(".loop")
    found = list_input("in", Storage())
    assert [file.path for file in found.files] == ["in/a.parquet"]
    assert found.left_out == {"_*": 3, ".*": 2, "_*/": 1, ".*/": 1, "no suffix": 1, "*.csv": 2, "*.PARQUET": 1}
    assert open_dataset(InputSpec(path=("in",)), Storage()).left_out[0] == ("_*", 3)


def test_by_url_the_same_is_left_out_and_counted(folder: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("a.parquet", "_SUCCESS", ".b.crc", "sub/x.csv", "_temporary/0/t.parquet", "_temporary/1/t.parquet"):
        store.pipe_file(f"/left/{name}", b"")
    try:
        found = list_input("memory://left", Storage())
    finally:
        store.rm("/left", recursive=True)
    assert [file.path for file in found.files] == ["memory:///left/a.parquet"]
    assert found.left_out == {"_*": 1, ".*": 1, "*.csv": 1, "_*/": 1}


@pytest.mark.parametrize("pattern", ["in", "in/*.parquet"])
def test_a_name_that_is_no_utf8_is_refused(folder: Path, pattern: str) -> None:
    Path("in/a.parquet").rename(os.fsdecode(b"in/a\xff.parquet"))
    with pytest.raises(InputError, match=r"in/a\\xff\.parquet: its name is not UTF-8.*Rename it"):
        listed(pattern)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/*", ["in/a.parquet", "in/[1].parquet", "in/s/b.parquet"]),
        ("./in/[ab].parquet", ["./in/a.parquet"]),
        ("in/?.parquet", ["in/a.parquet"]),
        ("in/**", ["in/[1].parquet", "in/a.parquet", "in/s/b.parquet"]),
        ("**/*.parquet", ["elsewhere/deep/b.parquet", "in/[1].parquet", "in/a.parquet", "in/s/b.parquet"]),
        ("in/[1].parquet", ["in/[1].parquet"]),
        ("in/.*", ["in/.h.parquet"]),
        ("in/../in/a*", ["in/../in/a.parquet"]),
        ("nothing/*.parquet", []),
    ],
)
def test_globs_read_as_they_did(folder: Path, pattern: str, expected: list[str]) -> None:
    for name in ("in/s/b.parquet", "in/[1].parquet", "in/.h.parquet"):
        write(name)
    assert sorted(listed(pattern)) == sorted(expected)
    assert listed(str(folder / "in/*.parquet")) == [str(folder / "in" / name) for name in ("[1].parquet", "a.parquet")]
