"""A run without --shard helps where no shard is free; one with --shard never touches what another holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.planning.job_files import load_job
from jobs.planning.opening import open_run
from jobs.running import sessions
from jobs.running.counts import Progress
from jobs.running.stops import Stop
from manifests.local_store import LocalStore
from manifests.store import Lock, shard_lock
from tests.jobs.conftest import Outcome


@pytest.fixture
def planned(folder: Path, write_pairs: Callable[..., Path], write_job: Callable[..., str], relabel: Callable[..., Outcome]) -> str:
    """A planned job of two shards with three chunks each."""
    write_pairs()
    job = write_job({"shards": 2})
    assert relabel("plan", job).code == 0
    return job


@pytest.fixture
def held(folder: Path, planned: str) -> Iterator[Lock]:
    """Shard 1 in the hands of another worker, who gets nothing done."""
    lock = shard_lock(LocalStore(folder / "out/ecom"), 1)
    lock.acquire()
    yield lock
    lock.release()


def receipts(folder: Path) -> dict[str, dict[str, object]]:
    root = folder / "out/ecom" / "receipts"
    return {path.relative_to(root).as_posix(): json.loads(path.read_bytes()) for path in sorted(root.rglob("*.json"))}


def test_without_shard_a_run_labels_the_chunks_of_a_busy_shard_and_finishes(
    folder: Path, planned: str, held: Lock, relabel: Callable[..., Outcome]
) -> None:
    done = relabel("run", planned, "--output", "json")
    assert done.code == 0, done
    assert done.json["busy_shards"] == []
    assert done.json["rows_open"] == 0
    assert len(receipts(folder)) == 6
    held.release()
    assert relabel("verify", planned).code == 0
    assert relabel("run", planned).code == 10


def test_a_helper_leaves_the_front_to_the_holder_and_asks_each_chunk_once(
    folder: Path, planned: str, held: Lock, relabel: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HELP_CHUNKS", 1)
    true = sessions.Session._begin
    begun: list[int] = []

    def begin(self: sessions.Session, chunk, pairs):  # type: ignore[no-untyped-def]
        begun.extend([chunk.chunk] if chunk.shard == 1 else [])
        return true(self, chunk, pairs)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    assert relabel("run", planned).code == 0
    assert sorted(begun) == [0, 1, 2]


def test_helpers_of_one_shard_seldom_ask_the_same_chunks(
    folder: Path, pairs: list[dict[str, Any]], write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    """Seven helpers who all chose the end of the shard would be one helper, at seven times the price."""
    write_pairs([{**pairs[0], "doc_id": f"d{number}"} for number in range(240)])
    job = load_job(write_job({"shards": 1, "run": {"chunk_rows": 1}}))
    opened = open_run(job)
    lock = shard_lock(opened.store, 0)
    lock.acquire()
    chosen: list[int] = []
    for number in range(7):
        session = sessions.Session(opened, [0], is_retry=False, stop=Stop(), progress=Progress(), helps=True)
        session.worker = f"node-1-gpu{number}"
        assert session.reach()
        assert session._reached is not None
        chosen += session._reached[1]
    lock.release()
    assert len(chosen) == 7 * sessions.HELP_CHUNKS
    assert len(set(chosen)) > 0.6 * len(chosen)
    assert min(chosen) >= opened.plan.num_chunks // 4


@pytest.mark.parametrize(("shard", "code"), [("0/1", 20), ("1/2", 75)])
def test_with_shard_what_another_holds_is_left_alone(
    folder: Path, planned: str, held: Lock, relabel: Callable[..., Outcome], shard: str, code: int
) -> None:
    done = relabel("run", planned, "--shard", shard, "--output", "json")
    assert done.code == code, done
    assert done.json["busy_shards"] == [1]
    assert not [name for name in receipts(folder) if name.startswith("shard-00001")]


def test_a_helper_that_finds_nothing_open_has_nothing_to_do(folder: Path, planned: str, relabel: Callable[..., Outcome]) -> None:
    assert relabel("run", planned).code == 0
    lock = shard_lock(LocalStore(folder / "out/ecom"), 1)
    lock.acquire()
    assert relabel("run", planned).code == 10
    lock.release()


def test_a_holder_does_not_ask_what_a_helper_has_committed(
    folder: Path, planned: str, relabel: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's receipts appear once this one has begun its shard: their chunks are passed over."""
    monkeypatch.setattr(sessions, "LOOK_EVERY_S", -1.0)
    assert relabel("run", planned, "--set", "output=out/other").code == 0
    theirs = folder / "out/other" / "receipts"
    mine = folder / "out/ecom" / "receipts"
    true = sessions.Session._begin

    def begin(self: sessions.Session, chunk, pairs):  # type: ignore[no-untyped-def]
        source, target = theirs / "shard-00000" / "chunk-000002.json", mine / "shard-00000" / "chunk-000002.json"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            for kind in ("labels", "quarantine"):
                for file in (folder / "out/other" / kind / "shard-00000").glob("chunk-000002-*"):
                    copy = folder / "out/ecom" / kind / "shard-00000" / file.name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(file.read_bytes())
            target.write_bytes(source.read_bytes())
        return true(self, chunk, pairs)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    done = relabel("run", planned, "--output", "json")
    assert done.code == 0, done
    assert done.json["this_run"]["chunks_committed"] == 5
    assert done.json["this_run"]["chunks_lost"] == 0
    assert "chunk 2: another worker committed it; not asked" in (folder / "out/ecom/logs/shard-00000.log").read_text()
    assert relabel("verify", planned).code == 0


def test_a_session_that_lost_its_lease_begins_no_further_chunk_of_that_shard(
    folder: Path, planned: str, relabel: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = sessions.Session._begin

    def begin(self: sessions.Session, chunk, pairs):  # type: ignore[no-untyped-def]
        if chunk[:2] == (0, 0):
            self._locks[0].is_lost = True  # type: ignore[misc]
        return true(self, chunk, pairs)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    done = relabel("run", planned, "--shard", "0/1", "--output", "json")
    assert done.code == 20, done
    assert done.json["busy_shards"] == [0]
    names = list(receipts(folder))
    assert [name for name in names if name.startswith("shard-00000")] == ["shard-00000/chunk-000000.json"]
    assert len([name for name in names if name.startswith("shard-00001")]) == 3
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert relabel("run", planned).code == 0
    assert relabel("verify", planned).code == 0
