"""Which rows crash the engine: the crash journal, and how suspects are narrowed down."""

import contextlib
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relabel.jobs.run.chunks import ChunkWork
from relabel.manifests.errors import EngineLostError, RelabelError
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
        left = ([row for row in group if row not in rows] for group in self.groups)
        self.groups = [group for group in left if group]


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
            known = {*case.isolated_rows, *itertools.chain.from_iterable(case.groups)}
            case.groups += _pieces([row for row in rows if row not in known], count)

    def crashed_apart(self, chunk: str, in_flight: list[int], reason: str) -> None:
        """A working engine crashed with these rows of one group in flight and nothing else.

        Args:
            in_flight: at least one row.
            reason: how it crashed, for the quarantine.
        """
        case = self.cases.setdefault(chunk, ChunkCase())
        row = in_flight[0]
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
MOST_ISOLATED = 8
MOST_SHARE = 0.01
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
        journal = _Shard(todo)
        self._shards[shard] = journal
        record = _read(self._store, _name(shard))
        if record is None:
            return
        journal.written = _chunks_named(record.begun)
        journal.isolation = record.isolation
        keys = {chunk: _key(ChunkId(shard, chunk, attempt)) for chunk, attempt in todo.items()}
        cases = record.isolation.cases
        record.isolation.cases = {key: case for key, case in cases.items() if key in keys.values()}
        under_way = [chunk for chunk in sorted(todo) if keys[chunk] in record.begun]
        if not under_way:
            return
        if record.trying is not None and record.trying[0] in under_way:
            chunk, suspects = record.trying
            num_suspects = len(suspects)
            record.isolation.crashed_apart(keys[chunk], suspects, record.reason or REASON)
        else:
            in_flight = {keys[chunk]: rows_of(chunk) for chunk in under_way}
            num_suspects = sum(map(len, in_flight.values()))
            record.isolation.crashed(in_flight)
        logger.warning(
            "shard %d: an earlier worker was killed, or its engine crashed, with %s rows under way; these are asked "
            "apart",
            shard,
            f"{num_suspects:,}",
        )
        num_isolated = record.isolation.num_isolated
        if num_isolated > max(MOST_ISOLATED, MOST_SHARE * num_rows):
            raise EngineLostError(
                f"shard {shard}: engines crashed over {num_isolated:,} single rows of {num_rows:,}, so it is not the "
                f"rows. Mend the engine (its memory, its driver), then remove {self._store.root}/{_name(shard)} and "
                "run again."
            )
        self._write(shard)

    def closes(self, shard: int, *, crash: str | None = None) -> None:
        """A shard's lock is about to be released.

        Args:
            crash: how the engine crashed over what is under way, if that is why.
        """
        journal = self._shards.get(shard)
        if journal is not None and journal.written is not None:
            with contextlib.suppress(OSError, RelabelError):  # what stays costs a while apart, no row
                self._end(shard, journal, crash)
        self.forgets(shard)

    def _end(self, shard: int, journal: _Shard, crash: str | None) -> None:
        if crash is not None:
            self._write(shard, reason=crash)
        elif journal.isolation.cases:
            journal.begun = set()
            journal.written = set()
            journal.trying = None
            self._write(shard)
        else:
            self._store.remove(_name(shard))

    def hangs(self, reason: str) -> None:
        """This process is about to be ended, since its engine does not return; called from the watchdog's thread."""
        with contextlib.suppress(OSError, RelabelError):
            for shard, journal in list(self._shards.items()):
                if journal.written is not None:
                    self._write(shard, reason=reason)

    def forgets(self, shard: int) -> None:
        """A shard's lock was lost to another worker, whose journal it is now."""
        self._shards.pop(shard, None)

    def begins(self, work: ChunkWork) -> None:
        """Write down that the chunk is under way, and note which of its rows are suspects."""
        journal = self._shards.get(work.id.shard)
        if journal is None or not work.left:  # its lock was lost, or all its rows are reused
            return
        with self._guard:
            journal.begun.add(work.id.chunk)
        if journal.written is None or work.id.chunk not in journal.written:
            self._write(work.id.shard, ahead_of=work.id.chunk)
        case = journal.isolation.cases.get(_key(work.id))
        if case is not None:
            _set_apart(work, case)
            for index, why in work.isolated_rows.items():
                logger.warning("row %d goes to quarantine as `engine`: %s", work.pairs[index].row_id, why)

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        """Write down which rows are asked with nothing else in flight; the engine is proven to work."""
        journal = self._shards.get(work.id.shard)
        if journal is not None:
            rows = [work.pairs[index].row_id for index in indexes]
            journal.trying = (work.id.chunk, rows)
            journal.left = set(rows)
            self._write(work.id.shard)

    def ends(self, work: ChunkWork, index: int) -> None:
        """A row has its outcome. Once all rows that were asked apart have theirs, they are as good as any."""
        journal = self._shards.get(work.id.shard)
        if journal is None or not journal.left:
            return
        journal.left.discard(work.pairs[index].row_id)
        if not journal.left and journal.trying is not None:
            journal.isolation.cleared(_key(work.id), journal.trying[1])
            journal.trying = None
            self._write(work.id.shard)

    def rests(self, work: ChunkWork) -> None:
        """All rows of the chunk have their outcome; no crash from now on is about them."""
        journal = self._shards.get(work.id.shard)
        if journal is not None:
            with self._guard:
                journal.begun.discard(work.id.chunk)
                if journal.written is not None:
                    journal.written.discard(work.id.chunk)

    def commits(self, work: ChunkWork) -> None:
        """The chunk is durable; called from a commit thread. The file need not follow: a receipt says as much."""
        journal = self._shards.get(work.id.shard)
        if journal is not None:
            with self._guard:
                journal.begun.discard(work.id.chunk)
                journal.isolation.committed(_key(work.id))

    def _write(self, shard: int, *, ahead_of: int | None = None, reason: str | None = None) -> None:
        """Write a shard's journal.

        Args:
            ahead_of: write down this chunk and the next ones, too, instead of those that were written before.
        """
        journal = self._shards[shard]
        with self._guard:
            if ahead_of is None:
                others = journal.written or set()
            else:
                ahead = (chunk for chunk in journal.todo if chunk >= ahead_of)
                others = set(itertools.islice(ahead, self._ahead))
            journal.written = journal.begun | others
            chunks = sorted(journal.todo.keys() & journal.written)
            record = _Record(
                version=VERSION,
                worker=self._worker,
                begun=[_key(ChunkId(shard, chunk, journal.todo[chunk])) for chunk in chunks],
                trying=journal.trying,
                isolation=journal.isolation,
                reason=reason and redacted(reason).rstrip("."),
            )
            values = plain(record)
        self._store.put(_name(shard), readable_json(values), is_synced=False)


def _set_apart(work: ChunkWork, case: ChunkCase) -> None:
    """Note in a chunk which of its rows are asked apart, and which are not asked any more."""
    index_of = {pair.row_id: index for index, pair in enumerate(work.pairs)}
    groups = ([index_of[row] for row in group if row in index_of] for group in case.groups)
    work.apart = [group for group in groups if group]
    work.isolated_rows = {index_of[row]: why for row, why in case.isolated_rows.items() if row in index_of}
    # if two rows of a query crashed an engine and none was answered since, it is the query's own text: its other rows
    # would each cost two engines more
    suspects = {*work.isolated_rows, *itertools.chain.from_iterable(work.apart)}
    cleared = {pair.query_id for index, pair in enumerate(work.pairs) if index not in suspects}
    caught = Counter(work.pairs[index].query_id for index in work.isolated_rows)
    for index, pair in enumerate(work.pairs):
        count = caught[pair.query_id]
        if count > 1 and pair.query_id not in cleared:
            why = f"the engine went down over {count} other rows of its query"
            work.isolated_rows.setdefault(index, why)


def _chunks_named(keys: list[str]) -> set[int]:
    """The chunks of a journal's keys; what is none is left out."""
    numbers = (key.partition(".")[0] for key in keys)
    return {int(number) for number in numbers if number.isdecimal()}


def crashed_apart(store: Store, worker: str) -> bool:
    """Whether the journals of a worker that is gone say that its engine crashed over rows that were asked apart, which
    narrows them down.
    """
    for name in store.names(FOLDER):
        record = _read(store, name)
        if record is not None and record.worker == worker and record.trying is not None:
            return True
    return False


def _read(store: Store, name: str) -> _Record | None:
    """A journal; None if there is none, or it can't be read, which costs crashes and no row."""
    with contextlib.suppress(ValueError):
        values = json.loads(read_if_there(store, name) or b"{}")
        if version_of(values) == VERSION:
            return checked(_Record, values)
    return None


def _key(chunk: ChunkId) -> str:
    return f"{chunk.chunk}.{chunk.attempt}"


def _name(shard: int) -> str:
    return f"{FOLDER}/shard-{shard:05d}.json"
