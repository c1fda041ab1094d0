"""Gold of rows that a student's and a teacher's labels share."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.jobs.evaluate.judging import gold_of, load_pairs, seen_by
from relabel.jobs.evaluate.lexical import lexical_scores
from relabel.manifests.judging.further_columns import check_chunks, columns_taken
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.judging.pair_grades import taken
from relabel.manifests.metrics.student_matches import BY_IDS, Labelled, Match
from relabel.manifests.storage.context import Storage

Both: TypeAlias = tuple[LabelSet, LabelSet]
"""Teacher and student."""


class _MatchedGold(NamedTuple):
    """Gold of matched rows: how they meet it, their grades, whether each has one at all, and further columns."""

    how: str
    grades: pa.Int64Array
    is_known: np.ndarray
    columns: dict[str, pa.Array]


class GoldOfBoth:
    """The gold grades of all sets: by row of an input where they are one's own, and by pair where
    any set needs that.
    """

    def __init__(self, sets: list[LabelSet], options: JudgingOptions, storage: Storage) -> None:
        self.qrels, self._storage = str(options.qrels), storage
        self._golds = {id(one): gold_of(one, options, storage) for one in sets}
        golds = self._golds.values()
        self._pairs = load_pairs(sets, options, storage) if any(gold.by_row is None for gold in golds) else None
        self.seen = seen_by(golds, self._pairs)

    def of(self, sets: Both, rows: tuple[Labelled, Labelled], match: Match) -> _MatchedGold:
        """By row where either set can say so.

        Raises:
            InputError: a gold chunk is none of its document's.
        """
        found = self._of(sets, rows, match)
        for one, places in zip(rows, (match.teacher, match.student), strict=True):
            taken_of = pa.array(places)
            held = {**columns_taken(one.columns, taken_of), **found.columns}
            if held:
                check_chunks(held, one.query_ids.take(taken_of), one.doc_ids.take(taken_of), where=self.qrels)
        return found

    def lexical(
        self, sets: Both, rows: tuple[Labelled, Labelled], match: Match, golds: pa.Int64Array
    ) -> tuple[np.ndarray | None, list[str]]:
        """BM25 of the matched rows that have a grade, and why there is none: see `lexical_scores`."""
        number, notes = int(sets[0].plan is None), list[str]()
        judged = golds.is_valid().to_numpy(zero_copy_only=False)
        row_ids = rows[number].row_ids[(match.teacher, match.student)[number][judged]]
        return lexical_scores(sets[number], row_ids, self._storage, notes), notes

    def _of(self, sets: Both, rows: tuple[Labelled, Labelled], match: Match) -> _MatchedGold:
        for labels, held, places in zip(sets, rows, (match.teacher, match.student), strict=True):
            gold = self._golds[id(labels)]
            if gold.by_row is not None:
                row_ids = pa.array(held.row_ids[places])
                columns = columns_taken(gold.columns, row_ids)
                return _MatchedGold(gold.how, gold.by_row.take(row_ids), np.ones(len(places), dtype=bool), columns)
        assert self._pairs is not None
        matched = pa.array(match.teacher)
        place_N = self._pairs.places(rows[0].query_ids.take(matched), rows[0].doc_ids.take(matched))
        columns = {name: taken(column, place_N) for name, column in self._pairs.columns.items()}
        return _MatchedGold(BY_IDS, taken(self._pairs.grades, place_N), place_N >= 0, columns)
