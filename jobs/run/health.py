"""Whether an engine has gone bad: it answers and nearly nothing can be read, or it does not answer at all.

A failed row is believed only once the engine was seen to work after it. Until then its chunk waits, uncommitted, so
that a stop leaves the row open. Whether it is the engine or the rows is tried out and not guessed: rows that have a
label are asked again (at a run's start, a made-up pair), and an engine that reads these has not gone bad.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from relabel.jobs.run.chunks import ChunkWork, Trajectory
from relabel.jobs.run.progress import RefusedAnswer
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.manifests.asks import Answer
from relabel.manifests.errors import UnreadableError
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow

WINDOW = 32
"""Asks in a row of which one at most was answered well, before the engine is suspected."""
CHANCE = 1e-8
"""Suspected only if that is less likely than this at the rate of good answers before: of a weak model, one of three
good, it takes some 50 asks, and a run of a million rows is still not suspected for nothing.
"""
CONTROLS = 8
"""Rows asked again to find out; if fewer than half of them are good, the engine has gone bad."""
LABELLED_KEPT = 64
"""Labelled pairs kept to choose those from, so that they come from several queries."""
HOPELESS = 256
"""Asks from a run's start on, nearly none of them answered well, after which a run ends even if the made-up pair can be
read: all rows may be too long for the room to answer, and the made-up pair is short.
"""
HOPELESS_SHARE = 1 / 32
HOPELESS_QUERIES = 3
"""Queries that those asks must come from at least."""
DUBIOUS = 8
"""Likewise where no more answers come, at a run's end or a stop: so many asks, and as unlikely."""
MOST_HELD = 16
"""Chunks that wait, before it is tried out whether they need to."""
CONTROL_ROUND = 1_000_000
"""Mixed into the seeds of rows that are asked again, so that a server's cache does not answer in its place."""

ANSWERED = ("stop", "length")
"""How an answer ends that came, whether it can be read or not."""


@dataclass(slots=True)
class _Stage:
    """The asks of one stage, numbered from 1 as they are answered, each by its first attempt: those that follow a bad
    one are not independent of it.

    Args:
        since: after this ask one at most went well; `good_before` of those up to it did, and `good` of all.
        last_good: number of the last that did.
        settled: number of the last ask when good rows were asked again with success.
    """

    seen: int = 0
    good: int = 0
    since: int = 0
    good_before: int = 0
    last_good: int = 0
    settled: int = -1
    queries: set[str] = field(default_factory=set)
    last_refused: RefusedAnswer | None = None

    def add_good(self) -> None:
        if self.last_good > self.since:
            self.since = self.last_good
            self.good_before = self.good
        self.seen += 1
        self.good += 1
        self.last_good = self.seen

    def add_bad(self, query_id: str, refused: RefusedAnswer) -> None:
        self.seen += 1
        self.last_refused = refused
        if len(self.queries) < HOPELESS_QUERIES:
            self.queries.add(query_id)

    def settle(self) -> None:
        self.since = self.settled = self.seen
        self.good_before = self.good

    def is_in_doubt(self, number: int) -> bool:
        """Whether what failed when so many asks were seen may be the engine's fault: it takes two good ones since to
        tell.
        """
        return self.since <= number and self.settled < number

    @property
    def num_asks(self) -> int:
        """Since what is settled."""
        return self.seen - self.since

    @property
    def num_bad(self) -> int:
        return self.num_asks - (self.good - self.good_before)

    def is_unlikely(self, least: int) -> bool:
        """Whether the last asks are at least so many, and went worse than by chance."""
        if self.num_asks < least:
            return False
        rate = (self.good_before + 1) / (self.since + 2)
        chance = (1 - rate) ** self.num_asks
        if self.num_bad < self.num_asks:
            chance += self.num_asks * rate * (1 - rate) ** (self.num_asks - 1)
        return chance < CHANCE

    @property
    def is_hopeless(self) -> bool:
        is_nearly_none = self.good <= self.seen * HOPELESS_SHARE
        return self.seen >= HOPELESS and is_nearly_none and len(self.queries) >= HOPELESS_QUERIES


class Health:
    """How the answers of one engine have gone so far.

    Args:
        labeler: who reads the answers.
        minds_unreadable: an answer that can't be read is a bad one. Else only those are that never came: at a retry,
            whose rows are chosen for having failed, and where the job says so.
        is_late: answers come hours later, many together and each asked for many times over, so that at a run's end
            nothing is tried out for the sake of a few that did not come.
    """

    def __init__(self, labeler: Labeler, *, minds_unreadable: bool, is_late: bool = False) -> None:
        self._labeler = labeler
        self._minds_unreadable = minds_unreadable
        self._is_late = is_late
        self._has_gone_bad = False
        self._stages = defaultdict[str, _Stage](_Stage)
        self._labelled: deque[Pair] = deque(maxlen=LABELLED_KEPT)

    def saw(
        self,
        stage: str,
        pair: Pair,
        answer: Answer,
        refused: RefusedAnswer | None,
    ) -> None:
        """Take note of the answer to a first attempt.

        Args:
            pair: one that it is for.
            refused: why it could not be read; None where it could.
        """
        seen = self._stages[stage]
        if refused is None or (answer.finish in ANSWERED and not self._minds_unreadable):
            seen.add_good()
        elif refused.status != "overlong":  # which is the row's own length
            seen.add_bad(pair.query_id, refused)

    def labelled(self, pair: Pair) -> None:
        """Take note of a pair that was asked and has a label."""
        self._labelled.append(pair)

    def failed(self, work: ChunkWork, trajectories: list[Trajectory]) -> None:
        """Doubt a chunk for the sake of a row that has just failed, until the engine is seen to work.

        Args:
            trajectories: that failed; the row's own fault, such as a text that can't be asked, is no reason to doubt.
        """
        for walk in trajectories:
            if walk.ask is None or not walk.tries or walk.failure is None or walk.failure.status == "overlong":
                continue
            is_unanswered = walk.tries[-1]["finish"] not in ANSWERED
            if is_unanswered or self._minds_unreadable:
                work.doubts[walk.ask.stage] = self._stages[walk.ask.stage].seen
                work.lacks_answers |= is_unanswered

    def is_in_doubt(self, work: ChunkWork) -> bool:
        """Whether nothing has shown yet that the engine still worked when rows of this chunk failed."""
        return any(self._stages[stage].is_in_doubt(number) for stage, number in work.doubts.items())

    def num_seen(self, stage: str) -> int:
        """How many asks of a stage were seen so far."""
        return self._stages[stage].seen

    def is_believed(self, stage: str, number: int) -> bool:
        """Whether the engine was seen to work after so many asks of a stage."""
        return not self._stages[stage].is_in_doubt(number)

    def is_dubious(self, work: ChunkWork, *, at_stop: bool) -> bool:
        """Whether a chunk in doubt may not be committed as it is where no more answers come. A few unreadable answers
        at the end may: chance spoils some.

        Args:
            at_stop: there is more to ask, and another run for it; else this is the end, where rows of a run without
                any label have failed for good.
        """
        if work.lacks_answers and (at_stop or not self._is_late):
            return True
        is_long = any(self._stages[stage].is_unlikely(DUBIOUS) for stage in work.doubts)
        return is_long and (at_stop or bool(self._labelled))

    @property
    def is_suspect(self) -> bool:
        """Whether it is time to ask good rows again."""
        return any(stage.is_unlikely(WINDOW) for stage in self._stages.values())

    @property
    def is_going_badly(self) -> bool:
        """Whether the last unreadable answers are better not kept for the run that goes on, however this one ends."""
        if self._has_gone_bad:
            return True
        return any(stage.is_unlikely(DUBIOUS) or stage.is_hopeless for stage in self._stages.values())

    def settle(self) -> None:
        """The engine works: what failed so far was the rows."""
        for stage in self._stages.values():
            stage.settle()

    def refuse_hopeless(self) -> None:
        """Raise UnreadableError where nearly nothing could be read since the start."""
        if not self._minds_unreadable or len(self._labelled) >= CONTROLS:
            return
        for name, stage in self._stages.items():
            if stage.is_hopeless:
                raise self._error(name, stage, f"{stage.seen - stage.good:,} of the first {stage.seen:,} answers", "")

    def controls(self) -> Iterator[Pair]:
        """Pairs to ask again: the latest with a label, of as many queries as there are; a made-up one where too few
        have one and the labeler reads nothing that such a pair lacks.
        """
        by_query = {pair.query_id: pair for pair in self._labelled}
        chosen = list(by_query.values())[-CONTROLS:]
        others = [pair for pair in self._labelled if pair not in chosen]
        missing = CONTROLS - len(chosen)
        if missing > 0:
            chosen += others[-missing:]
        yield from chosen
        reads = self._labeler.reads
        if len(chosen) < CONTROLS and not (reads.columns or reads.siblings):
            yield EXAMPLE

    def judge(self, controls: ChunkWork, *, at_end: bool) -> None:
        """Settle what failed so far, or end the run, by what became of the pairs that were asked again.

        Args:
            at_end: they were asked since no more answers come. Where these went no worse than by chance, it is about
                asks without an answer alone, and any answer is a good one.
        Raises:
            UnreadableError: the engine has gone bad.
        """
        is_unlikely = any(stage.is_unlikely(DUBIOUS) for stage in self._stages.values())
        minds_unreadable = self._minds_unreadable and (is_unlikely or not at_end)
        good = 0
        for row in controls.rows:
            is_answered = isinstance(row, QuarantineRow) and bool(row.tries) and row.tries[-1]["finish"] in ANSWERED
            good += isinstance(row, LabelRow) or (is_answered and not minds_unreadable)
        if 2 * good >= len(controls.rows):
            self.settle()
            return
        name, stage = max(self._stages.items(), key=lambda item: item[1].num_bad)
        kind = "has a label" if self._labelled else "is made up"
        what = f"{len(controls.rows)} rows" if len(controls.rows) > 1 else f"a row that {kind}"
        raise self._error(
            name,
            stage,
            f"{stage.num_bad:,} of the last {stage.num_asks:,} answers",
            f"Of {what} asked again, {good} went well. ",
        )

    def _error(self, name: str, stage: _Stage, which: str, tried: str) -> UnreadableError:
        self._has_gone_bad = True
        last = stage.last_refused
        what = "were of no use" if self._minds_unreadable else "did not come"
        example = ""
        look = ""
        if last is not None:
            example = f"The last one: {last.line()}. "
            look = f" --row {last.row_id}"
        go_on = "; run.stop_when_unreadable: false goes on all the same, and quarantines them"
        before = f" ({stage.good_before:,} of the {stage.since:,} before were good)" if stage.since else ""
        return UnreadableError(
            f"{which} at stage {name!r} {what}{before}. {tried}{example}So it is not taken for the rows' fault: they "
            f"stay open. Look at whole answers with `relabel ask JOB{look}`, mend the server, engine or prompt, then "
            f"run the same command again{go_on if self._minds_unreadable else ''}."
        )
