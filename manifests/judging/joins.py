"""Labels joined to gold grades, by row or by pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manifests.errors import InputError
from manifests.judging.label_sets import LabelPart
from manifests.judging.qrels import check_scale
from manifests.metrics.judged import Judged, distributions, query_codes, sample_counts
from manifests.metrics.triangle import Labelled

SHOWN = 3


@dataclass
class Join:
    """Collects judged rows part by part; memory grows with what is judged, not with what is labelled.

    Args:
        grades: K.
        num_labels: labels read.
        num_without_label: rows that hold no label (null or unreadable), which are no label.
        num_gold_null: labels whose pair or row has a null grade.
        num_unjudged: labels whose pair has no grade at all.
    """

    grades: int
    num_labels: int = 0
    num_without_label: int = 0
    num_gold_null: int = 0
    num_unjudged: int = 0
    joined_by: Counter[str] = field(default_factory=Counter)
    label_examples: list[str] = field(default_factory=list)
    judged_pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    _rows: list[tuple[int, int, str, str, list[float] | None, list[int | None] | None]] = field(default_factory=list)
    _has_queries: bool = True

    def add_by_pair(self, part: LabelPart, by_pair: dict[tuple[str, str], int | None], where: str) -> None:
        """Labels whose (query_id, doc_id) has a grade."""
        assert part.query_ids is not None
        assert part.doc_ids is not None
        missing = object()
        golds: list[Any] = [by_pair.get(pair, missing) for pair in zip(part.query_ids, part.doc_ids, strict=True)]
        is_known = [gold is not missing for gold in golds]
        self._add(part, [gold if known else None for gold, known in zip(golds, is_known, strict=True)], is_known, where)
        self.joined_by["query_id and doc_id"] += len(golds)

    def add_by_row(self, part: LabelPart, gold: Sequence[int | None], where: str, *, by: str) -> None:
        """Labels by the row of `gold` that they name; `by` says what that row is."""
        self._add(part, [gold[row] for row in part.row_ids], [True] * len(part.row_ids), where)
        self.joined_by[by] += len(part.row_ids)

    def _add(self, part: LabelPart, golds: list[int | None], is_known: list[bool], where: str) -> None:
        check_scale(
            (label for label in part.grades if label is not None), self.grades, where=where, option="--map-labels"
        )
        self._has_queries &= part.query_ids is not None
        count = len(golds)
        queries, docs = part.query_ids or [""] * count, part.doc_ids or [""] * count
        probs, samples = part.probs or [None] * count, part.samples or [None] * count
        if len(self.label_examples) < SHOWN:
            self.label_examples += [
                f"({query}, {doc})" for query, doc in zip(queries[:SHOWN], docs[:SHOWN], strict=True)
            ]
        for label, gold, known, query, doc, prob, sample in zip(
            part.grades, golds, is_known, queries, docs, probs, samples, strict=True
        ):
            if label is None:
                self.num_without_label += 1
                continue
            self.num_labels += 1
            if not known:
                self.num_unjudged += 1
            elif gold is None:
                self.num_gold_null += 1
            else:
                if prob is not None and len(prob) != self.grades:
                    raise InputError(
                        f"{where}: a distribution has {len(prob)} entries, the scale {self.grades} grades."
                    )
                self._rows.append((gold, label, query, doc, prob, sample))
                self.judged_pairs[query, doc] += 1

    @property
    def num_judged(self) -> int:
        return len(self._rows)

    @property
    def num_relabelled(self) -> int:
        """Judged rows beyond the first of their (query_id, doc_id); 0 where rows name no document."""
        if not any(pair[1] for pair in self.judged_pairs):
            return 0
        return self.num_judged - len(self.judged_pairs)

    def judged(self) -> Judged:
        """The rows as arrays; at least one row is there.

        Raises:
            InputError: a distribution is none: it does not sum to 1, or holds a negative number.
        """
        golds, labels, queries, docs, probs, samples = zip(*self._rows, strict=True)
        gold_N = np.array(golds, dtype=np.int64)
        query_N, num_queries, query_names = None, 0, None
        if self._has_queries:
            query_N, num_queries = query_codes(queries)
            query_names = sorted(set(queries))
        correct_N, sampled_N = sample_counts(samples, golds)
        return Judged(
            self.grades,
            gold_N,
            np.array(labels, dtype=np.int64),
            query_N,
            num_queries,
            list(docs),
            distributions(probs, self.grades, where="labels"),
            correct_N,
            sampled_N,
            query_names,
        )


def gather(parts: Iterable[LabelPart], *, grades: int, where: str) -> Labelled:
    """Put a set's parts together, in the order of its rows; rows without a label are counted and left out.

    Raises:
        InputError: a grade off the scale, or a distribution that is none.
    """
    rows: list[tuple[int, str, str, int, list[float] | None, list[int | None] | None]] = []
    num_without = 0
    for part in parts:
        check_scale((label for label in part.grades if label is not None), grades, where=where, option="--map-labels")
        assert part.query_ids is not None
        assert part.doc_ids is not None
        nothing: list[None] = [None] * len(part.grades)
        columns = (
            part.row_ids,
            part.query_ids,
            part.doc_ids,
            part.grades,
            part.probs or nothing,
            part.samples or nothing,
        )
        for row, query, doc, grade, prob, sample in zip(*columns, strict=True):
            if grade is None:
                num_without += 1
            else:
                rows.append((row, query, doc, grade, prob, sample))
    rows.sort(key=lambda row: row[0])
    row_ids, query_ids, doc_ids, labels, probs, samples = (
        map(list, zip(*rows, strict=True)) if rows else ([], [], [], [], [], [])
    )
    return Labelled(
        where,
        np.array(row_ids, dtype=np.int64),
        query_ids,
        doc_ids,
        np.array(labels, dtype=np.int64),
        distributions(probs, grades, where=where),
        samples,
        num_without,
    )
