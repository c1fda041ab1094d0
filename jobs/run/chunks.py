"""Chunks in progress: the walks of a labeler over their pairs, and the rows that come of them; and what is not asked
again: asks that rows share.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.run.progress import Progress, RefusedAnswer, StageSeen
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import merge_samples
from relabel.manifests.asks import Answer, Ask, Distribution, Message, Sampling
from relabel.manifests.errors import ConfigError, RelabelError, VerdictError
from relabel.manifests.labels import KINDS, AnswerRow, Label, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import ChunkId
from relabel.manifests.records import plain, readable_json
from relabel.manifests.secrets import redacted_values
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.store import Store, map_concurrent

logger = logging.getLogger(__name__)


FreshAnswer = tuple[bytes, Answer, tuple[str, int] | None]
"""The key of an ask, and its answer; of one that could not be read its stage, and how many asks were seen there by
then.
"""


class ChunkWork:
    """A chunk from its first row read to its commit: its pairs, the rows that are in, and what its asks cost.

    `apart` are groups of places whose rows are asked before the others, each group with nothing else in flight: an
    engine crashed while it had them. `isolated_rows` are places whose rows are not asked any more, and why;
    `settled_rows` places whose rows stay as an earlier attempt left them. `doubts` are the stages at which rows failed
    that may not be to blame, each with the number of asks seen there by then; `lacks_answers` says whether some of
    them never got an answer.
    """

    __slots__ = (
        "answers",
        "apart",
        "asked",
        "doubts",
        "failed",
        "fresh",
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
        self.failed = StageSeen()  # of all stages, those that no later execution is given
        self.apart: list[list[int]] = []
        self.isolated_rows: dict[int, str] = {}
        self.settled_rows: dict[int, QuarantineRow] = {}
        self.sources: Counter[int] = Counter()  # rows reused, by the number of the earlier output
        self.answers: list[AnswerRow] = []
        self.reused_answers = 0
        self.refused: list[RefusedAnswer] = []
        self.fresh: list[FreshAnswer] = []  # that are not written down yet
        self.known: dict[bytes, Answer] = {}  # of executions that were stopped or killed, by the key of their ask
        self.doubts: dict[str, int] = {}
        self.lacks_answers = False
        self.started_s = time.perf_counter()
        self.started_clock = time.time()

    def row_without_asking(self, index: int) -> QuarantineRow | None:
        """The row of a pair that is not asked; None for one that is."""
        pair = self.pairs[index]
        reason = self.isolated_rows.get(index)
        if reason is not None:
            return quarantined(pair, "engine", reason)
        return self.settled_rows.get(index) or quarantined_text(pair)

    def take_over(self, index: int, row: LabelRow, source: int) -> None:
        """Settle a row by a label of an earlier output; before the loop sees the chunk."""
        self.rows[index] = row
        self.sources[source] += 1
        self.left -= 1
        self.asked -= 1

    def try_queries(self) -> None:
        """Ask one row of each query apart, the one that was tried before if there is one: the others would be asked the
        very same, and take its answer.
        """
        row_of = {self.pairs[index].query_id: index for index in itertools.chain.from_iterable(self.apart)}
        tried = set(row_of.values())
        groups = ([index for index in group if index in tried] for group in self.apart)
        self.apart = [group for group in groups if group]

    def isolate_queries(self, *, has_documents: bool) -> None:
        """Isolate all rows of the queries of isolated rows: they would be asked the very same. Each row's reason names
        the others, and what can be done about them.

        Args:
            has_documents: the ask shows the documents of all rows of a query; else none.
        """
        tried = {self.pairs[index].query_id: index for index in self.isolated_rows}
        indexes_of: dict[str, list[int]] = {query: [] for query in tried}
        for index, pair in enumerate(self.pairs):
            if pair.query_id in tried:
                indexes_of[pair.query_id].append(index)
        for query, indexes in indexes_of.items():
            reason = self.isolated_rows[tried[query]]
            if len(indexes) > 1:
                rows = [self.pairs[index].row_id for index in indexes]
                reason = _reason_of_query(reason, self.pairs[tried[query]].row_id, rows, has_documents=has_documents)
                logger.warning("rows %s are one ask, and go to quarantine together", _numbered(rows))
            for index in indexes:
                self.isolated_rows[index] = reason

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

    def kept_counts(self) -> dict[str, int]:
        """Rows that are in and answers so far that need not be asked again, if the chunk stays open; named as in
        `Progress`.
        """
        seen = self.stages.values()
        failed = self.failed
        return {
            "pairs": self.asked - self.left,
            "requests": sum(stage.answers for stage in seen) - failed.answers,
            "prompt_tokens": sum(stage.prompt_tokens for stage in seen) - failed.prompt_tokens,
            "cached_tokens": sum(stage.cached_tokens for stage in seen) - failed.cached_tokens,
            "output_tokens": sum(stage.output_tokens for stage in seen) - failed.output_tokens,
        }


ROWS_NAMED = 20


def _reason_of_query(reason: str, tried: int, rows: Sequence[int], *, has_documents: bool) -> str:
    """Why rows of one ask are quarantined together.

    Args:
        reason: why the row is that was tried; `rows` are all of them.
    """
    text = f"row {tried}: {reason}. One ask is for rows {_numbered(rows)} of this query, so all of them are here. "
    if has_documents:
        text += (
            "If one of their documents is to blame, `relabel ask JOB --set 'labeler={name: pointwise}' --row N` goes "
            "down over it alone: write the input without it, and run into another output that reuses this one. "
        )
    return f"{text}Once the engine is mended: `relabel retry`"


def _numbered(rows: Sequence[int]) -> str:
    named = ", ".join(map(str, rows[:ROWS_NAMED]))
    return named if len(rows) <= ROWS_NAMED else f"{named} and {len(rows) - ROWS_NAMED:,} more"


def quarantined_text(pair: Pair) -> QuarantineRow | None:
    """The row of a pair whose text is not UTF-8; None for all others."""
    return quarantined(pair, "text", pair.broken_text) if pair.broken_text else None


def quarantined(pair: Pair, status: str, reason: str) -> QuarantineRow:
    """The row of a pair that was not asked."""
    return QuarantineRow(
        row_id=pair.row_id,
        query_id=pair.query_id,
        doc_id=pair.doc_id,
        status=status,
        reason=reason,
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
    """A pair whose trajectories are under way; its row goes to `work.rows[index]`.

    Args:
        number: of pairs, in the order in which they were opened.
        num_asks: requests so far.
    """

    work: ChunkWork
    index: int
    pair: Pair
    number: int
    num_asks: int = 0
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
            distribution = answer.distributions.get(decision.name)
            if distribution is not None and not _is_distribution(distribution, len(decision.labels)):
                detail = f"the engine gave no probabilities at {decision.marker}: {distribution}"
                answer = replace(answer, finish="error", detail=detail)
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
        self.attempt += 1
        self.refused_as = error.status
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


def _is_distribution(distribution: Distribution, num_labels: int) -> bool:
    """Numbers that can be probabilities. A model whose numbers overflow (float16, one long document) gives NaN, and
    NaN's argmax is 0.
    """
    # every comparison with NaN is false, so NaN fails here too
    return (
        len(distribution.probs) == num_labels
        and min(distribution.probs) >= 0.0
        and abs(sum(distribution.probs) - 1.0) < 1e-3
        and 0.0 <= distribution.outside_mass <= 1.0
    )


# ------------------------------------------------------------------------------
# What a labeler, ours or one from elsewhere, may put into the columns of its own: what they hold as it is.
#
# Checked at each label: Arrow would say so at the commit of a chunk alone, in its own words, cut 2.5 to 2, drop a key.


def _holds(kind: pa.DataType, value: Any) -> bool:
    """Whether a column of a kind keeps a value that is not None as it is."""
    if pa.types.is_list(kind):
        if not isinstance(value, list | tuple | np.ndarray):
            return False
        return all(item is not None and _holds(kind.value_type, item) for item in value)
    if isinstance(value, bool | np.bool_) != pa.types.is_boolean(kind):
        return False
    try:
        stored = pa.scalar(value, kind).as_py()
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return False
    if pa.types.is_floating(kind):
        return math.isfinite(stored)
    return bool(stored == value)


def check_columns(label: Label, declared: Mapping[str, str], *, labeler: str) -> None:
    """Every value has a column in the label files that holds it; None is a missing value.

    Args:
        declared: the columns that the labeler declares, name → kind.
    Raises:
        ConfigError: names the labeler, and the keys that no column is declared for, or the column and its value's type.
    """
    columns = label.columns
    if not isinstance(columns, dict):
        raise ConfigError(
            f"labeler {labeler}: `Label.columns` is {type(columns).__name__}; want a dict, empty where there is "
            "nothing to say."
        )
    if not columns.keys() <= declared.keys():
        strange = ", ".join(sorted(map(str, columns.keys() - declared.keys())))
        raise ConfigError(
            f"labeler {labeler}: `Label.columns` holds {strange}, for which it declares no column. It declares "
            f"{', '.join(declared) or 'none'}: add a `LabelColumn` to its `columns`."
        )
    for name, value in columns.items():
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
    pair = open_pair.pair
    outcomes = open_pair.outcomes
    if len(outcomes) > 1:
        outcomes = sorted(outcomes, key=lambda outcome: outcome.sample)
    labels: list[Label] = []
    prompt_tokens = 0
    output_tokens = 0
    for outcome in outcomes:
        prompt_tokens += outcome.prompt_tokens
        output_tokens += outcome.output_tokens
        if outcome.label is not None:
            labels.append(outcome.label)
    if 2 * len(labels) <= len(outcomes):
        failure = next(outcome.failure for outcome in outcomes if outcome.failure is not None)
        return QuarantineRow(
            row_id=pair.row_id,
            query_id=pair.query_id,
            doc_id=pair.doc_id,
            status=failure.status,
            reason=failure.reason,
            tries=list(itertools.chain.from_iterable(outcome.tries for outcome in outcomes)),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )
    label = labels[0]
    samples = None
    if len(outcomes) > 1:
        label = merge_samples(labels)
        samples = [_sample(outcome) for outcome in outcomes]
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


def _sample(outcome: Trajectory) -> dict[str, Any]:
    """One sample of several, as label files hold it."""
    label = outcome.label
    distribution = None if label is None else label.distribution
    return {
        "status": "ok" if outcome.failure is None else outcome.failure.status,
        "grade": None if label is None else label.grade,
        "probs": None if distribution is None else list(distribution.probs),
        "outside_mass": None if distribution is None else distribution.outside_mass,
    }


# ------------------------------------------------------------------------------
# Asks that several rows share: each is asked once, by its key, and its answer is kept for a while, for rows to come
# and for later runs.


SHARED_ANSWERS_KEPT = 4096
"""Answers kept for pairs still to come; rows of a query lie together, so a few would do."""


class AskKeys:
    """Identities of asks under one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._beginnings: dict[object, tuple[Message, str | None, blake2b]] = {}
        self._last: tuple[Ask, tuple[int, ...], bytes] | None = None

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """Identity of an ask, 16 bytes: what is asked, for which sample and attempt, under which seed. The seed is its
        first 63 bits.

        The answer's format is left out: it follows from the stage's name, the decisions and the labeler, which the
        fingerprint names.
        """
        last = self._last
        which = (round_number, sample, attempt)
        if last is not None and last[0] is ask and last[1] == which:
            return last[2]  # thousands of rows may share one ask of a hundred thousand characters
        digest = self._beginning(ask, which).copy()
        digest.update("".join(map(_key_text, ask.messages[1:])).encode("utf-8", "surrogatepass"))
        key = digest.digest()
        self._last = ask, which, key
        return key

    def _beginning(self, ask: Ask, which: tuple[int, ...]) -> blake2b:
        """The digest of an ask up to its first message, which is mostly one system prompt for all rows."""
        first = ask.messages[0]
        settled = (ask.stage, ask.max_tokens, ask.prefill, ask.sampling, ask.decisions, *which)
        known = self._beginnings.get(settled)
        if known is not None and known[0] is first and known[1] == ask.shared_by:
            return known[2]
        text = f"{self._seed}|{settled!r}{ask.shared_by or ''}{_key_text(first)}"
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
        self._beginnings[settled] = first, ask.shared_by, digest
        return digest


def _key_text(message: Message) -> str:
    text = "\x1f".join(message.parts)
    return f"\x1e{message.role}{len(text)}{text}"


@dataclass(slots=True, eq=False)
class SharedAsk:
    """A shared ask: who waits for it, then its answer; what the answer is kept under for later runs, and for which
    chunk it was last kept until that is committed.
    """

    answer: Answer | None = None
    kept_as: bytes | None = None
    kept_for: ChunkId | None = None
    waiters: list[Trajectory] = field(default_factory=list)


class SharedAsks(OrderedDict[bytes, SharedAsk]):
    """Shared asks by key; those answered last are at the end."""

    def forget_old(self) -> None:
        """Keep `SHARED_ANSWERS_KEPT` at most, and all that are in flight."""
        # one that is still in flight moves to the end once answered, and the next answer sweeps again
        while len(self) > SHARED_ANSWERS_KEPT and next(iter(self.values())).answer is not None:
            self.popitem(last=False)


# ------------------------------------------------------------------------------
# Answers that could not be read, of chunks that a run left unfinished: listed in `refused/` for people. Nothing reads
# them; a committed chunk has its own in its files.


FOLDER = "refused"
VERSION = 3
_NAME = re.compile(FOLDER + r"/shard-(\d{5,})/chunk-(\d{6,})\.(\d+)\.json")


def list_refused(store: Store, unfinished: Sequence[ChunkWork]) -> None:
    """Write down what could not be read of chunks that stay open. What can't be written is warned of, once."""

    def write(work: ChunkWork) -> None:
        refused = redacted_values(plain(work.refused))
        store.put(_name(work.id), readable_json({"version": VERSION, "refused": refused}))

    try:
        for _ in map_concurrent(store, write, [work for work in unfinished if work.refused]):
            pass
    except (OSError, RelabelError, ValueError) as exc:
        logger.warning("%s/%s: what could not be read can't be listed (%s)", store.root, FOLDER, exc)


def _name(chunk: ChunkId) -> str:
    return f"{FOLDER}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}.{chunk.attempt}.json"


def refused_files(store: Store) -> Iterator[str]:
    """Names of those files; what others laid there is left alone."""
    for name in store.names(FOLDER):
        if _NAME.fullmatch(name):
            yield name
