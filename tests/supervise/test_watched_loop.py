"""What the run loop does with suspects: they are asked apart, poison rows not at all, and a stalled engine is
distinguished from a slow one.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from relabel.jobs.run.chunks import ChunkWork
from relabel.manifests.asks import Answer, Ask, Message, Request
from relabel.manifests.errors import EngineCrashError
from relabel.manifests.schemas import QuarantineRow
from tests.jobs.test_loop import Scripted, TwoStage, chunks_of, good, work_through


class Probed(TwoStage):
    """Has an ask about a made-up pair."""

    def probe(self) -> list[Ask]:
        return [Ask("intent", (Message("user", ("made up",)),), None, 8)]


class Notes:
    """A journal that has suspects in one chunk, and keeps what happens."""

    def __init__(self, apart: list[list[int]], isolated_rows: dict[int, str]) -> None:
        self.apart, self.isolated_rows = apart, isolated_rows
        self.seen: list[Any] = []

    def begins(self, work: ChunkWork) -> None:
        if work.id.chunk == 1:
            work.apart, work.isolated_rows = self.apart, self.isolated_rows

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        self.seen.append(("tries", [work.pairs[index].row_id for index in indexes]))

    def ends(self, work: ChunkWork, index: int) -> None:
        self.seen.append(("ends", work.pairs[index].row_id))


class Polled(Scripted):
    """Notes which rows' documents it has at each poll."""

    def __init__(self, notes: Notes, **more: Any) -> None:
        super().__init__(good, **more)
        self.notes = notes

    def poll(self) -> list[Answer]:
        parts = [part for one in self.waiting for message in one.ask.messages for part in message.parts]
        self.notes.seen.append(("polls", {int(part.split()[1]) for part in parts if part.startswith("doc ")}))
        return super().poll()


class OncePerQuery(Probed):
    """Rows of a query take their labels from one answer."""

    uses_siblings = True


def watched(
    engine: Scripted, works: list[ChunkWork], journal: Any = None, labeler: Any = None, **more: Any
) -> list[ChunkWork]:
    return work_through(engine, works, journal=journal, labeler=labeler or Probed(None), **more)


def test_suspects_are_asked_with_nothing_else_in_flight_and_isolated_rows_never() -> None:
    works = chunks_of(6, 6, 6, queries=9)
    notes = Notes([[1, 2], [4]], {0: "it did it twice"})
    engine = Polled(notes, capacity=8, batch=3)
    committed = watched(engine, works, notes)
    assert sorted(work.id.chunk for work in committed) == [0, 1, 2]
    assert [note for note in notes.seen if note[0] == "tries"] == [("tries", [7, 8]), ("tries", [10])]
    tried = [notes.seen.index(note) for note in notes.seen if note[0] == "tries"]
    for start, group in zip(tried, ({7, 8}, {10}), strict=True):
        left = set(group)
        for kind, what in notes.seen[start + 1 :]:
            assert kind != "polls" or what <= group
            left -= {what} if kind == "ends" else set()
            if not left:
                break
    assert notes.seen.index(("commits", 0)) < tried[0], (
        "what was finished before is committed before anything is risked"
    )
    row = works[1].rows[0]
    assert isinstance(row, QuarantineRow)
    assert (row.row_id, row.status, row.reason) == (6, "engine", "it did it twice")
    assert not any(
        "doc 6" in part for request in engine.seen for message in request.ask.messages for part in message.parts
    )
    assert all(
        row is not None and row.status == "ok" for work in works for row in work.rows if row is not works[1].rows[0]
    )


def test_an_isolated_row_takes_its_query_along_where_all_its_rows_would_be_asked_the_very_same() -> None:
    works = chunks_of(6, 6, queries=4)
    engine = Scripted(good)
    (whole, found) = watched(engine, works, Notes([[2], [4]], {1: "it did it twice"}), labeler=OncePerQuery(None))
    assert [row.status for row in whole.rows if row is not None] == ["ok"] * 6
    assert [row.status for row in found.rows if row is not None] == ["engine"] * 3 + ["ok"] * 3
    assert {row.reason for row in found.rows if isinstance(row, QuarantineRow)} == {"it did it twice"}
    assert not any(request.ask.shared_by == "q2" for request in engine.seen)


def test_an_engine_that_has_answered_nothing_yet_must_answer_a_made_up_pair_before_a_suspect() -> None:
    works = chunks_of(3, 3)[1:]
    engine = Scripted(good)
    watched(engine, works, Notes([[0]], {}))
    assert engine.seen[0].ask.messages[0].parts == ("made up",)

    def goes_down(request: Request) -> Answer:
        raise EngineCrashError("at anything")

    notes = Notes([[0]], {})
    with pytest.raises(EngineCrashError):
        watched(Scripted(goes_down), chunks_of(3, 3)[1:], notes)
    assert not [note for note in notes.seen if note[0] == "tries"], "no row was at stake when it crashed"


class Slow(Scripted):
    """Each poll takes a while; requests for one document are never answered."""

    def __init__(self, answer: Any, *, poll_s: float, never: str = "\0", capacity: int = 4) -> None:
        super().__init__(answer, capacity)
        self.poll_s, self.never = poll_s, never

    def poll(self) -> list[Answer]:
        time.sleep(self.poll_s)
        kept = [
            request
            for request in self.waiting
            if any(self.never in part for m in request.ask.messages for part in m.parts)
        ]
        self.waiting = [request for request in self.waiting if request not in kept]
        answers = super().poll()
        self.waiting += kept
        return answers


def test_a_request_that_others_overtake_for_too_long_is_a_crash() -> None:
    engine = Slow(good, poll_s=0.01, never="doc 3")
    with pytest.raises(
        EngineCrashError, match=r"not answered a request of stage 'verdict' for .*ask_timeout_s is 0\.2"
    ):
        watched(engine, chunks_of(200, queries=40), ask_timeout_s=0.2)


def test_a_slow_engine_that_answers_each_request_in_time_is_none() -> None:
    assert len(watched(Slow(good, poll_s=0.05, capacity=2), chunks_of(20), ask_timeout_s=0.4)) == 1


def test_time_that_the_process_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is paused for an hour in the middle of a poll goes on where it was."""
    clock = [0.0]
    monkeypatch.setattr("relabel.jobs.run.loop.time.perf_counter", lambda: clock[0])

    class Paused(Scripted):
        def poll(self) -> list[Answer]:
            clock[0] += 3600.0 if len(self.seen) == 9 else 0.5
            return super().poll()

    assert len(watched(Paused(good), chunks_of(20), ask_timeout_s=60.0)) == 1
