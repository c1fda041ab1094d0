"""Chunks in progress: the walks of a labeler over their pairs, and the rows that come of them."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.run.progress import RefusedAnswer, StageSeen
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import merge_samples
from relabel.manifests.asks import Answer, Ask, Distribution, Sampling
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import KINDS, AnswerRow, Label, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import ChunkId
from relabel.manifests.specs import LabelerOptions


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
        label, samples = merge_samples(labels), [_sample(outcome) for outcome in outcomes]
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
