"""Which chunks a worker has under way, written down before their rows are asked, so that whoever takes a shard next
knows what the engine was at when its worker was killed, and asks those rows apart (`isolation.py` decides how).

A shard's journal has one writer, the holder of the shard's lock, who removes it when the shard is let go in order. So a
journal that is found under a lock just taken is that of a worker that went down, whatever the host, process number or
scheduler. A reboot, a preemption, or a worker paused for longer than its lease look the same: their rows are asked
apart once, and are then as good as any.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relabel.jobs.running.chunks import ChunkWork
from relabel.jobs.running.isolation import Isolation
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import EngineLostError, RelabelError
from relabel.manifests.records import version_of
from relabel.manifests.runs.receipts import ChunkId
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there

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
