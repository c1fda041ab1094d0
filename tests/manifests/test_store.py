"""What is written is durable, whole and single; names stay inside the folder; the disk's refusals are reported."""

import errno
import fcntl
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.asyn import get_loop

from relabel.manifests import objects as retries
from relabel.manifests.errors import DiskFullError, LockHeldError, ManifestError, StoreError, StoreUnreachableError
from relabel.manifests.files import LEASE_S, RETRY_S, Storage, out_of_files, remove_abandoned
from relabel.manifests.objects import Found, Lease, S3Objects, TryAgainError, retried
from relabel.manifests.secrets import redacted, secret_in
from relabel.manifests.store import PROBE_NAME, LocalStore, ObjectStore, open_run_store, read_whole
from tests.manifests.memory_objects import MemoryObjects, once
from tests.vault import Vault


def test_of_many_creators_exactly_one_wins_and_its_bytes_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("receipts/a.json", b"%d" % number), range(64)))
    assert sum(won) == 1
    assert store.read("receipts/a.json") == b"%d" % won.index(True)
    assert [path.name for path in (tmp_path / "receipts").iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", ""])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="leaves the folder"):
        LocalStore(tmp_path).read(name)


def test_put_replaces_in_one_step_and_leaves_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("labels/m.json", b"one")
    store.put("labels/m.json", b"two")
    assert store.read("labels/m.json") == b"two"
    assert [path.name for path in (tmp_path / "labels").iterdir()] == ["m.json"]


def test_a_full_disk_is_reported_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = LocalStore(tmp_path)
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
    store = LocalStore(tmp_path)
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
    LocalStore(tmp_path).put("plan.json", b"{}")
    assert len(swept) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_lock_is_held_once_and_freed_on_release(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second, other = (store.lock(f"shard-{shard}", f"shard {shard}") for shard in (0, 0, 1))
    first.acquire()
    other.acquire()
    with pytest.raises(LockHeldError, match=f"shard 0 is being worked on by process {os.getpid()}"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    other.release()


def test_a_folder_that_is_a_link_is_listed_as_it_is_read(tmp_path: Path) -> None:
    """A shard whose receipts were moved to another disk was asked again, and paid for, at each call."""
    store = LocalStore(tmp_path / "out")
    store.put("receipts/shard-00000/chunk-000000.json", b"{}")
    shutil.move(tmp_path / "out/receipts/shard-00000", tmp_path / "elsewhere")
    (tmp_path / "out/receipts/shard-00000").symlink_to(tmp_path / "elsewhere")
    assert store.names("receipts/shard-00000") == list(store.etags("receipts"))


def test_a_link_that_leads_nowhere_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "unmounted")
    with pytest.raises(StoreError, match=r"out: a link to .*unmounted, which is not there\. Restore"):
        LocalStore(tmp_path / "out").put("plan.json", b"x")
    store = LocalStore(tmp_path / "other")
    store.put("receipts/shard-00000/chunk-000000.json", b"{}")
    (tmp_path / "other/receipts/shard-00000/chunk-000001.json").symlink_to("unmounted.json")
    with pytest.raises(StoreError, match=r"chunk-000001\.json: a link to unmounted\.json, which is not there"):
        store.etags("receipts")


def test_without_hard_links_exactly_one_creator_wins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on vfat, exfat and SMB."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("receipts/a.json", b"%d" % number), range(64)))
    assert sum(won) == 1
    assert store.read("receipts/a.json") == b"%d" % won.index(True)
    assert [path.name for path in (tmp_path / "receipts").iterdir()] == ["a.json"]


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
        ("page", {"after": None}, {"Contents": [{"Key": "a"}]}, b""),
        ("page", {"after": None}, {"IsTruncated": True}, b""),
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
        retried(ask, "bucket/a: asking", 0.0)


def test_a_store_that_is_not_reached_is_named_by_its_address_and_said_while_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relabel.manifests.objects.SILENT_S", 0.0)
    settings = {
        "endpoint_url": "http://127.0.0.1:9",
        "key": "an-id",
        "secret": "a-secret",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    storage = Storage.of({"s3": settings}, retry_s=2.0)
    with pytest.raises(StoreUnreachableError, match=r"the last: EndpointConnectionError at 127\.0\.0\.1:9\)"):
        read_whole("s3://bucket/plan.json", storage)
    (message,) = {record.getMessage() for record in caplog.records if "no good answer" in record.getMessage()}
    assert message.endswith("(EndpointConnectionError at 127.0.0.1:9); each call is tried again for up to 2 s")


class RefusalError(Exception):
    """As botocore has it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("status", "code"), [(507, ""), (507, "InsufficientStorage"), (403, "QuotaExceeded"), (400, "XMinioStorageFull")]
)
def test_a_full_bucket_is_said_so(status: int, code: str) -> None:
    found = S3Objects(None, "s3://bucket/out")._translated(RefusalError(status, code), "bucket/out/a")
    assert isinstance(found, DiskFullError)
    assert "no space left in the bucket" in str(found)


def test_an_error_that_is_none_of_storage_comes_through_as_it_is_and_can_be_looked_into() -> None:
    """It once became its own cause, and a loop over its causes had no end."""

    async def fail(*_: Any) -> Any:
        raise RuntimeError("Session is closed")

    objects = S3Objects(None, "s3://bucket/out")
    objects._filesystem = SimpleNamespace(loop=get_loop(), _call_s3=fail)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="Session is closed") as caught:
        objects.get("bucket/out/a")
    assert caught.value.__cause__ is not caught.value
    caught.value.__cause__ = caught.value
    assert out_of_files(caught.value) is None


# How storage is reached is a value that is handed in: nothing of it is the process's, and none of its secrets show.


@pytest.fixture
def vault() -> Iterator[type[Vault]]:
    with Vault.installed() as found:
        yield found


def test_two_storages_of_one_process_reach_their_own_files_alone(vault: type[Vault]) -> None:
    one, other = (Storage.of({"vault": {"key": f"key-of-{name}"}}) for name in ("one", "other"))
    stores = [open_run_store("vault://data", storage, single_writer=True) for storage in (one, other)]
    for name, store in zip((b"one", b"other"), stores, strict=True):
        store.put("name", name)
    assert [read_whole("vault://data/name", storage) for storage in (one, other, one)] == [b"one", b"other", b"one"]
    assert [store.read("name") for store in stores] == [b"one", b"other"]
    with pytest.raises(FileNotFoundError):
        read_whole("vault://data/name", Storage())


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


# A lease has one holder, dies by the storage's clock alone, and its epoch only rises.


KEY = "bucket/out/leases/shard-00000.json"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)


RETRIES = 120.0


def lease_on(objects: MemoryObjects, *, ttl_s: float = 60.0) -> Lease:
    return Lease(objects, KEY, "shard 0", ttl_s, RETRIES)


def test_of_many_takers_one_gets_a_free_lease_and_one_a_dead_one() -> None:
    objects = MemoryObjects()

    def took(lease: Lease) -> bool:
        try:
            lease.acquire()
        except LockHeldError:
            return False
        return True

    for epoch in (1, 2, 3):
        with ThreadPoolExecutor(8) as pool:
            takers = [lease_on(objects) for _ in range(16)]
            won = list(pool.map(took, takers))
        assert sum(won) == 1
        assert takers[won.index(True)].epoch == epoch
        objects.now_s += 61.0


def test_a_live_lease_is_refused_and_a_dead_one_taken_over_by_the_clock_of_the_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = MemoryObjects()
    lease_on(objects).acquire()
    for hours in (-1, 1):  # what the workers' own clocks say plays no part
        monkeypatch.setattr(time, "time", lambda hours=hours: 1.8e9 + hours * 3600.0)
        objects.now_s = 60.0
        with pytest.raises(LockHeldError, match="shard 0 is being worked on by"):
            lease_on(objects).acquire()
    objects.now_s = 60.1
    second = lease_on(objects)
    second.acquire()
    assert second.epoch == 2


def test_a_holder_that_slept_learns_at_its_renewal_that_it_lost_the_lease_and_changes_nothing() -> None:
    objects = MemoryObjects()
    sleeper, second = lease_on(objects), lease_on(objects)
    sleeper.acquire()
    objects.now_s = 61.0
    second.acquire()
    held = objects.held[KEY]
    sleeper.renew()
    assert sleeper.is_lost
    sleeper.release()
    assert objects.held[KEY] == held
    second.renew()
    assert not second.is_lost


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("act", ["acquire", "take_over", "renew", "release"])
def test_a_lost_reply_makes_no_holder_doubt_itself(act: str, when: str) -> None:
    objects = MemoryObjects()
    lease = lease_on(objects)
    if act == "take_over":
        lease_on(objects).acquire()
        objects.now_s = 61.0
    if act in ("renew", "release"):
        lease.acquire()
    objects.faults = once("put", when)
    getattr(lease, "acquire" if act == "take_over" else act)()
    assert not lease.is_lost
    assert lease.epoch == (2 if act == "take_over" else 1)
    record = json.loads(objects.held[KEY][0])
    assert record["is_released"] == (act == "release")
    if act != "release":
        lease.renew()
        assert not lease.is_lost


def test_who_waits_gets_the_lease_when_it_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAIT_S", (0.001, 0.002))
    objects = MemoryObjects()
    first, second = lease_on(objects), lease_on(objects)
    first.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.acquire, waits=True)
        time.sleep(0.02)
        assert not waiting.done()
        first.release()
        waiting.result(5)
    assert second.epoch == 2


def test_a_holder_that_can_not_renew_for_its_whole_time_counts_itself_out(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = MemoryObjects()
    lease = lease_on(objects, ttl_s=0.03)
    lease.acquire()

    def down(verb: str, key: str, when: str) -> None:
        raise retries.TryAgainError("503 SlowDown")

    objects.faults = down
    deadline = time.monotonic() + 5.0
    while not lease.is_lost and time.monotonic() < deadline:
        lease.renew()
    assert lease.is_lost


def test_a_slow_store_and_one_that_hangs_for_a_lease_cost_no_other_lease_its_renewal() -> None:
    """Two dozen shards, a reply takes half of the time between two renewals: one after the other, a round would take
    four lives.
    """
    ttl_s, slow_s = 1.8, 0.3
    puts: dict[str, list[float]] = {}
    let_go = threading.Event()

    def slow(verb: str, key: str, when: str) -> None:
        if verb == "put" and when == "before":
            puts.setdefault(key, []).append(time.monotonic())
            if key == "hangs" and len(puts[key]) > 1:
                let_go.wait(20.0)
            elif len(puts[key]) > 1:
                time.sleep(slow_s)

    objects = MemoryObjects(slow)
    held = [Lease(objects, key, key, ttl_s, RETRIES) for key in [*map(str, range(24)), "hangs"]]
    for lease in held:
        lease.acquire()
    time.sleep(2.5 * ttl_s)
    let_go.set()
    for lease in held:
        lease.release()
    kept = {key: times for key, times in puts.items() if key != "hangs"}
    assert len(kept) == 24
    for times in kept.values():
        assert len(times) >= 4
        assert max(later - sooner for sooner, later in itertools.pairwise(times[:-1])) < ttl_s
    assert not any(lease.is_lost for lease in held)


class Hanging:
    """Faults of a store that answers no renewal of one key until it is let go."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.puts = 0
        self.hangs = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, verb: str, key: str, when: str) -> None:
        if (verb, key, when) == ("put", self.key, "before"):
            self.puts += 1
            if self.puts > 1:
                self.hangs.set()
                self.let_go.wait(60.0)


def test_a_renewal_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    script = """
import sys
from relabel.manifests.objects import Lease
from tests.manifests.memory_objects import MemoryObjects
from tests.manifests.test_store import RETRIES, Hanging
faults = Hanging("x")
Lease(MemoryObjects(faults), "x", "x", 0.3, RETRIES).acquire()
assert faults.hangs.wait(20.0)
sys.exit(7)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


# An object store commits once, knows its own success from another's, and refuses storage that would commit twice.


def store_on(objects: MemoryObjects, *, single_writer: bool = False) -> ObjectStore:
    return ObjectStore(objects, "bucket/out", Storage(), root="s3://bucket/out", single_writer=single_writer)


def test_of_many_creators_of_an_object_exactly_one_wins() -> None:
    store = store_on(MemoryObjects())
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("receipts/a.json", b"%d" % number), range(64)))
    assert sum(won) == 1
    assert store.read("receipts/a.json") == b"%d" % won.index(True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_create_whose_reply_was_lost_is_known_as_our_own(when: str) -> None:
    objects = MemoryObjects(once("put", when, key="a.json"))
    store = store_on(objects)
    assert store.create("receipts/a.json", b"mine")
    assert store.read("receipts/a.json") == b"mine"
    assert not store.create("receipts/a.json", b"another's")


def test_a_create_whose_reply_was_lost_after_another_won_is_no_success() -> None:
    objects = MemoryObjects()
    store_on(objects).create("receipts/a.json", b"another's")
    objects.faults = once("put", "before", key="a.json")
    assert not store_on(objects).create("receipts/a.json", b"mine")
    assert store_on(objects).read("receipts/a.json") == b"another's"


@pytest.mark.parametrize("write", ["put", "create"])
def test_storage_that_ignores_conditions_is_refused_before_anything_is_written(write: str) -> None:
    objects = MemoryObjects()
    objects.heeds_conditions = False
    store = store_on(objects)
    with pytest.raises(StoreError, match=r"ignores it.*run.single_writer: true"):
        getattr(store, write)("labels/a", b"x")
    assert set(objects.held) <= {f"bucket/out/{PROBE_NAME}"}


def test_storage_without_conditional_puts_is_refused_but_for_a_single_writer() -> None:
    objects = MemoryObjects()
    objects.has_atomic_conditions = objects.heeds_conditions = False
    with pytest.raises(StoreError, match="no conditional write"):
        store_on(objects).create("a", b"x")
    vouched = store_on(objects, single_writer=True)
    assert vouched.create("a", b"x")
    assert not vouched.create("a", b"y")
    assert vouched.read("a") == b"x"


def test_an_answer_that_never_comes_is_given_up_at_the_stated_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    slept: list[float] = []
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(retries.time, "monotonic", lambda: clock[0])

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        clock[0] += pause_s

    monkeypatch.setattr(retries.time, "sleep", sleep)

    def slow() -> None:
        clock[0] += 10.0
        raise TryAgainError("ReadTimeoutError")

    with pytest.raises(StoreUnreachableError):
        retried(slow, "x", 60.0, tries=100)
    assert sum(slept) < 60.0
    assert clock[0] < 75.0
    assert all(pause <= min(retries.LONGEST_PAUSE_S, 0.2 * 2**number) for number, pause in enumerate(slept))


def test_listings_go_over_pages_and_a_mark_changes_with_the_bytes() -> None:
    store = store_on(MemoryObjects())
    for number in range(35):
        store.put(f"receipts/shard-{number % 3:05d}/chunk-{number:06d}.json", b"x")
    names = store.names("receipts/shard-00001")
    assert names == sorted(names)
    assert len(names) == 12
    before = store.etags("receipts")
    assert len(before) == 35
    store.put("receipts/shard-00001/chunk-000001.json", b"y")
    after = store.etags("receipts")
    assert [name for name in before if before[name] != after[name]] == ["receipts/shard-00001/chunk-000001.json"]
