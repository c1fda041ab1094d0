"""Which rows crash the engine: what is concluded from deaths, and the crash journal that remembers them."""

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from relabel.jobs.run.chunks import ChunkWork
from relabel.manifests.errors import EngineLostError, RelabelError
from relabel.manifests.plan import ChunkId
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.secrets import redacted
from relabel.manifests.store import Store, read_if_there

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# What is concluded from deaths. Pure: no clock, no file, so that a thousand schedules of kills are tried in seconds.

PIECES = 16
"""Into how many groups rows are cut that were in flight at a death. Not halves: each crash costs the start of an engine
(a minute on a GPU) and each innocent group a few seconds, so that among 256 rows the one is found after 5 crashes
instead of 12.
"""
TIMES_CAUGHT = 2
"""How often a process must die while it asks a row and nothing else, before the row is to blame; more where deaths were
seen that no row explains.
"""
CHANCE = 1e-3
"""How probable it may be, at most, that kills at random hit a row so often while it was asked alone."""
VARIED = 4
"""How many asks about a made-up pair come before rows that are asked apart, at most, where these take long."""
MOST_DEATHS = 16
"""Deaths that are remembered while no row explains them; of more, the oldest counts as a kill from outside."""


@dataclass(slots=True)
class Death:
    """A process that ended with rows in flight.

    Args:
        rows: by chunk and attempt; without those that were answered since.
        num_apart: how many rows they were, if they were asked apart; 0 at ordinary work.
        reason: how the engine crashed; None if the process ended without a word, as one does that is killed from
            outside.
        is_explained: whether one of its rows is to blame.
    """

    rows: dict[str, list[int]]
    num_apart: int = 0
    reason: str | None = None
    is_explained: bool = False


@dataclass(slots=True)
class Isolation:
    """Which rows may have ended a process, and which did. Decides only; the journal keeps it, and the loop asks.

    A row that was in flight at one death without a word is asked like any other: most deaths are kills from outside.
    If it was in flight at two, or at one that the engine itself reported, it is a *suspect*: asked apart, after all
    other rows of its shard, in groups that get smaller with each death. It is to blame after `TIMES_CAUGHT` deaths of
    its own while nothing else was in flight, and while asks about a made-up pair were answered before it under the same
    conditions. It takes more deaths where others were seen that no row explains, and where rows are asked for so long
    that kills at random may well hit one twice. A row that is answered is as good as any.

    Row ids are unique in a run; chunks are named by number and attempt, as text.

    Args:
        deaths: the oldest first; those that all rows have survived are dropped.
        strays: deaths that no row explains: all their rows were answered since, or none was in flight.
        convicts: rows that an earlier attempt isolated; one more death is enough.
        isolated: rows that are not asked any more, by chunk, and why.
        num_isolated: of all chunks so far.
        lived_s: how long processes lived over this shard, seconds.
        num_trials: groups that were answered while they were asked apart, and the first ask before each about a
            made-up pair.
        trials_s: how long these took together, seconds.
    """

    deaths: list[Death] = field(default_factory=list)
    strays: int = 0
    convicts: list[int] = field(default_factory=list)
    isolated: dict[str, dict[int, str]] = field(default_factory=dict)
    num_isolated: int = 0
    lived_s: float = 0.0
    num_trials: int = 0
    trials_s: float = 0.0

    def died(self, rows: Mapping[str, Collection[int]], *, is_apart: bool, reason: str | None) -> None:
        """A process ended.

        Args:
            rows: in flight, by chunk; empty if nothing of the input was.
            is_apart: they were asked with nothing else in flight.
            reason: how the engine crashed, if anybody can say that.
        """
        in_flight = dict[str, list[int]]()
        for chunk, ids in rows.items():
            not_asked = set(self.isolated.get(chunk, {}))
            if not is_apart:  # suspects are not asked at ordinary work
                not_asked |= self.suspects(chunk)
            asked = [row for row in ids if row not in not_asked]
            if asked:
                in_flight[chunk] = asked
        if not in_flight:
            self.strays += 1
            return
        num_rows = sum(map(len, in_flight.values()))
        self.deaths.append(Death(in_flight, num_rows if is_apart else 0, reason))
        if is_apart and num_rows == 1:
            ((chunk, (row,)),) = in_flight.items()
            self._judge(chunk, row)
        unexplained = [death for death in self.deaths if not death.is_explained]
        if len(unexplained) > MOST_DEATHS:
            self.deaths.remove(unexplained[0])
            self.strays += 1

    def _judge(self, chunk: str, row: int) -> None:
        """A process ended while it asked this row alone: is it to blame?"""
        own = [death for death in self.deaths if row in death.rows.get(chunk, ())]
        alone = [death for death in own if death.num_apart == 1]
        if len(alone) < TIMES_CAUGHT + self.strays.bit_length():
            return
        is_silent = any(death.reason is None for death in alone) and row not in self.convicts
        if is_silent and self.share ** len(alone) > CHANCE:
            return
        reason = alone[-1].reason or REASON
        self.isolated.setdefault(chunk, {})[row] = (
            f"the engine went down {len(alone)} times while it was asked this row and nothing else: {reason}"
        )
        self.num_isolated += 1
        for death in own:
            death.is_explained = True
        self._drop(chunk, {row})

    @property
    def share(self) -> float:
        """How probable it is that a kill at random comes while one group is asked apart: at a rate of one kill more
        than no row explains, over the time that was seen.
        """
        if not self.num_trials or not self.lived_s:
            return 1.0
        return min(1.0, self.trials_s / self.num_trials * (self.strays + 1) / self.lived_s)

    def convict(self, rows: Mapping[str, Collection[int]]) -> None:
        """Rows, by chunk, that an earlier attempt isolated: they are asked alone, and one more death is enough."""
        for chunk, ids in rows.items():
            for row in ids:
                if row not in self.convicts:
                    self.convicts.append(row)
                    self.deaths.append(Death({chunk: [row]}, 1, EARLIER, is_explained=True))

    def took(self, seconds: float) -> None:
        """A group was answered that was asked apart, or the first ask about a made-up pair before it."""
        self.num_trials += 1
        self.trials_s += seconds

    @property
    def num_made_up(self) -> int:
        """How many asks about a made-up pair come before rows that are asked apart, at least. It differs from one
        process to the next: one that is killed at a fixed time after its start is not killed over the same row again.
        """
        return 1 + (self.strays + len(self.deaths)) % VARIED

    def passed(self, chunk: str, rows: Collection[int]) -> None:
        """Rows were answered: they are as good as any."""
        self._drop(chunk, rows)

    def committed(self, chunk: str) -> None:
        """A chunk is durable: nothing is open about its rows."""
        self.isolated.pop(chunk, None)
        self._drop(chunk, None)

    def _drop(self, chunk: str, rows: Collection[int] | None) -> None:
        """Take rows of a chunk, None for all, out of the deaths; what has none left is a stray, or explained."""
        for death in self.deaths:
            ids = death.rows.pop(chunk, [])
            left = [row for row in ids if rows is not None and row not in rows]
            if left:
                death.rows[chunk] = left
        self.strays += sum(not death.rows and not death.is_explained for death in self.deaths)
        self.deaths = [death for death in self.deaths if death.rows]

    def suspects(self, chunk: str) -> set[int]:
        """Rows of a chunk that are asked apart."""
        counts = Counter[int]()
        for death in self.deaths:
            is_enough = death.num_apart > 0 or death.reason is not None
            for row in death.rows.get(chunk, ()):
                counts[row] += 2 if is_enough else 1
        return {row for row, count in counts.items() if count > 1}

    def caught(self, chunk: str) -> set[int]:
        """Rows of a chunk that were in flight at a death while they were asked apart."""
        rows = (death.rows.get(chunk, []) for death in self.deaths if death.num_apart)
        return set(itertools.chain.from_iterable(rows))

    def groups(self, chunk: str) -> list[list[int]]:
        """The suspects of a chunk in the order in which they are asked: first those that were not asked apart yet, so
        that others pass before a row is tried again; then those over which processes died, the fewest first.
        """
        fresh = self._fresh(chunk)
        num_fresh = sum(len(self._fresh(other)) for other in self.chunks())
        groups = _pieces(fresh, num_fresh)
        known = set(fresh)
        apart = [death for death in reversed(self.deaths) if death.num_apart]
        for death in sorted(apart, key=lambda death: death.num_apart):
            rows = [row for row in death.rows.get(chunk, []) if row not in known]
            known.update(rows)
            groups += _pieces(rows, len(rows))
        return groups

    def _fresh(self, chunk: str) -> list[int]:
        return sorted(self.suspects(chunk) - self.caught(chunk))

    def chunks(self) -> set[str]:
        """Chunks of which something is known."""
        return {*itertools.chain.from_iterable(death.rows for death in self.deaths), *self.isolated}

    @property
    def num_suspects(self) -> int:
        """Of all chunks."""
        return sum(len(self.suspects(chunk)) for chunk in self.chunks())

    def turn(self, chunk: str) -> int:
        """When a chunk is asked: 0 among the first, 1 if it has suspects, 2 if processes died over these alone."""
        if not self.deaths or not self.suspects(chunk):
            return 0
        return 2 if self.caught(chunk) else 1


def _pieces(rows: Sequence[int], count: int) -> list[list[int]]:
    """Rows cut into groups of a sixteenth of so many."""
    size = max(1, -(-count // PIECES))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


# ------------------------------------------------------------------------------
# The crash journal.

FOLDER = "crashes"
VERSION = 4
AHEAD = 16
"""Chunks that are written down at a time if a write is a request to a store, the next ones among them."""
REASON = "its process ended without a word"
EARLIER = "an earlier attempt isolated it"
MOST_ISOLATED = 8
MOST_SHARE = 0.01
"""Rows of a shard that may be isolated, as a number and as a share of its rows; above both, it is not the rows."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What a journal says.

    Args:
        begun: chunks under way, by chunk and attempt.
        trying: the chunk and the rows that are asked with nothing else in flight, which may be none; None at ordinary
            work.
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
        lived_s: how long the workers before this one lived.
        begun: chunks under way.
        written: chunks that the file calls begun; None while there is no file.
        trying: the chunk and the rows that are asked with nothing else in flight; None at ordinary work.
        left: those of these rows that are not answered yet.
    """

    todo: Mapping[int, int]
    isolation: Isolation = field(default_factory=Isolation)
    lived_s: float = 0.0
    begun: set[int] = field(default_factory=set)
    written: set[int] | None = None
    trying: tuple[int, list[int]] | None = None
    left: set[int] = field(default_factory=set)


class CrashJournal:
    """Which chunks a worker has under way, written down before their rows are asked: `crashes/shard-00003.json`.

    A shard's journal has one writer, the holder of the shard's lock, who removes it when the shard is released in
    order. So a journal that is found under a lock just taken is that of a worker that crashed, whatever the host,
    process number or scheduler. So are those of a reboot, a preemption, or a worker paused for longer than its lease.
    `Isolation` decides what follows for the rows that it had in flight.

    Args:
        store: the run's output.
        worker: who writes.
        is_remote: the model runs elsewhere, where no row can end this process: one that ended without a word was
            killed.
    """

    def __init__(self, store: Store, worker: str, *, is_remote: bool = False) -> None:
        self._store, self._worker, self._is_remote = store, worker, is_remote
        self._ahead = AHEAD if store.readers > 1 else 1
        self._shards: dict[int, _Shard] = {}
        self._guard = threading.Lock()
        self._began_s = time.perf_counter() - time.process_time()  # what it took to start counts as life, too

    def opens(
        self,
        shard: int,
        todo: Mapping[int, int],
        rows_of: Callable[[int], list[int]],
        *,
        num_rows: int,
        convicts: Mapping[int, list[int]],
    ) -> list[list[int]]:
        """A shard's lock was taken: read what the worker before left, and decide which rows are asked apart.

        Args:
            todo: attempt by open chunk.
            rows_of: ids of the rows that a chunk asks.
            num_rows: of the shard.
            convicts: rows that an earlier attempt isolated, by chunk.
        Returns:
            The open chunks, in turns: those with suspects come after all others.
        Raises:
            EngineLostError: engines crashed over so many single rows that it is not the rows.
        """
        journal = _Shard(todo)
        self._shards[shard] = journal
        keys = {chunk: _key(ChunkId(shard, chunk, attempt)) for chunk, attempt in todo.items()}
        record = _read(self._store, _name(shard))
        if record is not None:
            journal.isolation = record.isolation
            journal.lived_s = record.isolation.lived_s
            journal.written = set()
            for gone in record.isolation.chunks() - set(keys.values()):
                record.isolation.committed(gone)
            self._conclude(shard, record, keys, rows_of)
        journal.isolation.convict({keys[chunk]: rows for chunk, rows in convicts.items() if chunk in keys})
        turns: list[list[int]] = [[], [], []]
        for chunk in sorted(todo):
            turns[journal.isolation.turn(keys[chunk])].append(chunk)
        journal.todo = {chunk: todo[chunk] for chunk in itertools.chain.from_iterable(turns)}
        if record is not None:
            num_isolated = journal.isolation.num_isolated
            if num_isolated > max(MOST_ISOLATED, MOST_SHARE * num_rows):
                raise EngineLostError(
                    f"shard {shard}: engines crashed over {num_isolated:,} single rows of {num_rows:,}, so it is not "
                    f"the rows. Mend the engine (its memory, its driver), then remove {self._store.root}/"
                    f"{_name(shard)} and run again."
                )
            self._write(shard)
        return turns

    def _conclude(
        self, shard: int, record: _Record, keys: Mapping[int, str], rows_of: Callable[[int], list[int]]
    ) -> None:
        """Tell `Isolation` of the death that a record shows, if it shows one."""
        under_way = [chunk for chunk, key in keys.items() if key in record.begun]
        if not under_way:
            return
        if self._is_remote and record.reason is None:
            return
        isolation = record.isolation
        in_flight = {keys[chunk]: rows_of(chunk) for chunk in under_way}
        if record.trying is not None:
            chunk, rows = record.trying
            in_flight = {keys[chunk]: rows} if chunk in under_way else {}
        isolation.died(in_flight, is_apart=record.trying is not None, reason=record.reason)
        num_suspects = isolation.num_suspects
        if num_suspects:
            logger.warning(
                "shard %d: earlier workers were killed, or their engine crashed, again and again over the same rows; "
                "%s rows are asked last, and apart",
                shard,
                f"{num_suspects:,}",
            )

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
        elif journal.isolation.chunks():
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
        was_apart = journal.trying is not None
        journal.trying = None
        with self._guard:
            journal.begun.add(work.id.chunk)
        if was_apart or journal.written is None or work.id.chunk not in journal.written:
            self._write(work.id.shard, ahead_of=work.id.chunk)
        _set_apart(work, journal.isolation)
        for index, why in work.isolated_rows.items():
            logger.warning("row %d goes to quarantine as `engine`: %s", work.pairs[index].row_id, why)

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        """Write down which rows are asked with nothing else in flight; none while made-up pairs are asked before."""
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
            with self._guard:
                journal.isolation.passed(_key(work.id), journal.trying[1])
            self.tries(work, [])

    def num_made_up(self, work: ChunkWork) -> int:
        """How many asks about a made-up pair come before rows that are asked apart, at least."""
        journal = self._shards.get(work.id.shard)
        return 1 if journal is None else journal.isolation.num_made_up

    def took(self, work: ChunkWork, seconds: float) -> None:
        """Note how long a group took that was asked apart, or an ask about a made-up pair."""
        journal = self._shards.get(work.id.shard)
        if journal is not None:
            journal.isolation.took(seconds)

    def goes_on(self, work: ChunkWork) -> None:
        """Write down that the other rows of the chunk are asked as usual."""
        journal = self._shards.get(work.id.shard)
        if journal is not None:
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
                ahead = itertools.dropwhile(lambda chunk: chunk != ahead_of, journal.todo)
                others = set(itertools.islice(ahead, self._ahead))
            journal.written = journal.begun | others
            journal.isolation.lived_s = journal.lived_s + time.perf_counter() - self._began_s
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


def _set_apart(work: ChunkWork, isolation: Isolation) -> None:
    """Note in a chunk which of its rows are asked apart, and which are not asked any more."""
    if not isolation.chunks():
        return
    key = _key(work.id)
    index_of = {pair.row_id: index for index, pair in enumerate(work.pairs)}
    caught = isolation.caught(key)
    groups = [[index_of[row] for row in group if row in index_of] for group in isolation.groups(key)]
    work.apart = _rest_of_queries_first(work, groups, caught)
    work.isolated_rows = {index_of[row]: why for row, why in isolation.isolated.get(key, {}).items() if row in index_of}
    # if two rows of a query are to blame, and processes died over each other one too, it is the query's own text: its
    # other rows would each cost two engines more
    blamed = Counter(work.pairs[index].query_id for index in work.isolated_rows)
    others = [index for index in range(len(work.pairs)) if index not in work.isolated_rows]
    cleared = {work.pairs[index].query_id for index in others if work.pairs[index].row_id not in caught}
    for index in others:
        query = work.pairs[index].query_id
        if blamed[query] > 1 and query not in cleared:
            work.isolated_rows[index] = f"the engine went down over {blamed[query]} other rows of its query"


def _rest_of_queries_first(work: ChunkWork, groups: list[list[int]], caught: set[int]) -> list[list[int]]:
    """The groups, but for queries of which processes died over two rows: it may be the query's own text, so the rows of
    it that were not tried yet are tried as one group, before all others.
    """
    died = Counter(pair.query_id for pair in work.pairs if pair.row_id in caught)
    rest_of = dict[str, list[int]]()
    others = list[list[int]]()
    for group in groups:
        others.append([])
        for index in group:
            pair = work.pairs[index]
            if died[pair.query_id] > 1 and pair.row_id not in caught:
                rest_of.setdefault(pair.query_id, []).append(index)
            else:
                others[-1].append(index)
    return [*rest_of.values(), *filter(None, others)]


def narrows_down(store: Store, worker: str) -> bool:
    """Whether the journals of a worker that is gone say that its death narrows suspects down: it asked rows apart, or
    rows that were in flight at an earlier death, too.
    """
    for name in store.names(FOLDER):
        record = _read(store, name)
        if record is None or record.worker != worker or not record.begun:
            continue
        in_question = record.isolation.deaths if record.trying is None else record.trying[1]
        if in_question:
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
