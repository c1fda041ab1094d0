"""What is written is durable, whole and single; names stay inside the folder; the disk's refusals are reported."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests import store as store_module
from relabel.manifests.errors import DiskFullError, LockHeldError, ManifestError, StoreError, StoreUnreachableError
from relabel.manifests.files import LEASE_S, RETRY_S, Storage, out_of_files, remove_abandoned
from relabel.manifests.objects import Found, Retries, S3Objects, TryAgainError
from relabel.manifests.secrets import forget_secrets, redacted, secret_in
from relabel.manifests.store import LocalRunStore, open_run_store, read_url, shard_lock
from tests.vault import Vault


def test_of_many_creators_exactly_one_wins_and_its_bytes_stay(tmp_path: Path) -> None:
    store = LocalRunStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("receipts/a.json", b"%d" % number), range(64)))
    assert sum(won) == 1
    assert store.read("receipts/a.json") == b"%d" % won.index(True)
    assert [path.name for path in (tmp_path / "receipts").iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", ""])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="leaves the folder"):
        LocalRunStore(tmp_path).read(name)


def test_put_replaces_in_one_step_and_leaves_nothing_else(tmp_path: Path) -> None:
    store = LocalRunStore(tmp_path)
    store.put("labels/m.json", b"one")
    store.put("labels/m.json", b"two")
    assert store.read("labels/m.json") == b"two"
    assert [path.name for path in (tmp_path / "labels").iterdir()] == ["m.json"]


def test_a_full_disk_is_reported_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = LocalRunStore(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    for write in (store.put, store.create):
        with pytest.raises(DiskFullError, match="no space left"):
            write("labels/a.parquet", b"x" * 100)
    assert [path.name for path in (tmp_path / "labels").iterdir()] == []


HOLDS = """
import sys
from pathlib import Path
from relabel.manifests.files import held_temp

with held_temp(Path(sys.argv[1]), sys.argv[2], is_folder=sys.argv[3] == "folder") as (temp, _):
    print(temp.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("maker", "kind"),
    [("lives", "file"), ("is dead", "folder"), ("of another boot, young", "file"), ("of another boot, old", "folder")],
)
def test_temporary_file_goes_once_its_maker_is_gone_whatever_process_has_its_number(
    tmp_path: Path, maker: str, kind: str
) -> None:
    store = LocalRunStore(tmp_path)
    store.put("labels/a.parquet", b"x")
    line = [sys.executable, "-c", HOLDS, str(tmp_path / "labels"), ".tmp-", kind]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        temp = tmp_path / "labels" / process.stdout.readline().strip()
        if maker != "lives":
            process.kill()
            process.wait()
        if maker.startswith("of another boot"):
            temp = temp.rename(temp.with_name(".tmp-elsewhere-abc"))
            os.utime(temp, (1, 1) if maker.endswith("old") else None)
        stays = maker in ("lives", "of another boot, young")
        assert store.names("labels") == ["labels/a.parquet"]
        assert store.sweep("labels") == (not stays)
        assert temp.exists() == stays
        process.stdin.close()
        process.wait()
    assert (tmp_path / "labels" / "a.parquet").exists()


def test_temporary_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not swept and how == fcntl.LOCK_EX:
            swept.extend(tmp_path.iterdir())
            assert remove_abandoned(*swept)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    LocalRunStore(tmp_path).put("plan.json", b"{}")
    assert len(swept) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_lock_is_held_once_and_freed_on_release(tmp_path: Path) -> None:
    store = LocalRunStore(tmp_path)
    first, second, other = shard_lock(store, 0), shard_lock(store, 0), shard_lock(store, 1)
    first.acquire()
    other.acquire()
    with pytest.raises(LockHeldError, match=f"shard 0 is being worked on by process {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    other.release()


def test_the_kernel_frees_the_lock_of_a_dead_process(tmp_path: Path) -> None:
    store = LocalRunStore(tmp_path)
    pid = os.fork()
    if pid == 0:
        shard_lock(store, 0).acquire()
        os._exit(0)
    os.waitpid(pid, 0)
    lock = shard_lock(store, 0)
    lock.acquire()
    lock.release()


def test_a_folder_that_is_a_link_is_listed_as_it_is_read(tmp_path: Path) -> None:
    """A shard whose receipts were moved to another disk was asked again, and paid for, at each call."""
    store = LocalRunStore(tmp_path / "out")
    store.put("receipts/shard-00000/chunk-000000.json", b"{}")
    shutil.move(tmp_path / "out/receipts/shard-00000", tmp_path / "elsewhere")
    (tmp_path / "out/receipts/shard-00000").symlink_to(tmp_path / "elsewhere")
    assert store.names("receipts/shard-00000") == list(store.etags("receipts"))


def test_a_link_that_leads_nowhere_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "unmounted")
    with pytest.raises(StoreError, match=r"out: a link to .*unmounted, which is not there\. Restore"):
        LocalRunStore(tmp_path / "out").put("plan.json", b"x")
    store = LocalRunStore(tmp_path / "other")
    store.put("receipts/shard-00000/chunk-000000.json", b"{}")
    (tmp_path / "other/receipts/shard-00000/chunk-000001.json").symlink_to("unmounted.json")
    with pytest.raises(StoreError, match=r"chunk-000001\.json: a link to unmounted\.json, which is not there"):
        store.etags("receipts")


def test_a_file_that_goes_while_its_folder_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused answers are removed when a run is finished, even if somebody reads them just then."""
    store = LocalRunStore(tmp_path)
    for name in ("refused/a.json", "refused/b.json"):
        store.put(name, b"{}")
    true = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.name == "a.json":
            path.unlink(missing_ok=True)
        return true(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert list(store.etags("refused")) == ["refused/b.json"]


def test_without_hard_links_exactly_one_creator_wins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on vfat, exfat and SMB."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    store = LocalRunStore(tmp_path)
    assert not store_module.has_links(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("receipts/a.json", b"%d" % number), range(64)))
    assert sum(won) == 1
    assert store.read("receipts/a.json") == b"%d" % won.index(True)
    assert [path.name for path in (tmp_path / "receipts").iterdir()] == ["a.json"]
    monkeypatch.undo()
    assert store_module.has_links(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["receipts"]


# Replies of an S3 server that can't be ones are asked for again, and end in StoreUnreachableError; never a
# traceback.


DATES = {"date": "Sun, 22 Nov 2026 02:40:16 GMT", "last-modified": "Sun, 22 Nov 2026 02:40:06 GMT"}


def replying(reply: dict[str, Any], data: bytes = b"") -> S3Objects:
    """Storage that answers everything so."""
    objects = S3Objects(None, "s3://bucket/out")
    objects._do = lambda key, function, *more: (reply, data) if function == objects._read else reply  # type: ignore[method-assign]
    objects._filesystem = type("Filesystem", (), {"_call_s3": None})()
    return objects


def test_whole_replies_are_read() -> None:
    ranged = {"ContentLength": 3, "ContentRange": "bytes 2-4/9", "ETag": "t"}
    assert replying(ranged, b"cde").get("bucket/a", start=2, end=5) == Found(b"cde", "t", 9)
    assert replying({"ContentLength": 3, "ETag": "t"}, b"abc").get("bucket/a", start=-100) == Found(b"abc", "t", 3)
    assert replying({"ResponseMetadata": {"HTTPHeaders": DATES}}).age_s("bucket/a") == 10
    assert replying({"ETag": "t"}).put("bucket/a", b"") == "t"


@pytest.mark.parametrize(
    ("verb", "options", "reply", "data"),
    [
        ("put", {"data": b""}, {}, b""),
        ("get", {}, {"ContentLength": 3}, b"abc"),
        ("get", {}, {"ContentLength": 9, "ETag": "t"}, b"abc"),
        ("get", {"start": 2, "end": 5}, {"ContentLength": 2, "ContentRange": "bytes 2-3/9", "ETag": "t"}, b"cd"),
        ("get", {"start": 2, "end": 5}, {"ContentLength": 9, "ETag": "t"}, b"abcdefghi"),
        ("get", {"start": 2, "end": 5}, {"ContentLength": 3, "ContentRange": "bytes 2-4/*", "ETag": "t"}, b"cde"),
        ("get", {"start": -4}, {"ContentLength": 3, "ContentRange": "bytes 6-8/9", "ETag": "t"}, b"ghi"),
        ("age_s", {}, {"ResponseMetadata": {"HTTPHeaders": {}}}, b""),
        ("age_s", {}, {"ResponseMetadata": {"HTTPHeaders": {**DATES, "date": "soon"}}}, b""),
        ("page", {"is_deep": True, "after": None}, {"Contents": [{"Key": "a"}]}, b""),
        ("page", {"is_deep": True, "after": None}, {"IsTruncated": True}, b""),
    ],
)
def test_a_reply_that_can_not_be_one_is_asked_for_again(
    verb: str, options: dict[str, Any], reply: dict[str, Any], data: bytes
) -> None:
    def ask() -> object:
        return getattr(replying(reply, data), verb)("bucket/a", **options)

    with pytest.raises(TryAgainError):
        ask()
    with pytest.raises(StoreUnreachableError, match="no good answer in"):
        Retries(limit_s=0.0).call(ask, "bucket/a: asking")


class RefusalError(Exception):
    """As botocore has it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("status", "code"), [(507, ""), (507, "InsufficientStorage"), (403, "QuotaExceeded"), (400, "XMinioStorageFull")]
)
def test_a_full_bucket_is_said_so(status: int, code: str) -> None:
    found = S3Objects(None, "s3://bucket/out")._meaning(RefusalError(status, code), "bucket/out/a")
    assert isinstance(found, DiskFullError)
    assert "no space left in the bucket" in str(found)


def test_too_many_open_files_are_said_so_however_deep_they_lie() -> None:
    try:
        try:
            raise OSError(24, "Too many open files")
        except OSError as exc:
            raise ConnectionError("no connection") from exc
    except ConnectionError as exc:
        wrapped = exc
    assert "ulimit -n" in str(out_of_files(wrapped))
    assert isinstance(S3Objects(None, "s3://bucket/out")._meaning(wrapped, "bucket/out/a"), StoreError)
    assert out_of_files(ConnectionError("no connection")) is None


# How storage is reached is a value that is handed in: nothing of it is the process's, and none of its secrets show.


@pytest.fixture(autouse=True)
def own_secrets() -> Iterator[None]:
    yield
    forget_secrets()


@pytest.fixture
def vault() -> Iterator[type[Vault]]:
    with Vault.installed() as found:
        yield found


def test_two_storages_of_one_process_reach_their_own_files_alone(vault: type[Vault]) -> None:
    one, other = (Storage.of({"vault": {"key": f"key-of-{name}"}}) for name in ("one", "other"))
    stores = [open_run_store("vault://data", storage, single_writer=True) for storage in (one, other)]
    for name, store in zip((b"one", b"other"), stores, strict=True):
        store.put("name", name)
    assert [read_url("vault://data/name", storage) for storage in (one, other, one)] == [b"one", b"other", b"one"]
    assert [store.read("name") for store in stores] == [b"one", b"other"]
    with pytest.raises(FileNotFoundError):
        read_url("vault://data/name", Storage())


def test_a_storage_shows_none_of_its_options_and_crosses_to_another_process_with_them() -> None:
    storage = Storage.of({"S3A": {"secret": "hidden-3c1", "client_kwargs": {"token": "hidden-4d2"}, "profile": "prod"}})
    assert redacted("hidden-3c1 hidden-4d2") == redacted("hidden-4d2 hidden-3c1")
    assert "hidden" not in redacted("hidden-3c1 hidden-4d2")
    assert secret_in("see hidden-3c1") == "the value of the storage option secret"
    assert redacted("production") == "production"
    for text in (repr(storage), str(storage), f"{[storage]}"):
        assert "hidden" not in text
        assert "profile" not in text
    again = pickle.loads(pickle.dumps(storage))
    assert again.options_of("s3") == storage.options_of("s3") != {}
    assert (again.retry_s, again.lease_s) == (RETRY_S, LEASE_S)
