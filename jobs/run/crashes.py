"""Crashed and stalled engines: the crash journal, stall detection, and the watchdog that ends a process that hangs."""

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
from relabel.jobs.run.stop import CHECK_EVERY_S
from relabel.manifests.asks import POLL_S, Answer, Engine
from relabel.manifests.errors import EngineCrashError, EngineLostError, RelabelError
from relabel.manifests.receipts import ChunkId
from relabel.manifests.records import readable_json, version_of
from relabel.manifests.secrets import redacted
from relabel.manifests.store import RunStore, read_if_there

logger = logging.getLogger(__name__)

FOLDER = "crashes"
VERSION = 2
AHEAD = 16
"""Chunks that are written down at a time if a write is a request to a store, the next ones among them."""
REASON = "its process ended without a word"
MOST_ISOLATED, MOST_SHARE = 8, 0.01
"""Rows of a shard that may be isolated, as a number and as a share of its rows; above both, it is not the rows."""


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
    """Which chunks a worker has under way, written down before their rows are asked: `crashes/shard-00003.json`.

    A shard's journal has one writer, the holder of the shard's lock, who removes it when the shard is released in
    order. So a journal that is found under a lock just taken is that of a worker that crashed, whatever the host,
    process number or scheduler, and the rows that it had in flight are asked apart (`Isolation` decides how). So are
    those of a reboot, a preemption, or a worker paused for longer than its lease, once; then they are as good as any.

    Args:
        store: the run's output.
        worker: who writes.
    """

    def __init__(self, store: RunStore, worker: str) -> None:
        self._store = store
        self._worker = worker
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
            EngineLostError: engines crashed over so many single rows that it is not the rows.
        """
        held = self._shards[shard] = _Shard(todo)
        record = _read(self._store, _name(shard))
        if record is None:
            return
        is_open = {chunk for chunk, attempt in record["begun"] if todo.get(chunk) == attempt}
        held.written = {chunk for chunk, _ in record["begun"]}
        held.isolation = Isolation.of(record["isolation"], {ChunkId(shard, *one) for one in todo.items()})
        if record["trying"] is not None and record["trying"][0] in is_open:
            chunk, rows = record["trying"]
            held.isolation.crashed_apart(ChunkId(shard, chunk, todo[chunk]), rows, record.get("reason") or REASON)
            text = f"while {len(rows):,} of its rows were asked with nothing else in flight"
        elif is_open:
            suspects = {ChunkId(shard, chunk, todo[chunk]): rows_of(chunk) for chunk in sorted(is_open)}
            held.isolation.crashed(suspects)
            text = f"with {sum(map(len, suspects.values())):,} rows under way; these are asked apart"
        else:
            return
        logger.warning("shard %d: an earlier worker was killed, or its engine crashed, %s", shard, text)
        isolated = held.isolation.num_isolated
        if isolated > MOST_ISOLATED and isolated > MOST_SHARE * num_rows:
            raise EngineLostError(
                f"shard {shard}: engines crashed over {isolated:,} single rows of {num_rows:,}, so it is not the "
                f"rows. Mend the engine (its memory, its driver), then remove {self._store.root}/{_name(shard)} and "
                "run again."
            )
        self._write(shard)

    def closes(self, shard: int, *, crash: str | None = None) -> None:
        """A shard's lock is about to be released.

        Args:
            crash: how the engine crashed over what is under way, if that is why.
        """
        held = self._shards.get(shard)
        if held is not None and held.written is not None:
            with contextlib.suppress(OSError, RelabelError):  # what stays costs a while apart, no row
                if crash is not None:
                    self._write(shard, reason=crash)
                elif held.isolation.cases:
                    held.begun, held.written, held.trying = set(), set(), None
                    self._write(shard)
                else:
                    self._store.remove(_name(shard))
        self._shards.pop(shard, None)

    def hangs(self, reason: str) -> None:
        """This process is about to be ended, since its engine does not return; called from the watchdog's thread."""
        with contextlib.suppress(OSError, RelabelError):
            for shard in [one for one, held in self._shards.items() if held.written is not None]:
                self._write(shard, reason=reason)

    def forgets(self, shard: int) -> None:
        """A shard's lock was lost to another worker, whose journal it is now."""
        self._shards.pop(shard, None)

    def begins(self, work: ChunkWork) -> None:
        """Write down that the chunk is under way, and note which of its rows are suspects."""
        held = self._shards.get(work.id.shard)
        if held is None or not work.left:  # its lock was lost, or all its rows are reused
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
        """Write down which rows are asked with nothing else in flight; the engine is proven to work."""
        if (held := self._shards.get(work.id.shard)) is not None:
            rows = [work.pairs[index].row_id for index in indexes]
            held.trying, held.left = (work.id.chunk, rows), set(rows)
            self._write(work.id.shard)

    def ends(self, work: ChunkWork, index: int) -> None:
        """A row has its outcome. Once all rows that were asked apart have theirs, they are as good as any."""
        held = self._shards.get(work.id.shard)
        if held is None or not held.left:
            return
        held.left.discard(work.pairs[index].row_id)
        if not held.left and held.trying is not None:
            held.isolation.cleared(work.id, held.trying[1])
            held.trying = None
            self._write(work.id.shard)

    def commits(self, work: ChunkWork) -> None:
        """The chunk is durable; called from a commit thread. The file need not follow: a receipt says as much."""
        if (held := self._shards.get(work.id.shard)) is not None:
            with self._guard:
                held.begun.discard(work.id.chunk)
                held.isolation.committed(work.id)

    def _write(self, shard: int, *, ahead_of: int | None = None, reason: str | None = None) -> None:
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
            "worker": self._worker,
            "begun": sorted((chunk, held.todo[chunk]) for chunk in begun if chunk in held.todo),
            "trying": held.trying,
            "isolation": held.isolation.plain(),
            "reason": reason and redacted(reason).rstrip("."),
        }
        self._store.jot(_name(shard), readable_json(record))


def crashed_apart(store: RunStore, worker: str) -> bool:
    """Whether the journals of a worker that is gone say that its engine crashed over rows that were asked apart, which
    narrows them down.
    """
    records = (_read(store, name) for name in store.names(FOLDER))
    return any(one is not None and one["trying"] and one["worker"] == worker for one in records)


def _read(store: RunStore, name: str) -> dict[str, Any] | None:
    """A journal; None if there is none, or it can't be read, which costs crashes and no row."""
    try:
        record = json.loads(read_if_there(store, name) or b"{}")
        return record if version_of(record) == VERSION else None
    except ValueError:
        return None


def _isolate_guilty_queries(work: ChunkWork) -> None:
    """If two rows of a query crashed an engine and none was answered since, it is the query's own text: its other rows
    would each cost two engines more.
    """
    suspects = {index for group in work.apart for index in group} | set(work.isolated_rows)
    caught = Counter(work.pairs[index].query_id for index in work.isolated_rows)
    cleared = {pair.query_id for index, pair in enumerate(work.pairs) if index not in suspects}
    for index, pair in enumerate(work.pairs):
        if caught[pair.query_id] > 1 and pair.query_id not in cleared and index not in work.isolated_rows:
            work.isolated_rows[index] = f"the engine went down over {caught[pair.query_id]} other rows of its query"


def _name(shard: int) -> str:
    return f"{FOLDER}/shard-{shard:05d}.json"


HASTY_POLLS = 10_000
"""Polls in a row that return at once with nothing, though requests are in flight: an engine that lost them would be
polled forever.
"""
LONGEST_STEP_S = 5.0
"""Most that one poll counts on the engine's clock, seconds: a process that was stopped and woke up has not kept a
request waiting.
"""


class StallDetection:
    """Polls one engine, and counts it as crashed if it is silent, or returns empty again and again.

    Its clock is the engine's own work, no wall clock: a process that was stopped and woke up has kept no request
    waiting.

    Args:
        ask_timeout_s: a request without an answer for this long, in seconds of the engine's work, is a crash of the
            engine.
    """

    def __init__(self, engine: Engine, ask_timeout_s: float) -> None:
        self.worked_s = 0.0
        """The engine's clock: seconds of its work."""
        self.polling_since_s: float | None = None
        """When the poll under way began, on `time.perf_counter`; None between polls."""
        self._engine = engine
        self._ask_timeout_s = ask_timeout_s
        self._handed: deque[tuple[int, float]] = deque()  # last request handed over, and when, by the engine's clock
        self._next_check_s = 0.0
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

    def check_idle(self, num_in_flight: int) -> None:
        """Raise EngineCrashError for an engine that returns at once, again and again, with nothing."""
        if self._hasty_polls > HASTY_POLLS and num_in_flight:
            raise EngineCrashError(
                f"the engine does not answer {num_in_flight} requests, and does not work on them either."
            )

    def check_silence(self, in_flight: Iterable[int], stage_of: Callable[[int], str]) -> None:
        """Now and then: raise EngineCrashError if a request has waited too long.

        Args:
            in_flight: numbers, ascending. Requests are handed over in this order, so the first is the one that waits
                longest.
        """
        if self.worked_s < self._next_check_s:
            return
        self._next_check_s = self.worked_s + min(CHECK_EVERY_S, self._ask_timeout_s / 4)
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


_WATCH_EVERY_S = 1.0


@contextlib.contextmanager
def ends_hanging(
    since_s: Callable[[], float | None],
    timeout_s: float,
    *,
    what: str = "the engine has not come back from its work",
    option: str = "run.ask_timeout_s",
    on_end: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """End the process with exit code 20 if something takes longer than `timeout_s` while the block runs.

    A thread counts the time. It can end a process whose main thread waits in a driver's call, as long as that call
    lets other threads run.

    Args:
        since_s: when it began; None while there is nothing to wait for.
        on_end: called with the reason before the end.
    """
    has_ended = threading.Event()

    def watch() -> None:
        begun_s, waited_s, checked_s = None, 0.0, time.perf_counter()
        while not has_ended.wait(min(_WATCH_EVERY_S, timeout_s / 4)):
            now_s, was_s, begun_s = time.perf_counter(), begun_s, since_s()
            is_same = begun_s is not None and begun_s == was_s
            # a process that was stopped and woke up has not hung meanwhile
            waited_s, checked_s = (waited_s + min(now_s - checked_s, LONGEST_STEP_S) if is_same else 0.0), now_s
            if waited_s > timeout_s:
                reason = f"{what} for {waited_s:.0f} s ({option} is {timeout_s:g})"
                on_end(reason)
                text = f"relabel: {reason}; ending without it. Committed work is safe; the same command continues."
                print(text, file=sys.stderr, flush=True)  # noqa: T201
                os._exit(Exit.PARTIAL)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
