"""A chunk under way, from its first row read to its commit."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from relabel.jobs.running.isolation import ChunkCase
from relabel.jobs.running.live import RefusedAnswer, StageSeen
from relabel.manifests.asks import Answer
from relabel.manifests.labels import Pair
from relabel.manifests.runs.receipts import ChunkId
from relabel.manifests.schemas import AnswerRow, LabelRow, QuarantineRow


class ChunkWork:
    """A chunk under way: its pairs, the rows that are in, and what its asks cost.

    `apart` are groups of places whose rows are asked before the others, each group with nothing else in flight: an
    engine went down while it was at them. `isolated_rows` are places whose rows are not asked any more, and why;
    `settled_rows` places whose rows stay as an earlier attempt left them.
    """

    __slots__ = (
        "answered",
        "answers",
        "apart",
        "asked",
        "id",
        "is_dropped",
        "isolated_rows",
        "keys",
        "known",
        "left",
        "opened",
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
        self.opened = 0
        self.is_dropped = False  # given up at a stop: nothing more is asked for it
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
        """Note what is held against the chunk's rows; ids of other rows are passed over."""
        places = {pair.row_id: index for index, pair in enumerate(self.pairs)}
        groups = [[places[row] for row in group if row in places] for group in case.groups]
        self.apart = [group for group in groups if group]
        self.isolated_rows = {places[row]: why for row, why in case.isolated_rows.items() if row in places}

    def isolate_queries(self) -> None:
        """Spread what is held against a row over its query: all of its rows would be asked the very same."""
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
