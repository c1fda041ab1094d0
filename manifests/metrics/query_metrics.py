"""The metrics of labelers that see a query's documents together, in the order in which they are shown: those of
`evidence-set` (RES-RAG) and of `review` (R2RAG). `registry.py` lists them behind all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from relabel.manifests.metrics.judged_statistics import JudgedStatistics
from relabel.manifests.metrics.metric import Formula, Measured, Metric, mean, share
from relabel.manifests.metrics.query_level import EvidenceByQuery, ReviewByQuery
from relabel.manifests.metrics.statistics import Largest, Order, mean_of_queries

Measure = Callable[[JudgedStatistics], Mapping[str, Measured]]


def _of_evidence(value: Callable[[EvidenceByQuery], np.ndarray | None], formula: Formula = mean) -> Measure:
    """Measures the mean over queries of what their chosen evidence comes to."""

    def measure(rows: JudgedStatistics) -> Mapping[str, Measured]:
        value_G = None if rows.evidence is None else value(rows.evidence)
        return {} if value_G is None else {"": Measured(mean_of_queries(value_G), formula)}

    return measure


def _most_of_evidence(value: Callable[[EvidenceByQuery], np.ndarray]) -> Measure:
    return lambda rows: (
        {} if rows.evidence is None else {"": Measured(Largest(value(rows.evidence)), lambda most: most)}
    )


def _of_review(value: Callable[[ReviewByQuery], np.ndarray]) -> Measure:
    return lambda rows: {} if rows.review is None else {"": Measured(mean_of_queries(value(rows.review)), share)}


def _sufficiency(rows: JudgedStatistics) -> Mapping[str, Measured]:
    order = None if rows.review is None else rows.review.sufficiency
    return {} if order is None else {"": Measured(order, Order.area)}


QUERY_METRICS: tuple[Metric, ...] = (
    Metric(
        "chunks_mean",
        "chunks a query, mean",
        "lower",
        "queries",
        _of_evidence(lambda found: found.chunks),
        "`evidence-set`: different chunks chosen",
    ),
    Metric(
        "chunks_max",
        "chunks a query, most",
        "lower",
        "queries",
        _most_of_evidence(lambda found: found.chunks),
        "of one query; its interval ends at it, since no resample holds more",
    ),
    Metric(
        "tokens_mean",
        "tokens a query, mean",
        "lower",
        "queries",
        _of_evidence(lambda found: found.tokens),
        "of the chunks chosen, each once",
    ),
    Metric(
        "tokens_max",
        "tokens a query, most",
        "lower",
        "queries",
        _most_of_evidence(lambda found: found.tokens),
        "of one query, as `chunks_max`",
    ),
    Metric(
        "over_budget",
        "over budget, φ",
        "lower",
        "queries",
        _of_evidence(lambda found: found.over_budget),
        "per query, mean φ of its documents (RES-RAG, equation 8)",
        is_drawn=True,
    ),
    Metric(
        "evidence_f1",
        "evidence F1",
        "higher",
        "queries",
        _of_evidence(lambda found: found.f1),
        (
            "F1_ret (equation 13): per query, mean over its documents of 2·both / (chosen + gold chunks); both empty "
            "1, one empty 0"
        ),
        aliases=("f1_ret",),
        is_drawn=True,
    ),
    Metric(
        "exact_match",
        "exact match",
        "higher",
        "queries",
        _of_evidence(lambda found: found.exact_match, share),
        "share of queries with every gold answer among the `answers`",
        aliases=("em",),
        is_drawn=True,
    ),
    Metric(
        "hit@1",
        "Hit@1",
        "higher",
        "queries",
        _of_evidence(lambda found: found.hit_at_1, share),
        "share of queries whose first answer is any gold answer",
        is_drawn=True,
    ),
    Metric(
        "sufficient_auc",
        "AUC, sufficient",
        "higher",
        "queries",
        _sufficiency,
        "`review`: ROC area of P(yes) against `gold_sufficient`, a query once",
        aliases=("auc_sufficient",),
        is_drawn=True,
    ),
    Metric(
        "useful_precision",
        "useful: precision",
        "higher",
        "queries",
        _of_review(lambda found: found.precision),
        "per query, of the documents named useful, the share with g > 0; mean over queries where one is named",
        is_drawn=True,
    ),
    Metric(
        "useful_recall",
        "useful: recall",
        "higher",
        "queries",
        _of_review(lambda found: found.recall),
        "per query, of the documents with g > 0, the share that is named; mean over queries that have one",
        is_drawn=True,
    ),
)
