"""Labels beside the grades that judge them: the join, and what it left out.

Letters: N judged rows, K grades.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError


@dataclass(frozen=True)
class RowsBeside:
    """Rows without a gold grade, of queries that have judged ones.

    Args:
        queries: int64 [M], numbered as the judged rows' are.
        columns: further ones, [M] each.
    """

    queries: np.ndarray
    columns: Mapping[str, pa.Array]

    @classmethod
    def of(cls, queries: pa.Array, judged: pa.Array, columns: Mapping[str, pa.Array]) -> RowsBeside:
        """Those of such rows whose query is among the judged ones, by its place there."""
        number_M = pc.index_in(queries, value_set=judged)
        rows = pa.array(np.flatnonzero(number_M.is_valid().to_numpy(zero_copy_only=False)))
        return cls(
            number_M.drop_null().to_numpy().astype(np.int64), {name: one.take(rows) for name, one in columns.items()}
        )


@dataclass(frozen=True)
class Judged:
    """Rows with a label and a gold grade.

    Args:
        gold, labels: int64 [N], 0..K-1.
        queries: int64 [N], 0..num_queries-1 in the order of the ids' text; None where labels name no query.
        docs: int64 [N], documents numbered in the order of their ids' text; all alike where there are none.
        probs: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.
        num_correct, num_samples: int64 [N], samples equal to gold and all samples, 0 where a row has none; None where
            no row has some.
        query_names: the ids behind `queries`, where whoever made this kept them.
        columns: further ones of the rows, by name: see `manifests.judging.further_columns`.
        beside: of labelled rows of these queries that have no gold grade, what they say of their query.
        lexical: float64 [N], BM25 of query and document; None where their texts are not known.
    """

    grades: int
    gold: np.ndarray
    labels: np.ndarray
    queries: np.ndarray | None
    num_queries: int
    docs: np.ndarray
    probs: np.ndarray | None
    num_correct: np.ndarray | None
    num_samples: np.ndarray | None
    query_names: pa.LargeBinaryArray | None = None
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    beside: RowsBeside | None = None
    lexical: np.ndarray | None = None

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


def distributions(lists: pa.LargeListArray | None, grades: int, *, where: str) -> np.ndarray | None:
    """Distributions as one array: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.

    Raises:
        InputError: one is none: of another length, not summing to 1, or holding a negative number or NaN.
    """
    if lists is None or lists.null_count == len(lists):
        return None
    check_widths(lists, grades, where=where)
    flat = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
    held: np.ndarray = flat.astype(np.float64).reshape(-1, grades)
    sums = held.sum(1)
    if not ((held >= 0).all() and np.allclose(sums, 1, atol=1e-3)):
        raise InputError(
            f"{where}, probs: a distribution does not sum to 1 within 0.001, or holds a negative number or NaN."
        )
    held /= sums[:, None]  # float32 in the files: sums miss 1 by 1e-7
    if not lists.null_count:
        return held
    probs_NK = np.full((len(lists), grades), np.nan)
    probs_NK[lists.is_valid().to_numpy(zero_copy_only=False)] = held
    return probs_NK


def check_widths(lists: pa.LargeListArray | None, grades: int, *, where: str) -> None:
    """Every distribution has K entries.

    Raises:
        InputError: one has another number.
    """
    if lists is not None:
        sizes = pc.list_value_length(lists).drop_null().to_numpy()
        wrong = sizes[sizes != grades]
        if len(wrong):
            raise InputError(f"{where}: a distribution has {wrong[0]} entries, the scale {grades} grades.")


def sample_counts(samples: pa.LargeListArray | None, gold_N: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Samples equal to gold, and all samples, of each row: int64 [N], 0 where a row has none; None where no row has
    some.
    """
    if samples is None:
        return None, None
    size_N = pc.list_value_length(samples).fill_null(0).to_numpy()
    if not size_N.any():
        return None, None
    row_M = np.repeat(np.arange(len(size_N)), size_N)
    grade_M = pc.list_flatten(samples).to_numpy(zero_copy_only=False)  # NaN where a sample failed
    return np.bincount(row_M[grade_M == gold_N[row_M]], minlength=len(size_N)), size_N
