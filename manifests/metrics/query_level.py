"""What labelers that see a query's documents together are measured by, query by query: the evidence that was chosen
(RES-RAG), and the review of what was found (R2RAG).

Letters: N judged rows, G queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.ids import texts_of
from relabel.manifests.metrics.answers import exact_match, hit_at_1
from relabel.manifests.metrics.evidence_sets import set_f1
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.statistics import Order

BATCH_ROWS = 1 << 16
"""Rows whose lists are Python's at a time."""
SHOWN_CHARS = 60


@dataclass(frozen=True)
class EvidenceByQuery:
    """Of each query, float64 [G], NaN where it has none; None where there is no such column of gold.

    Args:
        chunks: different chunks chosen.
        tokens: of them, as `selected_tokens` counts.
        over_budget: mean φ of its rows, by what was written: a chunk named twice counts twice.
        f1: mean over its rows of the F1 of chosen and gold chunks.
        exact_match, hit_at_1: of its answers.
    """

    chunks: np.ndarray
    tokens: np.ndarray
    over_budget: np.ndarray
    f1: np.ndarray | None
    exact_match: np.ndarray | None
    hit_at_1: np.ndarray | None


@dataclass(frozen=True)
class ReviewByQuery:
    """Useful documents and sufficiency.

    Args:
        precision: of the documents named useful, the share that is, float64 [G]; NaN where none is named.
        recall: of the useful documents, the share that is named; NaN where none is useful.
        sufficiency: queries by P(yes), relevant where gold says that the documents suffice, of those that have both;
            None where gold says nothing of it.
    """

    precision: np.ndarray
    recall: np.ndarray
    sufficiency: Order | None


def evidence_by_query(judged: Judged) -> EvidenceByQuery | None:
    """None where the labels choose no chunks.

    Raises:
        InputError: rows of a query have different answers.
    """
    selected = judged.columns.get("selected")
    if selected is None or judged.queries is None:
        return None
    has_N = selected.is_valid().to_numpy(zero_copy_only=False)
    query_N = judged.queries[has_N]
    rows_G = np.bincount(query_N, minlength=judged.num_queries).astype(np.float64)
    rows_G[rows_G == 0] = np.nan

    def total(value_N: np.ndarray) -> np.ndarray:
        """A query's sum of what its rows have; NaN for a query without rows."""
        return np.asarray(np.bincount(query_N, value_N[has_N], minlength=judged.num_queries) + 0 * rows_G)

    answered = _answers(judged)
    return EvidenceByQuery(
        total(_sizes(selected)),
        total(_numbers(judged.columns["selected_tokens"])),
        total(_numbers(judged.columns["over_budget"])) / rows_G,
        _f1_by_query(judged, selected),
        _of_answers(exact_match, answered),
        _of_answers(hit_at_1, answered),
    )


def _sizes(lists: pa.ListArray) -> np.ndarray:
    """How many different numbers each list holds: int64 [N], 0 where it is null."""
    number_M, row_M = pc.list_flatten(lists).to_numpy(), pc.list_parent_indices(lists).to_numpy()
    different = np.unique(row_M * 2**16 + number_M, return_index=True)[1]  # numbers of 16 bits
    return np.bincount(row_M[different], minlength=len(lists))


def _numbers(column: pa.Array) -> np.ndarray:
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))


def _f1_by_query(judged: Judged, selected: pa.ListArray) -> np.ndarray | None:
    gold = judged.columns.get("gold_chunks")
    if gold is None or judged.queries is None:
        return None
    has_N = pc.and_(selected.is_valid(), gold.is_valid()).to_numpy(zero_copy_only=False)
    rows = pa.array(np.flatnonzero(has_N))
    chosen, wanted = selected.take(rows), gold.take(rows)
    f1_N = np.fromiter(itertools.starmap(set_f1, _pairs(chosen, wanted)), np.float64, len(rows))
    query_N = judged.queries[has_N]
    total_G = np.bincount(query_N, f1_N, minlength=judged.num_queries)
    count_G = np.bincount(query_N, minlength=judged.num_queries)
    return np.asarray(total_G / np.where(count_G > 0, count_G, np.nan))


def _pairs(first: pa.Array, second: pa.Array) -> itertools.chain[tuple[Any, Any]]:
    """Values of two columns side by side."""
    starts = range(0, len(first), BATCH_ROWS)
    return itertools.chain.from_iterable(
        zip(first[at : at + BATCH_ROWS].to_pylist(), second[at : at + BATCH_ROWS].to_pylist(), strict=True)
        for at in starts
    )


_Answered = list[tuple[Sequence[str], Sequence[str]] | None]
"""Answers and gold answers of each query that has both, [G]."""


def _answers(judged: Judged) -> _Answered | None:
    """None where there are no such columns; a query without any gold answer has none."""
    if not {"answers", "gold_answers"} <= judged.columns.keys():
        return None
    given, wanted = (of_queries(judged, name) for name in ("answers", "gold_answers"))
    return [
        None if answers is None or not gold else (answers, gold) for answers, gold in zip(given, wanted, strict=True)
    ]


def _of_answers(
    score: Callable[[Sequence[str], Sequence[str]], float], answered: _Answered | None
) -> np.ndarray | None:
    return None if answered is None else np.array([np.nan if one is None else score(*one) for one in answered])


def of_queries(judged: Judged, name: str) -> list[Any]:
    """A column's one value a query, [G], None where all of its rows are null. It is the query's: rows without a gold
    grade may hold it.

    Raises:
        InputError: rows of a query differ; names the query and two values.
    """
    assert judged.queries is not None
    found: list[Any] = [None] * judged.num_queries
    held = [(judged.queries, judged.columns[name])]
    if judged.beside is not None and name in judged.beside.columns:
        held.append((judged.beside.queries, judged.beside.columns[name]))
    for query, value in itertools.chain.from_iterable(itertools.starmap(_of_rows, held)):
        if found[query] is None:
            found[query] = value
        elif found[query] != value:
            called = query if judged.query_names is None else texts_of(judged.query_names[query : query + 1])[0]
            first, second = (str(one)[:SHOWN_CHARS] for one in (found[query], value))
            raise InputError(
                f"column `{name}`: rows of query {called} differ: {first} and {second}. Give all rows of a query the "
                "same value, or null to all but one."
            )
    return found


def _of_rows(query_N: np.ndarray, column: pa.Array) -> zip[tuple[int, Any]]:
    """Query and value of each row that has one."""
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return zip(query_N[rows].tolist(), column.take(pa.array(rows)).to_pylist(), strict=True)


def review_by_query(judged: Judged) -> ReviewByQuery | None:
    """None where the labels are no reviews.

    Raises:
        InputError: rows of a query differ in whether its documents suffice.
    """
    if "sufficient_probs" not in judged.columns or judged.queries is None:
        return None
    is_named_N, is_useful_N = judged.labels > 0, judged.gold > 0
    both_G, named_G, useful_G = (
        np.bincount(judged.queries, is_one_N, minlength=judged.num_queries)
        for is_one_N in (is_named_N & is_useful_N, is_named_N, is_useful_N)
    )
    return ReviewByQuery(
        both_G / np.where(named_G > 0, named_G, np.nan),
        both_G / np.where(useful_G > 0, useful_G, np.nan),
        _sufficiency(judged) if "gold_sufficient" in judged.columns else None,
    )


def _sufficiency(judged: Judged) -> Order:
    probs, golds = (of_queries(judged, name) for name in ("sufficient_probs", "gold_sufficient"))
    both = [
        (query, pair[1], gold)
        for query, (pair, gold) in enumerate(zip(probs, golds, strict=True))
        if pair is not None and gold is not None
    ]
    held = np.array(both, dtype=[("query", np.int64), ("prob", np.float64), ("is_enough", np.bool_)])
    return Order(held["prob"], held["is_enough"], held["query"], num_groups=judged.num_queries)
