"""Answers that are not committed yet, written down as they come, so that a kill costs a second of them at most and a
stop none: the output's `journal/`.

Each worker appends to files of its own, `journal/shard-00003/<worker>-0000.jsonl`: a header, then a line a flush, which
holds the answers since the last, each found by its chunk and by the key of its ask. Every line ends with the sha256 of
the header and itself; a line that is torn or changed is not used, and its asks are asked again. Where a store can't
append, each flush is a file.

A worker that takes a shard over reads the files of all workers before it. A file goes when the chunks in it are
committed, or with the run's end. Nothing depends on one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from relabel.jobs.run.chunks import ChunkWork, FreshAnswer
from relabel.manifests.asks import Answer, Distribution, EngineFacts
from relabel.manifests.errors import ManifestError, RelabelError
from relabel.manifests.plan import ChunkId
from relabel.manifests.records import checked, read_in_threads, version_of
from relabel.manifests.run_manifest import engines_differ
from relabel.manifests.secrets import redacted
from relabel.manifests.store import LocalStore, Store, map_concurrent, read_if_there

logger = logging.getLogger(__name__)

FOLDER = "journal"
VERSION = 2
VERSION_BY_LINE = 1
"""Of files that hold an answer a line; they are read, too."""
APPEND_EVERY_S = 0.5
"""Seconds between two flushes to a disk. More often, and answers are written that are committed a moment later."""
PUT_EVERY_S = 0.75
"""Seconds between two flushes to a store, where each is a request that is paid for: with a turn of the loop between,
what a kill loses is a second's answers.
"""
FEW_ANSWERS = 16
PUT_FEW_EVERY_S = 5.0
"""To a store, fewer answers than these wait for so long."""
FILE_BYTES = 4 << 20
"""A file that is longer is not appended to, so that it can go once its chunks are committed."""
_NAME = re.compile(FOLDER + r"/shard-(\d{5,})/[^/]+-\d{4,}\.jsonl")
_SEAL = b', "'
_ENCODER = json.JSONEncoder(check_circular=False)
COLUMNS = (
    "chunk",
    "key",
    "text",
    "finish",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "distributions",
    "flags",
    "detail",
    "raw",
)
"""Of an answer; not named in each, which took as long as all the rest of it."""

FreshByChunk = dict[ChunkId, list[FreshAnswer]]
_DISTRIBUTIONS = COLUMNS.index("distributions")
_FLOATS = "<f8"

IsBelieved = Callable[[str, int], bool]
"""Whether an answer of a stage that could not be read may be kept; by the number of asks that were seen there by
then.
"""


@read_in_threads
@dataclass(frozen=True, slots=True)
class _Header:
    """What a file's first line holds: for which plan its answers are, who gave them, and who wrote them down."""

    version: int
    columns: tuple[str, ...]
    fingerprint: str
    engine: dict[str, Any]
    worker: str


@dataclass(slots=True)
class _File:
    """A file of the journal.

    Args:
        chunks: of the answers in it, those that are not committed.
        size_bytes: as far as this worker wrote it.
    """

    chunks: set[ChunkId] = field(default_factory=set)
    size_bytes: int = 0


class AnswerJournal:
    """The journal of one worker and one engine.

    Files are written by a thread of its own, so that no store keeps the engine waiting. What can't be written is warned
    of, once.

    Args:
        fingerprint: of the plan.
        engine: whose answers these are; those of another are not used.
        attempts: those that are committed, by chunk of a shard.
    """

    def __init__(
        self,
        store: Store,
        fingerprint: str,
        engine: EngineFacts,
        worker: str,
        *,
        attempts: Callable[[int], Mapping[int, Sequence[int]]],
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._fingerprint = fingerprint
        self._engine = asdict(engine)
        header = asdict(_Header(VERSION, COLUMNS, fingerprint, self._engine, worker))
        self._header = _sealed([header], hashlib.sha256())
        self._seal = hashlib.sha256(self._header)
        self._prefix = f"{worker}-{secrets.token_hex(4)}"
        self._every_s = APPEND_EVERY_S if isinstance(store, LocalStore) else PUT_EVERY_S
        self._next_s = time.perf_counter() + self._every_s
        self._flushed_s = time.perf_counter()
        self._open: dict[ChunkId, ChunkWork] = {}
        self._committed: deque[ChunkId] = deque()
        self._known: dict[ChunkId, dict[bytes, Answer]] = {}
        self._shard_read: int | None = None
        self._guard = threading.Lock()
        self._files: dict[str, _File] = {}
        self._current: dict[int, str] = {}
        self._num_files = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writing: Future[None] | None = None
        self._has_warned = False

    def begins(self, work: ChunkWork) -> None:
        """Note that a chunk's answers are to be kept from here on, and give it those that are there."""
        if self._shard_read != work.id.shard:
            self._known = self._read(work.id.shard)
            self._shard_read = work.id.shard
        work.known = self._known.pop(work.id, {})
        self._open[work.id] = work

    def commits(self, work: ChunkWork) -> None:
        """The chunk is durable; called from a commit thread."""
        self._open.pop(work.id, None)  # not at the next flush: until then its texts would lie in memory
        self._committed.append(work.id)

    def update(self, is_believed: IsBelieved) -> None:
        """Write down what has come since, if it is time; cheap enough to be called at each turn of the loop."""
        now_s = time.perf_counter()
        if now_s < self._next_s:
            return
        if self._writing is not None and not self._writing.done():
            return
        self._next_s = now_s + self._every_s
        if self._may_wait(now_s):
            return
        self._flushed_s = now_s
        self.flush(is_believed)

    def _may_wait(self, now_s: float) -> bool:
        """Whether so little has come that it is not worth a request."""
        if isinstance(self._store, LocalStore) or now_s >= self._flushed_s + PUT_FEW_EVERY_S:
            return False
        return sum(len(work.fresh) for work in list(self._open.values())) < FEW_ANSWERS

    def close(self) -> None:
        """Wait until all is written, and remove what is of no use any more."""
        self._thread.submit(self._write, {}, self._take_committed())
        self._thread.shutdown()

    def flush(self, is_believed: IsBelieved) -> None:
        """Write down all that has come and is not committed."""
        committed = self._take_committed()
        fresh: FreshByChunk = {}
        for work in list(self._open.values()):  # commit threads take theirs out
            believed = list[FreshAnswer]()
            doubtful = list[FreshAnswer]()
            for answer in work.fresh:
                doubt = answer[2]
                if doubt is None or is_believed(*doubt):
                    believed.append(answer)
                else:
                    doubtful.append(answer)
            work.fresh = doubtful
            if believed:
                fresh[work.id] = believed
        if fresh or committed:
            self._writing = self._thread.submit(self._write, fresh, committed)

    def _take_committed(self) -> set[ChunkId]:
        """The chunks that were committed since the last call."""
        committed = set[ChunkId]()
        while self._committed:
            committed.add(self._committed.popleft())
        return committed

    def _write(self, fresh: FreshByChunk, committed: set[ChunkId]) -> None:
        by_shard: dict[int, FreshByChunk] = {}
        for chunk, answers in fresh.items():
            by_shard.setdefault(chunk.shard, {})[chunk] = answers
        try:
            for shard, some in by_shard.items():
                self._append(shard, some)
            self._remove_committed(committed)
        except (OSError, RelabelError, ValueError, TypeError, OverflowError) as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s/%s: answers can't be kept (%s); a stop or a kill has them asked again",
                    self._store.root,
                    FOLDER,
                    exc,
                )

    def _append(self, shard: int, fresh: FreshByChunk) -> None:
        lines = _sealed(_record(fresh), self._seal)
        name = self._current.pop(shard, None)  # put back once it is written: nothing follows a line that may be torn
        is_new = name is None
        if name is None:
            name = f"{FOLDER}/shard-{shard:05d}/{self._prefix}-{self._num_files:04d}.jsonl"
            self._num_files += 1
            lines = self._header + lines
        with self._guard:
            file = self._files.setdefault(name, _File())
        if isinstance(self._store, LocalStore):
            self._store.append(name, lines, is_new=is_new)
        else:
            self._store.put(name, lines)
        file.size_bytes += len(lines)
        file.chunks.update(fresh)
        if isinstance(self._store, LocalStore) and file.size_bytes < FILE_BYTES:
            self._current[shard] = name

    def _remove_committed(self, committed: set[ChunkId]) -> None:
        """Remove the files that hold nothing but answers of committed chunks."""
        with self._guard:
            files = dict(self._files)
        for name, file in files.items():
            file.chunks -= committed
            if file.chunks:
                continue
            self._current = {shard: current for shard, current in self._current.items() if current != name}
            with self._guard:
                del self._files[name]
            self._store.remove(name)

    def _read(self, shard: int) -> dict[ChunkId, dict[bytes, Answer]]:
        """All answers that workers before this one kept of a shard's open chunks, by chunk and key."""
        known: dict[ChunkId, dict[bytes, Answer]] = {}
        names = list(journal_files(self._store, shard))
        committed = self._attempts(shard) if names else {}
        for name, data in zip(names, map_concurrent(self._store, self._read_file, names), strict=True):
            entries = list(self._entries_of(data))
            if not entries:  # damaged, or another engine's, which may be asked again one day
                continue
            file = _File()
            for values in entries:
                place, key, *answer = values
                number, _, attempt = place.partition(".")
                chunk = ChunkId(shard, int(number), int(attempt))
                if chunk.attempt in committed.get(chunk.chunk, ()):
                    continue
                file.chunks.add(chunk)
                known.setdefault(chunk, {})[bytes.fromhex(key)] = _answer(answer)
            with self._guard:
                self._files.setdefault(name, file)
        return known

    def _read_file(self, name: str) -> bytes:
        with contextlib.suppress(ManifestError):  # no ordinary file
            return read_if_there(self._store, name) or b""
        return b""

    def _entries_of(self, data: bytes) -> Iterator[list[Any]]:
        """The answers in the lines of a file that are whole, if it is for this plan and engine."""
        header, lines = _whole_lines(data)
        if header is None or header.fingerprint != self._fingerprint:
            return
        if engines_differ([header.engine, self._engine]):
            return
        for values in lines:
            if header.version == VERSION_BY_LINE:
                yield values
            else:
                yield from _answers_of(values)


def _whole_lines(data: bytes) -> tuple[_Header | None, Iterator[list[Any]]]:
    """A file's header, None where it can't be read, and the values of its further lines that are whole."""
    first, _, rest = data.partition(b"\n")
    try:
        (values,) = _unsealed(first + b"\n", hashlib.sha256())
        if version_of(values) not in (VERSION, VERSION_BY_LINE):
            return None, iter(())
        header = checked(_Header, values)
    except ValueError:
        return None, iter(())

    def lines() -> Iterator[list[Any]]:
        seal = hashlib.sha256(first + b"\n")
        for line in rest.splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                yield _unsealed(line, seal)

    return header, lines()


def num_kept(store: Store, fingerprint: str, attempts: Mapping[int, Mapping[int, Sequence[int]]]) -> int:
    """How many answers are kept for a plan and not committed, whichever engine gave them; one for each ask.

    Args:
        attempts: those that are committed, by shard and chunk.
    """
    asks = set[tuple[int, str, str]]()
    for name in journal_files(store):
        parts = _NAME.fullmatch(name)
        assert parts is not None
        shard = int(parts[1])
        data = b""
        with contextlib.suppress(ManifestError):  # no ordinary file
            data = read_if_there(store, name) or b""
        header, lines = _whole_lines(data)
        if header is None or header.fingerprint != fingerprint:
            continue
        for values in lines:
            for place, key, *_ in [values] if header.version == VERSION_BY_LINE else values[1:]:
                chunk, _, attempt = place.partition(".")
                if int(attempt) not in attempts.get(shard, {}).get(int(chunk), ()):
                    asks.add((shard, place, key))
    return len(asks)


def journal_files(store: Store, shard: int | None = None) -> Iterator[str]:
    """Names of the files of a shard, or of all; what others laid there is left alone."""
    folder = FOLDER if shard is None else f"{FOLDER}/shard-{shard:05d}"
    for name in store.names(folder):
        if _NAME.fullmatch(name):
            yield name


def _answer(values: Sequence[Any]) -> Answer:
    """An answer as the engine gave it; its request is nobody's."""
    text, finish, prompt_tokens, output_tokens, cached_tokens, distributions, flags, detail, raw = values
    return Answer(
        -1,
        text,
        finish,
        {name: Distribution(tuple(probs), outside_mass) for name, (probs, outside_mass) in distributions.items()},
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        detail=detail,
        flags=tuple(flags),
        raw=raw,
    )


def _record(fresh: FreshByChunk) -> list[Any]:
    """What a line holds: the probabilities of all its answers, packed, since decimals took as long as all the rest;
    then the answers, each in the order of `COLUMNS`, with the lengths of its distributions in place of these.
    """
    numbers = list[float]()
    answers = list[list[Any]]()
    for chunk, some in fresh.items():
        place = f"{chunk.chunk}.{chunk.attempt}"
        for key, answer, _ in some:
            lengths = dict[str, int]()
            for name, distribution in answer.distributions.items():
                lengths[name] = len(distribution.probs)
                numbers += distribution.probs
                numbers.append(distribution.outside_mass)
            values = [
                place,
                key.hex(),
                answer.text,
                answer.finish,
                answer.prompt_tokens,
                answer.output_tokens,
                answer.cached_tokens,
                lengths,
                answer.flags,
                redacted(answer.detail) if answer.detail else "",
                answer.raw,
            ]
            answers.append(values)
    return [np.array(numbers, _FLOATS).tobytes().hex(), *answers]


def _answers_of(record: list[Any]) -> Iterator[list[Any]]:
    """The answers in a line, with their distributions."""
    packed, *answers = record
    numbers = iter(np.frombuffer(bytes.fromhex(packed), _FLOATS).tolist())
    for values in answers:
        lengths = values[_DISTRIBUTIONS]
        values[_DISTRIBUTIONS] = {
            name: (list(itertools.islice(numbers, length)), next(numbers)) for name, length in lengths.items()
        }
        yield values


def _sealed(values: list[Any], before: hashlib._Hash) -> bytes:
    """A line whose last value is the digest of what came before it and of the line without it.

    Args:
        before: a sha256 of the bytes before.
    """
    body = _ENCODER.encode(values).encode()  # ASCII: a text may hold what is no UTF-8
    return body[:-1] + _seal(body, before)


def _unsealed(line: bytes, before: hashlib._Hash) -> list[Any]:
    """A line's values, without the digest.

    Raises:
        ValueError: it is not as it was written.
    """
    head, _, _ = line.rpartition(_SEAL)
    body = head + b"]"
    if line != head + _seal(body, before):
        raise ValueError("it changed since it was written, or was not written to its end")
    values: list[Any] = json.loads(body)
    return values


def _seal(body: bytes, before: hashlib._Hash) -> bytes:
    """How a line ends."""
    digest = before.copy()
    digest.update(body)
    return _SEAL + digest.hexdigest().encode() + b'"]\n'
