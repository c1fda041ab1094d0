"""Crashed and stalled engines: the crash journal, stall detection, and the watchdog that ends a process that hangs."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from relabel.jobs.output import Exit
from relabel.jobs.run.chunks import ChunkWork
from relabel.manifests.asks import Answer, Engine, Request
from relabel.manifests.errors import EngineCrashError, EngineLostError, RelabelError
from relabel.manifests.plan import ChunkId
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.secrets import redacted
from relabel.manifests.store import Store, read_if_there

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# Which rows crash the engine.

PIECES = 8
"""Into how many groups a group is cut that crashed an engine. Not halves: each crash costs the start of an engine (a
minute on a GPU) and each innocent group a few seconds, so that among 512 rows the one is found after 5 crashes instead
of 11.
"""
TIMES_CAUGHT = 2
"""How often a row must crash an engine alone before it is not asked any more."""


@dataclass(slots=True)
class ChunkCase:
    """The suspects of one chunk.

    Args:
        groups: row ids to be asked apart, group by group.
        isolated_rows: rows that are not asked any more, by row id, and why.
    """

    groups: list[list[int]] = field(default_factory=list)
    isolated_rows: dict[int, str] = field(default_factory=dict)

    def drop(self, rows: set[int]) -> None:
        """Take rows out of all groups."""
        self.groups = [left for group in self.groups if (left := [row for row in group if row not in rows])]


@dataclass(slots=True)
class Isolation:
    """Which rows may have crashed an engine: a group that was in flight at a crash is asked apart, in ever smaller
    pieces, until one row is caught alone twice. Decides only; the journal keeps it, and the loop asks.

    Row ids are unique in a run, so that one count serves all chunks.

    Args:
        cases: by chunk and attempt, as text.
        num_isolated: rows that are not asked any more, of all chunks so far.
        caught: how often a row crashed an engine alone.
    """

    cases: dict[str, ChunkCase] = field(default_factory=dict)
    num_isolated: int = 0
    caught: Counter[int] = field(default_factory=Counter)

    def crashed(self, in_flight: dict[str, list[int]]) -> None:
        """An engine crashed at its ordinary work: what was in flight is asked apart, in groups of an eighth of it."""
        count = sum(map(len, in_flight.values()))
        for chunk, rows in in_flight.items():
            case = self.cases.setdefault(chunk, ChunkCase())
            known = {row for group in case.groups for row in group} | set(case.isolated_rows)
            case.groups += _pieces([row for row in rows if row not in known], count)

    def crashed_apart(self, chunk: str, in_flight: list[int], reason: str) -> None:
        """A working engine crashed with these rows of one group in flight and nothing else.

        Args:
            in_flight: at least one row.
            reason: how it crashed, for the quarantine.
        """
        case, row = self.cases.setdefault(chunk, ChunkCase()), in_flight[0]
        case.drop(set(in_flight))
        self.caught[row] += len(in_flight) == 1
        if len(in_flight) > 1 or self.caught[row] < TIMES_CAUGHT:
            case.groups[:0] = _pieces(in_flight, len(in_flight))
            return
        case.isolated_rows[row] = (
            f"the engine went down {self.caught[row]} times while it was asked this row and nothing else: {reason}"
        )
        self.num_isolated += 1

    def cleared(self, chunk: str, rows: list[int]) -> None:
        """Rows that were asked apart were answered: they are as good as any."""
        self.cases.get(chunk, ChunkCase()).drop(set(rows))
        for row in rows:
            self.caught.pop(row, None)

    def committed(self, chunk: str) -> None:
        """A chunk is durable: its case is closed."""
        for row in self.cases.pop(chunk, ChunkCase()).isolated_rows:
            self.caught.pop(row, None)


def _pieces(rows: list[int], count: int) -> list[list[int]]:
    """Rows cut into groups of an eighth of so many."""
    size = max(1, -(-count // PIECES))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# ------------------------------------------------------------------------------
# The crash journal.

FOLDER = "crashes"
VERSION = 3
AHEAD = 16
"""Chunks that are written down at a time if a write is a request to a store, the next ones among them."""
REASON = "its process ended without a word"
MOST_ISOLATED, MOST_SHARE = 8, 0.01
"""Rows of a shard that may be isolated, as a number and as a share of its rows; above both, it is not the rows."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What a journal says.

    Args:
        begun: chunks under way, by chunk and attempt.
        trying: the chunk and the rows that are asked with nothing else in flight.
        reason: how the engine crashed, if its worker could say that.
    """

    version: int
    worker: str
    begun: list[str]
    trying: tuple[int, list[int]] | None
    isolation: Isolation
    reason: str | None


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

    def __init__(self, store: Store, worker: str) -> None:
        self._store, self._worker = store, worker
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
        if (record := _read(self._store, _name(shard))) is None:
            return
        keys = {chunk: _key(ChunkId(shard, chunk, attempt)) for chunk, attempt in todo.items()}
        is_open = [chunk for chunk in sorted(todo) if keys[chunk] in record.begun]
        held.written = {int(one) for key in record.begun if (one := key.partition(".")[0]).isdecimal()}
        isolation = held.isolation = record.isolation
        isolation.cases = {key: case for key, case in isolation.cases.items() if key in keys.values()}
        if not is_open:
            return
        if record.trying is not None and record.trying[0] in is_open:
            suspects = {keys[record.trying[0]]: record.trying[1]}
            isolation.crashed_apart(*next(iter(suspects.items())), record.reason or REASON)
        else:
            suspects = {keys[chunk]: rows_of(chunk) for chunk in is_open}
            isolation.crashed(suspects)
        count = f"{sum(map(len, suspects.values())):,} rows under way; these are asked apart"
        logger.warning("shard %d: an earlier worker was killed, or its engine crashed, with %s", shard, count)
        if (isolated := isolation.num_isolated) > max(MOST_ISOLATED, MOST_SHARE * num_rows):
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
        if (held := self._shards.get(shard)) is not None and held.written is not None:
            with contextlib.suppress(OSError, RelabelError):  # what stays costs a while apart, no row
                if crash is None and not held.isolation.cases:
                    self._store.remove(_name(shard))
                else:
                    if crash is None:
                        held.begun, held.written, held.trying = set(), set(), None
                    self._write(shard, reason=crash)
        self.forgets(shard)

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
        if (case := held.isolation.cases.get(_key(work.id))) is not None:
            places = {pair.row_id: index for index, pair in enumerate(work.pairs)}
            groups = [[places[row] for row in group if row in places] for group in case.groups]
            work.apart = [group for group in groups if group]
            work.isolated_rows = {places[row]: why for row, why in case.isolated_rows.items() if row in places}
            # if two rows of a query crashed an engine and none was answered since, it is the query's own text: its
            # other rows would each cost two engines more
            suspects = {index for group in work.apart for index in group} | set(work.isolated_rows)
            caught = Counter(work.pairs[index].query_id for index in work.isolated_rows)
            cleared = {pair.query_id for index, pair in enumerate(work.pairs) if index not in suspects}
            guilty = {query: count for query, count in caught.items() if count > 1 and query not in cleared}
            for index, pair in enumerate(work.pairs):
                if (count := guilty.get(pair.query_id)) is not None:
                    why = f"the engine went down over {count} other rows of its query"
                    work.isolated_rows.setdefault(index, why)
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
        if (held := self._shards.get(work.id.shard)) is not None and held.left:
            held.left.discard(work.pairs[index].row_id)
            if not held.left and held.trying is not None:
                held.isolation.cleared(_key(work.id), held.trying[1])
                held.trying = None
                self._write(work.id.shard)

    def rests(self, work: ChunkWork) -> None:
        """All rows of the chunk have their outcome; no crash from now on is about them."""
        if (held := self._shards.get(work.id.shard)) is not None:
            with self._guard:
                held.begun.discard(work.id.chunk)
                if held.written is not None:
                    held.written.discard(work.id.chunk)

    def commits(self, work: ChunkWork) -> None:
        """The chunk is durable; called from a commit thread. The file need not follow: a receipt says as much."""
        if (held := self._shards.get(work.id.shard)) is not None:
            with self._guard:
                held.begun.discard(work.id.chunk)
                held.isolation.committed(_key(work.id))

    def _write(self, shard: int, *, ahead_of: int | None = None, reason: str | None = None) -> None:
        held = self._shards[shard]
        with self._guard:
            ahead = [chunk for chunk in held.todo if ahead_of is not None and chunk >= ahead_of][: self._ahead]
            held.written = held.begun.union(ahead if ahead_of is not None else held.written or ())
            keys = [_key(ChunkId(shard, chunk, held.todo[chunk])) for chunk in sorted(held.todo.keys() & held.written)]
            why = reason and redacted(reason).rstrip(".")
            record = plain(_Record(VERSION, self._worker, keys, held.trying, held.isolation, why))
        self._store.put(_name(shard), readable_json(record), is_synced=False)


def crashed_apart(store: Store, worker: str) -> bool:
    """Whether the journals of a worker that is gone say that its engine crashed over rows that were asked apart, which
    narrows them down.
    """
    records = (_read(store, name) for name in store.names(FOLDER))
    return any(one is not None and one.trying is not None and one.worker == worker for one in records)


def _read(store: Store, name: str) -> _Record | None:
    """A journal; None if there is none, or it can't be read, which costs crashes and no row."""
    with contextlib.suppress(ValueError):
        held = json.loads(read_if_there(store, name) or b"{}")
        return checked(_Record, held) if version_of(held) == VERSION else None
    return None


def _key(chunk: ChunkId) -> str:
    return f"{chunk.chunk}.{chunk.attempt}"


def _name(shard: int) -> str:
    return f"{FOLDER}/shard-{shard:05d}.json"


# ------------------------------------------------------------------------------
# Engines that stall or hang.

LONGEST_STEP_S = 5.0
"""Most that one step counts on the engine's clock, seconds: a process that was stopped and woke up has not kept a
request waiting.
"""
HASTY_S, HASTY_POLLS = 0.001, 10_000
"""How many polls in a row may take less than that and give nothing, though requests are in flight: an engine that lost
them would be polled until their time is over.
"""


class WatchedEngine:
    """An engine that counts as crashed if a request waits too long for its answer.

    Args:
        ask_timeout_s: seconds of the loop's work, no wall clock.
    """

    def __init__(self, engine: Engine, ask_timeout_s: float) -> None:
        self.polling_since_s: float | None = None
        """When the poll under way began, on `time.perf_counter`; None between polls."""
        self._engine, self._ask_timeout_s, self._hasty_polls = engine, ask_timeout_s, 0
        self._worked_s, self._last_s = 0.0, time.perf_counter()
        self._in_flight: dict[int, tuple[float, str]] = {}  # when each was handed over, the oldest first, and its stage

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    def submit(self, request: Request) -> None:
        """Hand a request over."""
        self._in_flight[request.id] = self._worked_s, request.ask.stage
        self._engine.submit(request)

    def poll(self) -> list[Answer]:
        """Let the engine work.

        Raises:
            EngineCrashError: its memory ran out, a request has waited too long, or it lost its requests.
        """
        since_s, stage = next(iter(self._in_flight.values()), (self._worked_s, ""))
        if self._worked_s - since_s > self._ask_timeout_s:
            raise EngineCrashError(
                f"the engine has not answered a request of stage {stage!r} for {self._worked_s - since_s:.0f} s "
                f"(run.ask_timeout_s is {self._ask_timeout_s:g})."
            )
        polled_s = self.polling_since_s = time.perf_counter()
        try:
            answers = self._engine.poll()
        except Exception as exc:
            if not isinstance(exc, MemoryError) and type(exc).__name__ != "OutOfMemoryError":
                # torch's, which jobs never imports
                raise
            raise EngineCrashError(
                f"the engine's memory ran out with {self.num_in_flight} requests in flight. Ask for fewer at a time."
            ) from exc
        finally:
            self.polling_since_s = None
        now_s = time.perf_counter()
        self._worked_s, self._last_s = self._worked_s + min(now_s - self._last_s, LONGEST_STEP_S), now_s
        is_hasty = bool(self._in_flight) and not answers and now_s - polled_s < HASTY_S
        self._hasty_polls = self._hasty_polls + 1 if is_hasty else 0
        if self._hasty_polls > HASTY_POLLS:
            raise EngineCrashError(
                f"the engine does not answer {self.num_in_flight} requests, and does not work on them either."
            )
        for answer in answers:
            self._in_flight.pop(answer.request_id, None)
        return answers


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
                on_end(reason := f"{what} for {waited_s:.0f} s ({option} is {timeout_s:g})")
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
