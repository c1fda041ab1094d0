"""Labels beside the grades that judge them: the join, and what it left out.

Letters: N judged rows, K grades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manifests.errors import InputError


@dataclass(frozen=True)
class Judged:
    """Rows with a label and a gold grade.

    Args:
        gold, labels: int64 [N], 0..K-1.
        queries: int64 [N], 0..num_queries-1 in the order of the ids' text; None where labels name no query.
        docs: document ids; empty text where there are none.
        probs: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.
        num_correct, num_samples: int64 [N], samples equal to gold and all samples, 0 where a row has none; None where
            no row has some.
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
        raise InputError(
            f"{where}, probs: a distribution does not sum to 1 within 0.001, or holds a negative number or NaN."
        )
    probs_NK[has_N] = held / sums[:, None]  # float32 in the files: sums miss 1 by 1e-7
    return probs_NK


def query_codes(queries: Sequence[str]) -> tuple[np.ndarray, int]:
    """Queries numbered from 0 in the order of their ids' text, int64 [N], and how many there are."""
    names = {name: number for number, name in enumerate(sorted(set(queries)))}
    return np.array([names[query] for query in queries], dtype=np.int64), len(names)


def sample_counts(
    samples: Sequence[list[int | None] | None], golds: Sequence[int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Samples equal to gold, and all samples, of each row: int64 [N], 0 where a row has none; None where no row has
    some.
    """
    if not any(samples):
        return None, None
    correct = [sum(one == gold for one in row or ()) for row, gold in zip(samples, golds, strict=True)]
    return np.array(correct), np.array([len(row or ()) for row in samples])
