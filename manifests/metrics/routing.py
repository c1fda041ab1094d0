"""What labels of `route` are measured by, row by row: nodes that answer, headings to unfold, refusals, and lines that
were no legal action. Source: RDR2 (papers); what it leaves open is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.metrics.evidence_sets import set_f1
from relabel.manifests.metrics.judged import Judged

BATCH_ROWS = 1 << 16
"""Rows whose lists are Python's at a time."""


@dataclass(frozen=True)
class RoutingByRow:
    """Of each row, float64 [N], NaN where it has none; None where there is no such column of gold.

    Args:
        answer_f1: of the ids that answer and those of gold, where gold has any.
        expand_precision: of the headings to unfold, the share that gold has too, where gold has any; 0 where none was
            to be unfolded.
        refusal: 1 without an id, 0 with one, where gold has neither.
        expelled: lines meant as an action that were not legal.
        collapsed: 1 where no line was an action, 0 else.
    """

    answer_f1: np.ndarray | None
    expand_precision: np.ndarray | None
    refusal: np.ndarray | None
    expelled: np.ndarray
    collapsed: np.ndarray


def routing_by_row(judged: Judged) -> RoutingByRow | None:
    """None where the labels are no routes."""
    held = judged.columns
    if "answer_ids" not in held:
        return None
    expelled_N = np.asarray(held["expelled"].cast(pa.float64()).to_numpy(zero_copy_only=False))
    num_ids_N = _sizes(held["answer_ids"]) + _sizes(held["expand_ids"])  # NaN in rows of another labeler
    refused_N = held["refused"].fill_null(False).to_numpy(zero_copy_only=False)
    says_nothing_N = (num_ids_N == 0) & ~refused_N & (expelled_N == 0)
    return RoutingByRow(
        _scores(judged, "answer_ids", "gold_answer_ids", set_f1),
        _scores(judged, "expand_ids", "gold_expand_ids", _precision),
        _refusals(judged, num_ids_N),
        expelled_N,
        np.where(np.isnan(num_ids_N), np.nan, says_nothing_N),
    )


def _sizes(lists: pa.Array) -> np.ndarray:
    """How many numbers each list holds, NaN where it is null."""
    return np.asarray(pc.list_value_length(lists).cast(pa.float64()).to_numpy(zero_copy_only=False))


def _scores(
    judged: Judged, chosen: str, wanted: str, score: Callable[[list[int], list[int]], float]
) -> np.ndarray | None:
    """The score of each row whose label has ids and whose gold has at least one."""
    if wanted not in judged.columns:
        return None
    has_N = ~np.isnan(_sizes(judged.columns[chosen])) & (_sizes(judged.columns[wanted]) > 0)
    score_N = np.full(len(has_N), np.nan)
    rows = np.flatnonzero(has_N)
    for start in range(0, len(rows), BATCH_ROWS):
        some = rows[start : start + BATCH_ROWS]
        lists = (judged.columns[name].take(pa.array(some)).to_pylist() for name in (chosen, wanted))
        score_N[some] = [score(*pair) for pair in zip(*lists, strict=True)]
    return score_N


def _precision(chosen: list[int], wanted: list[int]) -> float:
    found = set(chosen)
    return len(found & set(wanted)) / len(found) if found else 0.0


def _refusals(judged: Judged, num_ids_N: np.ndarray) -> np.ndarray | None:
    if not {"gold_answer_ids", "gold_expand_ids"} <= judged.columns.keys():
        return None
    num_gold_N = _sizes(judged.columns["gold_answer_ids"]) + _sizes(judged.columns["gold_expand_ids"])
    return np.where((num_gold_N == 0) & ~np.isnan(num_ids_N), num_ids_N == 0, np.nan)
