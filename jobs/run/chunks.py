"""Chunks in progress: their rows, counters of asks in flight, and the isolation of rows that crash the engine."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.output import shown
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import merge_samples
from relabel.manifests.asks import Answer, Ask, Distribution, Sampling
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.receipts import ChunkId
from relabel.manifests.schemas import KINDS, AnswerRow, LabelRow, QuarantineRow
from relabel.manifests.specs import LabelerOptions

# ------------------------------------------------------------------------------
# Chunks in progress: their rows, counters of asks in flight, and the isolation of rows that crash the engine.


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


class Isolation:
    """Which rows may have crashed an engine: a group that was in flight at a crash is asked apart, in ever smaller
    pieces, until one row is caught alone twice. Decides only; the journal keeps it, and the loop asks.

    Row ids are unique in a run, so that one count serves all chunks.
    """

    def __init__(self) -> None:
        self.cases: dict[ChunkId, ChunkCase] = {}
        self.num_isolated = 0
        self._caught: Counter[int] = Counter()

    @classmethod
    def of(cls, plain: dict[str, Any], still_open: Collection[ChunkId]) -> Isolation:
        """The inverse of `plain`, without the cases of chunks that are done."""
        found = cls()
        for place, groups, isolated_rows in plain["cases"]:
            if (chunk := ChunkId(*place)) in still_open:
                found.cases[chunk] = ChunkCase(groups, {int(row): why for row, why in isolated_rows})
        found.num_isolated = plain["num_isolated"]
        found._caught = Counter({int(row): times for row, times in plain["caught"]})
        return found

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "cases": [[list(chunk), one.groups, list(one.isolated_rows.items())] for chunk, one in self.cases.items()],
            "num_isolated": self.num_isolated,
            "caught": list(self._caught.items()),
        }

    def crashed(self, in_flight: dict[ChunkId, list[int]]) -> None:
        """An engine crashed at its ordinary work: what was in flight is asked apart, in groups of an eighth of it."""
        size = _piece(sum(map(len, in_flight.values())))
        for chunk, rows in in_flight.items():
            case = self.cases.setdefault(chunk, ChunkCase())
            known = {row for group in case.groups for row in group} | set(case.isolated_rows)
            case.groups += _cut([row for row in rows if row not in known], size)

    def crashed_apart(self, chunk: ChunkId, in_flight: list[int], reason: str) -> int | None:
        """A working engine crashed with these rows of one group in flight and nothing else.

        Args:
            in_flight: at least one row.
            reason: how it crashed, for the quarantine.
        Returns:
            The row that is isolated by this, if one is.
        """
        case = self.cases.setdefault(chunk, ChunkCase())
        self._drop(case, set(in_flight))
        if len(in_flight) > 1:
            case.groups[:0] = _cut(in_flight, _piece(len(in_flight)))
            return None
        row = in_flight[0]
        if row in case.isolated_rows:  # by another worker that was at the same chunk
            return row
        self._caught[row] += 1
        if self._caught[row] < TIMES_CAUGHT:
            case.groups.insert(0, [row])
            return None
        case.isolated_rows[row] = (
            f"the engine went down {self._caught[row]} times while it was asked this row and nothing else: {reason}"
        )
        self.num_isolated += 1
        return row

    def cleared(self, chunk: ChunkId, rows: list[int]) -> None:
        """Rows that were asked apart were answered: they are as good as any."""
        if chunk in self.cases:
            self._drop(self.cases[chunk], set(rows))
        for row in rows:
            self._caught.pop(row, None)

    def committed(self, chunk: ChunkId) -> None:
        """A chunk is durable: its case is closed."""
        case = self.cases.pop(chunk, None)
        for row in case.isolated_rows if case is not None else ():
            self._caught.pop(row, None)

    @staticmethod
    def _drop(case: ChunkCase, rows: set[int]) -> None:
        case.groups = [left for group in case.groups if (left := [row for row in group if row not in rows])]


def _piece(count: int) -> int:
    return max(1, -(-count // PIECES))


def _cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


FIRST_ANSWERS = 16
"""If none of so many answers was accepted, that is warned of: chance spoils some, and a wrong prompt all."""
SHOWN_CHARS = 200
MOST_CHARS = 1_000
"""Of an answer's text that is passed on while the run goes on."""


@dataclass(frozen=True, slots=True)
class RefusedAnswer:
    """An answer that could not be read.

    Args:
        attempt: which of the row's attempts at this stage it was, from 1.
        status: what the row would be quarantined as.
        finish: how the engine ended it.
    """

    row_id: int
    stage: str
    attempt: int
    status: str
    finish: str
    reason: str
    text: str

    def line(self) -> str:
        """Which one it was, and the text's first line that is not empty, as a terminal may show it."""
        first = next((line for line in self.text.splitlines() if line.strip()), "") or "(no text)"
        return f"row {self.row_id}, {self.stage}, {self.status}: {_live_cut(self.reason)}: {_live_cut(first)}"


@dataclass(slots=True)
class StageSeen:
    """Of one stage's answers: how many, those of them to a first attempt, and their tokens."""

    answers: int = 0
    first_attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, answer: Answer, *, is_first: bool) -> None:
        """Another answer."""
        self.answers += 1
        self.first_attempts += is_first
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += answer.output_tokens

    def tokens(self) -> dict[str, int]:
        """By the names that `Progress` has for them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }


@dataclass(slots=True)
class Live:
    """What goes on inside the chunks under way, of one worker or of several together; an answer that several rows share
    counts once.

    Args:
        in_flight: asks that the engine has.
        refused: answers by the status that their rows would be quarantined as.
        begun_chunks, begun_rows, rows_in: chunks that are begun and not done, their rows, and those of these that are
            in.
    """

    in_flight: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    last_refused: RefusedAnswer | None = None
    begun_chunks: int = 0
    begun_rows: int = 0
    rows_in: int = 0

    def count(self, read_as: Sequence[RefusedAnswer | None]) -> None:
        """Count an answer.

        Args:
            read_as: of each row that it is for; None where it could be read, of which one is enough.
        """
        failed = [one for one in read_as if one is not None]
        if failed:
            self.last_refused = failed[-1]
        if len(failed) < len(read_as):
            self.accepted += 1
        else:
            self.refused[failed[-1].status] += 1

    def add(self, other: Live) -> None:
        """Add another worker's."""
        self.in_flight += other.in_flight
        self.accepted += other.accepted
        self.refused.update(other.refused)
        self.last_refused = other.last_refused or self.last_refused
        self.begun_chunks += other.begun_chunks
        self.begun_rows += other.begun_rows
        self.rows_in += other.rows_in

    def in_short(self) -> Live:
        """The same with no more of the last refused answer than anybody shows."""
        last = self.last_refused
        return self if last is None else replace(self, last_refused=replace(last, text=last.text[:MOST_CHARS]))

    def answers_text(self) -> str:
        """Answers by what became of them: `41 answered: 25 accepted, 16 refused (14 format, 2 truncated)`."""
        refused = self.refused.total()
        by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(self.refused.items()))
        return f"{self.accepted + refused:,} answered: {self.accepted:,} accepted, {refused:,} refused" + (
            f" ({by_status})" if by_status else ""
        )

    def warning(self) -> str | None:
        """What to say where the first answers were all refused."""
        if self.accepted or self.refused.total() < FIRST_ANSWERS or self.last_refused is None:
            return None
        why = "the server or engine does not answer, or refuses"
        if self.refused.keys() - {"engine", "refused", "overlong"}:
            why = "the model may be too small for this labeler, or its room to answer too short"
        return (
            f"none of the first {self.refused.total():,} answers was accepted ({', '.join(sorted(self.refused))}): "
            f"{why}. `relabel ask` shows whole answers. The last one: {self.last_refused.line()}"
        )


def _live_cut(text: str) -> str:
    line = shown(" ".join(text.split()))
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"


class ChunkWork:
    """A chunk from its first row read to its commit: its pairs, the rows that are in, and what its asks cost.

    `apart` are groups of places whose rows are asked before the others, each group with nothing else in flight: an
    engine crashed while it had them. `isolated_rows` are places whose rows are not asked any more, and why;
    `settled_rows` places whose rows stay as an earlier attempt left them.
    """

    __slots__ = (
        "answered",
        "answers",
        "apart",
        "asked",
        "id",
        "isolated_rows",
        "keys",
        "known",
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
        self.apart: list[list[int]] = []
        self.isolated_rows: dict[int, str] = {}
        self.settled_rows: dict[int, QuarantineRow] = {}
        self.sources: Counter[int] = Counter()  # rows reused, by the number of the earlier output
        self.answers: list[AnswerRow] = []
        self.reused_answers = 0
        self.refused: list[RefusedAnswer] = []
        self.answered: dict[bytes, Answer] = {}  # by the key of their ask; those that rows share are left out
        self.known: dict[bytes, Answer] = {}  # likewise, of an execution that was stopped
        self.started_s = time.perf_counter()
        self.started_clock = time.time()

    def apply(self, case: ChunkCase) -> None:
        """Note the suspects among the chunk's rows; ids of other rows are passed over."""
        places = {pair.row_id: index for index, pair in enumerate(self.pairs)}
        groups = [[places[row] for row in group if row in places] for group in case.groups]
        self.apart = [group for group in groups if group]
        self.isolated_rows = {places[row]: why for row, why in case.isolated_rows.items() if row in places}

    def isolate_queries(self) -> None:
        """Isolate the whole query of an isolated row: all of its rows would be asked the very same."""
        why = {self.pairs[index].query_id: reason for index, reason in self.isolated_rows.items()}
        of_pairs = ((index, why.get(pair.query_id)) for index, pair in enumerate(self.pairs))
        self.isolated_rows = {index: reason for index, reason in of_pairs if reason is not None}

    def row_without_asking(self, index: int) -> QuarantineRow | None:
        """The row of a pair that is not asked; None for one that is."""
        if index in self.isolated_rows:
            pair = self.pairs[index]
            reason = self.isolated_rows[index]
            return QuarantineRow(pair.row_id, pair.query_id, pair.doc_id, "engine", reason, [], 0, 0)
        return self.settled_rows.get(index)

    def take_over(self, index: int, row: LabelRow, source: int) -> None:
        """Settle a row by a label of an earlier output; before the loop sees the chunk."""
        self.rows[index] = row
        self.sources[source] += 1
        self.left -= 1
        self.asked -= 1

    def counts(self) -> Counter[str]:
        """Rows asked and what they were asked with, named as in `Progress`; `reused` rows were not."""
        found = Counter({"pairs": self.asked, "reused": len(self.pairs) - self.asked})
        for seen in self.stages.values():
            found.update(requests=seen.answers, **seen.tokens())
        return found

    def statuses(self) -> Counter[str]:
        """Rows that were asked and are in, by status; rows that were reused are labels."""
        found = Counter(row.status for row in self.rows if row is not None)
        found["ok"] -= self.sources.total()
        return +found

    def stage_counts(self) -> dict[str, dict[str, int]]:
        """Asks and tokens by stage, stages in order of name."""
        return {stage: {"asks": seen.answers, **seen.tokens()} for stage, seen in sorted(self.stages.items())}


# ------------------------------------------------------------------------------
# One walk of a labeler over one pair: what it asks next, and when it is asked again.


@dataclass(slots=True, eq=False)
class OpenPair:
    """A pair whose trajectories are under way; its row goes to `work.rows[index]`."""

    work: Any
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
    tries: list[dict[str, Any]] | None = None
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
        self.prompt_tokens += answer.prompt_tokens
        self.output_tokens += answer.output_tokens
        self.refused_as = None
        assert self.ask is not None
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
        if self.tries is None:
            self.tries = []
        self.tries.append(
            {
                "stage": self.ask.stage,
                "attempt": self.attempt + 1,
                "finish": answer.finish,
                "text": answer.text,
                "reason": error.reason if not answer.detail else f"{error.reason} ({answer.detail})",
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


def _is_distribution(found: Distribution, num_labels: int) -> bool:
    """Numbers that can be probabilities. A model whose numbers overflow (float16, one long document) gives NaN, and
    NaN's argmax is 0.
    """
    probs = found.probs
    # every comparison with NaN is false, so NaN fails here too
    return (
        len(probs) == num_labels
        and min(probs) >= 0.0
        and abs(sum(probs) - 1.0) < 1e-3
        and 0.0 <= found.outside_mass <= 1.0
    )


# ------------------------------------------------------------------------------
# What a labeler, ours or one from elsewhere, may put into the columns of its own: what they hold as it is.
#
# Checked at each label: Arrow would say so at the commit of a chunk alone, in its own words, cut 2.5 to 2, drop a key.


def _holds(kind: pa.DataType, value: Any) -> bool:
    """Whether a column of a kind keeps a value that is not None as it is."""
    if pa.types.is_list(kind):
        is_list = isinstance(value, list | tuple | np.ndarray)
        return is_list and all(one is not None and _holds(kind.value_type, one) for one in value)
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
    pair = open_pair.pair
    outcomes = open_pair.outcomes
    if len(outcomes) == 1:
        only = outcomes[0]
        if only.label is None:
            return _quarantined(pair, outcomes)
        return _labelled(open_pair, only.label, None, only.prompt_tokens, only.output_tokens)
    outcomes.sort(key=lambda outcome: outcome.sample)
    labels = [outcome.label for outcome in outcomes if outcome.label is not None]
    if 2 * len(labels) <= len(outcomes):
        return _quarantined(pair, outcomes)
    merged = merge_samples(labels)
    if len(labels) < len(outcomes):
        merged.flags.append("samples_missing")
    return _labelled(
        open_pair,
        merged,
        [_sample(outcome) for outcome in outcomes],
        sum(outcome.prompt_tokens for outcome in outcomes),
        sum(outcome.output_tokens for outcome in outcomes),
    )


def _labelled(
    open_pair: OpenPair, label: Label, samples: list[dict[str, Any]] | None, prompt_tokens: int, output_tokens: int
) -> LabelRow:
    pair = open_pair.pair
    distribution = label.distribution
    return LabelRow(
        pair.row_id,
        pair.query_id,
        pair.doc_id,
        "ok",
        label.grade,
        distribution.probs if distribution else None,
        distribution.outside_mass if distribution else None,
        distribution.expected if distribution else None,
        [span._asdict() for span in label.evidence],
        label.intent,
        label.reasoning,
        label.flags,
        samples,
        prompt_tokens,
        output_tokens,
        False,
        open_pair.work.keys[open_pair.index],
        None,
        label.columns,
    )


def _sample(outcome: Trajectory) -> dict[str, Any]:
    if outcome.label is None:
        assert outcome.failure is not None
        return {"status": outcome.failure.status, "grade": None, "probs": None, "outside_mass": None}
    distribution = outcome.label.distribution
    return {
        "status": "ok",
        "grade": outcome.label.grade,
        "probs": list(distribution.probs) if distribution else None,
        "outside_mass": distribution.outside_mass if distribution else None,
    }


def _quarantined(pair: Pair, outcomes: list[Trajectory]) -> QuarantineRow:
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    return QuarantineRow(
        pair.row_id,
        pair.query_id,
        pair.doc_id,
        failures[0].status,
        failures[0].reason,
        [one for outcome in outcomes for one in outcome.tries or ()],
        sum(outcome.prompt_tokens for outcome in outcomes),
        sum(outcome.output_tokens for outcome in outcomes),
    )
