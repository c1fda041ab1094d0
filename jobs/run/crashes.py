"""Crashed and stalled engines: the crash journal, stall detection, and the watchdog."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from relabel.jobs.exits import Exit
from relabel.jobs.run.chunks import ChunkWork, Isolation
from relabel.jobs.run.stop import LOOK_EVERY_S
from relabel.manifests.asks import POLL_S, Answer, Engine
from relabel.manifests.errors import EngineCrashError, EngineLostError, RelabelError
from relabel.manifests.receipts import ChunkId
from relabel.manifests.records import readable_json, version_of
from relabel.manifests.store import RunStore, read_if_there

# ------------------------------------------------------------------------------
# Which chunks a worker has under way, written down before their rows are asked, so that whoever takes a shard next
# knows what the engine was at when its worker was killed, and asks those rows apart (`isolation.py` decides how).
#
# A shard's journal has one writer, the holder of the shard's lock, who removes it when the shard is let go in order. So
# a journal that is found under a lock just taken is that of a worker that went down, whatever the host, process number
# or scheduler. A reboot, a preemption, or a worker paused for longer than its lease look the same: their rows are asked
# apart once, and are then as good as any.


logger = logging.getLogger(__name__)

FOLDER = "crashes"
VERSION = 1
AHEAD = 16
"""Chunks that are written down at a time where a write is a request to a store, those that come next among them."""
REASON = "its process ended without a word"
MOST_ISOLATED, MOST_SHARE = 8, 0.01
"""Rows of a shard that may be set aside, as a number and as a share of its rows; above both, it is not the rows."""


@dataclass(slots=True)
class _Shard:
    """One shard's journal while its lock is held here.

    Args:
        todo: attempts of the chunks that are open, in the order in which they are asked.
        begun: chunks under way.
        written: chunks that the file calls begun; None while there is no file.
        trying: the chunk and the rows that are asked with nothing else in flight, and how many are not answered yet.
    """

    todo: Mapping[int, int]
    isolation: Isolation = field(default_factory=Isolation)
    begun: set[int] = field(default_factory=set)
    written: set[int] | None = None
    trying: tuple[int, list[int]] | None = None
    left: set[int] = field(default_factory=set)


class CrashJournal:
    """The loop's `Watch` where no supervisor outlives the worker.

    Args:
        store: the run's output.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._ahead = AHEAD if store.readers > 1 else 1
        self._shards: dict[int, _Shard] = {}
        self._guard = threading.Lock()

    def opens(self, shard: int, todo: Mapping[int, int], rows_of: Callable[[int], list[int]], *, num_rows: int) -> None:
        """A shard's lock was taken: read what the worker before left, and decide which rows are asked apart.

        Args:
            todo: attempt by open chunk.
            rows_of: ids of the rows that a chunk asks.
            num_rows: of the shard.
        Raises:
            EngineLostError: engines went down over so many single rows that it is not the rows.
        """
        held = self._shards[shard] = _Shard(todo)
        record = self._read(shard)
        if record is None:
            return
        is_open = {chunk for chunk, attempt in record["begun"] if todo.get(chunk) == attempt}
        held.written = {chunk for chunk, _ in record["begun"]}
        held.isolation = Isolation.of(record["isolation"], {ChunkId(shard, *one) for one in todo.items()})
        if record["trying"] is not None and record["trying"][0] in is_open:
            chunk, rows = record["trying"]
            held.isolation.crashed_apart(ChunkId(shard, chunk, todo[chunk]), rows, REASON)
            text = f"while {len(rows):,} of its rows were asked with nothing else in flight"
        elif is_open:
            suspects = {ChunkId(shard, chunk, todo[chunk]): rows_of(chunk) for chunk in sorted(is_open)}
            held.isolation.crashed(suspects)
            text = f"with {sum(map(len, suspects.values())):,} rows under way; these are asked apart"
        else:
            return
        logger.warning("shard %d: an earlier worker was killed, or its engine went down, %s", shard, text)
        isolated = held.isolation.num_isolated
        if isolated > MOST_ISOLATED and isolated > MOST_SHARE * num_rows:
            raise EngineLostError(
                f"shard {shard}: engines went down over {isolated:,} single rows of {num_rows:,}, so it is not the "
                f"rows. Mend the engine (its memory, its driver), then remove {self._store.root}/{_name(shard)} and "
                "run again."
            )
        self._write(shard)

    def closes(self, shard: int, *, is_crash: bool = False) -> None:
        """A shard's lock is about to be let go.

        Args:
            is_crash: since the engine went down over what is under way.
        """
        held = self._shards.get(shard)
        if held is not None and held.written is not None and not is_crash:
            held.begun, held.written, held.trying = set(), set(), None
            with contextlib.suppress(OSError, RelabelError):  # what stays costs a while apart, no row
                self._write(shard) if held.isolation.cases else self._store.remove(_name(shard))
        self._shards.pop(shard, None)

    def forgets(self, shard: int) -> None:
        """A shard's lock was lost to another worker, whose journal it is now."""
        self._shards.pop(shard, None)

    def begins(self, work: ChunkWork) -> None:
        """Write down that the chunk is under way, and note what is held against its rows."""
        held = self._shards.get(work.id.shard)
        if held is None or not work.left:  # it is helped with, or wholly reused
            return
        with self._guard:
            held.begun.add(work.id.chunk)
        if held.written is None or work.id.chunk not in held.written:
            self._write(work.id.shard, ahead_of=work.id.chunk)
        case = held.isolation.cases.get(work.id)
        if case is not None:
            work.apply(case)
            _isolate_guilty_queries(work)
            for index, why in work.isolated_rows.items():
                logger.warning("row %d goes to quarantine as `engine`: %s", work.pairs[index].row_id, why)

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        """Write down which rows are asked with nothing else in flight."""
        if (held := self._shards.get(work.id.shard)) is not None:
            rows = [work.pairs[index].row_id for index in indexes]
            held.trying, held.left = (work.id.chunk, rows), set(rows)
            self._write(work.id.shard)

    def ends(self, work: ChunkWork, index: int) -> None:
        """Once all rows that were asked apart have their outcome, they are as good as any."""
        held = self._shards.get(work.id.shard)
        if held is None or not held.left:
            return
        held.left.discard(work.pairs[index].row_id)
        if not held.left and held.trying is not None:
            held.isolation.cleared(work.id, held.trying[1])
            held.trying = None
            self._write(work.id.shard)

    def commits(self, work: ChunkWork, *, was_first: bool) -> None:
        """The chunk is durable; called from a commit thread. The file need not follow: a receipt says as much."""
        if (held := self._shards.get(work.id.shard)) is not None:
            with self._guard:
                held.begun.discard(work.id.chunk)
                held.isolation.committed(work.id)

    def asks(self, work: ChunkWork, index: int) -> None:
        """Nothing: that its chunk is under way is written down."""

    def flush(self) -> None:
        """Nothing is held back."""

    def _read(self, shard: int) -> dict[str, Any] | None:
        """What a shard's file holds; None where there is none, or none that can be read: it costs crashes, no row."""
        data = read_if_there(self._store, _name(shard))
        try:
            record = json.loads(data or b"{}")
            return record if version_of(record) == VERSION else None
        except ValueError:
            return None

    def _write(self, shard: int, *, ahead_of: int | None = None) -> None:
        held = self._shards[shard]
        with self._guard:
            begun = set(held.begun)
        if ahead_of is not None:
            begun |= set([chunk for chunk in held.todo if chunk >= ahead_of][: self._ahead])
        else:
            begun |= held.written or set()
        held.written = begun
        record = {
            "version": VERSION,
            "begun": sorted((chunk, held.todo[chunk]) for chunk in begun if chunk in held.todo),
            "trying": held.trying,
            "isolation": held.isolation.plain(),
        }
        self._store.jot(_name(shard), readable_json(record))


def _isolate_guilty_queries(work: ChunkWork) -> None:
    """Where two rows of a query brought an engine down and none was answered since, it is the query's own text: its
    other rows would each cost two engines more.
    """
    suspects = {index for group in work.apart for index in group} | set(work.isolated_rows)
    caught = Counter(work.pairs[index].query_id for index in work.isolated_rows)
    cleared = {pair.query_id for index, pair in enumerate(work.pairs) if index not in suspects}
    for index, pair in enumerate(work.pairs):
        if caught[pair.query_id] > 1 and pair.query_id not in cleared and index not in work.isolated_rows:
            work.isolated_rows[index] = f"the engine went down over {caught[pair.query_id]} other rows of its query"


def _name(shard: int) -> str:
    return f"{FOLDER}/shard-{shard:05d}.json"


# ------------------------------------------------------------------------------
# How long requests have waited in an engine, by the engine's own work: one that goes silent, or comes back empty again
# and again, is counted as crashed. No wall clock decides it: a process that was stopped and woke up has kept no request
# waiting.


HASTY_POLLS = 10_000
"""Polls in a row that came back at once with nothing, though requests are in flight: an engine that lost them would be
asked forever.
"""
LONGEST_STEP_S = 5.0
"""Most that one poll counts on the engine's clock, seconds: a process that was stopped and woke up has not kept a
request waiting.
"""


class StallDetection:
    """Polls one engine and keeps its clock.

    Args:
        ask_timeout_s: a request without an answer for this long, in seconds of the engine's work, is a crash of the
            engine.
    """

    def __init__(self, engine: Engine, ask_timeout_s: float) -> None:
        self.worked_s = 0.0
        """The engine's clock: seconds of its work."""
        self.polling_since_s: float | None = None
        """Since when the engine is at work, on `time.perf_counter`; None between polls."""
        self._engine = engine
        self._ask_timeout_s = ask_timeout_s
        self._handed: deque[tuple[int, float]] = deque()  # last request handed over, and when, by the engine's clock
        self._next_look_s = 0.0
        self._hasty_polls = 0

    def handed(self, request_id: int) -> None:
        """Note that requests up to this number were handed over."""
        self._handed.append((request_id, self.worked_s))

    def poll(self, num_in_flight: int) -> list[Answer]:
        """Let the engine work.

        Raises:
            EngineCrashError: its memory ran out, or it says nothing of requests and does not work on them either.
        """
        self.polling_since_s = polled_s = time.perf_counter()
        try:
            answers = self._engine.poll()
        except Exception as exc:
            if not isinstance(exc, MemoryError) and type(exc).__name__ != "OutOfMemoryError":
                # torch's, which jobs never imports
                raise
            raise EngineCrashError(
                f"the engine's memory ran out with {num_in_flight} requests in flight. Ask for fewer at a time, or "
                "shorter prompts."
            ) from exc
        finally:
            self.polling_since_s = None
        took_s = time.perf_counter() - polled_s
        self.worked_s += min(took_s, LONGEST_STEP_S)
        self._hasty_polls = 0 if answers or took_s > POLL_S / 100 else self._hasty_polls + 1
        return answers

    def idle_poll_s(self, num_in_flight: int) -> None:
        """Raise EngineCrashError for an engine that comes back at once, again and again, with nothing."""
        if self._hasty_polls > HASTY_POLLS and num_in_flight:
            raise EngineCrashError(
                f"the engine does not answer {num_in_flight} requests, and does not work on them either."
            )

    def look_for_silence(self, in_flight: Iterable[int], stage_of: Callable[[int], str]) -> None:
        """Now and then: raise EngineCrashError if a request has waited too long.

        Args:
            in_flight: numbers, ascending. Requests are handed over in this order, so the first is the one that waits
                longest.
        """
        if self.worked_s < self._next_look_s:
            return
        self._next_look_s = self.worked_s + min(LOOK_EVERY_S, self._ask_timeout_s / 4)
        oldest = next(iter(in_flight), None)
        handed = self._handed
        while handed and (oldest is None or handed[0][0] < oldest):
            handed.popleft()
        if handed and oldest is not None:
            self.check(handed[0][1], stage_of(oldest))

    def check(self, since_s: float, stage: str) -> None:
        """Raise EngineCrashError if a request that was handed over at `since_s`, by the engine's clock, has waited too
        long.
        """
        waited_s = self.worked_s - since_s
        if waited_s > self._ask_timeout_s:
            raise EngineCrashError(
                f"the engine has not answered a request of stage {stage!r} for {waited_s:.0f} s "
                f"(run.ask_timeout_s is {self._ask_timeout_s:g})."
            )


# ------------------------------------------------------------------------------
# Ends a process whose engine never comes back from its work: nobody else can, where no supervisor watches.
#
# A thread counts the time that one `poll` takes. It can end a process whose main thread waits in a driver's call, as
# long as that call lets other threads run; a supervisor (`--workers 1`) needs no such luck.


_CHECK_EVERY_S = 1.0
LONGEST_LOOK_S = 5.0
"""Most that one look counts, seconds: a process that was stopped and woke up has not hung meanwhile."""


@contextlib.contextmanager
def hangs_end(polling_since_s: Callable[[], float | None], timeout_s: float) -> Iterator[None]:
    """End the process with exit code 20 if a poll takes longer than `timeout_s` while the block runs.

    Args:
        polling_since_s: since when the poll under way runs; None between polls.
    """
    has_ended = threading.Event()

    def watch() -> None:
        poll, waited_s, looked_s = None, 0.0, time.perf_counter()
        while not has_ended.wait(min(_CHECK_EVERY_S, timeout_s / 4)):
            now_s = time.perf_counter()
            since_s = polling_since_s()
            waited_s = (
                waited_s + min(now_s - looked_s, LONGEST_LOOK_S) if since_s is not None and since_s == poll else 0.0
            )
            poll, looked_s = since_s, now_s
            if waited_s > timeout_s:
                print(  # noqa: T201
                    f"relabel: the engine has not come back from its work for {waited_s:.0f} s (run.ask_timeout_s is "
                    f"{timeout_s:g}); ending without it. Committed work is safe; the same command continues.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(Exit.PARTIAL)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
