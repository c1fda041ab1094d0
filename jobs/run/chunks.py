"""Chunks in progress: their rows, counters of asks in flight, and the isolation of rows that crash the engine."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relabel.jobs.output import shown
from relabel.manifests.asks import Answer
from relabel.manifests.labels import Pair
from relabel.manifests.receipts import ChunkId
from relabel.manifests.schemas import AnswerRow, LabelRow, QuarantineRow

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
