"""A run without --shard helps where no shard is free; one with --shard never touches what another holds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relabel.jobs.job import OpenRun, load_job, open_run
from relabel.jobs.run import session as sessions
from relabel.jobs.run import shards
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.shards import Helping
from relabel.jobs.run.stop import Stop
from relabel.manifests.files import HERE
from relabel.manifests.store import LocalRunStore, Lock, shard_lock
from tests.jobs.conftest import Outcome


@pytest.fixture
def planned(
    folder: Path, write_pairs: Callable[..., Path], write_job: Callable[..., str], relabel: Callable[..., Outcome]
) -> str:
    """A planned job of two shards with three chunks each."""
    write_pairs()
    job = write_job({"shards": 2})
    assert relabel("plan", job).code == 0
    return job


@pytest.fixture
def held(folder: Path, planned: str) -> Iterator[Lock]:
    """Shard 1 in the hands of another worker, who gets nothing done."""
    lock = shard_lock(LocalRunStore(folder / "out/ecom"), 1)
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
    true = sessions.Session._begin
    begun: list[int] = []

    def begin(self: sessions.Session, chunk, pairs, settled):  # type: ignore[no-untyped-def]
        begun.extend([chunk.chunk] if chunk.shard == 1 else [])
        return true(self, chunk, pairs, settled)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    assert relabel("run", planned).code == 0
    assert sorted(begun) == [0, 1, 2]


@pytest.fixture
def one_shard(
    folder: Path, pairs: list[dict[str, Any]], write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> OpenRun:
    """A plan of 240 chunks in one shard."""
    write_pairs([{**pairs[0], "doc_id": f"d{number}"} for number in range(240)])
    return open_run(load_job(write_job({"shards": 1, "run": {"chunk_rows": 1}})))


def helper(opened: OpenRun, number: int, rows_in_hand: int = 16) -> Helping:
    found = Helping(opened, f"node-1-gpu{number}")
    found.rows_in_hand = rows_in_hand
    return found


def test_seven_helpers_of_one_shard_never_choose_the_same_chunk_and_leave_the_holders_hand(one_shard: OpenRun) -> None:
    """Seven helpers who all chose the end of the shard would be one helper, at seven times the price."""
    lock = shard_lock(one_shard.store, 0)
    lock.acquire()
    helpers = [helper(one_shard, number) for number in range(7)]
    chosen = [chunk for _ in range(3) for one in helpers for chunk in one.choose(0, list(range(240)))]
    assert len(chosen) == len(set(chosen)) == 21
    assert min(chosen) == 240 - 21
    assert helpers[0].claimed(0) == set(chosen) - {chunk for _, chunk in helpers[0]._mine}
    newcomer = helper(one_shard, 7)
    assert newcomer.choose(0, list(range(17))) == [], "all of these an engine takes at once"
    lock.release()
    assert newcomer.choose(0, list(range(17))) == [16], "the holder is gone"


def test_a_chunk_is_taken_only_where_its_holders_pace_says_that_waiting_is_longer_than_asking(
    one_shard: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(shards, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    lock = shard_lock(one_shard.store, 0)
    lock.acquire()
    one = helper(one_shard, 0, rows_in_hand=239)
    one.asked(10.0)
    assert one.choose(0, list(range(240))) == [], "no pace yet, and the holder may have all of them in hand"
    clock[0] += 5
    assert one.choose(0, list(range(230, 235))) == [], "235 commits in 5 s: five more are there in an instant"
    clock[0] += 295  # a commit in 1.27 s, over all
    assert one.choose(0, list(range(230, 234))) == [], "four commits away, and asking takes ten seconds"
    clock[0] += 19
    assert one.choose(0, list(range(230, 234))) == []
    clock[0] += 2
    assert one.choose(0, list(range(230, 234))) == [233], "nothing came for longer than asking twice: the holder hangs"
    lock.release()


@pytest.mark.parametrize(("every_s", "helps_at_s"), [(10.0, None), (40.0, 60.5)], ids=["faster", "slower"])
def test_the_time_since_the_last_commit_is_part_of_a_gap_and_not_the_pace(
    one_shard: OpenRun, monkeypatch: pytest.MonkeyPatch, every_s: float, helps_at_s: float | None
) -> None:
    """Of two open chunks one comes every so often. Just before the second commit the time over one commit is twice the
    pace: the chunk that is about to come would be asked in vain. A holder that is truly slower is helped.
    """
    clock = [1000.0]
    monkeypatch.setattr(shards, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    lock = shard_lock(one_shard.store, 0)
    lock.acquire()
    one = helper(one_shard, 0)
    one.asked(15.0 if helps_at_s is None else 30.0)
    helped_s = None
    for half_s in range(int(4 * every_s)):
        clock[0] = 1000.0 + half_s / 2
        if one.choose(0, [0, 1] if half_s / 2 < every_s else [1]):
            helped_s = half_s / 2
            break
    assert helped_s == helps_at_s
    lock.release()


def test_a_claim_whose_worker_is_dead_holds_nobody_up_for_ever(
    one_shard: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(shards, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    dead, other, third = (helper(one_shard, number) for number in range(3))
    for one in (other, third):
        one.asked(2.0)
    assert dead.choose(0, [0]) == [0]
    assert other.choose(0, [0]) == [], "somebody is at it"
    clock[0] += 7
    assert other.choose(0, [0]) == [0], "for longer than three chunks take"
    assert third.choose(0, [0]) == []
    holder = helper(one_shard, 3)
    holder.ignore(0)
    assert holder.claimed(0) == set(), "claims from before its lock are of workers that are gone"


def test_a_claim_of_a_process_that_is_gone_counts_no_more(one_shard: OpenRun) -> None:
    """Else a worker that is started again would wait for what it claimed itself in the life before."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for chunk, process in enumerate((os.getpid(), gone.pid)):
        assert Helping(one_shard, f"{HERE}-{process}-w0").choose(0, [chunk]) == [chunk]
    assert helper(one_shard, 1).claimed(0) == {0}
    assert helper(one_shard, 1).choose(0, [0, 1]) == [1]
    elsewhere = f"{HERE[:-8]}00000000-{gone.pid}-w0"
    assert Helping(one_shard, elsewhere).choose(0, [2]) == [2]
    assert 2 in helper(one_shard, 2).claimed(0), "another PID namespace may have that number"


@pytest.mark.parametrize(
    ("price", "run", "helps"),
    [(None, {}, True), (0.1, {}, False), (0.1, {"help": True}, True), (None, {"help": False}, False)],
)
def test_where_an_engine_is_paid_by_the_token_nobody_helps_unless_asked_to(
    folder: Path,
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    price: float | None,
    run: dict[str, Any],
    helps: bool,
) -> None:
    write_pairs()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    engine: dict[str, Any] = {
        "name": "openai",
        "model": str(folder),
        "args": {"base_url": "http://127.0.0.1:9/v1", "served_model": "m"},
    }
    engine["args"] |= {"price_per_million_input": price} if price else {}
    opened = open_run(load_job(write_job({"engine": engine, "run": {"chunk_rows": 4, **run}})))
    session = sessions.Session(opened, [0], is_retry=False, stop=Stop(), progress=Progress(), helps=True)
    assert session.helps == helps


@pytest.mark.parametrize(("shard", "code"), [("0/1", 20), ("1/2", 75)])
def test_with_shard_what_another_holds_is_left_alone(
    folder: Path, planned: str, held: Lock, relabel: Callable[..., Outcome], shard: str, code: int
) -> None:
    done = relabel("run", planned, "--shard", shard, "--output", "json")
    assert done.code == code, done
    assert done.json["busy_shards"] == [1]
    assert not [name for name in receipts(folder) if name.startswith("shard-00001")]


@pytest.mark.parametrize("when", ["before the last chunk is in", "once all is in"])
def test_lock_of_a_worker_that_is_killed_meanwhile_is_tried_again_before_the_run_ends(
    planned: str, held: Lock, relabel: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Where nobody helps, the shards that another held when they were reached would stay open."""
    true, left = sessions.Session.commit, [1 if when.startswith("before") else 3]

    def commit(self: sessions.Session, work: Any) -> bool:
        left[0] -= 1
        if left[0] == 0:
            held.release()
        return true(self, work)

    monkeypatch.setattr(sessions.Session, "commit", commit)
    done = relabel("run", planned, "--shard", "0/1", "--output", "json")
    assert done.code == 0, done
    assert (done.json["busy_shards"], done.json["rows_open"]) == ([], 0)


def test_a_helper_that_finds_nothing_open_has_nothing_to_do(
    folder: Path, planned: str, relabel: Callable[..., Outcome]
) -> None:
    assert relabel("run", planned).code == 0
    lock = shard_lock(LocalRunStore(folder / "out/ecom"), 1)
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

    def begin(self: sessions.Session, chunk, pairs, settled):  # type: ignore[no-untyped-def]
        source, target = theirs / "shard-00000" / "chunk-000002.json", mine / "shard-00000" / "chunk-000002.json"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            for kind in ("labels", "quarantine"):
                for file in (folder / "out/other" / kind / "shard-00000").glob("chunk-000002-*"):
                    copy = folder / "out/ecom" / kind / "shard-00000" / file.name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(file.read_bytes())
            target.write_bytes(source.read_bytes())
        return true(self, chunk, pairs, settled)

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

    def begin(self: sessions.Session, chunk, pairs, settled):  # type: ignore[no-untyped-def]
        if chunk[:2] == (0, 0):
            self._locks[0].is_lost = True  # type: ignore[misc]
        return true(self, chunk, pairs, settled)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    done = relabel("run", planned, "--shard", "0/1", "--output", "json")
    assert done.code == 20, done
    assert done.json["busy_shards"] == [], "nobody holds that lock"
    names = list(receipts(folder))
    assert [name for name in names if name.startswith("shard-00000")] == ["shard-00000/chunk-000000.json"]
    assert len([name for name in names if name.startswith("shard-00001")]) == 3
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert relabel("run", planned).code == 0
    assert relabel("verify", planned).code == 0


def test_a_session_that_lost_its_lease_does_not_help_with_what_it_has_in_flight_itself(
    folder: Path, planned: str, relabel: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own chunks without a receipt looked like those of a holder who gets nothing done: it asked them twice."""
    true = sessions.Session._begin
    begun: list[tuple[int, int]] = []

    def begin(self: sessions.Session, chunk, pairs, settled):  # type: ignore[no-untyped-def]
        begun.append(chunk[:2])
        if chunk[:2] == (0, 1):
            self._locks[0].is_lost = True  # type: ignore[misc]
        return true(self, chunk, pairs, settled)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    monkeypatch.setattr(Helping, "_pays", lambda *_: True)
    slow = ("--set", "engine.args.latency_s=0.05", "--set", "engine.args.batch=1")
    done = relabel("run", planned, *slow, "--output", "json")
    assert done.code == 0, done
    assert sorted(begun) == [(shard, chunk) for shard in range(2) for chunk in range(3)]
    assert done.json["this_run"]["in_vain"]["pairs"] == 0
