"""An object store commits once, knows its own success from another's, and refuses storage that would commit twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from relabel.manifests import objects as retries
from relabel.manifests import store as object_store
from relabel.manifests.errors import StoreError, StoreUnreachableError
from relabel.manifests.files import Storage
from relabel.manifests.objects import Retries, TryAgainError
from relabel.manifests.store import PROBE_NAME, ObjectRunStore
from tests.manifests.memory_objects import MemoryObjects, once


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)


def store_on(objects: MemoryObjects, *, single_writer: bool = False) -> ObjectRunStore:
    return ObjectRunStore(objects, "bucket/out", Storage(), root="s3://bucket/out", single_writer=single_writer)


def test_of_many_creators_exactly_one_wins_and_its_bytes_stay() -> None:
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
        Retries(limit_s=60.0, tries=100).call(slow, "x")
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


def test_a_log_that_ended_or_grew_is_kept_no_longer_and_loses_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "LOG_PART_CHARS", 50)
    store = store_on(MemoryObjects())
    lines = [f"line {number}, of some length\n" for number in range(7)]
    for line in lines:
        store.log("logs/shard-00000.log", line)
    store.log("logs/shard-00001.log", "done\n", is_end=True)
    assert not store._logs.keys() - {"logs/shard-00000.log"}
    store.log("logs/shard-00001.log", "one more, by a helper\n", is_end=True)
    store.close()
    names = store.names("logs")
    assert "".join(
        sorted("".join(store.read(name).decode() for name in names if "00000" in name).splitlines(True))
    ) == "".join(lines)
    assert sorted(store.read(name) for name in names if "00001" in name) == [b"done\n", b"one more, by a helper\n"]
    assert max(len(store.read(name)) for name in names) < 100
