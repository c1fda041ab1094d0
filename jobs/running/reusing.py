"""A run that takes labels over: which earlier outputs, which rows of a chunk, and the answers that
go along with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relabel.jobs.planning.jobs import Job
from relabel.jobs.running.chunks import ChunkWork
from relabel.jobs.running.trajectories import asked_again
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Pair
from relabel.manifests.runs.earlier_outputs import EarlierOutput, open_earlier
from relabel.manifests.runs.known_answers import KnownAnswers, answer_of
from relabel.manifests.runs.label_files import own_columns
from relabel.manifests.runs.label_keys import AnswerKeys, LabelKeys
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.receipts import ReusedRows
from relabel.manifests.runs.recipes import recipe_digest
from relabel.manifests.runs.reuse import KnownLabels, RowPlace
from relabel.manifests.schemas import AnswerRow, LabelRow
from relabel.manifests.storage.filesystems import place_of


def label_keys(job: Job, plan: Plan) -> LabelKeys:
    """Keys of a job's rows."""
    return LabelKeys(plan.parts, job.reads)


def earlier_outputs(job: Job) -> list[EarlierOutput]:
    """The outputs that a job reuses, opened, in order of precedence.

    Raises:
        ConfigError: the job reuses its own output, or one twice.
        ManifestError: a path holds no run.
    """
    seen: set[str] = {place_of(job.spec.output)}
    for path in job.spec.reuse:
        if place_of(path) in seen:
            what = "is the job's own output" if place_of(path) == place_of(job.spec.output) else "is given twice"
            raise ConfigError(f"{job.where}: `reuse`: {path} {what}. Name outputs of earlier runs, each once.")
        seen.add(place_of(path))
    return [open_earlier(path, job.storage) for path in job.spec.reuse]


class AnswerCache:
    """Answers that rows share: found in earlier outputs, kept for later ones."""

    def __init__(self, plan: Plan, outputs: list[EarlierOutput]) -> None:
        self._keys = AnswerKeys(plan.parts)
        self.known = KnownAnswers(outputs)

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """What equal asks have in common: see `manifests.runs.label_keys`."""
        return self._keys.key(ask, round_number, sample, attempt)

    def find(self, key: bytes) -> AnswerRow | None:
        """The answer of that key as it was kept; None if it is not known."""
        return self.known.find(key)

    def answer(self, key: bytes) -> Answer | None:
        """A known answer as an engine would give it."""
        row = self.known.find(key)
        return None if row is None else answer_of(row)


class Reuse:
    """What a run reuses of earlier outputs.

    Args:
        outputs: as `earlier_outputs` opened them.
    """

    def __init__(self, job: Job, plan: Plan, outputs: list[EarlierOutput]) -> None:
        self.job = job
        self.outputs = outputs
        self.labels = KnownLabels(outputs, recipe_digest(plan.parts), own_columns(plan.parts))
        self.answer_cache = AnswerCache(plan, outputs)
        self._first_is_shared = job.labeler.probe()[0].shared_by is not None

    def fill(self, work: ChunkWork) -> int:
        """Settle the rows of a chunk whose labels are known. Returns how many.

        Raises:
            ManifestError: a file of an earlier output is missing or is not the one committed.
        """
        keys = [key for key in work.keys if key is not None]
        known = [(index, place) for index, place in enumerate(self.find(work.pairs, keys)) if place is not None]
        rows = self.take([place for _, place in known])
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
        attempt left, or not at all: labels of another answer would come to be beside them.
        """
        places = self.labels.find(keys)
        if not self.job.reads.siblings:
            return places
        files: dict[str, set[int]] = {}
        for pair, place in zip(pairs, places, strict=True):
            files.setdefault(pair.query_id, set()).add(-1 if place is None else place.file)
        return [place if len(files[pair.query_id]) == 1 else None for pair, place in zip(pairs, places, strict=True)]

    def take(self, places: list[RowPlace]) -> list[LabelRow]:
        """The labels at some places."""
        return self.labels.take(places)

    def sources(self, work: ChunkWork) -> list[ReusedRows]:
        """What a chunk's receipt says of its rows that were reused."""
        return [self.outputs[number].taken(rows) for number, rows in sorted(work.sources.items())]

    def _carry(self, work: ChunkWork, indexes: list[int]) -> None:
        """Keep the shared answers behind rows that are reused, so that the next output has them though nobody asked
        for them here.
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
                    found = self.answer_cache.find(self.answer_cache.key(ask, work.round, sample, attempt))
                    if found is None:
                        break
                    work.answers.append(found)
                    if attempt == 0:
                        ask = asked_again(ask, self.job.spec.labeler)
