"""Labels beside the grades that judge them: the join, and what it left out.

Letters: N judged rows, K grades.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manifests.errors import InputError
from manifests.label_sets import LabelPart
from manifests.qrels import check_scale

SHOWN = 3


@dataclass(frozen=True)
class Judged:
    """Rows with a label and a gold grade.

    Args:
        gold, labels: int64 [N], 0..K-1.
        queries: int64 [N], 0..num_queries-1 in the order of the ids' text; None where labels name no query.
        docs: document ids; empty text where there are none.
        probs: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.
        num_correct, num_samples: int64 [N], samples equal to gold and all samples, 0 where a row has none; None where no row has some.
        query_names: the ids behind `queries`, where whoever made this kept them.
    """

    grades: int
    gold: np.ndarray
    labels: np.ndarray
    queries: np.ndarray | None
    num_queries: int
    docs: list[str]
    probs: np.ndarray | None
    num_correct: np.ndarray | None
    num_samples: np.ndarray | None
    query_names: list[str] | None = None

    @property
    def has_probs(self) -> np.ndarray:
        """Which rows have a distribution."""
        if self.probs is None:
            return np.zeros(len(self.gold), dtype=bool)
        return np.asarray(~np.isnan(self.probs[:, 0]))

    @property
    def fewest_samples(self) -> int:
        """How many samples every row has that has some; 0 where none has."""
        return 0 if self.num_samples is None else int(self.num_samples[self.num_samples > 0].min())

    @property
    def scores(self) -> np.ndarray:
        """What a row is ranked by: its expected grade where it has a distribution, else its label."""
        score_N = self.labels.astype(np.float64)
        if self.probs is not None:
            has_N = self.has_probs
            score_N[has_N] = self.probs[has_N] @ np.arange(self.grades)
        return score_N


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
        check_scale((label for label in part.grades if label is not None), self.grades, where=where, option="--map-labels")
        self._has_queries &= part.query_ids is not None
        count = len(golds)
        queries, docs = part.query_ids or [""] * count, part.doc_ids or [""] * count
        probs, samples = part.probs or [None] * count, part.samples or [None] * count
        if len(self.label_examples) < SHOWN:
            self.label_examples += [f"({query}, {doc})" for query, doc in zip(queries[:SHOWN], docs[:SHOWN], strict=True)]
        for label, gold, known, query, doc, prob, sample in zip(part.grades, golds, is_known, queries, docs, probs, samples, strict=True):
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
                    raise InputError(f"{where}: a distribution has {len(prob)} entries, the scale {self.grades} grades.")
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


def distributions(rows: Sequence[list[float] | None], grades: int, *, where: str) -> np.ndarray | None:
    """Distributions as one array: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.

    Raises:
        InputError: one is none: of another length, not summing to 1, or holding a negative number or NaN.
    """
    if not any(row is not None for row in rows):
        return None
    wrong = next((len(row) for row in rows if row is not None and len(row) != grades), None)
    if wrong is not None:
        raise InputError(f"{where}: a distribution has {wrong} entries, the scale {grades} grades.")
    none = [np.nan] * grades
    probs_NK = np.array([none if row is None else row for row in rows], dtype=np.float64)
    has_N = np.array([row is not None for row in rows])
    held = probs_NK[has_N]
    sums = held.sum(1)
    if not ((held >= 0).all() and np.allclose(sums, 1, atol=1e-3)):
        raise InputError(f"{where}, probs: a distribution does not sum to 1 within 0.001, or holds a negative number or NaN.")
    probs_NK[has_N] = held / sums[:, None]  # float32 in the files: sums miss 1 by 1e-7
    return probs_NK


def query_codes(queries: Sequence[str]) -> tuple[np.ndarray, int]:
    """Queries numbered from 0 in the order of their ids' text, int64 [N], and how many there are."""
    names = {name: number for number, name in enumerate(sorted(set(queries)))}
    return np.array([names[query] for query in queries], dtype=np.int64), len(names)


def sample_counts(samples: Sequence[list[int | None] | None], golds: Sequence[int]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Samples equal to gold, and all samples, of each row: int64 [N], 0 where a row has none; None where no row has some."""
    if not any(samples):
        return None, None
    correct = [sum(one == gold for one in row or ()) for row, gold in zip(samples, golds, strict=True)]
    return np.array(correct), np.array([len(row or ()) for row in samples])
