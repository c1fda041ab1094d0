"""Labels joined to gold grades, by row or by pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from relabel.manifests.ids import codes_of, texts_of
from relabel.manifests.judging.further_columns import check_chunks, columns_taken
from relabel.manifests.judging.label_columns import LabelPart, put_together
from relabel.manifests.judging.pair_grades import PairGrades, taken
from relabel.manifests.judging.qrels import check_scale, grades_seen
from relabel.manifests.memory import release_unused
from relabel.manifests.metrics.judged import Judged, RowsBeside, check_widths, distributions, sample_counts
from relabel.manifests.metrics.student_matches import BY_IDS, Labelled

SHOWN = 3
_NO_IDS, _NO_NUMBERS = pa.array([], pa.large_binary()), pa.array([], pa.int64())
NOTHING = LabelPart(_NO_NUMBERS, _NO_NUMBERS, _NO_IDS, _NO_IDS)


class Join:
    """Collects judged rows part by part; memory grows with what is judged, not with what is labelled.

    Args:
        grades: K.
        pairs: of the qrels, where any label is joined by pair.
        qrels: what to call them in an error.

    Attributes:
        num_labels: labels read.
        num_without_label: rows that hold no label (null or unreadable), which are no label.
        num_gold_null: labels whose pair or row has a null grade.
        num_unjudged: labels whose pair has no grade at all.
        num_relabelled: judged rows beyond the first of their (query_id, doc_id); 0 where rows name no document.
        row_ids: int64 [N], of the judged rows, once `judged` gave them.
        is_labelled: bool [P], the pairs that a judged label has.
    """

    def __init__(self, grades: int, pairs: PairGrades | None, *, qrels: str = "gold") -> None:
        self.grades = grades
        self.qrels = qrels
        self.num_labels = self.num_without_label = self.num_gold_null = self.num_unjudged = self.num_judged = 0
        self.num_relabelled = 0
        self.row_ids = np.zeros(0, dtype=np.int64)
        self.joined_by: set[str] = set()
        self.label_examples: list[str] = []
        self.is_labelled = np.zeros(0 if pairs is None else len(pairs.keys), dtype=bool)
        self._pairs = pairs
        self._parts: list[LabelPart] = []
        self._beside: list[LabelPart] = []
        self._golds: list[np.ndarray] = []

    def add_by_pair(self, part: LabelPart, where: str) -> None:
        """Labels whose (query_id, doc_id) has a grade."""
        assert self._pairs is not None
        place_N = self._places(part)
        part = part.beside({name: taken(column, place_N) for name, column in self._pairs.columns.items()})
        self._add(part, taken(self._pairs.grades, place_N), place_N >= 0, place_N, where)
        self.joined_by.add(BY_IDS)

    def add_by_row(
        self,
        part: LabelPart,
        gold: pa.Int64Array,
        where: str,
        *,
        by: str,
        columns: Mapping[str, pa.Array] = MappingProxyType({}),
    ) -> None:
        """Labels by the row of `gold`, and of its further `columns`, that they name; `by` says what that row is."""
        everywhere = np.ones(len(part.grades), dtype=bool)
        part = part.beside(columns_taken(columns, part.row_ids))
        self._add(part, gold.take(part.row_ids), everywhere, self._places(part), where)
        self.joined_by.add(by)

    def _places(self, part: LabelPart) -> np.ndarray:
        """Where in the qrels each label's pair is, -1 for nowhere."""
        if self._pairs is None or part.query_ids is None or part.doc_ids is None:
            return np.full(len(part.grades), -1)
        return self._pairs.places(part.query_ids, part.doc_ids)

    def _add(
        self, part: LabelPart, golds: pa.Int64Array, is_known_N: np.ndarray, place_N: np.ndarray, where: str
    ) -> None:
        check_scale(grades_seen(part.grades), self.grades, where=where, option="--map-labels")
        if len(self.label_examples) < SHOWN:
            ids = ([""] * SHOWN if ids is None else texts_of(ids[:SHOWN]) for ids in (part.query_ids, part.doc_ids))
            self.label_examples += [f"({query}, {doc})" for query, doc in zip(*ids, strict=False)][: len(part.grades)]
        has_label_N, has_gold_N = (column.is_valid().to_numpy(zero_copy_only=False) for column in (part.grades, golds))
        is_judged_N = has_label_N & has_gold_N
        self.num_without_label += part.grades.null_count
        self.num_labels += int(has_label_N.sum())
        self.num_unjudged += int((has_label_N & ~is_known_N).sum())
        self.num_gold_null += int((has_label_N & is_known_N & ~has_gold_N).sum())
        self.num_judged += int(is_judged_N.sum())
        if not is_judged_N.all():
            if part.columns and part.query_ids is not None:
                self._beside.append(part.taken(pa.array(np.flatnonzero(~is_judged_N))))
            rows = pa.array(np.flatnonzero(is_judged_N))
            part, golds, place_N = part.taken(rows), golds.take(rows), place_N[is_judged_N]
        check_widths(part.probs, self.grades, where=where)
        check_chunks(part.columns, part.query_ids, part.doc_ids, where=self.qrels)
        self.is_labelled[place_N[place_N >= 0]] = True
        self._parts.append(part)
        self._golds.append(golds.to_numpy())

    def judged(self) -> Judged:
        """The rows as arrays, of which at least one is there; what was collected is given away.

        Raises:
            InputError: a distribution is none: it does not sum to 1, or holds a negative number.
        """
        has_queries = all(part.query_ids is not None for part in self._parts)
        rows, gold_N = put_together(self._parts), np.concatenate(self._golds)
        beside = put_together(self._beside) if self._beside else None
        self._parts, self._golds, self._beside = [], [], []
        self.row_ids = rows.row_ids.to_numpy()
        query_N, query_names = _numbered(rows.query_ids, len(gold_N))
        doc_N, doc_names = _numbered(rows.doc_ids, len(gold_N))
        if len(doc_names) < len(gold_N) and any(texts_of(doc_names[:2])):
            self.num_relabelled = len(gold_N) - len(np.unique(query_N * len(doc_names) + doc_N))
        release_unused()
        correct_N, sampled_N = sample_counts(rows.samples, gold_N)
        return Judged(
            self.grades,
            gold_N,
            rows.grades.to_numpy(),
            query_N if has_queries else None,
            len(query_names) if has_queries else 0,
            doc_N,
            distributions(rows.probs, self.grades, where="labels"),
            correct_N,
            sampled_N,
            query_names if has_queries else None,
            rows.columns,
            None if beside is None else RowsBeside.of(beside.query_ids, query_names, beside.columns),
        )


def _numbered(ids: pa.LargeBinaryArray | None, num_rows: int) -> tuple[np.ndarray, pa.LargeBinaryArray]:
    """See `codes_of`; what is missing has the empty text for an id."""
    return codes_of((pa.nulls(num_rows, pa.large_binary()) if ids is None else ids).fill_null(b""))


def gather(parts: Iterable[LabelPart], *, grades: int, where: str) -> Labelled:
    """Put a set's parts together, in the order of its rows; rows without a label are counted and left out.

    Raises:
        InputError: a grade off the scale, or a distribution that is none.
    """
    held: list[LabelPart] = [NOTHING]
    num_without = 0
    for part in parts:
        check_scale(grades_seen(part.grades), grades, where=where, option="--map-labels")
        num_without += part.grades.null_count
        if part.grades.null_count:
            labelled = pa.array(np.flatnonzero(part.grades.is_valid().to_numpy(zero_copy_only=False)))
            held.append(part.taken(labelled))
        else:
            held.append(part)
    whole = put_together(held)
    order = np.argsort(whole.row_ids.to_numpy(), kind="stable")
    whole = whole.taken(pa.array(order))
    assert whole.query_ids is not None
    assert whole.doc_ids is not None
    return Labelled(
        where,
        whole.row_ids.to_numpy(),
        whole.query_ids,
        whole.doc_ids,
        whole.grades.to_numpy(),
        distributions(whole.probs, grades, where=where),
        whole.samples,
        num_without,
        whole.columns,
    )
