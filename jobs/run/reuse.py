"""Reuse: labels of earlier outputs, asks shared between rows, and answers kept for the run that continues."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

from relabel.jobs.job import Job
from relabel.jobs.run.chunks import ChunkWork, Trajectory, asked_again
from relabel.jobs.run.progress import RefusedAnswer
from relabel.manifests.asks import Answer, Ask, EngineFacts
from relabel.manifests.errors import ConfigError, RelabelError, VerdictError
from relabel.manifests.files import place_of
from relabel.manifests.label_sets import is_run
from relabel.manifests.labels import Pair
from relabel.manifests.plan import ChunkId, Plan, ReusedRows, recipe_digest
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.reuse import (
    AnswerKeys,
    EarlierOutput,
    KnownLabels,
    RowPlace,
    open_earlier,
    shared_answers,
)
from relabel.manifests.run import engines_differ, labeler_columns
from relabel.manifests.secrets import redacted_values
from relabel.manifests.store import Store, map_concurrent, read_if_there

# ------------------------------------------------------------------------------
# A run that takes labels over: which earlier outputs, which rows of a chunk, and the answers that
# go along with them.


def earlier_outputs(job: Job) -> list[EarlierOutput]:
    """The outputs that a job reuses, opened, in order of precedence.

    Raises:
        ConfigError: the job reuses its own output, or one twice.
        ManifestError: a path holds no run.
    """
    seen: set[str] = {place_of(job.spec.output)}
    paths = list(job.spec.reuse)
    for path in paths:
        if place_of(path) in seen:
            what = "is the job's own output" if place_of(path) == place_of(job.spec.output) else "is given twice"
            raise ConfigError(f"{job.where}: `reuse`: {path} {what}. Name outputs of earlier runs, each once.")
        seen.add(place_of(path))
    if job.spec.cascade is not None and place_of(calibration := job.spec.cascade.calibration) not in seen:
        paths += [calibration] if is_run(calibration, job.storage) else []
    return [open_earlier(path, job.storage) for path in paths]


class AnswerCache(AnswerKeys):
    """Answers that rows share: found in earlier outputs, kept for later ones."""

    def __init__(self, plan: Plan, outputs: list[EarlierOutput]) -> None:
        super().__init__(plan.parts)
        self.known = shared_answers(outputs)


class Reuse:
    """What a run reuses of earlier outputs.

    Args:
        outputs: as `earlier_outputs` opened them.
    """

    def __init__(self, job: Job, plan: Plan, outputs: list[EarlierOutput]) -> None:
        self.job = job
        self.outputs = outputs
        self.labels = KnownLabels(outputs, recipe_digest(plan.parts), labeler_columns(plan.parts))
        self.answer_cache = AnswerCache(plan, outputs)
        self._first_is_shared = any(ask.shared_by is not None for ask in job.labeler.probe()[:1])

    def fill(self, work: ChunkWork) -> int:
        """Settle the rows of a chunk whose labels are known. Returns how many.

        Raises:
            ManifestError: a file of an earlier output is missing or is not the one committed.
        """
        keys = [key for key in work.keys if key is not None]
        known = [(index, place) for index, place in enumerate(self.find(work.pairs, keys)) if place is not None]
        rows = self.labels.take([place for _, place in known])
        for (index, place), row in zip(known, rows, strict=True):
            pair = work.pairs[index]
            work.take_over(
                index,
                row._replace(row_id=pair.row_id, query_id=pair.query_id, doc_id=pair.doc_id, reused=True),
                place.output,
            )
        if self._first_is_shared:
            self._carry(work, [index for index, _ in known])
        return len(known)

    def find(self, pairs: Sequence[Pair], keys: Sequence[bytes]) -> list[RowPlace | None]:
        """Where the label of each row lies; None for one that is to be asked.

        Rows of a query that take their labels from one answer are reused all together, from the one file that an
        attempt left, or not at all: else labels of two different answers would lie side by side.
        """
        places = self.labels.find(keys)
        if not self.job.reads.siblings:
            return places
        files: dict[str, set[int]] = {}
        for pair, place in zip(pairs, places, strict=True):
            files.setdefault(pair.query_id, set()).add(-1 if place is None else place.file)
        return [place if len(files[pair.query_id]) == 1 else None for pair, place in zip(pairs, places, strict=True)]

    def sources(self, work: ChunkWork) -> list[ReusedRows]:
        """What a chunk's receipt says of its rows that were reused."""
        return [self.outputs[number].taken(rows) for number, rows in sorted(work.sources.items()) if number >= 0]

    def _carry(self, work: ChunkWork, indexes: list[int]) -> None:
        """Keep the shared answers that reused rows were labelled by, so that a run that reuses this
        output has them too.
        """
        seen: set[tuple[Any, ...]] = set()
        for index in indexes:
            pair = work.pairs[index]
            group = (pair.query_id, pair.query, pair.context, repr(pair.columns))
            if group in seen:
                continue
            seen.add(group)
            try:
                first = next(self.job.labeler.label(pair))
            except (StopIteration, VerdictError):
                continue
            for sample in range(self.job.spec.labeler.samples):
                ask = first
                for attempt in range(self.job.spec.labeler.attempts):
                    found = self.answer_cache.known.get(self.answer_cache.key(ask, work.round, sample, attempt))
                    if found is None:
                        break
                    work.answers.append(found)
                    if attempt == 0:
                        ask = asked_again(ask, self.job.spec.labeler)


# ------------------------------------------------------------------------------
# Asks that several rows share: each is asked once, by its key, and its answer is kept for a while, for rows to come
# and for later runs.


SHARED_ANSWERS_KEPT = 4096
"""Answers kept for pairs still to come; rows of a query lie together, so a few would do."""


class AskKeys:
    """Identities of asks under one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._static: dict[object, bytes] = {}
        self._last: tuple[Ask, tuple[int, ...], bytes] | None = None

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """Identity of an ask, 16 bytes: what is asked, for which sample and attempt, under which seed. The seed is its
        first 63 bits.

        The answer's format is left out: it follows from the stage's name, the decisions and the labeler, which the
        fingerprint names.
        """
        last, which = self._last, (round_number, sample, attempt)
        if last is not None and last[0] is ask and last[1] == which:
            return last[2]  # thousands of rows may share one ask of a hundred thousand characters
        static = (ask.stage, ask.max_tokens, ask.prefill, ask.sampling, ask.decisions, *which)
        head = self._static.get(static)
        if head is None:
            head = self._static[static] = f"{self._seed}|{static!r}".encode()
        parts = [] if ask.shared_by is None else [ask.shared_by]
        for message in ask.messages:
            text = "\x1f".join(message.parts)
            parts += ("\x1e", message.role, str(len(text)), text)
        digest = blake2b(head + "".join(parts).encode("utf-8", "surrogatepass"), digest_size=16)
        self._last = ask, which, digest.digest()
        return self._last[2]


@dataclass(slots=True, eq=False)
class SharedAsk:
    """A shared ask: who waits for it, then its answer; and what the answer is kept under."""

    answer: Answer | None = None
    kept_as: bytes | None = None
    waiters: list[Trajectory] = field(default_factory=list)


class SharedAsks(OrderedDict[bytes, SharedAsk]):
    """Shared asks by key; those answered last are at the end."""

    def forget_old(self) -> None:
        """Keep `SHARED_ANSWERS_KEPT` at most, and all that are in flight."""
        while len(self) > SHARED_ANSWERS_KEPT:
            key, oldest = next(iter(self.items()))
            if oldest.answer is None:
                # still in flight: it moves to the end once answered, and the next answer sweeps again
                return
            del self[key]


# ------------------------------------------------------------------------------
# Answers of chunks that a run left unfinished: kept in `refused/`, so that the run that continues need not ask them
# again. Those that could not be read are listed for people too.
#
# A committed chunk has its own in its files, and the file here is no longer looked at. Nothing depends on one.


logger = logging.getLogger(__name__)

FOLDER = "refused"
VERSION = 2
_NAME = re.compile(FOLDER + r"/shard-(\d{5,})/chunk-(\d{6,})\.(\d+)\.json")


@dataclass(frozen=True, slots=True)
class _Kept:
    """`engine` gave the answers in `answered`, by the hex of their ask's key; `refused` of them could not be read."""

    version: int
    fingerprint: str
    engine: dict[str, Any]
    refused: list[RefusedAnswer]
    answered: dict[str, Answer]


def keep_answers(store: Store, fingerprint: str, engine: EngineFacts | None, unfinished: Sequence[ChunkWork]) -> None:
    """Write down the answers of chunks that stay open. What can't be written is warned of, once."""

    def keep(work: ChunkWork) -> None:
        answered = {key.hex(): replace(answer, detail="", raw="") for key, answer in work.answered.items()}
        values = plain(_Kept(VERSION, fingerprint, asdict(engine) if engine else {}, work.refused, answered))
        # an answer stays as the model wrote it, as in a label: what is read of it again is the same
        values["refused"] = redacted_values(values["refused"])
        store.put(_name(work.id), readable_json(values))

    try:
        for _ in map_concurrent(store, keep, [work for work in unfinished if work.refused or work.answered]):
            pass
    except (OSError, RelabelError, ValueError) as exc:
        logger.warning("%s/%s: answers can't be kept (%s); they are asked again", store.root, FOLDER, exc)


def known_answers(store: Store, fingerprint: str, engine: EngineFacts | None, chunk: ChunkId) -> dict[bytes, Answer]:
    """Answers of a chunk that need not be asked again, by the key of their ask; none that another engine gave."""
    kept = _load(store, fingerprint, _name(chunk))
    if kept is None or engine is None or engines_differ([kept.engine, asdict(engine)]):
        return {}
    return {bytes.fromhex(key): answer for key, answer in kept.answered.items()}


def _load(store: Store, fingerprint: str, name: str) -> _Kept | None:
    """What a file holds; None where it is another version's or another job's, damaged, or gone."""
    with contextlib.suppress(ValueError):
        held = json.loads(read_if_there(store, name) or b"{}")
        if version_of(held) == VERSION and (kept := checked(_Kept, held)).fingerprint == fingerprint:
            return kept
    return None


def _name(chunk: ChunkId) -> str:
    return f"{FOLDER}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}.{chunk.attempt}.json"


def listed(store: Store) -> Iterator[tuple[str, ChunkId]]:
    """Files by name, with their chunk; what others laid there is left alone."""
    for name in store.etags(FOLDER):
        if found := _NAME.fullmatch(name):
            yield name, ChunkId(*map(int, found.groups()))
