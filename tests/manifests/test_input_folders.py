"""Every name in a folder of input is read, left out by a rule that is counted, or an error that names it: nothing is
passed over.
"""

import http.server
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry as loaded

from relabel.manifests.errors import ConfigError, InputError, MissingExtraError
from relabel.manifests.files import Storage, filesystem_of
from relabel.manifests.inputs import check_single, list_input, open_dataset
from relabel.manifests.rows import make_plan, read_chunks
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
    return list_input(pattern, Storage()).files


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
    for pattern in ("in", "in/**/*.parquet"):
        with pytest.raises(InputError, match=r"in/p/b\.parquet and in/q/b\.parquet are one file, so its rows would be"):
            open_dataset(InputSpec(path=(pattern,)), Storage())


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
    assert found.files == ["in/a.parquet"]
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
    assert found.files == ["memory://left/a.parquet"]
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


# Input by URL reads like input on disk: any filesystem that fsspec knows.


@pytest.fixture
def bucket() -> str:
    filesystem = fsspec.filesystem("memory")
    for number in range(2):
        rows = range(number * 5, number * 5 + 5)
        table = {
            "query_id": [f"q{row // 3}" for row in rows],
            "query": ["q"] * 5,
            "doc_id": [str(row) for row in rows],
            "body": [f"b{row}" for row in rows],
        }
        sink = io.BytesIO()
        pq.write_table(pa.table(table), sink, row_group_size=2)
        filesystem.pipe_file(f"/bucket/day/{number}.parquet", sink.getvalue())
    filesystem.pipe_file("/bucket/day/_SUCCESS", b"")
    return "memory://bucket/day"


@pytest.mark.parametrize("pattern", ["{}", "{}/*.parquet", "{}/"])
def test_a_folder_or_glob_by_url_gives_the_rows_in_name_order(bucket: str, pattern: str) -> None:
    opened = open_dataset(InputSpec(path=(pattern.format(bucket),)), Storage())
    plan, _ = make_plan(opened, {}, name="job", shards=2, chunk_rows=3)
    found = [
        pair
        for shard in plan.shards
        for chunk in read_chunks(opened, shard, None, range(len(shard.chunks)))
        for pair in chunk.pairs
    ]
    assert [(pair.row_id, pair.document) for pair in found] == [(row, f"b{row}") for row in range(10)]


def test_a_url_that_names_nothing_or_no_filesystem_is_reported(bucket: str) -> None:
    for path, message in (("memory://bucket/none.parquet", "no such file"), ("quux://bucket/x.parquet", "quux")):
        with pytest.raises((InputError, ConfigError), match=message):
            open_dataset(InputSpec(path=(path,)), Storage())


def test_a_url_whose_package_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(loaded, "s3", raising=False)  # a test before this one may have loaded it
    with pytest.raises(MissingExtraError, match=r"relabel-ir\[s3\]"):
        open_dataset(InputSpec(path=("s3://bucket/x.parquet",)), Storage())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:hidden-77@host/out",
        "https://hidden-77@host/pairs.parquet",
        "https://bucket.example/pairs.parquet?X-Amz-Expires=60&X-Amz-Signature=hidden-77",
        "https://account.example/box/pairs.parquet?sv=2024&sig=hidden-77",
        "s3://bucket/pairs.parquet?token=hidden-77",
    ],
)
def test_a_url_with_a_secret_in_it_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="holds a password, token or signature") as refused:
        open_dataset(InputSpec(path=(url,)), Storage())
    assert "hidden-77" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["memory://box@account/keys=1/pairs.parquet", "memory://box/day=2026-11-20/signature.parquet"]
)
def test_a_url_that_only_looks_like_it_is_taken(url: str) -> None:
    assert filesystem_of(url, Storage())[1].endswith(".parquet")


# Input that lies in a dataset of the Hugging Face Hub, through its own filesystem for fsspec, from a small server
# that speaks the Hub's API.


REPO, COMMIT = "somebody/pairs", "c" * 40


def parquet(start: int) -> bytes:
    ids = [str(number) for number in range(start, start + 3)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"query_id": ids, "query": ids, "doc_id": ids, "document": ids}), sink)
    return sink.getvalue()


FILES = {"data/train-0.parquet": parquet(0), "data/train-1.parquet": parquet(3)}


class Hub(http.server.BaseHTTPRequestHandler):
    """What listing and reading one dataset ask of the Hub."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if listed := re.fullmatch(f"/api/datasets/{REPO}/tree/main/?(.*)", path):
            self._say(json.dumps(list(entries_of(listed[1]))).encode())
        elif re.fullmatch(f"/api/datasets/{REPO}(/revision/main)?", path):
            self._say(json.dumps({"id": REPO, "sha": COMMIT}).encode())
        elif (asked := re.fullmatch(f"/datasets/{REPO}/resolve/main/(.*)", path)) and asked[1] in FILES:
            self._say_bytes(FILES[asked[1]])
        else:
            is_here = f"/{REPO}" in path
            self._say(b"{}", 404, {"X-Error-Code": "EntryNotFound" if is_here else "RepoNotFound"})

    def _say_bytes(self, data: bytes) -> None:
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(span[1]), min(int(span[2] or len(data)), len(data) - 1) + 1
            self._say(data[start:stop], 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})
        else:
            self._say(data)

    def _say(self, body: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"e"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def entries_of(folder: str) -> Iterator[dict[str, Any]]:
    """What lies in a folder of the dataset."""
    inside = {name.removeprefix(f"{folder}/" if folder else ""): data for name, data in FILES.items()}
    for name, data in inside.items():
        path = f"{folder}/{name}" if folder else name
        if path in FILES and "/" not in name:
            yield {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
    for name in {name.partition("/")[0] for name in inside if not folder and "/" in name}:
        yield {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}


@pytest.fixture
def hub() -> Iterator[Storage]:
    """Storage whose Hub is here."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Storage.of({"hf": {"endpoint": f"http://127.0.0.1:{server.server_port}", "skip_instance_cache": True}})
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "rows"),
    [("data/*.parquet", 6), ("@main/data/train-0.parquet", 3)],
)
def test_a_dataset_of_the_hub_reads_like_input_on_disk(hub: Storage, path: str, rows: int) -> None:
    url = f"hf://datasets/{REPO}{path if path.startswith('@') else f'/{path}'}"
    opened = open_dataset(InputSpec(path=(url,)), hub)
    plan, _ = make_plan(opened, {}, name="job", shards=1, chunk_rows=2)
    chunks = read_chunks(opened, plan.shards[0], None, range(len(plan.shards[0].chunks)))
    found = [pair.document for chunk in chunks for pair in chunk.pairs]
    assert found == [str(number) for number in range(rows)]


@pytest.mark.parametrize("path", [f"{REPO}/none.parquet", "nobody/nothing/data"])
def test_what_the_hub_does_not_have_is_named(hub: Storage, path: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"hf://datasets/{path}")):
        open_dataset(InputSpec(path=(f"hf://datasets/{path}",)), hub)


def test_one_object_by_two_urls_is_refused() -> None:
    with pytest.raises(InputError, match="are one file"):
        check_single(["s3a://bucket/a.parquet", "s3://bucket/a.parquet"], "input.path")
