"""Chunks in progress: the walks of a labeler over their pairs, and the rows that come of them; and what is not asked
again: labels of earlier outputs, asks that rows share, and answers kept for the run that continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.job import Job
from relabel.jobs.run.progress import Progress, RefusedAnswer, StageSeen
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import merge_samples
from relabel.manifests.asks import Answer, Ask, Distribution, EngineFacts, Sampling
from relabel.manifests.errors import ConfigError, RelabelError, VerdictError
from relabel.manifests.files import place_of
from relabel.manifests.label_keys import AnswerKeys
from relabel.manifests.label_sets import is_run
from relabel.manifests.labels import KINDS, AnswerRow, Label, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import ChunkId, Plan, ReusedRows, recipe_digest
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.reuse import EarlierOutput, KnownLabels, RowPlace, open_earlier, shared_answers
from relabel.manifests.run_labels import labeler_columns
from relabel.manifests.run_manifest import engines_differ
from relabel.manifests.secrets import redacted_values
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.store import Store, map_concurrent, read_if_there

logger = logging.getLogger(__name__)


class ChunkWork:
    """A chunk from its first row read to its commit: its pairs, the rows that are in, and what its asks cost.

    `apart` are groups of places whose rows are asked before the others, each group with nothing else in flight: an
    engine crashed while it had them. `isolated_rows` are places whose rows are not asked any more, and why;
    `settled_rows` places whose rows stay as an earlier attempt left them. `doubts` are the stages at which rows failed
    that may not be to blame, each with the number of asks seen there by then; `lacks_answers` says whether some of
    them never got an answer.
    """

    __slots__ = (
        "answered",
        "answers",
        "apart",
        "asked",
        "doubts",
        "id",
        "isolated_rows",
        "keys",
        "known",
        "lacks_answers",
        "left",
        "pairs",
        "refused",
        "reused_answers",
        "round",
        "rows",
        "settled_rows",
        "sources",
        "stages",
        "started_clock",
        "started_s",
        "unread",
    )  # fmt: skip

    def __init__(self, chunk: ChunkId, pairs: list[Pair], keys: Sequence[bytes | None] | None = None) -> None:
        self.id = chunk
        self.keys = keys if keys is not None else [None] * len(pairs)
        # mixed into the seeds, so that a retried row draws other answers than it did in the run
        self.round = chunk.attempt - 1
        self.pairs = pairs
        self.rows: list[LabelRow | QuarantineRow | None] = [None] * len(pairs)
        self.left = len(pairs)
        self.asked = len(pairs)  # rows that are not reused
        self.stages: defaultdict[str, StageSeen] = defaultdict(StageSeen)
        self.apart: list[list[int]] = []
        self.isolated_rows: dict[int, str] = {}
        self.settled_rows: dict[int, QuarantineRow] = {}
        self.sources: Counter[int] = Counter()  # rows reused, by the number of the earlier output
        self.answers: list[AnswerRow] = []
        self.reused_answers = 0
        self.refused: list[RefusedAnswer] = []
        self.answered: dict[bytes, Answer] = {}  # by the key of their ask; those that rows share are left out
        self.known: dict[bytes, Answer] = {}  # likewise, of an execution that was stopped
        self.unread: set[bytes] = set()  # keys of those answers that could not be read
        self.doubts: dict[str, int] = {}
        self.lacks_answers = False
        self.started_s = time.perf_counter()
        self.started_clock = time.time()

    def row_without_asking(self, index: int) -> QuarantineRow | None:
        """The row of a pair that is not asked; None for one that is."""
        if (reason := self.isolated_rows.get(index)) is not None:
            pair = self.pairs[index]
            return QuarantineRow(pair.row_id, pair.query_id, pair.doc_id, "engine", reason, [], 0, 0)
        return self.settled_rows.get(index) or quarantined_text(self.pairs[index])

    def take_over(self, index: int, row: LabelRow, source: int) -> None:
        """Settle a row by a label of an earlier output; before the loop sees the chunk."""
        self.rows[index] = row
        self.sources[source] += 1
        self.left -= 1
        self.asked -= 1

    def forget_unread(self) -> None:
        """Have the asks whose answers could not be read asked again by the next execution, unlike all others."""
        for key in self.unread:
            self.answered.pop(key, None)

    def stage_counts(self) -> dict[str, dict[str, int]]:
        """Asks and tokens by stage, stages in order of name."""
        return {
            stage: {
                "asks": seen.answers,
                "prompt_tokens": seen.prompt_tokens,
                "cached_tokens": seen.cached_tokens,
                "output_tokens": seen.output_tokens,
            }
            for stage, seen in sorted(self.stages.items())
        }


def quarantined_text(pair: Pair) -> QuarantineRow | None:
    """The row of a pair whose text is not UTF-8; None for all others."""
    if not pair.broken_text:
        return None
    return QuarantineRow(
        row_id=pair.row_id,
        query_id=pair.query_id,
        doc_id=pair.doc_id,
        status="text",
        reason=pair.broken_text,
        tries=[],
        prompt_tokens=0,
        output_tokens=0,
    )


class ChunkLabeler(ABC):
    """Who labels chunks: a run loop, which asks an engine, or a student."""

    @abstractmethod
    def label_chunks(
        self,
        chunks: Iterator[ChunkWork | None],
        commit: Callable[[ChunkWork], bool],
        *,
        progress: Progress,
        stop: Stop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        """Label chunks until they run out or a stop is asked for.

        Args:
            chunks: what to label; None means "nothing just now", and is asked again once others were committed.
            commit: makes a finished chunk durable; called in a thread; returns False if another worker was first.
            progress: where answers and rows are counted.
            on_progress: called often, for progress display.
        Returns:
            True if all of them were committed, False if a stop left some undone.
        Raises:
            InputError: rows can't be read; raised once the chunks before them are committed.
            StoreError, DiskFullError: as they come; chunks that were complete are committed.
        """

    @property
    def unfinished(self) -> list[ChunkWork]:
        """Chunks that a stop or an error left open, with the answers that they have; none of who has no answers."""
        return []


# ------------------------------------------------------------------------------
# One walk of a labeler over one pair: what it asks next, and when it is asked again.


@dataclass(slots=True, eq=False)
class OpenPair:
    """A pair whose trajectories are under way; its row goes to `work.rows[index]`."""

    work: ChunkWork
    index: int
    pair: Pair
    outcomes: list[Trajectory] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sample of a pair: the labeler's generator, the answers it was sent, and what failed on the way.

    `label` is set at a good end, `failure` at a bad one; `refused_as` is the last answer's status if it was unreadable.
    """

    open: OpenPair
    sample: int
    generator: Generator[Ask, Answer, Label] | None = None
    answers: list[Answer] = field(default_factory=list)
    ask: Ask | None = None
    attempt: int = 0
    tries: list[dict[str, Any]] = field(default_factory=list)
    label: Label | None = None
    failure: VerdictError | None = None
    refused_as: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0

    def begin(self, labeler: Labeler) -> bool:
        """Take the first ask. True if there is one; False if the walk has ended without."""
        self.generator = labeler.label(self.open.pair)
        try:
            return self._step(None)
        except VerdictError as exc:
            self.failure = exc
            return False

    def take(self, answer: Answer, labeler: Labeler, options: LabelerOptions) -> bool:
        """Send an answer and take the next ask, or the same one again with another attempt number if the answer was
        unreadable.

        Returns:
            True if `ask` now wants an answer; False at the end, with `label` or `failure` set.
        """
        assert self.ask is not None
        self.refused_as = None
        self.prompt_tokens += answer.prompt_tokens
        self.output_tokens += answer.output_tokens
        for decision in self.ask.decisions:
            found = answer.distributions.get(decision.name)
            if found is not None and not _is_distribution(found, len(decision.labels)):
                answer = replace(
                    answer, finish="error", detail=f"the engine gave no probabilities at {decision.marker}: {found}"
                )
        try:
            return self._step(answer)
        except VerdictError as exc:
            return self._retry(answer, exc, labeler, options)

    def _step(self, answer: Answer | None) -> bool:
        assert self.generator is not None
        try:
            self.ask = next(self.generator) if answer is None else self.generator.send(answer)
        except StopIteration as end:
            self.label = end.value
            self.generator = None
            return False
        if answer is not None:
            self.answers.append(answer)
            self.attempt = 0
        return True

    def _retry(self, answer: Answer, error: VerdictError, labeler: Labeler, options: LabelerOptions) -> bool:
        assert self.ask is not None
        self.tries.append(
            {
                "stage": self.ask.stage,
                "attempt": self.attempt + 1,
                "finish": answer.finish,
                "text": answer.text or answer.raw,
                "reason": error.reason,
            }
        )
        self.attempt, self.refused_as = self.attempt + 1, error.status
        if self.attempt >= options.attempts or error.status == "overlong":
            self.failure = error
            self.generator = None
            return False
        # a generator that raised is spent: walk a new one through the good answers up to the stage that failed
        self.generator = labeler.label(self.open.pair)
        self.ask = next(self.generator)
        for earlier in self.answers:
            self.ask = self.generator.send(earlier)
        self.ask = asked_again(self.ask, options)
        return True


def asked_again(ask: Ask, options: LabelerOptions) -> Ask:
    """An ask as it is put a second time: drawn, since a greedy answer would only come again."""
    drawn = ask.sampling
    return replace(ask, sampling=Sampling(max(drawn.temperature, options.retry_temperature), drawn.top_p))


def _is_distribution(found: Distribution, num_labels: int) -> bool:
    """Numbers that can be probabilities. A model whose numbers overflow (float16, one long document) gives NaN, and
    NaN's argmax is 0.
    """
    # every comparison with NaN is false, so NaN fails here too
    return (
        len(found.probs) == num_labels
        and min(found.probs) >= 0.0
        and abs(sum(found.probs) - 1.0) < 1e-3
        and 0.0 <= found.outside_mass <= 1.0
    )


# ------------------------------------------------------------------------------
# What a labeler, ours or one from elsewhere, may put into the columns of its own: what they hold as it is.
#
# Checked at each label: Arrow would say so at the commit of a chunk alone, in its own words, cut 2.5 to 2, drop a key.


def _holds(kind: pa.DataType, value: Any) -> bool:
    """Whether a column of a kind keeps a value that is not None as it is."""
    if pa.types.is_list(kind):
        return isinstance(value, list | tuple | np.ndarray) and all(
            one is not None and _holds(kind.value_type, one) for one in value
        )
    if isinstance(value, bool | np.bool_) != pa.types.is_boolean(kind):
        return False
    try:
        kept = pa.scalar(value, kind).as_py()
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return False
    return math.isfinite(kept) if pa.types.is_floating(kind) else bool(kept == value)


def check_columns(label: Label, declared: Mapping[str, str], *, labeler: str) -> None:
    """Every value has a column in the label files that holds it; None is a missing value.

    Args:
        declared: the columns that the labeler declares, name → kind.
    Raises:
        ConfigError: names the labeler, and the keys that no column is declared for, or the column and its value's type.
    """
    held = label.columns
    if not isinstance(held, dict):
        raise ConfigError(
            f"labeler {labeler}: `Label.columns` is {type(held).__name__}; want a dict, empty where there is nothing "
            "to say."
        )
    if not held.keys() <= declared.keys():
        strange = ", ".join(sorted(map(str, held.keys() - declared.keys())))
        raise ConfigError(
            f"labeler {labeler}: `Label.columns` holds {strange}, for which it declares no column. It declares "
            f"{', '.join(declared) or 'none'}: add a `LabelColumn` to its `columns`."
        )
    for name, value in held.items():
        if value is not None and not _holds(KINDS[declared[name]], value):
            raise ConfigError(
                f"labeler {labeler}: `Label.columns[{name!r}]` is {type(value).__name__}, which its column of "
                f"{declared[name]} does not hold as it is."
            )


# ------------------------------------------------------------------------------
# The row that comes of a pair: a label or a row in quarantine, of all its trajectories.


def row_of(open_pair: OpenPair) -> LabelRow | QuarantineRow:
    """The row of a pair whose trajectories have all ended.

    With S samples a label needs more than half of them; the rest is flagged `samples_missing`. Tokens count every
    answer that the pair waited for, failed attempts and shared asks included.
    """
    pair, outcomes = open_pair.pair, sorted(open_pair.outcomes, key=lambda outcome: outcome.sample)
    labels = [outcome.label for outcome in outcomes if outcome.label is not None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    output_tokens = sum(outcome.output_tokens for outcome in outcomes)
    if 2 * len(labels) <= len(outcomes):
        failure = next(outcome.failure for outcome in outcomes if outcome.failure is not None)
        tries = [one for outcome in outcomes for one in outcome.tries]
        return QuarantineRow(
            pair.row_id, pair.query_id, pair.doc_id, failure.status, failure.reason, tries, prompt_tokens, output_tokens
        )
    label, samples = labels[0], None
    if len(outcomes) > 1:
        label = merge_samples(labels)
        samples = [
            {
                "status": "ok" if one.failure is None else one.failure.status,
                "grade": None if one.label is None else one.label.grade,
                "probs": list(found.probs) if found else None,
                "outside_mass": found.outside_mass if found else None,
            }
            for one in outcomes
            for found in [None if one.label is None else one.label.distribution]
        ]
        if len(labels) < len(outcomes):
            label.flags.append("samples_missing")
    distribution = label.distribution
    return LabelRow(
        row_id=pair.row_id,
        query_id=pair.query_id,
        doc_id=pair.doc_id,
        status="ok",
        grade=label.grade,
        probs=distribution.probs if distribution else None,
        outside_mass=distribution.outside_mass if distribution else None,
        expected_grade=distribution.expected if distribution else None,
        evidence=[span._asdict() for span in label.evidence],
        intent=label.intent,
        reasoning=label.reasoning,
        flags=label.flags,
        samples=samples,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        reused=False,
        key=open_pair.work.keys[open_pair.index],
        origin=None,
        columns=label.columns,
    )


# ------------------------------------------------------------------------------
# A run that takes labels over: which earlier outputs, which rows of a chunk, and the answers that
# go along with them.


def earlier_outputs(job: Job) -> list[EarlierOutput]:
    """The outputs that a job reuses, opened, in order of precedence.

    Raises:
        ConfigError: the job reuses its own output, or one twice.
        ManifestError: a path holds no run.
    """
    seen, paths = {place_of(job.spec.output)}, list(job.spec.reuse)
    for path in paths:
        if place_of(path) in seen:
            raise ConfigError(
                f"{job.where}: `reuse`: {path} is the job's own output, or is given twice. Name outputs of earlier "
                "runs, each once."
            )
        seen.add(place_of(path))
    if (cascade := job.spec.cascade) is not None and place_of(cascade.calibration) not in seen:
        paths += [cascade.calibration] if is_run(cascade.calibration, job.storage) else []
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
        known = [
            (index, place)
            for index, place in enumerate(self.find(work.pairs, keys))
            if place is not None and not work.pairs[index].broken_text
        ]
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
        options, cache = self.job.spec.labeler, self.answer_cache
        reused = (work.pairs[index] for index in reversed(indexes))  # the first row of each group is kept
        groups = {(pair.query_id, pair.query, pair.context, repr(pair.columns)): pair for pair in reused}
        for pair in groups.values():
            try:
                first = next(self.job.labeler.label(pair))
            except (StopIteration, VerdictError):
                continue
            again = asked_again(first, options)
            for sample in range(options.samples):
                for attempt in range(options.attempts):
                    found = cache.known.get(cache.key(again if attempt else first, work.round, sample, attempt))
                    if found is None:
                        break
                    work.answers.append(found)


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
        # one that is still in flight moves to the end once answered, and the next answer sweeps again
        while len(self) > SHARED_ANSWERS_KEPT and next(iter(self.values())).answer is not None:
            self.popitem(last=False)


# ------------------------------------------------------------------------------
# Answers of chunks that a run left unfinished: kept in `refused/`, so that the run that continues need not ask them
# again. Those that could not be read are listed for people too.
#
# A committed chunk has its own in its files, and the file here is no longer looked at. Nothing depends on one.


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
    with contextlib.suppress(ValueError):  # the file is damaged or gone
        held = json.loads(read_if_there(store, _name(chunk)) or b"{}")
        if version_of(held) == VERSION and (kept := checked(_Kept, held)).fingerprint == fingerprint:
            is_same = engine is not None and not engines_differ([kept.engine, asdict(engine)])
            return {bytes.fromhex(key): answer for key, answer in kept.answered.items()} if is_same else {}
    return {}


def _name(chunk: ChunkId) -> str:
    return f"{FOLDER}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}.{chunk.attempt}.json"


def listed(store: Store) -> Iterator[tuple[str, ChunkId]]:
    """Files by name, with their chunk; what others laid there is left alone."""
    for name in store.etags(FOLDER):
        if found := _NAME.fullmatch(name):
            yield name, ChunkId(*map(int, found.groups()))
