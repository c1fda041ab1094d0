"""What publishing asks of a place to publish to, tested with a folder and with S3."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relabel.manifests.errors import InputError, ManifestError, StoreError
from relabel.manifests.files import Storage
from relabel.manifests.store import S3_BLOCK_BYTES as BLOCK_BYTES
from relabel.manifests.store import Held, Store, open_bundle_store
from tests import seaweed


def quiet(_count: int) -> None:
    return


def held(data: bytes) -> Held:
    return Held(len(data), hashlib.sha256(data).hexdigest())


def test_a_record_is_created_once_and_replaced_only_as_it_was_read(bundle_store: Store) -> None:
    assert bundle_store.create("a/b.json", b"one")
    assert not bundle_store.create("a/b.json", b"two")
    read = bundle_store.read_tagged("a/b.json")
    assert read.data == b"one"
    assert bundle_store.replace("a/b.json", b"two", read.tag)
    assert not bundle_store.replace("a/b.json", b"three", read.tag)
    assert bundle_store.read_tagged("a/b.json").data == b"two"
    assert not bundle_store.replace("a/absent.json", b"one", read.tag)
    bundle_store.remove("a/b.json")
    bundle_store.remove("a/b.json")
    with pytest.raises(FileNotFoundError):
        bundle_store.read_tagged("a/b.json")
    assert bundle_store.size("a/b.json") is None


def test_of_sixteen_that_replace_at_once_one_wins(bundle_store: Store) -> None:
    bundle_store.create("pointer", b"0")
    tag = bundle_store.read_tagged("pointer").tag
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda number: bundle_store.replace("pointer", f"by {number}".encode(), tag), range(16)))
    assert won.count(True) == 1
    assert bundle_store.read_tagged("pointer").data == f"by {won.index(True)}".encode()


@pytest.mark.parametrize("size", [0, BLOCK_BYTES + 1])
def test_a_file_comes_out_as_it_went_in_from_any_offset(bundle_store: Store, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []
    bundle_store.put_file("objects/x", tmp_path / "file", held(data), seen.append)
    assert sum(seen) == size
    assert bundle_store.size("objects/x") == size
    assert bundle_store.digest("objects/x", quiet) == held(data)
    for start in {0, size // 2, size}:
        assert b"".join(bundle_store.blocks("objects/x", start)) == data[start:]


def test_a_file_that_is_not_what_was_promised_is_not_taken(bundle_store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(InputError, match="changed while"):
        bundle_store.put_file("objects/x", tmp_path / "file", held(b"these"), quiet)
    assert bundle_store.size("objects/x") is None


def test_listings_show_files_with_sizes_and_the_stores_own_times(bundle_store: Store) -> None:
    assert list(bundle_store.entries("")) == []
    for name in ("a/one", "a/b/two", "c/three"):
        bundle_store.create(name, name.encode())
    assert sorted(entry.name for entry in bundle_store.entries("")) == ["a/b/two", "a/one", "c/three"]
    assert sorted((entry.name, entry.size_bytes) for entry in bundle_store.entries("a")) == [
        ("a/b/two", 7),
        ("a/one", 5),
    ]
    assert all(abs(bundle_store.now_s() - entry.written_s) < 60 for entry in bundle_store.entries(""))


@pytest.mark.parametrize("name", ["/abs", "a/../../up", ""])
def test_a_name_that_leaves_the_store_is_refused(local_bundle_store: Store, name: str) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: local_bundle_store.read_tagged(name),
        lambda: local_bundle_store.create(name, b""),
        lambda: local_bundle_store.remove(name),
        lambda: list(local_bundle_store.blocks(name, 0)),
    )
    for call in calls:
        with pytest.raises(ManifestError, match="leaves the folder"):
            call()


@pytest.mark.s3
def test_a_bucket_that_is_not_there_and_a_wrong_secret_are_reported(
    s3_server: seaweed.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seaweed.lead_to(s3_server.environment, monkeypatch)
    with pytest.raises(StoreError, match="no bucket"):
        list(open_bundle_store("s3://not-there-at-all/x", Storage()).entries("a"))
    seaweed.lead_to(seaweed.environment(s3_server.url, secret="wrong"), monkeypatch)
    with pytest.raises(StoreError, match="secret key") as caught:
        open_bundle_store(f"s3://{seaweed.BUCKET}/x", Storage()).create("a", b"x")
    assert "wrong" not in str(caught.value)
